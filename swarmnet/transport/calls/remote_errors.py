"""Errors of handlers as they travel to the caller."""

from __future__ import annotations

from typing import Any

from swarmnet.errors import ProtocolViolation, Refused, RemoteError, remote_error
from swarmnet.transport.calls.heads import MAX_TEXT

RESERVED_DETAILS = ("self", "text")
"""Parameters of `RemoteError` that are no details."""


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
    return remote_error(code, text[:MAX_TEXT], kept)
