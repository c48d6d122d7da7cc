"""Who is looked for, and how often."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership.reconnect import (
    AT_ONCE,
    MAX_ROWS,
    Reconnect,
    Row,
    missing_members,
)
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import ANSWER_S
from tests.protocol.making import record

DIAL_S, STEP_S = 5.0, 0.25


def dials(
    number: int, until_s: float, dial_s: float = 0.0, seed: int = 0, step_s: float = STEP_S
) -> dict[str, list[float]]:
    """When each of so many members, none of whom ever answers, is dialled."""
    table, times = Reconnect(random.Random(seed)), {f"p{i}": list[float]() for i in range(number)}
    missing = {p: (f"/ip4/192.0.2.1/tcp/1/p2p/{p}",) for p in times}
    going: list[tuple[float, Row]] = []
    now = 0.0
    while now < until_s:
        for ended_at, row in [g for g in going if g[0] <= now]:
            going.remove((ended_at, row))
            table.ended(row, now)
        table.look(missing, now)
        row = table.next(now)
        if row is not None:
            times[row.peer_id].append(now)
            going.append((now + dial_s, row))
        assert len(going) <= AT_ONCE
        now += step_s
    return times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def test_a_member_is_dialled_at_once_and_then_more_and_more_seldom() -> None:
    [times] = dials(1, 1000.0).values()
    assert times[0] == 0.0
    apart = gaps(times)
    assert apart[0] <= 2 * FIRST_PAUSE_S
    assert max(apart) <= ANSWER_S + STEP_S, "alone in the table it is dialled every 10 s"


def test_of_a_cut_of_ten_minutes_the_end_is_found_within_one() -> None:
    for times in dials(MAX_ROWS, 660.0, DIAL_S).values():
        assert max(gaps([t for t in times if t < 600.0] + [t for t in times if t >= 600.0])) <= 60.0


def test_every_member_comes_within_ten_minutes_for_ever() -> None:
    everybody = dials(MAX_ROWS, 4 * 3600.0, DIAL_S, step_s=1.0)
    assert all(max(gaps(times)) <= 600.0 + DIAL_S for times in everybody.values())
    late = [sum(t >= 3 * 3600.0 for t in times) for times in everybody.values()]
    assert sum(late) <= 3600.0 / 4, "and the whole table costs next to nothing then"


def test_something_is_dialled_every_ten_seconds_over_all() -> None:
    together = sorted(t for times in dials(3, 2 * 3600.0).values() for t in times)
    assert max(gaps(together)) <= 10.0 + 2 * STEP_S


def test_who_was_lost_just_now_does_not_wait_behind_those_lost_long_ago() -> None:
    table, now = Reconnect(random.Random(0)), 0.0
    old = {f"old-{i}": ("/a",) for i in range(MAX_ROWS - 1)}
    while now < 600.0:
        table.look(old, now)
        if (row := table.next(now)) is not None:
            table.ended(row, now)
        now += STEP_S
    tried = []
    while now < 610.0:
        table.look({"new": ("/b",), **old}, now)
        if (row := table.next(now)) is not None:
            table.ended(row, now)
            if row.peer_id == "new":
                tried.append(now - 600.0)
        now += STEP_S
    assert tried[0] <= STEP_S
    assert len(tried) >= 4


def test_a_new_address_is_dialled_at_once() -> None:
    table = Reconnect(random.Random(0))
    table.look({"a": ("/x",)}, 0.0)
    table.ended(_next(table, 0.0), 0.0)
    table.look({"a": ("/x",)}, 0.5)
    assert table.next(0.5) is None
    table.look({"a": ("/y", "/x")}, 0.6)
    assert _next(table, 0.6).addresses == ("/y", "/x")


def test_who_is_seen_again_is_not_looked_for_and_begins_anew_when_lost() -> None:
    table = Reconnect(random.Random(0))
    table.look({"a": ("/x",)}, 0.0)
    assert table.is_looking()
    table.ended(_next(table, 0.0), 0.0)
    assert not table.is_looking()
    assert [row.peer_id for row in table.rows()] == ["a"]
    table.look({}, 1.0)
    assert table.next(100.0) is None
    table.look({"a": ("/x",)}, 200.0)
    assert _next(table, 200.0).since == 200.0


def test_those_seen_last_are_kept() -> None:
    table = Reconnect(random.Random(0))
    table.look({f"p{i}": ("/x",) for i in range(MAX_ROWS + 9)}, 0.0)
    assert [row.peer_id for row in table.rows()] == [f"p{i}" for i in range(MAX_ROWS)]
    over = table.look({f"p{i}": ("/x",) for i in range(9, MAX_ROWS + 9)}, 1.0)
    assert [row.peer_id for row in over] == [f"p{i}" for i in range(9)]


def _next(table: Reconnect, now: float) -> Row:
    row = table.next(now)
    assert row is not None
    return row


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 3.0), st.integers(0, 2**6 - 1)), max_size=80),
    st.integers(0, 9),
)
def test_whatever_comes_and_goes_the_bounds_hold(steps: list[tuple[float, int]], seed: int) -> None:
    table, now, going = Reconnect(random.Random(seed)), 0.0, list[Row]()
    present: Callable[[int, int], bool] = lambda mask, i: bool(mask >> i & 1)  # noqa: E731
    for wait_s, mask in steps:
        now += wait_s
        table.look({f"p{i}": ("/x",) for i in range(6) if present(mask, i)}, now)
        if len(going) > 3:
            table.ended(going.pop(0), now)
        row = table.next(now)
        if row is not None:
            assert row not in going
            going.append(row)


def test_members_are_looked_for_again_now_and_then() -> None:
    table = Reconnect(random.Random(0))
    assert table.is_look_due(0.0, 1.0)
    assert table.is_looking(), "it has not even looked"
    table.look({}, 5.0)
    assert not table.is_looking()
    assert not table.is_look_due(5.9, 1.0)
    assert table.is_look_due(6.0, 1.0)


def test_a_connection_to_a_member_that_stays_missing_leads_nowhere() -> None:
    row = Row("a", (), since=10.0, tried_at=10.0)
    assert not row.is_connection_dead(10.0 + ANSWER_S)
    assert row.is_connection_dead(10.5 + ANSWER_S)


def test_missing_are_machines_that_are_not_live_those_seen_last_first() -> None:
    view = View("me", silence_s=10.0)
    view.merge(record("left", state=LEFT, addresses=("/left",)), 3.0)
    view.merge(record("long", addresses=("/long",)), 0.0)
    view.merge(record("short", addresses=("/short",)), 2.0)
    view.merge(record("short/1", addresses=("/short", "/other")), 2.0)
    view.merge(record("here"), 20.0)
    view.merge(record("me"), 20.0)
    remembered = {"short": ["/saved", "/short"], "new": ["/new"], "here": ["/here"], "me": ["/me"]}
    missing = missing_members(view, "me", remembered, 20.0)
    assert missing == {
        "short": ("/short", "/other", "/saved"),
        "long": ("/long",),
        "left": ("/left",),
        "new": ("/new",),
    }
    assert list(missing) == ["short", "long", "left", "new"]


def test_where_all_are_live_nobody_is_missing() -> None:
    view = View("me", silence_s=10.0)
    view.merge(record("here"), 20.0)
    view.merge(record("me"), 20.0)
    assert missing_members(view, "me", {}, 20.0) == {}
