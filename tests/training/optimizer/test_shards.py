"""Sharded AdamW is torch's AdamW, wherever the shards are cut."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from swarmnet.errors import ProtocolViolation
from swarmnet.spec import OptimizerSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.data import open_data
from swarmnet.training.models.base import ParameterRange, cut_shards
from swarmnet.training.optimizer.shards import (
    Segment,
    ShardedAdamW,
    cut_segments,
    lead,
    learning_rate,
)
from swarmnet.wire import Array
from tests.oracles.reference import ReferenceTrainer
from tests.training.flights import batch_of_slot, fly, optimizers_of, stages_of, update
from tests.training.specs import small_spec, write_text

SHAPES = [(8, 5), (8,), (3, 8), (1,)]
SPEC = OptimizerSpec(
    learning_rate=1e-2, warmup_rounds=5, rounds=20, weight_decay=0.3, grad_clip_norm=0.5
)


def ranges_of(shapes: list[tuple[int, ...]]) -> list[ParameterRange]:
    ranges: list[ParameterRange] = []
    start = 0
    for i, shape in enumerate(shapes):
        ranges.append(ParameterRange(f"p{i}", start, shape, math.prod(shape)))
        start += math.prod(shape)
    return ranges


def optimizer_of(shard_size: int) -> ShardedAdamW:
    ranges = ranges_of(SHAPES)
    optimizer = ShardedAdamW(ranges, cut_shards(ranges[-1].stop, shard_size), SPEC)
    for j in range(len(cut_shards(ranges[-1].stop, shard_size))):
        optimizer.create(j)
    return optimizer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shard_size", [1, 7, 16, 1000])
def test_twenty_steps_with_clipping_equal_torch(shard_size: int, fused: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    flat = torch.cat([p.detach().flatten() for p in theirs])
    torch_optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in theirs if p.ndim >= 2], "weight_decay": SPEC.weight_decay},
            {"params": [p for p in theirs if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(SPEC.beta1, SPEC.beta2),
        eps=SPEC.eps,
        fused=fused,
    )
    ours = optimizer_of(shard_size)
    num_tokens = 37
    for r in range(20):
        gradients = [torch.randn(p.shape, generator=generator) * (1 + r % 3) for p in theirs]
        flat_sum = torch.cat([g.flatten() for g in gradients])
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g / num_tokens
        nn.utils.clip_grad_norm_(theirs, SPEC.grad_clip_norm)
        for group in torch_optimizer.param_groups:
            group["lr"] = learning_rate(SPEC, r)
        torch_optimizer.step()

        shards = flat_sum.split(shard_size)
        norm = math.sqrt(sum(ours.sum_of_squares(from_tensor(s)) for s in shards)) / num_tokens
        scale = min(1.0, SPEC.grad_clip_norm / (norm + 1e-6)) / num_tokens
        new = [
            to_tensor(ours.step(j, from_tensor(old), from_tensor(shard), scale, r)[0])
            for j, (old, shard) in enumerate(zip(flat.split(shard_size), shards, strict=True))
        ]
        flat = torch.cat(new)
    expected = torch.cat([p.detach().flatten() for p in theirs])
    torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-6)


def test_rounds_of_stages_and_shards_equal_the_plain_loop(tmp_path: Path) -> None:
    spec = small_spec(
        write_text(tmp_path), pipeline={"num_stages": 3}, optimizer={"grad_clip_norm": 0.3}
    )
    data = open_data(spec)
    reference = ReferenceTrainer(spec, data)
    stages = stages_of(spec)
    optimizers = optimizers_of(spec, stages)
    for r in range(20):
        slots = range(4)
        results = [fly(stages, (r, s), *batch_of_slot(spec, data, r, s)) for s in slots]
        num_tokens = sum(result.num_tokens for result in results)
        update(stages, optimizers, num_tokens, spec.optimizer.grad_clip_norm, r)
        loss = sum(result.loss_sum for result in results) / num_tokens
        assert math.isclose(loss, reference.step(r, slots), rel_tol=1e-4)
    state = {k: v for stage in stages for k, v in stage.state_dict().items()}
    for name, values in reference.state_dict().items():
        assert (state[name] - values).norm() <= 1e-4 * values.norm(), name


def test_segments_keep_decay_to_matrices() -> None:
    # matrices [0, 40) and [48, 72), vectors [40, 48) and [72, 73)
    assert cut_segments(ranges_of(SHAPES), [45, 28]) == [
        [Segment(0, 40, True), Segment(40, 45, False)],
        [Segment(0, 3, False), Segment(3, 27, True), Segment(27, 28, False)],
    ]


def test_a_step_changes_neither_parameters_nor_gradient_and_is_repeatable() -> None:
    a, b = optimizer_of(100), optimizer_of(100)
    old, gradient = torch.randn(73), torch.randn(73)
    copies = old.clone(), gradient.clone()
    first, _ = a.step(0, from_tensor(old), from_tensor(gradient), 0.5, 0)
    second, _ = b.step(0, from_tensor(old), from_tensor(gradient), 0.5, 0)
    assert bytes(first.data) == bytes(second.data)
    assert torch.equal(old, copies[0])
    assert torch.equal(gradient, copies[1])
    assert not torch.equal(to_tensor(first), old)


def test_state_is_held_for_owned_shards_only_and_moves_whole() -> None:
    a, b = optimizer_of(30), optimizer_of(30)
    values = from_tensor(torch.randn(30))
    a.step(1, values, values, 1.0, 0)
    b.drop(1)
    b.drop(1)
    assert b.owned() == [0, 2]
    assert (a.steps(1), b.steps(1)) == (1, -1)
    exported = a.export(1)
    snapshot = [bytes(x.data) for x in exported[1]]
    b.load(1, *exported)
    assert b.owned() == [0, 1, 2]
    for r in (1, 2):
        ours, theirs = (o.step(1, values, values, 1.0, r)[0] for o in (a, b))
        assert bytes(ours.data) == bytes(theirs.data)
    assert [bytes(x.data) for x in exported[1]] == snapshot  # a snapshot, not a view


def test_sum_is_in_order_and_its_inputs_stay() -> None:
    optimizer = optimizer_of(30)
    parts = [torch.randn(30) for _ in range(3)]
    total = to_tensor(optimizer.sum([from_tensor(p) for p in parts]))
    assert torch.equal(total, parts[0] + parts[1] + parts[2])
    single = to_tensor(optimizer.sum([from_tensor(parts[0])]))
    parts[0].zero_()
    assert single.any()
    with pytest.raises(ProtocolViolation):
        optimizer.sum([from_tensor(parts[0]), from_tensor(parts[1][:29])])
    with pytest.raises(ProtocolViolation):
        optimizer.sum([from_tensor(parts[0]), from_tensor(parts[1].double())])


def test_sum_of_squares_is_in_double_precision() -> None:
    values = torch.full((100_000,), 1e-3)
    values[0] = 1e4
    expected = values.double().square().sum().item()
    assert math.isclose(optimizer_of(30).sum_of_squares(from_tensor(values)), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_state_alone(bad: float) -> None:
    optimizer = optimizer_of(30)
    before = [bytes(a.data) for a in optimizer.export(0)[1]]
    values, gradient = torch.zeros(30), torch.zeros(30)
    gradient[29] = bad
    with pytest.raises(ProtocolViolation):
        optimizer.step(0, from_tensor(values), from_tensor(gradient), 1.0, 0)
    assert optimizer.steps(0) == 0
    assert [bytes(a.data) for a in optimizer.export(0)[1]] == before


def test_state_that_cannot_be_is_refused() -> None:
    optimizer = optimizer_of(30)
    good = from_tensor(torch.zeros(30))
    negative = from_tensor(torch.full((30,), -1.0))
    nan = from_tensor(torch.full((30,), math.nan))
    cases: list[tuple[int, dict, tuple[Array, ...]]] = [
        (0, {}, (good, good)),
        (0, {"steps": -1}, (good, good)),
        (0, {"steps": True}, (good, good)),
        (0, {"steps": 1.0}, (good, good)),
        (0, {"steps": 1 << 40}, (good, good)),
        (0, {"steps": 1}, (good,)),
        (0, {"steps": 1}, (good, good, good, good)),
        (0, {"steps": 1}, (good, good, nan)),
        (0, {"steps": 1}, (good, negative)),
        (0, {"steps": 1}, (nan, good)),
        (0, {"steps": 1}, (good, from_tensor(torch.zeros(29)))),
        (0, {"steps": 1}, (good, from_tensor(torch.zeros(30).double()))),
        (9, {"steps": 1}, (good, good)),
    ]
    for shard_index, values, arrays in cases:
        with pytest.raises(ProtocolViolation):
            optimizer.load(shard_index, values, arrays)
    assert optimizer.steps(0) == 0


def highest_stable(beta1: float, of_mean: float, of_gradient: float) -> float:
    """The highest rate x curvature at which gradient descent with momentum, by gradients that are
    one step late, comes to rest on a quadratic; the gradients are taken at parameters that are so
    far ahead."""
    best = 0.0
    for k in range(1, 400):
        curvature = 0.05 * k
        # Rows: parameters, momentum, newest gradient, the point that is ahead, of the step before.
        gradient = torch.tensor([0.0, 0.0, 0.0, curvature], dtype=torch.float64)
        momentum = (1 - beta1) * gradient + torch.tensor([0.0, beta1, 0.0, 0.0])
        parameters = torch.tensor([1.0, 0.0, 0.0, 0.0]) - momentum
        ahead = torch.tensor([1.0, -of_mean, -of_gradient, 0.0])
        step = torch.stack([parameters, momentum, gradient, ahead.double()])
        if torch.linalg.eigvals(step).abs().max().item() > 1 + 1e-9:
            break
        best = curvature
    return best


@pytest.mark.parametrize(("beta1", "at_least"), [(0.5, 1.1), (0.8, 2.5), (0.9, 6.0), (0.95, 9.0)])
def test_looking_ahead_lets_late_gradients_take_longer_steps(beta1: float, at_least: float) -> None:
    assert highest_stable(beta1, 0.0, 0.0) == pytest.approx(1.0, abs=0.06)
    assert highest_stable(beta1, *lead(beta1)) >= at_least
    of_mean, of_gradient = lead(0.9)
    others = [(of_mean + x, of_gradient + y) for x in (-0.4, 0.5) for y in (-0.1, 0.1)]
    assert highest_stable(0.9, of_mean, of_gradient) > max(
        highest_stable(0.9, *other) for other in others
    )


def test_how_far_parameters_are_ahead_is_taken_away_again() -> None:
    """On the same gradients delayed steps end where others do, from a state handed over too."""
    generator = torch.Generator().manual_seed(3)
    size = ranges_of(SHAPES)[-1].stop
    first = torch.randn(size, generator=generator)
    gradients = [torch.randn(size, generator=generator) for _ in range(6)]
    plain, late = optimizer_of(1000), optimizer_of(1000)
    at, ahead = from_tensor(first), from_tensor(first)
    for r, gradient in enumerate(gradients):
        last = r == len(gradients) - 1
        at, _ = plain.step(0, at, from_tensor(gradient), 1.0, r)
        if r == 3:
            backup = optimizer_of(1000)
            backup.load(0, *late.export(0))
            late = backup
        ahead, _ = late.step(0, ahead, from_tensor(gradient), 1.0, r, not last)
        apart = (to_tensor(at) - to_tensor(ahead)).abs().max().item()
        assert apart < 1e-6 if last else apart > 1e-4
    assert len(late.export(0)[1]) == 2
