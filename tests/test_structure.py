"""The shape of the code, which people find their way in by: rooms that are not too full, no
imports in a circle, and tests that use what everybody may use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarmnet", "peer", "tests")
MAX_MODULES = 20
"""In a folder, `__init__` not counted."""
MAX_PRIVATE_PLACES = 40
"""In tests, with a reason each."""
CALLED_DOWN = ("swarmnet/swarm", "swarmnet/transport/calls")
"""Folders of parts that call each other one way."""
CHANGED_BY_THEMSELVES = ("swarmnet/swarm", "swarmnet/transport", "peer/machine")
"""Folders of objects that nobody else assigns to."""
MAY_BE_ASSIGNED = dict.fromkeys(
    (
        "swarmnet/transport/direct.py: context.check_hostname",
        "swarmnet/transport/direct.py: context.minimum_version",
        "swarmnet/transport/direct.py: context.sslobject_class",
        "swarmnet/transport/direct.py: context.verify_mode",
        "swarmnet/transport/direct.py: self.context.minimum_version",
        "swarmnet/transport/direct.py: self.context.num_tickets",
        "swarmnet/transport/libp2p/host.py: bridge.deadline",
        "swarmnet/transport/libp2p/host.py: message.observed_addr",
        "swarmnet/transport/libp2p/imports.py: _pools.Default",
        "swarmnet/transport/libp2p/imports.py: logger.propagate",
    ),
    "an object of a library, which is told so",
)
"""With the reason."""
MAY_CALL_UP = {
    "swarmnet/swarm/update/exchange/calls.py: self._calls.call(call.target, REDUCE, message, "
    "lambda told: self._heard(primary, told.body))": "the progress of a call, which is a message",
    "swarmnet/swarm/update/gossip_averaging.py: self._changed.until(lambda: self._meeting is not "
    "None or replica.round > r, self.limits.enter_wait_s)": "a condition that is waited for",
}
"""With the reason."""


def sources() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> set[str]:
    """All modules that a module imports, whenever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, in whatever order (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def walk(start: str, edges: dict[str, set[str]], into: list[str]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            after = next((n for n in rest if n not in seen), None)
            if after is None:
                into.append(node)
                stack.pop()
            else:
                seen.add(after)
                stack.append((after, iter(sorted(edges[after]))))

    for node in sorted(graph):
        if node not in seen:
            walk(node, graph, order)
    backwards: dict[str, set[str]] = {node: set() for node in graph}
    for node, others in graph.items():
        for other in others:
            backwards[other].add(node)
    seen.clear()
    found = []
    for node in reversed(order):
        if node not in seen:
            walk(node, backwards, group := [])
            if len(group) > 1:
                found.append(sorted(group))
    return found


def test_no_room_is_too_full() -> None:
    folders = {path.parent for path in sources()}
    modules = {
        name_of(folder): sum(p.name != "__init__.py" for p in folder.glob("*.py"))
        for folder in folders
    }
    assert {f: n for f, n in modules.items() if n > MAX_MODULES} == {}


def test_no_imports_in_a_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources()
    }
    graph = {
        module: {n for n in imports_of(path) if n in modules and n != module}
        for module, path in modules.items()
    }
    assert circles(graph) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e2"}, "e2": {"e"}}
    assert sorted(circles(graph)) == [["b", "c"], ["e", "e2"]]


def test_no_part_calls_up() -> None:
    """What a part is made with, or given later, is no way into its maker: it returns what there is
    to say, or has it in a field."""
    found = {
        f"{name_of(path)}: {call}"
        for folder in CALLED_DOWN
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in calls_up(path.read_text())
    }
    assert found == set(MAY_CALL_UP)


def test_nothing_is_assigned_from_outside() -> None:
    """An object changes by its own methods."""
    found = {
        f"{name_of(path)}: {target}"
        for folder in CHANGED_BY_THEMSELVES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for target in assigned_from_outside(path.read_text())
    }
    assert found == set(MAY_BE_ASSIGNED)


@pytest.mark.parametrize(
    "given",
    [
        "B(lambda x: self.told(x))",
        "B(told=self.told)",
        "B(partial(self.told, 1))",
        "B(functools.partial(self.told, 1))",
        "B(self)",
        "B([self.told])",
        "B({'told': self.told})",
        "B(*(self.told, 1))",
        "B(self.told if 1 else None)",
        "B(); self.b.start(self.told)",
        "B(); self.b.start(1, told=lambda x: self.told(x))",
        "B(); self.b.start(functools.partial(self.told))",
        "B(); self.b.start(self)",
    ],
)
def test_a_call_up_is_found(given: str) -> None:
    assert len(calls_up(MADE.format(given))) == 1


@pytest.mark.parametrize(
    "given",
    [
        "B(self.told(), self.other, lambda x: x)",
        "B(); self.b.start(self.told())",
        "B(); self.other.start(self.told)",
    ],
)
def test_what_leads_nowhere_is_no_call_up(given: str) -> None:
    assert calls_up(MADE.format(given)) == []


def test_a_part_that_is_a_field_is_found() -> None:
    field = "    b: B = field(default_factory={})"
    for made in ("B", "lambda: B(1)"):
        begun = "    def begin(self):\n        self.b.start(self.told)"
        source = f"class A:\n{field.format(made)}\n{begun}\n    def told(self): ..."
        assert calls_up(source) == ["self.b.start(self.told)"]


@pytest.mark.parametrize("given", ["self.b.count = 1", "b.count += 1", "a, b.count = 1, 2"])
def test_an_assignment_from_outside_is_found(given: str) -> None:
    assert assigned_from_outside(f"def f(self, b):\n    {given}") != []
    assert assigned_from_outside(f"def f(self):\n    self.count = 1\ndef g(b):\n    {given}") == []


MADE = "class A:\n    def __init__(self):\n        self.b = {}\n    def told(self): ..."


def calls_up(source: str) -> list[str]:
    """Where a class gives itself away, one of its methods, or a lambda that reads it: to an object
    that it makes, or to a method of a part that it has made."""
    found = []
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, ast.ClassDef):
            continue
        methods = {
            part.name
            for part in owner.body
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            and not any("property" in ast.unparse(d) for d in part.decorator_list)
        }
        parts = _parts_of(owner)
        for call in ast.walk(owner):
            if not isinstance(call, ast.Call):
                continue
            tells_part = isinstance(call.func, ast.Attribute) and _own(call.func.value) in parts
            if _makes(call) or tells_part:
                given = [*call.args, *(k.value for k in call.keywords)]
                if any(_leads_up(value, methods) for value in given):
                    found.append(ast.unparse(call))
    return found


