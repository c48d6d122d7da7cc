"""The directory over a real DHT: what one peer publishes, another finds and checks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from swarmnet.identity import Identity
from swarmnet.protocol.membership.peer_ids import seat_id
from swarmnet.protocol.membership.publishers import MAX_PUBLISHED, PUBLISHERS, published_for
from swarmnet.protocol.membership.records import ACTIVE, LEFT, OBSERVER_STAGE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.net import KeySigner, open_net
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.membership.discovery import MAX_GONE, REFRESH_S, Directory
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message, pack
from tests.protocol.making import record
from tests.swarm.harness import OpenSigner

RUN = "0123456789abcdef" * 2


async def _member(
    stack: AsyncExitStack, stage: int, signer: KeySigner | None = None
) -> tuple[Gossip, Directory]:
    """A peer that listens, and its directory, not yet started. Gossip itself never runs."""
    key = Identity.generate()
    net = await open_net("p2pd", key, host="127.0.0.1", port=0, announce=())
    stack.push_async_callback(net.transport.close)
    own = Record(
        key.peer_id,
        RUN,
        1,
        0,
        state=ACTIVE,
        stage=stage,
        addresses=tuple(net.transport.addresses()),
    )
    signer = signer or KeySigner(key)
    gossip = Gossip(net.transport, View(key.peer_id), signer, own, random.Random(stage))
    assert net.p2p is not None
    directory = Directory(gossip, 2, net.p2p, random.Random(stage))
    stack.push_async_callback(directory.close)
    return gossip, directory


async def _started(
    stack: AsyncExitStack, stages: Sequence[int], signer_of_first: KeySigner | None = None
) -> list[tuple[Gossip, Directory]]:
    signers = [signer_of_first, *[None] * (len(stages) - 1)]
    members = [await _member(stack, *place) for place in zip(stages, signers)]
    first = members[0][0].own.addresses
    for gossip, directory in members:
        await directory.start([] if gossip is members[0][0] else first)
    return members


def test_a_peer_finds_the_peers_of_every_stage_in_the_directory() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            members = await _started(stack, (0, 1, 1))
            for _, directory in members[:2]:
                assert await directory.publish()
            lonely, directory = members[2]
            assert await directory.find_all() == 2
            for gossip, _ in members[:2]:
                found = lonely.view.get(gossip.own.peer_id)
                assert found is not None
                assert found.addresses == gossip.own.addresses
            # Their addresses are known to the transport too: they can be called.
            first = members[0][0].own.peer_id
            lonely.transport.set_run(RUN)
            await lonely.transport.call(first, "ping", Message(), timeout_s=10)

    asyncio.run(scenario())


def test_what_has_no_directory_is_published_by_those_that_have_one() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            members = await _started(stack, (0, 1, 1))
            key = Identity.generate()
            own = Record(key.peer_id, RUN, 1, 0, state=ACTIVE, stage=1, addresses=("/ip4/1.2.3.4",))
            transport = MemoryHub().transport(key.peer_id)
            view = View(key.peer_id)
            lonely = Gossip(transport, view, KeySigner(key), own, random.Random(9))
            told = [gossip.own_record for gossip, _ in members[:2]]
            for gossip, directory in members[:2]:
                gossip.records.take(lonely.own_record.seal())
                assert await directory.publish_for_others() == 0, "it publishes nothing yet"
                assert await directory.publish()
            for gossip, directory in members[:2]:
                for its in told:
                    gossip.records.take(its.seal())
                assert await directory.publish_for_others() == 1
            newcomer, directory = members[2]
            assert await directory.find_all() == 3
            found = newcomer.view.get(key.peer_id)
            assert found is not None
            assert found.addresses == own.addresses

    asyncio.run(scenario())


@pytest.mark.parametrize("table", ["uid_to_peer_id", "ban_counter", "nodes_requested_for_ping"])
def test_a_node_with_tables_of_many_that_are_gone_is_replaced(table: str) -> None:
    """hivemind's node forgets nobody; ten come and go between two looks."""
    largest, started = [], []

    class Node:
        def __init__(self) -> None:
            self.tables: dict[str, dict[str, str]] = {
                name: {"known": ""}
                for name in ("uid_to_peer_id", "ban_counter", "nodes_requested_for_ping")
            }
            bucket = SimpleNamespace(nodes_requested_for_ping=self.tables[table])
            self.protocol = SimpleNamespace(
                routing_table=SimpleNamespace(
                    uid_to_peer_id=self.tables["uid_to_peer_id"], buckets=(bucket,)
                )
            )
            self.blacklist = SimpleNamespace(ban_counter=self.tables["ban_counter"])
            self.shutdown = _nothing

    class Crowded(Directory):
        async def start(self, initial_peers: Sequence[str]) -> None:
            self._node = Node()
            started.append(asyncio.get_running_loop().time())

        async def publish(self) -> bool:
            return True

        async def find_all(self) -> int:
            node = self._node
            assert isinstance(node, Node)
            now = asyncio.get_running_loop().time()
            node.tables[table] |= {f"{now} {k}": "" for k in range(10)}
            largest.append(len(node.tables[table]))
            return 0

    async def scenario() -> None:
        own = Record("me", RUN, 1, 0, state=ACTIVE, stage=0)
        transport = MemoryHub().transport("me")
        gossip = Gossip(transport, View("me"), OpenSigner(), own, random.Random(0))
        running = asyncio.ensure_future(Crowded(gossip, 1, lambda: None, random.Random(0)).run())
        await asyncio.sleep(100 * REFRESH_S)
        running.cancel()

    run_virtual(scenario())
    assert MAX_GONE < max(largest) < MAX_GONE + 10 * REFRESH_S
    assert 5 < len(started) < 12, "one in about 130 looks"


