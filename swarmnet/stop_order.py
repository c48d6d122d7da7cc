"""The word of a closed run's owner that the run ends: signed, for one run, with a date.

A peer takes an order that is newer than the one it knows. One that was said before, by whoever
brings it again, changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.admission import MAX_ID_CHARS
from swarmnet.errors import Forged, Refused
from swarmnet.identity import Identity, verify
from swarmnet.methods.contact import StopRequest
from swarmnet.wire import pack, unpack

STOP_DOMAIN = b"swarmnet/1/stop\0"
"""What is signed begins with its purpose."""
MS = 1000
MAX_AHEAD_MS = 86_400 * MS
"""A clock may be wrong by so much. An order of a later date would stand above all others."""


@dataclass(frozen=True, slots=True)
class StopOrder:
    """What an owner signs."""

    run_id: str
    round: int
    """No microbatch of it is begun any more: it is the state that is left."""
    unix_ms: int
    """When it was given."""

    def __post_init__(self) -> None:
        if not 0 < len(self.run_id) <= MAX_ID_CHARS:
            raise ValueError("an id of an order has an impossible length")
        if not (0 <= self.round < 2**53 and 0 < self.unix_ms < 2**53):
            raise ValueError("an order names an impossible round or time")


def issue(owner: Identity, run_id: str, round_index: int, unix_ms: int) -> StopRequest:
    """The order of a run's owner, as it travels."""
    order = pack(StopOrder(run_id, round_index, unix_ms))
    return StopRequest(order, owner.sign(STOP_DOMAIN + order))


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Whether orders to a run are its owner's."""

    run_id: str
    owner: str
    """Peer id of the owner's key; empty where the run is open."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""

    def check(self, given: StopRequest, known: StopRequest | None = None) -> StopOrder:
        """What was ordered. `known`: the newest order so far, which may be the same.

        Raises:
            Refused: the run is open, the order is another run's, or of the future, or there is a
                newer one: who brings it says again what was said before.
            Forged: the owner has not signed it.
            ProtocolViolation: it is no order.
        """
        if not self.owner:
            raise Refused("this run is open: nobody can end it for others")
        if not verify(self.owner, STOP_DOMAIN + given.order, given.signature):
            raise Forged("the order to stop is not signed by the run's owner")
        order = unpack(given.order, StopOrder)
        if order.run_id != self.run_id:
            raise Refused("the order to stop is for another run")
        if order.unix_ms > MS * self.clock() + MAX_AHEAD_MS:
            raise Refused("the order to stop is of a day to come")
        if known is not None and known != given:
            newest = unpack(known.order, StopOrder)
            if order.unix_ms <= newest.unix_ms:
                raise Refused("a newer order is known here: this one was given before it")
        return order


def kept(data: bytes) -> StopRequest:
    """From `to_keep`. Raises `ProtocolViolation`."""
    return unpack(data, StopRequest)


def to_keep(given: StopRequest) -> bytes:
    """For a file."""
    return pack(given)
