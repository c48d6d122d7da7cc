"""Outer steps that lead nowhere are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import from_tensor
from swarmnet.training.outer import OuterNesterov

SIZE = 4


def filled(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value)


def of_all(outer: OuterNesterov, change: float, r: int) -> torch.Tensor:
    outer.step(0, from_tensor(filled(1.0)), from_tensor(filled(change)), 1.0, r)
    return filled(0.0)


def of_a_pair(outer: OuterNesterov, change: float, r: int) -> torch.Tensor:
    return outer.pair_step(0, filled(1.0), filled(change), filled(1.0), r)


@pytest.mark.parametrize("step", [of_all, of_a_pair])
@pytest.mark.parametrize("round_index", [0, 3], ids=["a plain one", "one with momentum"])
def test_a_step_beyond_what_a_stage_takes_changes_nothing(
    step: Callable[[OuterNesterov, float, int], torch.Tensor], round_index: int
) -> None:
    outer = OuterNesterov([SIZE], 0.7, 0.9, warmup_rounds=1)
    outer.create(0)
    step(outer, 0.5, 2)
    values, (momentum,) = outer.export(0)
    for change in (1e30, -1e16):
        with pytest.raises(ProtocolViolation, match="leads beyond"):
            step(outer, change, round_index)
        after, (kept,) = outer.export(0)
        assert after == values
        assert bytes(kept.data) == bytes(momentum.data)
    step(outer, 0.5, round_index)
    assert outer.steps(0) == values["steps"] + 1
