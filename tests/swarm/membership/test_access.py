"""Every method has a row that says who may call it, in the code and in docs/protocol.md."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from swarmnet.methods.method import Method
from swarmnet.methods.table import METHODS

ROOT = Path(__file__).parents[3]


def served() -> list[str]:
    """Methods that the code serves, by its text: `serve(transport, ROW, handler)`,
    `handle(ROW, handler)` of a dispatcher, and `handle(ROW.name, handler)` in the transport."""
    found = []
    for path in (ROOT / "swarmnet").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("serve"), args=[_, ast.Name(row), _]) if row.isupper():
                    found.append(row.lower())
                case ast.Call(
                    func=ast.Attribute(attr="handle"),
                    args=[ast.Name(row) | ast.Attribute(ast.Name(row), "name"), _],
                ) if row.isupper():
                    found.append(row.lower())
    return found


def test_every_method_that_is_served_has_a_row_and_every_row_a_method() -> None:
    assert sorted(served()) == sorted(METHODS)


def line(method: str, row: Method[Any, Any]) -> str:
    quota = row.quota
    often = "" if quota is None else f"{quota.burst:.0f}, then {quota.calls_per_s:g} a second"
    if quota is not None and not quota.of_members:
        often += " of a stranger"
    return (
        f"| `{method}` | {row.caller.value} | {row.callee.value} "
        f"| {row.body_bytes:,} | {row.arrays.value} | {often} |"
    )


def test_the_document_has_the_same_table() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    table = "\n".join(line(method, row) for method, row in METHODS.items())
    assert table in text, f"\n{table}"
