"""Tests on a machine that stands still again and again.

    python -m tests.every.stalled tests/transport -x
    python -m tests.every.stalled --apart --stands 0.3 1 --runs 1 2 tests/processes/test_moves.py

runs pytest, and once it has collected stops and continues it with all processes below it, so that a
stall costs no core. One that a test has stopped is left alone.
`--apart`: each process by itself, as one peer sees another whose machine stalls. A test that fails
here and not without has a limit, or an order, that only a machine with time to spare keeps.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.05
"""Between looks for processes that are new."""
PR_SET_CHILD_SUBREAPER = 36
BEGINS = "SWARMNET_STALLED_BEGINS"
"""The environment's name for the file that pytest makes when it has collected."""


def pytest_collection_finish() -> None:
    """This module is a plugin of the pytest that it runs."""
    Path(os.environ[BEGINS]).touch()


def below(pid: int) -> Iterator[int]:
    """A process and all below it; parents come before their children."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    yield pid
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from below(int(child))


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def send(pids: Collection[int], what: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, what)
        except ProcessLookupError:
            continue


@dataclass
class Stalls:
    """Stops and continues the processes below this one, until the first of them has ended."""

    rng: random.Random
    stands_s: tuple[float, float]
    runs_s: tuple[float, float]
    first: subprocess.Popen[bytes]
    still: set[int] = field(default_factory=set)
    """Those that stand still now."""

    def living(self) -> list[int]:
        """All processes that nobody else has stopped; takes in the ends of those whose parent has
        ended."""
        children = [p for p in below(os.getpid()) if p != os.getpid()]
        for pid in children:
            if pid != self.first.pid:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue  # its parent lives
        return [p for p in children if p in self.still or not is_stopped(p)]

    def together(self) -> None:
        while self.first.poll() is None:
            time.sleep(self.rng.uniform(*self.runs_s))
            # One that was just being forked is seen at the second look.
            while new := set(self.living()) - self.still:
                send(new, signal.SIGSTOP)
                self.still |= new
            time.sleep(self.rng.uniform(*self.stands_s))
            self.go_on()

    def apart(self) -> None:
        changes: dict[int, float] = {}
        while self.first.poll() is None:
            now, living = time.monotonic(), self.living()
            self.still &= set(living)
            changes = {p: changes.get(p) or now + self.rng.uniform(*self.runs_s) for p in living}
            for pid in [p for p in living if changes[p] <= now]:
                stands_still = pid in self.still
                send([pid], signal.SIGCONT if stands_still else signal.SIGSTOP)
                self.still ^= {pid}
                lasts = self.runs_s if stands_still else self.stands_s
                changes[pid] = now + self.rng.uniform(*lasts)
            time.sleep(LOOK_S)

    def go_on(self) -> None:
        send(self.still, signal.SIGCONT)
        self.still.clear()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--stands", type=float, nargs=2, default=(0.3, 1.5), metavar="S")
    parser.add_argument("--runs", type=float, nargs=2, default=(0.2, 0.6), metavar="S")
    parser.add_argument("tests", nargs=argparse.REMAINDER, help="what pytest takes")
    ours = parser.parse_args()
    # Processes whose parent has ended come here.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        begins = Path(folder) / "begins"
        first = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "tests.every.stalled", *ours.tests],
            env={**os.environ, BEGINS: str(begins)},
        )
        stalls = Stalls(random.Random(ours.seed), tuple(ours.stands), tuple(ours.runs), first)
        try:
            while not begins.exists() and first.poll() is None:
                time.sleep(LOOK_S)
            stalls.apart() if ours.apart else stalls.together()
        finally:
            stalls.go_on()
            if first.poll() is None:
                first.send_signal(signal.SIGINT)
        return first.wait()


if __name__ == "__main__":
    sys.exit(main())
