"""Parts of one swarm that do not see each other find together again, wherever their addresses are.

Addresses are as in the world: everybody has 127.0.0.1 and the bridge of his own docker, in front,
in libp2p's order; a peer is to be found at the one that is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmnet.protocol.membership.records import LEFT
from swarmnet.runtime.joining.find import find_living
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.simulation.stage import Sizes, SyntheticData, SyntheticOptimizer, SyntheticStage
from swarmnet.swarm.peer import Peer
from swarmnet.transport.memory import MemoryHub
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

TOGETHER_WITHIN_S = 60.0
STAGES = 2
SIZES = Sizes(num_shards=2, shard_parameters=4096)
SLOW = 0.02
"""Of machines: rounds take seconds, and hours of them cost little."""


class World:
    """Peers with addresses, and what they have saved."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.known: dict[str, KnownPeers] = {}
        self.hosts: dict[str, int] = {}
        self._num_hosts = 0

    def place(self, name: str) -> None:
        """At an address where nobody has been before, and another port."""
        self._num_hosts += 1
        n = self.hosts[name] = self._num_hosts
        self.swarm.hub.place(
            name,
            {
                "/ip4/127.0.0.1/tcp/4001": f"loopback of {name}",
                "/ip4/172.17.0.1/tcp/4001": f"docker of {name}",
                f"/ip4/200.5.5.{n}/tcp/{4000 + n}": "internet",
            },
        )

    def address(self, name: str) -> str:
        n = self.hosts[name]
        return f"/ip4/200.5.5.{n}/tcp/{4000 + n}/p2p/{name}"

    def start(
        self, name: str, stage: int, through: Sequence[str] = (), known: Sequence[str] = ()
    ) -> Peer:
        """`through`: peers that it was told to join. `known`: those that it has met before, and the
        addresses that they had."""
        saved = self.known.setdefault(name, KnownPeers(Path("nowhere"), self.swarm.spec.run_id))
        saved.peers |= {other: self.told(other) for other in known}
        peer = self.swarm.start(
            name,
            stage=stage,
            speed=SLOW,
            build=self._build,
            data=SyntheticData(4),  # type: ignore[arg-type]
            neighbours=list(through),
            remembered=saved.latest_first,
        )
        for other in through:
            peer.transport.learn(other, self.told(other))
        return peer

    def _build(self, stage: int) -> tuple[Any, Any]:
        def observer(event: str, **facts: Any) -> None:
            pass

        built = SyntheticStage(stage, STAGES, SIZES, observer)
        return built, SyntheticOptimizer(stage, SIZES, observer)

    def told(self, name: str) -> tuple[str, ...]:
        return tuple(self.swarm.hub.transports[name].addresses())

    def save(self, name: str) -> None:
        """What a peer has in its state folder now."""
        peer = self.swarm.members[name].peer
        self.known[name].meet(self.swarm.spec.run_id, peer.view, _now())

    def kill(self, *names: str) -> None:
        for name in names:
            self.save(name)
            self.swarm.kill(name)

    def is_one(self) -> bool:
        """Everybody who lives sees everybody who lives, and nobody else."""
        living = set(self.swarm.members)
        return all(
            {r.peer_id for r in m.peer.view.live(_now()) if r.state != LEFT} == living
            for m in self.swarm.members.values()
        )

    async def begin(self, names: Sequence[str]) -> None:
        """One swarm; all but the first know the first."""
        for name in names:
            self.place(name)
        for number, name in enumerate(names):
            self.start(name, number % STAGES, names[:1] if number else ())
        await self.until_one()

    async def until_one(self, limit_s: float = TOGETHER_WITHIN_S) -> float:
        """Seconds until then."""
        began = _now()
        await self.swarm.until(self.is_one, limit_s)
        return _now() - began

    def cut(self, here: Sequence[str], there: Sequence[str]) -> None:
        for a in here:
            for b in there:
                self.swarm.hub.partition(a, b)

    def heal(self, here: Sequence[str], there: Sequence[str]) -> None:
        for a in here:
            for b in there:
                self.swarm.hub.heal(a, b)


def _now() -> float:
    return asyncio.get_running_loop().time()


def run_islands(scenario: Callable[[Swarm], Awaitable[None]], folder: Path) -> None:
    spec = tiny_spec(folder, num_stages=STAGES, rounds=100_000, global_batch=16)
    # What synthetic stages send says more than its bytes.
    in_virtual_time(scenario, spec, hub=MemoryHub(copy=False))


