"""Mutation testing: small faults are put into the code, and its tests have to notice them.

A list of mutations is drawn with a seed and kept (`drawn.json`), so that the same ones can be run
before and after a change to the tests: what was caught has to be caught. Each is applied to a copy
of the tree, where `pytest -x` runs the tests of its area.

    python -m tests.mutations draw --seed 30 --count 30 > tests/mutations/drawn.json
    python -m tests.mutations run --tree . --results after.json

The operators are the usual ones (DeMillo, Lipton and Sayward, 1978; Offutt et al., 1996):
relational, logical and arithmetic operators replaced, conditions negated, constants moved by one,
statements deleted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWN = Path(__file__).with_name("drawn.json")
USAGE_ERROR = 4
"""pytest's exit code: nothing was run."""
LIMIT_S = 1200.0
"""For the tests of one area. A mutant that runs into it hangs, and counts as caught."""
COPIED = ("swarmnet", "peer", "tests", "docs", "examples", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Area:
    """Files that belong together, and the tests that are about them: the quick ones first."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "routing": Area(
        (
            "swarmnet/protocol/pipeline/routing.py",
            "swarmnet/protocol/pipeline/service_estimates.py",
        ),
        (
            "tests/protocol/pipeline/test_routing.py",
            "tests/protocol/pipeline/test_service_estimates.py",
            "tests/swarm/pipeline/test_path_hints.py",
            "tests/swarm/pipeline/test_stalls.py",
            "tests/swarm/pipeline/test_room.py",
        ),
    ),
    "ledger": Area(
        ("swarmnet/protocol/pipeline/ledger.py",),
        (
            "tests/protocol/pipeline/test_ledger.py",
            "tests/swarm/pipeline/test_settling.py",
            "tests/swarm/recovery/test_lost_samples.py",
        ),
    ),
    "progress": Area(
        ("swarmnet/protocol/pipeline/progress.py",),
        (
            "tests/protocol/pipeline/test_progress.py",
            "tests/protocol/pipeline/test_feeding.py",
            "tests/swarm/pipeline/test_in_flight.py",
            "tests/swarm/pipeline/test_overlap.py",
        ),
    ),
    "placement": Area(
        ("swarmnet/protocol/update/placement.py",),
        ("tests/protocol/update/test_placement.py", "tests/swarm/update/test_uneven_uplinks.py"),
    ),
    "averaging": Area(
        ("swarmnet/swarm/update/averaging.py",),
        (
            "tests/swarm/update/test_contributors.py",
            "tests/swarm/pipeline/test_shared_calls.py",
            "tests/swarm/pipeline/test_one_result.py",
            "tests/swarm/update/test_norms.py",
            "tests/swarm/membership/test_partition.py",
            "tests/swarm/update/test_device_errors.py",
            "tests/swarm/recovery/test_handover.py",
            "tests/swarm/update/test_replication.py",
            "tests/swarm/pipeline/test_bad_input.py",
        ),
    ),
    "recovery": Area(
        (
            "swarmnet/swarm/recovery/restart.py",
            "swarmnet/swarm/recovery/checkpointing.py",
            "swarmnet/protocol/recovery.py",
        ),
        ("tests/protocol/test_recovery.py", "tests/swarm/recovery/test_recovery.py"),
    ),
    "frames": Area(
        ("swarmnet/transport/frames.py",),
        ("tests/transport/test_frames.py", "tests/transport/test_channel.py"),
    ),
}

RELATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """One fault: `before`, found at `line` (from 1) and `column` (from 0, in bytes) of `source`,
    becomes `after`."""

    area: str
    source: str
    line: int
    column: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Raises `ValueError` where the text has something else at that place."""
        lines = text.encode().splitlines(keepends=True)
        at = sum(map(len, lines[: self.line - 1])) + self.column
        data, before = text.encode(), self.before.encode()
        if data[at : at + len(before)] != before:
            raise ValueError(f"{self.source}:{self.line} has changed: draw again")
        return (data[:at] + self.after.encode() + data[at + len(before) :]).decode()

    def __str__(self) -> str:
        before, after = (" ".join(s.split()) for s in (self.before, self.after))
        return f"{self.source}:{self.line}  {before}  ->  {after}"


# ---- drawing ------------------------------------------------------------------------------------


def mutants_of(node: ast.AST) -> Iterator[ast.AST]:
    """Every mutation of this very node, without those of its children."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in RELATIONS:
            changed.ops = [RELATIONS[type(op)]()]
            yield changed
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield changed
        case ast.BinOp() if type(changed.op) in ARITHMETIC and not _is_text(changed):
            changed.op = ARITHMETIC[type(changed.op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not changed.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(changed.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITES:
            changed.func = ast.Name(OPPOSITES[name])
            yield changed
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )


def _is_for_people(node: ast.AST) -> bool:
    """Logging, text, annotations and errors: what they say is not behaviour."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "log"
    )


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_people(child):
                yield child
                yield from _nodes(child)


