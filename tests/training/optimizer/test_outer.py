"""Outer steps that lead nowhere are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import CHUNK, sparse_codec, update_codec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.codecs.shards import round_trip
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


FEW, WHOLE = update_codec(sparse_codec(208)), 2 * CHUNK
RATE, MOMENTUM = 0.7, 0.9


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(WHOLE, generator=torch.Generator().manual_seed(seed))


def owner(codec: str = FEW.results, last_round: int = 30) -> OuterNesterov:
    outer = OuterNesterov([WHOLE], RATE, MOMENTUM, 1, last_round, codec=codec)
    outer.create(0)
    return outer


def state_of(outer: OuterNesterov) -> list[torch.Tensor]:
    """Momentum, and by how much parameters are ahead."""
    return [to_tensor(array) for array in outer.export(0)[1]]


def stepped(outer: OuterNesterov, present: torch.Tensor, r: int) -> tuple[Array, torch.Tensor]:
    result, after = outer.step(0, from_tensor(present), from_tensor(drawn(r)), 0.5, r)
    return result, to_tensor(after)


def taken(outer: OuterNesterov, present: torch.Tensor, result: Array, r: int) -> torch.Tensor:
    return to_tensor(outer.take(0, from_tensor(present), result, r)[1])


def test_half_of_what_a_result_leaves_out_is_in_the_next_one() -> None:
    outer, present, momentum = owner(), drawn(99), torch.zeros(WHOLE)
    lacking = torch.zeros(WHOLE)
    for r in range(1, 5):
        change = 0.5 * drawn(r)
        momentum = MOMENTUM * momentum + change
        wanted = lacking - RATE * (change + MOMENTUM * momentum)
        _, after = stepped(outer, present, r)
        told = after - present
        assert all(chunk.count_nonzero() == 208 for chunk in told.split(CHUNK))
        lacking = 0.5 * (wanted - told)
        assert (state_of(outer)[1] + lacking).norm() < 1e-5 * lacking.norm()
        present = after


def test_a_plain_step_takes_all_that_was_left_out_and_the_whole_change() -> None:
    """Such as the last one: nothing comes after it."""
    outer, present = owner(last_round=3), drawn(99)
    for r in (1, 2):
        _, present = stepped(outer, present, r)
    lacking = -state_of(outer)[1]
    _, after = stepped(outer, present, 3)
    wanted = lacking - 0.5 * drawn(3)
    assert lacking.norm() > 0.5 * wanted.norm()
    assert (after - present - wanted).norm() < 0.1 * wanted.norm()  # of 4 bits


def test_who_leads_after_another_one_begins_with_nothing_left_out() -> None:
    """And nothing of it comes twice where the first one leads again."""
    first, second, present = owner(), owner(), drawn(99)
    for r in range(1, 4):
        result, after = stepped(first, present, r)
        assert torch.equal(taken(second, present, result, r), after)
        present = after
    assert second.steps(0) == first.steps(0)
    assert len(state_of(second)) == 1
    assert len(state_of(first)) == 2
    (momentum,) = state_of(second)
    assert not momentum.any()
    result, after = stepped(second, present, 4)
    change = 0.5 * drawn(4)
    sent = round_trip(FEW.results, -RATE * (change + MOMENTUM * change))[1]
    assert torch.equal(after - present, (present + sent) - present)
    before = state_of(first)[0]
    assert torch.equal(taken(first, present, result, 4), after)
    (faded,) = state_of(first)
    assert torch.equal(faded, before * MOMENTUM)


@pytest.mark.parametrize("r", [0, 30], ids=["warm-up", "last"])
def test_a_momentum_does_not_fade_where_no_step_has_one(r: int) -> None:
    first, second, present = owner(), owner(), drawn(99)
    for outer in (first, second):
        stepped(outer, present, 1)
    (before, _), (result, _) = state_of(second), stepped(first, present, r)
    taken(second, present, result, r)
    assert torch.equal(state_of(second)[0], before)


@pytest.mark.parametrize("r", [0, 3], ids=["a plain one", "one with momentum"])
def test_a_step_that_leads_nowhere_is_one_of_zeros_for_all_owners(r: int) -> None:
    """Backups have no part in finding that."""
    first, second, present = owner(), owner(), drawn(99)
    result, after = stepped(first, present, 1)
    taken(second, present, result, 1)
    before, present = state_of(first), after
    for change in (1e30, float("nan")):
        whole = from_tensor(torch.full((WHOLE,), change))
        result, parameters = first.step(0, from_tensor(present), whole, 1.0, r)
        assert torch.equal(to_tensor(parameters), present)
        assert torch.equal(taken(second, present, result, r), present)
        assert all(map(torch.equal, state_of(first), before))
        assert second.steps(0) == first.steps(0)


def test_a_result_of_no_use_changes_nothing() -> None:
    outer, present = owner(), drawn(99)
    stepped(outer, present, 1)
    before, values = state_of(outer), outer.export(0)[0]
    far = from_tensor(round_trip("int4", torch.full((WHOLE,), 9e14))[0])
    size = FEW.form(FEW.results, WHOLE)[1][0]
    for result in (from_tensor(torch.full((size,), 255, dtype=torch.uint8)), far):
        with pytest.raises(ProtocolViolation):
            outer.take(0, from_tensor(torch.full((WHOLE,), 9e14)), result, 2)
        assert outer.export(0)[0] == values
        assert all(map(torch.equal, state_of(outer), before))
