"""Commands whose options are fields of dataclasses. A dataclass with a class attribute `panel` is a
group of the command's `--help`; one that is made of others has their groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from swarmnet.runtime.options import Option


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a command, and what becomes of its value."""

    name: str
    kind: Any
    option: OptionInfo | ArgumentInfo
    default: Any

    @property
    def flag(self) -> str:
        """The first on the command line. In an annotation it is the option's first argument, which
        typer calls its default."""
        declared = self.option.default
        return declared if isinstance(declared, str) else f"--{self.name.replace('_', '-')}"

    @property
    def is_hidden(self) -> bool:
        return bool(self.option.hidden)

    @property
    def is_negated(self) -> bool:
        """A flag `--no-...` of a field that is true unless it is given."""
        return self.default is True and self.flag.startswith("--no-")

    def for_typer(self) -> inspect.Parameter:
        """`tuple[X, ...]` is an option that may be repeated."""
        kind, default = self.kind, self.default
        if get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], default or None  # type: ignore[misc]
        elif self.is_negated:
            default = False
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, self.option],
        )

    def value(self, given: Any) -> Any:
        """As the field has it."""
        if get_origin(self.kind) is tuple:
            return tuple(given or ())
        return not given if self.is_negated else given


def parameters(options: type[Any]) -> Iterator[Parameter]:
    """One for each option of a dataclass, those of its bases first. An option is a field that is
    annotated with an `Option`, a `typer.Option` or a `typer.Argument`; its `rich_help_panel` goes
    before the class's `panel`. A field that is true or false is a flag of its name where it names
    none. Raises `TypeError` where a field is no option."""
    for base in options.__bases__:
        if is_dataclass(base):
            yield from parameters(base)
    own = {field.name: field for field in fields(options)}
    for name, hint in inspect.get_annotations(options, eval_str=True).items():
        if get_origin(hint) is ClassVar:
            continue
        kind, option = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
        if isinstance(option, Option):
            option = typer.Option(*option.flags, **option.described)
        if not isinstance(option, (OptionInfo, ArgumentInfo)):
            raise TypeError(f"{options.__name__}.{name} is no option")
        option = copy(option)
        if kind is bool and not isinstance(option.default, str):  # else a --no-... is added
            option.default = f"--{name.replace('_', '-')}"
        option.rich_help_panel = option.rich_help_panel or getattr(options, "panel", None)
        default = own[name].default
        yield Parameter(
            name,
            kind,
            option,
            inspect.Parameter.empty if default is MISSING else default,
        )


def command(
    app: typer.Typer, around: Callable[[bool], AbstractContextManager[None]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as the command of its name. Each of its parameters is a dataclass of
    options, and one of them has `debug`, of which `around` makes the context that the function runs
    in. Raises `TypeError` where two of them have an option of one name."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        kinds = get_type_hints(function)
        kinds.pop("return", None)
        found = {name: list(parameters(kind)) for name, kind in kinds.items()}
        every = {p.name: p.for_typer() for of_kind in found.values() for p in of_kind}
        if len(every) < sum(map(len, found.values())):
            raise TypeError(f"{function.__name__}: two options have one name")

        def run(**values: Any) -> None:
            given = {
                name: kind(**{p.name: p.value(values[p.name]) for p in found[name]})
                for name, kind in kinds.items()
            }
            with around(values["debug"]):
                function(**given)

        run.__doc__ = function.__doc__
        run.parameters = [p for of_kind in found.values() for p in of_kind]  # type: ignore[attr-defined]
        run.__signature__ = inspect.Signature(list(every.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in every.items()}
        app.command(function.__name__)(run)
        return function

    return register
