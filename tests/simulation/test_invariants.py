"""The books of the simulator: what was committed, averaged and lost."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.protocol.membership.records import ACTIVE, OBSERVER_STAGE
from swarmnet.protocol.update.lost_samples import Loss
from swarmnet.simulation.invariants import InvariantBroken, InvariantMonitor, Member
from swarmnet.simulation.stage import Gradient, contribution

COMMITTED = range(4)


def quiet(kind: str, **facts: Any) -> None:
    pass


def feeder() -> Any:
    """A peer that has committed four microbatches in round 0 and is in round 1."""
    paths = {0: dict.fromkeys(COMMITTED, ("a", "b"))}
    return SimpleNamespace(
        feeder=SimpleNamespace(rounds=SimpleNamespace(committed_by_id=lambda: paths)),
        replica=SimpleNamespace(
            round=1, synced=False, device=SimpleNamespace(num_waiting=0), ledger=()
        ),
        steps=SimpleNamespace(num_in_flight=0),
        limits=SimpleNamespace(max_open_steps=1),
        gossip=SimpleNamespace(
            own=SimpleNamespace(peer_id="a", state=ACTIVE, stage=OBSERVER_STAGE)
        ),
    )


def gradient_of(stage: int, shard: int, ids: set[int]) -> Gradient:
    """The sum of what these microbatches of round 0 add to a shard."""
    keys = [(0, the_id) for the_id in sorted(ids)]
    parts = [contribution(stage, shard, key) for key in keys]
    return Gradient.of([sum(numbers) for numbers in zip(*parts, strict=True)], Counter(keys))


def monitor_of(averaged: dict[tuple[int, int], set[int]]) -> InvariantMonitor:
    """Two stages of two shards, after round 0. `averaged`: the microbatches in the update of each
    (stage, shard)."""
    monitor = InvariantMonitor(lambda: 0.0, quiet, num_stages=2, num_shards=2)
    monitor.members["a"] = Member(feeder())
    for (stage, shard), ids in averaged.items():
        step = monitor.observer(f"owner of {shard}", 1, stage)
        step("step", shard=shard, round=0, gradient=gradient_of(stage, shard, ids))
    return monitor


def test_lost_samples_are_told_of_the_worst_shard_and_as_a_mean_of_all() -> None:
    everything = set(COMMITTED)
    of_all = {(s, j): everything for s in range(2) for j in range(2)}
    monitor = monitor_of(of_all)
    monitor.finish()
    assert monitor.lost_part == 0.0
    monitor = monitor_of(of_all | {(1, 0): {0}, (1, 1): {0, 1}})
    monitor.finish()
    assert monitor.lost[(0, 0)] == 0
    assert monitor.lost[(0, 1)] == 3  # round 0, stage 1
    assert monitor.lost_part == (0 + 0 + 3 + 2) / 4
    assert monitor.num_settled == 4


def test_what_nobody_committed_must_not_be_averaged() -> None:
    monitor = monitor_of({(s, j): {*COMMITTED, 9} for s in range(2) for j in range(2)})
    with pytest.raises(InvariantBroken, match="no feeder committed"):
        monitor.finish()


@pytest.mark.parametrize("is_parted", [True, False])
def test_only_peers_that_are_parted_may_both_report_a_loss(*, is_parted: bool) -> None:
    monitor = InvariantMonitor(
        lambda: 0.0, quiet, num_stages=2, num_shards=2, is_parted=lambda one, other: is_parted
    )
    member = Member(feeder())
    member.peer.replica.round = 9
    monitor.members |= {"a": member, "b": member}
    lost = len(COMMITTED)
    for stage in range(2):
        for teller in "ab":
            monitor.reported(teller, Loss(0, stage, lost, 0, lost))
    if is_parted:
        monitor.look()
    else:
        with pytest.raises(InvariantBroken, match=r"4 counted, \[4, 4\] told lost"):
            monitor.look()
