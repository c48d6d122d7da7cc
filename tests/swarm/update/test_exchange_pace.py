"""How long an exchange takes, and is waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.protocol.codecs import NONE, UPDATE_CODECS
from swarmnet.protocol.membership.failure_detector import SUSPECT_S
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.pipeline.measurements import Measurements
from swarmnet.protocol.sync_modes import DELAYED, LOCAL, ZERO, SyncPlan
from swarmnet.simulation.clock import run
from swarmnet.swarm.replica.transitions import Transitions
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.update.exchange.pace import LONGEST_UPLOAD_S, ExchangePace
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.transport.base import Traffic
from tests.swarm.even_links import simulate_even_links

ROUND_S, EXCHANGE_S = 1000.0, 200.0
STAGE_BYTES = 40_000_000
UPLOAD = 1e6
SHARD_BYTES = 9_000_000
"""Nine seconds of such an uplink."""


def member(name: str, **said: Any) -> Record:
    return Record(name, "run", 1, 1, state=ACTIVE, stage=0, **said)


def pace_of(mode: str, members: list[Record]) -> tuple[ExchangePace, SimpleNamespace]:
    """Of a replica that has just joined."""
    replica = SimpleNamespace(
        plan=SyncPlan(mode, 100),
        current_exchange=7,
        index=0,
        num_shards=1,
        stage=SimpleNamespace(shard_sizes=[STAGE_BYTES // 4]),
        optimizer=SimpleNamespace(codec=SimpleNamespace(names=UPDATE_CODECS[NONE])),
        measured=Measurements(),
    )
    gossip = SimpleNamespace(
        view=SimpleNamespace(
            members=lambda stage, now: members, remembered=lambda stage, name, now, ask: ask()
        ),
        own=SimpleNamespace(peer_id="newcomer", upload_bytes_per_s=UPLOAD),
        spread_s=2.0,
    )
    settings = RunSettings("run", 1, 64, 1, 100, 0.0, sync_mode=mode)
    parts: Any = (Traffic(), gossip, settings, WaitLimits(), replica)
    return ExchangePace(*parts), replica


def waits(mode: str, members: list[Record], open_s: float = 0.0) -> tuple[float, float, float]:
    """For contributions, for the norm of all stages, for one shard."""

    async def asked() -> tuple[float, float, float]:
        pace, replica = pace_of(mode, members)
        replica.measured.open_s = open_s
        known = pace.waits()
        found = known.contributions_s, known.norm_s, known.call_s
        pace.close()
        return found

    return run(asked())


def test_a_newcomer_goes_by_what_most_of_the_others_say() -> None:
    others = [member(f"p{i}", last_open_s=ROUND_S, last_exchange_s=EXCHANGE_S) for i in range(3)]
    boaster = member("boaster", last_open_s=1e9, last_exchange_s=1e9)
    for known in (others, [*others, boaster]):
        contributions_s, norm_s, call_s = waits(DELAYED, known, open_s=10.0)
        assert EXCHANGE_S < contributions_s < ROUND_S
        assert EXCHANGE_S < norm_s < ROUND_S
        assert ROUND_S < call_s < 10 * ROUND_S


def test_the_slowest_uplink_is_waited_for_and_not_longer_than_that() -> None:
    limits = WaitLimits()
    fast, slow = member("fast", upload_bytes_per_s=1e9), member("slow", upload_bytes_per_s=5e5)
    claims = member("claims", upload_bytes_per_s=1.0)
    assert waits(ZERO, [fast])[0] < limits.reduce_wait_s
    contributions_s, norm_s, _ = waits(ZERO, [fast, slow])
    assert STAGE_BYTES / 5e5 < contributions_s < 10 * STAGE_BYTES / 5e5
    assert norm_s > STAGE_BYTES / 5e5
    assert waits(ZERO, [fast, claims])[0] <= LONGEST_UPLOAD_S


def test_norms_are_waited_for_as_long_as_an_update_may_wait_for_who_has_stalled() -> None:
    slow = member("slow", upload_bytes_per_s=5e5)
    for mode, known in [(ZERO, []), (ZERO, [slow]), (DELAYED, [slow])]:
        contributions_s, norm_s, _ = waits(mode, known)
        assert norm_s > contributions_s + SUSPECT_S


def test_where_nothing_is_known_who_is_slow_is_not_taken_for_stuck() -> None:
    assert waits(ZERO, [])[0] == WaitLimits().reduce_wait_s


def test_a_whole_round_that_was_seen_counts_however_short_the_others_are() -> None:
    norm_s = waits(DELAYED, [member("p", last_open_s=100.0)], open_s=ROUND_S)[1]
    assert norm_s > 0.5 * ROUND_S


def test_what_one_that_had_nobody_to_exchange_with_says_is_no_measure() -> None:
    for first_s in (0.001, EXCHANGE_S):
        alone = member("first", last_open_s=ROUND_S, last_exchange_s=first_s)
        assert waits(DELAYED, [alone])[0] > ROUND_S / 2  # the exchange runs beside a round
    quick = [member(f"p{i}", last_open_s=ROUND_S, last_exchange_s=0.001) for i in range(2)]
    assert waits(DELAYED, quick)[0] < 10.0


def test_an_exchange_without_a_part_of_ones_own_is_no_measure() -> None:
    async def asked() -> None:
        pace, _ = pace_of(ZERO, [])
        pace.durations.took(0.001, is_usual=False)
        assert pace.durations.last_s == 0.001
        assert pace.waits().contributions_s == WaitLimits().reduce_wait_s
        pace.durations.took(0.001)
        assert pace.waits().contributions_s < 10.0
        pace.close()

    run(asked())


def test_a_wait_for_who_does_not_come_is_no_measure() -> None:
    """Else each deadline were longer than the one before, as long as somebody hangs."""

    async def asked() -> None:
        pace, _ = pace_of(ZERO, [])
        pace.durations.took(1.0)
        usual_s, wait_s = pace.waits().usual_s, pace.waits().contributions_s
        for _ in range(9):
            pace.durations.took(pace.waits().contributions_s, missed={"hangs"})
        assert (pace.waits().usual_s, pace.waits().contributions_s) == (usual_s, wait_s)
        assert pace.durations.last_s == 1.0
        pace.durations.straggled("another")
        assert pace.waits().usual_s == usual_s
        pace.durations.straggled("hangs")  # it was late, no more: the next deadline has room for it
        assert pace.waits().contributions_s > wait_s
        slower_s = pace.waits().usual_s
        pace.durations.straggled("hangs")
        assert pace.waits().usual_s == slower_s
        pace.close()

    run(asked())


def turns_s(mode: str) -> float:
    """How long the second of two messages waits for the uplink."""

    async def asked() -> float:
        pace, _ = pace_of(mode, [])
        for _ in range(2):
            await pace.turn(SHARD_BYTES)
        took_s = asyncio.get_running_loop().time()
        pace.close()
        return took_s

    return run(asked())


def test_messages_take_turns_beside_a_round_and_nowhere_else() -> None:
    assert turns_s(DELAYED) == pytest.approx(SHARD_BYTES / UPLOAD)
    for mode in (ZERO, LOCAL):
        assert turns_s(mode) == 0.0


def test_an_exchange_takes_no_negative_time() -> None:
    """The clock that leaves out stalls of one's own may go back a little."""

    async def asked() -> None:
        pace, _ = pace_of(DELAYED, [])
        pace.durations.took(-0.5)
        assert pace.durations.last_s == 0.0
        pace.close()

    run(asked())


