"""Whose records go first."""

from __future__ import annotations

import random

from swarmnet.protocol.membership.preference import in_order, matters, num_that_fit
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.membership.view import View

RUN = "run"


def view_of(*records: Record) -> View:
    view = View("own")
    view.merge(Record("own", RUN, 1, 1, state=ACTIVE, stage=0), 0.0)
    for record in records:
        view.merge(record, 0.0)
    return view


def serving(name: str) -> Record:
    return Record(name, RUN, 1, 1, state=ACTIVE, stage=0)


def test_a_peer_matters_that_serves_and_is_reached() -> None:
    looks = Record("looks", RUN, 1, 1, state=OBSERVING)
    view = view_of(serving("a"), serving("b"), serving("c"), looks)
    for machine in ("a", "c", "looks", "nobody"):
        view.detector.opened(machine)
    view.reach.unanswered("c", (1, 1), 0.0)
    assert matters(view, "own", 0.0)
    assert [p for p in ("a", "b", "c", "looks", "nobody") if matters(view, p, 0.0)] == ["a"]
    assert not matters(view, "a", 1e6), "it has fallen silent"


def test_members_come_first_and_all_others_have_their_turn() -> None:
    names = [f"fresh-{i}" for i in range(50)]
    view = view_of(serving("z"), *(Record(n, RUN, 1, 1) for n in names))
    view.detector.opened("z")
    rng, firsts = random.Random(0), set()
    for _ in range(300):
        found = in_order(view, [*names, "z", "own"], rng, 0.0)
        assert found[:2] == ["own", "z"]
        assert sorted(found[2:]) == sorted(names)
        firsts.add(found[2])
    assert len(firsts) > 45


def test_as_many_fit_as_there_is_room_for() -> None:
    assert num_that_fit([5, 5, 5], 10, 99) == 2
    assert num_that_fit([5, 5, 5], 100, 2) == 2
    assert num_that_fit([5, 5, 5], 100, 99) == 3
    assert num_that_fit([], 10, 99) == 0
