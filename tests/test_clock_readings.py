"""In `swarm/` a reading of the clock is passed on and never judged: what it means is decided in
`protocol/`, where `now` is an argument (`protocol.moments` for the simple cases)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLOCKS = {"time", "monotonic", "perf_counter", "monotonic_ns", "time_ns"}
CLOCKS |= {"awake_s", "_awake_s", "get_dht_time"}
"""Methods and functions that read one."""
SPANS = {"s", "left_s", "stalled_s", "slept_s", "gone_s"}
"""Methods that say how long ago something was, or how long something takes yet."""
JUDGES = {"min", "max", "sum"}


def is_moment(node: ast.expr, known: set[str]) -> bool:
    """Whether a value is a point in time: a reading, a name for one, or arithmetic with it."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in CLOCKS
        case ast.Name(id=name):
            return name in known or name == "now" or name.endswith("_at")
        case ast.Attribute(attr=name):
            return name in ("now", "_now") or name.endswith("_at")
        case ast.BinOp(left=left, right=right):
            return is_moment(left, known) or is_moment(right, known)
        case ast.IfExp(body=body, orelse=orelse):
            return is_moment(body, known) or is_moment(orelse, known)
        case ast.BoolOp(values=values):
            return any(is_moment(v, known) for v in values)
        case ast.NamedExpr(value=value):
            return is_moment(value, known)
    return False


def is_span(node: ast.expr, known: set[str]) -> bool:
    """Whether a value is how long something was, or is: it is compared in `protocol/` too."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in SPANS
        case ast.Name(id=name):
            return name in known
        case ast.Attribute(attr=name):
            return name.lstrip("_") in SPANS - {"s"}
        case ast.BinOp(left=left, right=right):
            return is_span(left, known) or is_span(right, known)
        case ast.NamedExpr(value=value):
            return is_span(value, known)
    return False


def names_in(function: ast.AST, is_one: Callable[[ast.expr, set[str]], bool]) -> set[str]:
    """Names that a function gives to points in time, or to spans of it."""
    known: set[str] = set()
    for _ in range(2):  # a name may be given to another name
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    pairs = zip(names, values, strict=False)
                    known |= {
                        n.id for n, v in pairs if isinstance(n, ast.Name) and is_one(v, known)
                    }
                case ast.Assign(targets=targets, value=value) if is_one(value, known):
                    known |= {t.id for t in targets if isinstance(t, ast.Name)}
                case ast.NamedExpr(target=target, value=value) if is_one(value, known):
                    known.add(target.id)
    return known


def judged(source: str) -> Iterator[str]:
    """Expressions that compare points in time, or add them up."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        known, spans = names_in(function, is_moment), names_in(function, is_span)
        for node in ast.walk(function):
            match node:
                case ast.Compare(left=left, ops=ops, comparators=others):
                    parts = [left, *others]
                    is_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
                    found = not is_identity and any(
                        is_moment(p, known) or is_span(p, spans) for p in parts
                    )
                case ast.BinOp():
                    found = is_moment(node, known)
                case ast.AugAssign(target=target, value=value):
                    found = is_moment(target, known) or is_moment(value, known)
                case ast.Call(func=ast.Name(id=name), args=arguments) if name in JUDGES:
                    found = any(is_moment(a, known) for a in arguments)
                case _:
                    found = False
            if found:
                yield ast.unparse(node)


def test_readings_of_the_clock_are_only_passed_on() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {expression}"
        for path in (ROOT / "swarmnet" / "swarm").rglob("*.py")
        for expression in judged(path.read_text())
    }
    assert found == set(), "decide it in protocol/, with `now` as an argument"


@pytest.mark.parametrize(
    "line",
    [
        "loop.time() > self.end",
        "took = loop.time() - began",
        "end = asyncio.get_running_loop().time() + 5.0",
        "later = max(now, self.begun)",
        "self.waited += now",
        "a = loop.time(); b = a; c = b - 1",
        "if (t := loop.time()) >= self.until: pass",
        "late = self._asked_at < 3",
        "late = self.since.s(now) > 3",
        "end = self.liveness.awake_s() + 3",
        "a, b = loop.time(), 3; c = a + b",
        "if self.stalled_s() > self.before: pass",
        "b = self.stalled_s(); c = self.other > b",
        "late = self._stalled_s < 3",
        "if (left_s := self.end.left_s(now)) <= 0: pass",
        "end = get_dht_time() + 3",
    ],
)
def test_a_judgement_is_found(line: str) -> None:
    assert list(judged(f"def f(self, loop, now):\n    {line}"))


@pytest.mark.parametrize(
    "line",
    [
        "deadline = Deadline.after(loop.time(), 5.0)",
        "is_over = deadline.is_over(loop.time())",
        "now = loop.time(); self.rules.decide(now)",
        "is_new = now is None",
        "left = deadline.left_s(now) * 2",
        "end = Deadline.after(self.liveness.awake_s(), 3)",
        "if left_s := self.end.left_s(now): pass",
        "is_new = self.stalls.is_new(self.liveness.stalled_s())",
        "left = min(deadline.left_s(now), 3)",
    ],
)
def test_passing_on_is_no_judgement(line: str) -> None:
    assert not list(judged(f"def f(self, loop, now):\n    {line}"))