def test_a_node_that_was_joined_through_peers_without_one_joins_again() -> None:
    """Once in a while, through those that have one."""

    class Joined(Directory):
        asked: ClassVar[list[list[str]]] = []

        async def start(self, initial_peers: Sequence[str]) -> None:
            self.asked.append(list(initial_peers))
            known = {"node": "able"} if any("able" in a for a in initial_peers) else {}
            known = known if len(self.asked) > 2 else {}
            protocol = SimpleNamespace(
                routing_table=SimpleNamespace(uid_to_peer_id=known, buckets=())
            )
            blacklist = SimpleNamespace(ban_counter={})
            self._node = SimpleNamespace(shutdown=_nothing, protocol=protocol, blacklist=blacklist)

        async def publish(self) -> bool:
            return True

        async def find_all(self) -> int:
            return 0

    async def scenario() -> None:
        hub = MemoryHub()
        own = Record("me", RUN, 1, 0, state=ACTIVE, stage=0)
        gossip = Gossip(hub.transport("me"), View("me"), OpenSigner(), own, random.Random(0))
        directory = Joined(gossip, 1, lambda: None, random.Random(0))
        running = asyncio.ensure_future(directory.run(["/known"]))
        await asyncio.sleep(100.0)
        assert directory.asked == [["/known"]], "nobody has one"

        def heard() -> None:
            now = asyncio.get_running_loop().time()
            for name, publishes in (("a", False), ("able", True)):
                told = replace(
                    own,
                    peer_id=name,
                    version=int(now),
                    addresses=(f"/ip4/200.5.5.{len(name)}/tcp/4001",),
                    publishes=publishes,
                )
                gossip.view.merge(told, now)

        for _ in range(200):
            heard()
            await asyncio.sleep(1.0)
        assert [a[0] for a in directory.asked[1:]] == ["/ip4/200.5.5.4/tcp/4001/p2p/able"] * 2
        running.cancel()

    run_virtual(scenario())


def test_a_seat_that_has_left_is_published_no_more() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            (_, directory), (seat, _) = await _started(stack, (0, 1))
            directory.also(seat)
            assert await directory.publish()
            seat.update(state=LEFT)
            assert not await directory.publish()
            directory.without(seat)
            assert await directory.publish()

    asyncio.run(scenario())


def test_a_forged_entry_of_the_directory_is_passed_over() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            (_, forging), (reader, directory) = await _started(
                stack, (0, 1), signer_of_first=KeySigner(Identity.generate())
            )
            assert await forging.publish()
            assert await directory.find_all() == 0
            assert len(reader.view) <= 1, "itself"

    asyncio.run(scenario())


def test_whatever_the_directory_has_hides_no_record_behind_it() -> None:
    """Anybody may store anything under any key."""

    def member(name: str) -> Gossip:
        transport = MemoryHub().transport(name)
        own = Record(name, RUN, 1, 0, state=ACTIVE, stage=0)
        return Gossip(transport, View(name), OpenSigner(), own, random.Random(0))

    async def sealed() -> bytes:
        return pack(member("other").own_record.seal())

    true = run_virtual(sealed())
    odd = [5, None, [true], "text", {"value": true}, b"", 1.5, True]
    stages: list[Any] = [
        *odd,
        {n: SimpleNamespace(value=value) for n, value in enumerate(odd)},
        dict(enumerate(odd)),
        RuntimeError("not msgpack"),
        {1: SimpleNamespace(value=7), "other": SimpleNamespace(value=true)},
    ]

    class Node:
        async def get(self, key: str, latest: bool) -> Any:
            found = stages[int(key.rpartition("/")[2])]
            if isinstance(found, Exception):
                raise found
            return SimpleNamespace(value=found)

        async def shutdown(self) -> None:
            pass

    class Spoiled(Directory):
        async def start(self, initial_peers: Sequence[str]) -> None:
            self._node = Node()

    async def scenario() -> None:
        gossip = member("me")
        directory = Spoiled(gossip, len(stages), lambda: None, random.Random(0))
        await directory.start([])
        assert await directory.find_all() == 1
        assert gossip.view.get("other") is not None
        await directory.close()

    run_virtual(scenario())


