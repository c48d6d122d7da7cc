"""Options in groups."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from peer.option_groups import command


@dataclass(frozen=True)
class Where:
    panel: ClassVar[str] = "Where to"
    host: Annotated[str, typer.Option(metavar="HOST", help="The other end.")] = "here"
    port: Annotated[int, typer.Option(min=0, metavar="PORT")] = 1
    by_way_of: Annotated[tuple[str, ...], typer.Option("--via")] = ()


@dataclass(frozen=True)
class How:
    panel: ClassVar[str] = "How"
    fast: Annotated[bool, typer.Option("--fast")] = False
    lights: Annotated[bool, typer.Option("--no-lights")] = True
    debug: Annotated[bool, typer.Option("--debug")] = False


@dataclass(frozen=True)
class Journey(Where, How):
    panel: ClassVar[str] = "All in all"
    seats: Annotated[int, typer.Option()] = 1


@dataclass(frozen=True)
class WithCargo:
    cargo: Annotated[Path, typer.Argument()]
    debug: Annotated[bool, typer.Option("--debug")] = False


@dataclass(frozen=True)
class NoOption:
    host: str = ""


def around(debug: bool) -> nullcontext[None]:
    return nullcontext()


def app_of(*kinds: type, seen: list[object]) -> typer.Typer:
    app = typer.Typer()

    def go(**given: object) -> None:
        """Goes there."""
        seen.extend(given.values())

    go.__annotations__ = {f"given_{k}": kind for k, kind in enumerate(kinds)}
    command(app, around)(go)
    return app


def test_a_command_gets_its_groups() -> None:
    seen: list[object] = []
    app = app_of(Where, How, seen=seen)
    words = ["--host", "there", "--via", "x", "--via", "y", "--fast", "--no-lights"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert seen == [Where("there", 1, ("x", "y")), How(fast=True, lights=False)]
    assert CliRunner().invoke(app, ["--port", "-1"]).exit_code == 2


def test_what_is_not_said_has_its_default_and_what_has_none_must_be_said() -> None:
    seen: list[object] = []
    assert CliRunner().invoke(app_of(Journey, seen=seen), []).exit_code == 0
    assert seen == [Journey()]
    assert CliRunner().invoke(app_of(WithCargo, seen=seen), []).exit_code == 2


def test_the_command_runs_in_the_context_of_its_debug() -> None:
    said: list[bool] = []

    def note(debug: bool) -> nullcontext[None]:
        said.append(debug)
        return nullcontext()

    app = typer.Typer()

    @command(app, note)
    def go(how: How) -> None:
        pass

    for words in ([], ["--debug"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert said == [False, True]


@pytest.mark.parametrize("kinds", [(Where, How), (Journey,)])
def test_groups_are_those_of_the_help(kinds: tuple[type, ...]) -> None:
    shown = CliRunner().invoke(app_of(*kinds, seen=[]), ["--help"], env={"COLUMNS": "80"}).output
    assert "Goes there." in shown
    assert (
        shown.index("Where to") < shown.index("--host") < shown.index("How") < shown.index("--fast")
    )
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_no_option_is_refused() -> None:
    with pytest.raises(TypeError, match="two options have one name"):
        app_of(Where, Where, seen=[])
    with pytest.raises(TypeError, match=r"NoOption\.host is no option"):
        app_of(NoOption, seen=[])
