"""Backward passes: what they add, what they take out, and what a failed one leaves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from swarmnet.errors import RemoteError
from swarmnet.training.memory.roots import given
from swarmnet.training.passes.backward import BackwardPasses
from swarmnet.training.passes.fp16 import Fp16Refusals, LossScale
from swarmnet.training.passes.layers import StageLayers
from tests.training.passes.models import WIDTH, linear_layers

GRAD = torch.ones(2, WIDTH)


def passes_of(layers: StageLayers) -> BackwardPasses:
    if layers.dtype != torch.float16:
        return BackwardPasses(layers, None, None)
    return BackwardPasses(layers, LossScale(), Fp16Refusals(0))


def inputs_for(layers: StageLayers, factor: float = 1.0) -> torch.Tensor:
    x = factor * torch.arange(2.0 * WIDTH).view(2, WIDTH)
    return x.to(layers.dtype).requires_grad_()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("keeps_graph", [True, False])
def test_what_is_added_can_be_taken_out(precision: Any, keeps_graph: bool) -> None:
    layers = linear_layers(precision)
    passes, x = passes_of(layers), inputs_for(layers)
    root = layers.run((0, 0), x) if keeps_graph else None
    grad = GRAD if precision == "fp16" else GRAD.to(layers.dtype)
    scale = passes.add(root, lambda: layers.run((0, 0), x), grad, x)
    assert (scale == 1.0) == (precision != "fp16")
    exact = linear_layers()
    exact.run((0, 0), inputs_for(exact)).backward(GRAD)
    torch.testing.assert_close(layers.shown.gradients, exact.shown.gradients, rtol=0.02, atol=0.01)
    assert x.grad is not None
    passes.subtract(lambda: layers.run((0, 0), x.detach()), grad, scale)
    assert not layers.shown.gradients.any()


def test_the_gradient_of_a_loss_is_one() -> None:
    layers = linear_layers()
    passes, x = passes_of(layers), inputs_for(layers)

    def loss() -> torch.Tensor:
        return layers.run((0, 0), x).square().sum()

    passes.add(None, loss, torch.tensor(1.0), x)
    assert layers.shown.gradients.any()
    passes.subtract(loss, None, 1.0)
    assert not layers.shown.gradients.any()


def out_of_memory(_: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory left")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_failed_pass_spoils_the_sum_but_in_fp16(precision: Any) -> None:
    layers = linear_layers(precision)
    passes, x = passes_of(layers), inputs_for(layers)
    hook = layers.parameters()[0].register_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        passes.add(None, lambda: layers.run((0, 0), x), GRAD.to(layers.dtype), x)
    hook.remove()
    gradients = layers.shown.gradients
    assert gradients.isnan().all() if precision != "fp16" else not gradients.any()


def test_a_pass_that_cannot_take_a_gradient_out_spoils_the_sum_in_fp16_too() -> None:
    layers = linear_layers("fp16")
    passes, x = passes_of(layers), inputs_for(layers)
    scale = passes.add(None, lambda: layers.run((0, 0), x), GRAD, x)
    layers.parameters()[0].register_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        passes.subtract(lambda: layers.run((0, 0), x.detach()), GRAD, scale)
    assert layers.shown.gradients.isnan().all()


def test_ranks_that_do_not_agree_refuse_together(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = linear_layers("fp16")
    passes, x = passes_of(layers), inputs_for(layers)
    monkeypatch.setattr(layers, "agree", lambda is_good: False)
    with pytest.raises(RemoteError, match="a gradient at stage 0 does not fit into fp16"):
        passes.add(None, lambda: layers.run((0, 0), x), GRAD, x)
    assert not layers.shown.gradients.any()
    assert x.grad is None


def test_refusals_are_told_less_often_the_more_there_are(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Fp16Refusals(3)
    for _ in range(9):
        assert "an activation of stage 3 does not fit" in str(refusals.refuse("an activation of"))
    assert refusals.num_refused == 9
    assert len(caplog.records) == 4, "of the first, second, fourth and eighth"


def test_a_gradient_that_is_given_goes_back_bit_for_bit() -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, generator=rng)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 4, generator=rng).to(dtype)
        ways = [weight.to(dtype, copy=True).requires_grad_() for _ in range(2)]
        grad = torch.randn(5, 3, generator=rng).to(dtype)
        (x @ ways[0]).backward(grad)
        given(x @ ways[1], grad).backward()
        assert ways[0].grad is not None
        assert ways[1].grad is not None
        assert torch.equal(ways[0].grad, ways[1].grad)


def test_passes_import_no_library_of_symbols() -> None:
    """torch does for a backward pass that is told a gradient: 50 MB in every peer."""
    code = (
        "import sys; from swarmnet.training.device_trial import try_device;"
        "assert try_device('cpu', updates_on_device=False).is_right;"
        "print([name for name in ('sympy', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
