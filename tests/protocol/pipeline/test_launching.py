"""What a feeder may launch by what its view says (the numbers: `test_feeding`, `test_progress`)."""

from __future__ import annotations

from dataclasses import replace

from swarmnet.protocol.membership.records import LEAVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.launching import FeederView, Launches
from swarmnet.protocol.pipeline.progress import FEW_FEEDERS
from tests.protocol.making import counted, record, with_count

SLOTS = 8
PATIENCE_S = 1.0
SPREAD_S = 2.0


def known_to(
    own: Record,
    *others: Record,
    now: float = 0.0,
    is_small: bool = True,
    num_slots: int = SLOTS,
) -> FeederView:
    view = View(own.peer_id, silence_s=1e9)
    for one in (own, *others):
        view.merge(one, 0.0)
    return FeederView(view, own, now, SPREAD_S, is_small, num_slots)


def feeder(peer_id: str, launched: int = 0, first: int = 0, rate: float = 0.0) -> Record:
    own = record(peer_id, launched, has_data=True, samples_per_s=rate)
    return with_count(own, counted(0, launched=launched, first=first))


def test_the_only_feeder_launches_the_whole_round_and_no_more() -> None:
    launches = Launches(0)
    for n in range(SLOTS):
        assert known_to(feeder("a", n)).next_slot(launches, PATIENCE_S) == n
    assert known_to(feeder("a", SLOTS)).next_slot(launches, PATIENCE_S) is None


def test_who_is_leaving_or_has_no_data_feeds_no_more() -> None:
    assert known_to(feeder("a")).is_feeder()
    assert not known_to(record("a", state=LEAVING, has_data=True)).is_feeder()
    other = known_to(record("a"), feeder("b"))
    assert not other.is_feeder()
    assert other.next_slot(Launches(0), PATIENCE_S) is None


def test_of_two_feeders_each_launches_its_share_and_the_rest_when_the_other_is_quiet() -> None:
    launches, half = Launches(0), SLOTS // 2
    launches.begin(0.0)
    for n in range(half):
        known = known_to(feeder("b", n, first=half), feeder("a"))
        assert known.next_slot(launches, PATIENCE_S) == half + n
    launches.launched(1.0)

    def rest(now: float, by_other: int) -> int | None:
        known = known_to(feeder("b", half, first=half), feeder("a", by_other), now=now)
        return known.next_slot(launches, PATIENCE_S)

    assert rest(1.9, 0) is None
    assert rest(2.0, 0) in range(half)
    assert rest(2.1, 1) is None, "it is heard of"
    assert rest(3.0, 1) is None
    assert rest(3.1, 1) in range(1, half)


def test_what_is_heard_once_more_is_no_news_and_a_round_may_begin_anew() -> None:
    launches = Launches(0)
    launches.begin(5.0)
    launches.hear(3, 6.0)
    launches.hear(3, 9.0)
    assert (launches.quiet_s(10.0), launches.age_s(10.0)) == (4.0, 5.0)
    launches.launched(9.5)
    assert launches.quiet_s(10.0) == 0.5
    launches.begin(20.0)
    assert (launches.quiet_s(20.0), launches.age_s(20.0)) == (0.0, 0.0)


SHARE = 4


def many(now: float, *, own_launched: int = SHARE) -> FeederView:
    """More than a few feeders, of which only the first has done its share; the others have launched
    one slot each."""
    others = [feeder(f"p{i}", 1, first=SHARE * i) for i in range(1, FEW_FEEDERS + 1)]
    own, num_slots = feeder("p0", own_launched), SHARE * (FEW_FEEDERS + 1)
    return known_to(own, *others, now=now, is_small=False, num_slots=num_slots)


def test_one_of_many_leaves_the_rest_to_others_until_news_should_have_come() -> None:
    launches = Launches(0)
    launches.begin(0.0)
    launches.launched(0.0)
    assert not many(0.5, own_launched=0).leaves_to_others(launches), "its own share first"
    assert many(0.5).leaves_to_others(launches)
    assert many(0.5).next_slot(launches, PATIENCE_S) is None
    late = many(10 * SPREAD_S)
    assert not late.leaves_to_others(launches)
    assert late.next_slot(launches, PATIENCE_S) is not None
    few = known_to(feeder("a", SLOTS))
    assert not few.leaves_to_others(launches), "said of many feeders only"


def test_the_window_grows_with_what_has_counted_and_with_the_own_rate() -> None:
    alone = known_to(feeder("a"))
    assert alone.window(1, 0, shares=False) <= alone.window(1, 100, shares=False)
    fast = known_to(feeder("a", rate=8.0), feeder("b", rate=1.0), is_small=False)
    slow = known_to(feeder("b", rate=1.0), feeder("a", rate=8.0), is_small=False)
    assert fast.window(1, 100, shares=False) > slow.window(1, 100, shares=False)
    assert fast.window(1, 100, shares=True) == slow.window(1, 100, shares=True)


def test_in_a_large_swarm_where_most_feed_each_serves_itself() -> None:
    large = known_to(feeder("a"), feeder("b"), is_small=False)
    assert large.serves_itself(shares=False)
    assert not large.serves_itself(shares=True)
    assert not known_to(feeder("a"), feeder("b")).serves_itself(shares=False)
    few = known_to(feeder("a"), record("b"), record("c"), is_small=False)
    assert not few.serves_itself(shares=False)


def test_whose_replica_does_what_a_feeder_launches() -> None:
    slow = feeder("a", rate=1.0), feeder("b", rate=8.0)
    assert not known_to(*slow).does_own(1.0, 0.0)
    assert known_to(*slow).does_own(1.0, 2.0)
    assert known_to(*slow, is_small=False).does_own(1.0, 0.0), "it launches fewer there"
    elsewhere = replace(feeder("a", rate=8.0), stage=1)
    assert not known_to(elsewhere, feeder("b", rate=1.0)).does_own(0.0, 0.0)


def test_those_that_are_waited_for_divide_what_one_has_that_is_not() -> None:
    """And take turns where fewer slots are left than there are of them."""

    def known(own: str, now: float, held: int) -> FeederView:
        others = [feeder(p, 2, first=2 * n) for n, p in enumerate("abc")]
        mine = next(r for r in others if r.peer_id == own)
        liar = feeder("d", held, first=6)
        view = known_to(
            mine, *(r for r in others if r is not mine), liar, now=now, num_slots=6 + held
        )
        view.view.await_all_but(frozenset("d"), is_unknown_heard=True)
        return view

    launches = {own: Launches(0) for own in "abc"}

    def taken(now: float, held: int) -> list[int | None]:
        return [known(p, now, held).next_slot(launches[p], PATIENCE_S) for p in "abc"]

    assert taken(0.0, 2) == [6, 7, None]
    assert taken(0.0, 6) == [6, 8, 10]
    assert [taken(n * SPREAD_S, 1) for n in range(4)] == [
        [6, None, None],
        [None, None, 6],
        [None, 6, None],
        [6, None, None],
    ]
