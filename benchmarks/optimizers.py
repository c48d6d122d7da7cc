"""AdamW and Muon in every sync mode, each at its own best learning rate.

    python benchmarks/optimizers.py [--seconds 600] [--task python] [--way zero delayed ...]
    python benchmarks/optimizers.py --tables

A run is a task, a way to exchange, an optimizer, a rate and a seed (`learning/plain.py`). With the
first seed a best rate is looked for: from where `zero` has it, until both neighbours on the list
are worse (`--every-rate`: all of them). Then it and both neighbours get the other seeds, until the
best by the mean of all seeds has neighbours with all of them: at the first seed's best rate another
one may be unstable.

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

    def by_rate(self, family: Family) -> dict[float, dict[int, float]]:
        """Losses by rate and seed."""
        found: dict[float, dict[int, float]] = {}
        for seed in SEEDS:
            for rate, loss in self.losses(family, seed).items():
                found.setdefault(rate, {})[seed] = loss
        return found

    def best(self, family: Family) -> float | None:
        """The rate with the lowest mean over the seeds, of those that were tried with the most."""
        found = self.by_rate(family)
        most = max((len(losses) for losses in found.values()), default=0)
        means = {
            r: statistics.mean(losses.values())
            for r, losses in found.items()
            if len(losses) == most
        }
        return min(means, key=lambda rate: means[rate]) if means else None

    def is_enclosed(self, family: Family) -> bool:
        """Whether both neighbours of the best rate were tried with as many seeds."""
        found, best = self.by_rate(family), self.best(family)
        if best is None:
            return False
        at = RATES.index(best)
        return all(
            k in range(len(RATES)) and len(found.get(RATES[k], ())) >= len(found[best])
            for k in (at - 1, at + 1)
        )

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
    found = results.by_rate(family)
    best = results.best(family)
    if best is None:
        yield results.best((task, "zero", kind)) or RATES[FIRST], SEEDS[0]
        return
    at = RATES.index(best)
    near = [RATES[k] for k in (at, at - 1, at + 1) if k in range(len(RATES))]
    first = RATES if every_rate else near
    yield from ((rate, SEEDS[0]) for rate in first if SEEDS[0] not in found.get(rate, ()))
    yield from ((rate, s) for rate in near for s in SEEDS[1:] if s not in found.get(rate, ()))


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
            tried = sorted(results.by_rate((task, way, kind)))
            is_enclosed = results.is_enclosed((task, way, kind))
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
    return results.by_rate(family)[best] if best is not None else {}


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

Loss on held-out data after the last round, nats a token, each at the rate with the lowest mean over
the seeds: one with (?) has an end of the list beside it, or a rate tried with fewer. Differences
are means of those of the same seed. `python benchmarks/optimizers.py` makes the runs, and
`--tables` this page.
"""


def write_page(results: Results, page: Path) -> None:
    parts = [PAGE]
    for task in TASKS_HERE + OF_MODELS:
        lines = table(results, task)
        if len(lines) > 2:
            rounds = results.rounds(task)
            parts.append(f"## `{task}`, {rounds} rounds\n\n" + "\n".join(lines) + "\n")
    page.write_text("\n".join(parts))


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
        write_page(Results(options.results, None), options.results.with_suffix(".md"))
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
