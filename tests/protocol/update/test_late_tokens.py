"""Tokens that count in a later exchange than their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarmnet.methods.update import MirrorRequest, ReduceRequest, ShardReply
from swarmnet.protocol.sync_modes import LOCAL, ZERO, SyncPlan
from swarmnet.protocol.update.late_tokens import Late, added, by_age, joined, within


def test_they_are_told_by_how_many_exchanges_later_they_are() -> None:
    assert added([(5, 1), (), (2,), (0, 0, 4)]) == (7, 1, 4)
    assert added([]) == ()
    assert by_age({29: 7, 9: 4}, [29, 19, 9]) == (7, 0, 4)
    assert by_age({39: 7, 29: 3}, [29, 19, 9]) == (3,), "what is of another exchange is not there"
    assert by_age({}, [29, 19]) == ()


@pytest.mark.parametrize(("most", "found"), [(20, (5, 2, 4)), (8, (5, 2, 1)), (3, (3, 0, 0))])
def test_they_are_no_more_than_all_tokens(most: int, found: Late) -> None:
    assert within((5, 2, 4), most) == found


def test_messages_have_all_that_are_late_and_of_them_the_older_ones() -> None:
    assert joined(11, (2, 4)) == (5, 2, 4)
    assert joined(5, ()) == (5,)
    assert joined(0, ()) == ()


@pytest.mark.parametrize(
    ("late", "older", "is_right"),
    [
        (8, (2, 4), True),
        (11, (), False),
        (5, (2, 4), False),
        (8, (1, 1, 1), False),
        (3, (-1,), False),
    ],
    ids=["some", "more than all", "more older ones than late ones", "too old", "less than none"],
)
def test_what_cannot_be_is_refused(late: int, older: Late, is_right: bool) -> None:
    makes: list[Callable[[], object]] = [
        lambda: ReduceRequest(1, 0, (0,), (10,), (1,), late=(late,), older=(older,)),
        lambda: ShardReply(2, True, 10, late=late, older=older),
        lambda: MirrorRequest(1, 0, 0, 1.0, 3, num_tokens=10, late=late, older=older),
    ]
    for make in makes:
        if is_right:
            make()
        else:
            with pytest.raises(ValueError, match="more tokens that were late than tokens"):
                make()


def test_what_is_older_is_told_of_each_shard_that_has_late_ones() -> None:
    with pytest.raises(ValueError, match="not for each shard what was late for longer"):
        ReduceRequest(1, 0, (0, 1), (10, 10), (1, 1), late=(4, 0), older=((2,),))
    with pytest.raises(ValueError, match="not for each shard what was late for longer"):
        ReduceRequest(1, 0, (0,), (10,), (1,), older=((2,),))


def test_the_exchanges_before_one_are_those_of_its_shard() -> None:
    plan = SyncPlan(LOCAL, 100, local_steps=10, fragments=2, warmup_rounds=3)
    assert plan.exchanges_before(0, 29, 3) == [19, 9, 2]
    assert plan.exchanges_before(1, 24, 9) == [14, 4, 2, 1, 0]
    assert plan.exchanges_before(0, 0, 3) == []
    assert SyncPlan(ZERO, 100).exchanges_before(0, 5, 2) == [4, 3]
