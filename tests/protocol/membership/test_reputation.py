"""Who counts: by what was seen of a peer, and by the word of those that were seen at work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    MAX_VOUCHES,
    OBSERVING,
    VOUCH_BYTES,
    Record,
    RoundCount,
)
from swarmnet.protocol.membership.reputation import (
    GRACE_ROUNDS,
    MAX_INTRODUCERS,
    Level,
    Reputation,
    name_of,
    tried_name_of,
)
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.progress import newest_round, round_progress
from swarmnet.protocol.slots import SlotSet
from tests.protocol.making import record, with_count


def vouches(*peer_ids: str) -> bytes:
    return b"".join(sorted(map(name_of, peer_ids)))


def working(own: str = "me", *proven: str) -> Reputation:
    """Of a peer whose grace is over, and which has seen these at work."""
    found = Reputation(own)
    for peer_id in proven:
        found.delivered(peer_id, ())
    for _ in range(GRACE_ROUNDS):
        found.round_began()
    return found


def test_all_count_where_nobody_has_been_seen_at_work() -> None:
    reputation = Reputation("me")
    assert reputation.counts("a")
    assert reputation.counts("me")
    assert reputation.level("a") is Level.UNKNOWN


def test_who_was_seen_at_work_counts_and_an_unknown_one_does_not() -> None:
    reputation = working("me", "a")
    assert reputation.counts("a")
    assert not reputation.counts("b")
    assert reputation.delivered("b", ())
    assert reputation.counts("b")
    assert not reputation.delivered("b", ()), "nothing new"


def test_the_word_of_one_that_was_seen_at_work_counts_and_no_other_word() -> None:
    reputation = working("me", "a")
    assert reputation.vouched("a", vouches("b"))
    assert not reputation.vouched("b", vouches("c")), "of a second one it changes nothing"
    assert not reputation.vouched("liar", vouches("liar", "d"))
    assert reputation.level("b") is Level.VOUCHED
    counted = [p for p in ("b", "c", "d", "liar") if reputation.counts(p)]
    assert counted == ["b"]


def test_a_word_is_taken_back_and_ends_with_the_trust_in_who_gave_it() -> None:
    reputation = working("me", "a", "z", "other")
    reputation.vouched("a", vouches("b", "c"))
    reputation.vouched("z", vouches("c"))
    reputation.vouched("a", vouches("b"))
    assert reputation.counts("b")
    assert reputation.counts("c")
    assert reputation.lied("a")
    assert not reputation.counts("b")
    assert reputation.counts("c")
    assert reputation.lied("z")
    assert not reputation.counts("c")


def test_the_own_peer_counts_as_the_others_would_have_it() -> None:
    reputation = working("me", "a")
    assert not reputation.counts("me")
    reputation.vouched("a", vouches("me"))
    assert reputation.counts("me")


def test_who_counted_at_the_first_proof_goes_on_for_a_while() -> None:
    reputation = Reputation("me")
    reputation.delivered("a", ("me", "b", "c"))
    assert all(reputation.counts(p) for p in ("me", "b", "c"))
    assert not reputation.counts("newcomer")
    for _ in range(GRACE_ROUNDS):
        assert reputation.counts("b")
        reputation.round_began()
    assert not reputation.counts("b")


def test_a_liar_does_not_count_again_under_any_seat() -> None:
    reputation = working("me", "a", "b", "b/2")
    reputation.vouched("a", vouches("b"))
    assert reputation.lied("b/2")
    assert not reputation.delivered("b", ())
    assert reputation.level("b") is reputation.level("b/2") is Level.BARRED
    assert not reputation.counts("b")
    reputation.forget("b")
    assert reputation.level("b") is Level.BARRED


def test_a_newcomer_goes_by_those_that_introduce_it_and_their_friends() -> None:
    """Until it has seen somebody at work itself, and a while longer."""
    reputation = Reputation("me")
    reputation.vouched("s", vouches("a"))
    reputation.vouched("a", vouches("b"))
    reputation.vouched("liar", vouches("liar", "other"))
    assert reputation.counts("liar"), "nothing is known yet"
    assert reputation.met("s")
    counted = {p for p in ("s", "a", "b", "liar", "other", "me") if reputation.counts(p)}
    assert counted == {"s", "a", "b"}
    reputation.vouched("b", vouches("me"))
    assert reputation.counts("me")
    reputation.delivered("x", ("s", "a", "b", "liar", "me"))
    counted = {p for p in ("s", "a", "b", "liar", "x", "me") if reputation.counts(p)}
    assert counted == {"s", "a", "b", "x", "me"}


def test_only_the_first_that_are_met_introduce_and_only_where_they_vouch() -> None:
    reputation = Reputation("me")
    assert not reputation.met("new"), "it vouches for nobody: all begin together"
    reputation.vouched("liar", vouches("other"))
    assert not reputation.met("liar")
    assert reputation.counts("anybody")
    reputation = Reputation("me")
    for i in range(MAX_INTRODUCERS + 2):
        reputation.vouched(f"s{i}", vouches(f"f{i}"))
    assert [reputation.met(f"s{i}") for i in range(MAX_INTRODUCERS + 1)][-1] is False


def test_where_one_was_named_no_other_introduces() -> None:
    """Not even one that vouches, and is met next."""
    reputation = Reputation("me")
    reputation.vouched("s", vouches("a"))
    reputation.vouched("liar", vouches("other"))
    assert reputation.met("s")
    reputation.named("s")
    assert not reputation.met("liar")
    assert reputation.counts("a")
    assert not reputation.counts("other")


def test_the_nearest_by_vouching_are_believed_however_many_others_there_are() -> None:
    """Also those for whom one vouches that was fooled: they are further away."""
    reputation = Reputation("me")
    names = [f"liar-{i}" for i in range(200)]
    assert reputation.nearest(["a", *names]) == ["a", *names], "nobody vouches for anybody"
    reputation.named("s")
    assert reputation.nearest(["a", "s", *names]) == ["s"]
    assert reputation.nearest(["a", *names]) == ["a", *names], "it has seen nobody yet"
    for name in names:
        reputation.vouched(name, vouches(*names[: MAX_VOUCHES - 1]))
    reputation.vouched("s", vouches("a", names[0]))
    reputation.vouched("a", vouches("b"))
    assert reputation.nearest(["a", "b", "s", *names]) == ["a", "s", names[0]]
    assert reputation.nearest(["b", *names[1:3]]) == ["b", *names[1:3]], "one step further"
    assert reputation.nearest(["c", "d"]) == [], "nobody vouches for them, and others do"
    assert reputation.is_introduced("b")
    assert not reputation.is_introduced("c")
    reputation.lied(names[0])
    assert reputation.nearest(["a", names[0]]) == ["a"]


def test_own_experience_ends_what_the_named_ones_say() -> None:
    reputation = Reputation("me")
    reputation.named("s")
    reputation.round_began()
    assert reputation.nearest(["s", "a"]) == ["s", "a"]
    reputation = working("me", "a")
    reputation.named("s")
    assert reputation.nearest(["s", "a"]) == ["a"]
    reputation.vouched("a", vouches("b"))
    reputation.vouched("b", vouches("c"))
    assert reputation.nearest(["s", "b", "c"]) == ["b"]
    assert reputation.nearest(["s", "c"]) == ["c"]


def test_an_onlooker_asks_those_that_are_nearest() -> None:
    view = View("me")
    view.merge(replace(record("me"), state=OBSERVING), 0.0)
    for peer_id in ("a", "b", "liar"):
        view.merge(replace(record(peer_id), stage=0, state=ACTIVE), 0.0)
    view.merge(replace(record("x"), stage=1, state=ACTIVE), 0.0)
    assert [r.peer_id for r in view.replicas(0, 0.0)] == ["a", "b", "liar"]
    view.merge(replace(record("a", version=2), stage=0, state=ACTIVE, vouches=vouches("b")), 0.0)
    view.named("a")
    assert [r.peer_id for r in view.replicas(0, 0.0)] == ["a", "b"]
    assert [r.peer_id for r in view.replicas(1, 0.0)] == ["x"], "the stage has no others"
    assert view.nearest(view.live(0.0, 1)) == []


def test_one_vouches_for_few() -> None:
    reputation = working("me", *(f"p{i}" for i in range(MAX_VOUCHES + 20)))
    told = reputation.vouches()
    assert len(told) == MAX_VOUCHES * VOUCH_BYTES
    assert name_of(f"p{MAX_VOUCHES + 19}") in told
    assert name_of("p0") not in told


def test_a_right_loss_is_not_work() -> None:
    """Who found one counts, here and by the word of those that work, and may have no gradient."""
    reputation = working("me", "a")
    assert reputation.found_loss("b")
    assert not reputation.found_loss("b"), "nothing new"
    reputation.vouched("a", tried_name_of("c"))
    assert reputation.level("b") is reputation.level("c") is Level.TRIED
    assert [p for p in ("a", "b", "c", "d") if reputation.counts(p)] == ["a", "b", "c"]
    assert [p for p in ("a", "b", "c", "d") if reputation.works(p)] == ["a"]
    reputation.vouched("b", vouches("d"))
    assert not reputation.counts("d"), "its word helps nobody"
    assert reputation.vouches() == b"".join(sorted((name_of("a"), tried_name_of("b"))))
    assert reputation.delivered("b", ())
    assert reputation.works("b")
    assert reputation.counts("d")
    assert reputation.vouches() == vouches("a", "b")
    assert not reputation.found_loss("b")
    reputation.vouched("a", vouches("c"))
    assert reputation.works("c")


@pytest.mark.parametrize("seed", range(20))
def test_what_was_asked_before_changes_no_answer(seed: int) -> None:
    rng = random.Random(seed)
    peers = [f"peer{i}" for i in range(8)]
    asked, history = Reputation("peer0"), list[Callable[[Reputation], object]]()
    for _ in range(150):
        peer_id, others = rng.choice(peers), b"".join(map(name_of, rng.sample(peers, 2)))
        happens = rng.choice(
            (
                partial(Reputation.vouched, by=peer_id, vouches=others),
                partial(Reputation.vouched, by=peer_id, vouches=tried_name_of(peer_id)),
                partial(Reputation.met, peer_id=peer_id),
                partial(Reputation.named, peer_id=peer_id),
                partial(Reputation.delivered, peer_id=peer_id, known=peers),
                partial(Reputation.found_loss, peer_id=peer_id),
                *(Reputation.round_began,) * 8,
                partial(Reputation.forget, peer_id=peer_id),
                *(partial(Reputation.lied, peer_id=peer_id),) * rng.randint(0, 1),
            )
        )
        history.append(happens)
        happens(asked)
        fresh = Reputation("peer0")
        for event in history:
            event(fresh)
        assert [asked.counts(p) for p in peers] == [fresh.counts(p) for p in peers]


def test_who_found_a_loss_is_forgotten_and_barred_as_others_are() -> None:
    reputation = working("me", "a")
    reputation.found_loss("b")
    reputation.forget("b")
    assert not reputation.counts("b")
    reputation.found_loss("b")
    assert reputation.lied("b")
    assert reputation.vouches() == vouches("a")
    assert not reputation.found_loss("b")
    assert reputation.level("b") is Level.BARRED


def test_a_newcomer_takes_a_right_loss_for_no_work_either() -> None:
    reputation = Reputation("me")
    reputation.vouched("s", b"".join(sorted((name_of("a"), tried_name_of("b")))))
    assert reputation.met("s")
    assert [p for p in ("s", "a", "b", "liar") if reputation.counts(p)] == ["s", "a", "b"]
    assert [p for p in ("s", "a", "b", "liar") if reputation.works(p)] == ["s", "a"]
    reputation.delivered("s", ("s", "a", "b", "liar", "me"))
    assert [p for p in ("s", "a", "b", "liar") if reputation.works(p)] == ["s", "a"]
    assert reputation.counts("b"), "by the word of one that works now"


# ---- what a view makes of it --------------------------------------------------------------------


def view_of(*records: Record, proven: tuple[str, ...]) -> View:
    """Of "me", long after these were seen at work."""
    view = View("me")
    for r in records:
        view.merge(r, 0.0)
    for peer_id in proven:
        view.delivered(peer_id)
    return view


def test_a_flood_of_names_changes_nothing() -> None:
    mine = record("me", stage=0, state=ACTIVE, round=5, has_data=True)
    view = view_of(mine, record("a", stage=1, state=ACTIVE, round=5), proven=("a",))
    everything = RoundCount(5, SlotSet.of(0xFF), SlotSet.of(0xFF), True, tokens=1000)
    for i in range(200):
        liar = record(f"liar-{i}", stage=i % 2, state=ACTIVE, round=9, has_data=True)
        view.merge(with_count(liar, everything), 1.0)
    assert [r.peer_id for r in view.counted(1.0)] == ["a", "me"]
    assert [r.peer_id for r in view.replicas(0, 1.0)] == ["me"]
    assert [r.peer_id for r in view.members(1, 1.0)] == ["a"]
    assert len(view.on_trial(0, 1.0)) == 100
    assert not view.is_past(5, 1.0)
    assert round_progress(view, 5, 1.0, 8).committed == 0


def test_who_found_a_loss_gets_work_and_no_exchange_waits_for_it() -> None:
    mine = record("me", stage=0, state=ACTIVE, round=5)
    others = [record(p, stage=0, state=ACTIVE, round=5) for p in ("a", "tried")]
    other = record("b", stage=1, state=ACTIVE, round=5, vouches=vouches("me"))
    view = view_of(mine, *others, other, proven=("a", "b"))
    for i in range(200):
        view.merge(record(f"liar-{i}", stage=i % 2, state=ACTIVE), 1.0)
    for round_index in range(6, 6 + GRACE_ROUNDS):
        view.merge(replace(mine, version=mine.version + round_index, round=round_index), 1.0)
    assert view.found_loss("tried")
    assert [r.peer_id for r in view.replicas(0, 1.0)] == ["a", "me", "tried"]
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "me"]
    assert view.delivered("tried")
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "me", "tried"]


def test_a_stage_that_has_no_others_takes_whoever_comes() -> None:
    mine = record("me", stage=0, state=ACTIVE)
    view = view_of(mine, record("a", stage=1, state=ACTIVE), proven=("a",))
    view.merge(record("b", stage=2, state=ACTIVE), 1.0)
    assert [r.peer_id for r in view.replicas(2, 1.0)] == ["b"]
    assert not view.on_trial(2, 1.0)


def test_newcomers_of_a_stage_are_seen_while_they_join() -> None:
    mine = record("me", stage=0, state=ACTIVE)
    view = view_of(mine, record("a", stage=1, state=ACTIVE), proven=("a",))
    view.merge(record("b", stage=1, state=JOINING), 1.0)
    assert [r.peer_id for r in view.members(1, 1.0)] == ["a", "b"]


def test_rounds_are_as_far_as_most_known_replicas_show() -> None:
    mine = record("me", stage=0, state=ACTIVE, round=5)
    others = [record(p, stage=k, state=ACTIVE, round=5) for p, k in (("a", 0), ("b", 1), ("c", 1))]
    view = view_of(mine, *others, proven=("a", "b", "c"))
    for i in range(8):
        view.merge(record(f"liar-{i}", stage=i % 2, state=ACTIVE, round=9), 1.0)
    assert not view.is_flooded(1.0)
    assert (view.shown_round(1.0), newest_round(view, 1.0)) == (5, 5), "nobody knows those"
    view.merge(record("b", 2, stage=1, state=ACTIVE, round=7), 1.0)
    assert not view.is_past(5, 1.0), "one of two, and of three"
    view.called("c", 6)
    assert view.is_past(5, 1.0), "a whole stage"
    assert not view.is_past(6, 1.0)


def test_one_known_replica_in_two_stages_ends_no_round() -> None:
    mine = record("me", stage=0, state=ACTIVE, round=5)
    honest = record("b", stage=1, state=ACTIVE, round=5)
    liar = record("liar", stage=0, state=ACTIVE, round=9)
    view = view_of(mine, honest, liar, proven=("b", "liar"))
    assert not view.is_past(5, 1.0)
    view.merge(record("b", 2, stage=1, state=ACTIVE, round=6), 1.0)
    assert view.is_past(5, 1.0)
    assert not view.is_past(6, 1.0)


def test_exchanges_have_known_members_also_where_there_is_no_flood() -> None:
    mine = record("me", stage=0, state=ACTIVE)
    others = [record(p, stage=k, state=ACTIVE) for p, k in (("a", 0), ("b", 1), ("new", 0))]
    view = view_of(mine, *others, proven=("b",))
    assert [r.peer_id for r in view.members(0, 1.0)] == ["a", "me", "new"]
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "me", "new"], "founders, or no other"
    view.merge(record("b", 2, stage=1, state=ACTIVE, vouches=vouches("a")), 1.0)
    for round_index in range(1, GRACE_ROUNDS + 1):
        view.merge(replace(mine, version=mine.version + round_index, round=round_index), 1.0)
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "me"]
    assert [r.peer_id for r in view.members(0, 1.0)] == ["a", "me", "new"]
    for silent in ("a", "new"):
        told = view.get(silent)
        assert told is not None
        view.reach.unanswered(silent, told.stamp, 1.0)
    assert [r.peer_id for r in view.lost(0, 1.0)] == ["a"], "the other one was never waited for"


def test_of_a_stage_that_is_far_no_word_comes_so_all_of_it_are_known() -> None:
    mine = record("me", stage=3, state=ACTIVE, round=8)
    others = [record(p, stage=k, state=ACTIVE) for p, k in (("moved", 0), ("b", 2))]
    view = view_of(mine, *others, proven=("moved", "b"))
    for p, k in (("a", 0), ("c", 2)):
        view.merge(record(p, stage=k, state=ACTIVE), 1.0)
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "moved"]
    assert [r.peer_id for r in view.known(2, 1.0)] == ["b"]
    view.merge(record("moved", 2, stage=0, state=ACTIVE, round=9), 1.0)
    assert not view.is_past(8, 1.0), "the only one of its stage that is known, and one of two"


def test_a_run_of_one_stage_and_a_large_one_have_all_members() -> None:
    mine = record("me", stage=0, state=ACTIVE)
    names = [f"p{i}" for i in range(MAX_VOUCHES)]
    view = view_of(mine, *(record(p, stage=0, state=ACTIVE) for p in names[:3]), proven=("p0",))
    view.merge(record("new", stage=0, state=ACTIVE), 1.0)
    assert len(view.known(0, 1.0)) == 5, "nobody sees what others compute for themselves"
    large = view_of(
        mine,
        record("x", stage=1, state=ACTIVE),
        *(record(p, stage=0, state=ACTIVE) for p in names),
        proven=("x", *names),
    )
    large.merge(record("new", stage=0, state=ACTIVE), 1.0)
    assert "new" in [r.peer_id for r in large.known(0, 1.0)], "records cannot name so many"


def test_who_is_known_in_a_stage_follows_from_the_records_of_others_too() -> None:
    mine = record("me", stage=0, state=ACTIVE, round=8)
    view = view_of(mine, record("a", stage=0, state=ACTIVE), proven=("a",))
    view.merge(record("new", stage=0, state=ACTIVE), 1.0)
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "me", "new"], "a run of one stage"
    view.merge(record("b", stage=1, state=ACTIVE), 1.0)
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "me"]
    view.merge(record("b", 2, stage=0, state=ACTIVE), 1.0)
    assert [r.peer_id for r in view.known(0, 1.0)] == ["a", "b", "me", "new"]


def test_who_has_lied_gets_no_work_and_is_waited_for_in_no_exchange() -> None:
    mine = record("me", stage=0, state=ACTIVE, round=5)
    others = [record(p, stage=k, state=ACTIVE, round=5) for p, k in (("a", 0), ("b", 1), ("c", 1))]
    view = view_of(mine, *others, proven=("a", "b", "c"))
    view.lied("a")
    view.lied("c")
    assert view.is_barred("a")
    assert [r.peer_id for r in view.in_reach(0, 1.0)] == ["me"]
    assert [r.peer_id for r in view.in_reach(1, 1.0)] == ["b"]
    assert [r.peer_id for r in view.known(0, 1.0)] == ["me"]
    view.merge(record("c", 2, stage=1, state=ACTIVE, round=9), 1.0)
    assert not view.is_past(5, 1.0)
    view.merge(record("b", 2, stage=1, state=ACTIVE, round=6), 1.0)
    assert view.is_past(5, 1.0), "half of the stage, and the only one that is heard"
    assert [r.peer_id for r in view.replicas(1, 1.0)] == ["b", "c"], "all agree on feeders"
