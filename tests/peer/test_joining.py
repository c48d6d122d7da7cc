"""Finding the run: patience, memory, and one clear line."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from peer.joining import (
    LONGEST_WAIT_S,
    MAX_KNOWN,
    Backoff,
    KnownPeers,
    check_addresses,
    find_living,
    find_run,
    look_for_others,
    peers_beside,
    read_addresses,
    tell_run,
)
from peer.options import default_spec_path
from swarmnet.errors import AddressError, UserError
from swarmnet.identity import Identity
from swarmnet.protocol.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.view import View
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.spec import load_spec
from swarmnet.swarm.gossip import Gossip
from swarmnet.swarm.messages import SpecReply
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub, MemoryTransport
from swarmnet.wire import Message
from tests.swarm.harness import OpenSigner

SPEC = load_spec(default_spec_path())
IDS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]


def address(peer_id: str) -> str:
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"


def serve(hub: MemoryHub, peer_id: str) -> MemoryTransport:
    transport = hub.transport(peer_id)

    async def on_spec(_: Request) -> Message:
        return Message(SpecReply(SPEC.run_id, SPEC.canonical()))

    transport.handle("spec", on_spec)
    return transport


def view_of(*peer_ids: str) -> View:
    view = View("own")
    for peer_id in peer_ids:
        record = Record(peer_id, SPEC.run_id, 1, 1, state=ACTIVE, addresses=(address(peer_id),))
        view.merge(record, 0.0)
    return view


def test_a_peer_waits_for_its_run_and_says_why() -> None:
    said: list[str] = []

    async def main() -> None:
        hub = MemoryHub()
        joiner = hub.transport("joiner")
        asyncio.get_running_loop().call_later(100.0, serve, hub, IDS[0])
        found = await find_run(joiner, [address(IDS[0])], KnownPeers(Path("x")), said.append)
        assert found[0] == IDS[0]
        assert found[1].run_id == SPEC.run_id
        assert asyncio.get_running_loop().time() < 100.0 + 75.0

    run_virtual(main())
    assert 3 <= len(said) <= 12, "it tries more and more seldom"
    assert all("trying again in" in line and "\n" not in line for line in said)


def test_patience_can_end() -> None:
    async def main() -> None:
        with pytest.raises(AddressError, match="4001"):
            await find_run(
                MemoryHub().transport("joiner"),
                [address(IDS[0])],
                KnownPeers(Path("x")),
                lambda _: None,
                patience_s=30.0,
            )
        assert asyncio.get_running_loop().time() < 60.0

    run_virtual(main())


def test_a_run_whose_first_peer_is_gone_is_found_through_those_met_before(tmp_path: Path) -> None:
    known = KnownPeers.load(tmp_path)
    known.meet(SPEC.run_id, view_of(*IDS))
    known.save()

    async def main() -> None:
        hub = MemoryHub()
        serve(hub, IDS[2])
        again = KnownPeers.load(tmp_path)
        found = await find_run(hub.transport("joiner"), [address(IDS[0])], again, lambda _: None)
        assert found[0] == IDS[2]

    run_virtual(main())


def test_peers_of_another_run_are_not_asked(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "peers.json")
    known.meet(SPEC.run_id, view_of(*IDS[:2]))
    assert known.also([address(IDS[2])]) == [], "nobody knows whether that is the same run"
    assert known.also([address(IDS[0])]) == [address(IDS[1])]
    known.meet("another run", view_of(IDS[2]))
    assert known.addresses() == [address(IDS[2])]


def test_a_remembered_peer_is_not_looked_for_on_loopback_where_it_has_another_address() -> None:
    """libp2p lists addresses in the order of their bytes: 127.0.0.1 comes before most homes."""
    outside = f"/ip4/192.168.1.7/tcp/4001/p2p/{IDS[0]}"
    known = KnownPeers(Path("x"), SPEC.run_id, {IDS[0]: (address(IDS[0]), outside)})
    assert known.addresses() == [outside]
    learned: dict[str, tuple[str, ...]] = {}

    async def main() -> None:
        transport = MemoryHub().transport("own")
        transport.learn = lambda peer_id, told: learned.update({peer_id: tuple(told)})  # type: ignore[method-assign]
        assert await find_living(transport, known, SPEC.run_id) == []

    run_virtual(main())
    assert learned == {IDS[0]: (address(IDS[0]), outside)}, "all of them are tried"


def test_what_is_remembered_is_bounded_and_without_observers() -> None:
    known = KnownPeers(Path("x"))
    view = view_of(*(f"peer-{n}" for n in range(100)))
    view.merge(Record("watcher", SPEC.run_id, 1, 1, state=OBSERVING, addresses=("/a",)), 0.0)
    known.meet(SPEC.run_id, view)
    assert len(known.peers) == MAX_KNOWN
    assert "watcher" not in known.peers


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": 1}', '{"run_id": "a", "peers": 3}'])
def test_a_damaged_memory_is_made_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "peers.json").write_text(content)
    known = KnownPeers.load(tmp_path)
    assert known.peers == {}
    known.meet(SPEC.run_id, view_of(IDS[0]))
    known.save()
    assert KnownPeers.load(tmp_path).peers == {IDS[0]: (address(IDS[0]),)}


def test_a_first_peer_that_comes_back_finds_its_run_alive(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "peers.json")
    known.meet(SPEC.run_id, view_of(*IDS))

    async def main() -> None:
        hub = MemoryHub()
        first = hub.transport("first")
        assert await find_living(first, known, SPEC.run_id) == []
        serve(hub, IDS[1])
        await asyncio.sleep(5.0)
        assert await find_living(first, known, SPEC.run_id) == [IDS[1]]
        assert await find_living(first, known, "another run") == []

    run_virtual(main())


def test_the_same_run_is_found_on_the_same_machine(tmp_path: Path) -> None:
    """The command that starts a run was typed twice."""
    own, other = tmp_path / "peer-2", tmp_path / "peer-1"
    for folder in (own, other, tmp_path / "peer-3", tmp_path / "peer-4"):
        folder.mkdir()
    (tmp_path / "peer-3" / "running.json").write_text("{")
    tell_run(tmp_path / "peer-4", "another run", address(IDS[1]))
    tell_run(own, SPEC.run_id, address(IDS[2]))
    take_back = tell_run(other, SPEC.run_id, address(IDS[0]))
    assert peers_beside(own, SPEC.run_id) == [address(IDS[0])]

    async def main() -> None:
        hub = MemoryHub()
        serve(hub, IDS[0])
        known = KnownPeers(own / "peers.json")
        beside = peers_beside(own, SPEC.run_id)
        assert await find_living(hub.transport("own"), known, SPEC.run_id, beside) == [IDS[0]]

    run_virtual(main())
    take_back()
    assert peers_beside(own, SPEC.run_id) == []


def test_who_is_alone_goes_on_looking_for_those_it_has_met(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "peers.json")
    known.meet(SPEC.run_id, view_of(*IDS))

    def gossip_of(transport: MemoryTransport, name: str) -> Gossip:
        transport.set_run(SPEC.run_id)
        own = Record(name, SPEC.run_id, 1, 1, state=ACTIVE, stage=0)
        return Gossip(transport, View(name), OpenSigner(), own, random.Random(name))

    async def main() -> None:
        hub = MemoryHub()
        alone = gossip_of(hub.transport("alone"), "alone")
        loop = asyncio.get_running_loop()
        life = [loop.create_task(w) for w in (look_for_others(known, alone), alone.run())]
        await asyncio.sleep(100.0)
        other = gossip_of(serve(hub, IDS[1]), IDS[1])
        asked = 0

        async def on_spec(_: Request) -> Message:
            nonlocal asked
            asked += 1
            return Message(SpecReply(SPEC.run_id, SPEC.canonical()))

        other.transport.handle("spec", on_spec)
        life.append(loop.create_task(other.run()))
        await asyncio.sleep(LONGEST_WAIT_S + 200.0)
        assert alone.view.is_live(IDS[1], loop.time())
        assert other.view.is_live("alone", loop.time())
        assert asked == 1, "not alone any more, it has nobody to look for"
        for task in life:
            task.cancel()

    run_virtual(main())


@pytest.mark.parametrize(
    "wrong", ["", "localhost:4001", "/ip4/1.2.3.4/tcp/1", "/ip4/300.1.1.1/tcp/1/p2p/x", "/p2p/x"]
)
def test_an_address_that_cannot_be_is_no_reason_to_wait(wrong: str) -> None:
    with pytest.raises(AddressError, match="looks like") as caught:
        check_addresses([wrong])
    assert "\n" not in str(caught.value)


def test_addresses_from_a_file_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "join"

    async def main() -> list[str]:
        content = json.dumps({"address": address(IDS[0]), "peer_id": IDS[0]})
        asyncio.get_running_loop().call_later(20.0, path.write_text, content)
        return await read_addresses([f"@{path}", address(IDS[1])], lambda _: None)

    assert run_virtual(main()) == [address(IDS[0]), address(IDS[1])]
    path.write_text(f"\n {address(IDS[2])}\n")
    assert run_virtual(main()) == [address(IDS[2]), address(IDS[1])]
    with pytest.raises(UserError, match="cannot read"):
        run_virtual(read_addresses([f"@{tmp_path}"], lambda _: None))


def test_waits_double_up_to_a_bound() -> None:
    said: list[str] = []

    async def main() -> float:
        backoff = Backoff(None, said.append, random.Random(1))
        for _ in range(10):
            await backoff.wait("nobody is there")
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 10 * 72.0
    assert len(said) == 10