def test_a_daemon_that_is_not_there_yet_is_asked_again() -> None:
    """It has been restarted, and the DHT's node cannot be made at the first try."""

    class Node:
        protocol = SimpleNamespace(routing_table=SimpleNamespace(uid_to_peer_id={}, buckets=()))
        blacklist = SimpleNamespace(ban_counter={})

        async def shutdown(self) -> None:
            pass

    class Silent(Directory):
        starts = published = 0

        async def start(self, initial_peers: Sequence[str]) -> None:
            self.starts += 1
            if self.starts == 2:
                raise RuntimeError("the daemon is not there yet")
            self._node = Node()

        async def publish(self) -> bool:
            assert isinstance(self._node, Node)
            self.published += 1
            return True

        async def find_all(self) -> None:
            pass

    async def scenario() -> None:
        transport = MemoryHub().transport("me")
        own = Record("me", RUN, 1, 0, state=ACTIVE, stage=0)
        gossip = Gossip(transport, View("me"), OpenSigner(), own, random.Random(0))
        directory = Silent(gossip, 1, lambda: None, random.Random(0))
        await directory.start([])
        running = asyncio.ensure_future(directory.run())
        await asyncio.sleep(20.0)
        before = directory.published
        directory.daemon_restarted()
        await asyncio.sleep(200.0)
        assert not running.done()
        assert directory.starts == 3
        assert directory.published >= before + 2
        running.cancel()

    run_virtual(scenario())


def test_the_directory_is_joined_through_those_that_are_known_while_the_peer_works() -> None:
    """Some are gone, and the first try fails; nobody waits for it."""

    class Slow(Directory):
        asked: ClassVar[list[list[str]]] = []

        async def start(self, initial_peers: Sequence[str]) -> None:
            self.asked.append(list(initial_peers))
            await asyncio.sleep(3.0)
            if len(self.asked) == 1:
                raise RuntimeError("nobody answers")
            self._node = SimpleNamespace(shutdown=_nothing)

        async def publish(self) -> bool:
            return self._node is not None

        async def find_all(self) -> int:
            return 0

    async def scenario() -> None:
        transport = MemoryHub().transport("me")
        own = Record("me", RUN, 1, 0, state=ACTIVE, stage=0)
        gossip = Gossip(transport, View("me"), OpenSigner(), own, random.Random(0))
        directory = Slow(gossip, 1, lambda: None, random.Random(0))
        running = asyncio.ensure_future(directory.run(["/known"]))
        await asyncio.sleep(100.0)
        assert not running.done()
        assert directory.asked == [["/known"], ["/known"]]
        running.cancel()

    run_virtual(scenario())


async def _nothing() -> None:
    pass


# ---- who publishes for those that have no directory ------------------------------------------

ABLE = [record(f"able-{i}", stage=i % 2, publishes=True) for i in range(12)]


def lonely(number: int) -> list[Record]:
    return [record(f"lonely-{i}", stage=i % 2) for i in range(number)]


def publishers(records: list[Record]) -> dict[str, set[str]]:
    """By the peer that has no directory."""
    found: dict[str, set[str]] = {}
    for able in records:
        for other in published_for(able.peer_id, records):
            found.setdefault(other.peer_id, set()).add(able.peer_id)
    return found


def test_each_has_two_and_when_one_goes_nobody_else_s_change() -> None:
    records = [*ABLE, *lonely(40)]
    before = publishers(records)
    assert set(before) == {r.peer_id for r in lonely(40)}
    assert {len(p) for p in before.values()} == {PUBLISHERS}
    assert len(set().union(*before.values())) == len(ABLE), "the work is divided"
    gone = ABLE[3].peer_id
    after = publishers([r for r in records if r.peer_id != gone])
    for peer_id, its in before.items():
        assert its - {gone} <= after[peer_id]
        assert len(after[peer_id]) == PUBLISHERS


def test_one_publishes_so_many_at_most_and_always_the_same() -> None:
    records = [ABLE[0], *lonely(500)]
    mine = published_for(ABLE[0].peer_id, records)
    assert len(mine) == MAX_PUBLISHED
    assert published_for(ABLE[0].peer_id, records[::-1]) == mine
    assert {r.stage for r in mine} == {0, 1}


def test_those_that_publish_and_those_that_serve_nothing_have_nobody() -> None:
    idle = [record("o", stage=OBSERVER_STAGE), record("l", stage=0, state=LEFT)]
    assert publishers([*ABLE, *idle]) == {}
    assert published_for("lonely-0", [*ABLE, *lonely(3)]) == []


def test_a_further_seat_publishes_for_nobody() -> None:
    seat = record(seat_id(ABLE[0].peer_id, 1), stage=1, publishes=True)
    records = [ABLE[0], seat, *lonely(10)]
    assert published_for(seat.peer_id, records) == []
    assert len(published_for(ABLE[0].peer_id, records)) == 10