def _parts_of(owner: ast.ClassDef) -> set[str]:
    """Attributes in which a class has what it makes."""
    parts: set[str] = set()
    for node in ast.walk(owner):
        match node:
            case ast.Assign(targets=targets, value=ast.Call() as call) if _makes(call):
                parts |= {_own(target) for target in targets}
            case ast.AnnAssign(target=ast.Attribute() as target, value=ast.Call() as call):
                parts |= {_own(target)} if _makes(call) else set()
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(keywords=keywords)):
                made = [k.value for k in keywords if k.arg == "default_factory"]
                parts |= {name} if any(map(_is_maker, made)) else set()
    return parts - {""}


def _own(node: ast.expr) -> str:
    """The name of an attribute of `self`; empty where it is none."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


def _is_maker(node: ast.expr) -> bool:
    """Of a `default_factory`."""
    match node:
        case ast.Lambda(body=ast.Call() as call):
            return _makes(call)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _is_class(name)
    return False


def _makes(call: ast.Call) -> bool:
    return _is_class(getattr(call.func, "attr", "") or getattr(call.func, "id", ""))


def _is_class(name: str) -> bool:
    """By the name, as PEP 8 has it."""
    return name.lstrip("_")[:1].isupper()


def _leads_up(value: ast.expr, methods: set[str]) -> bool:
    match value:
        case ast.Lambda(body=body):
            return any(isinstance(x, ast.Name) and x.id == "self" for x in ast.walk(body))
        case ast.Name(id=name):
            return name == "self"
        case ast.Starred(value=inner):
            return _leads_up(inner, methods)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return any(_leads_up(x, methods) for x in parts)
        case ast.Dict(values=parts):
            return any(_leads_up(x, methods) for x in parts)
        case ast.IfExp(body=body, orelse=other):
            return _leads_up(body, methods) or _leads_up(other, methods)
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial")):
            given = [*value.args, *(k.value for k in value.keywords)]
            return any(_leads_up(x, methods) for x in given)
    return _own(value) in methods


def assigned_from_outside(source: str) -> list[str]:
    """Attributes that are given to an object other than `self`, and are of no class of the same
    module."""
    tree = ast.parse(source)
    targets = [t for node in ast.walk(tree) for t in _targets(node)]
    here = {_own(t) for t in targets}
    here |= {
        part.target.id
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for part in owner.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return [
        ast.unparse(t)
        for t in targets
        if isinstance(t, ast.Attribute) and not _own(t) and t.attr not in here
    ]


def _targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            return [x for t in targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
    return []


def test_few_tests_reach_into_private_attributes() -> None:
    """ruff (SLF001) refuses every other place."""
    marked = [
        (name_of(path), line)
        for path in sources()
        for line in path.read_text().splitlines()
        if re.search(r"# noqa: .*\bSLF001\b", line) and "re.search" not in line
    ]
    without_reason = [m for m in marked if not re.search(r"SLF001\s+\S", m[1])]
    assert without_reason == []
    assert sum(name.startswith("tests/") for name, _ in marked) <= MAX_PRIVATE_PLACES
