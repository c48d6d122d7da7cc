"""The documentation: links, commands and names in it lead somewhere, and tables are those of their
results."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
import typer.main

from benchmarks import convergence, far_cuts
from benchmarks.learning.tables import write_tables
from benchmarks.simulated_links import with_table
from peer.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks" / "results").glob("*.md"),
    ]
)
CODE = ("swarmnet", "peer", "tests", "benchmarks", "examples")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_into_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_options_that_are_taught_exist(page: Path) -> None:
    command = typer.main.get_command(app)
    commands = command.commands  # type: ignore[attr-defined]
    for line in re.findall(r"swarmnet (\w+[^\n`|]*)", page.read_text()):
        name, *words = line.split()
        if name not in commands:
            continue
        options = {o for p in commands[name].params for o in (*p.opts, *p.secondary_opts)}
        for word in words:
            if word.startswith("--") and len(word) > 2:
                option = word.rstrip(".,;:)").split("=")[0]
                assert option in options | {"--help"}, f"swarmnet {name} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_tests_that_are_named_exist(page: Path) -> None:
    """A path is from the root or from `swarmnet/`; a bare name is that of a file anywhere."""
    bare = {path.name for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"[\w/.-]*\w\.py\b", page.read_text()))
    missing = [
        path
        for path in named
        if not ((ROOT / path).exists() or (ROOT / "swarmnet" / path).exists() or path in bare)
    ]
    assert missing == []


@pytest.mark.parametrize("way", ["The way of a microbatch", "The way of an update"])
def test_every_method_on_a_way_exists(way: str) -> None:
    """`Class.method`, in the page for those who read the code the first time."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"#### {way}\n")[1].split("\n#")[0]
    named = set(re.findall(r"`(\w+\.\w+)`", section)) - set(re.findall(r"`(\w+\.py)`", section))
    assert len(named) >= 10
    assert named - methods_and_attributes() == set()


def methods_and_attributes() -> set[str]:
    """Of all classes of `swarmnet/`, as `Class.name`."""
    found: set[str] = set()
    for path in (ROOT / "swarmnet").rglob("*.py"):
        for owner in ast.walk(ast.parse(path.read_text())):
            if not isinstance(owner, ast.ClassDef):
                continue
            for node in ast.walk(owner):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found.add(f"{owner.name}.{name}")
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.add(f"{owner.name}.{name}")
    return found


def test_every_failure_says_how_it_is_tested() -> None:
    tables = (ROOT / "docs" / "failures.md").read_text().split("\n| what fails |")[1:]
    rows = [row for table in tables for row in re.findall(r"^\| .*\|$", table, flags=re.M)]
    assert len(rows) > 50
    for row in rows:
        assert "`tests/" in row.split(" | ")[-1], row


def test_tables_of_links_are_those_of_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks/links.py --show` would change nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    links = importlib.import_module("links")
    pages = {name: getattr(links, name) for name in ("TABLES", "SUMMARY")}
    for name, page in pages.items():
        (tmp_path / name).write_text(page.read_text())
        monkeypatch.setattr(links, name, tmp_path / name)
    monkeypatch.setattr(links, "plot", lambda *_: None)
    links.show(links.RESULTS)
    for name, page in pages.items():
        assert (tmp_path / name).read_text() == page.read_text()


def test_tables_of_convergence_are_those_of_their_results(tmp_path: Path) -> None:
    """`benchmarks/convergence.py --tables` would change nothing."""
    results = json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text())
    for page in convergence.PAGES:
        copy = tmp_path / page.parent.name
        copy.write_text(page.read_text())
        write_tables(copy, results)
        assert copy.read_text() == page.read_text()


@pytest.mark.parametrize("name", far_cuts.TABLES)
def test_tables_of_far_cuts_are_as_simulated(name: str) -> None:
    """`benchmarks/far_cuts.py --write` would change nothing."""
    page = far_cuts.PAGE.read_text()
    assert with_table(page, name, far_cuts.table(name)) == page


def test_the_glossary_is_in_alphabetical_order() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), flags=re.M)
    assert len(terms) > 50
    assert terms == sorted(terms, key=lambda term: term.lower().replace("_", " "))
