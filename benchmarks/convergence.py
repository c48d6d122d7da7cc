"""Does it learn? Codecs against fp32, and every sync mode with and without replaced peers.

    python benchmarks/convergence.py [--jobs 2] [--time-limit SECONDS] [--where boundary zero ...]
    python benchmarks/convergence.py --tables

A cell is one run: a place of the codec (the boundaries between stages, the updates of a sync
mode, or both), a task, a codec and a seed. Cells of one place, task and seed have the same initial
weights and the same data in the same slots (with boundaries in a subspace the model is another
one, of as many parameters). A control repeats the fp32 cell with its sums in
another order.
`learning/runs.py` says how cells are run, `learning/tasks.py` what is learned.

Results go to `benchmarks/results/convergence.json` as each cell ends. A cell that is there is not
run again, if it has the same settings, Python and torch; what is compared is of one platform. Each
cell has a process with one thread. The most important cells come first. With `--time-limit`, none
is begun that would hardly end in time.

`--tables` runs nothing: it writes the tables of `convergence.md` beside the results and of
docs/convergence.md, between their marks, and draws `convergence-*.svg`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.runs import FEW, MODES, Cell, run, settings_of, this_platform  # noqa: E402
from benchmarks.learning.tables import FIRST_SEED, draw, write_tables  # noqa: E402
from benchmarks.learning.tasks import (  # noqa: E402
    AS_FEW_BYTES,
    BOTH,
    BOUNDARY,
    NARROW,
    ONE_PROCESS_PLACES,
    ROTATED,
    TASKS,
    WIDE,
    rounds_of,
)

RESULTS = ROOT / "benchmarks" / "results" / "convergence.json"
PAGES = (RESULTS.with_suffix(".md"), ROOT / "docs" / "convergence.md")
"""All that was measured, and what follows from it."""
REPLACED = (10, 30)
BOUNDARY_CODECS = ("none", "int8", "int4", "int6", "bf16")
BOTH_CODECS = ("int8", "int4")
NARROW_CODECS = ("int8", "int4")
UPDATE_CODECS: dict[str, tuple[str, ...]] = {
    "zero": ("none", "int8", "int4", "bf16"),
    "delayed": ("none", "int8", "int4"),
    "local-10": ("none", "int4", "topk", "int8", FEW),
    "gossip-10": ("none", "int8"),
}
ANSWERED = ("zero", "local-10")
"""Modes whose cells of `answers` are run too."""
SECONDS = {
    (BOUNDARY, "letters"): 75,
    (BOUNDARY, "python"): 100,
    (BOUNDARY, "answers"): 160,
    ("wide", "python"): 600,
    ("", "letters"): 55,
    ("", "python"): 70,
    ("", "answers"): 125,
}
"""Of a cell in fp32, by place (empty: any mode) and task, on one of sixteen busy cores."""
SLOW_CODECS, SLOWER = ("int6", "int4"), 1.3
RESERVE = 1.05
"""Times the guess: so much time must be left for another cell."""


def cells() -> list[Cell]:
    """All of them. The most important ones come first, and of equal ones those that take longer;
    seeds stay together, so that what time cuts off is the last seed."""
    found = [
        Cell(BOUNDARY, task, codec, seed, order)
        for task in TASKS
        for seed in TASKS[task].seeds
        for codec in BOUNDARY_CODECS
        for order in ((0, 1, 2) if codec == "none" else (0,))
    ]
    found += [
        Cell(mode, task, codec, seed, order)
        for mode, codecs in UPDATE_CODECS.items()
        for task in TASKS
        if task != "answers" or mode in ANSWERED
        for seed in TASKS[task].seeds
        for codec in codecs
        for order in ((0, 1) if codec == "none" else (0,))
    ]
    found += [
        Cell(BOTH, task, codec, seed)
        for task in TASKS
        if task != "answers"
        for seed in TASKS[task].seeds
        for codec in BOTH_CODECS
    ]
    found += [
        Cell(where, task, codec, seed)
        for where in (*NARROW, *AS_FEW_BYTES)
        for task in ("letters", "python")
        for seed in TASKS[task].seeds
        for codec in NARROW_CODECS
    ]
    found += [
        Cell(where, task, "none", seed)
        for where in (*NARROW, *ROTATED)
        for task in ("letters", "python")
        for seed in TASKS[task].seeds
    ]
    found += [Cell(where, "python", "int8", FIRST_SEED) for where in WIDE]
    for mode in MODES:
        if mode not in UPDATE_CODECS:
            found += [Cell(mode, task, "none", FIRST_SEED) for task in ("python", "letters")]
        found += [Cell(mode, "letters", "none", FIRST_SEED, replaced=p) for p in REPLACED]
    return sorted(found, key=lambda cell: (_rank(cell), -_guess(cell.where, cell.task), cell.seed))


def _rank(cell: Cell) -> int:
    """The most important cells have the lowest one."""
    if cell.where in ONE_PROCESS_PLACES and cell.where != BOUNDARY:
        return 4 if cell.where in (*ROTATED, *WIDE) else 3
    if cell.where == BOUNDARY:
        return 0 if cell.order < 2 and cell.codec in BOUNDARY_CODECS[:3] else 2
    if cell.where == BOTH:
        return 3
    if cell.replaced or cell.where not in UPDATE_CODECS:
        return 5
    if cell.where == "gossip-10" or cell.task == "answers" or cell.codec == "bf16":
        return 4
    if cell.where == "local-10" and cell.codec == "int8":
        return 4
    if cell.order and cell.where != "local-10":
        return 4  # of one process's updates: far closer than any codec
    return 1 if cell.task == "letters" else 3


def _guess(where: str, task: str) -> float:
    if where in WIDE:
        return SECONDS["wide", task]
    return SECONDS[BOUNDARY if where in ONE_PROCESS_PLACES else "", task]


@dataclass
class Bench:
    """Cells that are run, and their results."""

    file: Path
    rounds: int | None
    """Of every cell, for a try; None: of its task."""
    end: float
    """Of the monotonic clock."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By platform and cell."""
    pace: float = 0.0
    """The longest time that a cell took, over the guess; 0 before the first one has ended."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rounds_of(self, cell: Cell) -> int:
        return self.rounds or rounds_of(cell.task, cell.where, cell.codec)

    def is_done(self, cell: Cell) -> bool:
        had = self.results.get(this_platform(), {}).get(cell.key, {})
        return bool(had.get("settings") == settings_of(cell, self.rounds_of(cell)))

    def run_one(self, cell: Cell) -> None:
        """In a process of its own."""
        guess = _guess(cell.where, cell.task) * self.rounds_of(cell) / TASKS[cell.task].rounds
        guess *= SLOWER if cell.codec in SLOW_CODECS else 1.0
        if time.monotonic() + RESERVE * (self.pace or 1.0) * guess > self.end:
            print(f"{cell.key}: not begun, too little time is left", flush=True)
            return
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            words = [json.dumps(asdict(cell)), str(self.rounds_of(cell)), str(out)]
            command = [sys.executable, __file__, "--child", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                print(f"{cell.key}: failed, {last}", flush=True)
                return
            result = json.loads(out.read_text())
        with self.lock:
            self.pace = max(self.pace, result["seconds"] / guess)
            self.results.setdefault(this_platform(), {})[cell.key] = result
            self.save()
        told = f"{result['losses'][str(result['rounds'])]:.4f} nats a token"
        if "right" in result:
            told += f", {result['right'][str(result['rounds'])]:.1%} right"
        print(f"{cell.key}: {told}, {result['seconds']:.0f} s", flush=True)

    def save(self) -> None:
        """Whole or not at all."""
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(self.results, indent=1, sort_keys=True) + "\n")
        beside.replace(self.file)

    def run_all(self, cells: Iterable[Cell], jobs: int) -> None:
        """Those that are not there yet, `jobs` at a time."""
        wanted = [cell for cell in cells if not self.is_done(cell)]
        print(f"{len(wanted)} cells, {this_platform()}", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self.run_one, wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    places = [*ONE_PROCESS_PLACES, BOTH, *MODES]
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--where", nargs="+", choices=places, default=places)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--codec", nargs="+", help="only these; controls count as none")
    parser.add_argument("--seed", nargs="+", type=int, help="only these")
    parser.add_argument("--rounds", type=int, help="of every cell, to try it out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tables", action="store_true", help="write what is there and end")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        cell, rounds, out = args.child
        Path(out).write_text(json.dumps(run(Cell(**json.loads(cell)), int(rounds))))
        return
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.tables:
        bench = Bench(args.results, args.rounds, time.monotonic() + args.time_limit, results)
        wanted = [
            cell
            for cell in cells()
            if cell.where in args.where
            and cell.task in args.task
            and (not args.seed or cell.seed in args.seed)
            and (not args.codec or cell.codec in args.codec)
        ]
        bench.run_all(wanted, args.jobs)
    else:
        for page in PAGES:
            write_tables(page, results)
        draw(RESULTS.parent, results)


if __name__ == "__main__":
    main()
