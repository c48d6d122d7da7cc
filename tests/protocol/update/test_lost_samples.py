"""Who closes the books of an exchange, and what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.pipeline.progress import RoundProgress
from swarmnet.protocol.slots import SlotPlan
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL, ZERO, SyncPlan
from swarmnet.protocol.update.late_tokens import Late
from swarmnet.protocol.update.lost_samples import Loss, LostSamples

NOW = 100.0
PLAN = SyncPlan(ZERO, 100)
SLOTS, PER_MICROBATCH = SlotPlan(((0, 4),)), 2


def replica(name: str, state: str = ACTIVE, **said: int) -> Record:
    return Record(name, "run", 1, 1, state=state, stage=0, **said)  # type: ignore[arg-type]


def books_of(own: Record, *others: Record) -> LostSamples:
    view = View(own.peer_id)
    for record in (own, *others):
        view.merge(record, NOW)
    return LostSamples(view, 0, SLOTS, PER_MICROBATCH)


def closed(books: LostSamples, own: Record, *, has_just_left: bool = False) -> list[Loss]:
    """The books of round 15, of whose exchange the tokens are known here."""
    books.averaged(15, 60)
    found = []
    for r in (15, 17):
        found += books.opened(r, PLAN, own, NOW, has_just_left=has_just_left)
    return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each round has four microbatches of 25 tokens; the rounds that were asked about."""
    looked: list[int] = []

    def look(view: View, round_index: int, now: float, num_slots: int) -> RoundProgress:
        looked.append(round_index)
        return RoundProgress(round_index, 4, 4, 4, 0, 0, 100, 0.0, 1, drained=True)

    monkeypatch.setattr(progress, "round_progress", look)
    return looked


def test_an_exchange_that_lacks_most_of_its_tokens(counted: list[int]) -> None:
    own = replica("own", round=17)
    books = books_of(own)
    assert not books.has_lost_most(15, PLAN, NOW), "it has not been done here"
    for tokens, has in ((49, True), (50, False)):
        books.averaged(15, tokens)
        assert books.has_lost_most(15, PLAN, NOW) == has
    assert not books.has_lost_most(15, SyncPlan(GOSSIP, 100), NOW)


def test_what_was_counted_and_not_averaged_is_lost(counted: list[int]) -> None:
    own = replica("own", round=17)
    assert closed(books_of(own), own) == [Loss(15, 0, 100, 60, round(8 * 0.4))]
    assert counted == [15]


def test_an_exchange_that_was_not_seen_here_is_not_told_of(counted: list[int]) -> None:
    own = replica("own", round=17)
    books = books_of(own)
    assert books.opened(15, PLAN, own, NOW, has_just_left=False) == []
    assert books.opened(17, PLAN, own, NOW, has_just_left=False) == []


@pytest.mark.parametrize(("their_round", "tells"), [(11, True), (15, False), (17, False)])
def test_who_has_lost_touch_does_not_speak_for_the_stage(
    counted: list[int], their_round: int, tells: bool
) -> None:
    """It will fetch the stage again, and close no books of what it missed; else the one with the
    lowest id speaks."""
    own = replica("own", round=17)
    books = books_of(own, replica("a lower id", round=their_round, active_from=11))
    assert [loss.round for loss in closed(books, own)] == ([15] if tells else [])


@pytest.mark.parametrize("has_just_left", [True, False])
def test_one_that_leaves_speaks_as_long_as_the_others_count_on_it(
    counted: list[int], has_just_left: bool
) -> None:
    own = replica("own", LEAVING, round=17)
    books = books_of(own, replica("the next id", round=17))
    assert len(closed(books, own, has_just_left=has_just_left)) == has_just_left


@pytest.mark.parametrize(("mode", "rounds"), [(ZERO, [10, 11]), (GOSSIP, [])])
def test_no_books_are_begun_that_nothing_closes(
    counted: list[int], mode: str, rounds: list[int]
) -> None:
    """Where replicas average in pairs there is no exchange of the stage; what each round counted
    would be kept for ever."""
    own = replica("own", round=10)
    books = books_of(own)
    for r in range(10, 14):
        books.opened(r, SyncPlan(mode, 100), own, NOW, has_just_left=False)
    assert counted == rounds


def test_when_the_run_is_over_all_books_are_closed(counted: list[int]) -> None:
    own = replica("own", round=100)
    books = books_of(own)
    books.opened(97, PLAN, own, NOW, has_just_left=False)
    books.opened(100, PLAN, own, NOW, has_just_left=False)
    assert counted == [97, 98, 99]


@pytest.mark.parametrize(
    ("late", "told_at", "averaged", "lost"),
    [
        ([(60,), (), ()], 5, 200, 0),
        ([(30,), (0, 30), ()], 7, 200, 0),
        ([(), (0, 0), (0, 0, 60)], 9, 200, 0),
        ([(30,), (), ()], 9, 170, 2),
        ([(), (), ()], 9, 140, 5),
    ],
    ids=["in the next one", "in two", "in the last that may", "a part", "nothing"],
)
def test_what_lacks_may_be_late_so_its_books_are_closed_when_it_has_come_or_cannot(
    counted: list[int], late: list[Late], told_at: int, averaged: int, lost: int
) -> None:
    """Of 200 tokens of two rounds 140 are in their exchange. The next ones lack nothing of their
    own."""
    plan = SyncPlan(LOCAL, 20, local_steps=2)
    own = replica("own", round=9)
    books = books_of(own)
    books.averaged(1, 140)
    for r, behind in zip((3, 5, 7), late, strict=True):
        books.averaged(r, 200 + sum(behind), behind)
    told = {r: books.opened(r, plan, own, NOW, has_just_left=False) for r in range(10)}
    found = {loss.round: (r, loss) for r, losses in told.items() for loss in losses}
    assert found[1] == (told_at, Loss(1, 0, 200, averaged, lost))
    assert [found[r] for r in (3, 5, 7)] == [(r + 2, Loss(r, 0, 200, 200, 0)) for r in (3, 5, 7)]


def test_the_end_of_the_run_closes_what_is_open(counted: list[int]) -> None:
    plan = SyncPlan(LOCAL, 6, local_steps=2)
    own = replica("own", round=5)
    books = books_of(own)
    for r, n in ((1, 140), (3, 200), (5, 150)):
        books.averaged(r, n)
    told = [books.opened(r, plan, own, NOW, has_just_left=False) for r in range(7)]
    assert told[5] == [Loss(3, 0, 200, 200, 0)]
    assert told[6] == [Loss(1, 0, 200, 140, 5), Loss(5, 0, 200, 150, 4)]


@pytest.mark.parametrize(("their_round", "tells"), [(3, True), (7, False)])
def test_who_had_lost_touch_does_not_close_books_when_it_is_back(
    counted: list[int], their_round: int, tells: bool
) -> None:
    """Exchange 5 lacks tokens; the one with the lower id was in the exchange before it then, or in
    the same one."""
    plan = SyncPlan(LOCAL, 20, local_steps=2)
    own = replica("own", round=7)
    books = books_of(own, replica("a lower id", round=their_round))
    for r in (5, 7, 9, 11):
        books.averaged(r, 140 if r == 5 else 200)
    told = []
    for r in range(4, 14):
        if r == 10:
            books.view.merge(replace(replica("a lower id", round=13), version=2), NOW)
        told += books.opened(r, plan, own, NOW, has_just_left=False)
    assert (Loss(5, 0, 200, 140, 5) in told) == tells
