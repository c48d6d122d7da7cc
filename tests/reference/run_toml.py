"""run.toml: every key."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmnet.protocol.codecs import AUTO
from swarmnet.spec import (
    CODEC_TABLES,
    LLAMA_SIZES,
    TABLES,
    FileSpec,
    FilledIn,
    RunSpec,
    SourceSpec,
    Unit,
)
from tests.reference.docstrings import one_line
from tests.reference.tables import amount, code, either, page, table

HEADS = ("key", "type", "default", "meaning")
KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
PLURALS = {str: "texts", int: "whole numbers", tuple[int, int]: "pairs"}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
TITLES = {"data.source": "[[data.source]]", "files": "[files]"}
Row = tuple[str, str, str, str]


def run_toml() -> str:
    written, filled = [], []
    for name, cls in _tables():
        rows = dict(_rows(name, cls))
        mine = [row for field, row in rows.items() if not _is_filled_in(name, cls, field)]
        theirs = [row for field, row in rows.items() if _is_filled_in(name, cls, field)]
        if mine:
            written += [f"## {_title(name)}", _about(cls, name), table(HEADS, mine)]
        filled += [(f"{_title(name)} {row[0]}", row[1], row[3]) for row in theirs]
    return page(
        "run.toml",
        "A run is one TOML file (or the same tables as JSON, in a file whose name ends in "
        "`.json`). `swarmnet peer --spec`, `swarmnet local --spec` and `swarmnet plan --spec` "
        "read it. Unknown keys are errors. A key that is left out has its default. Peers that "
        "join get the run from the swarm, and need no file.",
        *written,
        "## Filled in",
        "Nobody writes these keys: whoever starts the run fills them in, so that all peers train "
        "on the same numbers. Where the default of another key is 0, -1, empty or `auto`, and "
        "its text says that whoever starts the run chooses, the choice is filled in too.",
        table(("key", "type", "meaning"), filled),
    )


def _tables() -> Iterator[tuple[str, type[BaseModel]]]:
    yield "", RunSpec
    for name, cls in TABLES.items():
        yield name, cls
        if name == "data":
            yield "data.source", SourceSpec
    yield "files", FileSpec


def _title(name: str) -> str:
    return TITLES.get(name) or (f"[{name}]" if name else "Outside a table")


def _about(cls: type[BaseModel], name: str) -> str:
    """Its docstring, without the name of the table, which is the title."""
    text = one_line(cls.__doc__ or "").removeprefix(f"`{_title(name)}`: ")
    return "These keys stand before the first table." if not name else text[:1].upper() + text[1:]


def _is_filled_in(table_name: str, cls: type[BaseModel], field: str) -> bool:
    marks = cls.model_fields[field].metadata
    return table_name == "files" or any(isinstance(mark, FilledIn) for mark in marks)


def _rows(name: str, cls: type[BaseModel]) -> Iterator[tuple[str, Row]]:
    for field, info in cls.model_fields.items():
        if not name and (field in TABLES or field == "files"):
            continue
        key = f"{code(info.alias or field)}"
        text = one_line(info.description or "")
        yield field, (key, _type(info), _default(name, field, info), text)


def _type(info: FieldInfo) -> str:
    """With its bounds and its unit."""
    kind = _kind(info.annotation)
    unit = next((mark.name for mark in info.metadata if isinstance(mark, Unit)), "")
    return ", ".join(filter(None, (kind, _bounds(info.metadata), unit)))


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return either([code(each) if each else "empty" for each in inner])
    if origin in (Union, UnionType):
        kinds = [_kind(each) for each in inner if each is not NoneType]
        return (
            f"{kinds[0]} or {code(AUTO)}" if int in inner and str in inner else " or ".join(kinds)
        )
    if origin is tuple:
        element = get_args(inner[0])[0] if get_origin(inner[0]) is Annotated else inner[0]
        return f"list of {PLURALS.get(element, 'tables')}"
    return "table" if origin is dict else KINDS[annotation]


def _bounds(marks: list[Any]) -> str:
    """In words."""
    found = {name: getattr(mark, name) for mark in marks for name in BOUNDS if hasattr(mark, name)}
    if {"ge", "le"} <= found.keys():
        return f"{amount(found['ge'])} to {amount(found['le'])}"
    return ", ".join(f"{BOUNDS[name]} {amount(bound)}" for name, bound in found.items())


def _default(name: str, field: str, info: FieldInfo) -> str:
    """As a file has it that does not say."""
    if info.is_required():
        return "required"
    if name == "model" and field in LLAMA_SIZES and field != "num_key_value_heads":
        return f"required by {code('llama')}"
    default = (
        AUTO
        if (field == "codec" and name in CODEC_TABLES) or (name, field) == ("optimizer", "parts")
        else info.get_default(call_default_factory=True)
    )
    if default in (None, "", (), {}):
        return ""
    if isinstance(default, bool):
        return code(str(default).lower())
    if isinstance(default, tuple):
        return code("[" + ", ".join(f'"{each}"' for each in default) + "]")
    return code(f'"{default}"' if isinstance(default, str) else f"{default}")
