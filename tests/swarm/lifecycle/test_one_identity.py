"""An identity is one process's: a living copy is told from all that looks like one; virtual time.

What the peer then says and does is in `tests/processes/test_restart.py`."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from swarmnet.methods.records import SignedRecord
from swarmnet.protocol.membership.failure_detector import SILENCE_S
from swarmnet.spec import RunSpec
from swarmnet.swarm.peer import Peer
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

FOUND_WITHIN_S = 3 * SILENCE_S
LONG_S = 2.5 * SILENCE_S
SPEED = 0.1
"""Of the devices: it is the time that counts here, and not the rounds."""
FIRST = "/ip4/203.0.113.0/tcp/4001"
"""Where "a" is, where addresses count."""


def spec(folder: Path) -> RunSpec:
    return tiny_spec(folder, num_stages=1, rounds=100_000)


async def at_work(swarm: Swarm) -> None:
    """Three peers, of which "b" is the one with an identity in question."""
    for name in "abc":
        begin(swarm, name)
    await swarm.until_round(3)


def begin(swarm: Swarm, name: str) -> Peer:
    peer = swarm.start(name, stage=0, speed=SPEED)
    peer.transport.learn("a", [f"{FIRST}/p2p/a"])
    return peer


def has_copy(*peers: Peer) -> bool:
    return any(peer.gossip.records.copy is not None for peer in peers)


def place(swarm: Swarm, name: str, number: int) -> None:
    """A peer has this address from now on, and no other."""
    swarm.hub.place(name, {f"/ip4/203.0.113.{number}/tcp/4001": "internet"})


def members(swarm: Swarm) -> list[Peer]:
    return [member.peer for member in swarm.members.values()]


async def go_on(swarm: Swarm) -> None:
    """For a while in which nobody takes himself for a copy; then all train, and see each other."""
    newest = max(swarm.rounds())
    for _ in range(int(LONG_S)):
        await asyncio.sleep(1.0)
        assert not has_copy(*members(swarm))
    await swarm.until_round(newest + 3)
    for peer in members(swarm):
        assert all(peer.gossip.liveness.is_live(other) for other in swarm.members)


def test_of_two_that_live_the_elder_is_told_and_the_other_goes_on(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        await at_work(swarm)
        elder = swarm.members["b"]
        copy = begin(swarm, "b")  # on another machine, with the same state folder
        await swarm.until(lambda: has_copy(elder.peer), FOUND_WITHIN_S)
        told = elder.peer.gossip.records.copy
        assert told is not None
        assert told.incarnation == copy.identity.incarnation
        assert told.addresses == tuple(copy.transport.addresses())
        elder.peer.transport.die()  # type: ignore[attr-defined]  as `until_copied` ends it
        elder.life.cancel()
        await go_on(swarm)

    in_virtual_time(scenario, spec(tmp_path), is_synthetic=True)


def test_quick_restarts_are_no_copies(tmp_path: Path) -> None:
    """A service that is started again and again. The last push of a process before this one comes
    late."""

    async def scenario(swarm: Swarm) -> None:
        await at_work(swarm)
        last: list[SignedRecord] = []
        for lived_s in (0.2, 1.0, 3.0, SILENCE_S + 2.0):
            last.append(swarm.members["b"].peer.gossip.own_record.seal())
            swarm.kill("b")
            peer = begin(swarm, "b")
            for late in last:
                assert not peer.gossip.records.take(late)
                await asyncio.sleep(lived_s / len(last))
            assert not has_copy(*members(swarm))
        await go_on(swarm)

    in_virtual_time(scenario, spec(tmp_path), is_synthetic=True)


def test_a_peer_at_new_addresses_is_no_copy(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        for number, name in enumerate("abc"):
            place(swarm, name, number)
        await at_work(swarm)
        own = swarm.members["b"].peer.gossip
        for number in (10, 11):
            before = own.own_record.seal()
            place(swarm, "b", number)
            await asyncio.sleep(3.0)
            assert not own.records.take(before)
        await go_on(swarm)
        told = members(swarm)[0].gossip.view.get("b")
        assert told is not None
        assert told.addresses == ("/ip4/203.0.113.11/tcp/4001/p2p/b",)

    in_virtual_time(scenario, spec(tmp_path), is_synthetic=True)


def test_what_is_restored_when_the_original_is_dead_is_no_copy(tmp_path: Path) -> None:
    """From a copy of its state folder, elsewhere: the others still have its last records."""

    async def scenario(swarm: Swarm) -> None:
        await at_work(swarm)
        last = swarm.members["b"].peer.gossip.own_record.seal()
        swarm.kill("b")
        await asyncio.sleep(1.0)
        restored = begin(swarm, "b")
        assert not restored.gossip.records.take(last)
        await go_on(swarm)

    in_virtual_time(scenario, spec(tmp_path), is_synthetic=True)


def test_a_clock_that_is_behind_makes_no_copy_of_a_dead_original(tmp_path: Path) -> None:
    """By its clock the one that is restored began before the original did. The last records of that
    come twice: from who was cut off before it died, and much later from who was not."""

    async def scenario(swarm: Swarm) -> None:
        await at_work(swarm)
        hub = swarm.hub
        hub.partition("a", "c")
        hub.partition("b", "c")
        await asyncio.sleep(3.0)
        swarm.kill("b")
        hub.heal("b", "c")
        hub.partition("a", "b")
        swarm._incarnations = itertools.count(0)  # noqa: SLF001  a clock that is behind
        restored = swarm.start("b", stage=0, speed=SPEED, neighbours=["c"])
        heard: list[int] = []
        own = restored.gossip.own_record
        follow = own.follow

        def counted(version: int) -> None:
            heard.append(version)
            follow(version)

        own.follow = counted  # type: ignore[method-assign]
        await asyncio.sleep(LONG_S)
        hub.heal("a", "b")
        hub.heal("a", "c")
        await asyncio.sleep(LONG_S)
        assert len(set(heard)) > 1, "the dead one was heard of twice"
        assert not has_copy(*members(swarm))

    in_virtual_time(scenario, spec(tmp_path), is_synthetic=True)
