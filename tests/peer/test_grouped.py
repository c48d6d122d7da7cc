"""Options in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from peer.grouped import grouped


@dataclass(frozen=True)
class Where:
    panel: ClassVar[str] = "Where to"
    host: Annotated[str, typer.Option(metavar="HOST", help="The other end.")] = "here"
    port: Annotated[int, typer.Option(min=0, metavar="PORT")] = 1


@dataclass(frozen=True)
class How:
    panel: ClassVar[str] = "How"
    fast: Annotated[bool, typer.Option("--fast")] = False


@dataclass(frozen=True)
class NoOption:
    panel: ClassVar[str] = "None"
    host: str = ""


def app_of(*groups: type, seen: list[object]) -> typer.Typer:
    app = typer.Typer()

    @grouped(app, "go", groups)
    def go(*given: object) -> None:
        """Goes there."""
        seen.extend(given)

    return app


def test_a_command_gets_its_groups() -> None:
    seen: list[object] = []
    app = app_of(Where, How, seen=seen)
    assert CliRunner().invoke(app, ["--host", "there", "--fast"]).exit_code == 0
    assert seen == [Where("there", 1), How(fast=True)]
    assert CliRunner().invoke(app, ["--port", "-1"]).exit_code == 2


def test_groups_are_those_of_the_help() -> None:
    shown = (
        CliRunner().invoke(app_of(Where, How, seen=[]), ["--help"], env={"COLUMNS": "80"}).output
    )
    assert "Goes there." in shown
    assert (
        shown.index("Where to") < shown.index("--host") < shown.index("How") < shown.index("--fast")
    )
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_no_option_is_refused() -> None:
    with pytest.raises(TypeError, match="two options have one name"):
        app_of(Where, Where, seen=[])
    with pytest.raises(TypeError, match=r"NoOption\.host needs an option"):
        app_of(NoOption, seen=[])
