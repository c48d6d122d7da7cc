"""Who takes part in an exchange, as records say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmnet.protocol.membership.records import (
    ACTIVE,
    DIGEST_BYTES,
    JOINING,
    LEAVING,
    MAX_OWING,
    Owing,
    Record,
)
from swarmnet.protocol.sync_modes import DELAYED, LOCAL, ZERO, SyncPlan
from swarmnet.protocol.update import members
from swarmnet.protocol.update.members import (
    BEHIND_ROUNDS,
    RESTS,
    Absent,
    Hung,
    Owed,
    Replaced,
    Rests,
    may_contribute,
    shows_round,
)
from swarmnet.protocol.update.roster import ALIVE, DEAD, HUNG, MemberStatus

PLAN = SyncPlan(ZERO, 100)


def replica(name: str, round_index: int, state: str = ACTIVE, **said: Any) -> Record:
    return Record(name, "run", 1, 1, state=state, stage=0, round=round_index, **said)


def names(records: list[Record]) -> list[str]:
    return [r.peer_id for r in records]


@pytest.mark.parametrize(
    ("state", "stage", "may"),
    [
        (ACTIVE, 0, True),
        (LEAVING, 0, True),
        (JOINING, 0, False),
        (ACTIVE, 1, False),
    ],
)
def test_who_works_on_a_stage_may_have_a_gradient_of_it(state: str, stage: int, may: bool) -> None:
    assert may_contribute(replica("b", 3, state), stage) == may
    assert not may_contribute(None, stage)


def test_a_round_is_shown_to_be_over_by_who_works_in_it_alone() -> None:
    def shows(record: Record | None, stage: int = 0) -> bool:
        return shows_round(record, stage, 3)

    assert shows(replica("b", 3, ACTIVE))
    assert shows(replica("b", 3, LEAVING))
    assert not shows(replica("b", 3, JOINING))
    assert not shows(replica("b", 2))
    assert not shows(replica("b", 4))
    assert not shows(replica("b", 3), stage=2)
    assert not shows(None)


def test_possible_owners_were_there_when_the_round_began() -> None:
    records = [
        replica("here", 9),
        replica("cut off", 9 - BEHIND_ROUNDS - 1),
        replica("new", 9, active_from=10),
        replica("leaves", 9, LEAVING),
        replica("joins", 9, JOINING),
    ]
    assert names(members.candidates(records, PLAN, 9)) == ["here"]
    assert names(members.candidates(records[2:], PLAN, 9)) == ["new"], "all before it are gone"


def test_contributors_are_in_the_round_or_a_little_behind() -> None:
    records = [
        replica("here", 9),
        replica("late", 9 - BEHIND_ROUNDS, LEAVING),
        replica("too late", 9 - BEHIND_ROUNDS - 1),
        replica("past", 10),
        replica("new", 9, active_from=PLAN.next_owner_round(9) + 1),
        replica("joins", 9, JOINING),
    ]
    assert names(members.with_gradient(records, PLAN, 9)) == ["here", "late"]
    assert names(members.past(records, PLAN, 9)) == ["past"]
    own_steps = SyncPlan(LOCAL, 100, local_steps=8)
    assert "too late" in names(members.with_gradient(records, own_steps, 9))


def test_half_of_a_stage_shows_that_an_exchange_is_over_and_one_of_three_does_not() -> None:
    records = [replica("me", 9), replica("a", 9), replica("liar", 12)]
    assert names(members.past(records, PLAN, 9)) == ["liar"]
    assert not members.shown_past(records, PLAN, 9)
    assert names(members.shown_past([*records, replica("b", 10)], PLAN, 9)) == ["liar", "b"]
    assert names(members.shown_past(records[1:], PLAN, 9)) == ["liar"], "they are two"


def test_beside_rounds_who_is_in_the_exchange_before_is_waited_for() -> None:
    plan = SyncPlan(DELAYED, 100)
    at, late = plan.parameter_version(9), plan.parameter_version(8)
    records = {
        "here": replica("here", 9),
        "before": replica("before", 8),
        "begun": replica("begun", 8, declared=(at, 4)),
        "unknown": None,
    }
    assert late < at
    assert members.behind(records, plan, at) == ["before"]
    assert members.behind(records, PLAN, 9) == []


def test_most_replicas_say_how_many_shards_a_stage_has() -> None:
    def of(n: int) -> bytes:
        return bytes(DIGEST_BYTES * n)

    records = [replica(str(i), 0, digests=of(n)) for i, n in enumerate((0, 0, 0, 3, 3, 4))]
    assert members.num_shards(records) == 3
    assert members.num_shards(records[:3]) == 0


def test_a_record_says_what_its_replica_will_contribute() -> None:
    record = replica("here", 9, declared=(9, 40))
    assert members.status(record, PLAN, 9, ALIVE) == MemberStatus(ALIVE, 40, is_past=False)
    assert members.status(record, PLAN, 8, ALIVE) == MemberStatus(ALIVE, None, is_past=True)


def test_one_that_hangs_is_not_waited_for_until_it_has_finished_that_exchange() -> None:
    hung = Hung()
    hung.found_mute("a")
    hung.found("a", 9)

    def life(round_index: int) -> str:
        found = {"a": MemberStatus(ALIVE), "b": MemberStatus(ALIVE)}
        hung.mark(found, {"a": replica("a", round_index)}.get, PLAN, round_index)
        assert found["b"].life == ALIVE
        return found["a"].life

    assert life(9) == HUNG, "nobody had found it to hang when it did not answer"
    hung.found_mute("a")
    assert life(9) == DEAD
    assert life(10) == ALIVE
    assert life(9) == ALIVE, "it is forgotten"
    hung.found("a", 9)
    hung.works("a")
    assert life(9) == ALIVE


def test_one_that_hangs_again_and_only_says_that_it_goes_on_rests_twice_as_long() -> None:
    hung, waited_for = Hung(), []
    for exchange in range(100):
        found = {"a": MemberStatus(ALIVE)}
        hung.mark(found, {"a": replica("a", exchange)}.get, PLAN, exchange)
        if found["a"].life == ALIVE:
            waited_for.append(exchange)
            hung.found("a", exchange)
    assert waited_for == [0, 1, 1 + RESTS + 1, 10 + 2 * RESTS + 1, 27 + 4 * RESTS + 1]


def test_that_one_hung_is_forgotten_with_its_record() -> None:
    hung, records = Hung(), {"a": replica("a", 9)}
    for exchange in (9, 20):
        hung.mark({}, records.get, PLAN, exchange)
        hung.found("a", exchange)
        hung.found_mute("a")
    hung.mark({}, {}.get, PLAN, 21)
    found = {"a": MemberStatus(ALIVE)}
    hung.mark(found, records.get, PLAN, 21)
    assert found["a"].life == ALIVE
    hung.found("a", 21)
    found = {"a": MemberStatus(ALIVE, is_past=True)}
    hung.mark(found, records.get, PLAN, 22)
    assert found["a"].life == ALIVE, "it is the first time"


def test_of_one_that_gives_nothing_nothing_is_expected() -> None:
    """It lives all the same, and leads."""
    absent, records = Absent(), {"a": replica("a", 9)}
    absent.found("a", 0)
    for exchange in range(100):
        found = {"a": MemberStatus(ALIVE, 40)}
        absent.mark(found, records.get, exchange)
        assert found["a"].is_waited_for
        assert found["a"].declared == 0
    absent.did("a", 99)
    found = {"a": MemberStatus(ALIVE, 40)}
    absent.mark(found, records.get, 100)
    assert found["a"].declared == 40


def test_one_that_does_it_only_when_it_is_not_waited_for_is_so_ever_less_often() -> None:
    rests, waited_for = Rests(), []
    for exchange in range(100):
        if rests.rests("a", exchange):
            rests.did("a", exchange)
        else:
            waited_for.append(exchange)
            rests.found("a", exchange)
    again = 2 + RESTS + 1
    assert waited_for == [0, 2, again, again + RESTS**2 + 1]


def test_one_that_is_slow_is_waited_for_always() -> None:
    rests = Rests()
    for exchange in range(10):
        rests.found("a", exchange)
        rests.did("a", exchange - 1)  # that was of another exchange
        assert rests.rests("a", exchange)
        rests.did("a", exchange)
        assert not rests.rests("a", exchange)


def test_one_that_fails_now_and_then_is_waited_for_nearly_always() -> None:
    """Also where that was more often for an hour. Who does so on purpose gains little."""
    rests, num_rests, num_found = Rests(), 0, 0
    for exchange in range(100_000):
        fails = exchange < 60 or exchange % 1400 == 0
        if rests.rests("a", exchange):
            num_rests += 1
        elif fails:
            num_found += 1
            rests.found("a", exchange)
            continue
        if not fails:
            rests.did("a", exchange)
    assert num_rests < 1500
    assert num_found > 60

    rests, num_found = Rests(), 0
    for exchange in range(100_000):
        if rests.rests("a", exchange):
            rests.did("a", exchange)
        else:
            num_found += 1
            rests.found("a", exchange)
    assert num_found < 200


def test_who_is_replaced_rests_from_the_first_time_on_and_its_time_alone_counts() -> None:
    replaced, does = Replaced(), []
    for exchange in range(1000):
        if not replaced.rests("a", exchange):
            does.append(exchange)
            replaced.found("a", exchange)
    assert does == [0, RESTS**2 + 1, RESTS**2 + 1 + RESTS**3 + 1]
    replaced.forget({}.get)
    assert not replaced.rests("a", 1000)


@pytest.mark.parametrize(
    ("num_replicas", "least"), [(2, None), (3, 2), (4, 2), (5, 2), (6, 3), (9, 4)]
)
def test_who_is_passed_over_is_so_by_the_word_of_half_of_the_others(
    num_replicas: int, least: int | None
) -> None:
    """And of two: so never where one other is all. Its own word of others counts as any."""

    def found(num_words: int, exchange: int = 7) -> frozenset[str]:
        said = {"owing": (Owing("r0", 7, 9), Owing("r0", 7, 9), Owing("gone", 1, 2))}
        records = [
            replica(f"r{i}", 7, **(said if 1 <= i <= num_words else {}))
            for i in range(num_replicas)
        ]
        records[0] = replace(records[0], owing=(Owing("r0", 7, 9), Owing("r1", 7, 9)))
        return members.passed_over(records, exchange)

    for num_words in range(num_replicas):
        is_enough = least is not None and num_words >= least
        assert found(num_words) == ({"r0"} if is_enough else set())
    for exchange in (6, 10):
        assert not found(num_replicas - 1, exchange)


def test_what_is_said_of_who_owes_a_result_holds_from_the_exchange_after_the_next_on() -> None:
    """And is no other word where the next one owes it too."""
    owed = Owed()
    owed.found("a", 10)
    first = (Owing("a", 12, 10 + RESTS**2),)
    assert owed.words(10) == first
    assert not owed.owed_last("a", 10)
    assert owed.owed_last("a", 11)
    assert not owed.owed_last("b", 11)
    owed.found("a", 11)
    assert owed.words(11) == first
    assert not owed.owed_last("a", 12)
    over = 10 + RESTS**2 + 1
    assert owed.words(over) == ()
    owed.found("a", over)
    assert owed.words(over) == (Owing("a", over + 2, over + RESTS**3),)
    for i in range(MAX_OWING):
        owed.found(f"p{i:02}", over + 1)
    assert [one.peer_id for one in owed.words(over + 1)] == [f"p{i:02}" for i in range(MAX_OWING)]