def candidates(area: str, source: str, text: str) -> list[Mutation]:
    """Every mutation of a file, in the order of its lines."""
    found = []
    for node in _nodes(ast.parse(text)):
        before = ast.get_source_segment(text, node) if isinstance(node, ast.expr | ast.stmt) else ""
        if not before:
            continue
        for changed in mutants_of(node):
            after = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.expr):
                after = f"({after})"
            found.append(Mutation(area, source, node.lineno, node.col_offset, before, after))
    return sorted(found, key=lambda m: (m.source, m.line, m.column, m.after))


def draw(seed: int, count: int) -> list[Mutation]:
    """`count` mutations, as evenly over the areas as it goes."""
    rng = random.Random(seed)
    pools = {
        area: [m for s in it.sources for m in candidates(area, s, (ROOT / s).read_text())]
        for area, it in AREAS.items()
    }
    shares = {area: count // len(AREAS) for area in AREAS}
    for area in rng.sample(list(AREAS), count % len(AREAS)):
        shares[area] += 1
    return [m for area in AREAS for m in rng.sample(pools[area], shares[area])]


# ---- running ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """`caught_by`: the first test that failed; empty where none did."""

    mutation: str
    caught: bool
    caught_by: str
    seconds: float


def run_one(mutation: Mutation, tree: Path, python: str) -> Outcome:
    """The tests of `tree` against the mutant of its code."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
        folder = Path(temporary)
        for name in COPIED:
            source = tree / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        path = folder / mutation.source
        path.write_text(mutation.apply(path.read_text()))
        tests = [t for t in AREAS[mutation.area].tests if (folder / t).exists()]
        has_long = "long:" in (folder / "pyproject.toml").read_text()
        chosen = "not processes and not long" if has_long else "not processes"
        command = [python, "-m", "pytest", "-x", "-q", "--no-header", "-m", chosen]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            output = "FAILED (it hangs)"
        if process.returncode == USAGE_ERROR:
            raise RuntimeError(output.strip())
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        caught_by = lines[0].split(" - ")[0] if lines else ""
        if process.returncode and not lines:
            caught_by = output.strip().splitlines()[-1]
        took = round(time.monotonic() - began, 1)
        return Outcome(str(mutation), bool(process.returncode), caught_by, took)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="print a list of mutations as JSON")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=30)
    running = commands.add_parser("run", help="run those of a list")
    running.add_argument("--list", type=Path, default=DRAWN)
    running.add_argument("--tree", type=Path, default=ROOT, help="whose code and tests")
    running.add_argument("--python", default=sys.executable)
    running.add_argument("--results", type=Path, required=True)
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.command == "draw":
        print(json.dumps([asdict(m) for m in draw(options.seed, options.count)], indent=1))
        return 0
    mutations = [Mutation(**fields) for fields in json.loads(options.list.read_text())]
    tree, outcomes = options.tree.resolve(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda m: run_one(m, tree, options.python), mutations):
            outcomes.append(outcome)
            print("caught" if outcome.caught else "MISSED", outcome.mutation, outcome.caught_by)
            options.results.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    print(f"{sum(o.caught for o in outcomes)} of {len(outcomes)} caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
