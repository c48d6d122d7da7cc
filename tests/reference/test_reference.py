"""The reference is what the code says, and reads on its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

import pytest

from peer.cli import app
from peer.observe.prometheus import METRICS
from peer.shell.described import described
from swarmnet.observe.charts import CHARTS
from swarmnet.observe.events import COUNTED, KINDS, MEANINGS
from swarmnet.observe.view_model import PeerRow, StageRow, ViewModel
from swarmnet.spec import TABLES, FileSpec, RunSpec, SourceSpec
from tests.reference.docstrings import of_fields
from tests.reference.pages import FOLDER, MAN_PAGE, PAGES, man_page

ELLIPTIC = re.compile(r"(Of|Likewise|As in|The same|Beside|For how long|Between|Sent)\b(?!:)")
"""Beginnings of a text that leans on another one, which a reader of a table does not see."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_makes_it(name: str) -> None:
    """`python -m tests.reference` writes them."""
    assert (FOLDER / name).read_text() == PAGES[name]()


def test_the_page_for_man_is_what_the_command_prints() -> None:
    """`python -m tests.reference` writes it, and a wheel installs it."""
    assert MAN_PAGE.read_text() == man_page()
    assert ".SH EXIT STATUS" in man_page()


def test_there_are_no_other_pages() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_key_and_every_option_is_there() -> None:
    keys = re.findall(r"^\| (?:\[\w+\] )?`(\w+)` \|", PAGES["run-toml.md"](), flags=re.M)
    wanted = [
        info.alias or name
        for cls in (*TABLES.values(), SourceSpec, FileSpec)
        for name, info in cls.model_fields.items()
    ]
    assert sorted(keys) == sorted([*wanted, "name", "seed"])
    page = PAGES["commands.md"]()
    for command in described(app):
        of_command = page.split(f"\n## {command.name}\n")[1].split("\n## ")[0]
        for option in command.options:
            for flag in option.flags:
                assert f"`{flag}" in of_command, (command.name, flag)


def test_counted_events_have_a_meaning() -> None:
    assert set(MEANINGS) == set(COUNTED.values())


def texts() -> Iterator[str]:
    for cls in (RunSpec, *TABLES.values(), SourceSpec, FileSpec):
        yield from (info.description or "" for info in cls.model_fields.values())
    for command in described(app):
        yield from (option.text for option in command.options)
    for kind in (*KINDS.values(), ViewModel, StageRow, PeerRow):
        found = of_fields(kind)
        yield from (found[field.name] for field in fields(kind))
    yield from (metric.text for metric in METRICS.values())
    yield from (*CHARTS.values(), *MEANINGS.values())


def test_every_text_begins_with_its_subject() -> None:
    found = [text for text in texts() if ELLIPTIC.match(text)]
    assert found == []
    assert sum(1 for _ in texts()) > 350
