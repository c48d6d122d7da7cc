"""What it was when another peer does not do what it was asked for: which cause, of whom, and what
to do about it.

All commands that ask others (export, generate, doctor, dashboard, status, invite, a joining peer)
say it in the words of `TABLE`. Code that tries again keeps the errors of all that it has asked, and
tells them at its end: the last error alone is that of whoever happened to be asked last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swarmnet.errors import (
    Busy,
    DeadlineExceeded,
    Gone,
    InviteError,
    NoRoute,
    NotNow,
    NotReady,
    ProtocolViolation,
    Redirect,
    Refused,
    RemoteError,
    Stale,
    SwarmnetError,
    Taken,
    TransportError,
    Unreachable,
    Unsupported,
    UserError,
    WrongProtocol,
    WrongRun,
    WrongVersion,
)

REASON_CHARS = 200
"""Of what a peer said itself."""
NAME_CHARS = 8
"""Of a machine's id: its end."""
SEPARATOR = "/"
"""Between a machine's id and the number of its seat, as in `protocol.membership.peer_ids`, whose
folder imports this module."""
NOBODY = " "
"""No id of a peer begins so."""
DOCTOR = " (swarmnet doctor --join ADDR)"
"""What looks further where a peer is not reached."""
NAMED = 3
"""Peers that a line names."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One row."""

    code: str
    kinds: tuple[type[SwarmnetError], ...]
    says: str
    """Of a peer."""
    mend: str
    """What a person can do."""
    lasts: bool = False
    """Whoever asks the same peer again hears the same."""


TABLE = (
    Cause(
        "closed",
        (InviteError,),
        "the run is closed, and no good invite was shown",
        "ask the run's owner for an invite, then add --invite INVITE",
        lasts=True,
    ),
    Cause(
        "version",
        (WrongVersion,),
        "another version of the protocol",
        "install the same version of swarmnet on both machines",
        lasts=True,
    ),
    Cause(
        "no_peer",
        (WrongProtocol,),
        "no peer of swarmnet answers there",
        "see whose port it is, and take the address that the peer prints",
        lasts=True,
    ),
    Cause(
        "another_run",
        (WrongRun,),
        "in another run",
        "name an address of the run that is meant",
        lasts=True,
    ),
    Cause(
        "unknown",
        (Unsupported,),
        "what was asked is unknown to its version of swarmnet",
        "update the older of the two, or ask another peer",
        lasts=True,
    ),
    Cause(
        "refused",
        (Refused,),
        "refused",
        "ask for something else, or ask another peer",
        lasts=True,
    ),
    Cause(
        "wrong",
        (ProtocolViolation,),
        "an answer that cannot be right",
        "ask another peer, or compare the versions of swarmnet where all do it",
        lasts=True,
    ),
    Cause(
        "failed",
        (RemoteError,),
        "failed at it",
        "see the log of that peer, or ask another one",
    ),
    Cause(
        "not_yet",
        (NotReady,),
        "not yet, or not any more",
        "try again in a while",
    ),
    Cause(
        "past",
        (Stale,),
        "in another round by now",
        "try again",
    ),
    Cause(
        "no_next",
        (NoRoute,),
        "found no peer of the next stage",
        "wait until each stage has a peer (swarmnet status shows it)",
    ),
    Cause(
        "elsewhere",
        (Taken, Redirect),
        "left to another peer",
        "try again",
    ),
    Cause(
        "busy",
        (Busy,),
        "busy",
        "try again in a moment",
    ),
    Cause(
        "too_slow",
        (DeadlineExceeded,),
        "no answer in time",
        "try again, or ask a peer with a better link",
    ),
    Cause(
        "gone",
        (TransportError, Gone),
        "gone while it was asked",
        "try again, or ask another peer",
    ),
    Cause(
        "unreachable",
        (Unreachable,),
        "not reached",
        f"see whether the peer runs, and its address and firewall{DOCTOR}",
    ),
)
"""What a person can mend first comes first: where peers have failed in several ways, that is told
first."""
_ROW_OF = {kind: row for row in TABLE for kind in row.kinds}


