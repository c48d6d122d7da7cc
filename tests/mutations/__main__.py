"""Mutation testing: small faults are put into the code, and its tests have to notice them.

A list of mutations is drawn with a seed and kept (`drawn.json`), over all of `swarmnet/`, so that
the same ones can be run before and after a change: what was caught has to be caught. Each is
applied to a copy of the tree, where `pytest -x` runs the fast tests of its area for a minute of a
processor at most.

    python -m tests.mutations draw --seed 55 --count 300 > tests/mutations/drawn.json
    python -m tests.mutations run --results before.json
    python -m tests.mutations run --results after.json --before before.json

A run takes hours, at the lowest priority, and may be ended at any time: the same command goes on
with those that its results lack. They are of one tree, which has to be as it was.

A mutation is found by its function and its text, not by its line, so that it is found again where
code has moved. What has no counterpart any more is listed; `redraw` puts others in their place,
which must be in the tree of before too:

    python -m tests.mutations redraw --old ../before > drawn.json

The operators are the usual ones (DeMillo, Lipton and Sayward, 1978; Offutt et al., 1996):
relational, logical and arithmetic operators replaced, conditions negated, constants moved by one,
statements deleted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
DRAWN = Path(__file__).with_name("drawn.json")
PACKAGE = "swarmnet"
USAGE_ERROR = 4
"""pytest's exit code: nothing was run."""
LIMIT_S = 60
"""Of a processor, for the tests of one area: a busy machine changes nothing. What they have not
caught by then they have not caught."""
PATIENCE_S = 900.0
"""For a mutant that waits for ever: one that has not had `AT_WORK_S` of a processor in that time.
Others only have to share it."""
AT_WORK_S = 1.0
LOWEST_PRIORITY = 19
COPIED = (
    "swarmnet",
    "peer",
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
)

AREAS: dict[str, tuple[str, ...]] = {
    "swarmnet": (
        "tests/test_spec.py",
        "tests/test_run_identity.py",
        "tests/test_admission.py",
        "tests/test_identity.py",
        "tests/test_llama_keys.py",
        "tests/transport/test_frames.py",
    ),
    "swarmnet/api": ("tests/api",),
    "swarmnet/methods": (
        "tests/swarm/membership/test_access.py",
        "tests/swarm/membership/test_callers.py",
        "tests/protocol/test_generation.py",
        "tests/protocol/update/test_late_tokens.py",
        "tests/swarm/update/exchange/test_proofs.py",
        "tests/swarm/membership/test_unreached.py",
        "tests/swarm/pipeline/test_admission.py",
        "tests/conformance",
    ),
    "swarmnet/observe": ("tests/observe", "tests/dashboard"),
    "swarmnet/parsing": ("tests/parsing", "tests/training/data/test_hostile_files.py"),
    "swarmnet/protocol": ("tests/protocol",),
    "swarmnet/protocol/membership": ("tests/protocol/membership", "tests/swarm/membership"),
    "swarmnet/protocol/pipeline": ("tests/protocol/pipeline", "tests/swarm/pipeline"),
    "swarmnet/protocol/update": ("tests/protocol/update",),
    "swarmnet/training": ("tests/training",),
    "swarmnet/training/codecs": ("tests/training/codecs",),
    "swarmnet/training/data": ("tests/training/data",),
    "swarmnet/training/memory": ("tests/training/memory",),
    "swarmnet/training/models": (
        "tests/training/models",
        "tests/training/test_lora.py",
        "tests/training/test_adapter.py",
        "tests/training/test_resolving.py",
        "tests/training/test_custom_model.py",
    ),
    "swarmnet/training/optimizer": ("tests/training/optimizer",),
    "swarmnet/training/passes": ("tests/training/passes", "tests/training/test_stage.py"),
    "swarmnet/training/ranks": ("tests/training/ranks",),
    "swarmnet/swarm": ("tests/swarm/test_tasks.py", "tests/swarm/lifecycle"),
    "swarmnet/swarm/generation": ("tests/protocol/test_generation.py", "tests/swarm/generation"),
    "swarmnet/swarm/initial": ("tests/swarm/initial",),
    "swarmnet/swarm/lifecycle": ("tests/swarm/lifecycle",),
    "swarmnet/swarm/membership": ("tests/swarm/membership",),
    "swarmnet/swarm/pipeline": ("tests/swarm/pipeline",),
    "swarmnet/swarm/recovery": ("tests/swarm/recovery",),
    "swarmnet/swarm/replica": ("tests/swarm/replica", "tests/swarm/pipeline"),
    "swarmnet/swarm/update": ("tests/swarm/update",),
    "swarmnet/transport": ("tests/transport",),
    "swarmnet/transport/calls": ("tests/transport/calls", "tests/transport"),
    "swarmnet/transport/libp2p": ("tests/transport/libp2p",),
    "swarmnet/runtime": ("tests/runtime",),
    "swarmnet/simulation": ("tests/simulation",),
}
"""By folder, with those below it that are not named: the tests that are about it, in their
order."""


