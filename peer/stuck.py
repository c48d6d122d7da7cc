"""A device or a disk that hangs: the peer that goes on talking while it does nothing is worse for
the others than one that is gone, for they wait for what it has promised."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from swarmnet.errors import UserError
from swarmnet.swarm.wiring import LONGEST_CALL_S

STUCK_S = LONGEST_CALL_S
"""A piece of work that takes longer comes too late for everybody."""
LOOK_S = 10.0


class Working(Protocol):
    """A thread that does one piece of work at a time."""

    def at_work(self) -> int | None:
        """The number of the piece that runs; None for none."""


async def until_stuck(threads: Mapping[str, Working]) -> None:
    """Raises `UserError` when one of the threads, by name, has been at one piece of work for
    `STUCK_S`. Time in which this process slept does not count: it is told by looks."""
    looks = dict.fromkeys(threads, 0)
    last: dict[str, int | None] = dict.fromkeys(threads)
    while True:
        await asyncio.sleep(LOOK_S)
        for name, thread in threads.items():
            piece = thread.at_work()
            looks[name] = looks[name] + 1 if piece is not None and piece == last[name] else 0
            last[name] = piece
            if looks[name] * LOOK_S >= STUCK_S:
                raise UserError(
                    f"the {name} has been at one piece of work for {STUCK_S / 60:.0f} minutes and "
                    "does not answer: this peer ends, so that others take its place. Look at the "
                    "device, or the disk of its state folder, and start it again"
                )
