"""Columns of a table, by the width of the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peer.observe.layout import Column, first_that_fits, fitting
from peer.observe.screen import dashboard
from peer.observe.table import WholeTable
from swarmnet.observe.text import short_id
from swarmnet.observe.view_model import PeerRow, StageRow, ViewModel
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import load_spec

SPEC = load_spec(default_spec_path())
COLUMNS = (
    Column("peer", ("abcdefgh",)),
    Column("state", ("paused: the machine is in use",), goes=1, short=("paused",), shortens=3),
    Column("sent", ("1.2 GB",), goes=2),
    Column("re-routes", ("7",), goes=4),
)


def test_columns_go_in_their_order_and_shorten_before_others_go() -> None:
    shown = [fitting(COLUMNS, width, 2) for width in range(70, 0, -1)]
    distinct = [s for i, s in enumerate(shown) if i == 0 or s != shown[i - 1]]
    assert distinct == [
        {0: False, 1: False, 2: False, 3: False},
        {0: False, 1: False, 2: False},
        {0: False, 1: True, 2: False},
        {0: False, 1: True},
        {0: False},
    ]


def test_wide_characters_count_twice() -> None:
    columns = (Column("a", ("训练",)), Column("b", ("x",), goes=1))
    assert fitting(columns, 5, 0) == {0: False, 1: False}
    assert fitting(columns, 4, 0) == {0: False}


TEXTS = st.text("ab 训", max_size=12)


@given(
    st.lists(st.builds(Column, TEXTS, st.tuples(TEXTS, TEXTS), st.integers(0, 5)), max_size=6),
    st.integers(0, 60),
)
def test_what_is_shown_has_room_or_must_stay(columns: list[Column], width: int) -> None:
    shown = fitting(columns, width, 1)
    total = sum(columns[i].width(False) + 1 for i in shown)
    assert total <= width or not any(columns[i].goes for i in shown)
    assert all(i in shown for i, c in enumerate(columns) if not c.goes)


def test_the_longest_that_has_room_is_said() -> None:
    ways = ("20 of 64 samples committed", "20 of 64 samples", "20 of 64")
    assert [first_that_fits(ways, n) for n in (30, 16, 8, 3)] == [
        ways[0],
        ways[1],
        ways[2],
        ways[2],
    ]


def peer(k: int) -> PeerRow:
    state = "active" if k else "paused"
    return PeerRow(
        peer_id=f"12D3KooWabcdefgh{k}",
        stage=k % 4,
        state=state,
        live=True,
        round=123,
        samples_per_s=1234.5,
        queue_length=3,
        sent_bytes=1_234_567_890 * k,
        received_bytes=9_234_567_890 * k,
        links=12,
        direct_links=3,
        direct_sent_bytes=0,
        rerouted=7,
        agent="swarmnet/0.2",
        paused="" if k else "it is outside its hours 22:00-07:00",
    )


MODEL = ViewModel(
    round=12,
    rounds=200,
    launched=30,
    committed=20,
    global_batch=64,
    done=False,
    loss=3.1234,
    tokens_per_s=12345.6,
    held_out_round=10,
    held_out_loss=3.2,
    held_out_bits_per_byte=1.2,
    stages=tuple(
        StageRow(k, 2, 1, 1234.5, risk="stage 1: one failure from loss" if k == 1 else "")
        for k in range(4)
    ),
    peers=tuple(peer(k) for k in range(6)),
    totals={},
    spread=0.02,
)


def drawn(width: int, model: ViewModel = MODEL) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(dashboard(SPEC, model))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80, 100, 120, 200])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    text = drawn(width)
    body = text.splitlines()[1:]  # the name of the run may be
    assert "…" not in "".join(body)
    assert all(len(line) == width for line in body)
    for wanted in ("13 of 200", "3.123", "12,346 tokens/s", "held out", "one failure from loss"):
        assert wanted in " ".join(text.replace("│", " ").split())
    assert re.search(r"peers +6", text)
    for number in re.findall(r"\d[\d.]* (?=[kMGT]?B\b)|\d\.\d$", text, re.M):
        assert number.endswith(" "), "a number has its unit beside it"
    heads = next(line for line in body if " stage " in line and "round" in line)
    assert "peer" in heads


def test_households_are_shown_where_there_are_any() -> None:
    peers = [
        replace(row, household="12D3KooWhousehold1" * (k < 2)) for k, row in enumerate(MODEL.peers)
    ]
    text = drawn(100, replace(MODEL, peers=tuple(peers)))
    assert "household" in text
    assert text.count(short_id("12D3KooWhousehold1")) == 2
    assert "household" not in drawn(100)


def test_routers_are_shown_where_there_are_any() -> None:
    peers = [
        replace(row, busiest_expert=2.8 * (k < 2), expert_drops=0.125)
        for k, row in enumerate(MODEL.peers)
    ]
    text = drawn(200, replace(MODEL, peers=tuple(peers)))
    assert "busiest expert" in text
    assert text.count("2.8 x") == text.count("12.5 %") == 2
    assert "busiest expert" not in drawn(200)


def test_wider_terminals_show_more() -> None:
    assert "re-routes" in drawn(160)
    assert "sent" in drawn(100)
    assert "re-routes" not in drawn(80)
    assert "outside its hours" in drawn(100), "why it rests"
    at_40 = drawn(40)
    assert not re.search("sent|samples/s +queue", at_40)
    assert "bcdefgh1" in at_40


def test_many_replicas_are_a_number_where_blocks_have_no_room() -> None:
    stages = tuple(replace(row, num_replicas=60) for row in MODEL.stages)
    text = drawn(60, replace(MODEL, stages=stages))
    assert "60 + 1 replicas" in text
    assert "■" not in text
    assert "■" * 60 in drawn(200, replace(MODEL, stages=stages))


@given(
    st.lists(st.lists(st.text("ab 0", max_size=15), min_size=3, max_size=3), max_size=4),
    st.integers(30, 90),
)
def test_a_narrow_terminal_gets_a_list_with_all_that_is_in_the_table(
    rows: list[list[str]], width: int
) -> None:
    rows = [[f"n{k} {row[0]}", *row[1:]] for k, row in enumerate(rows)]
    console = Console(width=width, file=io.StringIO())
    console.print(WholeTable(("what", "a figure", "another"), rows))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    words = shown.split()
    for row in rows:
        assert all(word in words for text in row for word in text.split())
