"""Where a daemon listens, and why it cannot."""

from __future__ import annotations

import pytest

from swarmnet.errors import AddressError, TransportError
from swarmnet.transport.libp2p.listening import ListenAddress

HOST = "127.0.0.1"


def test_the_port_of_the_first_start_is_kept() -> None:
    listen = ListenAddress("::1", 0)
    assert listen.multiaddr == "/ip6/::1/tcp/0"
    listen.keep_port(["/ip6/::1/udp/9/quic", "/ip6/::1/tcp/4001"])
    listen.keep_port([])
    assert (listen.port, listen.multiaddr) == (4001, "/ip6/::1/tcp/4001")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("bind: address already in use", AddressError, "is taken; choose another --port"),
        ("bind: permission denied", AddressError, "choose a --port above 1023"),
        ("cannot assign requested address", AddressError, "choose another --host"),
        ("failed to parse multiaddr", AddressError, "is no IP address to listen on"),
        ("failed to listen on any addresses", AddressError, "cannot be used"),
        ("panic: a bug", TransportError, "p2pd did not start: panic: a bug"),
    ],
)
def test_each_reason_has_its_remedy(text: str, error: type[Exception], said: str) -> None:
    failure = ListenAddress(HOST, 80).failure(text)
    assert type(failure) is error
    assert said in str(failure)
