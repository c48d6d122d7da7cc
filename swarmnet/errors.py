"""Every error that swarmnet raises on purpose.

    SwarmnetError
    ├── UserError              a person can mend it; its text is one line that says how
    │   ├── FinalError         only a person can: the same command fails again (exit code 2)
    │   │   ├── UsageError     options that do not go together, or not with this run or machine
    │   │   ├── SpecError      run.toml is wrong
    │   │   └── InviteError    the run is closed, and there is no invite that opens it
    │   ├── DataError          the training data cannot be read
    │   └── AddressError       an address is malformed, taken, or nobody answers on it
    │       ├── WrongAddress   malformed, or not one to use here: a FinalError too
    │       └── PortTaken      another process listens there: a FinalError too
    ├── StageLost              what computes a stage here is gone: the peer can serve another
    ├── NotNow                 nobody's mistake: what was asked for may be had later
    ├── TransportError         the link, not what was said over it
    │   ├── Unreachable        no address of the peer answers
    │   │   ├── WrongProtocol  something answers there that opens no channels of ours
    │   │   └── Gone           it answered before, and does not any more
    │   ├── ChannelClosed      the channel broke while a call was open
    │   └── DeadlineExceeded   the peer did not answer in time
    ├── ProtocolViolation      theirs: what arrived breaks the protocol
    │   └── Forged             a signature is false
    └── RemoteError            theirs: the peer answered, and the answer is no
        ├── Busy               its queue is full; try another replica
        ├── Stale              the call is about a round that is over there
        ├── NotReady           it cannot serve this yet (joining, moving)
        ├── Taken              another flight of the same slot is there
        ├── Redirect           another peer is responsible
        ├── NoRoute            it found no replica of the next stage
        ├── WrongRun           it trains another run
        ├── WrongVersion       it speaks another version of the protocol
        ├── Unsupported        it does not know the method: its program is another version
        └── Refused            it found the request itself wrong

A `RemoteError` travels: its `code` and `details` are put on the wire by the callee and the
same class is raised at the caller.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


def one_line(error: object, most: int = 200) -> str:
    """An error's text on one line, at most so many characters of it."""
    return " ".join(str(error).split())[:most]


class SwarmnetError(Exception):
    """The root of the tree."""

    peer_id: str = ""
    """Of the peer whose call failed so; empty where no peer was called."""

    def of(self, peer_id: str) -> Self:
        """A call of this peer failed so."""
        self.peer_id = peer_id
        return self


class UserError(SwarmnetError):
    """Something that the person at the keyboard can mend."""


class FinalError(UserError):
    """Whoever starts the same command again fails again, until a person has changed something:
    services do not restart a peer that ends so (exit code 2)."""


class UsageError(FinalError):
    """Options that do not go together, or not with this run or machine."""


class SpecError(FinalError):
    """The run's spec is wrong."""


class InviteError(FinalError):
    """The run is closed, and there is no invite, or none that opens it to this peer."""


class DataError(UserError):
    """The training data cannot be read."""


class AddressError(UserError):
    """An address is malformed, taken, or nobody answers on it."""


class WrongAddress(FinalError, AddressError):
    """A person has named an address that is malformed, or that is not to be used here."""


class PortTaken(FinalError, AddressError):
    """Another process listens at the port that was asked for."""


class StageLost(SwarmnetError):
    """What computes a stage here is gone, and what it had not given away. The peer is not."""


class NotNow(SwarmnetError):
    """The run cannot do now what was asked for, and may be able to later; its text is one line for
    people."""


class TransportError(SwarmnetError):
    """The link to a peer failed."""


class Unreachable(TransportError):
    """No address of the peer answers."""


class WrongProtocol(Unreachable):
    """Something answers at the address, and does not speak this protocol: no waiting helps."""


class Gone(Unreachable):
    """The peer answered before, and has fallen silent."""


class ChannelClosed(TransportError):
    """The channel broke while a call was open."""


class DeadlineExceeded(TransportError):
    """The peer did not answer in time."""


class ProtocolViolation(SwarmnetError):
    """What arrived from a peer breaks the protocol."""


class Forged(ProtocolViolation):
    """A signature is false. Who passes on what somebody has signed checks it before."""


class RemoteError(SwarmnetError):
    """The peer's answer is no. Raised by its handler, sent, and raised again at the caller."""

    code: ClassVar[str] = "internal"

    def __init__(self, text: str = "", **details: Any) -> None:
        super().__init__(text or self.code)
        self.details = details


class Busy(RemoteError):
    """The peer's queue is full. `details["backlog_s"]`: seconds of work that it has."""

    code = "busy"

    @property
    def backlog_s(self) -> float:
        return _finite(self.details.get("backlog_s"))


class Stale(RemoteError):
    """The round is over at the peer. `details["round"]`: the round that it is in."""

    code = "stale"


class NotReady(RemoteError):
    """The peer cannot serve this yet."""

    code = "not_ready"


class NotSent(NotReady):
    """A pass has added to the gradient, and what was to go on from it could not be made. Whoever
    asks hears that this peer is not ready; here it is known that something is to be taken out."""


class Taken(RemoteError):
    """Another feeder's flight of the same slot is at the peer. `details["counted"]`: it counts
    already."""

    code = "taken"


class Redirect(RemoteError):
    """Another peer is responsible. `details["peer_id"]` names it."""

    code = "redirect"


class NoRoute(RemoteError):
    """The peer found no replica of the next stage in time."""

    code = "no_route"


class WrongRun(RemoteError):
    """The peer trains another run."""

    code = "wrong_run"


class WrongVersion(RemoteError):
    """The peer speaks another version of the protocol."""

    code = "wrong_version"


class Unsupported(RemoteError):
    """The peer does not know the method that was called, and will not know it later."""

    code = "unsupported"


class Refused(RemoteError):
    """The peer found the request itself wrong (schema, shape, dtype, not finite)."""

    code = "refused"


REMOTE_ERRORS: dict[str, type[RemoteError]] = {
    cls.code: cls
    for cls in (
        RemoteError,
        Busy,
        Stale,
        NotReady,
        Taken,
        Redirect,
        NoRoute,
        WrongRun,
        WrongVersion,
        Unsupported,
        Refused,
    )
}


def remote_error(code: str, text: str, details: dict[str, Any]) -> RemoteError:
    """The exception for an error that arrived; an unknown code becomes a plain `RemoteError`."""
    return REMOTE_ERRORS.get(code, RemoteError)(text, **details)


def _finite(value: Any) -> float:
    if isinstance(value, (int, float)) and 0 <= value < 3600:
        return float(value)
    return 0.0
