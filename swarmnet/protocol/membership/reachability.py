"""Whether other peers can dial this one, and being reached through relays where they cannot. Pure.

Connected peers report what they see (`Sight`): the address from which this peer's connections come,
and whether they could open a new connection to that address, at a port on which it listens.

A peer that cannot be dialled keeps places at `NUM_RELAYS` other peers. So does one that most peers
reach, and some do not (a firewall, two networks that do not talk): those suspect it time and again,
and it refutes that. Whoever cannot reach a peer lets it know through a third one. The peer
then looks for itself whether it reaches the accuser: if so, they have a connection, and the word is
not true.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import LEFT, Record
from swarmnet.protocol.moments import Since
from swarmnet.protocol.timing import CONNECT_S, DAY_S, UPKEEP_S

NONE, ENDPOINT_INDEPENDENT, SYMMETRIC, UNKNOWN = "none", "endpoint-independent", "symmetric", ""
"""Kinds of NAT, by whether the port that a remote peer sees depends on that peer (RFC 4787)."""
NUM_RELAYS = 2
"""At which a peer that cannot be dialled keeps a place: one may die."""
DOUBTED_S = 10.0
"""Others have suspected this peer, though it lives, for so long within `UPKEEP_S`: then it keeps
places although it can be dialled. It protects relays from peers that have one bad moment
(tests/protocol/membership/test_relays.py)."""
DOUBTED_FOR_S = DAY_S
"""How long it keeps them then."""
KEPT_DOUBTS, MAX_ACCUSERS = 16, 64
"""Of one accuser, and accusers."""
MAX_TOLD = 64


@dataclass(frozen=True, slots=True)
class Sight:
    """The report of one peer."""

    peer_id: str
    host: str
    """IP address from which the asking peer's connection comes."""
    port: int
    reached: tuple[int, ...]
    """Ports at which the reporting peer reached the asking one."""
    is_outside: bool = True
    """The reporting peer is seen at an address that is valid everywhere."""


def is_global(host: str) -> bool:
    """True for an address that is valid everywhere."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int] | None:
    """IP address and port of a multiaddr of TCP or QUIC; None for any other, and for circuits."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    if parts[3] not in ("tcp", "udp") or not parts[4].isdecimal():
        return None
    return parts[2], int(parts[4])


def relevant(sights: Sequence[Sight]) -> list[Sight]:
    """The reports of peers outside the local network, where there are any: a neighbour in the same
    house reaches addresses that others cannot, and does not become an outsider by what it says."""
    outside = [s for s in sights if s.is_outside and is_global(s.host)]
    return outside or list(sights)


def is_reachable(sights: Sequence[Sight]) -> bool | None:
    """The majority of the reports, because one may lie; None without reports."""
    judges = relevant(sights)
    return 2 * sum(bool(s.reached) for s in judges) > len(judges) if judges else None


def kind_of_nat(own_hosts: Sequence[str], sights: Sequence[Sight]) -> str:
    """The kind of NAT, from two or more reports; one suffices where there is no NAT."""
    judges = relevant(sights)
    if not judges:
        return UNKNOWN
    if all(s.host in own_hosts for s in judges):
        return NONE
    if len({s.peer_id for s in judges}) < 2:
        return UNKNOWN
    same = len({(s.host, s.port) for s in judges}) == 1
    return ENDPOINT_INDEPENDENT if same else SYMMETRIC


def forwarded_addresses(own: Sequence[str], sights: Sequence[Sight]) -> list[str]:
    """Multiaddrs (without peer id) at which most peers reached this one and that are not in `own`:
    ports that its router forwards. Others dial them, so the word of one peer does not do where
    others see none."""
    judges = relevant(sights)
    pairs = Counter((s.host, port) for s in judges for port in dict.fromkeys(s.reached))
    known = {pair for pair in map(host_and_port, own) if pair is not None}
    return [
        f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
        for (host, port), number in pairs.items()
        if (host, port) not in known and 2 * number > len(judges)
    ]


