"""What the heads of frames say: the method, the body and the seats of a request, and the error of a
handler on its way to the caller."""

from __future__ import annotations

from typing import Any

from swarmnet.errors import ProtocolViolation, Refused, RemoteError, remote_error
from swarmnet.printable import printable
from swarmnet.protocol.membership.peer_ids import MAX_SEATS
from swarmnet.transport.frames import Head
from swarmnet.wire import Message

MAX_TEXT = 500
"""Characters of a method, a run id, an error's text."""
RESERVED_DETAILS = ("self", "text")
"""Parameters of `RemoteError` that are no details."""

Route = tuple[int, int]
"""(seat of the caller, seat of the callee)"""
FIRST_SEATS: Route = (0, 0)
"""What a message without a route says."""


def request_head(method: str, message: Message, route: Route) -> dict[str, Any]:
    """The values of the head of a request or a notification."""
    head: dict[str, Any] = {"m": method, "b": message.body}
    return head if route == FIRST_SEATS else {**head, "s": list(route)}


def method_of(head: Head) -> str:
    """The method of a request or a notification. Raises `ProtocolViolation`."""
    method = head.values.get("m")
    if not isinstance(method, str) or len(method) > MAX_TEXT:
        raise ProtocolViolation("a request without a method")
    return method


def route_of(head: Head) -> Route:
    """The seats of a request or a notification. Raises `ProtocolViolation`."""
    return parse_route(head.values.get("s"))


def parse_route(value: Any) -> Route:
    """A message's route as it travels; absent: between first seats. Raises `ProtocolViolation`."""
    if value is None:
        return FIRST_SEATS
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(seat) is int and 0 <= seat < MAX_SEATS for seat in value)
    ):
        return value[0], value[1]
    raise ProtocolViolation("a route that is not two seats")


def as_remote(error: Exception) -> RemoteError:
    """What a caller will see of a handler's error."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, ProtocolViolation):
        return Refused(str(error))
    return RemoteError(f"{type(error).__name__}: {error}")


def describe(error: RemoteError) -> list[Any]:
    """An error as it travels: code, text, details."""
    return [error.code, str(error)[:MAX_TEXT], error.details]


def parse_error(described: Any) -> RemoteError:
    """The reverse of `describe`. Raises `ProtocolViolation`."""
    if not (isinstance(described, list) and len(described) == 3):
        raise ProtocolViolation("an error without code, text and details")
    code, text, details = described
    if not (isinstance(code, str) and isinstance(text, str) and isinstance(details, dict)):
        raise ProtocolViolation("an error without code, text and details")
    if not all(isinstance(name, str) for name in details):
        raise ProtocolViolation("an error with impossible details")
    kept = {name: value for name, value in details.items() if name not in RESERVED_DETAILS}
    return remote_error(code, printable(text[:MAX_TEXT]), kept)
