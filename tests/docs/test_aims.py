"""From the README, what a reader wants is minutes of reading away."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.docs.aims import (
    AIMS,
    LIMIT_MIN,
    START,
    TABLE,
    WORDS_A_MINUTE,
    Aim,
    pages_of,
    reading,
    readings,
    table,
    written,
)

MINUTES = re.compile(r"\| (\d+\.\d) (?=\|)")


@pytest.mark.parametrize("aim", AIMS, ids=lambda aim: aim.wants)
def test_an_aim_is_under_ten_minutes_away(aim: Aim) -> None:
    """To the first right line, and to the running thing."""
    way = reading(aim, pages_of())
    assert way.pages[0] == START
    assert 0 < way.first_words <= way.all_words < LIMIT_MIN * WORDS_A_MINUTE


def test_the_table_is_that_of_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """To half a minute; `python -m tests.docs.aims` writes it anew."""
    print(table(readings()))
    before, now = TABLE.read_text(), written()
    assert MINUTES.sub("", before) == MINUTES.sub("", now), capsys.readouterr().out
    assert list(map(float, MINUTES.findall(before))) == pytest.approx(
        list(map(float, MINUTES.findall(now))), abs=0.5
    )


WANTS = Aim("a thing", ("swarmnet one", "swarmnet two"))


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({START: "w " * 5 + "swarmnet one and swarmnet two"}, ((START,), 7, 10)),
        (
            {
                START: "w [long](docs/a.md) w w [short](docs/b.md#its-place)",
                "docs/a.md": "w " * 50 + "swarmnet one swarmnet two",
                "docs/b.md": "w " * 90 + "\n## Its place\nswarmnet one\nswarmnet two\n",
            },
            ((START, "docs/b.md"), 10, 12),
        ),
        (
            {
                START: "[only](docs/a.md)",
                "docs/a.md": "one [b](b.md) [self](#x)",
                "docs/b.md": "swarmnet one swarmnet two",
            },
            ((START, "docs/a.md", "docs/b.md"), 5, 7),
        ),
    ],
)
def test_the_shortest_way_is_found(pages: dict[str, str], expected: tuple[Any, ...]) -> None:
    way = reading(WANTS, pages)
    assert (way.pages, way.first_words, way.all_words) == expected


def test_what_no_link_leads_to_is_not_found() -> None:
    pages = {START: "nothing [a](docs/a.md)", "docs/a.md": "two one", "docs/b.md": "swarmnet one"}
    with pytest.raises(LookupError):
        reading(WANTS, pages)
    with pytest.raises(LookupError):
        reading(WANTS, {START: "swarmnet two swarmnet one"})


def test_a_longer_way_is_noticed() -> None:
    pages = pages_of()
    for aim in AIMS:
        far = pages | {START: "word " * 2000 + pages[START]}
        assert reading(aim, far).first_words >= LIMIT_MIN * WORDS_A_MINUTE
