"""The one place by which every address passes that this machine dials.

`protocol.dialing.dial_book` decides; here it is told what streams show of other peers, and where
this machine is now. The carrier knows of a peer only what it may dial: that is said anew before
each stream that is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from swarmnet.protocol.dialing.dial_book import DialBook
from swarmnet.protocol.dialing.zones import Here, host_from, is_near, target_of
from swarmnet.transport.base import ByteStream, Carrier


class DialFilter:
    """Of one transport."""

    def __init__(self, carrier: Carrier, interfaces: Callable[[], Sequence[str]] = tuple) -> None:
        """`interfaces()`: the IP addresses of this machine, beside those at which it listens."""
        self.own_peer_id = carrier.peer_id
        self._carrier = carrier
        self._interfaces = interfaces
        self._book = DialBook()

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Where a peer says that it is."""
        self._book.learn(peer_id, addresses)

    def given(self, peer_id: str, address: str) -> None:
        """Where a person says that a peer is."""
        self._book.given(peer_id, address)

    def forget(self, peer_id: str) -> None:
        """A peer is gone for good, as far as is known."""
        self._book.forget(peer_id)
        self._carrier.forget(peer_id)

    def opened(self, stream: ByteStream) -> None:
        """A stream of the carrier, whichever side has opened it."""
        self._book.saw(stream.remote, stream.seen_at)

    def reached(self, stream: ByteStream) -> None:
        """A direct stream that this side has opened."""
        self._book.answered(stream.remote, stream.seen_at)

    def prepare(self, peer_id: str) -> None:
        """Tells the carrier where to dial a peer, if it has to."""
        own = self._carrier.addresses()
        addresses = self._book.dialled(peer_id, own, self._here(own), _now())
        self._carrier.learn(peer_id, addresses)

    def may_connect(self, namer: str, relay_id: str, address: str) -> bool:
        """Whether a relay is dialled at an address that another peer names."""
        own = self._carrier.addresses()
        return self._book.may_connect(namer, relay_id, address, self._here(own), _now())

    def may_dial_back(self, asker: str, address: str) -> bool:
        """Whether a peer that asks for it is dialled there."""
        return self._book.may_dial_back(asker, address, _now())

    def targets(
        self, peer_id: str, named: Iterable[tuple[str, int]], *, is_here: bool
    ) -> tuple[tuple[str, int], ...]:
        """Of the hosts and ports of a ticket, those that are dialled. `is_here`: its peer has shown
        that it is on this machine."""
        here = self._here(self._carrier.addresses())
        found = self._book.targets(peer_id, named, here, _now(), is_here=is_here)
        return tuple((str(host), port) for host, port in found)

    def places(self, peer_id: str) -> list[tuple[str, int]]:
        """The IP addresses, with a TCP port, at which the carrier would dial a peer now."""
        own = self._carrier.addresses()
        dialled = self._book.dialled(peer_id, own, self._here(own), _now())
        targets = [target_of(address) for address in dialled if "/tcp/" in address]
        return list(dict.fromkeys((str(t[0]), t[1]) for t in targets if t is not None))

    def is_near(self, host: str) -> bool:
        """Whether an IP address is of a network in which this machine is itself."""
        found = host_from(host)
        return found is not None and is_near(found, self._here(self._carrier.addresses()))

    def _here(self, own: Sequence[str]) -> Here:
        return self._book.here(own, self._interfaces())


def _now() -> float:
    return asyncio.get_running_loop().time()
