"""Who gives way at a relay that has no room for one more.

A relay joins streams for peers that it may not know: any number of names asks. So no name takes
more than a part of the room, and where all of it is taken, who uses its place least gives way: a
stream on which nothing was said, or a circuit through which nothing has gone for a while. Honest
streams say at once what they are for. Of the places by which peers are called, networks have equal
parts where all are taken: names cost nothing, addresses do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Generic, TypeVar

from swarmnet.protocol.timing import UPKEEP_S

MAX_GREETING, MAX_GREETING_EACH = 64, 16
"""Relay streams that are not joined yet; of one peer."""
SILENT_CIRCUIT_S = UPKEEP_S
"""A circuit through which nothing has gone for so long gives way to a new one. Peers that use one
say more often that they are there (tests/transport/test_relay.py)."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class GreetingRoom(Generic[KeyT]):
    """Streams that are not joined yet, the oldest first."""

    _remotes: dict[KeyT, str] = field(default_factory=dict)
    _silent: dict[KeyT, None] = field(default_factory=dict)
    """Those on which nothing was said."""

    def __len__(self) -> int:
        return len(self._remotes)

    def has_room_for(self, remote: str) -> bool:
        """May this peer open one more stream?"""
        return sum(r == remote for r in self._remotes.values()) < MAX_GREETING_EACH

    def enter(self, key: KeyT, remote: str) -> KeyT | None:
        """A stream of a peer for which there is room. Returns the one that has to be ended for it,
        if any, which is in the room no more: the oldest silent one, else the oldest."""
        ended = None
        if len(self._remotes) >= MAX_GREETING:
            ended = next(iter(self._silent or self._remotes))
            self.leave(ended)
        self._remotes[key] = remote
        self._silent[key] = None
        return ended

    def spoke(self, key: KeyT) -> None:
        """It was said what a stream is for."""
        self._silent.pop(key, None)

    def leave(self, key: KeyT) -> None:
        """A stream is joined, or over. Idempotent."""
        self._remotes.pop(key, None)
        self._silent.pop(key, None)


def silent_circuit(heard_at: Mapping[KeyT, float], now: float) -> KeyT | None:
    """The circuit that gives way to a new one: the one that has been silent longest, `heard_at`
    being when a byte went through each last; None where all are in use."""
    if not heard_at:
        return None
    circuit = min(heard_at, key=heard_at.__getitem__)
    return circuit if now - heard_at[circuit] >= SILENT_CIRCUIT_S else None


def network_of(host: str) -> str:
    """What of an IP address one machine has for itself: in IPv6 a network of 64 bits has as many
    addresses as it likes."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    bits = 32 if address.version == 4 else 64
    return str(ip_network((address, bits), strict=False))


def gives_place(holders: Mapping[str, str], network: str) -> str | None:
    """Where every place at a relay is taken, the peer that gives up its own to one of another
    network: the newest of those in the network that has most of them, where that has two more than
    this one; else None. `holders`: networks by peer, those that came first first."""
    numbers = Counter(holders.values())
    if not numbers:
        return None
    most = max(numbers, key=numbers.__getitem__)
    if numbers[most] < numbers[network] + 2:
        return None
    return [peer_id for peer_id, n in holders.items() if n == most][-1]
