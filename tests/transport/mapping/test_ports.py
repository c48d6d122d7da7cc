"""The ports of a peer stay open as long as it runs, and no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from swarmnet.simulation.clock import run
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.direct import DirectListener
from swarmnet.transport.mapping.ports import LOOK_EVERY_S, PortMapping
from swarmnet.transport.mapping.router import LEASE_S, Opened, Router, RouterError
from tests.transport.loopback import LoopbackCarrier, LoopbackHub
from tests.transport.streams import identity

OUTSIDE = "200.5.5.13"


@dataclass
class Fake:
    """A router that does what it is told."""

    host: str = OUTSIDE
    language: str = "a language"
    refuses: dict[int, str] = field(default_factory=dict)
    open_now: dict[int, float] = field(default_factory=dict)
    """By port, when it was asked for last."""

    async def open(self, port: int) -> Opened:
        if port in self.refuses:
            raise RouterError(self.refuses[port])
        self.open_now[port] = asyncio.get_running_loop().time()
        return Opened(port, self.host, port + 10, LEASE_S)

    async def close(self, opened: Opened) -> None:
        assert opened.outside == opened.port + 10
        del self.open_now[opened.port]


def mapping(told: list[list[int]], *routers: Router) -> PortMapping:
    async def find() -> AsyncIterator[Router]:
        for router in routers:
            yield router

    return PortMapping((4001, 4002), find, lambda opened: told.append([o.outside for o in opened]))


def test_ports_are_asked_for_anew_and_closed_at_the_end() -> None:
    async def main() -> None:
        told: list[list[int]] = []
        router = Fake()
        keeping = mapping(told, router)
        keeping.start()
        await asyncio.sleep(10 * LEASE_S)
        now = asyncio.get_running_loop().time()
        assert all(now - at <= LEASE_S / 2 for at in router.open_now.values())
        assert sorted(router.open_now) == [4001, 4002]
        assert told == [[4011, 4012]], "once"
        await keeping.close()
        await keeping.close()
        assert not router.open_now

    run(main())


def test_where_one_router_opens_not_all_the_next_is_asked_and_nothing_is_left_open() -> None:
    async def main() -> None:
        told: list[list[int]] = []
        first, second = Fake(refuses={4002: "no room"}), Fake()
        keeping = mapping(told, first, second)
        keeping.start()
        await asyncio.sleep(1.0)
        assert not first.open_now
        assert sorted(second.open_now) == [4001, 4002]
        second.refuses = {4001: "switched off"}
        await asyncio.sleep(LEASE_S)
        assert not second.open_now
        assert told == [[4011, 4012], []], "it is said no more"
        second.refuses = {}
        await asyncio.sleep(LOOK_EVERY_S)
        assert told[-1] == [4011, 4012]
        await keeping.close()

    run(main())


def test_a_second_router_behind_the_first_is_said_and_its_ports_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        told: list[list[int]] = []
        keeping = mapping(told, Fake(host="100.64.3.2"))
        keeping.start()
        await asyncio.sleep(3 * LEASE_S)
        assert not told
        await keeping.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [line for line in caplog.messages if "is not public" in line] == [
        "a language: the router's own address 100.64.3.2 is not public (a provider's NAT, or a "
        "second router): its ports lead nobody here"
    ]


def test_others_are_told_where_the_router_forwards_each_port() -> None:
    class Carrier(LoopbackCarrier):
        def addresses(self) -> list[str]:
            return [f"/ip4/10.1.0.2/tcp/4001/p2p/{self.peer_id}"]

    direct = DirectListener("127.0.0.1", 4002)
    transport = ChannelTransport(Carrier(LoopbackHub(), identity(1).peer_id), direct=direct)
    own = transport.addresses()
    transport.forwarded([(4001, OUTSIDE, 5001), (4002, OUTSIDE, 5002)])
    assert transport.addresses() == [f"/ip4/{OUTSIDE}/tcp/5001/p2p/{transport.peer_id}", *own]
    assert transport.own_addresses() == transport.addresses()

    async def ticket() -> list[tuple[str, int]]:
        return list(direct.ticket("other", transport.addresses()).addresses)

    assert asyncio.run(ticket()) == [(OUTSIDE, 5002), ("10.1.0.2", 4002)]
    transport.forwarded([])
    assert transport.addresses() == own
    assert asyncio.run(ticket()) == [("10.1.0.2", 4002)]
