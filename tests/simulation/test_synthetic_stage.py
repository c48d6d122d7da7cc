"""The synthetic stage and optimizer: real vectors, tiny."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import (
    BOUNDARY_CODECS,
    NONE,
    TOKEN_BYTES,
    UPDATE_CODECS,
    boundary_codec,
    sparse_codec,
    update_codec,
)
from swarmnet.simulation.coding import Coding, CodingTime
from swarmnet.simulation.stage import (
    Sizes,
    SyntheticData,
    SyntheticOptimizer,
    SyntheticStage,
    activation,
    check_sum,
    gradient,
)
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.codecs.shards import shard_codec_of
from swarmnet.wire import Array

SIZES = Sizes(num_shards=2, shard_parameters=1_000_000)


def ignore(event: str, **facts: Any) -> None:
    pass


def stage() -> SyntheticStage:
    return SyntheticStage(1, 3, SIZES, ignore)


def pass_through(s: SyntheticStage, key: tuple[int, int]) -> None:
    s.forward_pass(key, activation(key, SIZES))()
    s.backward_pass(key, gradient(key, SIZES))()


def test_gradients_do_not_depend_on_the_order() -> None:
    a, b = stage(), stage()
    for i in range(100):
        pass_through(a, (3, i))
        pass_through(b, (3, 99 - i))
    for j in range(2):
        assert bytes(a.gradient_shard(j).data) == bytes(b.gradient_shard(j).data)
        assert check_sum(1, j, a.gradient_shard(j).data)


def test_a_retraction_takes_out_exactly_what_was_put_in() -> None:
    a, b = stage(), stage()
    for i in range(10):
        pass_through(a, (3, i))
    a.retract((3, 4))
    a.retract((3, 4))
    for i in (0, 1, 2, 3, 5, 6, 7, 8, 9):
        pass_through(b, (3, i))
    assert bytes(a.gradient_shard(0).data) == bytes(b.gradient_shard(0).data)


def test_arrays_claim_their_full_size() -> None:
    s = stage()
    assert s.parameter_shard(0).num_bytes == 4_000_000
    assert len(s.parameter_shard(0).data) < 100


def test_equal_histories_give_equal_parameters_and_different_ones_do_not() -> None:
    stages = [stage() for _ in range(3)]
    optimizers = [SyntheticOptimizer(1, SIZES, ignore) for _ in range(3)]
    for r in range(3):
        for n, (s, o) in enumerate(zip(stages, optimizers, strict=True)):
            ids = range(4) if n < 2 or r != 1 else range(3)
            for i in ids:
                pass_through(s, (r, i))
            for j in range(2):
                if r == 0:
                    o.create(j)
                total = o.sum([s.gradient_shard(j)])
                s.stage_parameters(j, o.step(j, s.parameter_shard(j), total, 1 / 32, r)[1])
            s.finish_round()
    assert stages[0].digest(0) == stages[1].digest(0)
    assert stages[0].digest(0) != stages[2].digest(0)


def test_optimizer_state_travels() -> None:
    a, b = (SyntheticOptimizer(1, SIZES, ignore) for _ in range(2))
    s = stage()
    pass_through(s, (0, 1))
    a.create(0)
    a.step(0, s.parameter_shard(0), a.sum([s.gradient_shard(0)]), 0.1, 0)
    b.load(0, *a.export(0))
    assert b.steps(0) == 1
    total = a.sum([s.gradient_shard(0)])
    again = [o.step(0, s.parameter_shard(0), total, 0.1, 1)[1] for o in (a, b)]
    assert bytes(again[0].data) == bytes(again[1].data)


def test_what_it_hears_of() -> None:
    heard: list[str] = []
    s = SyntheticStage(0, 1, SIZES, lambda event, **facts: heard.append(event))
    inputs, targets = SyntheticData(4).microbatch([7]).arrays
    s.check(inputs, targets)
    s.loss_pass((0, 7), inputs, targets)()
    s.retract((0, 7))
    assert heard == ["forward", "backward", "retract"]


@pytest.mark.parametrize("width", [128, 100])
@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
def test_what_crosses_a_boundary_claims_the_bytes_of_the_wire(codec: str, width: int) -> None:
    """A torch stage of the same width gives arrays of the same size: each token is a row."""
    sizes = Sizes(activation_numbers=3 * width, width=width, codec=codec)
    s = SyntheticStage(1, 3, sizes, ignore)
    names = boundary_codec(codec)
    values, key = torch.ones(3, width), (0, 1)
    sent = s.forward_pass(key, activation(key, sizes))()
    assert sent.num_bytes == codec_of(names.activations).encode(values).nbytes
    assert sent.num_bytes == sizes.activation_bytes
    back = gradient(key, sizes)
    s.check_gradient(back)
    assert back.num_bytes == codec_of(names.gradients).encode(values).nbytes
    assert back.num_bytes == sizes.gradient_bytes
    with pytest.raises(ProtocolViolation):
        s.check_gradient(gradient(key, Sizes(activation_numbers=width, width=width, codec=codec)))
    narrow = replace(sizes, has_tokens=True)
    assert activation(key, narrow).num_bytes == narrow.activation_bytes
    assert narrow.activation_bytes == sizes.activation_bytes + 3 * TOKEN_BYTES
    assert gradient(key, narrow).num_bytes == back.num_bytes
    with pytest.raises(ValueError, match="not rows of"):
        Sizes(activation_numbers=3 * width + 1, width=width)


@pytest.mark.parametrize("codec", [*UPDATE_CODECS, sparse_codec(208)])
def test_shards_of_updates_claim_the_bytes_of_the_wire_and_take_the_time_of_coding(
    codec: str,
) -> None:
    """What the torch codec makes of as many numbers has the same form, and whoever encodes with
    error feedback decodes too."""
    size, coding = 5000, Coding()
    time = CodingTime(coding)
    sizes = Sizes(num_shards=1, shard_parameters=size, update_codec=codec)
    s, optimizer = (
        SyntheticStage(1, 3, sizes, ignore),
        SyntheticOptimizer(1, sizes, ignore, time),
    )
    synthetic, real = optimizer.codec, shard_codec_of(codec, [size])
    values = Array("float32", (size,), torch.ones(size).numpy().tobytes())
    names = update_codec(codec)

    def spent(name: str) -> float:
        return coding.encode_s(name, size) + coding.decode_s(name, size)

    s.forward_pass((0, 1), activation((0, 1), sizes))()
    s.backward_pass((0, 1), gradient((0, 1), sizes))()
    sent = synthetic.contribution(0, s.gradient_shard(0), keeps_error=True)
    assert time.take() == pytest.approx(spent(names.contributions))
    torch_sent = real.contribution(0, values, keeps_error=True)
    assert (sent.dtype, sent.shape) == (torch_sent.dtype, torch_sent.shape)
    decoded = synthetic.decoded_contribution(0, sent)
    time.take()
    total, stepped_on = synthetic.coded_sum(0, optimizer.sum([decoded]))
    assert time.take() == pytest.approx(spent(names.sums))
    torch_total, _ = real.coded_sum(0, values)
    assert (total.dtype, total.shape) == (torch_total.dtype, torch_total.shape)
    decoded = synthetic.decoded_sum(0, total)
    assert time.take() == coding.decode_s(names.sums, size)
    assert decoded == stepped_on
    assert check_sum(1, 0, decoded.data), "nothing of it is lost"
    optimizer.create(0)
    result, after = optimizer.step(0, s.parameter_shard(0), decoded, 1.0, 0)
    assert time.take() == pytest.approx(spent(names.results))
    assert (result.dtype, result.shape) == names.form(names.results, size)
    applied = synthetic.applied(0, s.parameter_shard(0), result)
    assert time.take() == coding.decode_s(names.results, size)
    assert applied == after
    if names.tells_results:
        backup = SyntheticOptimizer(1, sizes, ignore, time)
        backup.create(0)
        assert backup.take(0, s.parameter_shard(0), result, 0) == (result, after)
        assert backup.steps(0) == optimizer.steps(0)
    s.stage_parameters(0, applied)
    if codec != NONE:
        with pytest.raises(ProtocolViolation):
            synthetic.decoded_sum(0, values)


def test_a_backward_twice_is_an_error() -> None:
    s = stage()
    pass_through(s, (0, 1))
    with pytest.raises(AssertionError, match="twice"):
        s.backward_pass((0, 1), gradient((0, 1), SIZES))()
