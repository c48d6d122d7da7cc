"""The room for replies that are not read."""

from __future__ import annotations

import pytest

from swarmnet.transport.calls.holdings import MEMBER_BYTES, STRANGER_BYTES
from swarmnet.transport.calls.replies import (
    GIVES_WAY_AFTER_S,
    STRANGERS_UNREAD_BYTES,
    ReplyRoom,
)

MIB = 1 << 20


class End:
    """Of a stream to a machine."""

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def give_up(self) -> None:
        raise AssertionError("its owner does that")


class World:
    def __init__(self) -> None:
        self.room = ReplyRoom(self)

    def has_standing(self, machine: str) -> bool:
        return machine.startswith("member")

    def end(self, machine: str, num_bytes: int, now: float = 0.0) -> End:
        end = End(machine)
        self.room.waits(end, machine, num_bytes, now)
        return end

    def fill(self, now: float = 0.0) -> list[End]:
        """Strangers that leave as much unread as they may, together."""
        num, each = STRANGERS_UNREAD_BYTES // (4 * MIB), 4 * MIB
        return [self.end(f"liar-{n}", each, now + n / 100) for n in range(num)]


def test_what_was_read_takes_no_room() -> None:
    w = World()
    end = w.end("stranger", 4 * MIB)
    assert w.room.strangers_bytes == 4 * MIB
    assert not w.room.fits("stranger", 4 * MIB, 0.0)
    w.room.waits(end, "stranger", MIB, 1.0)
    assert w.room.fits("stranger", 4 * MIB, 1.0)
    w.room.waits(end, "stranger", 0, 1.0)
    assert w.room.strangers_bytes == 0
    assert w.room.fits("stranger", STRANGERS_UNREAD_BYTES, 1.0), "what is alone"
    assert not w.room.fits("stranger", STRANGERS_UNREAD_BYTES + 1, 1.0)


def test_a_stranger_has_a_part_whatever_streams_it_opens() -> None:
    w = World()
    for _ in range(4):
        assert w.room.may_ask("stranger", 0.0)
        w.end("stranger", MIB)
    assert STRANGER_BYTES == 5 * MIB
    assert not w.room.may_ask("stranger", 100.0), "whoever it is, it does not give way to itself"
    assert w.room.may_ask("another", 0.0)


def test_one_that_reads_takes_the_room_of_the_one_that_has_waited_longest() -> None:
    w = World()
    ends = w.fill()
    assert not w.room.may_ask("reader", 1.0), "they have had no time to read"
    later = GIVES_WAY_AFTER_S
    assert w.room.fits("reader", MIB, later)
    assert w.room.give_way("reader", MIB, later) == ends[:1]
    assert w.room.give_way("reader", 5 * MIB, later + 1) == ends[:2]
    assert not w.room.fits("reader", 5 * MIB, later), "the second has not had its time"
    w.room.waits(ends[0], "liar-0", 0, later)
    assert w.room.give_way("reader", MIB, later) == []


def test_members_have_accounts_of_their_own() -> None:
    w = World()
    w.fill()
    assert w.room.fits("member", MEMBER_BYTES + 1, 0.0), "what is alone"
    w.end("member", MIB)
    assert w.room.fits("member", 64 * MIB, 0.0)
    assert not w.room.fits("member", MEMBER_BYTES, 0.0)
    assert w.room.give_way("member", 64 * MIB, 100.0) == []
    assert w.room.fits("member-2", MEMBER_BYTES, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_books_balance(seed: int) -> None:
    import random

    rng, w = random.Random(seed), World()
    ends = [End(rng.choice(["member", "a", "b"])) for _ in range(9)]
    last = dict.fromkeys(ends, 0)
    for step in range(300):
        end = rng.choice(ends)
        last[end] = rng.choice([0, rng.randrange(MIB)])
        w.room.waits(end, end.machine, last[end], step)
        assert w.room.strangers_bytes == sum(
            n for end, n in last.items() if end.machine != "member"
        ), seed
