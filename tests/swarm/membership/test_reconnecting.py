"""Members that are looked for, and what stays of them when nobody looks any more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from swarmnet.protocol.membership.peer_ids import seat_id
from swarmnet.protocol.membership.reconnect import MAX_ROWS
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.memory import MemoryHub
from tests.swarm.harness import OpenSigner

RUN = "r"
LONG_S = 20 * LOOK_LESS_S


class Book:
    """A transport, with the addresses that it was told."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.known: dict[str, tuple[str, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self.known[peer_id] = tuple(addresses)

    def forget(self, peer_id: str) -> None:
        self.known.pop(peer_id, None)


def remembered(first: int) -> dict[str, Sequence[str]]:
    """As many members as are looked for."""
    names = [f"m{i}" for i in range(first, first + MAX_ROWS)]
    return {name: (f"/ip4/10.0.0.1/tcp/4001/p2p/{name}",) for name in names}


def test_where_a_member_was_is_forgotten_when_nobody_looks_for_it() -> None:
    """Its addresses are learned with each try. A peer that lasts has looked for thousands."""
    generations = [remembered(MAX_ROWS * i) for i in range(4)]

    async def main() -> None:
        book: Any = Book(MemoryHub().transport("a"))
        book.set_run(RUN)
        own = Record("a", RUN, 1, 0, state=ACTIVE)
        gossip = Gossip(book, View("a"), OpenSigner(), own, random.Random(0))
        now: list[dict[str, Sequence[str]]] = [{}]
        looking = Reconnecting(gossip, random.Random(1), lambda: now[0])
        life = asyncio.ensure_future(looking.run())
        for generation in generations:
            now[0] = generation
            await asyncio.sleep(LONG_S)
            assert book.known.keys() <= generation.keys()
            assert len(book.known) > MAX_ROWS // 2, "they were looked for"
        kept = next(iter(generations[-1]))
        record = Record(seat_id(kept, 1), RUN, 1, 0, state=ACTIVE)
        gossip.view.merge(record, asyncio.get_running_loop().time())
        now[0] = {}
        await asyncio.sleep(LONG_S)
        assert list(book.known) == [kept], "there is a record of one of its seats"
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)

    run_virtual(main())
