"""Mode `local` goes on with a quorum, and what is late counts in the next exchange, once. The
books of every round are checked as it closes (`simulation.invariants`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import pytest

from swarmnet.protocol import bandwidth
from swarmnet.protocol.sync_modes import LOCAL
from swarmnet.protocol.update.robust import MEDIAN_CLIP
from swarmnet.simulation import swarm
from swarmnet.simulation.churn import CRASH, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Result, Scenario
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import Simulation
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.update.exchange.exchange import Exchange
from swarmnet.swarm.update.exchange.late import LateContributions
from swarmnet.wire import Array

STEPS, ROUNDS, NUM_SHARDS = 8, 34, 4
FAST = Link(2e6, 1e7, 0.01)
SLOW = replace(FAST, up_bytes_per_s=1.5e5)
SLOWER = replace(FAST, up_bytes_per_s=1.3e4)
SLOW_PEER = "peer-0003"
SCENARIO = Scenario(
    peers=5,
    stages=1,
    links=(FAST, FAST, FAST, SLOW, FAST),
    rounds=ROUNDS,
    global_batch=20,
    samples_per_microbatch=1,
    service_s=0.25,
    speed_ratio=1.0,
    sync_mode=LOCAL,
    local_steps=STEPS,
    warmup_rounds=2,
    until_s=400.0,
    sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=40_000),
    bounds=Bounds(converge_s=60.0, progress_s=90.0),
    check_s=0.5,
    keep_log=False,
    max_peers=5,
)


LONG_UPLOAD = replace(
    SCENARIO,
    links=(FAST, FAST, FAST, SLOWER, FAST),
    bounds=Bounds(converge_s=60.0, progress_s=300.0),
    until_s=1500.0,
)


@dataclass
class Late:
    """What became of contributions that came late."""

    taken: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Exchange, shard, whose, by whom."""
    refused: list[tuple[int, int, str, str]] = field(default_factory=list)

    later: list[int] = field(default_factory=list)
    """Of those that count, how many rounds later."""

    def exchanges(self) -> list[int]:
        return sorted({exchange for exchange, *_ in self.taken})


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    seen, take = Late(), LateContributions.take

    async def looked(
        self: LateContributions, exchange: int, shard: int, sender: str, n: int, gradient: Array
    ) -> bool:
        found = await take(self, exchange, shard, sender, n, gradient)
        known = seen.taken if found else seen.refused
        if found:
            seen.later.append(self.replica.current_exchange - exchange)
        known.append((exchange, shard, sender, self.gossip.own.peer_id))
        return found

    monkeypatch.setattr(LateContributions, "take", looked)
    monkeypatch.setattr(bandwidth, "ENOUGH_BYTES", 1 << 17)  # the stage is a small one
    return seen


def played(scenario: Scenario) -> Result:
    async def simulated() -> Result:
        return await Simulation(scenario).run()

    result = run(simulated())
    assert result.broken is None
    return result


CODED = Sizes(NUM_SHARDS, 160_000, update_codec="int8")


@pytest.mark.parametrize(
    "scenario",
    [
        SCENARIO,
        replace(SCENARIO, sizes=CODED),
        pytest.param(replace(SCENARIO, fragments=2), marks=pytest.mark.long),
    ],
    ids=["plain", "coded", "in turns"],
)
def test_what_is_late_counts_in_the_next_exchange_and_nothing_is_lost(
    late: Late, scenario: Scenario
) -> None:
    """All are waited for in the warm-up, and in the last exchange."""
    result = played(scenario)
    assert result.rounds == ROUNDS
    assert (result.samples_lost, result.reported_lost) == (0, 0)
    assert not late.refused
    assert {sender for *_, sender, _ in late.taken} == {SLOW_PEER}
    assert len(set(late.taken)) == len(late.taken)
    assert late.exchanges()[0] > 1
    assert late.exchanges()[-1] < ROUNDS - 1
    assert len(late.exchanges()) >= 3


def test_an_upload_that_is_longer_than_an_exchange_is_away_counts_when_it_is_whole(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last shards come when the next exchange is over. Its sender hears so with the first of
    them, and gives up when all have come: a call that is over sends no more."""
    fail, is_giving = Exchange.fail, list[bool]()

    def gives_up(self: Exchange, error: Exception) -> None:
        is_giving.append(self._calls.is_giving)  # noqa: SLF001  as it is then
        fail(self, error)

    monkeypatch.setattr(Exchange, "fail", gives_up)
    result = played(LONG_UPLOAD)
    assert result.rounds == ROUNDS
    assert (result.samples_lost, result.reported_lost) == (0, 0)
    assert not late.refused
    assert {sender for *_, sender, _ in late.taken} == {SLOW_PEER}
    assert len(set(late.taken)) == len(late.taken)
    assert sorted(late.later)[-2] > STEPS
    assert is_giving
    assert not any(is_giving)


def test_a_robust_rule_needs_a_majority_that_it_can_see(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four contributions, of five."""
    settings = functools.partial(RunSettings, aggregation=MEDIAN_CLIP)
    monkeypatch.setattr(swarm, "RunSettings", settings)
    result = played(SCENARIO)
    assert result.rounds == ROUNDS
    assert (result.samples_lost, result.reported_lost) == (0, 0)
    assert late.exchanges() == [7, 15, 23]
    late.taken.clear()
    assert played(replace(SCENARIO, peers=4)).rounds == ROUNDS
    assert not late.taken


@pytest.mark.parametrize(
    ("at_s", "peer_id"), [(25.5, SLOW_PEER), (23.2, "peer-0002"), (30.0, "peer-0002")]
)
def test_what_is_lost_with_a_peer_is_told(late: Late, at_s: float, peer_id: str) -> None:
    """The slow one while it sends, a primary that gathers, and one that has taken what was late:
    the books of all rounds are right."""
    scenario = replace(SCENARIO, trace=(ChurnEvent(at_s, CRASH, peer_id),))
    result = played(scenario)
    assert result.rounds == ROUNDS
    assert result.faults == {CRASH: 1}
    assert late.taken
    # It may have counted a microbatch that it told nobody of.
    assert result.samples_lost - 1 <= result.reported_lost <= result.samples_lost
    if (at_s, peer_id) == (30.0, "peer-0002"):
        assert (7, 0, SLOW_PEER, peer_id) in late.taken
        assert result.reported_lost >= 24  # what was late, and what it had done itself
