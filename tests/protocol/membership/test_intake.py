"""In what order records are checked, and how much of them waits."""

from __future__ import annotations

import pytest

from swarmnet.protocol.membership.intake import (
    AT_ONCE_BURST,
    AT_ONCE_PER_S,
    BATCH,
    LANE_BYTES,
    LIKELY,
    MAX_AT_ONCE,
    MEMBERS,
    OTHERS,
    SENDER_BYTES,
    STRANGERS_BURST,
    STRANGERS_PER_S,
    Intake,
    Ticket,
    batches,
    cost,
)


def entered(intake: Intake, sender: str, lane: int, num_bytes: int = 0) -> Ticket:
    """One that waits for its first turn."""
    ticket = intake.enter(sender, lane, num_bytes)
    assert ticket is not None
    intake.queue(ticket, 1.0)
    return ticket


def turns(intake: Intake, now: float, num: int, again: bool = False) -> list[Ticket]:
    """Who is next, one after the other; `again`: each has more to be checked."""
    found = []
    for _ in range(num):
        ticket = intake.next(now)
        if ticket is None:
            break
        found.append(ticket)
        intake.done(ticket)
        if again:
            intake.queue(ticket, 1.0)
    return found


def test_one_is_at_work_and_senders_take_turns() -> None:
    intake = Intake()
    first, second, other = (entered(intake, name, MEMBERS) for name in "aab")
    assert intake.next(0.0) is first
    assert intake.next(0.0) is None
    assert intake.wait_s(0.0) is None
    intake.done(first)
    assert turns(intake, 0.0, 3) == [other, second]
    assert intake.wait_s(0.0) is None


def test_every_lane_has_its_share_while_it_has_something_to_do() -> None:
    intake = Intake()
    for lane, sender in ((OTHERS, "stranger"), (MEMBERS, "member"), (LIKELY, "newcomer")):
        entered(intake, sender, lane)
    had = [ticket.lane for ticket in turns(intake, 0.0, 130, again=True)]
    counts = [had.count(lane) for lane in (MEMBERS, LIKELY, OTHERS)]
    assert counts == [pytest.approx(n, abs=2) for n in (80, 40, 10)]


def test_a_lane_saves_nothing_up_while_it_has_nothing_to_do() -> None:
    intake = Intake()
    entered(intake, "member", MEMBERS)
    turns(intake, 0.0, 500, again=True)
    entered(intake, "stranger", OTHERS)
    had = [ticket.lane for ticket in turns(intake, 0.0, 90, again=True)]
    assert had.count(OTHERS) <= 12


def test_what_strangers_have_checked_in_a_second_is_bounded_and_members_are_not() -> None:
    intake, now = Intake(), 0.0
    entered(intake, "stranger", OTHERS)
    assert len(turns(intake, now, 10_000, again=True)) == STRANGERS_BURST
    wait_s = intake.wait_s(now)
    assert wait_s == pytest.approx(1 / STRANGERS_PER_S)
    member = entered(intake, "member", MEMBERS)
    assert turns(intake, now, 10) == [member]
    assert len(turns(intake, now + 2.0, 10_000, again=True)) == 2 * STRANGERS_PER_S


def test_what_costs_little_does_not_keep_out_what_costs_more() -> None:
    intake = Intake()
    entered(intake, "stranger", OTHERS)
    turns(intake, 0.0, 10_000, again=True)
    ticket = intake.enter("newcomer", LIKELY, 0)
    assert ticket is not None
    intake.queue(ticket, BATCH)
    found = [intake.next(t / 1000) for t in range(1, 1000)]
    had = [one for one in found if one is not None]
    assert had[0].lane in (LIKELY, OTHERS)
    assert BATCH in [one.cost for one in had[:2]] or had[0] is ticket


def test_the_room_of_a_sender_is_bounded() -> None:
    intake = Intake()
    assert intake.enter("a", MEMBERS, SENDER_BYTES) is not None
    assert intake.enter("a", MEMBERS, 1) is None
    assert intake.enter("b", MEMBERS, 1) is not None


def test_in_a_full_lane_the_sender_with_most_makes_room() -> None:
    intake, part = Intake(), SENDER_BYTES // 4
    room = LANE_BYTES[OTHERS] // part
    tickets = [entered(intake, f"flood-{i % 2}", OTHERS, part) for i in range(room)]
    small = entered(intake, "newcomer", OTHERS, 1000)
    (dropped,) = intake.take_dropped()
    assert dropped in tickets
    assert dropped.is_dropped
    assert not small.is_dropped
    assert small in turns(intake, 0.0, 3)
    assert intake.waiting_bytes <= LANE_BYTES[OTHERS]
    for ticket in (*tickets, small):
        intake.leave(ticket)
        intake.leave(ticket)
    assert intake.waiting_bytes == 0


def test_a_flood_of_many_names_keeps_to_the_room_of_its_lane() -> None:
    intake = Intake()
    for i in range(1000):
        if (ticket := intake.enter(f"name-{i}", OTHERS, 100_000)) is not None:
            intake.queue(ticket, 1.0)
    assert intake.waiting_bytes <= LANE_BYTES[OTHERS]
    assert intake.enter("member", MEMBERS, 100_000) is not None
    assert intake.enter("newcomer", LIKELY, 100_000) is not None


def test_nothing_of_a_liar_is_checked() -> None:
    intake = Intake()
    first, liar, second = (entered(intake, name, OTHERS) for name in ("a", "liar", "b"))
    intake.drop("liar")
    assert intake.take_dropped() == [liar]
    assert turns(intake, 0.0, 3) == [first, second]


def test_little_is_checked_at_once_and_not_often() -> None:
    intake = Intake()
    assert not intake.may_check_at_once([100] * (MAX_AT_ONCE + 1), 0.0)
    assert sum(intake.may_check_at_once([0], 0.0) for _ in range(1000)) == AT_ONCE_BURST
    allowed = sum(intake.may_check_at_once([0], t / 1000) for t in range(1, 1001))
    assert allowed == pytest.approx(AT_ONCE_PER_S, abs=1)


def test_a_batch_has_a_bound_and_one_record_at_least() -> None:
    sizes = [10 << 20, 100, 100, *[1000] * 100]
    found = list(batches(range(len(sizes)), sizes))
    assert [i for batch in found for i in batch] == list(range(len(sizes)))
    assert found[0] == [0]
    assert all(sum(cost(sizes[i]) for i in batch) <= BATCH for batch in found[1:])
