"""The commands as plain data: what `man` and the reference are made of."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer

from peer.option_groups import Parameter

NO_PANEL = "Options"
VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What stands for a value that has no name of its own, by its type."""


@dataclass(frozen=True, slots=True)
class DescribedOption:
    """One option of a command, or an argument."""

    flags: tuple[str, ...]
    """As typed; empty for an argument."""
    value: str
    """What stands for its value, or the values that there are, by `|`; empty for a flag."""
    default: str
    """As text; empty where the text says it, or there is none."""
    bounds: str
    """Of a number, in words; empty where there are none."""
    text: str
    panel: str
    is_required: bool
    repeats: bool

    @property
    def typed(self) -> str:
        """As a person types it."""
        return " ".join(filter(None, (", ".join(self.flags), self.value)))


@dataclass(frozen=True, slots=True)
class DescribedCommand:
    """One command."""

    name: str
    paragraphs: tuple[str, ...]
    """The first one says in a sentence what it does."""
    options: tuple[DescribedOption, ...]

    @property
    def arguments(self) -> tuple[DescribedOption, ...]:
        return tuple(option for option in self.options if not option.flags)

    @property
    def usage(self) -> str:
        """What is typed at least."""
        words = [o.typed if o.is_required else f"[{o.typed}]" for o in self.arguments]
        needed = [o.typed for o in self.options if o.flags and o.is_required]
        return " ".join(("swarmnet", self.name, *needed, *words))

    def panels(self) -> Iterator[tuple[str, list[DescribedOption]]]:
        """The options by their group of `--help`, in the order of its groups."""
        groups: dict[str, list[DescribedOption]] = {}
        for option in self.options:
            groups.setdefault(option.panel, []).append(option)
        yield from groups.items()


def described(app: typer.Typer) -> list[DescribedCommand]:
    """All commands, by name. Of each, every parameter that people are told of."""
    found = []
    for registered in app.registered_commands:
        function: Any = registered.callback
        paragraphs = inspect.getdoc(function) or ""
        found.append(
            DescribedCommand(
                str(registered.name),
                tuple(" ".join(each.split()) for each in paragraphs.split("\n\n")),
                tuple(_described(p) for p in function.parameters if not p.is_hidden),
            )
        )
    return sorted(found, key=lambda each: each.name)


def _described(parameter: Parameter) -> DescribedOption:
    option, kind = parameter.option, parameter.kind
    repeats = get_origin(kind) is tuple
    kind = get_args(kind)[0] if repeats else kind
    if NoneType in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    is_argument = isinstance(option, typer.models.ArgumentInfo)
    flags = () if is_argument else tuple(parameter.flag.split("/"))
    is_required = parameter.default is inspect.Parameter.empty
    return DescribedOption(
        flags,
        "" if kind is bool else _value(option.metavar, kind, parameter.name, is_argument),
        "" if option.show_default is False else _default(parameter),
        _bounds(option.min, option.max),
        str(option.help or ""),
        str(option.rich_help_panel or NO_PANEL),
        is_required,
        repeats,
    )


def _value(metavar: str | None, kind: Any, name: str, is_argument: bool) -> str:
    if metavar:
        return metavar
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return name.upper() if is_argument else VALUES[kind]


def _default(parameter: Parameter) -> str:
    """Empty too for what is off unless it is asked for."""
    default = parameter.default
    if default is True and "/" in parameter.flag:
        return parameter.flag.partition("/")[0]
    if default in (inspect.Parameter.empty, None, "", ()) or isinstance(default, bool):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    if least is not None:
        return f"{least:g} or more"
    return "" if most is None else f"up to {most:g}"
