"""How much of this process's memory other machines may fill, by who they are. Sans I/O.

What a machine has announced and not sent, what it has sent and nobody has answered yet, and the
memory of the calls themselves, all of it counts. A machine with standing (a peer on it has been let
into the run) has an account of its own, large enough for the largest exchange. All others share a
small one, of which none may take more than a part: newcomers send one record and ask a few
questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from swarmnet.wire import Packed

MEMBER_BYTES = 4 << 30
"""Of one machine with standing, over all of its streams."""
STRANGERS_BYTES = 16 << 20
"""Of all others together."""
STRANGER_BYTES = 5 << 20
"""Of one of them: the longest body, or a probe of its bandwidth."""
CALL_BYTES = 4 << 10
"""Of a call, beside its body and arrays: its task, its place in the books."""


class Overfull(Exception):
    """There is no room for what a machine is about to send. Its stream ends, but it did nothing
    wrong: others may have filled the room."""


def bytes_of_call(body: Any, array_bytes: int) -> int:
    """What a call takes, whose body may be packed."""
    return CALL_BYTES + array_bytes + (len(body.data) if isinstance(body, Packed) else 0)


@dataclass(slots=True)
class Hold:
    """Room that is taken, until it is given back."""

    machine: str
    num_bytes: int
    is_stranger: bool


class Standing(Protocol):
    """Who knows which machines are let into the run."""

    def has_standing(self, machine: str) -> bool:
        """Has a peer on that machine been let in?"""


class Holdings:
    """The room of one process."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._by_machine: dict[str, int] = {}
        self.strangers_bytes = 0
        """Taken by all machines that had no standing then."""

    def held_by(self, machine: str) -> int:
        """Bytes."""
        return self._by_machine.get(machine, 0)

    def is_stranger(self, machine: str) -> bool:
        """Is it one of those that share one account?"""
        return not self._standing.has_standing(machine)

    def take(self, machine: str, num_bytes: int) -> Hold | None:
        """Room for so many bytes; None where there is none. What is alone always has room, where a
        machine has standing."""
        held, is_stranger = self.held_by(machine), self.is_stranger(machine)
        if is_stranger:
            is_full = (
                held + num_bytes > STRANGER_BYTES
                or self.strangers_bytes + num_bytes > STRANGERS_BYTES
            )
        else:
            is_full = bool(held) and held + num_bytes > MEMBER_BYTES
        if is_full:
            return None
        self._by_machine[machine] = held + num_bytes
        if is_stranger:
            self.strangers_bytes += num_bytes
        return Hold(machine, num_bytes, is_stranger)

    def give_back(self, hold: Hold) -> None:
        """Once for each hold."""
        left = self._by_machine[hold.machine] - hold.num_bytes
        if left:
            self._by_machine[hold.machine] = left
        else:
            del self._by_machine[hold.machine]
        if hold.is_stranger:
            self.strangers_bytes -= hold.num_bytes
