"""When a peer ends though nobody stops it.

A device or a disk hangs: the peer that goes on talking while it does nothing is worse for the
others than one that is gone, for they wait for what it has promised. Or another process has its
identity: others hear two peers in one, and believe whichever speaks last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from swarmnet.errors import UsageError, UserError
from swarmnet.plurals import counted
from swarmnet.printable import printable
from swarmnet.protocol.pipeline.dispatching import LONGEST_CALL_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.training.device import Piece

STUCK_S = LONGEST_CALL_S
"""A piece of work that takes longer comes too late for everybody."""
STUCK_AT_LEAST_S = 120.0
STUCK_FACTOR = 20.0
"""Nor is a forward or backward pass waited for that takes so many times as long as the longest one
before, and so many seconds: a pass is always the same work, and a stage waits for who hangs."""
LOOK_S = 10.0


class Working(Protocol):
    """A thread that does one piece of work at a time."""

    def at_work(self) -> Piece | None:
        """The piece that runs; None for none."""


def stuck_after_s(longest_s: float | None) -> float:
    """When a piece of work hangs, by the longest of its kind so far; None where that tells
    nothing."""
    if longest_s is None:
        return STUCK_S
    return min(max(STUCK_AT_LEAST_S, STUCK_FACTOR * longest_s), STUCK_S)


async def until_stuck(threads: Mapping[str, Working]) -> None:
    """Raises `UserError` when one of the threads, by name, hangs (`stuck_after_s`). Time in which
    this process slept does not count: it is told by looks."""
    looks = dict[str, int]()
    last = dict[str, int | None]()
    while True:
        await asyncio.sleep(LOOK_S)
        for name, thread in list(threads.items()):
            piece = thread.at_work()
            number = None if piece is None else piece.number
            is_same = number is not None and number == last.get(name)
            looks[name] = looks.get(name, 0) + 1 if is_same else 0
            last[name] = number
            at_it_s = looks[name] * LOOK_S
            if piece is not None and at_it_s >= stuck_after_s(piece.longest_s):
                raise UserError(
                    f"the {name} has been at one piece of work for "
                    f"{counted(at_it_s / 60, 'minute', '.0f')} and does not answer: this peer "
                    "ends, so that others take its place. Look at the device, or the disk of its "
                    "state folder, and start it again"
                )


async def until_copied(gossip: Gossip, state_dir: Path) -> None:
    """Raises `UsageError` when a process that began later lives and has this peer's identity."""
    while gossip.records.copy is None:
        await gossip.changed.wait(LOOK_S)
    copy = gossip.records.copy
    where = printable(copy.addresses[0]) if copy.addresses else "an unknown address"
    since = time.strftime("%d %B %H:%M", time.localtime(copy.incarnation / 1000))
    raise UsageError(
        f"the identity of this peer runs elsewhere too, at {where}, since {since}: this one ends. "
        f"Was {state_dir} copied? Start this one with another --state-dir, or end the other one"
    )


async def until_one(*watches: Coroutine[Any, Any, None]) -> None:
    """Until the first of them raises, which this raises then; ends the others."""
    tasks = [asyncio.ensure_future(watch) for watch in watches]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
