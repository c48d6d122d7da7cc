"""The ids of peers: that of a machine, and those of its seats.

A machine that serves K stages has K seats. Each seat is a peer to all others, with a record, a
stage and an id of its own. The first has the machine's peer id, the others that id, a slash and the
number of the seat: `12D3Koo.../1`. One key signs for all of them, and one channel carries them all.
"""

from __future__ import annotations

from swarmnet.errors import ProtocolViolation

SEPARATOR = "/"
MAX_SEATS = 64
"""Seats of one machine at most, the first included."""


def machine_of(peer_id: str) -> str:
    """The machine's peer id, which is that of its first seat. Cheap; checks nothing."""
    return peer_id.partition(SEPARATOR)[0]


def seat_id(machine: str, seat: int) -> str:
    """The peer id of a machine's seat, counted from 0."""
    return f"{machine}{SEPARATOR}{seat}" if seat else machine


def split_seat(peer_id: str) -> tuple[str, int]:
    """The machine's peer id and the number of the seat. Raises `ProtocolViolation` where the text
    is not what `seat_id` returns: a seat has exactly one name."""
    machine, separator, text = peer_id.partition(SEPARATOR)
    if not separator:
        return machine, 0
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 2 else 0
    if not 0 < number < MAX_SEATS or text != str(number):
        raise ProtocolViolation(f"{peer_id[:80]!r} is no seat of a machine")
    return machine, number
