"""Some peers cannot reach some others, though others reach both: training goes on.

Six peers in two stages. A peer that cannot be reached is dead to whoever cannot reach it; it takes
part in the run as long as a path of serving peers leads to it. An onlooker that brings news of the
other half of a swarm is no such path."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.relaying import Relaying
from swarmnet.swarm.tasks import Tasks
from tests.swarm.harness import OpenSigner, Swarm, in_virtual_time, tiny_spec
from tests.swarm.membership.relayed import RelayedHub

STAGE = {f"peer-{i}": i % 2 for i in range(6)}
ONE, OTHER = ("peer-0", "peer-1", "peer-2"), ("peer-3", "peer-4", "peer-5")
HALVES = [(a, b) for a in ONE for b in OTHER]
ONLOOKER = "the-onlooker"
KEPT = 0.8
SPAN_S = 150.0
"""The exchange during which the cut begins takes up to 15 s of it."""
SPEED = 0.1
"""Of the devices: a round takes four seconds, and a test few events."""
Pairs = Iterable[tuple[str, str]]
Scenario = Callable[[Swarm, Tasks], Awaitable[None]]


class Cuts:
    """Which messages do not arrive."""

    def __init__(self, one_way: Pairs = ()) -> None:
        self.one_way = set(one_way)

    def delivery_s(self, source: str, target: str, size: int, now: float) -> float | None:
        return None if (source, target) in self.one_way else 0.0005


def look_on(swarm: Swarm, tasks: Tasks, *, quiet: bool = True) -> Gossip:
    """Starts a peer that serves no stage and reaches everybody."""
    transport = swarm.hub.transport(ONLOOKER)
    transport.set_run(swarm.spec.run_id)
    addresses = tuple(transport.addresses())
    own = Record(ONLOOKER, swarm.spec.run_id, 1, 0, state=OBSERVING, addresses=addresses)
    rng = random.Random(ONLOOKER)
    gossip = Gossip(transport, View(ONLOOKER), OpenSigner(), own, rng, quiet=quiet)

    async def live() -> None:
        for name in STAGE:
            await gossip.reconcile(name)
        await gossip.run()

    tasks.start(live())
    return gossip


def play(folder: Path, scenario: Scenario, *, relayed: bool = False) -> None:
    async def main(swarm: Swarm) -> None:
        if relayed:
            swarm.hub = RelayedHub()
        for name, stage in STAGE.items():
            swarm.start(name, stage=stage, speed=SPEED)
        tasks = Tasks("test")
        try:
            await scenario(swarm, tasks)
        finally:
            await tasks.close()

    spec = tiny_spec(folder, num_stages=2, rounds=100_000, global_batch=64)
    in_virtual_time(main, spec, is_synthetic=True)


async def made(swarm: Swarm, names: Iterable[str] = STAGE, span_s: float = SPAN_S) -> int:
    """Rounds that the slowest of these peers makes in the next `span_s`."""

    def rounds() -> dict[str, int]:
        return {n: swarm.members[n].peer.gossip.own.round for n in names}

    before = rounds()
    await asyncio.sleep(span_s)
    for member in swarm.members.values():
        if member.life.done():
            member.life.result()
    return min(r - before[n] for n, r in rounds().items())


async def together(swarm: Swarm, within_s: float = 60.0) -> None:
    """All peers train in the same rounds, and all know all."""
    newest = max(swarm.rounds())
    loop = asyncio.get_running_loop()
    await swarm.until(
        lambda: (
            min(swarm.rounds()) > newest + 5
            and max(swarm.rounds()) - min(swarm.rounds()) <= 1
            and all(
                m.peer.view.reaches(n, loop.time()) for m in swarm.members.values() for n in STAGE
            )
        ),
        within_s,
    )


def no_sample_twice(swarm: Swarm) -> None:
    assert swarm.total("slots_doubled") == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Rounds without a cut."""
    rounds: list[int] = []

    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        rounds.append(await made(swarm))

    play(tmp_path_factory.mktemp("calm"), scenario)
    return rounds[0]


CUTS = {
    "two replicas of the last stage": [("peer-1", "peer-3")],
    "two replicas of the first stage": [("peer-0", "peer-4")],
    "a feeder and a replica of the last stage": [("peer-0", "peer-3")],
}


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(pairs, id=name, marks=[] if "last stage" in name else [pytest.mark.long])
        for name, pairs in CUTS.items()
    ],
)
def test_a_cut_of_one_pair_costs_few_rounds(
    tmp_path: Path, undisturbed: int, pairs: list[tuple[str, str]]
) -> None:
    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        for a, b in pairs:
            swarm.hub.partition(a, b)
        assert await made(swarm) >= KEPT * undisturbed
        no_sample_twice(swarm)
        for a, b in pairs:
            swarm.hub.heal(a, b)
        await together(swarm)

    play(tmp_path, scenario)


