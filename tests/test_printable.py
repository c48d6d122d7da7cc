"""Text of others is printable, or shown as what it is."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import RemoteError
from swarmnet.printable import MAX_MARKS, printable
from swarmnet.protocol.membership.records import Owing, Record
from swarmnet.transport.calls.heads import parse_error

ANY = st.text(st.characters(), max_size=40)
"""Halves of characters too."""


@given(ANY)
def test_whatever_comes_is_one_printable_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown, "once is enough"
    assert len(shown.splitlines()) <= 1
    assert not any(unicodedata.bidirectional(c) in {"RLO", "LRO", "RLI", "FSI"} for c in shown)
    shown.encode()


@given(ANY)
def test_of_several_lines_each_is(text: str) -> None:
    lines = printable(text, "\n").split("\n")
    assert lines == [printable(line) for line in text.split("\n")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with signs: [red] \\x1b %s {}", "plain, with signs: [red] \\x1b %s {}"),
        ("läuft 日本語 עברית 😀 ❤\ufe0f", "läuft 日本語 עברית 😀 ❤\ufe0f"),
        ("ę\u0301e\u0308", "ę\u0301e\u0308"),
        ("a\u00a0b\u3000c", "a b c"),
        ("\x1b[2J\x9b31m\x07", "\\x1b[2J\\x9b31m\\x07"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("two\r\nlines\u2028more", "two\\r\\nlines\\u2028more"),
        ("a\u200bb\ufeff\u00ad", "a\\u200bb\\ufeff\\xad"),
        ("no\u3164thing\u2800", "no\\u3164thing\\u2800"),
        ("half \ud83d", "half \\ud83d"),
        ("a" + "\u0301" * 6, "a" + "\u0301" * MAX_MARKS + "\\u0301\\u0301"),
        ("\U000e0041\U000e0101", "\\U000e0041\\U000e0101"),
    ],
)
def test_how_it_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_another_peer_answers_is_printable() -> None:
    error = parse_error(["refused", "\x1b]0;x\x07\nswarmnet: all is well", {}])
    assert isinstance(error, RemoteError)
    assert str(error) == "\\x1b]0;x\\x07\\nswarmnet: all is well"


EVIL = "a\u202eb\x1b[2J"


@pytest.mark.parametrize(
    "fields",
    [
        {"paused": EVIL},
        {"agent": EVIL},
        {"addresses": (EVIL,)},
        {"strikes": {EVIL: 1}},
        {"totals": {EVIL: 1}},
        {"unreached": (EVIL,)},
        {"owing": (Owing(EVIL, 1, 2),)},
        {"peer_id": EVIL},
        {"run_id": EVIL},
    ],
)
def test_a_record_with_other_texts_is_refused(fields: dict[str, object]) -> None:
    record = Record("peer", "run", 1, 1, paused="läuft nicht")
    with pytest.raises(ValueError, match="not printable"):
        replace(record, **fields)
