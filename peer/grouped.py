"""Commands whose options are many: they are fields of a few dataclasses, and each of these is a
group of the command's `--help`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo


def parameters(group: type[Any]) -> list[inspect.Parameter]:
    """A parameter for each field of a group, in their order. A group is a dataclass with a class
    attribute `panel`, the group's name in `--help`; each of its fields is annotated with a
    `typer.Option` (or a `typer.Argument`) and has a default."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated or field.default is MISSING:
            raise TypeError(f"{group.__name__}.{field.name} needs an option and a default")
        kind, option = get_args(hint)
        option = copy(option)
        if not isinstance(option, (OptionInfo, ArgumentInfo)):
            raise TypeError(f"{group.__name__}.{field.name} is no option")
        option.rich_help_panel = group.panel
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[kind, option],
            )
        )
    return found


def grouped(
    app: typer.Typer, name: str, groups: Sequence[type[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command that is called with one object of each of its `groups`. Raises
    `TypeError` where two groups have a field of one name."""
    of_group = {group: parameters(group) for group in groups}
    every = [p for group in groups for p in of_group[group]]
    if len({p.name for p in every}) < len(every):
        raise TypeError(f"{name}: two options have one name")

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(
                *(group(**{p.name: values[p.name] for p in of_group[group]}) for group in groups)
            )

        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in every}
        app.command(name)(command)
        return function

    return register
