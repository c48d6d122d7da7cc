"""Which rounds a peer saves and keeps, and which one is fetched of those that peers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import DIGEST_BYTES
from swarmnet.protocol.saved_rounds import (
    KEEP_S,
    MAX_KEPT,
    OVERDUE_S,
    STRIDES,
    AskAgain,
    CheckpointPace,
    Choose,
    Fetch,
    KeptRounds,
    Key,
    NothingToHave,
    SavedRounds,
)

# ---- which rounds a peer saves ----------------------------------------------------------------


def test_each_interval_is_saved_and_the_last_round_in_any_case() -> None:
    pace = CheckpointPace(every=3, rounds=10)
    assert [r for r in range(11) if pace.is_due(r, is_writing=False)] == [3, 6, 9, 10]
    assert [r for r in range(11) if pace.is_due(r, is_writing=True)] == [10]


def test_a_slow_disk_gets_every_second_checkpoint_and_comes_back_a_step_at_a_time() -> None:
    pace = CheckpointPace(every=2, rounds=100)
    assert pace.took(2)
    assert pace.interval == 4
    assert pace.took(9)
    assert pace.interval == 16
    assert not pace.took(2 * STRIDES[-1])
    assert [(pace.took(0), pace.interval)[1] for _ in range(4)] == [8, 4, 2, 2]


# ---- which rounds are kept for others ---------------------------------------------------------


def test_a_round_is_kept_as_long_as_somebody_says_so() -> None:
    kept = KeptRounds()
    kept.keep(7, 0.0, by="a", saved={7})
    kept.keep(7, KEEP_S - 1.0, by="a", saved={7})
    assert kept.at(2 * KEEP_S - 1.5) == {7}
    assert kept.at(2 * KEEP_S - 1.0) == set()
    assert kept.rounds == ()


def test_where_all_places_are_taken_an_overdue_round_gives_way() -> None:
    kept, saved = KeptRounds(), {*range(MAX_KEPT), 99}
    for r in range(MAX_KEPT):
        kept.keep(r, float(r), by=str(r), saved=saved)
    kept.keep(99, OVERDUE_S - 0.5, by="z", saved=saved)
    assert kept.rounds == tuple(range(MAX_KEPT))
    kept.keep(0, OVERDUE_S - 0.5, by="0", saved=saved)  # it has its place
    kept.keep(99, OVERDUE_S + 1.0, by="z", saved=saved)
    assert kept.rounds == (0, *range(2, MAX_KEPT), 99)


def test_a_round_that_is_not_there_takes_no_place() -> None:
    kept = KeptRounds()
    for r in (5, 6, 2**61):
        kept.keep(r, 0.0, by=str(r), saved={7, 8})
    assert kept.rounds == ()


def test_a_peer_that_names_the_round_of_another_does_not_end_it() -> None:
    kept = KeptRounds()
    kept.keep(10, 0.0, by="slow", saved=range(100))
    for n, round_index in enumerate((10, 20, 30, 40, 50)):
        kept.keep(round_index, 1.0 + n, by="liar", saved=range(100))
    assert kept.at(6.0) == {10, 40, 50}, "what only the liar has named gives way"


def test_one_peer_does_not_take_the_places_of_others() -> None:
    kept, saved = KeptRounds(), set(range(100))
    kept.keep(50, 0.0, by="a", saved=saved)
    for r in range(20):
        kept.keep(r, 1.0 + r, by="liar", saved=saved)
    assert kept.rounds == (18, 19, 50)
    kept.keep(51, 30.0, by="b", saved=saved)
    assert kept.rounds == (18, 19, 50, 51)
    kept.keep(18, 40.0, by="b", saved=saved)  # somebody else goes by it now
    kept.keep(99, 41.0, by="liar", saved=saved)
    assert kept.rounds == (18, 19, 50, 51), "all places are taken, and nobody's is overdue"


# ---- which round is fetched -------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    history: int
    round: int
    stage: int
    digests: bytes = bytes(2 * DIGEST_BYTES)


@dataclass(frozen=True)
class Said:
    rounds: Sequence[Part]
    kept: Sequence[int] = ()
    held_out: Mapping[int, float] = field(default_factory=dict)


def two_stages(**answers: Said) -> SavedRounds:
    saved = SavedRounds([2, 2])
    for peer_id, answer in answers.items():
        saved.answered(peer_id, answer)
    return saved


def said(stage: int, *rounds: int, kept: Sequence[int] = ()) -> Said:
    return Said([Part(1, r, stage) for r in rounds], kept)


def newest(keys: Sequence[Key], losses: Mapping[int, float]) -> Key | None:
    return next(iter(keys), None)


def decide(
    saved: SavedRounds,
    begun: Sequence[Key] = (),
    *,
    choose: Choose = newest,
    is_silent: bool = False,
    is_patient: bool = True,
) -> object:
    decision = saved.decide(choose, begun, is_silent=is_silent, is_patient=is_patient)
    return decision.key if isinstance(decision, Fetch) else decision


def test_the_newest_round_that_is_there_with_all_stages_is_fetched() -> None:
    saved = two_stages(a=said(0, 2, 4, 6), b=said(1, 2, 4))
    assert decide(saved) == (1, 4)
    assert sorted(saved.offers()) == [(1, 2), (1, 4)]


def test_one_of_which_parts_have_come_goes_first() -> None:
    saved = two_stages(a=said(0, 2, 4), b=said(1, 2, 4))
    assert decide(saved, [(1, 2)]) == (1, 2)


def test_parts_that_have_come_are_not_thrown_away_while_their_holder_may_be_back() -> None:
    saved = two_stages(a=said(0, 2, 4), b=said(1, 4))
    assert decide(saved, [(1, 2)], is_silent=True) == AskAgain()
    assert decide(saved, [(1, 2)], is_silent=True, is_patient=False) == (1, 4)
    assert decide(saved, [(1, 2)]) == (1, 4)


def test_answers_of_different_moments_are_asked_for_again_for_a_while() -> None:
    saved = two_stages(a=said(0, 4), b=said(1, 5))
    assert decide(saved) == AskAgain()
    assert decide(saved, is_patient=False) == NothingToHave()
    assert decide(saved, is_patient=False, is_silent=True) == AskAgain()


def test_a_stage_that_nobody_has_saved_is_not_asked_for_again() -> None:
    assert decide(two_stages(a=said(0, 4))) == NothingToHave()


def test_what_no_round_satisfies_is_raised_when_all_have_answered() -> None:
    def never(keys: Sequence[Key], losses: Mapping[int, float]) -> Key | None:
        raise UserError("none was measured")

    saved = two_stages(a=said(0, 4), b=said(1, 4))
    assert saved.decide(never, [], is_silent=True, is_patient=True) == AskAgain()
    with pytest.raises(UserError, match="none was measured"):
        saved.decide(never, [], is_silent=False, is_patient=True)


def test_what_most_peers_of_a_stage_say_holds() -> None:
    lie = Said([Part(1, 4, 1, bytes([7]) * 2 * DIGEST_BYTES)])
    saved = two_stages(a=said(0, 4), b=lie, c=said(1, 4), d=said(1, 4))
    offer = saved.offers()[1, 4]
    assert offer.digest(1, 1) == bytes(DIGEST_BYTES)
    assert offer.peers == ["a", "c", "d"]


def test_one_that_does_not_have_what_it_says_is_not_asked_for_it_again() -> None:
    saved = two_stages(a=said(0, 4), b=said(1, 4), c=said(1, 4))
    offer = saved.offers()[1, 4]
    saved.refused(offer, 1, "b")
    assert offer.holders == [["a"], ["c"]]
    assert saved.offers()[1, 4].holders == [["a"], ["c"]]
    saved.refused(offer, 1, "c")
    assert not saved.offers()


def test_parts_of_a_shape_that_cannot_be_are_passed_over() -> None:
    odd = Said([Part(1, 4, 9), Part(1, 4, 1, bytes(3))])
    assert not two_stages(a=said(0, 4), b=odd).offers()


def test_one_that_is_silent_has_said_nothing() -> None:
    saved = two_stages(a=said(0, 4), b=said(1, 4))
    saved.unanswered("b")
    assert saved.silent(["a", "b", "c"]) == ["b", "c"]
    assert not saved.offers()


def test_after_a_round_has_gone_one_that_is_kept_goes_first() -> None:
    saved = two_stages(a=said(0, 2, 4, kept=[2]), b=said(1, 2, 4, kept=[2, 4]))
    chosen = saved.decide(newest, [], is_silent=False, is_patient=True)
    assert isinstance(chosen, Fetch)
    assert saved.keepable(chosen, newest).key == (1, 4)
    saved.gone()
    assert saved.keepable(chosen, newest).key == (1, 2)
    saved.answered("a", said(0, 2, 4, kept=[2, 4]))
    assert saved.keepable(chosen, newest).key == (1, 4)


def test_what_many_say_that_nobody_knows_is_not_to_be_had() -> None:
    lie = bytes([7]) * 2 * DIGEST_BYTES
    rounds = [Part(1, r, stage, lie) for r in (4, 6) for stage in (0, 1)]
    answers = {f"liar-{i}": Said(rounds) for i in range(20)}
    answers |= {"a": said(0, 2, 4), "b": said(1, 2, 4), "also": said(1, 4)}
    assert decide(two_stages(**answers)) == (1, 6)
    saved = SavedRounds([2, 2], lambda peer_ids: [p for p in peer_ids if p in ("a", "b")])
    for peer_id, answer in answers.items():
        saved.answered(peer_id, answer)
    assert decide(saved) == (1, 4)
    assert saved.offers()[1, 4].holders == [["a"], ["also", "b"]], "they have the same"
    assert saved.offers()[1, 4].digest(0, 0) == bytes(DIGEST_BYTES)


def saved_by(*answers: Said) -> SavedRounds:
    return two_stages(**dict(zip("abcdefgh", answers, strict=False)))


def test_a_round_that_one_peer_says_alone_is_taken_only_where_no_other_will_do() -> None:
    honest = [said(stage, 2, 4) for stage in (0, 0, 0, 1, 1, 1)]
    own = [Part(1 << 40, 6, 0), Part(1 << 40, 6, 1), Part(1, 8, 0), Part(1, 8, 1)]
    saved = saved_by(*honest, Said(own))
    assert decide(saved) == (1, 4)
    wanted = decide(saved, choose=lambda keys, _: next((k for k in keys if k[1] == 8), None))
    assert wanted == (1, 8), "a person has asked for it"


def test_most_of_those_that_heard_a_loss_say_what_it_was() -> None:
    heard = {0: 5.0, 10: 4.0, 20: 3.0}
    honest = [Said([Part(1, 20, k % 2)], held_out=heard) for k in range(4)]
    liar = Said([Part(1, 20, 0)], held_out={0: 5.0, 10: 0.01, 15: 0.01, 20: 0.01, 90: 0.01})
    seen: list[Mapping[int, float]] = []

    def look(keys: Sequence[Key], losses: Mapping[int, float]) -> Key | None:
        seen.append(dict(losses))
        return newest(keys, losses)

    decide(saved_by(*honest, liar), choose=look)
    assert seen[0] == heard
    alone = saved_by(said(0, 4), Said([Part(1, 4, 1)], held_out={0: 5.0, 4: 4.5}))
    decide(alone, choose=look)
    assert seen[-1] == {0: 5.0, 4: 4.5}
