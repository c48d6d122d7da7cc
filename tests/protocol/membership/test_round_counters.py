from __future__ import annotations

from swarmnet.protocol.membership.indices import RoundCounters
from tests.protocol.making import counted, record


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
