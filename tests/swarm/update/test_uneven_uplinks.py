"""Shards go where the uplinks are: each peer measures its own by what it sends anyway."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from swarmnet.simulation.churn import JOIN, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.local_steps import SyntheticLocalSteps
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import Simulation, simulate
from swarmnet.swarm.peer import Peer

NUM_SHARDS, SHARD_PARAMETERS = 80, 20_000
ROUNDS, UNTIL_S = 10, 600.0
SPREADS = 3.5
"""Standard deviations of a binomial: hashing places shards as throws of dice do."""


@dataclass(frozen=True)
class Seen:
    """Of one peer, at the end."""

    upload_bytes_per_s: float
    owned: list[int]
    primaries: list[int]
    """Shards whose primary it is, by its own word."""


def links(uplinks: list[float]) -> tuple[Link, ...]:
    """Of machines with these uplinks (bytes/s)."""
    return tuple(Link(up, 1e9, 0.01) for up in uplinks)


def seen(peer: Peer) -> Seen:
    """What a peer has measured, and what it owns."""
    replica, own = peer.replica, peer.gossip.own
    assert replica is not None
    placement = peer.exchanges.ownership.placement(peer.exchanges.current)
    primaries = [j for j in range(NUM_SHARDS) if placement.primary(j) == own.peer_id]
    return Seen(own.upload_bytes_per_s, replica.optimizer.owned(), primaries)


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_swarm_comes_to_own_in_proportion_to_its_uplinks(seed: int, replication: int) -> None:
    rng = random.Random(f"uneven {seed}")
    uplinks = [2.0 ** rng.randrange(20, 24) * rng.uniform(0.95, 1.05) for _ in range(5)]
    scenario = Scenario(
        seed=seed,
        peers=len(uplinks),
        stages=1,
        links=links(uplinks),
        rounds=ROUNDS,
        replication=replication,
        until_s=UNTIL_S,
        sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=SHARD_PARAMETERS),
        check_s=5.0,
        keep_log=False,
    )

    async def simulated() -> list[Seen]:
        simulation = Simulation(scenario)
        result = await simulation.play()
        assert result.broken is None
        assert result.rounds >= ROUNDS
        assert result.shards_reset == 0, "shards move, and none is lost on the way"
        missed = simulation.population.total("norm_missed")
        assert missed == 0, "the root moves too, and no norm is waited for in vain"
        members = simulation.monitor.members
        at_the_end = [seen(members[name].peer) for name in sorted(members)]
        await simulation.population.close()
        return at_the_end

    found = run(simulated())
    shares = [len(one.primaries) for one in found]
    print(f"uplinks {[round(up / 1e6, 2) for up in uplinks]} MB/s, primary of {shares} shards")
    for up, one in zip(uplinks, found, strict=True):
        assert abs(math.log2(one.upload_bytes_per_s / up)) < 0.5, "the uplink was not measured"
        share = up / sum(uplinks)
        spread = math.sqrt(share * (1 - share) * NUM_SHARDS)
        assert abs(len(one.primaries) - share * NUM_SHARDS) <= SPREADS * spread + 1
        assert set(one.primaries) <= set(one.owned)
    assert sum(len(one.primaries) for one in found) == NUM_SHARDS
    owners = Counter(j for one in found for j in one.owned)
    assert min(owners[j] for j in range(NUM_SHARDS)) >= replication
    on_their_way = [j for j, num in owners.items() if num > replication]
    assert len(on_their_way) <= 1, "one may move to new owners when the run ends"


def test_slow_uplinks_lose_nothing_in_the_first_round() -> None:
    """Nobody knows yet how long an exchange takes: here longer than half a minute."""
    uplinks = [0.4e6] * 4 + [0.5e6]
    scenario = Scenario(
        seed=0,
        peers=len(uplinks),
        stages=1,
        links=links(uplinks),
        rounds=2,
        until_s=300.0,
        start_s=0.5,
        sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=SHARD_PARAMETERS),
        bounds=Bounds(converge_s=300.0, progress_s=300.0),
        check_s=5.0,
        keep_log=False,
    )

    async def simulated() -> None:
        simulation = Simulation(scenario)
        result = await simulation.run()
        assert result.broken is None
        assert result.rounds >= 2
        assert result.virtual_s > 60.0
        assert (result.samples_lost, result.reported_lost) == (0, 0)
        assert simulation.population.total("norm_missed") == 0

    run(simulated())


@pytest.mark.long
def test_a_newcomer_waits_for_contributions_as_long_as_the_others() -> None:
    """As primary in its first exchange, of which it has measured nothing: beside rounds of minutes,
    exchanges take a minute and more, and end at some replicas minutes before they do at others."""
    uplinks = [0.1e6] * 4 + [0.3e6] * 4
    joins = tuple(ChurnEvent(at_s, JOIN) for at_s in (420.0, 440.0, 460.0, 480.0))
    scenario = Scenario(
        seed=3,
        peers=4,
        stages=1,
        links=links(uplinks),
        rounds=5,
        until_s=2500.0,
        start_s=0.5,
        global_batch=1000,
        sync_mode="delayed",
        service_s=4.0,
        speed_ratio=1.0,
        sizes=Sizes(num_shards=NUM_SHARDS // 4, shard_parameters=4 * SHARD_PARAMETERS),
        bounds=Bounds(converge_s=900.0, progress_s=900.0),
        trace=joins,
        check_s=5.0,
        keep_log=False,
    )

    async def simulated() -> None:
        simulation = Simulation(scenario)
        result = await simulation.run()
        assert result.broken is None
        assert result.rounds >= 5
        assert (result.samples_lost, result.reported_lost) == (0, 0)
        assert simulation.population.total("norm_missed") == 0

    run(simulated())


def test_partners_on_uneven_links_have_all_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In mode `gossip` the slower one sends for longer than the faster one waits for a question.
    What is offered is what it was before either made its step."""
    alone, offered = list[bool](), list[bool]()
    meet, offer = SyntheticLocalSteps.meet, SyntheticLocalSteps.offer
    has_met: set[tuple[SyntheticLocalSteps, int]] = set()

    def meets(
        steps: SyntheticLocalSteps, shard_index: int, theirs: Any, round_index: int
    ) -> tuple[float, float]:
        alone.append(theirs is None)
        has_met.add((steps, shard_index))
        return meet(steps, shard_index, theirs, round_index)

    def offers(steps: SyntheticLocalSteps, shard_index: int) -> Any:
        offered.append((steps, shard_index) in has_met)
        return offer(steps, shard_index)

    monkeypatch.setattr(SyntheticLocalSteps, "meet", meets)
    monkeypatch.setattr(SyntheticLocalSteps, "offer", offers)
    scenario = Scenario(
        seed=1,
        peers=2,
        max_peers=2,
        stages=1,
        links=links([12.5e6, 1.25e6]),
        rounds=8,
        until_s=300.0,
        start_s=0.5,
        sync_mode="gossip",
        local_steps=8,
        sizes=Sizes(num_shards=12, shard_parameters=50 * SHARD_PARAMETERS),
        service_s=0.4,
        bounds=Bounds(converge_s=300.0, progress_s=300.0),
        check_s=1.0,
        keep_log=False,
    )
    result = simulate(scenario)
    assert result.broken is None
    assert alone == 2 * 12 * [False]
    assert offered == 2 * 12 * [False]
