"""What is said of a method that peers call on each other: one row.

What is checked of a call, in this order, and nothing is kept of it before its end:

1. how large it is: its body and its arrays (`body_bytes`, `arrays`);
2. who calls (`caller`): the run that it says it is of, its invite where the run is closed, and what
   its signed record says of it. All of that is known from the first bytes of a call;
3. how often it calls (`quota`);
4. only now its body is decoded, to the one class that the method takes (`request`);
5. whether this peer serves a stage, or that which the body names, with its shards (`callee`).

`swarm.membership.callers.CallerChecks` enforces that for every call, whatever carries it. What
arrays a call must have exactly, and whether its round is open, is seen by the handler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, Generic, TypeVar, cast

from swarmnet.wire import Message, convert

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
T = TypeVar("T")


class Caller(Enum):
    """Who may call. Each value is what docs/protocol.md says."""

    ANYONE = "anyone"
    RUN = "of the run"
    ADMITTED = "admitted"
    STAGE = "replica of the stage, or joining it"
    WORKING = "replica of the stage"
    LEAVING = "leaving replica of the stage"
    REPLICA = "replica of the stage named"


class Callee(Enum):
    """What the called peer must be. What asks for a replica is served with the stage, and ends with
    it. Each value is what docs/protocol.md says."""

    ANY = "any"
    REPLICA = "serves a stage"
    STAGE = "serves the stage"
    SYNCED = "serves the stage, joined"


class Arrays(Enum):
    """What arrays a call may have. Each value is what docs/protocol.md says."""

    NONE = "none"
    PROBE = "4 MiB"
    SHARD = "a shard"
    SHARDS = "a shard, or several up to 16 MiB"
    MICROBATCH = "a microbatch"


MAX_PROBE_BYTES = 4 << 20
SHARED_CALL_BYTES = 16 << 20
"""Of the gradients of several shards in one call."""
TINY_BYTES, SMALL_BYTES, LIST_BYTES = 1 << 10, 128 << 10, 1 << 20
"""Of a body: a few numbers; a path; a number for each slot or shard."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How often one peer may call. Methods with the same quota share it.

    Names cost nothing, so all peers that do not take part in the run, as the callee sees it, have
    no more together than `STRANGERS_AT_A_TIME` of them."""

    calls_per_s: float
    burst: float
    of_members: bool = False
    """Of peers that take part in the run too."""


STRANGERS_AT_A_TIME = 16
"""Quotas: a few dozen newcomers in a minute need less."""
STRANGERS = Quota(20.0, 200.0)
"""For questions that anyone may ask."""
PROBES = Quota(0.1, 6.0, of_members=True)
FILES = Quota(10.0, 100.0)
"""For parts of 1 MiB."""
DATA = Quota(8.0, 16.0, of_members=True)
"""For parts of 1 MiB: what a fetching peer takes of an uplink at most."""
SAVES = Quota(4.0, 64.0, of_members=True)
"""For what has the callee look at its disk. Who fetches a model asks once a second."""
LOOKS = Quota(0.05, 6.0, of_members=True)
"""For what costs the callee an own connection."""


@dataclass(frozen=True, eq=False, slots=True)
class Method(Generic[RequestT, ReplyT]):
    """One row."""

    name: str
    request: type[RequestT]
    """Class of its body; `NoneType`: there is nothing in it."""
    reply: type[ReplyT]
    """Likewise."""
    caller: Caller
    callee: Callee = Callee.ANY
    body_bytes: int = TINY_BYTES
    arrays: Arrays = Arrays.NONE
    quota: Quota | None = None
    """None: as often as a channel takes calls."""
    progress: type = NoneType
    """Class of the bodies of progress messages; `NoneType`: there are none."""
    ends_with_caller: bool = False
    """Nobody but its caller has any use for the work: it ends when that waits no more. The work of
    other calls goes on, for another call may join it."""

    def request_in(self, body: Any) -> RequestT:
        """The body of a call that has come. Raises `ProtocolViolation`, like the next two."""
        return _decoded(body, self.request)

    def reply_in(self, message: Message) -> Message[ReplyT]:
        """What the callee said."""
        return replace(message, body=_decoded(message.body, self.reply))

    def progress_in(self, message: Message) -> Message:
        """What the callee said before its reply."""
        return replace(message, body=_decoded(message.body, self.progress))


def _decoded(body: Any, cls: type[T]) -> T:
    return cast(T, None) if cls is NoneType else convert(body, cls)
