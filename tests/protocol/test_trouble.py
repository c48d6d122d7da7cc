"""A trouble that lasts is told at once, then rarely, and its end is told."""

from __future__ import annotations

from swarmnet.protocol.trouble import SAY_AGAIN_S, Trouble


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
