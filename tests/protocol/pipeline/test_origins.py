"""Whose microbatches a replica takes, and who may bring them."""

from __future__ import annotations

from swarmnet.protocol.membership.records import JOINING, LEAVING
from swarmnet.protocol.membership.reputation import GRACE_ROUNDS
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.contests import waits_s
from swarmnet.protocol.pipeline.origins import Origins
from tests.protocol.making import record

NOW = 1000.0
USUAL_S = 2.0
"""That a microbatch is at a replica."""


def viewed(*records: object) -> View:
    view = View("me", silence_s=1e9)
    for one in records:
        view.merge(one, 0.0)  # type: ignore[arg-type]
    return view


def test_only_feeders_feed_and_those_that_were_a_round_ago() -> None:
    view = viewed(record("a", has_data=True), record("b", has_data=True), record("c"))
    origins = Origins(view)
    assert [origins.may_feed(p, 3, 0.0) for p in "abcd"] == [True, True, False, False]
    view.merge(record("a", 1, has_data=True, state=LEAVING), 1.0)
    assert origins.may_feed("a", 3, 1.0), "what it has begun ends"
    assert origins.may_feed("a", 4, 1.0)
    assert not origins.may_feed("a", 5, 1.0)
    assert origins.may_feed("b", 5, 1.0)


def test_a_round_that_is_jumped_to_knows_its_feeders_at_once() -> None:
    origins = Origins(viewed(record("a", has_data=True)))
    assert origins.may_feed("a", 3, 0.0)
    assert origins.may_feed("a", 900, 0.0)
    assert origins.may_feed("a", 2, 0.0), "after a partition another history may hold"


def test_a_feeder_brings_to_the_first_stage_and_replicas_to_the_next() -> None:
    view = viewed(
        record("a", stage=0, has_data=True),
        record("b", stage=1, state=LEAVING),
        record("c", stage=1, state=JOINING),
    )
    origins = Origins(view)
    assert origins.may_bring("a", "a", 0)
    assert not origins.may_bring("b", "a", 0), "a feeder brings its own"
    assert origins.may_bring("a", "x", 1)
    assert not origins.may_bring("b", "b", 1)
    assert origins.may_bring("b", "a", 2)
    assert not origins.may_bring("c", "a", 2), "it has computed nothing"
    assert not origins.may_bring("x", "x", 1)


def test_a_newcomer_with_parameters_passes_on_what_leaves_nothing_behind() -> None:
    """Its trial in the first stage goes through all the others."""
    view = viewed(
        record("a", stage=0),
        record("joins", stage=0, state=JOINING),
        record("tried", stage=0, state=JOINING, digests=b"12345678"),
    )
    origins = Origins(view)
    assert [origins.may_pass_on(p, 1) for p in ("a", "joins", "tried", "x")] == [1, 0, 1, 0]
    assert not origins.may_pass_on("tried", 2)
    assert not origins.may_bring("tried", "a", 1)


def test_who_is_not_believed_in_brings_one_at_a_time() -> None:
    view = viewed(record("a", stage=0), record("new", stage=0), record("me", stage=0))
    origins = Origins(view)

    def may_bring(peer_id: str, *ages_s: float) -> bool:
        return origins.may_bring_more(
            peer_id, lambda: [NOW - age_s for age_s in ages_s], USUAL_S, NOW
        )

    assert all(may_bring(p, 1.0, 1.0) for p in ("a", "new")), "all begin together"
    view.delivered("a")
    for r in range(1, GRACE_ROUNDS + 2):
        view.merge(record("me", r, stage=0, round=r), float(r))
    assert may_bring("a", 1.0, 1.0)
    assert may_bring("me", 1.0, 1.0)
    assert may_bring("new")
    assert not may_bring("new", 1.0)
    assert may_bring("new", waits_s(USUAL_S) + 0.1), "a commit may be lost"
    view.delivered("new")
    assert may_bring("new", 1.0), "one of them has counted"
