"""Arrays that enter and leave a stage are what they must be, or refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation, RemoteError
from swarmnet.protocol.codecs import BOUNDARY_CODECS, INT4, INT8, NONE
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.memory.device_copies import OneMemory
from swarmnet.training.models.base import TensorSpec
from swarmnet.training.passes.boundary import Boundary, finite_loss
from swarmnet.training.passes.fp16 import Fp16Refusals
from swarmnet.wire import Array
from tests.training.passes.models import linear_plan

LENGTH, WIDTH, MICROBATCH = 4, 3, 2


def boundary(dtype: torch.dtype = torch.float32) -> Boundary:
    """Tokens in, an activation out."""
    plan = replace(
        linear_plan(), targets=TensorSpec("int32", (LENGTH,), num_values=5), is_sequence=True
    )
    return Boundary(
        plan,
        TensorSpec("int32", (LENGTH,), num_values=5),
        TensorSpec("float32", (LENGTH, WIDTH)),
        stage_index=1,
        microbatch=MICROBATCH,
        dtype=dtype,
        copies=OneMemory(),
        refusals=Fp16Refusals(1) if dtype == torch.float16 else None,
    )


def tokens(shape: tuple[int, ...] = (MICROBATCH, LENGTH), value: int = 1) -> Array:
    return from_tensor(torch.full(shape, value, dtype=torch.int32))


def floats(value: float = 1.0, shape: tuple[int, ...] = (MICROBATCH, LENGTH, WIDTH)) -> Array:
    return from_tensor(torch.full(shape, value))


def test_only_whole_microbatches_are_taken() -> None:
    border = boundary()
    border.check_inputs(tokens())
    border.check_targets(tokens())
    for wrong in (tokens((1, LENGTH)), tokens((MICROBATCH, 3)), floats()):
        with pytest.raises(ProtocolViolation):
            border.check_inputs(wrong)
        with pytest.raises(ProtocolViolation):
            border.check_targets(wrong)
    with pytest.raises(ProtocolViolation):
        border.receive_gradient(floats(shape=(MICROBATCH, LENGTH)))


@pytest.mark.parametrize("value", [-1, 5])
def test_integers_beyond_the_range_are_refused(value: int) -> None:
    with pytest.raises(ProtocolViolation, match="outside"):
        boundary().receive_inputs(tokens(value=value))
    with pytest.raises(ProtocolViolation, match="outside"):
        boundary().receive_targets(tokens(value=value))


@pytest.mark.parametrize("value", [math.nan, math.inf, 2e15])
def test_what_is_not_finite_is_refused_and_whoever_made_it_is_named(value: float) -> None:
    border, array = boundary(), floats(value)
    with pytest.raises(ProtocolViolation, match="not finite"):
        border.receive_gradient(array)
    with pytest.raises(ProtocolViolation, match="not finite"):
        border.send_outputs(to_tensor(array))()
    with pytest.raises(RemoteError, match="the gradient at stage 1 is not finite"):
        border.send_input_gradient(to_tensor(array))()
    with pytest.raises(ProtocolViolation):
        finite_loss(torch.tensor(value))
    with pytest.raises(RemoteError, match="an activation of stage 1 does not fit into fp16"):
        boundary(torch.float16).send_outputs(to_tensor(array).half())()


@pytest.mark.parametrize(
    ("dtype", "received"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_gradients_come_in_the_precision_of_the_passes_or_wait_to_be_scaled(
    dtype: Any, received: Any
) -> None:
    border = boundary(dtype)
    assert border.receive_gradient(floats()).dtype == received
    assert (
        border.send_outputs(torch.ones(MICROBATCH, LENGTH, WIDTH, dtype=dtype))().dtype == "float32"
    )


# ---- coded ------------------------------------------------------------------------------------


def coded_boundary(codec: str, stage_index: int = 1, microbatch: int = MICROBATCH) -> Boundary:
    """An activation in and out."""
    plan = replace(
        linear_plan(), targets=TensorSpec("int32", (LENGTH,), num_values=5), is_sequence=True
    )
    activation = TensorSpec("float32", (LENGTH, WIDTH))
    return Boundary(
        plan,
        activation,
        activation,
        stage_index=stage_index,
        microbatch=microbatch,
        dtype=torch.float32,
        copies=OneMemory(),
        refusals=None,
        codec=BOUNDARY_CODECS[codec],
    )


@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
def test_what_one_stage_gives_the_next_one_takes(codec: str) -> None:
    here, there = coded_boundary(codec, 1), coded_boundary(codec, 2)
    values = torch.randn(MICROBATCH, LENGTH, WIDTH)
    sent = here.send_outputs(values)()
    there.check_inputs(sent)
    received = there.receive_inputs(sent)
    assert received.shape == values.shape
    assert (received - values).abs().max() < 0.5
    assert torch.equal(
        received, coded_boundary(codec, 2).receive_inputs(here.send_outputs(values)())
    )
    back = there.send_input_gradient(values)()
    here.check_gradient(back)
    assert (here.receive_gradient(back) - values).abs().max() < 0.5
    assert torch.equal(received, values) == (codec == NONE)


def test_samples_are_not_coded() -> None:
    coded_boundary(INT8, 0).check_inputs(floats())
    with pytest.raises(ProtocolViolation):
        coded_boundary(INT8, 1).check_inputs(floats())


def test_activations_of_int4_have_more_bits_than_gradients() -> None:
    border, values = coded_boundary(INT4), torch.ones(MICROBATCH, LENGTH, WIDTH)
    activation, back = border.send_outputs(values)(), border.send_input_gradient(values)()
    assert activation.num_bytes > back.num_bytes
    with pytest.raises(ProtocolViolation, match="gradient: uint8 of shape"):
        border.check_gradient(activation)


@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
def test_coded_evaluation_takes_less_than_a_microbatch(codec: str) -> None:
    here, there = coded_boundary(codec, 1), coded_boundary(codec, 2)
    values = torch.randn(1, 2, WIDTH)
    sent = here.send_evaluation(values)()
    received, _ = there.receive_evaluation(sent, tokens((1, 2)))
    assert received.shape == values.shape
    assert (received - values).abs().max() < 0.5
    for wrong, wanted in (
        (here.send_evaluation(torch.randn(1, LENGTH + 1, WIDTH))(), None),
        (Array(sent.dtype, (1, 2, sent.shape[2] + 1), bytes(2 * 100)), None),
        (sent, tokens((1, 3))),
    ):
        with pytest.raises(ProtocolViolation):
            there.receive_evaluation(wrong, wanted)


@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 2e15])
def test_coded_or_not_what_is_not_finite_is_refused(codec: str, value: float) -> None:
    here, values = coded_boundary(codec), torch.full((MICROBATCH, LENGTH, WIDTH), value)
    with pytest.raises(ProtocolViolation, match="not finite"):
        here.send_outputs(values)()
    with pytest.raises(RemoteError, match="the gradient at stage 1 is not finite"):
        here.send_input_gradient(values)()


def test_codes_that_no_codec_makes_are_refused() -> None:
    border = coded_boundary(INT8)
    dtype, shape, data = (lambda a: (a.dtype, a.shape, bytearray(a.data)))(
        border.send_outputs(torch.ones(MICROBATCH, LENGTH, WIDTH))()
    )
    data[-1] = 0x80
    spoilt = Array(dtype, shape, bytes(data))
    with pytest.raises(ProtocolViolation, match="inputs: a code outside"):
        border.receive_inputs(spoilt)
    with pytest.raises(ProtocolViolation, match="gradient: a code outside"):
        border.receive_gradient(spoilt)


def test_outputs_of_another_shape_are_the_models_mistake() -> None:
    with pytest.raises(RemoteError, match="correct the model's output_shape"):
        boundary().send_outputs(torch.ones(MICROBATCH, LENGTH, 7))()


def test_evaluation_takes_less_than_a_microbatch() -> None:
    border = boundary()
    x, targets = border.receive_evaluation(tokens((1, 2)), tokens((1, 2)))
    assert tuple(x.shape) == (1, 2)
    assert targets is not None
    assert not border.is_whole_batch(x)
    assert border.is_whole_batch(border.receive_evaluation(tokens(), None)[0])
    for inputs, wanted in (
        (tokens((3, LENGTH)), None),
        (tokens((1, LENGTH + 1)), None),
        (tokens((0, LENGTH)), None),
        (tokens((1, 2)), tokens((1, 3))),
    ):
        with pytest.raises(ProtocolViolation):
            border.receive_evaluation(inputs, wanted)
