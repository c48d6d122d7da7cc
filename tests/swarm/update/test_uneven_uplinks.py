"""Shards go where the uplinks are: each peer measures its own by what it sends anyway."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from swarmnet.simulation.churn import JOIN, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import Host, Simulation

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


class Uneven(Simulation):
    """Every peer has an uplink of its own."""

    def __init__(self, scenario: Scenario, uplinks: list[float], replication: int) -> None:
        super().__init__(scenario)
        self.settings = replace(self.settings, replication=replication)
        self._uplinks = uplinks
        self.seen: list[Seen] = []
        self.norms_missed = 0

    def _new_host(self) -> Host:
        up = self._uplinks[self._num_hosts]
        host = super()._new_host()
        host.link = Link(up, 1e9, 0.01)
        self.network.add(host.name, host.link)
        return host

    async def _close(self) -> None:
        for name in sorted(self.hosts):
            peer = self.monitor.members[name].peer
            replica, own = peer.replica, peer.gossip.own
            assert replica is not None
            placement = peer.averaging.ownership.placement(peer.averaging.current)
            primaries = [j for j in range(NUM_SHARDS) if placement.primary(j) == own.peer_id]
            self.norms_missed += own.totals.get("norm_missed", 0)
            self.seen.append(Seen(own.upload_bytes_per_s, replica.optimizer.owned(), primaries))
        await super()._close()


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_swarm_comes_to_own_in_proportion_to_its_uplinks(seed: int, replication: int) -> None:
    rng = random.Random(f"uneven {seed}")
    uplinks = [2.0 ** rng.randrange(20, 24) * rng.uniform(0.95, 1.05) for _ in range(5)]
    scenario = Scenario(
        seed=seed,
        peers=len(uplinks),
        stages=1,
        rounds=ROUNDS,
        until_s=UNTIL_S,
        sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=SHARD_PARAMETERS),
        check_s=5.0,
        keep_log=False,
    )

    async def simulated() -> list[Seen]:
        simulation = Uneven(scenario, uplinks, replication)
        result = await simulation.run()
        assert result.broken is None
        assert result.rounds >= ROUNDS
        assert result.shards_reset == 0, "shards move, and none is lost on the way"
        assert simulation.norms_missed == 0, "the root moves too, and no norm is waited for in vain"
        return simulation.seen

    found = run(simulated())
    shares = [len(seen.primaries) for seen in found]
    print(f"uplinks {[round(up / 1e6, 2) for up in uplinks]} MB/s, primary of {shares} shards")
    for up, seen in zip(uplinks, found, strict=True):
        assert abs(math.log2(seen.upload_bytes_per_s / up)) < 0.5, "the uplink was not measured"
        share = up / sum(uplinks)
        spread = math.sqrt(share * (1 - share) * NUM_SHARDS)
        assert abs(len(seen.primaries) - share * NUM_SHARDS) <= SPREADS * spread + 1
        assert set(seen.primaries) <= set(seen.owned)
    assert sum(len(seen.primaries) for seen in found) == NUM_SHARDS
    assert sum(len(seen.owned) for seen in found) == replication * NUM_SHARDS


def test_slow_uplinks_lose_nothing_in_the_first_round() -> None:
    """Nobody knows yet how long an exchange takes: here longer than half a minute."""
    uplinks = [0.4e6] * 4 + [0.5e6]
    scenario = Scenario(
        seed=0,
        peers=len(uplinks),
        stages=1,
        rounds=2,
        until_s=300.0,
        start_s=0.5,
        sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=SHARD_PARAMETERS),
        bounds=Bounds(converge_s=300.0, progress_s=300.0),
        check_s=5.0,
        keep_log=False,
    )

    async def simulated() -> None:
        simulation = Uneven(scenario, uplinks, 2)
        result = await simulation.run()
        assert result.broken is None
        assert result.rounds >= 2
        assert result.virtual_s > 60.0
        assert (result.samples_lost, result.reported_lost, simulation.norms_missed) == (0, 0, 0)

    run(simulated())


def test_a_newcomer_waits_for_contributions_as_long_as_the_others() -> None:
    """As primary in its first exchange, of which it has measured nothing: beside rounds of minutes,
    exchanges take a minute and more."""
    uplinks = [0.1e6] * 4 + [0.3e6] * 4
    joins = tuple(ChurnEvent(at_s, JOIN) for at_s in (420.0, 440.0, 460.0, 480.0))
    scenario = Scenario(
        seed=0,
        peers=4,
        stages=1,
        rounds=5,
        until_s=2500.0,
        start_s=0.5,
        global_batch=1000,
        sync_mode="delayed",
        service_s=4.0,
        speed_ratio=1.0,
        sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=SHARD_PARAMETERS),
        bounds=Bounds(converge_s=900.0, progress_s=900.0),
        trace=joins,
        check_s=5.0,
        keep_log=False,
    )

    async def simulated() -> None:
        simulation = Uneven(scenario, uplinks, 2)
        result = await simulation.run()
        assert result.broken is None
        assert result.rounds >= 5
        assert (result.samples_lost, result.reported_lost, simulation.norms_missed) == (0, 0, 0)

    run(simulated())
