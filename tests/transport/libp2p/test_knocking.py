"""Whether anybody listens at an address: real sockets on loopback."""

from __future__ import annotations

import asyncio
import socket
from math import inf

import pytest

import swarmnet.system as system
from swarmnet.transport.libp2p.knocking import (
    Answer,
    Heard,
    knock,
    knock_at,
    round_trip_to,
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


@pytest.mark.parametrize("portable", [True, False])
def test_each_answer_is_told_apart_and_timed(
    portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all systems: with what the kernel says, and without."""
    monkeypatch.setattr(system, "PORTABLE", portable)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            for host in ("127.0.0.1", "localhost"):
                answer = await knock_at(host, port)
                assert answer.heard is Heard.OPEN
                assert 0 < answer.round_trip_s < 1
            assert 0 < await round_trip_to("127.0.0.1", port) < 1
        assert await knock_at("127.0.0.1", port) == Answer(Heard.CLOSED)
        assert await round_trip_to("127.0.0.1", port) == inf
        assert (await knock_at("no name", port)).heard is Heard.NO_NAME
        assert (await knock_at("x" * 300, port)).heard is Heard.NO_NAME
        assert (await knock_at("255.255.255.255", port)).heard is Heard.NO_WAY
        assert [h for h in Heard if h.is_there] == [Heard.OPEN, Heard.CLOSED]

    asyncio.run(scenario())
