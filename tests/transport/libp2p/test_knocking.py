"""Whether anybody listens at an address: real sockets on loopback."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarmnet.transport.libp2p.knocking import (
    Heard,
    knock,
    knock_at,
    tcp_target,
)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("/ip4/192.0.2.7/tcp/4001", ("192.0.2.7", 4001)),
        ("/ip6/2001:db8::1/tcp/4001", ("2001:db8::1", 4001)),
        ("/dns4/example.org/tcp/1", ("example.org", 1)),
        ("/ip4/192.0.2.7/udp/4001/quic", None),
        ("/ip4/192.0.2.7/tcp/4001/ws", None),
        ("/ip4/192.0.2.7/tcp/x", None),
        ("/ip4/192.0.2.7/tcp/99999", None),
        ("/ip4/192.0.2.7/tcp/" + "9" * 5000, None),
        ("ip4/192.0.2.7/tcp/4001/", None),
        ("", None),
    ],
)
def test_only_plain_tcp_can_be_asked(address: str, target: tuple[str, int] | None) -> None:
    assert tcp_target(address) == target


def test_one_that_listens_is_enough() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            here, nowhere = (f"/ip4/127.0.0.1/tcp/{s.getsockname()[1]}" for s in (listening, bound))
            assert await knock([nowhere, here]) is Heard.OPEN
            assert await knock([nowhere]) is Heard.CLOSED
            assert await knock([]) is Heard.OPEN
            assert await knock([nowhere, "/ip4/127.0.0.1/udp/1/quic"]) is Heard.OPEN, "who knows?"

    asyncio.run(scenario())


def test_each_answer_is_told_apart() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            for host in ("127.0.0.1", "localhost"):
                assert await knock_at(host, port) is Heard.OPEN
        assert await knock_at("127.0.0.1", port) is Heard.CLOSED
        for name in ("no name", "x" * 300):
            assert await knock_at(name, port) is Heard.NO_NAME
        assert await knock_at("255.255.255.255", port) is Heard.NO_WAY
        assert [h for h in Heard if h.is_there] == [Heard.OPEN, Heard.CLOSED]

    asyncio.run(scenario())
