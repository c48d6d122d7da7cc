from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.indices import RoundCounters
from swarmnet.protocol.membership.records import Record
from tests.protocol.making import counted, record

records = st.builds(
    lambda counts: record("a", counts=tuple(counts)),
    st.lists(
        st.builds(counted, st.integers(0, 2), st.just(4), st.integers(0, 2)), min_size=1, max_size=3
    ),
)


def test_sums_follow_the_records() -> None:
    counters = RoundCounters()
    a = record("a", counts=(counted(3, launched=8, committed=8), counted(4, launched=2)))
    b = record("b", counts=(counted(3, launched=8, committed=5),))
    counters.add(b)
    counters.add(a)
    assert (counters.launched_at_most(3), counters.committed(3)) == (16, 13)
    assert (counters.launched_at_most(4), counters.committed(4)) == (2, 0)
    assert counters.by_peer(3) == [("a", a.counts[0]), ("b", b.counts[0])]
    counters.remove(a)
    assert (counters.launched_at_most(3), counters.committed(3)) == (8, 5)
    assert counters.by_peer(4) == []
    assert counters.committed(99) == 0


def test_of_two_counters_for_one_round_the_first_holds() -> None:
    counters = RoundCounters()
    twice = record("a", counts=(counted(3, launched=4), counted(3, launched=8)))
    counters.add(twice)
    assert counters.launched_at_most(3) == 4
    counters.remove(twice)
    assert counters.launched_at_most(3) == 0
    assert counters.by_peer(3) == []


@given(records, records)
def test_a_record_that_replaces_another_counts_as_if_it_were_alone(
    before: Record, after: Record
) -> None:
    """Whatever the counters of both have in common, and though one names a round twice."""
    counters, alone = RoundCounters(), RoundCounters()
    counters.add(record("b", counts=(counted(1, launched=3),)))
    alone.add(record("b", counts=(counted(1, launched=3),)))
    counters.add(before)
    counters.replace(before, after)
    alone.add(after)
    for r in range(3):
        assert counters.launched_at_most(r) == alone.launched_at_most(r)
        assert counters.committed(r) == alone.committed(r)
        assert counters.by_peer(r) == alone.by_peer(r)