class Doubts:
    """The newest times when another member could not reach this one, nor be reached from here. What
    one says about this peer while it is reached is not true: that is for whoever adds to check."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}
        """By accuser."""
        self._last: dict[str, Since] = {}
        """When the doubts of each were serious last, while that is not too long ago."""

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def add(self, accuser: str, now: float) -> None:
        """Another peer cannot reach this one."""
        times = self._times.pop(accuser, None) or deque(maxlen=KEPT_DOUBTS)
        times.append(now)
        if len(self._times) >= MAX_ACCUSERS:
            del self._times[next(iter(self._times))]
        self._times[accuser] = times
        if times[-1] - next(at for at in times if at > now - UPKEEP_S) >= DOUBTED_S:
            self._last[accuser] = Since(now)

    def are_serious(self, now: float, members: Collection[str]) -> bool:
        """Whether one of these members does not reach this peer, by more than one bad moment; to be
        asked often."""
        self._last = {
            accuser: last
            for accuser, last in self._last.items()
            if accuser in members and last.s(now) <= DOUBTED_FOR_S
        }
        return bool(self._last)


class ToldUnreached:
    """Peers that were told that they cannot be reached: each is told every `CONNECT_S` at most, by
    each accuser, who may tell `MAX_TOLD` in that time."""

    def __init__(self) -> None:
        self._told_at: dict[tuple[str, str], float] = {}

    def may_tell(self, accuser: str, peer_id: str, now: float) -> bool:
        """Whether to tell a peer now, which counts as done then."""
        self._told_at = {p: at for p, at in self._told_at.items() if now - at < CONNECT_S}
        num_told = sum(by == accuser for by, _ in self._told_at)
        if (accuser, peer_id) in self._told_at or num_told >= MAX_TOLD:
            return False
        self._told_at[accuser, peer_id] = now
        return True


class RelayPlaces:
    """Where this peer has a place, and where it was refused one."""

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._refused_until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, relay_id: object) -> bool:
        return relay_id in self._addresses

    @property
    def relays(self) -> list[str]:
        """The peers at which there is a place, in the order in which they gave it."""
        return list(self._addresses)

    @property
    def are_enough(self) -> bool:
        return len(self._addresses) >= NUM_RELAYS

    def may_ask(self, relay_id: str, now: float) -> bool:
        """Whether a peer may be asked for a place: there is none yet, and it has not refused one a
        short while ago."""
        if relay_id in self._addresses:
            return False
        return self._refused_until.get(relay_id, now) <= now

    def granted(self, relay_id: str, addresses: tuple[str, ...]) -> bool:
        """A peer has given a place, or renewed it; it is reached at these addresses. True for a new
        place."""
        is_new = relay_id not in self._addresses
        self._addresses[relay_id] = addresses
        return is_new

    def refused(self, relay_id: str, now: float) -> None:
        """A peer gave no place that is of use."""
        self._refused_until = {p: t for p, t in self._refused_until.items() if t > now}
        self._refused_until[relay_id] = now + UPKEEP_S

    def lost(self, relay_id: str) -> bool:
        """There is no place at a peer any more. True where there was one."""
        return self._addresses.pop(relay_id, None) is not None

    def clear(self) -> None:
        """None is needed."""
        self._addresses.clear()

    def circuits(self, peer_id: str) -> list[str]:
        """Multiaddrs at which this peer can be called through them."""
        return [circuit_address(a[0], relay, peer_id) for relay, a in self._addresses.items()]


def possible_relays(live: Iterable[Record], own_ids: Collection[str]) -> list[Record]:
    """The peers that can be dialled themselves, by what they say."""
    return [
        r
        for r in live
        if r.peer_id not in own_ids
        and r.peer_id == machine_of(r.peer_id)  # the first seat of a machine
        and r.state != LEFT
        and r.addresses
        and not any("/p2p-circuit" in a for a in r.addresses)
    ]


def circuit_address(relay_address: str, relay_id: str, peer_id: str) -> str:
    """Where a peer can be called through a relay."""
    end = f"/p2p/{relay_id}"
    full = relay_address if relay_address.endswith(end) else relay_address + end
    return f"{full}/p2p-circuit/p2p/{peer_id}"
