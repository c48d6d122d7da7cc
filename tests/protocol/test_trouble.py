"""A trouble that lasts is told at once, then rarely, and its end is told. Lines are few."""

from __future__ import annotations

from swarmnet.protocol.trouble import LINES_AT_ONCE, LINES_PER_S, SAY_AGAIN_S, Kind, Trouble


def test_a_trouble_is_told_rarely() -> None:
    trouble = Trouble()
    assert not trouble.is_over()
    assert trouble.failed(5.0) == ""
    assert [trouble.failed(6.0 + i) for i in range(7)] == [None] * 7
    told = trouble.failed(5.0 + SAY_AGAIN_S)
    assert told is not None
    assert "7 times" in told
    assert trouble.failed(6.0 + SAY_AGAIN_S) is None
    assert trouble.is_over()
    assert not trouble.is_over()
    assert trouble.failed(7.0 + SAY_AGAIN_S) == ""


def test_of_one_kind_there_are_few_lines() -> None:
    kind, minutes = Kind(), 10
    told = [kind.line(100.0 + i / 1000) for i in range(60_000 * minutes)]
    lines = [line for line in told if line is not None]
    assert lines[:LINES_AT_ONCE] == [""] * LINES_AT_ONCE
    assert len(lines) <= LINES_AT_ONCE + 60 * minutes * LINES_PER_S
    assert "more lines like it" in lines[-1]
    told_of = sum(int(line.split("(")[1].split()[0]) for line in lines if line)
    assert told_of + len(lines) + kind.num_untold == len(told)
