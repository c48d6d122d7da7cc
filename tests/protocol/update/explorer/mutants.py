"""The machine of a shard's update with one rule broken on purpose, in every way that can be told
from the tables and the conditions of the rules."""

from __future__ import annotations

import ast
import inspect
import types
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from swarmnet.protocol.update import shard_rules, shard_state, shard_update
from swarmnet.protocol.update.shard_state import ShardState, State
from tests.protocol.update.explorer.small_world import Broken

MOST_ROUNDS = 300
STATE_RULES = (
    "given",
    "calls_here",
    "waits_for",
    "has_quorum",
    "is_late",
    "is_for_primary",
    "is_leaderless",
    "rivals",
    "overthrown_by",
    "has_most",
    "elsewhere",
    "highest",
    "awaited",
    "back",
    "answering",
    "voters",
    "living",
    "dead",
    "told",
    "past",
    "successor",
    "next_ballot",
    "target",
    "is_dead",
)
"""Methods of the shard's state that decide something."""


def all_mutants() -> list[str]:
    """Their names."""
    return [*_event_mutants(), *_state_mutants(), *_condition_mutants()]


def build(name: str) -> Any:
    """The class `ShardUpdate` with what `name` says broken."""
    kind, *words = name.split()
    if kind == "condition":
        module = _module(*_broken_rules(name))
    else:
        module = _module(shard_rules, None)
        (_break_event if kind == "event" else _break_state)(module, *words)
    states = module["STATES"]
    for state, checks in states.items():
        states[state] = tuple((_Counted(guard), rule) for guard, rule in checks)
    return module["ShardUpdate"]


@cache
def _tables() -> types.CodeType:
    return compile(inspect.getsource(shard_update), shard_update.__file__, "exec")


def _module(rules: Any, state_class: Any) -> dict[str, Any]:
    """The tables, made anew with other rules."""
    names: dict[str, Any] = {"__name__": shard_update.__name__}
    exec(_tables(), names)
    if rules is not shard_rules:
        for row in names["EVENTS"].values():
            for state, rule in row.items():
                row[state] = getattr(rules, rule.__name__)
        for state, checks in names["STATES"].items():
            names["STATES"][state] = tuple(
                (getattr(rules, guard.__name__), getattr(rules, rule.__name__))
                for guard, rule in checks
            )
    if state_class is not None:
        names["ShardState"] = state_class
    return names


# ---- the tables ---------------------------------------------------------------------------------


def _event_mutants() -> Iterator[str]:
    """Each rule ignored."""
    for event, row in shard_update.EVENTS.items():
        for state, rule in row.items():
            if rule is not shard_rules.ignore:
                yield f"event {event.__name__} {state.value} ignored"


def _break_event(module: dict[str, Any], event: str, state: str, _: str) -> None:
    row = next(row for kind, row in module["EVENTS"].items() if kind.__name__ == event)
    key = next(s for s in row if s.value == state)
    row[key] = shard_rules.ignore


def _state_mutants() -> Iterator[str]:
    for state, checks in shard_update.STATES.items():
        for guard, _ in checks:
            yield f"state {state.value} {guard.__name__} never"
            yield f"state {state.value} {guard.__name__} always"


def _break_state(module: dict[str, Any], name: str, guard: str, how: str) -> None:
    states = module["STATES"]
    state = next(s for s in states if s.value == name)
    checks = []
    for check, rule in states[state]:
        if check.__name__ != guard:
            checks.append((check, rule))
        elif how == "always":
            checks.append((_always, rule))
    states[state] = tuple(checks)


def _always(shard: ShardState) -> bool:
    return True


class _Counted:
    """A guard that finds out when rules fire without end."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard
        self.shard: ShardState | None = None
        self.count = 0

    def __call__(self, shard: ShardState) -> bool:
        self.count = self.count + 1 if shard is self.shard else 0
        self.shard = shard
        if self.count > MOST_ROUNDS:
            raise Broken("it goes round in circles")
        return bool(self.guard(shard))


# ---- conditions in rules ------------------------------------------------------------------------


def _sources() -> list[tuple[Any, ast.Module]]:
    return [(m, ast.parse(inspect.getsource(m))) for m in (shard_rules, shard_state)]


def _conditions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """(function, node, field) of all conditions: tests, and the operands of `and` and `or`."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp):
                yield function.name, node, "test"
            if isinstance(node, ast.BoolOp):
                for i in range(len(node.values)):
                    yield function.name, node, f"values{i}"
            if isinstance(node, ast.comprehension):
                for i in range(len(node.ifs)):
                    yield function.name, node, f"ifs{i}"


@cache
def _places() -> dict[str, tuple[Any, ast.Module, ast.AST, str, str]]:
    """Where the condition of each mutant stands: the module and its tree, and in that the node, the
    field and the way in which it is broken."""
    found: dict[str, tuple[Any, ast.Module, ast.AST, str, str]] = {}
    for module, tree in _sources():
        for name, *place in _named_conditions(tree):
            found.setdefault(name, (module, tree, *place))
    return found


def _condition_mutants() -> Iterator[str]:
    yield from _places()


def _named_conditions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, str]]:
    counts: Counter[str] = Counter()
    for function, node, field in _conditions(tree):
        text = ast.unparse(_part(node, field)).replace(" ", "_")
        for how in _ways(node, field):
            name = f"condition {function} {text} {how}"
            counts[name] += 1
            yield name + (f" {counts[name]}" if counts[name] > 1 else ""), node, field, how


def _ways(node: ast.AST, field: str) -> tuple[str, ...]:
    """A test always or never holds; an operand has no say any more."""
    if field == "test":
        return ("true", "false")
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return ("false",)
    return ("true",)


def _part(node: Any, field: str) -> Any:
    for name in ("values", "ifs"):
        if field.startswith(name):
            return getattr(node, name)[int(field.removeprefix(name))]
    return getattr(node, field)


def _put(node: Any, field: str, value: ast.expr) -> None:
    for name in ("values", "ifs"):
        if field.startswith(name):
            getattr(node, name)[int(field.removeprefix(name))] = value
            return
    setattr(node, field, value)


def _broken_rules(name: str) -> tuple[Any, Any]:
    """The rules and the state, one of the two with the condition broken."""
    module, tree, node, field, how = _places()[name]
    whole = _part(node, field)
    _put(node, field, ast.copy_location(ast.Constant(how == "true"), whole))
    try:
        code = compile(ast.fix_missing_locations(tree), module.__file__, "exec")
    finally:
        _put(node, field, whole)
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(code, names)
    if module is shard_rules:
        return types.SimpleNamespace(**names), None
    # What the methods compare with is the states of the tables, not a second set of the same names.
    names.update((n, v) for n, v in vars(shard_state).items() if isinstance(v, State))
    return shard_rules, _with_methods(names["ShardState"])


def _with_methods(broken: Any) -> Any:
    """The state as it is, with the broken one's methods."""
    methods = {n: getattr(broken, n) for n in STATE_RULES}
    return type("ShardState", (ShardState,), {"__slots__": (), **methods})
