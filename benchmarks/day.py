"""Whether a swarm under `swarmnet local --chaos` stays as fast and as large as it was.

    python benchmarks/day.py --folder day --minutes 360
    python benchmarks/day.py --folder day --show           # the tables again

The first command is a piece, and may be given again: the run goes on from its state folder. Six
peers train the tiniest model, of `benchmarks/soak.py`; one is killed now and then, and started
again, and others are stopped for a while (`--chaos`). Each `--every` seconds there is a sample of
the memory that is each process's own: of the peers, of their network daemons, of the parent that
watches them, and of its daemon.

A process that is started again begins its memory anew, so a slope has a level of its own for each
process. Samples of a process's first `--warm-up` rounds are left out. Rates are of the first and
the last third of each piece. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.soak import (  # noqa: E402
    SAMPLES,
    SPEC,
    daemons_of,
    first_and_last,
    load,
    measured,
    prepare,
    slopes,
)

CHAOS = "kill=0.2/min,stop=1/min"
ROUND = re.compile(r"^round (\d+)/")
END_S = 120.0
PARENT, DAEMON = "parent", "{} daemon"


class Piece:
    """One start of `swarmnet local`."""

    def __init__(self, folder: Path, number: int, options: argparse.Namespace) -> None:
        self.folder, self.number, self.options = folder, number, options
        self.round = 0

    def run(self) -> None:
        ways = ("--spec", str(self.folder / SPEC), "--state-dir", str(self.folder / "state"))
        words = ("--peers", str(self.options.peers), "--chaos", self.options.chaos, "--plain")
        with (self.folder / "local.log").open("a") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "peer", "local", *words, *ways, "--threads", "1"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            reader = threading.Thread(target=self._read, args=(child, log), daemon=True)
            reader.start()
            try:
                self._sample_until(time.monotonic() + 60 * self.options.minutes, child)
            finally:
                child.send_signal(signal.SIGINT)
                child.wait(END_S)
                reader.join(END_S)

    def _read(self, child: subprocess.Popen[str], log: Any) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            found = ROUND.match(line)
            self.round = max(self.round, int(found.group(1))) if found else self.round

    def _sample_until(self, end: float, child: subprocess.Popen[str]) -> None:
        parent = psutil.Process(child.pid)
        with (self.folder / SAMPLES).open("a") as file:
            while time.monotonic() < end:
                time.sleep(self.options.every)
                if child.poll() is not None:
                    raise SystemExit(f"it has ended; see {self.folder / 'local.log'}")
                for row in self._samples(parent):
                    file.write(json.dumps(row) + "\n")
                file.flush()

    def _samples(self, parent: psutil.Process) -> list[dict[str, Any]]:
        daemons = daemons_of(parent)
        peers = [p for p in parent.children() if p not in daemons]
        found = [(PARENT, parent), *((DAEMON.format(PARENT), d) for d in daemons)]
        for peer in peers:
            try:
                found += [("peer", peer), *((DAEMON.format("peer"), d) for d in daemons_of(peer))]
            except psutil.NoSuchProcess:  # just killed
                continue
        about = {"piece": self.number, "t": round(time.time(), 1), "round": self.round, "joins": 0}
        rows = []
        for name, process in found:
            try:
                rows.append({"name": name, "pid": process.pid, **about, **measured(process)})
            except (psutil.NoSuchProcess, OSError, StopIteration):  # just killed
                continue
        return rows


def told(folder: Path, warm_up: int) -> str:
    """The tables."""
    found = load(folder)
    lines = ["| piece | minutes | rounds | rounds a second, first third | last third | kept |"]
    lines.append("|---|---|---|---|---|---|")
    pieces = defaultdict(list)
    for row in found[PARENT]:
        if row["round"]:
            pieces[row["piece"]].append((row["t"], row["round"]))
    for number, own in pieces.items():
        third = len(own) // 3
        first, last = rate(own[: third + 1]), rate(own[-third - 1 :])
        minutes, rounds = (own[-1][0] - own[0][0]) / 60, own[-1][1] - own[0][1]
        lines.append(
            f"| {number} | {minutes:.0f} | {rounds:,} | {first:.2f} | {last:.2f} "
            f"| {last / first:.1%} |"
        )
    lines.append("\n| processes | lives | MB, first and last | files | bytes a round |")
    lines.append("|---|---|---|---|---|")
    for name, own in sorted(found.items()):
        both = slopes(own, warm_up)
        slope = f"{both[0].mean:,.0f} ± {both[0].half:,.0f}" if both else "too few samples"
        numbers = " | ".join(first_and_last(own, number) for number in ("mb", "files"))
        lines.append(f"| {name} | {len({row['pid'] for row in own})} | {numbers} | {slope} |")
    return "\n".join(lines) + "\n"


def rate(points: list[tuple[float, int]]) -> float:
    """Rounds a second."""
    return (points[-1][1] - points[0][1]) / max(1e-9, points[-1][0] - points[0][0])


def main() -> None:
    """A piece, and the table of all pieces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=360.0)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--chaos", default=CHAOS)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--warm-up", type=int, default=500)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not options.show:
        prepare(folder)
        before = load(folder) if (folder / SAMPLES).exists() else {}
        number = 1 + max((row["piece"] for rows in before.values() for row in rows), default=0)
        Piece(folder, number, options).run()
    print(told(folder, options.warm_up), end="")


if __name__ == "__main__":
    main()
