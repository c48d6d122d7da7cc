"""Synthetic own steps: what an exchange gets is exact, and names its microbatches."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnet.simulation.local_steps import SyntheticLocalSteps
from swarmnet.simulation.stage import (
    Sizes,
    SyntheticOptimizer,
    SyntheticStage,
    activation,
    check_sum,
    gradient,
)

SIZES = Sizes(num_shards=2)
TOKENS = SIZES.tokens_per_microbatch


class Replica:
    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.stage = SyntheticStage(1, 3, SIZES, self.observe)
        self.outer = SyntheticOptimizer(1, SIZES, self.observe)
        for j in range(SIZES.num_shards):
            self.outer.create(j)
        self.local = SyntheticLocalSteps(self.stage, self.outer, TOKENS, self.observe)

    def observe(self, event: str, **facts: Any) -> None:
        self.heard.append((event, facts))

    def round(self, r: int, ids: range) -> None:
        for i in ids:
            self.stage.forward_pass((r, i), activation((r, i), SIZES))()
            self.stage.backward_pass((r, i), gradient((r, i), SIZES))()
        self.local.step(len(ids) * TOKENS, r)

    def finish(self) -> None:
        self.stage.finish_round()
        self.local.finish_round()


def test_a_change_is_the_sum_of_all_own_steps_since_the_exchange() -> None:
    a = Replica()
    a.round(0, range(3))
    a.finish()
    a.round(1, range(10, 12))
    change = a.local.change(0, 5.0 * TOKENS)
    assert sorted(change.data.ids) == [(0, 0), (0, 1), (0, 2), (1, 10), (1, 11)]
    assert check_sum(1, 0, change.data)
    with pytest.raises(AssertionError, match="is pushed as one of"):
        a.local.change(0, 4.0 * TOKENS)
    a.local.set_common(0, a.local.common_shard(0))  # shard 0 is exchanged, shard 1 is not
    a.finish()
    assert not a.local.change(0, 0.0).data.ids
    assert len(a.local.change(1, 5.0 * TOKENS).data.ids) == 5


def test_microbatches_meet_the_fast_parameters_and_newcomers_get_the_common_ones() -> None:
    a, b = Replica(), Replica()
    before, fast = a.local.weights, a.stage.weights
    a.round(0, range(3))
    a.finish()
    assert a.stage.weights != fast
    assert a.local.weights == before == b.local.weights


def test_partners_that_meet_come_nearer() -> None:
    a, b = Replica(), Replica()
    a.round(0, range(8))
    b.round(0, range(8, 9))
    offers = [[x.local.offer(j) for j in range(SIZES.num_shards)] for x in (a, b)]
    for x, theirs in ((a, offers[1]), (b, offers[0])):
        for j, offer in enumerate(theirs):
            apart, norm = x.local.meet(j, offer, 0)
            assert 0 < apart < norm
    for x in (a, b):
        x.finish()
    assert a.local.weights == b.local.weights, "they began as one"
    assert a.local.progress > 0
