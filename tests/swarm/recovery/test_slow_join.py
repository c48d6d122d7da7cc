"""A newcomer on slow links: its parameters take longer than a few rounds, which wait for them, and
the optimizer state of its shards longer still, for which nobody waits."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.update.exchange_progress import ExchangeProgress
from swarmnet.simulation.churn import JOIN, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import Simulation
from swarmnet.swarm.peer import Peer
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

STAGE = 1
DONORS = ("donor-0", "donor-1", "donor-2")
SLOW_S = 0.5
"""Of a shard, from a donor; a round takes about half as long."""


def start(swarm: Swarm, speed: float = 0.1) -> None:
    swarm.start("first", stage=0, speed=speed)
    for name in DONORS:
        swarm.start(name, stage=STAGE, speed=speed, feeds=False)


def slow_down(swarm: Swarm, *methods: str) -> None:
    """Each donor gives one shard after the other, as its uplink would."""
    for name in DONORS:
        transport, turn = swarm.hub.transports[name], asyncio.Lock()
        for method in methods:
            give = handler_of(transport, method)

            async def slowly(request: Request, give=give, turn=turn) -> Message:  # type: ignore[no-untyped-def]
                reply = await give(request)
                async with turn:
                    await asyncio.sleep(SLOW_S)
                return reply

            transport.handle(method, slowly)


async def joined(swarm: Swarm) -> Peer:
    peer = swarm.start("joiner", stage=STAGE, feeds=False)
    await swarm.until(lambda: peer.gossip.own.state == ACTIVE, 300.0)
    return peer


def test_a_new_owner_gets_sums_only_of_shards_whose_state_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so as it pushes."""
    sync = {"shard_parameters": 512}
    spec = tiny_spec(tmp_path, num_stages=2, rounds=40, global_batch=8, sync=sync)
    told: Counter[bool] = Counter()
    tell = ExchangeProgress.told_of_state

    def tells(self: ExchangeProgress, peer_id: str, shard: int, *, is_here: bool) -> None:
        told[is_here] += 1
        tell(self, peer_id, shard, is_here=is_here)

    monkeypatch.setattr(ExchangeProgress, "told_of_state", tells)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, speed=0.05)
        await swarm.until_round(4)
        slow_down(swarm, "fetch_optimizer")
        peer = await joined(swarm)
        mirrored = refused = 0
        honest = handler_of(swarm.hub.transports["joiner"], "mirror")

        async def on_mirror(request: Request) -> Message:
            nonlocal mirrored, refused
            mirrored += 1
            try:
                return await honest(request)
            except Exception:
                refused += 1
                raise

        swarm.hub.transports["joiner"].handle("mirror", on_mirror)
        await swarm.until_round(40)
        ownership, states = peer.exchanges.ownership, peer.exchanges.states
        owned = ownership.placement(peer.exchanges.current).owned_by("joiner")
        here = [j for j in owned if states.has_input(j, peer.exchanges.current)]
        print(f"owns {len(owned)}, has {len(here)}; {mirrored} sums, {refused} of no use; {told}")
        assert len(here) >= 0.8 * len(owned)
        assert mirrored > 0
        assert refused == 0

    in_virtual_time(scenario, spec)


def test_rounds_go_on_while_state_is_on_its_way_over_slow_uplinks() -> None:
    """It is three times the parameters, and its two holders send most of what they can anyway."""
    up, join_s, until_s = 1.25e6, 100.0, 220.0
    sizes = Sizes(
        num_shards=32,
        shard_parameters=100_000,
        activation_numbers=65_536,
        codec="int8",
        update_codec="int8",
    )
    scenario = Scenario(
        seed=1,
        peers=4,
        stages=2,
        links=tuple(Link(up, 10 * up, 0.012) for _ in range(5)),
        rounds=10**6,
        until_s=until_s,
        start_s=0.5,
        global_batch=64,
        sync_mode="delayed",
        service_s=0.4,
        speed_ratio=1.0,
        sizes=sizes,
        bounds=Bounds(converge_s=900.0, progress_s=900.0),
        trace=(ChurnEvent(join_s, JOIN),),
        check_s=1.0,
        keep_log=False,
    )

    async def simulated() -> None:
        simulation = Simulation(scenario)
        members = simulation.monitor.members
        rounds = list[int]()

        async def watch() -> None:
            while True:
                await asyncio.sleep(1.0)
                rounds.append(max((m.peer.gossip.own.round for m in members.values()), default=0))

        watching = asyncio.get_running_loop().create_task(watch())
        result = await simulation.play()
        watching.cancel()
        assert result.broken is None
        assert (result.samples_lost, result.shards_reset) == (0, 0)
        exchanges = members[max(members)].peer.exchanges
        owned = exchanges.ownership.placement(exchanges.current).owned_by(max(members))
        here = [j for j in owned if exchanges.states.has_input(j, exchanges.current)]
        changes = [t for t in range(int(join_s), len(rounds)) if rounds[t] > rounds[t - 1]]
        longest_s = max(b - a for a, b in itertools.pairwise([int(join_s), *changes]))
        num_rounds = rounds[-1] - rounds[int(join_s)]
        print(f"{num_rounds} rounds, longest {longest_s} s; has {len(here)} of {len(owned)} shards")
        assert len(here) == len(owned) > 0
        assert num_rounds >= 15
        await simulation.population.close()

    run(simulated())


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_a_newcomer_whose_parameters_take_many_rounds_comes_to_serve(mode: str) -> None:
    """The others are of one home: rounds between them take a second, and its uplink several for a
    stage. What they sent in vain of the round before goes up it too."""
    up, parameters, join_s = 1.25e6, 1_000_000, 6.0
    stage_s = 4 * parameters / up
    scenario = Scenario(
        seed=1,
        peers=2,
        stages=1,
        house=2,
        links=tuple(Link(up, 5 * up, 0.012) for _ in range(3)),
        rounds=10**6,
        until_s=join_s + 4 * stage_s + 2.0,
        start_s=0.5,
        global_batch=16,
        sync_mode=mode,
        service_s=0.5,
        speed_ratio=1.0,
        sizes=Sizes(num_shards=2, shard_parameters=parameters // 2, update_codec="int8"),
        bounds=Bounds(converge_s=900.0, progress_s=900.0),
        trace=(ChurnEvent(join_s, JOIN),),
        check_s=1.0,
        keep_log=False,
    )

    async def simulated() -> None:
        simulation = Simulation(scenario)
        members = simulation.monitor.members
        serving = list[float]()

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.1)
                if len(members) == 3 and members[max(members)].peer.gossip.own.state == ACTIVE:
                    serving.append(asyncio.get_running_loop().time() - join_s)

        watching = asyncio.get_running_loop().create_task(watch())
        result = await simulation.play()
        watching.cancel()
        assert result.broken is None
        assert result.samples_lost == 0
        assert serving, "it never served"
        print(f"after {serving[0]:.1f} s; the stage takes {stage_s} s")
        assert serving[0] <= 2 * stage_s + 2.0
        since_s = scenario.until_s - join_s - serving[0]
        assert len(serving) >= 10 * since_s - 2, "it did not go on serving"
        await simulation.population.close()

    run(simulated())