def test_a_cut_between_the_roots_of_two_stages_costs_few_rounds(
    tmp_path: Path, undisturbed: int
) -> None:
    """They tell each other the norms of their stages."""

    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        served = swarm.members["peer-0"].peer._served  # noqa: SLF001  nothing else tells the roots
        assert served is not None
        one, other = (served.exchanges.ownership.roots(stage)[0] for stage in range(2))
        swarm.hub.partition(one, other)
        assert await made(swarm) >= KEPT * undisturbed
        no_sample_twice(swarm)
        swarm.hub.heal(one, other)
        await together(swarm)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "way",
    [
        ("peer-1", "peer-3"),
        pytest.param(("peer-0", "peer-3"), marks=pytest.mark.long),
        pytest.param(("peer-3", "peer-0"), marks=pytest.mark.long),
    ],
)
def test_a_one_way_cut_costs_few_rounds(
    tmp_path: Path, undisturbed: int, way: tuple[str, str]
) -> None:
    """Between a feeder and the last stage, in either direction, and within the last stage."""

    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        cuts = swarm.hub.network = Cuts()
        await swarm.until_round(5)
        cuts.one_way.add(way)
        assert await made(swarm) >= KEPT * undisturbed
        no_sample_twice(swarm)
        cuts.one_way.clear()
        await together(swarm)

    play(tmp_path, scenario)


def test_halves_that_only_an_onlooker_connects_train_as_if_it_were_not_there(
    tmp_path: Path,
) -> None:
    rounds: dict[bool, int] = {}

    def scenario(is_connected: bool) -> Scenario:
        async def run(swarm: Swarm, tasks: Tasks) -> None:
            await swarm.until_round(5)
            look_on(swarm, tasks)
            await asyncio.sleep(3.0)
            for a, b in HALVES:
                swarm.hub.partition(a, b)
            if not is_connected:
                for b in OTHER:
                    swarm.hub.partition(ONLOOKER, b)
            rounds[is_connected] = await made(swarm)
            for a, b in HALVES:
                swarm.hub.heal(a, b)
            await together(swarm)

        return run

    for is_connected in (False, True):
        play(tmp_path, scenario(is_connected))
    assert rounds[False] > 10, "each half has every stage"
    assert rounds[True] >= KEPT * rounds[False]


def test_with_an_onlooker_that_relays_all_train_as_one(tmp_path: Path, undisturbed: int) -> None:
    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        gossip = look_on(swarm, tasks, quiet=False)
        relaying = [Relaying(gossip.transport, gossip, random.Random(1))]  # type: ignore[arg-type]
        for member in swarm.members.values():
            own: Any = member.peer.transport
            relaying.append(Relaying(own, member.peer.gossip, random.Random(member.peer_id)))
        for relay in relaying:
            tasks.start(relay.run())
        await asyncio.sleep(3.0)
        for a, b in HALVES:
            swarm.hub.partition(a, b)
        await asyncio.sleep(30.0)
        await together(swarm)
        assert await made(swarm, span_s=60.0) >= KEPT * undisturbed * 60.0 / SPAN_S

    play(tmp_path, scenario, relayed=True)


def test_a_link_that_comes_and_goes_stops_nobody(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        for _ in range(10):
            swarm.hub.partition("peer-1", "peer-3")
            await asyncio.sleep(4.0)
            swarm.hub.heal("peer-1", "peer-3")
            await asyncio.sleep(4.0)
        no_sample_twice(swarm)
        await together(swarm)

    play(tmp_path, scenario)


def test_two_pairs_cut_at_once_stop_nobody(tmp_path: Path, undisturbed: int) -> None:
    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        for a, b in (("peer-0", "peer-3"), ("peer-4", "peer-1")):
            swarm.hub.partition(a, b)
        assert await made(swarm) >= 0.7 * undisturbed
        no_sample_twice(swarm)

    play(tmp_path, scenario)


def test_a_peer_that_swaps_for_ten_seconds_is_back_at_once(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm, tasks: Tasks) -> None:
        await swarm.until_round(5)
        swarm.hub.freeze("peer-3")
        await asyncio.sleep(10.0)
        assert not swarm.members["peer-1"].peer.gossip.liveness.is_live("peer-3")
        swarm.hub.thaw("peer-3")
        await asyncio.sleep(2.0)
        for name, member in swarm.members.items():
            assert member.peer.gossip.liveness.is_live("peer-3"), name
        await together(swarm, within_s=40.0)

    play(tmp_path, scenario)
