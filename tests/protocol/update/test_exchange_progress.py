"""Who hangs in an exchange, and who is only slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update.exchange_progress import (
    ExchangeProgress,
    HeldUp,
    ResultWaits,
    SumWaits,
)
from swarmnet.protocol.update.roster import (
    ALIVE,
    DEAD,
    HUNG,
    SUSPECT,
    Ballot,
    MemberStatus,
    Roster,
)
from swarmnet.protocol.update.shard_state import ShardState, State

LIMIT_S = 10.0
PRIMARY, ME, NEXT = "primary", "me", "next"


def waiting(ballot: Ballot, **status: Any) -> ShardState:
    roster = Roster(ballot, (PRIMARY, NEXT), (PRIMARY, NEXT))
    shard = ShardState(ME, roster, ballot)
    shard.begun = (4, "gradient")
    shard.members = {PRIMARY: MemberStatus(ALIVE, **status), NEXT: MemberStatus(ALIVE)}
    return shard


def began(_: str) -> float:
    return 100.0


def test_a_primary_without_a_sum_hangs_after_the_limit() -> None:
    waits, shards = SumWaits(), {0: waiting(Ballot(1, PRIMARY))}
    assert waits.hung(shards, began, 109.9, lambda _: LIMIT_S) == set()
    assert waits.hung(shards, began, 110.0, lambda _: LIMIT_S) == {PRIMARY}


def test_each_primary_has_its_own_limit() -> None:
    waits = SumWaits()
    shards = {0: waiting(Ballot(1, PRIMARY)), 1: waiting(Ballot(2, NEXT))}
    limits = {PRIMARY: 4.0, NEXT: 10.0}.__getitem__
    assert waits.hung(shards, began, 103.9, limits) == set()
    assert waits.hung(shards, began, 104.0, limits) == {PRIMARY}
    assert waits.hung(shards, began, 150.0, limits) == {PRIMARY, NEXT}


def test_a_primary_with_a_sum_waits_for_other_stages() -> None:
    waits, shards = SumWaits(), {j: waiting(Ballot(1, PRIMARY)) for j in range(2)}
    waits.summed(0, PRIMARY)
    assert waits.hung({0: shards[0]}, began, 150.0, lambda _: LIMIT_S) == set()
    assert waits.hung(shards, began, 150.0, lambda _: LIMIT_S) == {PRIMARY}


RESULT_S = 20.0
LONGEST_S = dict.fromkeys((PRIMARY, NEXT), RESULT_S)


@pytest.mark.parametrize("kind", ["norm", "copy", "no norm needed"])
def test_a_primary_that_waits_for_nobody_owes_its_result(kind: str) -> None:
    """Where the norm is known its sum is in that; a copy is of a step; and where no norm is needed,
    it says that it has the sum."""
    progress, shard = ExchangeProgress(), waiting(Ballot(1, PRIMARY))
    if kind == "copy":
        shard.state = State.COPIED
    if kind == "no norm needed":
        shard.roster = replace(shard.roster, clips=False)
        progress.has_sum(0, PRIMARY)

    def owing(now: float) -> list[str]:
        return progress.owing({0: shard}, now, LONGEST_S, has_norm=kind == "norm")

    assert owing(102.0) == []
    assert owing(121.9) == []
    assert progress.is_owed(0, PRIMARY, 112.0, RESULT_S / 2)
    assert owing(122.0) == [PRIMARY]
    assert progress.owes(PRIMARY)
    assert not progress.owes(PRIMARY)
    assert not progress.is_usual


def test_a_primary_that_may_wait_for_other_stages_owes_nothing() -> None:
    progress, shard = ExchangeProgress(), waiting(Ballot(1, PRIMARY))
    progress.has_sum(0, PRIMARY)
    for now in (100.0, 500.0):
        assert progress.owing({0: shard}, now, LONGEST_S, has_norm=False) == []
    assert not progress.is_owed(0, PRIMARY, 500.0, RESULT_S)


def test_who_is_at_work_itself_is_owed_nothing() -> None:
    progress, shard = ExchangeProgress(), waiting(Ballot(1, PRIMARY))
    own = waiting(Ballot(1, ME))
    own.state = State.STEPPING
    for now in (100.0, 500.0):
        found = progress.owing({0: shard, 1: own}, now, LONGEST_S, has_norm=True)
        assert found == []


def test_who_has_taken_over_after_the_norm_has_more_time() -> None:
    waits, shard = ResultWaits(), waiting(Ballot(3, NEXT))

    def owing(now: float, has_sum: bool = True) -> set[str]:
        waits.look({0: shard}, now, {0} if has_sum else set(), has_norm=True)
        return waits.owing({0: shard}, now, LONGEST_S)

    assert owing(110.0, has_sum=False) == set()
    assert owing(120.0) == set()
    assert owing(159.9) == set()
    assert owing(160.0) == {NEXT}


def test_a_neighbour_between_owes_first_and_the_primary_from_then_on() -> None:
    waits, shard = ResultWaits(), waiting(Ballot(1, PRIMARY))
    shard.neighbour = NEXT

    def owing(now: float) -> set[str]:
        waits.look({0: shard}, now, set(), has_norm=True)
        return waits.owing({0: shard}, now, LONGEST_S)

    assert owing(100.0) == set()
    assert owing(120.0) == {NEXT}
    shard.members = {**shard.members, NEXT: MemberStatus(HUNG)}
    assert owing(120.0) == set()
    assert owing(140.0) == {PRIMARY}


def test_a_neighbour_between_hangs_first_and_the_primary_from_then_on() -> None:
    """Unless that has the sum, as the neighbour says."""
    waits, shard = SumWaits(), waiting(Ballot(1, PRIMARY))
    shard.neighbour = NEXT
    assert waits.hung({0: shard}, began, 109.9, lambda _: LIMIT_S) == set()
    assert waits.hung({0: shard}, began, 110.0, lambda _: LIMIT_S) == {NEXT}
    shard.members = {**shard.members, NEXT: MemberStatus(HUNG)}
    assert waits.hung({0: shard}, began, 110.0, lambda _: LIMIT_S) == set()
    assert waits.hung({0: shard}, began, 119.9, lambda _: LIMIT_S) == set()
    assert waits.hung({0: shard}, began, 120.0, lambda _: LIMIT_S) == {PRIMARY}
    told, shard = SumWaits(), waiting(Ballot(1, PRIMARY))
    shard.neighbour = NEXT
    told.summed(0, PRIMARY)
    assert told.hung({0: shard}, began, 150.0, lambda _: LIMIT_S) == set()


def test_who_takes_over_gets_as_long() -> None:
    waits, shards = SumWaits(), {0: waiting(Ballot(3, NEXT))}
    assert waits.hung(shards, began, 120.0, lambda _: LIMIT_S) == set()
    assert waits.hung(shards, began, 129.9, lambda _: LIMIT_S) == set()
    assert waits.hung(shards, began, 130.0, lambda _: LIMIT_S) == {NEXT}


@pytest.mark.parametrize(
    ("left_at", "begun_at", "looked_at", "found_at"),
    [
        (0.0, 1000.0, 100.0, 110.0),  # it was in no exchange before, and does not begin this one
        (109.0, 1000.0, 100.0, 118.75),  # as it may; last seen there at 108.75
        (109.0, 112.0, 100.0, 138.75),  # it begins, and makes no sum
        (1000.0, 1000.0, 100.0, 120.0),  # the one before does not end
        (1000.0, 1000.0, 125.0, 125.0),  # and this process stood still meanwhile
        (0.0, 101.0, 100.0, 130.0),
    ],
)
def test_a_primary_has_its_time_from_when_it_has_left_the_exchange_before(
    left_at: float, begun_at: float, looked_at: float, found_at: float
) -> None:
    """This replica has begun at 100, and contributions are waited for 10 s."""
    progress, shards = ExchangeProgress(), {0: waiting(Ballot(1, PRIMARY))}
    found = []
    for i in range(1000):
        now = looked_at + i * 0.25
        behind = [PRIMARY] if now < left_at else []
        begun = {PRIMARY} if now >= begun_at else set()
        hung = progress.hanging(shards, 100.0, now, behind, begun, 10.0, 30.0)
        found += [now for peer_id in hung if progress.hangs(peer_id)]
    assert found == [found_at]


def test_who_is_at_work_itself_finds_nobody() -> None:
    """It may be the one that hangs; and who has not begun waits for nobody."""
    shards = {0: waiting(Ballot(1, PRIMARY)), 1: waiting(Ballot(1, ME))}

    def hung(state: State, began: float | None = 100.0, *, has_sum: bool = False) -> list[str]:
        progress = ExchangeProgress()
        shards[1].state = state
        if has_sum:
            progress.begins(1, do.FindNorm(1, None, (), Ballot(1, ME)))
        return progress.hanging(shards, began, 150.0, [], set(), LIMIT_S, LIMIT_S)

    assert hung(State.GATHERING) == [PRIMARY]
    assert hung(State.GATHERING, None) == []
    for state in (State.STEPPING, State.COPYING, State.CLIPPING):
        assert hung(state) == []
    assert hung(State.CLIPPING, has_sum=True) == [PRIMARY], "it waits for other stages"


def test_a_peer_hangs_once_and_works_again_where_it_leads() -> None:
    progress = ExchangeProgress()
    assert not progress.leads(NEXT)
    assert progress.hangs(NEXT)
    assert not progress.hangs(NEXT)
    assert progress.missed == {NEXT}
    assert progress.leads(NEXT)
    assert not progress.leads(NEXT)
    assert progress.hangs(NEXT)


def test_who_is_gone_without_is_missed_until_its_contribution_comes() -> None:
    progress = ExchangeProgress()
    ballot = Ballot(1, ME)
    progress.begins(0, do.Sum((), frozenset(), (NEXT, PRIMARY), 1))
    assert (progress.missed, progress.summed) == ({NEXT, PRIMARY}, set())
    progress.came(NEXT)
    progress.begins(0, do.Step(None, ballot, 1))
    assert (progress.missed, progress.summed) == ({PRIMARY}, {0})
    progress.begins(0, do.Sum((), frozenset(), (), 2))
    assert progress.summed == set(), "it is summed again"


def test_the_word_that_state_has_come_may_be_there_before_the_one_that_it_had_not() -> None:
    """The latter travels with a gradient."""
    progress = ExchangeProgress()
    assert progress.is_follower("peer", 0), "who says nothing is sent sums"
    progress.told_of_state("peer", 0, is_here=True)
    progress.told_of_state("peer", 0, is_here=False)
    progress.told_of_state("peer", 1, is_here=False)
    assert progress.is_follower("peer", 0)
    assert not progress.is_follower("peer", 1)
    progress.told_of_state("peer", 1, is_here=True)
    assert progress.is_follower("peer", 1)


def test_nobody_hangs_who_is_not_waited_for() -> None:
    waits, shard = SumWaits(), waiting(Ballot(1, PRIMARY), is_past=True)
    shard.members = {PRIMARY: MemberStatus(ALIVE), NEXT: MemberStatus(ALIVE, is_past=True)}
    assert waits.hung({0: shard}, began, 150.0, lambda _: LIMIT_S) == set()
    shard.begun = None
    assert waits.hung({0: shard}, began, 150.0, lambda _: LIMIT_S) == set()


def test_a_member_whose_word_keeps_a_dead_primary_alive_has_its_result_in_time() -> None:
    """What it says between two questions counts, and a new ballot begins anew."""
    held, shard = HeldUp(), waiting(Ballot(1, PRIMARY))
    shard.members[PRIMARY] = MemberStatus(DEAD)
    shard.host = NEXT
    assert held.found({0: shard}, 10.0, 5.0) == set()
    shard.host, shard.state = None, State.CANVASSING
    assert held.found({0: shard}, 14.9, 5.0) == set()
    assert held.found({0: shard}, 15.0, 5.0) == {NEXT}
    shard.ballot = Ballot(3, PRIMARY)
    assert held.found({0: shard}, 30.0, 5.0) == set()


@pytest.mark.parametrize("is_over", [True, False])
def test_nobody_is_blamed_for_a_primary_that_lives_or_a_result_that_is_there(
    is_over: bool,
) -> None:
    held, shard = HeldUp(), waiting(Ballot(1, PRIMARY))
    shard.members[PRIMARY] = MemberStatus(DEAD if is_over else ALIVE)
    shard.host = NEXT
    for now in (10.0, 20.0):
        shard.state = State.ADOPTED if is_over else State.FOLLOWING
        assert held.found({0: shard}, now, 5.0) == set()


def test_a_shard_is_unled_after_its_primary_has_been_dead_for_long() -> None:
    """It is told once. The wait begins anew with another primary, and after one that was back."""
    progress = ExchangeProgress()
    first, second = (waiting(Ballot(1, PRIMARY)) for _ in range(2))
    first.members = second.members = {PRIMARY: MemberStatus(DEAD), NEXT: MemberStatus(ALIVE)}
    shards = {0: first, 1: second}
    assert progress.unled(shards, 100.0, LIMIT_S) == []
    second.ballot = Ballot(2, NEXT)
    assert progress.unled(shards, 109.9, LIMIT_S) == []
    assert progress.unled(shards, 110.0, LIMIT_S) == [0]
    first.is_unled = True
    assert progress.unled(shards, 111.0, LIMIT_S) == []
    second.ballot = Ballot(1, PRIMARY)
    assert progress.unled(shards, 112.0, LIMIT_S) == []
    second.members = {PRIMARY: MemberStatus(ALIVE)}
    assert progress.unled(shards, 122.0, LIMIT_S) == []
    second.members = {PRIMARY: MemberStatus(DEAD)}
    assert progress.unled(shards, 123.0, LIMIT_S) == []
    assert progress.unled(shards, 133.0, LIMIT_S) == [1]
    second.state = State.GATHERING
    assert progress.unled(shards, 150.0, LIMIT_S) == []


def test_who_is_back_is_told_once_an_exchange() -> None:
    known = ExchangeProgress()
    silent, gone = {NEXT: MemberStatus(SUSPECT)}, {NEXT: MemberStatus(DEAD)}
    there = {NEXT: MemberStatus(ALIVE), PRIMARY: MemberStatus(ALIVE)}
    assert known.back(there) == set()
    assert known.is_usual
    assert known.back(silent) == set()
    assert known.back(gone) == set()
    assert known.back(there) == {NEXT}
    assert known.back(there) == set()
    assert not known.is_usual
    known.back(silent)
    assert known.back(there) == set()