def cause_of(error: SwarmnetError) -> Cause | None:
    """The row of an error; None where it is not of another peer. An error for people is its own
    line."""
    if is_closed(error):
        return TABLE[0]
    return next((_ROW_OF[kind] for kind in type(error).__mro__ if kind in _ROW_OF), None)


def is_closed(error: SwarmnetError) -> bool:
    """A peer of a closed run has been shown no invite that is good."""
    return isinstance(error, Refused) and error.details.get("closed") is True


def told(error: SwarmnetError) -> str:
    """What it was, of whom, and what to do; the text of an error for people as it is."""
    return Failures([error]).told()


def taken_apart(line: str) -> tuple[str, str]:
    """A line that was `told`, or of an error, without what to do at its end, and that; empty where
    the line does not say it."""
    mends = (row.mend for row in TABLE if line.endswith(f"; {row.mend}"))
    mend = next(mends, "")
    return (line.removesuffix(f"; {mend}"), mend) if mend else (line, "")


@dataclass
class Failures:
    """Errors of peers that were asked for the same, the last one of each."""

    given: Iterable[SwarmnetError] = ()
    _by_peer: dict[str, SwarmnetError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for n, error in enumerate(self.given):
            self._by_peer[error.peer_id or f"{NOBODY}{n}"] = error

    def __bool__(self) -> bool:
        return bool(self._by_peer)

    def __iter__(self) -> Iterator[SwarmnetError]:
        return iter(self._by_peer.values())

    def add(self, error: SwarmnetError, peer_id: str = "") -> None:
        """What a peer was asked has failed. `peer_id`: where the error does not know it."""
        self._by_peer[peer_id or error.peer_id or NOBODY] = error

    def answered(self, peer_id: str) -> None:
        """This one did it, this time."""
        self._by_peer.pop(peer_id, None)

    def first(self) -> SwarmnetError | None:
        """The one that is told first."""
        return min(self._by_peer.values(), key=_rank, default=None)

    @property
    def mend(self) -> str:
        """What to do about the first; empty where that is not known."""
        first = self.first()
        row = None if first is None else cause_of(first)
        return "" if row is None else row.mend

    def told(self) -> str:
        """All of them, in one line, and what to do about the first. Empty where there is none."""
        groups: dict[str, list[str]] = {}
        reasons: dict[str, str] = {}
        for peer_id, error in sorted(self._by_peer.items(), key=lambda item: _rank(item[1])):
            row = cause_of(error)
            says = row.says if row is not None else ""
            groups.setdefault(says, []).append(peer_id)
            reasons.setdefault(says, _reason(error))
        parts = [_part(_names(peers), says, reasons[says]) for says, peers in groups.items()]
        return "; ".join(filter(None, [*parts, self.mend]))

    def as_error(self, what: str, otherwise: type[SwarmnetError] = NotNow) -> SwarmnetError:
        """For people. `what`: the beginning of the line. `otherwise`: where it may pass."""
        rows = [cause_of(error) for error in self]
        kind = otherwise
        if any(row is TABLE[0] for row in rows):
            kind = InviteError
        elif rows and all(row is not None and row.lasts for row in rows):
            kind = UserError
        return kind(f"{what}: {self.told()}")


def _rank(error: SwarmnetError) -> int:
    row = cause_of(error)
    return len(TABLE) if row is None else TABLE.index(row)


def _name(peer_id: str) -> str:
    machine, separator, seat = peer_id.partition(SEPARATOR)
    return f"...{machine[-NAME_CHARS:]}{separator}{seat}"


def _names(peer_ids: list[str]) -> str:
    known = [_name(p) for p in peer_ids if not p.startswith(NOBODY)]
    if not known:
        return ""
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"{'peers' if len(known) > 1 else 'peer'} {', '.join(known[:NAMED])}{more}"


def _part(names: str, says: str, reason: str) -> str:
    about = ": ".join(filter(None, [names, says]))
    return f"{about} ({reason})" if about and reason else about or reason


def _reason(error: SwarmnetError) -> str:
    """What was said beside the cause, on one line."""
    text = " ".join(str(error).split())[:REASON_CHARS]
    return "" if isinstance(error, RemoteError) and text == error.code else text
