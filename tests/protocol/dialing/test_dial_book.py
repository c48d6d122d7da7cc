"""Where a peer is dialled, at whose word, and how often."""

from __future__ import annotations

from swarmnet.protocol.dialing.dial_book import (
    HOST_BURST,
    MAX_ADDRESSES,
    MAX_TARGETS,
    NAMER_BURST,
    PORT_BURST,
    PORT_PER_S,
    DialBook,
    at_seen_host,
)
from swarmnet.protocol.dialing.zones import Here


def at(host: str, port: int = 4001) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


OWN = [at("192.168.1.5")]
HERE = Here.at(OWN)
VICTIM = "200.5.5.99"


def dialled(book: DialBook, peer_id: str, now: float = 0.0) -> list[str]:
    return book.dialled(peer_id, OWN, HERE, now)


def test_what_a_peer_says_of_places_where_it_cannot_be_is_not_dialled() -> None:
    book = DialBook()
    inside = [at("127.0.0.1"), at("10.0.0.1"), at("200.5.5.1", 22), "/dns4/evil.example/tcp/4001"]
    book.learn("x", [*inside, at("200.5.5.1"), at("192.168.1.7") + "/p2p/x"])
    assert dialled(book, "x") == [at("200.5.5.1"), at("192.168.1.7")]
    book.saw("x", at("200.5.5.1", 33333))
    assert dialled(book, "x") == [at("200.5.5.1")], "it is in no home network"


def test_what_a_person_names_is_dialled_as_it_is() -> None:
    book = DialBook()
    book.given("x", "/dns4/peer.example/tcp/443/p2p/x")
    book.learn("x", [at("200.5.5.1")])
    assert dialled(book, "x") == [at("200.5.5.1"), "/dns4/peer.example/tcp/443"]
    assert dialled(book, "y") == []
    book.given("first", at("10.3.0.1"))
    book.learn("y", [at("10.3.0.2")])
    here = book.here(OWN, ())
    assert book.dialled("y", OWN, here, 0.0) == [at("10.3.0.2")], "the run lives in that network"


def test_many_names_do_not_make_many_dials_of_one_port() -> None:
    book = DialBook()
    for n in range(1000):
        book.learn(f"liar {n}", [at(VICTIM, 8080)])
    dials = sum(len(dialled(book, f"liar {n}")) for n in range(1000))
    assert dials == PORT_BURST
    later = sum(len(dialled(book, f"liar {n}", 60.0)) for n in range(1000))
    assert later == min(PORT_BURST, 60.0 * PORT_PER_S)


def test_nobody_has_a_host_searched_for_open_ports() -> None:
    book, ports = DialBook(), iter(range(2000, 60_000))
    num_dials = 0
    for n in range(500):
        book.learn(f"liar {n}", [at(VICTIM, next(ports)) for _ in range(MAX_ADDRESSES)])
        num_dials += len(dialled(book, f"liar {n}"))
    assert num_dials == HOST_BURST


def test_one_peer_has_few_places_dialled_however_often_it_moves() -> None:
    book, num_dials = DialBook(), 0
    for n in range(1000):
        book.learn("liar", [at(f"200.5.{n % 200}.{n // 200}", 5000 + n)])
        num_dials += len(dialled(book, "liar"))
    assert num_dials == NAMER_BURST


def test_a_peer_that_answers_is_dialled_as_often_as_it_takes() -> None:
    book = DialBook()
    for n in range(1000):
        book.learn(f"peer {n}", [at("200.5.5.1", 2000 + n)])
        assert dialled(book, f"peer {n}"), "many peers behind one address"
        book.saw(f"peer {n}", at("200.5.5.1", 2000 + n))
    for _ in range(100):
        assert dialled(book, "peer 0") == [at("200.5.5.1", 2000)]


def test_a_visitor_that_comes_again_and_again_buys_no_dials() -> None:
    book, num_dials = DialBook(), 0
    for n in range(200):
        book.learn("liar", [at(VICTIM, 8080)])
        num_dials += len(dialled(book, "liar"))
        book.saw("liar", at("200.5.5.1", 30_000 + n))
    assert num_dials == PORT_BURST


def test_of_a_ticket_few_places_are_dialled_and_those_where_the_peer_may_be() -> None:
    book = DialBook()
    wrong = [
        ("localhost", 5000),
        ("internal.example", 5000),
        ("0.0.0.0", 5000),
        ("224.0.0.1", 5000),
        ("169.254.169.254", 5000),
        ("10.0.0.1", 5000),
        ("200.5.5.7", 22),
        ("::", 5000),
    ]
    here = [("127.0.0.1", 5000), ("::1", 5000), ("::ffff:127.0.0.1", 5000)]
    outside = ("200.5.5.7", 5000)

    def chosen(*named: tuple[str, int], is_here: bool) -> list[tuple[str, int]]:
        found = book.targets("x", named, HERE, 0.0, is_here=is_here)
        return [(str(host), port) for host, port in found]

    assert chosen(*wrong, *here, outside, is_here=False) == [outside]
    assert chosen(*wrong, outside, *here, is_here=True) == [*here[:2], outside]
    many = [(f"200.5.6.{n}", 5000) for n in range(60)]
    assert chosen(*many, is_here=False) == many[:MAX_TARGETS]
    both = [(f"2a01:4f8::{n}", 5000) for n in range(1, 9)] + [outside]
    assert outside in chosen(*both, is_here=False)[:2], "not all may have IPv6"


def test_a_relay_is_dialled_where_it_may_be() -> None:
    book = DialBook()
    assert book.may_connect("x", "r", at("200.5.5.1"), HERE, 0.0)
    assert not book.may_connect("x", "r", at("127.0.0.1"), HERE, 0.0)
    assert not book.may_connect("x", "r", "/dns4/evil.example/tcp/4001/p2p/r", HERE, 0.0)
    book.given("r", "/dns4/relay.example/tcp/443/p2p/r")
    assert book.may_connect("x", "r", "/dns4/relay.example/tcp/443/p2p/r", HERE, 0.0)


def test_who_asks_to_be_dialled_back_is_dialled_where_it_is_seen() -> None:
    seen = at("200.5.5.1", 33_333)
    assert at_seen_host(at("10.0.0.7", 4001), seen) == at("200.5.5.1", 4001)
    assert at_seen_host(at(VICTIM, 4001), seen) == at("200.5.5.1", 4001)
    assert at_seen_host(at("127.0.0.1", 22), seen) == ""
    assert at_seen_host("/dns4/evil.example/tcp/4001", seen) == ""
    assert at_seen_host(at("10.0.0.7", 4001), "") == ""
    assert at_seen_host(at("::1"), at("fe80::1")) == ""
    assert at_seen_host(at("10.0.0.7"), at("127.0.0.1", 5)) == at("127.0.0.1")
