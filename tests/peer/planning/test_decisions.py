"""The tables of plans in the pages are what the planner answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peer.planning.decisions import PICTURE, TOKENS, Row, answer, picture, rows

ROWS = list(rows())


def test_there_are_tables() -> None:
    assert {row.page for row in ROWS} == set(TOKENS)
    assert len([row for row in ROWS if row.page == "parallelism.md"]) >= 6


@pytest.mark.parametrize("row", ROWS, ids=[f"{r.page}-{i}" for i, r in enumerate(ROWS)])
def test_a_row_is_what_the_planner_answers(tmp_path: Path, row: Row) -> None:
    """`python -m tests.peer.planning.decisions` writes them anew."""
    assert row.says == answer(row, tmp_path)


def test_the_picture_is_what_a_terminal_shows(tmp_path: Path) -> None:
    assert picture(tmp_path) == PICTURE.read_text()
