"""What the heads of requests and of errors say."""

from __future__ import annotations

import pytest

from swarmnet.errors import Busy, ProtocolViolation, Refused, RemoteError
from swarmnet.transport.calls.heads import (
    FIRST_SEATS,
    MAX_TEXT,
    as_remote,
    describe,
    method_of,
    parse_error,
    parse_route,
    request_head,
    route_of,
)
from swarmnet.transport.frames import REQUEST, Head
from swarmnet.wire import Message


@pytest.mark.parametrize("route", [FIRST_SEATS, (0, 3), (63, 1)])
def test_a_head_says_method_body_and_seats(route: tuple[int, int]) -> None:
    values = request_head("m", Message([1]), route)
    assert ("s" in values) == (route != FIRST_SEATS)
    head = Head(REQUEST, 1, values, (), 0)
    assert (method_of(head), route_of(head), values["b"]) == ("m", route, [1])


@pytest.mark.parametrize("method", [None, 7, "x" * (MAX_TEXT + 1)])
def test_a_method_is_a_short_text(method: object) -> None:
    with pytest.raises(ProtocolViolation):
        method_of(Head(REQUEST, 1, {"m": method}, (), 0))


@pytest.mark.parametrize("value", [[1], [0, 64], [-1, 0], [0, True], "01", {}, [0.0, 1], [0, 1, 2]])
def test_a_route_is_two_seats(value: object) -> None:
    with pytest.raises(ProtocolViolation):
        parse_route(value)


# ---- errors on their way to the caller ----------------------------------------------------------


def test_what_is_described_is_parsed_to_the_same() -> None:
    error = parse_error(describe(Busy("full", backlog_s=2.5)))
    assert isinstance(error, Busy)
    assert (str(error), error.details) == ("full", {"backlog_s": 2.5})
    assert len(describe(RemoteError("x" * 9999))[1]) == MAX_TEXT


def test_what_a_caller_sees_of_an_error() -> None:
    busy = Busy("full", backlog_s=1.0)
    assert as_remote(busy) is busy
    assert type(as_remote(ProtocolViolation("wrong"))) is Refused
    assert str(as_remote(ZeroDivisionError("a bug"))) == "ZeroDivisionError: a bug"


def test_details_that_are_no_names_are_harmless() -> None:
    error = parse_error(["busy", "x", {"self": 1, "text": 2, "a b": 3, "backlog_s": 4}])
    assert isinstance(error, Busy)
    assert error.details == {"a b": 3, "backlog_s": 4}
    assert type(parse_error(["of a later version", "x", {}])) is RemoteError