WITHIN = (
    "swarmnet/protocol/dialing",
    "swarmnet/protocol/planning",
    "swarmnet/runtime/apart",
    "swarmnet/runtime/exporting",
    "swarmnet/runtime/joining",
    "swarmnet/runtime/local",
    "swarmnet/runtime/writing",
    "swarmnet/swarm/update/exchange",
    "swarmnet/training/attention",
    "swarmnet/training/processes",
    "swarmnet/training/ranks/rows",
    "swarmnet/training/ranks/texts",
    "swarmnet/transport/mapping",
)
"""Folders without an area of their own: their tests are among those of the one above."""


def area_of(source: str) -> str:
    """The folder in `AREAS` to which a file belongs."""
    return max((a for a in AREAS if source.startswith(f"{a}/")), key=len)


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
    """One fault: the `nth` (from 0) `before` in statements that read `statement`, of `function` (a
    qualified name; empty in a module's own code), becomes `after`."""

    source: str
    function: str
    statement: str
    nth: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(s.split()) for s in (self.before, self.after))
        return f"{self.source} {self.function}: {before}  ->  {after}"


@dataclass(frozen=True)
class Site:
    """Where a mutation is: bytes `start` to `stop` of its file."""

    mutation: Mutation
    start: int
    stop: int

    def apply(self, text: str) -> str:
        data, after = text.encode(), self.mutation.after.encode()
        return (data[: self.start] + after + data[self.stop :]).decode()


# ---- drawing ------------------------------------------------------------------------------------


def mutants_of(node: ast.AST) -> Iterator[ast.AST]:
    """Every mutation of this very node, without those of its children."""
    changed = copy.copy(node)
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


@dataclass(frozen=True)
class _Place:
    """A node, and what a reader finds it by."""

    node: ast.AST
    function: str
    statement: str


def _places(tree: ast.AST, function: str = "", statement: str = "") -> Iterator[_Place]:
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_for_people(child):
                continue
            name, text = function, statement
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{function}.{child.name}" if function else child.name
            if isinstance(child, ast.stmt):
                text = _head(child)
            yield _Place(child, name, text)
            yield from _places(child, name, text)


def _head(statement: ast.stmt) -> str:
    """The text of a statement, without those in it."""
    bare = copy.copy(statement)
    for name in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
        if hasattr(bare, name):
            setattr(bare, name, [ast.Pass()] if name == "body" else [])
    if isinstance(bare, ast.Match | ast.Try | ast.TryStar):
        return type(bare).__name__
    return ast.unparse(bare)


