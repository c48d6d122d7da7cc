"""Direct connections: the times to try one, which of two is faster, and the tickets that
authenticate it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.protocol.backoff import FIRST_PAUSE_S, next_pause_s
from swarmnet.protocol.timing import ANSWER_S, UPKEEP_S

MAX_REMEMBERED = 4096
"""Peers whose failed attempts are remembered."""
MAX_TICKETS = 1024
MAX_TICKETS_EACH = 4
"""Open tickets of one peer; the oldest becomes void."""
TOKEN_BYTES = 32


LOCAL_S = 0.002
"""Round trip within a house: between ways that take no longer, the network that the two share
decides, and not the clock. It protects from a way over the router where there is one beside it, and
from a VPN around half of the world (tests/protocol/test_upgrade.py)."""
LESS = 0.5
"""A way that takes less than this part of another's round trip is faster. It protects from going to
and fro between ways that are the same (tests/protocol/test_upgrade.py)."""


@dataclass(frozen=True, slots=True)
class Way:
    """One connection to a peer."""

    round_trip_s: float
    """The shortest of late."""
    is_near: bool
    """It leads to an address of a network that the two share."""

    def is_faster(self, other: Way) -> bool:
        """Never of each than of the other."""
        if self.is_near and not other.is_near:
            return self.round_trip_s <= max(other.round_trip_s, LOCAL_S)
        return max(self.round_trip_s, LOCAL_S) < LESS * other.round_trip_s


@dataclass(slots=True)
class _Failure:
    retry_at_s: float
    pause_s: float


class Attempts:
    """The peers to which a direct connection may be tried now: a failed attempt is followed by a
    pause, which doubles with every further one. It stays so short that a faster way that is back is
    found by the next upkeep."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def may_try(self, peer_id: str, now: float) -> bool:
        """False during the pause after a failed attempt."""
        failure = self._failures.get(peer_id)
        return failure is None or now >= failure.retry_at_s

    def failed(self, peer_id: str, now: float) -> float:
        """The attempt failed, or the connection broke soon; returns the seconds of the pause."""
        before = self._failures.pop(peer_id, None)
        last_s = None if before is None else before.pause_s
        pause_s = next_pause_s(last_s, longest_s=UPKEEP_S)
        if len(self._failures) >= MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[peer_id] = _Failure(now + pause_s, pause_s)
        return pause_s

    def broke(self, peer_id: str, stood_s: float, now: float) -> None:
        """A connection ended that had lasted `stood_s` seconds. One that lasted longer than the
        pause before it may be opened again at once."""
        failure = self._failures.get(peer_id)
        if stood_s >= (FIRST_PAUSE_S if failure is None else failure.pause_s):
            self._failures.pop(peer_id, None)
        else:
            self.failed(peer_id, now)

    def forget(self, peer_id: str) -> None:
        """A peer has been gone for long."""
        self._failures.pop(peer_id, None)


@dataclass(frozen=True, slots=True)
class _Issued:
    peer_id: str
    expires_s: float


class Tickets:
    """One-time tokens, each bound to the peer that asked for it, and void `ANSWER_S` after. Only
    their hashes are kept, so that a look-up takes the same time for every token."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._issued: dict[bytes, _Issued] = {}

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, peer_id: str, now: float) -> bytes:
        """A fresh token for an authenticated peer."""
        self._issued = {h: i for h, i in self._issued.items() if i.expires_s > now}
        own = [h for h, i in self._issued.items() if i.peer_id == peer_id]
        if len(own) >= MAX_TICKETS_EACH:
            del self._issued[own[0]]
        elif len(self._issued) >= MAX_TICKETS:
            del self._issued[next(iter(self._issued))]
        token = self._random_bytes(TOKEN_BYTES)
        self._issued[_hash(token)] = _Issued(peer_id, now + ANSWER_S)
        return token

    def redeem(self, token: bytes, now: float) -> str | None:
        """The peer that a token is bound to; None where it was never issued, was used, or is too
        old. The token is void from then on."""
        issued = self._issued.pop(_hash(token), None)
        return issued.peer_id if issued is not None and issued.expires_s > now else None

    def is_open(self, token: bytes) -> bool:
        """True for a token that was issued and not redeemed."""
        return _hash(token) in self._issued


def _hash(token: bytes) -> bytes:
    return hashlib.blake2b(token, digest_size=32).digest()
