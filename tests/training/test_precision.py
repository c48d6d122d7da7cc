"""Passes in fewer bits: fp32 sums, scales that leave no trace, refusals that leave nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import RemoteError, SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing, PrecisionName, choose_precision
from swarmnet.training.data import open_data
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec
from swarmnet.training.passes.fp16 import GROW_AFTER, MAX_TARGET, MIN_TARGET, LossScale
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import batch, fly, gradient, optimizers_of, parameters, update
from tests.training.specs import small_spec, write_text

LOW = ("bf16", "fp16")
BOUND = {"bf16": 0.03, "fp16": 0.005}
"""Relative distance of a stage's gradient from fp32: their digits (2^-8, 2^-11), over some
products."""


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return small_spec(write_text(tmp_path), pipeline={"num_stages": 3})


def stages(spec: RunSpec, precision: PrecisionName, **more: Any) -> list[TorchStage]:
    computing = Computing(precision, **more)
    return [build_stage(spec, i, computing=computing) for i in range(spec.pipeline.num_stages)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("precision", LOW)
def test_gradients_are_those_of_fp32_up_to_the_digits(spec: RunSpec, precision: Any) -> None:
    data = open_data(spec)
    exact, low = stages(spec, "fp32"), stages(spec, precision)
    for i in range(3):
        expected = fly(exact, (0, i), *batch(data, i))
        result = fly(low, (0, i), *batch(data, i))
        assert result.num_tokens == expected.num_tokens
        assert result.loss_sum == pytest.approx(expected.loss_sum, rel=BOUND[precision])
    for ours, theirs in zip(low, exact, strict=True):
        assert 0 < distance(gradient(ours), gradient(theirs)) < BOUND[precision]
        assert torch.equal(parameters(ours), parameters(theirs))
        assert all(ours.digest(j) == theirs.digest(j) for j in range(len(ours.shard_sizes)))


@pytest.mark.parametrize("precision", LOW)
def test_layers_compute_in_low_precision_and_all_that_leaves_is_fp32(
    spec: RunSpec, precision: Any
) -> None:
    low = stages(spec, precision)
    seen: set[torch.dtype] = set()
    for stage in low:
        for module in stage.layers.modules:
            for part in module.modules():
                part.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    inputs, targets = batch(open_data(spec), 0)
    activation = low[0].forward((0, 0), inputs)
    assert activation.dtype == "float32"
    activation = low[1].forward((0, 0), activation)
    result = low[2].forward_backward((0, 0), activation, targets)
    assert result.grad_inputs is not None
    assert result.grad_inputs.dtype == "float32"
    back = low[1].backward((0, 0), result.grad_inputs)
    assert back is not None
    assert back.dtype == "float32"
    assert seen == {Computing(precision).dtype}
    for stage in low:
        assert all(p.grad is None for p in stage.layers.parameters())
    logits = low[2].evaluate(activation, None)
    assert isinstance(logits, Array)
    assert logits.dtype == "float32"


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_is_retracted_is_gone(spec: RunSpec, precision: Any, activations: Any) -> None:
    data = open_data(spec)
    low = stages(spec, precision, activations=activations)
    without = stages(spec, precision, activations=activations)
    for i in range(3):
        fly(low, (0, i), *batch(data, i))
        if i != 1:
            fly(without, (0, i), *batch(data, i))
    for stage, expected in zip(low, without, strict=True):
        stage.retract((0, 1))
        torch.testing.assert_close(gradient(stage), gradient(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", LOW)
def test_small_steps_are_not_lost(spec: RunSpec, precision: Any) -> None:
    """Steps far below the digits of bf16 add up in the fp32 parameters."""
    low = stages(spec, precision)
    optimizers = optimizers_of(spec, low)
    data = open_data(spec)
    before = [parameters(stage) for stage in low]
    for r in range(3):
        result = fly(low, (r, 0), *batch(data, r))
        update(low, optimizers, result.num_tokens, 1.0, r)
    for stage, old in zip(low, before, strict=True):
        assert (parameters(stage) != old).float().mean() > 0.9
        for p, r in zip(stage.layers.parameters(), stage.parameter_ranges, strict=True):
            assert torch.equal(p, r.part_of(parameters(stage)).to(p.dtype))


# ---- scales -------------------------------------------------------------------------------------


def steep_stage(precision: PrecisionName, factor: float) -> TorchStage:
    """One linear layer between others, whose gradient inside is `factor` times larger than what
    arrives and what leaves."""

    class Steep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.matrix(x / factor) * factor

    plan = ModelPlan(
        layers=tuple(LayerBuilder(n, Steep, 1, (4,)) for n in "abc"),
        inputs=TensorSpec("float32", (4,)),
        targets=TensorSpec("float32", (4,)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        count=lambda targets: targets.numel(),
    )
    return TorchStage(
        plan,
        plan.layers[1:2],
        stage_index=1,
        num_stages=3,
        shard_size=8,
        microbatch=8,
        seed=5,
        computing=Computing(precision),
        inputs=TensorSpec("float32", (4,)),
    )


def passed(stage: TorchStage, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the input and of the parameters for an output gradient times `factor`."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(8, 4, generator=generator) for _ in range(2))
    stage.forward((0, 0), from_tensor(x))
    back = stage.backward((0, 0), from_tensor(grad * factor))
    assert back is not None
    return to_tensor(back), gradient(stage)


@pytest.mark.parametrize("exponent", [-40, -20, 0, 12, 40])
def test_a_gradient_of_any_size_passes_fp16_alike(exponent: int) -> None:
    """Scaling by a power of two is exact: what comes out differs by that power and nothing else."""
    back, grad = passed(steep_stage("fp16", 1.0), 1.0)
    large_back, large_grad = passed(steep_stage("fp16", 1.0), 2.0**exponent)
    assert torch.equal(large_back, back * 2.0**exponent)
    assert torch.equal(large_grad, grad * 2.0**exponent)


def test_an_overflow_is_retried_with_a_smaller_scale() -> None:
    exact, low = steep_stage("fp32", 1024.0), steep_stage("fp16", 1024.0)
    expected, grads = passed(exact, 1.0), passed(low, 1.0)
    assert low.loss_scale is not None
    assert low.loss_scale.num_overflows > 0
    for ours, theirs in zip(grads, expected, strict=True):
        assert distance(ours, theirs) < 0.01
    low.retract((0, 0))
    assert not gradient(low).any()


def test_what_does_not_fit_into_fp16_at_all_is_refused_and_nothing_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = steep_stage("fp16", 1.0)
    stage.layers.modules[0].register_full_backward_hook(
        lambda _, grad_inputs, __: tuple(g * math.inf for g in grad_inputs)
    )
    x = from_tensor(torch.ones(8, 4))
    stage.forward((0, 0), x)
    with pytest.raises(RemoteError, match="does not fit into fp16; --precision bf16"):
        stage.backward((0, 0), x)
    assert not gradient(stage).any()
    with pytest.raises(RemoteError, match="an activation of stage 1 does not fit into fp16"):
        stage.forward((0, 1), from_tensor(torch.full((8, 4), 1e6)))
    assert len(stage.kept) == 1
    assert "2 microbatches so far went elsewhere" in caplog.text


@given(st.floats(1e-30, 1e15), st.lists(st.booleans(), max_size=60))
def test_scales_are_powers_of_two_and_bounded(largest: float, outcomes: list[bool]) -> None:
    scaling = LossScale()
    for worked in outcomes:
        scale = scaling.scale(largest)
        assert math.log2(scale) == int(math.log2(scale))
        assert MIN_TARGET / 2 < largest * scale <= MAX_TARGET
        if worked:
            scaling.worked()
        else:
            scaling.overflowed()


def test_a_scale_recovers() -> None:
    scaling = LossScale()
    start = scaling.target
    assert scaling.overflowed()
    for _ in range(3 * GROW_AFTER):
        scaling.worked()
    assert scaling.target >= start
    tries = 1
    while scaling.overflowed():
        tries += 1
    assert tries < 20
    assert scaling.target == start


# ---- who decides --------------------------------------------------------------------------------


def test_the_machine_decides_before_the_run_and_the_run_before_the_device() -> None:
    plain, half = small_spec(), small_spec(pipeline={"precision": "bf16"})
    assert choose_precision(plain) == "fp32"
    assert choose_precision(half) == "bf16"
    assert choose_precision(half, "fp32") == "fp32"
    assert replace(Computing(), precision="bf16").dtype == torch.bfloat16
    with pytest.raises(SpecError, match="known are auto, fp32, bf16, fp16"):
        choose_precision(plain, "fp8")
