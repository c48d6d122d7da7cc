"""The shape of the code, which people find their way in by: rooms that are not too full, no
imports in a circle, and tests that use what everybody may use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarmnet", "peer", "tests")
MAX_MODULES = 20
"""In a folder, `__init__` not counted."""
MAX_PRIVATE_PLACES = 40
"""In tests, with a reason each."""
CALLED_DOWN = ("swarmnet/swarm", "swarmnet/transport/calls")
"""Folders of parts that call each other one way."""


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
    """What a part is made with is no way into its maker: it returns what there is to say, or has
    it in a field."""
    found = [
        f"{name_of(path)}:{line}"
        for folder in CALLED_DOWN
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in calls_up(path.read_text())
    ]
    assert not found


def test_calls_up_are_found() -> None:
    made = "class A:\n    def __init__(self):\n        self.b = B({})\n    def told(self): ..."
    assert calls_up(made.format("lambda x: self.told(x)")) == [3]
    assert calls_up(made.format("told=self.told")) == [3]
    assert calls_up(made.format("partial(self.told, 1)")) == [3]
    assert calls_up(made.format("self.told(), self.other, lambda x: x")) == []


def calls_up(source: str) -> list[int]:
    """Lines where a class makes an object with one of its own methods, or with a lambda that
    reads the maker."""
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
        for call in ast.walk(owner):
            if isinstance(call, ast.Call) and _makes(call):
                given = [*call.args, *(k.value for k in call.keywords)]
                found += [call.lineno for value in given if _leads_up(value, methods)]
    return found


def _makes(call: ast.Call) -> bool:
    """By the name, as PEP 8 has it."""
    name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    return name.lstrip("_")[:1].isupper()


def _leads_up(value: ast.expr, methods: set[str]) -> bool:
    if isinstance(value, ast.Lambda):
        return any(isinstance(x, ast.Name) and x.id == "self" for x in ast.walk(value.body))
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "partial":
        return any(_leads_up(x, methods) for x in value.args)
    return (
        isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Name)
        and value.value.id == "self"
        and value.attr in methods
    )


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
