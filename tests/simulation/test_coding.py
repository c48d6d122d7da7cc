"""The time that coding takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarmnet.protocol.codecs import (
    BOUNDARY_CODECS,
    INT4,
    INT7,
    INT8,
    NONE,
    UPDATE_CODECS,
    boundary_codec,
)
from swarmnet.simulation.coding import (
    MEASURED,
    NO_CODING,
    CodecSpeed,
    Coding,
    CodingTime,
    PassCoding,
)
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario, small_swarm
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import simulate

ROUND = Coding({INT4: CodecSpeed(4.0, 8.0), INT7: CodecSpeed(32.0, 64.0)})
"""Bytes a second; a number is four."""


def test_coding_takes_its_bytes_over_the_rate() -> None:
    assert ROUND.encode_s(INT4, 16) == 16.0
    assert ROUND.decode_s(INT4, 16) == 8.0
    assert Coding(ROUND.speeds, factor=4.0).encode_s(INT4, 16) == 4.0
    assert Coding(ROUND.speeds, factor=math.inf).decode_s(INT4, 16) == 0.0
    assert ROUND.encode_s(NONE, 16) == ROUND.decode_s(NONE, 16) == 0.0
    with pytest.raises(KeyError):
        ROUND.encode_s(INT8, 16)


def test_activations_are_coded_forward_and_their_gradients_backward() -> None:
    """In `int4`, activations have 7 bits. The last stage goes back in its forward pass."""

    def passes(*, has_before: bool, has_after: bool) -> list[PassCoding]:
        codec = boundary_codec(INT4)
        ways = (ROUND.forward, ROUND.backward)
        return [way(codec, 16, has_before=has_before, has_after=has_after) for way in ways]

    assert passes(has_before=False, has_after=False) == [NO_CODING, NO_CODING]
    assert passes(has_before=False, has_after=True) == [PassCoding(0.0, 2.0), PassCoding(8.0, 0.0)]
    assert passes(has_before=True, has_after=True) == [PassCoding(1.0, 2.0), PassCoding(8.0, 16.0)]
    assert passes(has_before=True, has_after=False) == [PassCoding(1.0, 16.0), NO_CODING]


def test_what_a_thread_has_coded_is_taken_once() -> None:
    time = CodingTime(ROUND)
    time.encoded(INT4, 16)
    time.decoded(INT7, 16)
    time.decoded(NONE, 1000)
    assert time.take() == 17.0
    assert time.take() == 0.0


@pytest.mark.parametrize("codec", {**BOUNDARY_CODECS, **UPDATE_CODECS})
def test_every_codec_has_a_speed(codec: str) -> None:
    ways, shards = BOUNDARY_CODECS.get(codec), UPDATE_CODECS.get(codec)
    names = [ways.activations, ways.gradients] if ways else []
    names += [shards.contributions, shards.sums, shards.results] if shards else []
    for name in names:
        assert name == NONE or MEASURED[name].encode > 0 < MEASURED[name].decode


def test_where_nothing_is_coded_the_history_is_that_of_no_time() -> None:
    scenario = replace(small_swarm(4), keep_log=False)
    codings = [Coding(factor=f, is_beside=b) for f in (0.001, math.inf) for b in (True, False)]
    first, *others = (simulate(replace(scenario, coding=coding)) for coding in codings)
    assert others == [first] * 3


@pytest.mark.parametrize(
    ("is_beside", "each_s", "work_s"),
    [(False, 0.05, 0.4), (True, 0.02, 0.2), (True, 0.15, 0.4)],
    ids=["the device codes", "a coder keeps up", "both have too much to do"],
)
def test_coding_beside_the_device_takes_only_what_it_cannot_hide(
    is_beside: bool, each_s: float, work_s: float
) -> None:
    """A swarm bound by its middle stage, where a microbatch is computed in 0.2 s, twice decoded and
    twice encoded. A device that codes does all in turn; where a coder is beside it, they divide the
    work."""
    sizes = Sizes(activation_numbers=4096, codec=INT8)
    speed = CodecSpeed(4 * 4096 / each_s, 4 * 4096 / each_s)
    scenario = Scenario(
        seed=1,
        peers=3,
        stages=3,
        until_s=20.0,
        warmup_s=6.0,
        global_batch=1024,
        sizes=sizes,
        coding=Coding({INT8: speed}, is_beside=is_beside),
        service_s=0.2,
        speed_ratio=1.0,
        keep_log=False,
    )
    result = simulate(scenario)
    assert result.broken is None
    assert result.bound_per_s == pytest.approx(4 / work_s, rel=0.02)
    assert 0.85 < result.fraction_of_bound < 1.05


def test_on_a_slow_link_a_codec_is_worth_most_of_its_ratio() -> None:
    """100 Mbit/s and 50 ms; the work takes an eighth of an activation's time on the wire as fp32,
    and is coded by one core."""
    numbers = 1 << 20
    link = Link(12.5e6, 12.5e6, 0.025)
    rates = {}
    for codec in (NONE, INT8, INT4):
        scenario = Scenario(
            seed=1,
            peers=4,
            stages=4,
            until_s=24.0,
            warmup_s=8.0,
            global_batch=64,
            samples_per_microbatch=1,
            sizes=Sizes(activation_numbers=numbers, codec=codec),
            service_s=4 * numbers / 12.5e6 / 8,
            speed_ratio=1.0,
            link=link,
            sync_mode="delayed",
            keep_log=False,
        )
        result = simulate(scenario)
        assert result.broken is None
        rates[codec] = result.samples_per_s
    assert rates[INT8] > 3.2 * rates[NONE]
    assert rates[INT4] > 4.5 * rates[NONE]
