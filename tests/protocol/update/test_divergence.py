"""Which of two results of a round holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.update.divergence import best, donors, holding, winner_over


def record(peer_id: str, *, digest: bytes, samples: int = 32, round_index: int = 5) -> Record:
    return Record(peer_id, "run", 1, 1, ACTIVE, 0, round_index, digests=digest * 8, samples=samples)


def test_more_samples_win_then_the_lower_peer_id() -> None:
    low, high = record("a", digest=b"x"), record("b", digest=b"y")
    assert winner_over(high, [low]) == low
    assert winner_over(low, [high]) is None
    more = replace(high, samples=33)
    assert winner_over(low, [more]) == more
    assert winner_over(more, [low]) is None


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
    assert holding([a, b, c, later]) == [b, later]


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


@given(
    st.lists(
        st.tuples(st.sampled_from([b"x", b"y", b"z"]), st.integers(0, 3)), min_size=1, max_size=6
    ),
)
def test_whatever_each_of_them_sees_the_best_one_stays_and_all_come_to_it(
    members: list[tuple[bytes, int]],
) -> None:
    records = [
        record(str(i), digest=digest, samples=samples)
        for i, (digest, samples) in enumerate(members)
    ]
    first = best(records)
    assert first is not None
    for own, size in itertools.product(records, range(len(records))):
        seen = [r for r in records if r != own][:size]
        winner = winner_over(own, seen)
        if own == first:
            assert winner is None
        elif first in seen and own.digests != first.digests:
            assert winner is not None
            assert winner.digests == first.digests
