"""Every number that a wait, a retry or a bound in time rests on, counted.

    python -m tests.timing_numbers [--at COMMIT] [--list]

**Scope.** `swarmnet/swarm` and `swarmnet/protocol`, whole, and the part of `swarmnet/transport`
whose timeouts a call of the swarm waits by: the port, the channel and the calls (`base`, `channel`
and what was split off it, `calls`, `outbox`, `pacing`). Not in it are the carriers below a channel
(libp2p, direct connections, relays, memory), `runtime/` and `peer/`. The same rules and the same
places hold for every commit; code that leaves these folders takes its line in `MOVED` with it.

**What counts as one number.** A literal, other than 0, that is written

- in the value of a constant, of a field's default or of a parameter's default, where its name ends
  in `_S` or `_s` (not `_PER_S`: a rate). Arithmetic of literals alone is one number;
- in an argument called `..._s` or `timeout`, or in the first argument of a wait (`sleep`, `wait`,
  `wait_for`, `timeout`, `call_later`, ...);
- in the arithmetic of a quantity in seconds: `2 * STALL_S + 4.0` has two. A quantity in seconds is
  one that has a term called `..._s` or `..._S`, or a point in time (`now`, `time()`), is given to a
  name or a parameter of that kind, or comes from a function whose name ends so. Not counted in it
  are 0, 1 and the powers of ten that change the unit;
- as a constant without a unit that arithmetic of this kind uses (a factor, a part, a smoothing), or
  that bounds a loop of attempts (`for _ in range(MAX_TRIES)` around an `await`), or that is called
  a try, an attempt, a retry, an extension or a growth. It counts once, where it is defined.

At 653d1bd the count is 221.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("swarmnet/swarm/", "swarmnet/protocol/", "swarmnet/transport/calls/")
FILES = (
    *("base", "bans", "calls", "channel", "dialer", "handlers", "heard", "known_channels"),
    *("open_channels", "outbox", "pacing"),
)
"""Of `swarmnet/transport`: the port and the channel, with what was split off them."""
MOVED: tuple[str, ...] = ()
"""Files elsewhere that hold what was in one of these folders."""

SECONDS = re.compile(r"(?i)(?<!per)_s$")
COUNTS_TRIES = re.compile(r"(?i)(^|_)(tries|attempts?|retry|retries|extensions|growth)(_|$)")
WAITS = frozenset(
    {"sleep", "wait", "wait_for", "timeout", "timeout_at", "call_later", "call_at", "until"}
)
CLOCKS = frozenset({"now", "time", "monotonic"})
"""Points in time: what is added to one or compared with a difference of two is in seconds."""
SAME_UNIT = frozenset({"min", "max", "abs", "sum"})
UNIT_CHANGES = frozenset({1, 10**3, 10**6, 10**9, 1e-3, 1e-6, 1e-9})


@dataclass(frozen=True, order=True, slots=True)
class TimingNumber:
    path: str
    line: int
    column: int
    text: str
    """As it is written."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A module's or a class's number."""

    path: str
    name: str
    value: ast.expr


def is_seconds(name: str) -> bool:
    return bool(SECONDS.search(name))


def is_in_seconds(term: ast.expr) -> bool:
    name = name_of(term)
    return name in CLOCKS or is_seconds(name)


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name, of a call too; empty where there is none."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_number(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    )


def is_arithmetic_of_literals(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return is_arithmetic_of_literals(node.operand)
    if isinstance(node, ast.BinOp):
        return is_arithmetic_of_literals(node.left) and is_arithmetic_of_literals(node.right)
    return is_number(node)


def terms(node: ast.expr) -> Iterator[ast.expr]:
    """What the arithmetic of an expression is made of: names, calls and literals (folded)."""
    if is_arithmetic_of_literals(node):
        yield node
    elif isinstance(node, ast.BinOp):
        yield from terms(node.left)
        yield from terms(node.right)
    elif isinstance(node, ast.UnaryOp):
        yield from terms(node.operand)
    elif isinstance(node, ast.IfExp):
        yield from terms(node.body)
        yield from terms(node.orelse)
    elif isinstance(node, ast.Await):
        yield from terms(node.value)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from terms(value)
    elif isinstance(node, ast.Compare):
        for value in (node.left, *node.comparators):
            yield from terms(value)
    elif isinstance(node, ast.Call) and name_of(node) in SAME_UNIT:
        for value in node.args:
            yield from terms(value)
    else:
        yield node


def value_of(node: ast.expr) -> float:
    return float(eval(compile(ast.Expression(node), "literal", "eval"), {"__builtins__": {}}))


def literals(node: ast.expr) -> Iterator[ast.expr]:
    """Numbers other than 0 that are written in an expression's arithmetic."""
    for term in terms(node):
        if is_arithmetic_of_literals(term) and value_of(term) != 0:
            yield term


def assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names that statements define, each with its value; tuples side by side."""
    for node in body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            yield name_of(node.target), node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if (
                    isinstance(target, ast.Tuple)
                    and isinstance(node.value, ast.Tuple)
                    and len(target.elts) == len(node.value.elts)
                ):
                    for one, value in zip(target.elts, node.value.elts, strict=True):
                        yield name_of(one), value
                else:
                    yield name_of(target), node.value


def constants_of(path: str, tree: ast.Module) -> Iterator[Constant]:
    """Of the module and its classes, those whose values have a number of their own."""
    bodies = [tree.body, *(x.body for x in ast.walk(tree) if isinstance(x, ast.ClassDef))]
    for body in bodies:
        for name, value in assignments(body):
            if name and any(True for _ in literals(value)):
                yield Constant(path, name, value)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = node.args.defaults
    for parameter, default in zip(
        positional[len(positional) - len(defaults) :], defaults, strict=True
    ):
        yield parameter.arg, default
    for parameter, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if value is not None:
            yield parameter.arg, value


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Of a function, without the functions inside it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from own_nodes(child)


def said_to_be_seconds(tree: ast.Module) -> Iterator[ast.expr]:
    """Values whose name, parameter, wait or function says that they are seconds."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (value for name, value in assignments([node]) if is_seconds(name))
        elif isinstance(node, ast.AugAssign) and is_seconds(name_of(node.target)):
            yield node.value
        elif isinstance(node, ast.Call):
            is_wait = name_of(node) in WAITS
            yield from (
                x.value
                for x in node.keywords
                if x.arg and (x.arg == "timeout" or is_seconds(x.arg))
            )
            yield from node.args[-1:] if is_wait and name_of(node) in ("wait_for", "until") else ()
            yield from (
                node.args[:1] if is_wait and name_of(node) not in ("wait_for", "until") else ()
            )
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (value for name, value in parameters(node) if is_seconds(name))
            if is_seconds(node.name):
                yield from (
                    x.value for x in own_nodes(node) if isinstance(x, ast.Return) and x.value
                )


def is_quantity_in_seconds(node: ast.expr) -> bool:
    return isinstance(node, (ast.BinOp, ast.Compare, ast.Call)) and any(
        map(is_in_seconds, terms(node))
    )


def bounds_of_attempts(tree: ast.Module) -> Iterator[ast.expr]:
    """What loops of attempts go up to."""
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.For, ast.AsyncFor))
            and isinstance(node.iter, ast.Call)
            and name_of(node.iter) == "range"
            and any(isinstance(x, ast.Await) for x in ast.walk(node))
        ):
            yield from node.iter.args[-1:]


