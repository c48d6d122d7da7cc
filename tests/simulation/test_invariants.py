"""The books of the simulator: what was committed, averaged and lost."""

from __future__ import annotations

from typing import Any

from swarmnet.simulation.invariants import Monitor


def quiet(kind: str, **facts: Any) -> None:
    pass


def closed(averaged: dict[tuple[int, int], set[int]]) -> Monitor:
    """Two stages of two shards, four microbatches. `averaged`: those in the update of a shard."""
    monitor = Monitor(lambda: 0.0, quiet, num_stages=2, num_shards=2)
    books = monitor._book(0)
    books.committed = dict.fromkeys(range(4), ("a", "b"))
    books.averaged = {key: [frozenset(ids)] for key, ids in averaged.items()}
    monitor._close(0)
    return monitor


def test_lost_samples_are_told_of_the_worst_shard_and_as_a_mean_of_all() -> None:
    everything = {0, 1, 2, 3}
    of_all = {(s, j): everything for s in range(2) for j in range(2)}
    assert closed(of_all).lost_part == 0.0
    monitor = closed(of_all | {(1, 0): {0}, (1, 1): {0, 1}})
    assert monitor.lost[(0, 0)] == 0
    assert monitor.lost[(0, 1)] == 3  # round 0, stage 1
    assert monitor.lost_part == (0 + 0 + 3 + 2) / 4
    assert monitor.num_settled == 4


def test_what_nobody_committed_must_not_be_averaged() -> None:
    monitor = closed({(s, j): {0, 1, 2, 3, 9} for s in range(2) for j in range(2)})
    assert monitor.broken is not None
    assert "no feeder committed" in monitor.broken
