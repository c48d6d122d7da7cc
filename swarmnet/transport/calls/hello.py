"""What each side of a channel says first: versions, features, its run. Sans I/O.

The version counts changes that every peer must know. An addition that a peer can do without is a
feature: two peers use it when both offer it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import ProtocolViolation
from swarmnet.transport.base import FEATURES, PROTOCOL_VERSIONS
from swarmnet.transport.calls.heads import MAX_TEXT
from swarmnet.transport.frames import HELLO, Head

MAX_VERSION = 65_535
MAX_FEATURES = 64
MAX_FEATURE_CHARS = 32
MAX_AGENT_CHARS = 32
"""Of the peer's text about its software, that many are shown."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of the protocol that a program speaks: all from `lowest` to `highest`."""

    lowest: int
    highest: int

    def common(self, other: Versions) -> int | None:
        """The highest version that both speak; None where there is none."""
        version = min(self.highest, other.highest)
        return version if version >= max(self.lowest, other.lowest) else None

    def __str__(self) -> str:
        is_one = self.lowest == self.highest
        return f"{self.lowest}" if is_one else f"{self.lowest} to {self.highest}"


@dataclass(frozen=True, slots=True)
class Offer:
    """The part of a hello that holds for as long as the channel does."""

    versions: Versions
    features: frozenset[str]


def offer(
    versions: tuple[int, int] = PROTOCOL_VERSIONS, features: Iterable[str] = FEATURES
) -> Offer:
    """What a program offers; this one, where nothing is given. Raises `ValueError` for features
    that no peer would take."""
    chosen = frozenset(features)
    if len(chosen) > MAX_FEATURES or not all(map(_is_feature, chosen)):
        raise ValueError(f"features that cannot be said: {sorted(chosen)}")
    return Offer(Versions(*versions), chosen)


def hello_head(ours: Offer, run_id: str, agent: str) -> dict[str, Any]:
    """The values of the head of a hello."""
    lowest, highest = ours.versions.lowest, ours.versions.highest
    # Peers of version 1 know "v", "r" and "g" only, and part from a "v" that is not 1.
    return {
        "v": highest,
        "l": lowest,
        "h": highest,
        "f": sorted(ours.features),
        "r": run_id,
        "g": agent,
    }


def versions_of(head: Head) -> Versions:
    """The versions that the peer speaks. To be read before the rest, which other versions may
    write in another way. Raises `ProtocolViolation`."""
    version: Any = head.values.get("v")
    lowest: Any = head.values.get("l", version)
    highest: Any = head.values.get("h", version)
    if not all(type(n) is int and 0 < n <= MAX_VERSION for n in (version, lowest, highest)):
        raise ProtocolViolation("a hello without versions")
    if not lowest <= version <= highest:
        raise ProtocolViolation("a hello with a range of versions that is none")
    return Versions(lowest, highest)


def features_of(head: Head) -> frozenset[str]:
    """The features that the peer offers, those that are unknown here too. Raises
    `ProtocolViolation`."""
    said = head.values.get("f", [])
    if not isinstance(said, list) or len(said) > MAX_FEATURES or not all(map(_is_feature, said)):
        raise ProtocolViolation("a hello with features that are none")
    return frozenset(said)


def run_of(head: Head) -> str:
    """The run that the peer belongs to now; empty where it knows none. Raises
    `ProtocolViolation`."""
    run_id = head.values.get("r")
    if not isinstance(run_id, str) or len(run_id) > MAX_TEXT:
        raise ProtocolViolation("a hello without a run")
    return run_id


def mismatch(remote: str, theirs: Versions, ours: Versions, agent: Any) -> str:
    """One line for a person: which versions the two sides speak, and which side to update.
    `agent`: what the peer says of its software, unchecked."""
    shown = agent[:MAX_AGENT_CHARS] if isinstance(agent, str) else ""
    software = f" ({shown})" if shown and shown.isprintable() else ""
    older = "this program" if ours.highest < theirs.lowest else "the peer"
    return (
        f"{remote[-8:]} speaks protocol {theirs}{software}; this program speaks {ours}: "
        f"update {older}, it is older"
    )


class Greeting:
    """What the peer has said of itself, and what it may send by that."""

    def __init__(self, remote: str, ours: Offer) -> None:
        self.remote = remote
        self.run_id = ""
        """The run that the peer says it belongs to."""
        self.version = 0
        """The version of the protocol that both sides use; 0 before the peer's hello."""
        self.features: frozenset[str] = frozenset()
        """Those that both sides have; none before the peer's hello."""
        self.mismatch = ""
        """Why there is no such version, for a person; empty where there is one."""
        self._ours = ours
        self._theirs: Offer | None = None

    @property
    def is_done(self) -> bool:
        """The peer has said hello."""
        return self._theirs is not None or bool(self.mismatch)

    def expects(self, kind: int) -> None:
        """Raises `ProtocolViolation` where the peer may not begin such a message now."""
        if kind != HELLO and not self.is_done:
            raise ProtocolViolation("the first message is no hello")

    def admits(self, head: Head) -> bool:
        """Whether the message belongs to a call: a hello is heard here. Raises `ProtocolViolation`
        where the peer may not send it now."""
        if head.kind != HELLO:
            return not self.mismatch  # else its stream is about to end
        if not self.mismatch:
            self._hear(head)
        return False

    def _hear(self, head: Head) -> None:
        ours, versions = self._ours, versions_of(head)
        version = ours.versions.common(versions)
        if version is None:
            if self.is_done:
                raise ProtocolViolation("versions or features that change")
            self.mismatch = mismatch(self.remote, versions, ours.versions, head.values.get("g"))
            return
        theirs, run_id = Offer(versions, features_of(head)), run_of(head)
        if self._theirs not in (None, theirs):
            raise ProtocolViolation("versions or features that change")
        self._theirs, self.run_id = theirs, run_id
        self.version, self.features = version, ours.features & theirs.features


def _is_feature(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_FEATURE_CHARS
        and value.isascii()
        and value.isprintable()
    )