def sites_of(source: str, text: str) -> list[Site]:
    """Every mutation of a file, in the order of its lines."""
    data, lines = text.encode(), [0]
    for line in data.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[Site] = []
    seen: Counter[tuple[str, ...]] = Counter()
    for place in _places(ast.parse(text)):
        node = place.node
        if not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None:
            continue
        start = lines[node.lineno - 1] + node.col_offset
        stop = lines[node.end_lineno - 1] + (node.end_col_offset or 0)
        before = data[start:stop].decode()
        for changed in mutants_of(node):
            after = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.expr):
                after = f"({after})"
            key = (place.function, place.statement, before, after)
            mutation = Mutation(source, *key[:2], seen[key], *key[2:])
            seen[key] += 1
            found.append(Site(mutation, start, stop))
    return sorted(found, key=lambda s: (s.start, s.mutation.after))


@cache
def sites_in(tree: Path) -> tuple[Site, ...]:
    """Every mutation of a tree."""
    paths = sorted(p.relative_to(tree).as_posix() for p in (tree / PACKAGE).rglob("*.py"))
    return tuple(site for p in paths for site in sites_of(p, (tree / p).read_text()))


def draw(tree: Path, seed: int, count: int) -> list[Mutation]:
    """`count` mutations, as evenly over the areas as it goes."""
    rng = random.Random(seed)
    shares = {area: count // len(AREAS) for area in AREAS}
    for area in rng.sample(list(AREAS), count % len(AREAS)):
        shares[area] += 1
    drawn: list[Mutation] = []
    for area in AREAS:
        pool = [s.mutation for s in sites_in(tree) if area_of(s.mutation.source) == area]
        drawn += rng.sample(pool, min(shares[area], len(pool)))
    return drawn


# ---- finding again ------------------------------------------------------------------------------


KEYS: tuple[Callable[[Mutation], tuple[object, ...]], ...] = (
    lambda m: (m.source, m.function, m.statement, m.before, m.after, m.nth),
    lambda m: (m.function, m.statement, m.before, m.after, m.nth),
    lambda m: (m.function.rpartition(".")[2], m.statement, m.before, m.after, m.nth),
    lambda m: (m.statement, m.before, m.after),
)
"""What two trees must agree in, the strictest first: its place; its function, elsewhere; the name
of its function, in another class or none; its statement."""


def find(mutation: Mutation, tree: Path) -> Site | None:
    """The counterpart of a mutation in another tree: the only one that agrees with it."""
    for number, key in enumerate(KEYS):
        found = _by_key(tree, number).get(key(mutation), [])
        if len(found) == 1:
            return found[0]
    return None


@cache
def _by_key(tree: Path, number: int) -> dict[tuple[object, ...], list[Site]]:
    found: dict[tuple[object, ...], list[Site]] = {}
    for site in sites_in(tree):
        found.setdefault(KEYS[number](site.mutation), []).append(site)
    return found


def redraw(drawn: Sequence[Mutation], tree: Path, old: Path) -> list[Mutation]:
    """`drawn`, with another one of its area in place of each that has no counterpart in `tree`:
    one of `old` that has. Those that are replaced are listed on standard error."""
    kept = []
    for number, mutation in enumerate(drawn):
        if find(mutation, tree) is None:
            print(f"no counterpart: {mutation}", file=sys.stderr)
            area = area_of(mutation.source)
            pool = [s.mutation for s in sites_in(old) if area_of(s.mutation.source) == area]
            random.Random(number).shuffle(pool)
            others = (m for m in pool if m not in drawn and find(m, tree) is not None)
            mutation = next(others)
        kept.append(mutation)
    return kept


# ---- running ------------------------------------------------------------------------------------


class OtherTree(Exception):
    """Results are of other code, or of other tests; one line."""


@dataclass(frozen=True)
class Outcome:
    """`caught_by`: the first test that failed; empty where none did. `tree`: digest of the code
    and the tests."""

    tree: str
    mutation: str
    caught: bool
    caught_by: str
    seconds: float


def run_one(mutation: Mutation, tree: Path, python: str) -> Outcome:
    """The tests of `tree` against the mutant of its code. Raises `LookupError` where it has no
    counterpart there."""
    site = find(mutation, tree)
    if site is None:
        raise LookupError(f"no counterpart: {mutation}")
    with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
        folder = Path(temporary)
        for name in COPIED:
            source = tree / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        path = folder / site.mutation.source
        path.write_text(site.apply(path.read_text()))
        tests = [t for t in AREAS[area_of(mutation.source)] if (folder / t).exists()]
        command = [python, "-m", "pytest", "-x", "-q", "--no-header"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "-m", "not processes and not long", "-p", "no:cacheprovider", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        output = output_of(process)
        took_too_long = process.returncode < 0
        if process.returncode == USAGE_ERROR:
            raise RuntimeError(output.strip())
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        caught_by = lines[0].split(" - ")[0] if lines else ""
        if process.returncode and not lines and not took_too_long:
            caught_by = output.strip().splitlines()[-1]
        took = round(time.monotonic() - began, 1)
        return Outcome(digest_of(tree), str(mutation), bool(caught_by), caught_by, took)


def output_of(process: subprocess.Popen[str]) -> str:
    """All that it prints until it ends; one that waits for ever is killed."""
    had_s = 0.0
    while True:
        try:
            return process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            before_s, had_s = had_s, at_work_s(process.pid)
            if had_s - before_s < AT_WORK_S:
                os.killpg(process.pid, signal.SIGKILL)
                return process.communicate()[0]


def at_work_s(pid: int) -> float:
    """Seconds of a processor that a process and its ended children have had."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


@cache
def digest_of(tree: Path) -> str:
    """Of the Python files that a run reads."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for name in COPIED for p in (tree / name).rglob("*.py")):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def done_before(results: Path, tree: Path) -> list[Outcome]:
    """What an earlier run of this tree has left. Raises `OtherTree`."""
    if not results.exists():
        return []
    found = json.loads(results.read_text())
    if any(fields.get("tree") != digest_of(tree) for fields in found):
        raise OtherTree(f"{results} is of another tree: give --results another name")
    return [Outcome(**fields) for fields in found]


def run(options: argparse.Namespace) -> int:
    """Runs what is left of a list; with `--before`, of what was caught then. 1 where something is
    missed."""
    tree = options.tree.resolve()
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    mutations = _read(options.list)
    if options.before is not None:
        caught = {o["mutation"] for o in json.loads(options.before.read_text()) if o["caught"]}
        mutations = [m for m in mutations if str(m) in caught]
    outcomes = done_before(options.results, tree)
    done = {o.mutation for o in outcomes}
    left = [m for m in mutations if str(m) not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda m: run_one(m, tree, options.python), left):
            outcomes.append(outcome)
            print("caught" if outcome.caught else "MISSED", outcome.mutation, outcome.caught_by)
            whole = options.results.with_name(f"{options.results.name}.new")
            whole.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
            whole.replace(options.results)  # a run may be ended at any time
    num_caught = sum(o.caught for o in outcomes)
    print(f"{num_caught} of {len(outcomes)} caught")
    return int(options.before is not None and num_caught < len(outcomes))


def _read(path: Path) -> list[Mutation]:
    return [Mutation(**fields) for fields in json.loads(path.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="print a list of mutations as JSON")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=300)
    again = commands.add_parser("redraw", help="print the list with what was lost drawn anew")
    again.add_argument("--old", type=Path, required=True, help="the tree as it was before")
    running = commands.add_parser("run", help="run those of a list")
    running.add_argument("--python", default=sys.executable)
    running.add_argument("--results", type=Path, required=True)
    running.add_argument("--before", type=Path, help="results; only what was caught there")
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    for command in (drawing, again, running):
        command.add_argument("--tree", type=Path, default=ROOT, help="whose code and tests")
    for command in (again, running):
        command.add_argument("--list", type=Path, default=DRAWN)
    options = parser.parse_args()
    if options.command == "run":
        try:
            return run(options)
        except OtherTree as e:
            parser.error(str(e))
    if options.command == "draw":
        drawn = draw(options.tree.resolve(), options.seed, options.count)
    else:
        drawn = redraw(_read(options.list), options.tree.resolve(), options.old.resolve())
    print(json.dumps([asdict(m) for m in drawn], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
