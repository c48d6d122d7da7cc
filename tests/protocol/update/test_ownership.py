"""Who is responsible for a shard, as records say."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnet.protocol.membership.records import ACTIVE, Record, bitmap
from swarmnet.protocol.sync_modes import GOSSIP, LEAST_QUORUM, LOCAL, ZERO, SyncPlan
from swarmnet.protocol.update import ownership, robust
from swarmnet.protocol.update.ownership import OUT_OF_REACH_S
from swarmnet.protocol.update.placement import Placement
from swarmnet.protocol.update.roster import Roster, first_ballot

PLAN = SyncPlan(ZERO, 100)
NUM_SHARDS = 2
ROUND = 9


def replica(
    name: str, holds: list[int], round_index: int = ROUND, fresh: list[int] | None = None
) -> Record:
    return Record(
        name,
        "run",
        1,
        1,
        state=ACTIVE,
        stage=0,
        round=round_index,
        holds=bitmap(holds, NUM_SHARDS),
        fresh=bitmap(fresh or [], NUM_SHARDS),
    )


def said(*records: Record) -> dict[str, Record]:
    return {r.peer_id: r for r in records}


def holders(records: dict[str, Record], *, has_state: bool = True) -> tuple[str, ...]:
    order = ("a", "own", "b", "c")
    return ownership.holders(order, records.get, PLAN, ROUND, 0, own="own", has_state=has_state)


def test_who_holds_the_state_is_said_by_its_record() -> None:
    records = said(replica("a", [1]), replica("own", [0]), replica("b", [0]), replica("c", [0]))
    assert holders(records) == ("own", "b", "c")
    assert holders(records, has_state=False) == ("b", "c"), "it knows better than its record"
    assert holders(said(replica("own", []))) == (), "the others do not know yet"


def test_who_has_just_taken_a_shard_over_comes_behind_the_others() -> None:
    records = said(replica("a", [0], fresh=[0]), replica("b", [0]), replica("c", [0], ROUND - 2))
    assert holders(records) == ("b", "a"), "c is a round too far behind to hold this one's state"


def test_the_next_in_order_help_owners_that_have_not_the_state_yet() -> None:
    placement = Placement(0, NUM_SHARDS, dict.fromkeys("abcd", 1.0), 2)
    order = placement.order(0)
    first, second, third, fourth = order
    all_hold = said(*(replica(p, [0]) for p in order))
    assert ownership.followers(placement, order, all_hold.get, 0) == (first, second)
    some = said(replica(first, []), replica(second, [0]), replica(fourth, [0]))
    assert ownership.followers(placement, order, some.get, 0) == (first, second, fourth)
    nobody = said()
    assert ownership.followers(placement, order, nobody.get, 0) == (first, second)
    assert third not in ownership.followers(placement, order, some.get, 0)


def roster(known: tuple[str, ...], order: str = "abc", **facts: Any) -> Roster:
    role: dict[str, Any] = {"own": "b", "is_holder": False, "may_lead": True, "clips": True}
    return ownership.first_roster(tuple(order), known, ("a",), **(role | facts))


def test_the_first_holder_is_primary() -> None:
    one = roster(("c", "b"))
    assert one.ballot == first_ballot("c", is_holder=True)
    assert one.order == ("c", "b", "a")
    assert one.holders == ("c", "b")
    assert one.backups == ("a",)


def test_where_nobody_has_said_so_the_own_state_counts_else_the_first_starts_afresh() -> None:
    assert roster((), is_holder=True).ballot == first_ballot("b", is_holder=True)
    assert roster((), is_holder=True, order="ac").ballot == first_ballot("a", is_holder=False)
    assert roster(()).ballot == first_ballot("a", is_holder=False)
    assert roster((), order="").ballot == first_ballot("", is_holder=False)


def test_one_that_holds_just_what_it_owns_will_say_the_same_again() -> None:
    assert ownership.is_settled(replica("a", [1]), [1], NUM_SHARDS)
    assert not ownership.is_settled(replica("a", [0, 1]), [1], NUM_SHARDS)
    assert not ownership.is_settled(replica("a", [1], fresh=[1]), [1], NUM_SHARDS)


@pytest.mark.parametrize(
    ("holds", "round_index", "waited_s", "is_kept"),
    [
        ([0], ROUND, 0.0, True),
        ([0], ROUND, OUT_OF_REACH_S, False),
        ([0], ROUND + 1, OUT_OF_REACH_S, True),  # it goes on, with the others
        ([1], ROUND, 0.0, False),
    ],
)
def test_a_holder_out_of_reach_is_waited_for(
    holds: list[int], round_index: int, waited_s: float, is_kept: bool
) -> None:
    lost = [replica("a", holds, round_index)]
    assert ownership.may_be_elsewhere(lost, PLAN, ROUND, 0, waited_s) == is_kept


def test_state_is_spare_when_all_owners_say_that_they_have_it_in_this_round() -> None:
    def is_spare(*records: Record) -> bool:
        return ownership.is_spare(0, ["a", "b"], said(*records).get, PLAN, ROUND)

    assert is_spare(replica("a", [0]), replica("b", [0]))
    assert not is_spare(replica("a", [0]), replica("b", []))
    assert not is_spare(replica("a", [0]))
    assert not is_spare(replica("a", [0]), replica("b", [0], ROUND - 1)), "before the step"
    assert not ownership.is_spare(0, [], {}.get, PLAN, ROUND), "nobody owns it"


def test_a_far_slower_uplink_leads_behind_all_others() -> None:
    """A half does not matter, and where all are alike nobody is slow."""
    weights = {"a": 8.0, "b": 8.0, "c": 4.0, "d": 1.0}
    found = ownership.without_slow(weights)
    assert found == weights | {"d": 1.0 * ownership.CUT_WEIGHT}
    assert ownership.without_slow({"a": 1.0, "b": 1.0}) == {"a": 1.0, "b": 1.0}
    assert ownership.without_slow({}) == {}


def measured(num: int, unknown: int = 0) -> list[Record]:
    rates = [0.0] * unknown + [1e6] * (num - unknown)
    return [Record(f"{i}", "run", 1, 1, upload_bytes_per_s=rate) for i, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("exchange", "quorum"),
    [(2, 0), (9, 2), (89, 2), (94, 0), (95, 0), (99, 0)],
    ids=["warm-up", "usual", "with half left", "short of that", "shortly before", "last"],
)
def test_where_a_later_exchange_has_what_is_late_a_quorum_is_enough(
    exchange: int, quorum: int
) -> None:
    plan = SyncPlan(LOCAL, 100, local_steps=10, warmup_rounds=5)
    assert ownership.quorum(plan, exchange, robust.MEAN, measured(6)) == quorum
    for mode in (ZERO, GOSSIP):
        other = SyncPlan(mode, 100, local_steps=10)
        assert ownership.quorum(other, exchange, robust.MEAN, measured(6)) == 0


def test_a_quorum_is_for_known_uplinks_and_has_a_majority_for_robust_rules() -> None:
    plan = SyncPlan(LOCAL, 100, local_steps=10)
    assert ownership.quorum(plan, 9, robust.MEAN, measured(6, unknown=1)) == 0
    assert ownership.quorum(plan, 9, robust.MEDIAN_CLIP, measured(6)) == robust.MIN_CONTRIBUTORS
    assert ownership.quorum(plan, 9, robust.MEDIAN_CLIP, measured(3)) == LEAST_QUORUM


def test_who_is_passed_over_comes_last_and_makes_steps_with_others() -> None:
    roster = Roster(
        first_ballot("a", is_holder=True), ("a", "b", "c"), ("a", "b"), ("b", "a"), is_holder=True
    )
    found = ownership.passing_over(roster, {"a"}.__contains__)
    assert found.ballot == first_ballot("b", is_holder=True)
    assert (found.order, found.holders) == (("b", "c", "a"), ("b", "a"))
    assert found.backups == ("b", "a")
    assert ownership.passing_over(roster, set[str]().__contains__) is roster
    alone = Roster(first_ballot("a", is_holder=True), ("a", "b"), ("a",))
    assert ownership.without(alone, {"a"}.__contains__).ballot.primary == "a"
    afresh = ownership.passing_over(alone, {"a"}.__contains__)
    assert (afresh.ballot, afresh.holders) == (first_ballot("b", is_holder=False), ())
    assert ownership.passing_over(alone, {"a", "b"}.__contains__) is alone
    assert ownership.without(roster, {"a"}.__contains__).backups == ("b",)
