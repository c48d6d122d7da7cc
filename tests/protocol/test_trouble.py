"""A trouble that lasts is told at once, then rarely, and its end is told. Lines are few."""

from __future__ import annotations

from swarmnet.protocol.trouble import (
    LINES_AT_ONCE,
    LINES_PER_S,
    SAY_AGAIN_S,
    SUM_UP_S,
    Kind,
    Trouble,
)


def test_a_trouble_is_told_rarely() -> None:
    trouble = Trouble()
    assert not trouble.is_over()
    assert not trouble.lasts
    assert trouble.failed(5.0) == ""
    assert [trouble.failed(6.0 + i) for i in range(7)] == [None] * 7
    told = trouble.failed(5.0 + SAY_AGAIN_S)
    assert told is not None
    assert "7 times" in told
    assert trouble.failed(6.0 + SAY_AGAIN_S) is None
    assert trouble.lasts
    assert trouble.is_over()
    assert not trouble.lasts
    assert not trouble.is_over()
    assert trouble.failed(7.0 + SAY_AGAIN_S) == ""


def test_of_one_kind_there_are_few_lines() -> None:
    kind, minutes = Kind(), 10
    told = [kind.line(100.0 + i / 1000) for i in range(60_000 * minutes)]
    lines = [line for line in told if line is not None]
    assert lines[:LINES_AT_ONCE] == [""] * LINES_AT_ONCE
    assert len(lines) <= LINES_AT_ONCE + 60 * minutes * LINES_PER_S
    assert "more in the last minute)" in lines[-1]
    told_of = sum(int(line.split("(")[1].split()[0]) for line in lines if line)
    assert told_of + len(lines) + kind.num_untold == len(told)


def test_what_was_left_out_is_summed_up_when_nothing_of_its_kind_comes_any_more() -> None:
    kind, began = Kind(), 100.0
    left_out = [kind.line(began) for _ in range(LINES_AT_ONCE + 212)].count(None)
    assert left_out == 212
    assert kind.sum(began + SUM_UP_S - 1) == "", "one more may come, and tell of them"
    assert kind.sum(began + SUM_UP_S) == " (212 more in the last minute)"
    assert kind.sum(began + 2 * SUM_UP_S) == "", "once"
    again = [kind.line(began + 2 * SUM_UP_S + i / 100) for i in range(300)]
    assert again.count(None) > 250
    assert kind.sum(began + 7 * SUM_UP_S).endswith("more in the last 5 minutes)")
