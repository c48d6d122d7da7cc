"""Faults on purpose: `swarmnet local --chaos kill=6/min,stop=2/min`.

A killed peer (SIGKILL) is replaced by a newcomer, a stopped one (SIGSTOP) goes on after a few
seconds. Both come at random, as a Poisson process of the given rate, and never to the last replica
of a stage: what that costs is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnet.errors import UsageError
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.joining.ready import read_ready_file
from swarmnet.runtime.local.processes import ChildPeer, PeerProcesses

KINDS = ("kill", "stop")
UNIT_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
ENTRY = re.compile(r"(\w+)=(\d+(?:\.\d+)?)/(\w+)")
STOPPED_S = (2.0, 12.0)
"""Shortest and longest time for which a peer is stopped."""
REPLACE_AFTER_S = 2.0
RETRY_S = 0.5


def parse_chaos(text: str) -> dict[str, float]:
    """Rates per second by kind, of text like `kill=6/min,stop=2/min`. Raises `UsageError`."""
    rates: dict[str, float] = {}
    for entry in text.split(","):
        match = ENTRY.fullmatch(entry.strip())
        if match is None or match[1] not in KINDS or match[3] not in UNIT_S or match[1] in rates:
            raise UsageError(
                f"--chaos {entry.strip()!r}: write kill=6/min or kill=6/min,stop=2/min"
            )
        rates[match[1]] = float(match[2]) / UNIT_S[match[3]]
    return rates


def may_lose(view: View, peer_id: str, now: float) -> bool:
    """Would its stage go on without this peer?"""
    record = view.get(peer_id)
    if record is None or not record.is_replica:
        return False
    return len(view.replicas(record.stage, now)) >= 2


@dataclass
class Chaos:
    """Does the harm, and remembers it for the summary."""

    rates: dict[str, float]
    processes: PeerProcesses
    view: View
    replace: Callable[[], Awaitable[None]]
    """Starts a newcomer."""
    say: Callable[[str], None]
    rng: random.Random
    num_killed: int = 0
    num_stopped: int = 0
    _stopped: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled; nobody stays stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                for kind, rate in self.rates.items():
                    if rate > 0:
                        group.create_task(self._process(kind, rate))
        finally:
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def _process(self, kind: str, rate: float) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self.rng.expovariate(rate))
                victim = self._victim()
                while victim is None:
                    await asyncio.sleep(RETRY_S)
                    victim = self._victim()
                group.create_task(self._kill(victim) if kind == "kill" else self._stop(victim))

    def _victim(self) -> ChildPeer | None:
        now = asyncio.get_running_loop().time()
        able = []
        for child in self.processes.children:
            ready = read_ready_file(child.ready_file) if child.alive else None
            if ready is None or ready.pid in self._stopped:
                continue
            if may_lose(self.view, ready.peer_id, now):
                able.append(child)
        return self.rng.choice(able) if able else None

    async def _kill(self, child: ChildPeer) -> None:
        self.num_killed += 1
        child.reported = True
        self.say(f"chaos: {child.name} is killed (SIGKILL)")
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await asyncio.sleep(REPLACE_AFTER_S)
        await self.replace()

    async def _stop(self, child: ChildPeer) -> None:
        self.num_stopped += 1
        seconds = self.rng.uniform(*STOPPED_S)
        self.say(f"chaos: {child.name} is stopped for {seconds:.0f} s (SIGSTOP)")
        pid = child.process.pid
        self._stopped.append(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._stopped.remove(pid)
