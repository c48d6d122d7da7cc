"""The end of a round, timed on a shard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from swarmnet.spec import RunSpec
from swarmnet.training.optimizer.measured import TIMED_ROUNDS, WARM_ROUNDS, measure_round_end
from tests.training.specs import small_spec


def with_sync(**values: object) -> RunSpec:
    spec = small_spec()
    return spec.model_copy(update={"sync": spec.sync.model_copy(update=values)})


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "topk"])
@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_every_codec_is_measured(mode: str, codec: str) -> None:
    spec = with_sync(mode=mode, codec=codec, shard_parameters=1 << 14)
    found = measure_round_end(spec, 1 << 20, clock=time.thread_time)
    assert found is not None
    assert all(0 < seconds < 1e-4 for seconds in found)


def test_seconds_are_those_of_a_parameter_of_the_shard() -> None:
    """By a clock that says so: 3 s alone, 8 s for two shards of one of two."""

    def times() -> Iterator[float]:
        now = 0.0
        for _ in range(WARM_ROUNDS + TIMED_ROUNDS):
            for took in (0.0, 3.0, 1.0, 8.0):
                now += took
                yield now

    clock = times()
    found = measure_round_end(with_sync(shard_parameters=1000), 10**6, clock=lambda: next(clock))
    assert found == (3.0 / 1000, 4.0 / 1000)


def test_modes_with_own_steps_are_not_measured() -> None:
    assert measure_round_end(with_sync(mode="local"), 1000) is None
