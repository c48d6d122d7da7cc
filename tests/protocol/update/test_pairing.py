"""Who meets whom in mode `gossip`, and how long for."""

from __future__ import annotations

import pytest

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.sync_modes import GOSSIP, SyncPlan
from swarmnet.protocol.update.members import BEHIND_ROUNDS
from swarmnet.protocol.update.pairing import (
    OFFER_WAIT_S,
    OfferWait,
    is_out_of_touch,
    newest_round,
    partner,
    partner_of,
)


def member(name: str, round_index: int, state: str = ACTIVE) -> Record:
    return Record(name, "run", 1, 1, state=state, stage=0, round=round_index)


def test_only_who_is_not_past_the_round_is_met() -> None:
    members = [
        member("own", 5),
        member("there", 5),
        member("behind", 4, LEAVING),
        member("past", 6),
        member("joins", 5, JOINING),
    ]
    for r in range(5, 12):
        at_work = ["there", "behind"] + (["past"] if r >= 6 else [])
        assert partner_of("own", members, 0, r) == partner("own", at_work, 0, r)
    assert partner_of("own", [member("own", 5), member("past", 6)], 0, 5) is None


def test_the_newest_round_is_that_of_a_replica_at_work() -> None:
    members = [member("a", 7), member("b", 9, LEAVING), member("c", 9, JOINING)]
    assert newest_round(members, 3) == 7
    assert newest_round([], 3) == 3


@pytest.mark.parametrize("local_steps", [1, 8])
def test_a_replica_is_out_of_touch_when_others_have_had_a_whole_meeting_more(
    local_steps: int,
) -> None:
    plan = SyncPlan(GOSSIP, 100, local_steps)
    slack = max(BEHIND_ROUNDS, local_steps)
    assert not is_out_of_touch(plan, 20, 20 + slack)
    assert is_out_of_touch(plan, 20, 21 + slack)


def test_a_partner_is_waited_for_until_nothing_has_gone_on_for_long() -> None:
    wait = OfferWait(10 * OFFER_WAIT_S)
    wait.begin(100.0)
    wait.look(101.0, is_sending=True)
    assert not wait.is_over(100.9 + OFFER_WAIT_S), "something was on its way then"
    wait.asked(105.0)
    wait.look(106.0, is_sending=False)
    assert not wait.is_over(104.9 + OFFER_WAIT_S), "it has asked"
    assert wait.is_over(105.0 + OFFER_WAIT_S)


def test_a_partner_is_not_waited_for_longer_than_a_call_may_take() -> None:
    wait = OfferWait(25.0)
    wait.begin(100.0)
    for now in range(101, 125):
        wait.look(float(now), is_sending=True)
        assert not wait.is_over(float(now))
    assert wait.is_over(125.0)


def test_a_question_from_before_it_waits_does_not_end_the_wait() -> None:
    wait = OfferWait(60.0)
    wait.asked(50.0)
    wait.begin(100.0)
    wait.look(101.0, is_sending=False)
    assert not wait.is_over(109.0)
    assert wait.is_over(110.0)