def test_a_peer_comes_back_elsewhere_while_the_first_one_is_dead(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        world = World(swarm)
        for name in ("a", "b", "c"):
            world.place(name)
        world.start("a", 0)
        world.start("b", 1, ["a"])
        world.start("c", 0, ["a"])
        await world.until_one()
        world.kill("a", "c")
        await asyncio.sleep(100.0)
        world.place("c")
        known = world.known["c"]
        asking = swarm.hub.transport("c")
        assert await find_living(asking, known, swarm.spec.run_id) == ["b"]
        world.start("c", 0, ["b"])
        await world.until_one()

    run_islands(scenario, tmp_path)


@pytest.mark.parametrize("is_found_at_start", [True, False])
def test_the_first_peer_comes_back_elsewhere(tmp_path: Path, is_found_at_start: bool) -> None:
    """Where the others are cut off from it at that moment, it begins alone."""

    async def scenario(swarm: Swarm) -> None:
        world = World(swarm)
        names = ("a", "b", "c")
        for name in names:
            world.place(name)
        world.start("a", 0)
        world.start("b", 1, ["a"])
        world.start("c", 0, ["a"])
        await world.until_one()
        world.kill("a")
        await asyncio.sleep(30.0)
        world.place("a")
        asking = swarm.hub.transport("a")
        if is_found_at_start:
            found = await find_living(asking, world.known["a"], swarm.spec.run_id)
            assert found in (["b"], ["c"])
            world.start("a", 0, found)
        else:
            world.cut("a", ["b", "c"])
            assert await find_living(asking, world.known["a"], swarm.spec.run_id) == []
            world.start("a", 0)
            await asyncio.sleep(120.0)
            # A newcomer follows its address, as it stands in a file, to the island.
            world.place("d")
            world.cut("d", ["b", "c"])
            world.start("d", 1, ["a"])
            await swarm.until(lambda: len(swarm.members["d"].peer.view.live(_now())) == 2)
            world.heal(["a", "d"], ["b", "c"])
        await world.until_one()

    run_islands(scenario, tmp_path)


@pytest.mark.parametrize(
    ("here", "there", "cut_s"),
    [(["a"], ["b"], 590.0), (["a", "b"], ["c", "d", "e"], 590.0), (["a"], ["b", "c"], 40.0)],
)
def test_islands_become_one_swarm(
    tmp_path: Path, here: list[str], there: list[str], cut_s: float
) -> None:
    async def scenario(swarm: Swarm) -> None:
        world = World(swarm)
        names = [*here, *there]
        await world.begin(names)
        for name in names:
            world.save(name)
        world.cut(here, there)
        await asyncio.sleep(cut_s)
        assert not world.is_one()
        world.heal(here, there)
        await world.until_one()
        before = max(swarm.rounds())
        await swarm.until_round(before + 2)

    run_islands(scenario, tmp_path)


@pytest.mark.parametrize("keeps", ["a", "d"])
def test_all_addresses_change_at_once_but_one(tmp_path: Path, keeps: str) -> None:
    """As when a router is restarted; connections notice nothing. Whoever kept its address is the
    place where the others meet."""

    async def scenario(swarm: Swarm) -> None:
        world = World(swarm)
        names = ("a", "b", "c", "d")
        await world.begin(names)
        for name in names:
            if name != keeps:
                world.place(name)
        await asyncio.sleep(15.0)
        assert not world.is_one()
        await world.until_one(TOGETHER_WITHIN_S - 15.0)
        for name in names:
            seen = [
                r.addresses for r in swarm.members["b"].peer.view.records() if r.peer_id == name
            ]
            assert world.address(name) in seen[0], "and told to everybody"

    run_islands(scenario, tmp_path)


def test_islands_that_only_remember_each_other_meet(tmp_path: Path) -> None:
    """Both were started anew in the same minute: neither has seen the other in this life."""

    async def scenario(swarm: Swarm) -> None:
        world = World(swarm)
        for name in ("a", "b", "c", "d"):
            world.place(name)
        world.start("a", 0)
        world.start("b", 1, ["a"])
        world.start("c", 0, known=["b"])
        world.start("d", 1, ["c"])
        await world.until_one()

    run_islands(scenario, tmp_path)


def test_nobody_is_told_to_begin_anew_while_peers_met_before_are_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(swarm: Swarm) -> None:
        world = World(swarm)
        for name in ("a", "b"):
            world.place(name)
        peer = world.start("a", 0)
        missing = peer.reconnecting
        assert missing.is_looking(), "it has not even begun"
        swarm.hub.transport("b")
        world.cut("a", "b")
        world.known["a"].peers["b"] = world.told("b")
        await asyncio.sleep(1.5)
        assert missing.is_looking()
        peer.recovery.notice.say("round 3 lacks stage 1", _now(), is_endless=True)
        await asyncio.sleep(10.0)
        assert not missing.is_looking()
        peer.recovery.notice.say("round 3 lacks stage 1", _now() + 60.0, is_endless=True)

    caplog.set_level(logging.WARNING)
    run_islands(scenario, tmp_path)
    first, second = [r.message for r in caplog.records if "lacks stage 1" in r.message]
    assert "begin-anew" not in first
    assert "looking for peers" in first
    assert "none of these answers: ...b (" in second
    assert "/ip4/200.5.5.2/tcp/4002/p2p/b" in second
    assert second.endswith("--begin-anew to begin from initial parameters")
