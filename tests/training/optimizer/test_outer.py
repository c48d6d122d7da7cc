"""Outer steps that lead nowhere are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.optimizer.local_steps import build_local_steps, build_optimizer
from swarmnet.training.optimizer.outer import OuterNesterov
from swarmnet.training.stage import build_stage
from swarmnet.wire import Array
from tests.training.specs import small_spec, write_text

SIZE = 4
Exported = tuple[dict[str, Any], tuple[Array, ...]]


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


def test_nothing_stays_of_an_offer_that_is_refused(tmp_path: Path) -> None:
    """Its moments are sound, where its parameters lead is not."""
    spec = small_spec(write_text(tmp_path), sync={"mode": "gossip", "warmup_rounds": 0})
    stage = build_stage(spec, 0)
    outer = build_optimizer(spec, stage)
    outer.create(0)
    local = build_local_steps(spec, stage, outer)
    assert local is not None
    stage.vectors.present.gradients.fill_(0.5)
    local.step(8, 1)
    before, momentum = local.export(0), outer.export(0)
    values, (common, change, *moments) = local.offer(0)
    far = from_tensor(torch.full(common.shape, 1e30))
    other = [from_tensor(2 * to_tensor(m)) for m in moments]
    with pytest.raises(ProtocolViolation, match="leads beyond"):
        local.meet(0, (values, (far, change, *other)), 1)
    assert same(local.export(0), before)
    assert same(outer.export(0), momentum)


def test_moments_of_own_steps_are_two_arrays(tmp_path: Path) -> None:
    """With a third one, which those of the owners may have, this peer could meet nobody."""
    spec = small_spec(write_text(tmp_path), sync={"mode": "gossip", "warmup_rounds": 0})
    stage = build_stage(spec, 0)
    outer = build_optimizer(spec, stage)
    outer.create(0)
    local = build_local_steps(spec, stage, outer)
    assert local is not None
    values, arrays = local.export(0)
    with pytest.raises(ProtocolViolation, match="two arrays"):
        local.load(0, values, (*arrays, arrays[0]))
    assert same(local.export(0), (values, arrays))


def same(a: Exported, b: Exported) -> bool:
    return a[0] == b[0] and [bytes(x.data) for x in a[1]] == [bytes(x.data) for x in b[1]]