def used_in_time(tree: ast.Module) -> Iterator[ast.expr]:
    """Terms of the arithmetic that seconds are made of, and of attempts."""
    for value in (*said_to_be_seconds(tree), *bounds_of_attempts(tree)):
        yield from terms(value)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and is_quantity_in_seconds(node):
            yield from terms(node)


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Files that the names imported by a module come from."""
    return {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def timing_numbers(sources: Mapping[str, str]) -> list[TimingNumber]:
    """Of the files in scope, given as path and text."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    constants = [x for path, tree in trees.items() for x in constants_of(path, tree)]
    places: set[TimingNumber] = set()

    def count(path: str, node: ast.expr) -> None:
        places.add(TimingNumber(path, node.lineno, node.col_offset, ast.unparse(node)))

    used: set[tuple[str, str]] = set()
    for path, tree in trees.items():
        imported = imports_of(tree)
        for term in used_in_time(tree):
            if is_arithmetic_of_literals(term):
                if abs(value_of(term)) not in UNIT_CHANGES and value_of(term) != 0:
                    count(path, term)
            elif isinstance(term, ast.Name):
                used.add((imported.get(term.id, path), term.id))
        for value in said_to_be_seconds(tree):
            if is_arithmetic_of_literals(value) and value_of(value) != 0:
                count(path, value)  # a whole value, of which 1.0 is one too
    for constant in constants:
        is_factor = (constant.path, constant.name) in used and constant.name.isupper()
        is_factor &= not constant.name.endswith("_BYTES")
        if is_seconds(constant.name) or COUNTS_TRIES.search(constant.name) or is_factor:
            for literal in literals(constant.value):
                count(constant.path, literal)
    return sorted(places)


def docstring_of(number: TimingNumber, text: str) -> str:
    """Of the constant or the field that a number of this file is written in; empty for others."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement, after in zip(body, [*body[1:], None], strict=True):
            if (
                isinstance(statement, (ast.Assign, ast.AnnAssign))
                and statement.lineno <= number.line <= (statement.end_lineno or 0)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                return str(after.value.value)
    return ""


def is_in_scope(path: str) -> bool:
    if not path.endswith(".py"):
        return False
    folder, _, name = path.rpartition("/")
    is_channel = folder == "swarmnet/transport" and name.removesuffix(".py") in FILES
    return path.startswith(FOLDERS) or is_channel or path in MOVED


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def sources_at(commit: str) -> dict[str, str]:
    """Raises `subprocess.CalledProcessError` where the repository has no such commit."""
    paths = _git("ls-tree", "-r", "--name-only", commit, "swarmnet").splitlines()
    return {path: _git("show", f"{commit}:{path}") for path in paths if is_in_scope(path)}


def sources_now() -> dict[str, str]:
    paths = sorted(str(x.relative_to(ROOT)) for x in (ROOT / "swarmnet").rglob("*.py"))
    return {path: (ROOT / path).read_text() for path in paths if is_in_scope(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", metavar="COMMIT", help="instead of the files here")
    parser.add_argument("--list", action="store_true", help="each number with its line")
    options = parser.parse_args()
    sources = sources_at(options.at) if options.at else sources_now()
    numbers = timing_numbers(sources)
    if options.list:
        for number in numbers:
            line = sources[number.path].splitlines()[number.line - 1].strip()
            print(f"{number.path}:{number.line}: {number.text}    {line}")
    for path, times in sorted(Counter(x.path for x in numbers).items()):
        print(f"{times:5} {path}")
    print(f"{len(numbers):5} in all")


if __name__ == "__main__":
    sys.exit(main())
