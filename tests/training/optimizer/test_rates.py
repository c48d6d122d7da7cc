"""The learning rate of each round."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from swarmnet.spec import OptimizerSpec
from swarmnet.training.optimizer.rates import learning_rate


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    spec = OptimizerSpec(learning_rate=1.0, min_learning_rate_ratio=0.1, warmup_rounds=4, rounds=15)
    rates = [learning_rate(spec, r) for r in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert math.isclose(rates[9], 0.55)
    assert math.isclose(rates[14], 0.1)
    assert rates[15:] == [rates[14]] * 5
    assert all(a >= b for a, b in pairwise(rates[4:]))
    assert learning_rate(OptimizerSpec(learning_rate=0.5, rounds=1), 0) == 0.5


@pytest.mark.parametrize("decay", [1, 4, 16])
def test_wsd_stays_at_the_highest_rate_until_its_decay(decay: int) -> None:
    spec = OptimizerSpec(
        learning_rate=2.0,
        schedule="wsd",
        decay_rounds=decay,
        min_learning_rate_ratio=0.25,
        warmup_rounds=4,
        rounds=20,
    )
    rates = [learning_rate(spec, r) for r in range(22)]
    begin = 20 - decay
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:begin] == [2.0] * (begin - 4)
    assert all(a > b for a, b in pairwise(rates[max(begin - 1, 3) : 20]))
    assert rates[19:] == [0.5] * 3
    for n in range(decay):
        left = 1 - math.sqrt((n + 1) / decay)
        assert math.isclose(rates[begin + n], 0.5 + 1.5 * left)


def test_a_constant_rate_stays_also_without_an_end() -> None:
    for rounds in (0, 10):
        spec = OptimizerSpec(learning_rate=0.5, schedule="constant", warmup_rounds=2, rounds=rounds)
        rates = [learning_rate(spec, r) for r in (0, 1, 2, 9, 10**12)]
        assert rates == [0.25, 0.5, 0.5, 0.5, 0.5]
