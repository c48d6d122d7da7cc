"""Texts below the fields of a class, which Python does not keep."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any


def of_class(cls: type[Any]) -> str:
    """What a class is, as one paragraph."""
    return one_line(inspect.getdoc(cls) or "")


def of_fields(cls: type[Any]) -> dict[str, str]:
    """The texts of its own fields, and before them those of its bases."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = one_line(str(text.value.value))
    return found


def one_line(text: str) -> str:
    return " ".join(text.split())
