"""From which round a run goes on when everybody was gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.membership.records import ACTIVE, MAX_RESTORABLE, Record, Restorable, bitmap
from swarmnet.protocol.membership.run_bounds import MAX_CLOCK_ERROR_MS
from swarmnet.protocol.recovery import (
    LOAD_PATIENCE_S,
    OLDER_AFTER_S,
    OLDER_S,
    RESTORE_PATIENCE_S,
    SETTLE_S,
    Begin,
    EmptyStage,
    Loading,
    Look,
    Open,
    Restore,
    Settling,
    Wait,
    candidates,
    for_running,
    history_of,
    is_covered,
    is_loading,
    is_running,
    left_behind,
    new_history,
    stage_of,
    to_take_over,
)
from swarmnet.wire import pack, unpack

SHARDS = 3


def offer(
    round_index: int, stage: int, held: list[int] | None = None, history: int = 1
) -> Restorable:
    holds = bitmap(list(range(SHARDS)) if held is None else held, SHARDS)
    return Restorable(round_index, stage, SHARDS, holds, history)


def joiner(name: str, stage: int, *offers: Restorable) -> Record:
    return Record(name, "run", 1, 1, stage=stage, restorable=offers)


def loaded(record: Record, round_index: int) -> Record:
    return replace(record, round=round_index, digests=bytes(8 * SHARDS))


def settled(records: list[Record], num_stages: int, now: float = OLDER_S) -> object:
    settling = Settling()
    settling.decide(records, num_stages, 0.0)
    return settling.decide(records, num_stages, now)


def test_where_nobody_has_anything_the_run_begins_at_once() -> None:
    assert Settling().decide([joiner("a", 0), joiner("b", 1)], 2, 0.0) == Begin()


def test_the_newest_whole_round_is_taken_once_the_offers_have_settled() -> None:
    a = joiner("a", 0, offer(10, 0), offer(20, 0))
    b = joiner("b", 1, offer(10, 1), offer(20, 1))
    settling = Settling()
    assert settling.decide([a], 2, 0.0) == Wait()
    assert settling.decide([a, b], 2, SETTLE_S - 0.1) == Wait(), "the offers had just changed"
    decision = settling.decide([a, b], 2, 2 * SETTLE_S)
    assert isinstance(decision, Restore)
    assert (decision.candidate.round, decision.candidate.is_whole) == (20, True)


def test_a_round_that_lacks_a_shard_is_passed_over() -> None:
    a = joiner("a", 0, offer(10, 0), offer(20, 0, [0, 1]))
    b = joiner("b", 0, offer(10, 0), offer(20, 0, [0]))
    decision = settled([a, b], 1)
    assert isinstance(decision, Restore)
    assert decision.candidate.round == 10
    assert candidates([a, b], 1)[0].missing_shards == ((0, 2),)


def test_an_older_round_is_not_taken_while_others_are_on_their_way() -> None:
    """Who is back first knows a whole round of a time when it was alone; those that learn of the
    run from it need longer than the offers need to settle."""
    first, later = joiner("a", 0, offer(10, 0), offer(20, 0, [0])), joiner("b", 0, offer(20, 0))
    settling = Settling()
    for now in (0.0, SETTLE_S, OLDER_S - 1.0):
        assert settling.decide([first], 1, now) == Wait()
    assert settling.decide([first, later], 1, OLDER_S - 0.5) == Wait()
    decision = settling.decide([first, later], 1, OLDER_S - 0.5 + SETTLE_S)
    assert isinstance(decision, Restore)
    assert decision.candidate.round == 20


def test_shards_may_be_spread_over_the_peers_of_a_stage() -> None:
    records = [joiner("a", 0, offer(20, 0, [0])), joiner("b", 0, offer(20, 0, [1, 2]))]
    assert settled(records, 1) == Restore(candidates(records, 1)[0])
    assert candidates(records, 1)[0].is_whole


def test_without_a_whole_round_patience_then_the_newest_with_all_parameters() -> None:
    a = joiner("a", 0, offer(20, 0, [0, 1]), offer(30, 0))
    b = joiner("b", 1, offer(20, 1))
    settling = Settling()
    settling.decide([a, b], 2, 0.0)
    waiting = settling.decide([a, b], 2, RESTORE_PATIENCE_S - 1)
    assert isinstance(waiting, Wait)
    assert waiting.reason == "round 30 lacks stage 1"
    decision = settling.decide([a, b], 2, RESTORE_PATIENCE_S)
    assert isinstance(decision, Restore)
    assert decision.candidate.round == 20
    assert decision.candidate.missing_shards == ((0, 2),)


def test_without_all_parameters_whoever_has_them_is_waited_for_without_end() -> None:
    a, b = joiner("a", 0, offer(30, 0)), joiner("b", 1, offer(30, 1))
    settling = Settling()
    settling.decide([a], 2, 0.0)
    for now in (RESTORE_PATIENCE_S, 100 * RESTORE_PATIENCE_S):
        assert settling.decide([a], 2, now) == Wait("round 30 lacks stage 1", True)
    decision = settling.decide([a, b], 2, 100 * RESTORE_PATIENCE_S + 1)
    assert isinstance(decision, Restore)
    assert decision.candidate.round == 30


def test_a_person_may_say_that_the_run_begins_anew() -> None:
    records = [joiner("a", 0, offer(30, 0)), joiner("b", 1, offer(30, 1))]
    assert Settling(begin_anew=True).decide(records, 2, 0.0) == Begin()


def test_checkpoints_of_two_histories_do_not_fit_together() -> None:
    a = joiner("a", 0, offer(20, 0, history=2), offer(10, 0, history=1))
    b = joiner("b", 1, offer(20, 1, history=1), offer(10, 1, history=1))
    decision = settled([a, b], 2)
    assert isinstance(decision, Restore)
    assert decision.candidate.round == 10


def test_the_newest_history_wins_over_a_later_round_of_an_older_one() -> None:
    records = [joiner("a", 0, offer(50, 0, history=1), offer(20, 0, history=2))]
    decision = settled(records, 1)
    assert isinstance(decision, Restore)
    assert (decision.candidate.history, decision.candidate.round) == (2, 20)


def test_a_round_begins_only_when_all_that_was_found_is_loaded() -> None:
    a, b = joiner("a", 0, offer(20, 0, [0])), joiner("b", 0, offer(20, 0, [1, 2]))
    c = joiner("c", 1, offer(20, 1))
    [chosen] = candidates([a, b, c], 2)
    assert not is_covered([loaded(a, 20), b, loaded(c, 20)], chosen, 2)
    assert not is_covered([loaded(a, 20), loaded(b, 20), c], chosen, 2)
    assert not is_covered([loaded(a, 20), loaded(b, 10), loaded(c, 20)], chosen, 2)
    assert is_covered([loaded(a, 20), loaded(b, 20), loaded(c, 20)], chosen, 2)


def test_a_redundant_holder_is_not_waited_for() -> None:
    a, b = joiner("a", 0, offer(20, 0)), joiner("b", 0, offer(20, 0, [0]))
    [chosen] = candidates([a, b], 1)
    assert is_covered([loaded(a, 20), b], chosen, 1)


def test_whoever_has_the_round_and_not_yet_in_memory_is_seen() -> None:
    a, b = joiner("a", 0, offer(20, 0)), joiner("b", 0, offer(20, 0), offer(10, 0))
    [chosen, older] = candidates([a, b], 1)
    assert chosen.round == 20
    assert is_loading([loaded(a, 20), b], chosen)
    assert is_loading([loaded(a, 20), loaded(b, 10)], chosen)
    assert not is_loading([loaded(a, 20), loaded(b, 20)], chosen)
    assert not is_loading([loaded(b, 10), a], older), "who does not have it is not waited for"


def test_an_active_replica_makes_the_run_live() -> None:
    a = joiner("a", 0, offer(20, 0))
    assert not is_running([a])
    assert is_running([a, replace(a, peer_id="b", state=ACTIVE)])


def test_a_stage_of_a_running_swarm_takes_the_very_round_or_the_one_before() -> None:
    own = [offer(10, 0), offer(20, 0), offer(30, 0)]
    assert for_running(own, 20) == own[1]
    assert for_running(own, 25) == own[1]
    assert for_running(own, 5) is None


def test_one_peer_with_nonsense_is_outvoted() -> None:
    honest = [joiner(name, 0, offer(20, 0)) for name in "ab"]
    liar = joiner("c", 0, Restorable(20, 0, 60_000, bitmap([], 60_000), 1))
    assert isinstance(settled([*honest, liar], 1), Restore)


def test_offers_travel_in_a_record_and_are_checked() -> None:
    record = joiner("a", 0, offer(20, 0))
    assert unpack(pack(record), Record) == record
    with pytest.raises(ValueError, match="shards of a checkpoint"):
        Restorable(20, 0, 9, b"\1")
    many = tuple(offer(r, 0) for r in range(MAX_RESTORABLE + 1))
    with pytest.raises(ValueError, match="checkpoints are out of range"):
        joiner("a", 0, *many)
    body = pack(record).replace(b"num_shards\x03", b"num_shards\x00")
    with pytest.raises(ProtocolViolation):
        unpack(body, Record)


def test_before_an_older_round_is_taken_or_moments_begin_anew_the_machine_is_looked_at() -> None:
    a = joiner("a", 0, offer(10, 0), offer(20, 0, [0, 1]))
    settling = Settling(looks=True)
    assert settling.decide([a], 1, 0.0) == Wait()
    assert settling.decide([a], 1, SETTLE_S) == Look()
    decision = settling.decide([a], 1, OLDER_S)
    assert isinstance(decision, Restore), "once"
    assert decision.candidate.round == 10
    whole = joiner("a", 0, offer(20, 0))
    settling = Settling(looks=True)
    settling.decide([whole], 1, 0.0)
    assert isinstance(settling.decide([whole], 1, SETTLE_S), Restore), "nothing is missing"


def test_where_nobody_has_anything_the_machine_is_looked_at_once() -> None:
    settling = Settling(looks=True, looks_first=True)
    assert settling.decide([joiner("a", 0)], 1, 0.0) == Look()
    assert settling.decide([joiner("a", 0)], 1, 0.0) == Begin()
    for anew in (Settling(looks=True), Settling(begin_anew=True, looks=True, looks_first=True)):
        assert anew.decide([joiner("a", 0)], 1, 0.0) == Begin()


def test_what_is_missing_of_the_own_stage_is_taken_over_once() -> None:
    found = candidates([joiner("a", 0, offer(20, 0, [0])), joiner("b", 1, offer(20, 1))], 2)
    unused = [offer(20, 0, [0, 1]), offer(20, 0, [1, 2]), offer(20, 0, [2]), offer(20, 1)]
    for newer in (False, True):
        assert to_take_over(unused, found, 0, newer=newer) == [(0, [1]), (1, [2])]
        assert to_take_over(unused, found, 1, newer=newer) == []
        older = [offer(10, 0), offer(20, 0, history=0), offer(30, 0, history=0)]
        assert to_take_over(older, found, 0, newer=newer) == []
    assert to_take_over([offer(30, 0, [1])], found, 0, newer=True) == [(0, [1])]
    assert to_take_over([offer(30, 0, [1])], found, 0, newer=False) == []


def test_parameters_are_taken_over_where_the_stage_has_none() -> None:
    found = candidates([joiner("b", 1, offer(20, 1))], 2)
    unused = [offer(20, 0, []), offer(20, 0, []), offer(20, 0, [1])]
    assert to_take_over(unused, found, 0, newer=False) == [(0, []), (2, [1])]
    both = [offer(20, 0, [0]), offer(10, 0, [0])]
    assert to_take_over(both, [], 0, newer=True) == [(0, [0]), (1, [0])]
    assert to_take_over(both, [], 0, newer=False) == []


def test_a_round_that_another_peer_loads_is_waited_for_as_long_as_that_may_take() -> None:
    a, b = joiner("a", 0, offer(20, 0)), joiner("b", 0, offer(20, 0))
    (chosen,) = candidates([a, b], 1)
    live, loading = [loaded(a, 20), b], Loading()
    assert loading.choose(chosen, 0.0)
    assert not loading.choose(chosen, 1.0)
    assert loading.may_open(live, 1, waits_for_all=False), "all that was chosen is loaded"
    assert not loading.may_open(live, 1, waits_for_all=True), "the steps of b are nowhere else"
    loading.pass_time(live, LOAD_PATIENCE_S)
    assert loading.waited_for(live) == live
    loading.pass_time(live, LOAD_PATIENCE_S + 1.0)
    assert loading.waited_for(live) == live[:1]
    assert loading.may_open(live, 1, waits_for_all=True)


def test_another_round_gets_the_whole_time_again() -> None:
    a = joiner("a", 0, offer(10, 0), offer(20, 0))
    newer, older = candidates([a], 1)
    loading = Loading()
    loading.pass_time([a], 2 * LOAD_PATIENCE_S)
    loading.choose(newer, 0.0)
    assert loading.choose(older, LOAD_PATIENCE_S)
    loading.pass_time([a], 2 * LOAD_PATIENCE_S)
    assert loading.waited_for([a]) == [a]


def test_an_empty_stage_goes_on_from_the_very_round_at_once_and_from_an_older_one_later() -> None:
    own = [offer(10, 0), offer(20, 0)]
    members = [joiner("a", 0, *own)]
    stage = EmptyStage()
    assert stage.decide(own, members, 20, 0.0) == Look(), "at the machine, first"
    assert stage.decide(own, members, 20, 0.0) == Open(own[1])
    assert stage.decide(own, members, 25, 1.0) == Wait()
    assert stage.decide(own, members, 25, 0.5 + OLDER_AFTER_S) == Wait()
    assert stage.decide(own, members, 25, 1.0 + OLDER_AFTER_S) == Open(own[1])


def test_whoever_has_the_newest_checkpoint_of_an_empty_stage_opens_it() -> None:
    own, theirs = [offer(10, 0)], offer(20, 0)
    members = [joiner("a", 0, *own), joiner("b", 0, theirs)]
    stage = EmptyStage()
    stage.decide(own, members, 25, 0.0)
    assert stage.decide(own, members, 25, 0.0) == Wait()
    assert stage.decide(own, members, 25, OLDER_AFTER_S) == Wait()
    assert stage.decide(own, members, 25, RESTORE_PATIENCE_S) is None
    assert stage.decide(own, members[:1], 25, RESTORE_PATIENCE_S) == Open(own[0])


def test_an_empty_stage_of_which_nothing_is_saved_is_not_waited_for() -> None:
    stage, nobody = EmptyStage(), [joiner("a", 0)]
    stage.decide([], nobody, 5, 0.0)
    assert stage.decide([], nobody, 5, 0.0) is None
    own = [offer(3, 0)]  # it comes later, and gets the whole time from then on
    assert stage.decide(own, [joiner("a", 0, *own)], 5, OLDER_AFTER_S) == Wait()


def test_a_peer_serves_its_last_stage_again_unless_another_is_empty() -> None:
    own = [offer(10, 1), offer(20, 0)]
    whole, joined, empty = (True, True), (False, True), (False, False)
    assert stage_of(own, [whole, whole]) == 0
    assert stage_of(own, [empty, empty]) == 0
    assert stage_of(own, [whole, empty]) is None
    assert stage_of(own, [joined, empty]) == 0
    assert stage_of([], [whole, whole]) is None
    assert stage_of([offer(20, 5)], [whole, whole]) is None


def test_the_history_is_that_of_the_active_and_a_new_one_is_above_all() -> None:
    records = [
        Record("a", "run", 1, 1, state=ACTIVE, history=7),
        replace(joiner("b", 0, offer(10, 0, history=9)), history=8),
    ]
    assert history_of(records, 3) == 7
    assert history_of(records, 12) == 12
    assert new_history(records, 5) == 10
    assert new_history(records, 50) == 50
    wrong = replace(records[0], history=MAX_CLOCK_ERROR_MS + 5)
    assert new_history([wrong], 5) == 5


def test_what_this_machine_has_beyond_the_run_is_left_behind() -> None:
    own = [offer(10, 0, history=1), offer(20, 0, history=1), offer(30, 0, history=2)]
    assert left_behind(own, 2, 5) == 20
    assert left_behind(own, 2, 20) is None
    assert left_behind(own, 1, 5) is None
