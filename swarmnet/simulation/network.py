"""A seeded network: bandwidth, latency, loss, partitions, one-way reachability.

Every peer has an access link to an otherwise infinite core. Large messages queue for the sender's
upload and the receiver's download, first come first served; small ones (`SMALL_BYTES`) are
interleaved with them, as the parts of a real channel are, and pay only their own time. Channels
are reliable streams: a lost packet delays what it was part of by a retransmission, and what is
sent while two peers cannot reach each other arrives some time after they can again.

Peers of one house share its access link, up and down. What they send each other crosses a fast link
of their own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from hashlib import blake2b

SMALL_BYTES = 64 << 10
RETRANSMIT_S = 0.2
MAX_RETRANSMITS = 6
MAX_BACKOFF_S = 3.0
BITS = 8
MEGABIT = 1e6

HOME_UP_BYTES_PER_S = 15 * MEGABIT / BITS
HOME_DOWN_BYTES_PER_S = 110 * MEGABIT / BITS
HOME_LATENCY_S = 0.025
"""Between two homes, one way; half of it at each end. Medians, all three."""
HOME_SIGMA = 0.5
"""Of the logarithm: about 95 % of the links lie within a factor of e of the median."""


@dataclass(frozen=True, slots=True)
class Link:
    """A peer's access to the network."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    """From the peer to the core, one way."""


FAST_LINK = Link(125e6, 125e6, 0.0005)
"""A data centre, or a house: 1 Gbit/s, 1 ms between two peers."""
INSIDE = "inside"
"""In place of another peer: what stays in a house."""


def home_link(rng: random.Random) -> Link:
    """A home's link: log-normal around 15 Mbit/s up, 110 Mbit/s down, 25 ms."""

    def draw(median: float) -> float:
        return median * math.exp(rng.gauss(0.0, HOME_SIGMA))

    return Link(draw(HOME_UP_BYTES_PER_S), draw(HOME_DOWN_BYTES_PER_S), draw(HOME_LATENCY_S / 2))


@dataclass
class SimulatedNetwork:
    """`transport.memory.Network`: the delivery times of messages."""

    rng: random.Random
    loss: float = 0.0
    """Probability that a message needs a retransmission."""
    jitter: float = 0.1
    """Latency varies by up to this part of it."""
    links: dict[str, Link] = field(default_factory=dict)
    blocked_until: dict[tuple[str, str], float] = field(default_factory=dict)
    """Time at which (source, target) is open again."""
    is_paired: bool = False
    """Each two peers have a link of their own, as fast as what both have: a message waits for none
    of other pairs."""

    def __post_init__(self) -> None:
        self._houses: dict[str, str] = {}
        self._up_free_at: dict[tuple[str, str], float] = {}
        self._down_free_at: dict[tuple[str, str], float] = {}
        self._hash = blake2b(digest_size=16)
        self.num_messages = 0
        self.num_bytes = 0

    def add(self, peer_id: str, link: Link, house: str = "") -> None:
        """Connects a peer, or changes its link: that of its house, where it is of one."""
        self.links[peer_id] = link
        if house:
            self._houses[peer_id] = house
            self.links |= {p: link for p, h in self._houses.items() if h == house}

    def block(self, source: str, target: str, until: float) -> None:
        """No message gets from `source` to `target` before `until`; the other way stays open."""
        pair = (source, target)
        self.blocked_until[pair] = max(until, self.blocked_until.get(pair, 0.0))

    def is_cut(self, now: float) -> bool:
        """Whether a pair is blocked, or was a moment ago: its messages are still on their way."""
        return any(until + MAX_BACKOFF_S > now for until in self.blocked_until.values())

    def is_parted(self, one: str, other: str, now: float) -> bool:
        """Whether both ways between two peers are blocked."""
        ways = (one, other), (other, one)
        return all(self.blocked_until.get(way, 0.0) > now for way in ways)

    def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float | None:
        """Seconds from now until the last byte has arrived."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        self._hash.update(f"{now!r} {source} {target} {num_bytes}\n".encode())
        held_s = self._held_s(source, target, now) if self.blocked_until else 0.0
        sender, receiver = self._links_between(source, target)
        latency_s = sender.latency_s + receiver.latency_s
        latency_s *= 1.0 + self.jitter * self.rng.random()
        latency_s += held_s
        if self.loss:
            latency_s += self._retransmissions_s()
        up_s = num_bytes / sender.up_bytes_per_s
        down_s = num_bytes / receiver.down_bytes_per_s
        if num_bytes <= SMALL_BYTES:
            return latency_s + max(up_s, down_s)
        up_line, down_line = self._line(source, target), self._line(target, source)
        up_begin = max(now, self._up_free_at.get(up_line, 0.0))
        up_end = self._up_free_at[up_line] = up_begin + up_s
        # A message that waits for the sender's uplink delays no other at the receiver: the downlink
        # is reserved from now on for as long as the message takes, not from when it arrives.
        down_free_at = max(now, self._down_free_at.get(down_line, 0.0))
        down_begin = max(up_begin + latency_s, down_free_at)
        self._down_free_at[down_line] = down_free_at + down_s
        return max(up_end + latency_s, down_begin + down_s) - now

    def upload_s(self, source: str, num_bytes: int) -> float:
        """Seconds for which `num_bytes` keep the uplink of `source` busy."""
        return num_bytes / self.links[source].up_bytes_per_s

    def upload_queue(self, source: str, now: float) -> int:
        """Bytes that wait for the uplink of `source`."""
        wait_s = max(0.0, self._last(self._up_free_at, source) - now)
        return int(wait_s * self.links[source].up_bytes_per_s)

    def queued_s(self, peer_id: str, now: float) -> float:
        """Seconds of long messages that wait for the peer's uplink or its downlink."""
        free_at = max(self._last(way, peer_id) for way in (self._up_free_at, self._down_free_at))
        return max(0.0, free_at - now)

    def are_neighbours(self, one: str, other: str) -> bool:
        """Whether two peers are of one house."""
        house = self._houses.get(one)
        return house is not None and house == self._houses.get(other)

    def _links_between(self, source: str, target: str) -> tuple[Link, Link]:
        if self.are_neighbours(source, target):
            return FAST_LINK, FAST_LINK
        return self.links[source], self.links[target]

    def _line(self, peer_id: str, other: str) -> tuple[str, str]:
        """What messages of a peer, with another one, queue for."""
        if self.are_neighbours(peer_id, other):
            return peer_id, INSIDE
        return self._houses.get(peer_id, peer_id), other if self.is_paired else ""

    def _last(self, free_at: dict[tuple[str, str], float], peer_id: str) -> float:
        name = self._houses.get(peer_id, peer_id)
        if not self.is_paired:
            return free_at.get((name, ""), 0.0)
        return max((at for line, at in free_at.items() if line[0] == name), default=0.0)

    def digest(self) -> str:
        """Of every message so far: time, sender, receiver and length."""
        return self._hash.hexdigest()

    def _held_s(self, source: str, target: str, now: float) -> float:
        """Seconds until the way is open and the sender, whose pauses double, has tried again."""
        until = self.blocked_until.get((source, target), 0.0)
        if until <= now:
            self.blocked_until.pop((source, target), None)
            return 0.0
        return until - now + self.rng.uniform(0.0, min(until - now, MAX_BACKOFF_S))

    def _retransmissions_s(self) -> float:
        delay_s, wait_s = 0.0, RETRANSMIT_S
        for _ in range(MAX_RETRANSMITS):
            if self.rng.random() >= self.loss:
                break
            delay_s += wait_s
            wait_s *= 2
        return delay_s
