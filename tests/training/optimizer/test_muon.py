"""Muon's steps: nearly orthogonal, of AdamW's size, and the same momentum at every owner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.spec import OptimizerSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.models.base import ParameterRange, ranges_of
from swarmnet.training.models.matrices import Matrix
from swarmnet.training.optimizer import muon as about
from swarmnet.training.optimizer.muon import (
    ShardedMuon,
    nesterov,
    orthogonal,
    step_momentum,
)
from tests.oracles.optimizers import nearly_orthogonal

SPEC = OptimizerSpec(kind="muon", learning_rate=1e-2, schedule="constant", rounds=100)
SHAPES = {"a": (24, 40), "b": (40, 16), "norm": (40,)}
NUM_MATRIX = 24 * 40 + 40 * 16


def ranges() -> tuple[ParameterRange, ...]:
    return ranges_of((name, torch.empty(shape)) for name, shape in SHAPES.items())


def muon(codec: str = "none", spec: OptimizerSpec = SPEC) -> ShardedMuon:
    """Of two matrices in one shard, and a vector in another."""
    matrices = [Matrix(r.name, r, SHAPES[r.name]) for r in ranges()[:2]]  # type: ignore[arg-type]
    optimizer = ShardedMuon(ranges(), (NUM_MATRIX, 40), matrices, spec, codec=codec)
    for j in range(2):
        optimizer.create(j)
    return optimizer


def drawn(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(32, 32), (48, 20), (20, 48), (2, 64)])
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    matrix = drawn(math.prod(shape), 1).view(shape) * 1e-4
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert (found - nearly_orthogonal(matrix)).norm() < 1e-5 * found.norm()
    assert (orthogonal(1e6 * matrix) - found).norm() < 1e-5 * found.norm(), "its size is no matter"


def test_a_matrix_of_zeros_makes_no_step() -> None:
    assert not orthogonal(torch.zeros(8, 4)).any()


def test_the_momentum_has_the_bits_of_operations_that_are_rounded_once() -> None:
    """As numpy makes them, one after the other; also where a library has vectors of another size,
    or would fuse."""
    gradients = [drawn(1003, seed) * 10.0**seed for seed in range(3)]
    momentum, expected = torch.zeros(1003), np.zeros(1003, np.float32)
    beta, rest = np.float32(0.95), np.float32(1 - 0.95)
    for gradient in gradients:
        step_momentum(momentum, gradient, 0.95)
        expected = expected * beta + gradient.numpy() * rest
        np.testing.assert_array_equal(momentum.numpy(), expected)
    ahead = expected * beta + gradients[-1].numpy() * rest
    np.testing.assert_array_equal(nesterov(momentum, gradients[-1], 0.95).numpy(), ahead)


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_within_5_percent_of_torchs_own(seed: int) -> None:
    """Which orthogonalizes in bfloat16."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    spec = OptimizerSpec(kind="muon", learning_rate=3e-2, schedule="constant", rounds=9)
    before = {n: drawn(math.prod(SHAPES[n]), seed + i).view(SHAPES[n]) for i, n in enumerate("ab")}
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in before.items()}
    other = torch.optim.Muon(
        list(theirs.values()),
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        momentum=spec.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    ours, optimizer = torch.cat([p.flatten() for p in before.values()]), muon(spec=spec)
    for r in range(5):
        gradient = drawn(NUM_MATRIX, 100 * seed + r)
        parts = zip(theirs.values(), gradient.split([24 * 40, 40 * 16]), strict=True)
        for p, part in parts:
            p.grad = part.view(p.shape).clone()
        other.step()
        ours = to_tensor(optimizer.step(0, from_tensor(ours), from_tensor(gradient), 1.0, r)[1])
    for r, (name, p) in zip(ranges(), theirs.items(), strict=False):
        change, wanted = r.part_of(ours) - before[name], p.detach() - before[name]
        assert (change - wanted).norm() < 0.05 * wanted.norm()


def test_a_step_is_as_large_as_one_of_adamw() -> None:
    before = torch.zeros(NUM_MATRIX)
    gradient = from_tensor(drawn(NUM_MATRIX, 4))
    _, after = muon().step(0, from_tensor(before), gradient, 1.0, 0)
    for r in ranges()[:2]:
        size = r.part_of(to_tensor(after)).square().mean().sqrt().item()
        assert size == pytest.approx(0.2 * SPEC.learning_rate, rel=0.15)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_who_follows_has_the_momentum_and_can_make_the_rest(codec: str) -> None:
    first, backup = muon(codec), muon(codec)
    present = from_tensor(drawn(NUM_MATRIX, 0))
    for r in range(4):
        gradient = from_tensor(100 * drawn(NUM_MATRIX, r + 1))
        rest = backup.follow(0, gradient, 0.01, r)
        made = first.step(0, present, gradient, 0.01, r)
        if codec == "none" or not r:  # else the primary makes up for what coding had lost
            assert [a.data for a in rest(present, True)] == [a.data for a in made]
        assert backup.steps(0) == first.steps(0) == r + 1
        assert backup.export(0)[1][0].data == first.export(0)[1][0].data
        present = made[1]
    assert not first.is_repeatable(0)
    assert first.is_repeatable(1)
    assert len(backup.export(0)[1]) == 1
    assert len(first.export(0)[1]) == (1 if codec == "none" else 2)


def test_what_was_ahead_is_taken_away_by_who_makes_the_rest() -> None:
    first, backup = muon("int8"), muon("int8")
    present = from_tensor(drawn(NUM_MATRIX, 0))
    gradient = from_tensor(drawn(NUM_MATRIX, 1))
    present = first.step(0, present, gradient, 1.0, 0)[1]
    backup.load(0, *first.export(0))
    rest = backup.follow(0, gradient, 1.0, 1)
    expected = first.step(0, present, gradient, 1.0, 1)
    assert [a.data for a in rest(present, True)] == [a.data for a in expected]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    optimizer, gradient = muon(), torch.ones(NUM_MATRIX)
    gradient[7] = math.nan
    for step in (
        lambda: optimizer.step(0, from_tensor(torch.ones(NUM_MATRIX)), from_tensor(gradient), 1, 0),
        lambda: optimizer.follow(0, from_tensor(gradient), 1.0, 0),
    ):
        with pytest.raises(ProtocolViolation):
            step()
    assert optimizer.steps(0) == 0
    assert not to_tensor(optimizer.export(0)[1][0]).any()


def test_delayed_matrices_are_ahead_by_their_step_once_more() -> None:
    """What replicas get moves by 2 u - v, with the newest step u and the one before it."""
    optimizer, plain = muon(), muon()
    start = drawn(NUM_MATRIX, 0)
    present = own = from_tensor(start)
    for r in range(4):
        gradient, before = from_tensor(drawn(NUM_MATRIX, r + 1)), to_tensor(own)
        present = optimizer.step(0, present, gradient, 1.0, r, is_delayed=True)[1]
        own = plain.step(0, own, gradient, 1.0, r)[1]
        decayed = before * (1 - SPEC.learning_rate * SPEC.weight_decay)
        expected = to_tensor(own) + (to_tensor(own) - decayed)
        assert near(to_tensor(present), expected, start)
        assert len(optimizer.export(0)[1]) == 2
    last = from_tensor(drawn(NUM_MATRIX, 9))
    found, wanted = (o.step(0, p, last, 1.0, 4)[1] for o, p in ((optimizer, present), (plain, own)))
    assert near(to_tensor(found), to_tensor(wanted), start), "the last one is not ahead"
    assert len(optimizer.export(0)[1]) == 1


def near(found: torch.Tensor, wanted: torch.Tensor, start: torch.Tensor) -> bool:
    """As far as roundings of the parameters, and not of their changes, allow."""
    return bool((found - wanted).norm() < 1e-4 * (wanted - start).norm())


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_who_follows_knows_how_far_the_primary_is_ahead(codec: str) -> None:
    """It can look at any result, give its state on, and lead from any step on."""
    first, backup = muon(codec), muon(codec)
    start = drawn(NUM_MATRIX, 0)
    present = from_tensor(start)
    for r in range(4):
        gradient = from_tensor(drawn(NUM_MATRIX, r + 1))
        heir, fetched, before = muon(codec), muon(codec), present
        if r:
            heir.load(0, *first.export(0))
            fetched.load(0, *backup.export(0))
        rest = backup.follow(0, gradient, 1.0, r, is_delayed=True)
        present = first.step(0, before, gradient, 1.0, r, is_delayed=True)[1]
        made = [rest(before, True)[1]]
        made += [o.step(0, before, gradient, 1.0, r, is_delayed=True)[1] for o in (heir, fetched)]
        change = to_tensor(present) - to_tensor(before)
        for other in made:
            difference = to_tensor(other) - to_tensor(present)
            # What coding has lost is the primary's alone.
            assert difference.norm() < (1e-4 if codec == "none" else 0.02) * change.norm()
        assert backup.export(0)[1][0].data == first.export(0)[1][0].data
    assert [len(o.export(0)[1]) for o in (first, backup)] == [2, 2]


@pytest.mark.parametrize("shard", [0, 1])
def test_a_state_that_does_not_fit_is_refused(shard: int) -> None:
    optimizer = muon()
    size, num = (NUM_MATRIX, 40)[shard], 1 + shard
    vector = torch.ones(size)

    def refused(*vectors: torch.Tensor, **values: Any) -> None:
        with pytest.raises(ProtocolViolation):
            optimizer.load(shard, {"steps": 1} | values, tuple(map(from_tensor, vectors)))

    optimizer.load(shard, {"steps": 1}, (from_tensor(vector),) * num)
    optimizer.load(shard, {"steps": 1}, (from_tensor(vector),) * (num + 1))
    refused(*[vector] * (num - 1))
    refused(*[vector] * (num + 2))
    refused(*[vector[1:]] * num)
    refused(*[vector * math.inf] * num)
    refused(*[vector] * num, steps=-1)


def test_where_a_device_has_no_room_the_host_makes_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = from_tensor(drawn(NUM_MATRIX, 1))
    expected = muon().step(0, values, values, 1.0, 0)
    is_full = True

    def full(matrix: torch.Tensor) -> torch.Tensor:
        nonlocal is_full
        if is_full:
            is_full = False
            raise torch.OutOfMemoryError("no room")
        return orthogonal(matrix)

    monkeypatch.setattr(about, "orthogonal", full)
    assert muon().step(0, values, values, 1.0, 0)[1].data == expected[1].data
    assert "no room for a step of Muon" in caplog.text