SETTLED = 10
"""Rounds in which owners get their state, and say so."""
WAY_S = 0.5
"""From one peer to another."""


def test_an_exchange_takes_six_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go to the primaries, their norms to the collectors and back, sums to the backups
    and back, and results. Beside a round nobody waits first until all have told that they have
    opened it, where what they hold stays as it is."""
    opened, begun, took = dict[int, float](), dict[int, list[float]](), list[float]()
    open_round, update = Transitions.open_round, Exchanges.make

    async def opens(transitions: Transitions, *rest: Any, **options: Any) -> None:
        await open_round(transitions, *rest, **options)
        opened[id(transitions)] = now()

    async def updates(exchanges: Exchanges, *rest: Any) -> None:
        number = exchanges.current
        if number >= SETTLED:
            assert now() == opened[id(exchanges.replica.transitions)]
            begun.setdefault(number, []).append(now())
        await update(exchanges, *rest)
        if number >= SETTLED:  # all stages wait for each other's norms
            took.append(now() - max(begun[number]))

    monkeypatch.setattr(Transitions, "open_round", opens)
    monkeypatch.setattr(Exchanges, "make", updates)
    simulate_even_links(WAY_S, peers=4, until_s=60.0, sync_mode=DELAYED)
    assert len(took) > 20
    assert max(took) < 6.9 * WAY_S, "latency varies by a tenth"


def now() -> float:
    return asyncio.get_running_loop().time()
