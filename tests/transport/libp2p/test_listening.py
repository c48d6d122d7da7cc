"""Where a daemon listens, and why it cannot."""

from __future__ import annotations

import errno
import socket
from contextlib import closing

import pytest

from swarmnet.errors import AddressError, PortTaken, TransportError, WrongAddress
from swarmnet.identity import Identity
from swarmnet.transport.libp2p.interfaces import (
    ANY_HOSTS,
    ANY_INTERFACE,
    bound,
    listening_hosts,
)
from swarmnet.transport.libp2p.listening import ListenAddress, announced
from swarmnet.transport.libp2p.p2pd import P2pdCarrier
from swarmnet.transport.libp2p.py_libp2p import PyLibp2pCarrier

HOST, HOST_2 = "127.0.0.1", "127.0.0.2"


def test_the_port_of_the_first_start_is_kept() -> None:
    listen = ListenAddress("::1", 0)
    assert listen.multiaddrs == ["/ip6/::1/tcp/0"]
    listen.keep_port(["/ip6/::1/udp/9/quic", "/ip6/::1/tcp/4001"])
    listen.keep_port([])
    assert (listen.port, listen.multiaddrs) == (4001, ["/ip6/::1/tcp/4001"])


def needs_both() -> None:
    if listening_hosts(ANY_INTERFACE) != ANY_HOSTS:
        pytest.skip("this machine does not have both IPv4 and IPv6")


def test_both_families_have_one_port() -> None:
    needs_both()
    listen = ListenAddress(ANY_INTERFACE, 0)
    listen.claim()
    assert listen.port
    assert listen.multiaddrs == [f"/ip4/0.0.0.0/tcp/{listen.port}", f"/ip6/::/tcp/{listen.port}"]


@pytest.mark.parametrize("family", range(2))
def test_a_port_that_is_taken_in_one_family_is_taken(family: int) -> None:
    """A daemon that gets one of its addresses is content, and half of the world never finds it."""
    needs_both()
    [other] = bound(ANY_HOSTS[family : family + 1], 0)
    with closing(other):
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken; choose another --port"):
            ListenAddress(ANY_INTERFACE, port).claim()
        assert (bound(ANY_HOSTS[1 - family : 2 - family], port)[0]).close() is None


def test_a_machine_without_a_family_listens_in_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without IPv6, or with a kernel that has none."""
    real = socket.socket

    def without_6(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no such family")
        return real(family, *rest)

    monkeypatch.setattr(socket, "socket", without_6)
    assert ListenAddress(ANY_INTERFACE, 4001).multiaddrs == ["/ip4/0.0.0.0/tcp/4001"]


def test_any_port_is_one_that_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class OnceTaken(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            asked.append(address[1])
            if len(asked) == 2:
                raise OSError(errno.EADDRINUSE, "taken")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", OnceTaken)
    first, second = bound((HOST, HOST_2), 0)
    with closing(first), closing(second):
        assert first.getsockname()[1] == second.getsockname()[1] == asked[-1]
    assert [port != 0 for port in asked] == [False, True, False, True]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("bind: address already in use", PortTaken, "is taken; choose another --port"),
        ("bind: permission denied", WrongAddress, "choose a --port above 1023"),
        ("cannot assign requested address", AddressError, "choose another --host"),
        ("failed to parse multiaddr", WrongAddress, "is no IP address to listen on"),
        ("failed to listen on any addresses", AddressError, "cannot be used"),
        ("panic: a bug", TransportError, "p2pd did not start: panic: a bug"),
    ],
)
def test_each_reason_has_its_remedy(text: str, error: type[Exception], said: str) -> None:
    failure = ListenAddress(HOST, 80).failure(text)
    assert type(failure) is error
    assert said in str(failure)


OWN, OTHER = Identity(bytes(32)), Identity(bytes([1] * 32))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense", "is no address at which a peer listens"),
        ("/pigeon/4", "is no address"),
        ("/ip4/203.0.113.7/udp/4001/quic-v1", "is no address"),
        (f"/ip4/203.0.113.7/tcp/4001/p2p/{OTHER.peer_id}/p2p-circuit", "is no address"),
        ("/ip4/203.0.113.7", "has no port"),
        ("/dns4/home.example.org", "has no port"),
        ("/ip4/203.0.113.7/tcp/0", "has no port"),
        ("/ip4/203.0.113.7/tcp/70000", "has no port"),
        (f"/ip4/203.0.113.7/tcp/4001/p2p/{OTHER.peer_id}", "names another peer"),
        ("/ip6/203.0.113.7/tcp/4001", "has no IP address of that kind after /ip6/"),
        ("/ip4/home.example.org/tcp/4001", "has no IP address of that kind after /ip4/"),
        ("/dns4/203.0.113.7/tcp/4001", "has no name of a machine"),
        ("/dns/so it is/tcp/4001", "has no name of a machine"),
        ("/ip4/0.0.0.0/tcp/4001", "has an address of no machine"),
        ("/ip4/224.0.0.1/tcp/4001", "has an address of no machine"),
        ("/ip4/169.254.3.4/tcp/4001", "has an address of no machine"),
        ("/ip6/fe80::1/tcp/4001", "has an address of no machine"),
        ("/ip4/127.0.0.1/tcp/4001", "leads each other machine to itself"),
    ],
)
@pytest.mark.parametrize("carrier", [P2pdCarrier, PyLibp2pCarrier])
def test_what_cannot_be_an_address_of_this_peer_is_not_announced(
    carrier: type[P2pdCarrier | PyLibp2pCarrier], address: str, said: str
) -> None:
    with pytest.raises(WrongAddress, match=said) as caught:
        carrier(OWN, host="0.0.0.0", announce=["/ip4/203.0.113.7/tcp/4001", address])
    assert "\n" not in str(caught.value)


def test_an_announced_address_ends_in_the_own_id_once() -> None:
    end = f"/p2p/{OWN.peer_id}"
    given = ["/dns/home.example.org/tcp/4001", "/ip6/2001:db8::7/tcp/4001/", "/ip4/10.1.2.3/tcp/1"]
    told = announced([*given, f"/ip4/203.0.113.7/tcp/443{end}"], OWN.peer_id, "0.0.0.0")
    assert told == (
        f"/dns/home.example.org/tcp/4001{end}",
        f"/ip6/2001:db8::7/tcp/4001{end}",
        f"/ip4/10.1.2.3/tcp/1{end}",
        f"/ip4/203.0.113.7/tcp/443{end}",
    )
    loopback = "/ip4/127.0.0.1/tcp/4001"
    assert announced([loopback], OWN.peer_id, "127.0.0.1") == (loopback + end,)
