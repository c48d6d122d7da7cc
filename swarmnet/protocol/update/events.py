"""What may happen in the update of one shard: the input of `shard_update`.

Tensors are handles: whatever the caller keeps them as. `call` names a call of another replica that
waits for an answer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnet.protocol.update.roster import Ballot, MemberStatus

Handle = Any
"""Whatever the caller keeps a tensor as."""
Call = Hashable


@dataclass(frozen=True, slots=True)
class Begun:
    """This replica has closed the round."""

    num_tokens: int
    gradient: Handle | None
    """None for no tokens."""
    members: tuple[str, ...] = ()
    """Neighbours of this replica whose contributions are in it too."""
    neighbour: str = ""
    """Who has this one in its own contribution, and gives the result on; empty where nobody has
    said so."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the other members now. Complete: it replaces what was known before."""

    members: Mapping[str, MemberStatus]
    counted: int = 0
    """Tokens that contributions have to come up to, because not all who hold some may be known
    yet; 0 where nobody is missed."""
    is_kept: bool = False
    """The optimizer state, which this replica lacks, is with one that lives, and that it cannot
    call; or so it may be."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Another replica's contribution, which waits for the result."""

    call: Call | None
    """None for the answer to a `Pull`: nobody waits. Its ballot is this replica's own."""
    sender: str
    ballot: Ballot
    num_tokens: int
    gradient: Handle | None
    members: tuple[str, ...] = ()
    """Neighbours of the sender whose contributions are in it too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Another replica takes over. `is_final` is False for the question before: would this replica
    promise the ballot?"""

    call: Call
    sender: str
    ballot: Ballot
    is_final: bool


@dataclass(frozen=True, slots=True)
class Agreed:
    """A member would promise the ballot of the question, or (`is_final`) has promised that of the
    announcement: an answer to a question binds nobody. One that has not begun the exchange follows
    no other primary, and finds the result when it comes: it counts as if it had promised."""

    sender: str
    ballot: Ballot
    is_final: bool
    count: int
    """That of the `Ask` which it answers."""


@dataclass(frozen=True, slots=True)
class Denied:
    """A member does not: `ballot` is the one that it goes by. The answer to a question, an
    announcement, a push or a mirrored step."""

    sender: str
    ballot: Ballot
    asked: Ballot | None = None
    """That of the call which it answers."""
    count: int | None = None
    """That of the `Ask` which it answers."""


@dataclass(frozen=True, slots=True)
class MirrorCame:
    """The primary has this backup make its step."""

    call: Call
    sender: str
    ballot: Ballot
    step: Handle
    fits: bool
    """The state here is the one before that step."""


@dataclass(frozen=True, slots=True)
class ResultCame:
    """The shard's result, from any replica that has it."""

    sender: str
    result: Handle
    ballot: Ballot
    """That of the push or the `Ask` which it answers."""
    made: Ballot | None = None
    """Of the primary whose signature it bears; its sender's own where it bears none. None where
    that was not looked at: it is of the primary that this replica goes by, or nothing is signed."""


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The call to `target` ended without an answer, or with a refusal for now."""

    target: str


@dataclass(frozen=True, slots=True)
class Summed:
    """The contributions have been aggregated; None where there is nothing to sum."""

    total: Handle | None
    attempt: int


@dataclass(frozen=True, slots=True)
class ClipKnown:
    """The norm over all stages is here, or not needed, or will not come."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """The step has been made here: as primary or as backup."""

    result: Handle
    attempt: int
    is_whole: bool = True
    """Of a backup's: it lacks nothing of the primary's. So there is no rest of it that this alone
    makes, both machines make the same bits, and it says whose contributions are in its sum."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A backup could not make the step."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A backup has made the step. In gossip averaging: the partner has this replica's offer."""

    sender: str
    attempt: int
    """That of the `Mirror` which it answers; in gossip averaging the present one."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A backup has not made the step, and will not."""

    sender: str
    attempt: int


@dataclass(frozen=True, slots=True)
class MirrorFailed:
    """The call to a backup ended without an answer."""

    sender: str
    attempt: int


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Members that live have had the time for their contributions."""


@dataclass(frozen=True, slots=True)
class GracePassed:
    """The grace is over that contributions have beside a quorum."""


@dataclass(frozen=True, slots=True)
class Again:
    """The pause before another try is over."""


@dataclass(frozen=True, slots=True)
class Unled:
    """This replica has had no primary that lives for as long as a takeover may take."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """This process stood still for so long that others may have taken it for dead."""


@dataclass(frozen=True, slots=True)
class MovedOn:
    """The stage has moved on by more than this exchange."""


Event = (
    Begun
    | Seen
    | Pushed
    | Asked
    | Agreed
    | Denied
    | MirrorCame
    | ResultCame
    | PushFailed
    | Summed
    | ClipKnown
    | Stepped
    | StepFailed
    | Confirmed
    | Refused
    | MirrorFailed
    | DeadlinePassed
    | GracePassed
    | Again
    | Unled
    | StoodStill
    | MovedOn
)
