"""What is to be done in the update of one shard: the output of `shard_update`."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.protocol.update.events import Call, Handle
from swarmnet.protocol.update.roster import Ballot


@dataclass(frozen=True, slots=True)
class Push:
    """Call `target` with the own contribution; its answer is the result. An earlier push of the
    shard is given up: whatever it still brings does not count."""

    target: str
    ballot: Ballot
    has_gradient: bool = True
    """False where `target` is not the primary: the result is waited for there, no more."""


@dataclass(frozen=True, slots=True)
class GiveUpPush:
    """End the call that is under way: nothing that it still brings counts."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Gossip averaging: ask `target` for its contribution."""

    target: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Tell members of the ballot, or (`is_final` False) ask whether they would promise it."""

    members: tuple[str, ...]
    ballot: Ballot
    is_final: bool
    count: int
    """To be given back with `Agreed`: a promise of before an earlier count may be broken by now."""


@dataclass(frozen=True, slots=True)
class Give:
    """Answer a call with the result."""

    call: Call
    result: Handle
    is_late: bool = False
    """The contribution that the call has brought, if any, is not in it: this replica brings it into
    the shard's next exchange."""


@dataclass(frozen=True, slots=True)
class Agree:
    """Answer a question or an announcement: yes."""

    call: Call
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Deny:
    """Answer any call with the ballot by which this replica goes: `ballot.primary` is the one to
    ask."""

    call: Call
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Confirm:
    """Answer the primary: its step has been made here."""

    call: Call
    result: Handle
    """Of the step that was made here: the primary need not give it out to this backup if its own is
    the same."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the primary: its step cannot be made here; it goes on without."""

    call: Call


@dataclass(frozen=True, slots=True)
class Sum:
    """Aggregate the contributions. `parts`: ascending by peer."""

    parts: tuple[tuple[str, int, Handle], ...]
    """Peer, tokens, gradient; only those with tokens."""
    senders: frozenset[str]
    """All who are told that they were counted."""
    absent: tuple[str, ...]
    """Members that live, and were waited for in vain."""
    attempt: int
    """To be given back with `Summed`: what an earlier attempt brings does not count."""
    late: tuple[str, ...] = ()
    """Members that live, and for which nobody waits beside a quorum."""


@dataclass(frozen=True, slots=True)
class FindNorm:
    """Add the sum's squares to the norm of all stages, and find out its total. These backups, which
    will be asked to make the step too, may be given the sum meanwhile."""

    attempt: int
    total: Handle | None
    backups: tuple[str, ...]
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Step:
    """Make the step with the sum, as primary. `total` None: there is no step to be made, the
    parameters stay as they are."""

    total: Handle | None
    ballot: Ballot
    attempt: int


@dataclass(frozen=True, slots=True)
class Mirror:
    """Have these backups make the step too."""

    total: Handle | None
    backups: tuple[str, ...]
    ballot: Ballot
    attempt: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Make the primary's step, as backup."""

    step: Handle
    attempt: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """This is the shard of the coming round. `is_own`: the step was made here."""

    result: Handle
    is_own: bool


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The step that was made here does not hold: the state of the shard has seen other gradients
    than that of the others."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The result cannot be had any more: fetch the stage's parameters."""


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Send `DeadlinePassed` when members that live have had the time for their contributions."""


@dataclass(frozen=True, slots=True)
class SetGrace:
    """Send `GracePassed` when those that are about as fast as the quorum have had the time for
    their contributions."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Send `Again` after the usual pause between two tries."""


@dataclass(frozen=True, slots=True)
class LookInto:
    """Find out whether a peer lives: another one takes it for dead."""

    peer_id: str


Command = (
    Push
    | GiveUpPush
    | Pull
    | Ask
    | Give
    | Agree
    | Deny
    | Confirm
    | Refuse
    | Sum
    | FindNorm
    | Step
    | Mirror
    | Repeat
    | Adopt
    | Spoiled
    | Abandon
    | SetDeadline
    | SetGrace
    | Pause
    | LookInto
)
