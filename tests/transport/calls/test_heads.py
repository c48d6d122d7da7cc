"""What the heads of requests say."""

from __future__ import annotations

import pytest

from swarmnet.errors import ProtocolViolation
from swarmnet.transport.calls.heads import (
    FIRST_SEATS,
    MAX_TEXT,
    method_of,
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
