"""Which of two results of a round holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.agreement import MAX_SHARED, Agreement
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, LEFT, Record
from swarmnet.protocol.update import divergence
from swarmnet.protocol.update.divergence import best, donors, holding, newest, reached


def winner_over(own: Record, others: list[Record], *before: Record) -> Record | None:
    """`before`: records that had been heard earlier, the own ones too."""
    agreement = Agreement(own.peer_id)
    for one in (*before, own, *others):
        agreement.heard(one)
    return divergence.winner_over(own, others, agreement)


def record(peer_id: str, *, digest: bytes, samples: int = 32, round_index: int = 5) -> Record:
    return Record(peer_id, "run", 1, 1, ACTIVE, 0, round_index, digests=digest * 8, samples=samples)


def test_more_samples_win_then_the_lower_peer_id() -> None:
    low, high = record("a", digest=b"x"), record("b", digest=b"y")
    assert winner_over(high, [low]) == low
    assert winner_over(low, [high]) is None
    more = replace(high, samples=33)
    assert winner_over(low, [more]) == more
    assert winner_over(more, [low]) is None


def test_who_was_one_with_this_peer_is_known_for_long_and_so_many_of_them() -> None:
    """Not that of one that says goodbye: it is on no other side of a cut."""
    agreement, own = Agreement("own"), record("own", digest=b"x")
    agreement.heard(own)
    for i in range(MAX_SHARED + 2):
        agreement.heard(record(f"p{i}", digest=b"x"))
        agreement.forget(f"p{i}")
    agreement.heard(record("stranger", digest=b"y"))
    assert [agreement.shares(p) for p in ("p1", "p2", "stranger")] == [False, True, False]
    agreement.heard(Record("p2", "run", 1, 2, LEFT))
    assert not agreement.shares("p2")
    assert agreement.shares("p3")


def test_other_rounds_states_and_equal_parameters_do_not_matter() -> None:
    own = record("b", digest=b"x")
    assert winner_over(own, [record("a", digest=b"x")]) is None
    assert winner_over(own, [record("a", digest=b"y", round_index=6)]) is None
    assert winner_over(own, [replace(record("a", digest=b"y"), state=JOINING)]) is None
    assert winner_over(own, [replace(record("a", digest=b"y"), digests=b"")]) is None


def test_a_joiner_fetches_from_those_whose_parameters_hold() -> None:
    a, b, c = (
        record("a", digest=b"x"),
        record("b", digest=b"y", samples=40),
        record("c", digest=b"x"),
    )
    later = record("d", digest=b"z", round_index=6)
    assert holding([a, b, c, later]) == [a, c, later]
    assert holding([a, b, later]) == [b, later]


def test_donors_have_published_what_holds() -> None:
    a, b = record("a", digest=b"x"), record("b", digest=b"y", samples=40)
    others = [
        record("own", digest=b"y", samples=40),
        replace(b, peer_id="joins", state=JOINING),
        replace(b, peer_id="other size", digests=b"y" * 16),
        replace(b, peer_id="new", digests=b""),
    ]
    later = record("d", digest=b"z", round_index=6)
    assert donors([a, b, *others, later], "own", 1) == [b, later]
    assert donors([a, b, *others, later], "own", 1, 5) == [b]
    leaves = replace(a, state=LEAVING)
    assert donors([leaves, *others], "own", 1) == [leaves]
    assert donors([leaves, later], "own", 1) == [later], "it goes on"


def test_donors_are_those_that_give_what_the_believed_ones_have() -> None:
    names = [record(f"liar-{i}", digest=b"z", round_index=5 + i % 2) for i in range(20)]
    near, same = record("a", digest=b"x"), record("b", digest=b"x")

    def believed(replicas: Sequence[Record]) -> list[Record]:
        return [r for r in replicas if r.peer_id in ("a", "c")]

    there = [near, same, *names]
    assert donors(there, "own", 1) != [near, same]
    assert donors(there, "own", 1, None, believed) == [near, same]
    assert donors(there, "own", 1, 6, believed) == [], "they have not begun that round"
    assert donors([same, *names], "own", 1, None, believed) == donors([same, *names], "own", 1)


def began(peers: str, digest: bytes, round_index: int, samples: int = 32) -> list[Record]:
    return [record(p, digest=digest, round_index=round_index, samples=samples) for p in peers]


def test_what_one_peer_says_of_its_own_is_worth_nothing_beside_others_that_agree() -> None:
    honest, liar = began("bcd", b"x", 5), record("a", digest=b"y", samples=1 << 61)
    assert winner_over(honest[0], [*honest[1:], liar]) is None
    assert winner_over(liar, honest) == honest[0]
    assert best([*honest, liar]) == honest[0]
    assert holding([*honest, liar]) == honest
    assert donors([*honest, liar], "own", 1) == honest


def test_one_that_opens_a_round_first_keeps_its_parameters() -> None:
    """The others are with it by what they published of the round before."""
    first, liar = record("b", digest=b"x"), record("a", digest=b"y", samples=40)
    others = began("cd", b"w", 4)
    before = began("bcd", b"w", 4)
    assert winner_over(first, [*others, liar], *before) is None
    copier = record("a", digest=b"w", round_index=4)
    assert winner_over(first, [*others, liar], *before, copier) is None


def test_two_sides_of_a_partition_come_to_the_larger_one_when_all_is_known() -> None:
    together = began("abcde", b"w", 3)
    ours, theirs = began("ab", b"x", 5), began("cde", b"y", 5, samples=20)
    for own in ours:
        rest = [r for r in ours if r is not own]
        winner = winner_over(own, [*rest, *theirs], *together)
        assert winner is not None
        assert winner.digests == theirs[0].digests
        assert winner_over(own, [*rest, theirs[0]], *together) is None, "it has not heard of all"
    for own in theirs:
        assert winner_over(own, [*ours, *(r for r in theirs if r is not own)], *together) is None


def test_a_side_that_was_never_one_with_ours_wins_only_over_one_that_is_alone() -> None:
    ours, strangers = began("xy", b"x", 5), began("abc", b"y", 5)
    assert winner_over(ours[0], [ours[1], *strangers]) is None
    assert winner_over(ours[0], strangers) == strangers[0]
    once = began("xa", b"w", 1)
    assert winner_over(ours[0], [ours[1], *strangers], *once) == strangers[0]


def test_a_round_that_only_one_is_in_is_its_word() -> None:
    honest, liar = began("bcd", b"x", 5), record("a", digest=b"y", round_index=1 << 40)
    assert reached([*honest, liar]) == 5
    assert reached([*honest, *began("e", b"x", 6)]) == 6
    assert reached([*began("b", b"x", 90), *began("c", b"y", 5)]) == 90, "half of them"
    assert reached([]) == 0
    assert newest([*honest, liar]) == honest[0]
    assert donors([*honest, liar], "own", 1) == honest


@given(
    st.lists(
        st.tuples(st.sampled_from([b"x", b"y", b"z"]), st.integers(0, 3)), min_size=1, max_size=6
    ),
)
def test_who_sees_all_of_them_comes_to_the_best_one_and_that_one_stays(
    members: list[tuple[bytes, int]],
) -> None:
    records = [
        record(str(i), digest=digest, samples=samples)
        for i, (digest, samples) in enumerate(members)
    ]
    first = best(records)
    assert first is not None
    for own in records:
        others = [r for r in records if r != own]
        winner = winner_over(own, others)
        digests = own.digests if winner is None else winner.digests
        is_alone = all(r.digests != own.digests for r in others)
        assert digests == (first.digests if is_alone or own.digests == first.digests else digests)
        if own == first:
            assert winner is None
    together = [record(r.peer_id, digest=b"w", round_index=1) for r in records]
    for own, size in itertools.product(records, range(len(records))):
        seen = [r for r in records if r != own][:size]
        winner = winner_over(own, seen, *together)
        if size == len(records) - 1:
            digests = own.digests if winner is None else winner.digests
            assert digests == first.digests, "all of them are known"
