"""The directory over a real DHT: what one peer publishes, another finds and checks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from swarmnet.identity import Identity
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.net import KeySigner, open_net
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.membership.discovery import Directory
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import SignedRecord
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message, pack
from tests.swarm.harness import OpenSigner

RUN = "0123456789abcdef" * 2


async def _member(stack: AsyncExitStack, stage: int) -> tuple[Gossip, Directory]:
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
    gossip = Gossip(net.transport, View(key.peer_id), KeySigner(key), own, random.Random(stage))
    assert net.p2p is not None
    directory = Directory(gossip, 2, net.p2p, random.Random(stage))
    stack.push_async_callback(directory.close)
    return gossip, directory


async def _started(stack: AsyncExitStack, stages: Sequence[int]) -> list[tuple[Gossip, Directory]]:
    members = [await _member(stack, stage) for stage in stages]
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


def test_a_forged_entry_of_the_directory_is_passed_over() -> None:
    async def scenario() -> None:
        from hivemind.utils import get_dht_time

        from swarmnet.swarm.membership.discovery import stage_key

        async with AsyncExitStack() as stack:
            members = await _started(stack, (0, 1))
            victim = members[0][0].own
            forged = SignedRecord(pack(victim), b"\0" * 64)
            await members[0][1]._node.store(
                stage_key(RUN, 0),
                subkey=victim.peer_id,
                value=pack(forged),
                expiration_time=get_dht_time() + 60,
            )
            assert await members[1][1].find_all() == 0
            assert members[1][0].view.get(victim.peer_id) is None

    asyncio.run(scenario())


def test_a_daemon_that_is_not_there_yet_is_asked_again() -> None:
    """It has been restarted, and the DHT's node cannot be made at the first try."""

    class Node:
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
