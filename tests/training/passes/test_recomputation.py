"""A recomputation gives what the real passes give, and leaves nothing behind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import StageResult
from swarmnet.protocol.codecs import BOUNDARY_CODECS
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing, PrecisionName
from swarmnet.training.data import open_data
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import batch, gradient, parameters
from tests.training.specs import small_spec, write_text

KEY = (0, 0)


def a_spec(folder: Path, codec: str = "none") -> RunSpec:
    return small_spec(write_text(folder), pipeline={"num_stages": 3, "codec": codec})


def build(spec: RunSpec, **computing: Any) -> list[TorchStage]:
    made = Computing(**computing)
    return [build_stage(spec, i, computing=made) for i in range(spec.pipeline.num_stages)]


def passes(spec: RunSpec, stages: list[TorchStage]) -> list[tuple[Any, ...]]:
    """What each stage took (inputs, targets, gradient of its outputs) and gave."""
    inputs, targets = batch(open_data(spec), 0)
    taken, outputs = [inputs], []
    for stage in stages[:-1]:
        outputs.append(stage.forward(KEY, taken[-1]))
        taken.append(outputs[-1])
    loss = stages[-1].forward_backward(KEY, taken[-1], targets)
    gradients: list[Array | None] = [loss.grad_inputs]
    for stage in reversed(stages[:-1]):
        assert gradients[-1] is not None
        gradients.append(stage.backward(KEY, gradients[-1]))
    gradients.reverse()
    given: list[Any] = [StageResult(outputs[i], gradients[i]) for i in range(len(stages) - 1)] + [
        StageResult(None, gradients[-1], loss.loss_sum, loss.num_tokens)
    ]
    above = [*gradients[1:], None]
    return [(x, targets, g, result) for x, g, result in zip(taken, above, given, strict=True)]


@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "blocks"])
def test_it_is_the_real_pass_to_the_bit(
    tmp_path: Path, codec: str, precision: PrecisionName, activations: str
) -> None:
    spec = a_spec(tmp_path, codec)
    real = build(spec, precision=precision, activations=activations)
    again = build(spec, precision=precision, activations=activations)
    for stage, (x, targets, g, given) in zip(again, passes(spec, real), strict=True):
        ours = stage.recompute_pass(KEY, x, targets, g)()
        for one, other in ((ours.outputs, given.outputs), (ours.grad_inputs, given.grad_inputs)):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert bytes(one.data) == bytes(other.data)
        assert (ours.loss_sum, ours.num_tokens) == (given.loss_sum, given.num_tokens)
        assert stage.difference(ours, given) == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_leaves_nothing_behind(tmp_path: Path, precision: PrecisionName) -> None:
    spec = a_spec(tmp_path)
    stages = build(spec, precision=precision)
    for stage, (x, targets, g, _) in zip(stages, passes(spec, stages), strict=True):
        before = gradient(stage).clone(), parameters(stage).clone(), torch.get_rng_state()
        scale = None if stage.loss_scale is None else vars(stage.loss_scale).copy()
        kept = len(stage.kept)
        stage.recompute_pass((0, 1), x, targets, g)()
        assert torch.equal(gradient(stage), before[0])
        assert torch.equal(parameters(stage), before[1])
        assert torch.equal(torch.get_rng_state(), before[2])
        assert scale == (None if stage.loss_scale is None else vars(stage.loss_scale))
        assert len(stage.kept) == kept
        stage.retract(KEY)  # the microbatch itself can be taken out as before
        assert not gradient(stage).abs().max() > 1e-4


def test_a_result_that_is_wrong_differs(tmp_path: Path) -> None:
    spec = a_spec(tmp_path)
    stages = build(spec)
    x, targets, g, given = passes(spec, stages)[1]
    ours = stages[1].recompute_pass((0, 1), x, targets, g)()
    turned = from_tensor(to_tensor(given.grad_inputs) * 1.5)
    assert stages[1].difference(ours, replace(given, grad_inputs=turned)) == pytest.approx(0.5)
    assert stages[1].difference(ours, replace(given, num_tokens=3)) == math.inf
    assert stages[1].difference(ours, replace(given, outputs=None)) == math.inf
    nothing = replace(ours, grad_inputs=from_tensor(to_tensor(given.grad_inputs) * 0.0))
    assert stages[1].difference(nothing, given) == math.inf
    assert stages[1].difference(nothing, nothing) == 0.0
    with pytest.raises(ProtocolViolation):
        stages[1].difference(ours, replace(given, outputs=Array("float32", (1,), bytes(4))))
    with pytest.raises(ProtocolViolation):
        stages[1].recompute_pass((0, 1), x, targets, None)()
