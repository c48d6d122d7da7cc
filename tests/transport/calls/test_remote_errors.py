"""Errors on their way to the caller."""

from __future__ import annotations

from swarmnet.errors import Busy, ProtocolViolation, Refused, RemoteError
from swarmnet.transport.calls.heads import MAX_TEXT
from swarmnet.transport.calls.remote_errors import as_remote, describe, parse_error


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
