"""NAT-PMP, with a small server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarmnet.transport.mapping import nat_pmp
from swarmnet.transport.mapping.nat_pmp import NatPmp
from swarmnet.transport.mapping.router import LEASE_S, Opened, RouterError
from tests.transport.mapping.routers import NatPmpServer, Rules

HOST, OUTSIDE = "127.0.0.1", "200.5.5.13"


@asynccontextmanager
async def router() -> AsyncIterator[tuple[NatPmpServer, NatPmp]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NatPmpServer(Rules(OUTSIDE)), local_addr=(HOST, 0)
    )
    yield server, NatPmp(HOST, transport.get_extra_info("sockname")[1])
    transport.close()


def test_a_port_is_opened_and_closed() -> None:
    async def main() -> None:
        async with router() as (server, asking):
            opened = await asking.open(4001)
            assert opened == Opened(4001, OUTSIDE, 4001, LEASE_S)
            assert server.rules.ports == {4001: (HOST, 4001, LEASE_S)}
            server.rules.taken[4002] = "another"
            other = await asking.open(4002)
            assert other.outside == 4003
            assert await asking.open(4002) == other, "asked for anew"
            await asking.close(opened)
            await asking.close(other)
            assert server.rules.ports == {}

    asyncio.run(main())


def test_what_is_lost_on_the_way_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nat_pmp, "FIRST_WAIT_S", 0.01)

    async def main() -> None:
        async with router() as (server, asking):
            server.lose = 2
            assert (await asking.open(4001)).outside == 4001
            server.lose = 100
            with pytest.raises(RouterError, match="no answer"):
                await asking.open(4001)

    asyncio.run(main())


def test_why_a_router_refuses_is_said() -> None:
    async def main() -> None:
        async with router() as (server, asking):
            server.result = 2
            with pytest.raises(RouterError, match="told not to"):
                await asking.open(4001)
            assert not server.rules.ports
        with pytest.raises(RouterError):
            await asking.open(4001)  # nobody listens there any more

    asyncio.run(main())


@pytest.mark.parametrize(
    "said", [b"", b"\0", bytes(100), b"\1\x80" + bytes(10), b"\0\x82" + bytes(10), b"\0\x80" * 3]
)
def test_nonsense_is_no_answer(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(nat_pmp, "FIRST_WAIT_S", 0.01)

    class Babbler(NatPmpServer):
        def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
            self._transport.sendto(said, sender)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: Babbler(Rules(OUTSIDE)), local_addr=(HOST, 0)
        )
        with pytest.raises(RouterError, match="no answer"):
            await NatPmp(HOST, transport.get_extra_info("sockname")[1]).open(4001)
        transport.close()

    asyncio.run(main())
