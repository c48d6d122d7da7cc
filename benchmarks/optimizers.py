"""AdamW and Muon in every sync mode, each at its own best learning rate.

    python benchmarks/optimizers.py [--seconds 600] [--task python] [--way zero delayed ...]
    python benchmarks/optimizers.py --tables

A run is a task, a way to exchange, an optimizer, a rate and a seed (`learning/plain.py`). With the
first seed the best rate is looked for: from where `zero` has it, until both neighbours on the list
are worse (`--every-rate`: all of them). Then come the other seeds, at that rate.

`--task python/qwen3_moe python/phi3 python/deepseek_v3` are small models of `transformers` with
parameters that are several matrices in one. There `muon-no-parts` leaves these to AdamW.

Each run adds a line to `benchmarks/results/optimizers.jsonl`, and is not made again where one of
the same Python, torch, length and settings is there. The most important runs come first; with
`--seconds`, none begins later than that. `--tables` writes `optimizers.md` beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.plain import KINDS, MODEL_ROUNDS, MODELS, NO_PARTS, WAYS, run  # noqa: E402
from benchmarks.learning.runs import this_platform  # noqa: E402
from benchmarks.learning.tasks import TASKS, write_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "optimizers.jsonl"
TASKS_HERE = ("python", "letters")
OF_MODELS = tuple(f"python/{model}" for model in MODELS)
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
FIRST = 2
"""Where the search begins."""
SEEDS = (1, 2, 3)
Family = tuple[str, str, str]
"""Task, way and optimizer."""


class Results:
    """Runs of this platform that are as long as their task."""

    def __init__(self, file: Path, rounds: int | None) -> None:
        self._file, self._rounds = file, rounds
        lines = file.read_text().splitlines() if file.exists() else []
        self._all = [json.loads(line) for line in lines]

    def rounds(self, task: str) -> int:
        return self._rounds or (MODEL_ROUNDS if task in OF_MODELS else TASKS[task].rounds)

    def losses(self, family: Family, seed: int) -> dict[float, float]:
        """By rate."""
        task, way, kind = family
        return {
            r["rate"]: r["loss"]
            for r in self._all
            if (r["task"], r["way"], r["kind"], r["seed"]) == (task, way, kind, seed)
            and r["rounds"] == self.rounds(task)
            and r["platform"] == this_platform()
        }

    def best(self, family: Family) -> float | None:
        """Its rate, by the first seed."""
        found = self.losses(family, SEEDS[0])
        return min(found, key=lambda rate: found[rate]) if found else None

    def add(self, result: dict[str, Any]) -> None:
        result = result | {"platform": this_platform()}
        self._all.append(result)
        with self._file.open("a") as out:
            out.write(json.dumps(result) + "\n")


def wanted(
    results: Results, family: Family, rates: Sequence[float], *, every_rate: bool
) -> Iterator[tuple[float, int]]:
    """Rate and seed of the runs that a family still lacks; the first one is asked for, and what
    comes then depends on what it gives. `rates`: these alone, if there are any."""
    task, _, kind = family
    if rates:
        yield from ((r, s) for s in SEEDS for r in rates if r not in results.losses(family, s))
        return
    found = results.losses(family, SEEDS[0])
    best = results.best(family)
    if best is None:
        yield results.best((task, "zero", kind)) or RATES[FIRST], SEEDS[0]
        return
    at = RATES.index(best)
    near = range(len(RATES)) if every_rate else (at - 1, at + 1)
    yield from (
        (RATES[k], SEEDS[0]) for k in near if k in range(len(RATES)) and RATES[k] not in found
    )
    yield from ((best, s) for s in SEEDS[1:] if best not in results.losses(family, s))


# ---- tables --------------------------------------------------------------------------------------


def table(results: Results, task: str) -> list[str]:
    """A row for each way and optimizer of which there is a run."""
    lines = [
        "| way | optimizer | rate | loss | beside `zero` | beside AdamW | seeds | rates tried |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        for kind in KINDS:
            best = results.best((task, way, kind))
            if best is None:
                continue
            own = by_seed(results, (task, way, kind))
            tried = sorted(results.losses((task, way, kind), SEEDS[0]))
            is_enclosed = all(
                0 <= k < len(RATES) and RATES[k] in tried
                for k in (RATES.index(best) - 1, RATES.index(best) + 1)
            )
            beside = [
                difference(own, by_seed(results, (task, *other))) if other != (way, kind) else ""
                for other in (("zero", kind), (way, "adamw"))
            ]
            lines.append(
                f"| `{way}` | {kind} | {best:g}{'' if is_enclosed else ' (?)'} "
                f"| {statistics.mean(own.values()):.4f} | {' | '.join(beside)} | {len(own)} "
                f"| {', '.join(f'{rate:g}' for rate in tried)} |"
            )
    return lines


def by_seed(results: Results, family: Family) -> dict[int, float]:
    """Losses at the family's best rate."""
    best = results.best(family)
    found = {seed: results.losses(family, seed) for seed in SEEDS}
    return {seed: losses[best] for seed, losses in found.items() if best in losses}


def difference(own: dict[int, float], other: dict[int, float]) -> str:
    """Of the seeds that both have, in per cent, with the standard error."""
    both = [100 * (own[seed] / other[seed] - 1) for seed in own if seed in other]
    if not both:
        return ""
    error = statistics.stdev(both) / len(both) ** 0.5 if len(both) > 1 else None
    return (
        f"{statistics.mean(both):+.2f}" + ("" if error is None else f" \u00b1 {error:.2f}") + " %"
    )


PAGE = """# Optimizers and modes

Loss on held-out data after the last round, nats a token, each at the best rate that was tried: a
rate with (?) has an end of the list or an untried rate beside it. Differences are means of those of
the same seed. `python benchmarks/optimizers.py` makes the runs, and `--tables` this page.
"""


def write_page(results: Results) -> None:
    parts = [PAGE]
    for task in TASKS_HERE + OF_MODELS:
        lines = table(results, task)
        if len(lines) > 2:
            rounds = results.rounds(task)
            parts.append(f"## `{task}`, {rounds} rounds\n\n" + "\n".join(lines) + "\n")
    RESULTS.with_suffix(".md").write_text("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--task", nargs="+", choices=TASKS_HERE + OF_MODELS, default=TASKS_HERE)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument(
        "--rate", nargs="+", type=float, choices=RATES, default=(), help="no search"
    )
    parser.add_argument("--rounds", type=int, help="of every run, to try it out")
    parser.add_argument("--every-rate", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tables", action="store_true", help="write what is there and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tables:
        write_page(Results(options.results, None))
        return
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(text)
        for task, way, kind in (
            (t, w, k)
            for t in options.task
            for w in options.way
            for k in options.kind
            if t in OF_MODELS or k != NO_PARTS
        ):
            while time.monotonic() < end:
                results = Results(options.results, options.rounds)  # others may add to the file
                family = task, way, kind
                runs = wanted(results, family, options.rate, every_rate=options.every_rate)
                rate, seed = next((r for r in runs if r[1] in options.seed), (0.0, 0))
                if not seed:
                    break
                made = run(task, way, kind, rate, seed, results.rounds(task), text)
                results.add(made)
                print(
                    f"{task} {way} {kind} {rate:g} seed {seed}: {made['loss']:.4f}, "
                    f"{made['cpu_seconds']} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
