"""A stage whose layers compute in another memory: here in a second part of the same one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.data import open_data
from swarmnet.training.late_arrays import Late
from swarmnet.training.memory.device_copies import OneMemory, OnHost, copies_of
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.optimizer.sharded import ShardedOptimizer
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import batch, fly, gradient, optimizers_of, parameters, update
from tests.training.specs import small_spec, write_text


class Logged(OneMemory):
    """Copies, as a GPU's do; `num_inward` and `num_outward` count them."""

    is_apart = True

    def __init__(self) -> None:
        self.num_inward = self.num_outward = self.outward_bytes = 0

    def to_device(self, tensor: torch.Tensor, after: Any = None) -> torch.Tensor:
        self.num_inward += 1
        return tensor.clone()

    def to_host(self, tensor: torch.Tensor) -> OnHost:
        self.num_outward += 1
        self.outward_bytes += tensor.nbytes
        return OnHost(tensor.clone())


def stage_apart(spec: RunSpec, index: int, copies: Logged, **options: Any) -> TorchStage:
    """A stage whose layers compute in the memory of `copies`."""
    make = functools.partial(TorchStage, copies=copies)
    return build_stage(spec, index, make=make, **options)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return small_spec(write_text(tmp_path), pipeline={"num_stages": 3})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_another_memory_changes_no_bit(spec: RunSpec, precision: Any, activations: Any) -> None:
    data = open_data(spec)
    computing = Computing(precision, activations)
    here = [build_stage(spec, i, computing=computing) for i in range(3)]
    logs = [Logged() for _ in range(3)]
    apart = [stage_apart(spec, i, log, computing=computing) for i, log in enumerate(logs)]
    rows = (here, apart)
    optimizers = [optimizers_of(spec, row) for row in rows]
    for r in range(2):
        for i in range(3):
            a, b = (fly(row, (r, i), *batch(data, 3 * r + i)) for row in rows)
            assert a.loss_sum == b.loss_sum
        for row in rows:
            row[1].retract((r, 1))
        for ours, theirs in zip(apart, here, strict=True):
            assert torch.equal(gradient(ours), gradient(theirs))
            vectors = ours.vectors.present
            assert vectors.adding is not vectors.gradients
            for p in ours.layers.parameters():
                assert p.untyped_storage().data_ptr() != vectors.parameters.data_ptr()
        for row, owned in zip(rows, optimizers, strict=True):
            update(row, owned, 2 * a.num_tokens, 1.0, r)
        for ours, theirs in zip(apart, here, strict=True):
            assert torch.equal(parameters(ours), parameters(theirs))
            assert not gradient(ours).any()
    # in: inputs and gradient; out: activation and gradient (the first stage gives none back)
    assert [(log.num_inward, log.num_outward) for log in logs] == [(12, 6), (12, 12), (12, 6)]


def passed(spec: RunSpec, row: list[TorchStage], r: int) -> int:
    """Microbatches of a round through the stages. Returns the tokens."""
    data = open_data(spec)
    done = [fly(row, (r, i), *batch(data, 3 * r + i)) for i in range(3)]
    return sum(result.num_tokens for result in done)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
@pytest.mark.parametrize("for_others", [False, True])
def test_an_update_on_the_device_changes_no_bit_and_brings_codes_alone_to_the_host(
    tmp_path: Path, precision: Any, codec: str, for_others: bool
) -> None:
    parts = {"pipeline": {"num_stages": 2}, "sync": {"codec": codec}}
    spec = small_spec(write_text(tmp_path), **parts)
    copies = [Logged() for _ in range(2)]
    there = Computing(precision, updates_on_device=True)
    here = [build_stage(spec, i, computing=Computing(precision)) for i in range(2)]
    apart = [stage_apart(spec, i, log, computing=there) for i, log in enumerate(copies)]
    rows = (here, apart)
    optimizers = [optimizers_of(spec, row) for row in rows]
    for r in range(3):
        tokens = {passed(spec, row, r) for row in rows}
        before = [log.outward_bytes for log in copies]
        sent = [
            exchanged(row, owned, 1 / tokens.copy().pop(), r, for_others=for_others)
            for row, owned in zip(rows, optimizers, strict=True)
        ]
        assert sent[0] == sent[1]
        if codec != "none":
            crossed = [log.outward_bytes - b for log, b in zip(copies, before, strict=True)]
            coded = [sum(len(data) for data in of_stage) for of_stage in sent[1]]
            assert crossed == coded
        for ours, theirs in zip(apart, here, strict=True):
            assert ours.vectors.present.adding is ours.vectors.present.gradients
            assert torch.equal(parameters(ours), parameters(theirs))
            assert [ours.digest(j) for j in range(len(ours.shard_sizes))] == [
                theirs.digest(j) for j in range(len(ours.shard_sizes))
            ]
            assert not gradient(ours).any()
    for ours, theirs in zip(*optimizers, strict=True):
        for j in ours.owned():
            values, arrays = ours.export(j)
            others = theirs.export(j)
            assert values == others[0]
            assert [bytes(a.data) for a in arrays] == [bytes(a.data) for a in others[1]]
            ours.load(j, *others)
            assert [bytes(a.data) for a in ours.export(j)[1]] == [bytes(a.data) for a in arrays]


def exchanged(
    stages: list[TorchStage],
    optimizers: list[ShardedOptimizer],
    scale: float,
    r: int,
    *,
    for_others: bool,
) -> list[list[bytes]]:
    """A round's update of stages whose replicas are alone, as `swarm.update.exchange` makes it.
    Returns by stage the codes that are there for others."""
    sent = []
    for stage, optimizer in zip(stages, optimizers, strict=True):
        codec, arrays = optimizer.codec, list[Array]()
        for j in range(len(stage.shard_sizes)):
            part = codec.contribution(
                j, stage.gradient_shard(j), keeps_error=True, for_others=for_others
            )
            total = optimizer.sum([codec.decoded_contribution(j, part)])
            coded, decoded = codec.coded_sum(j, total)
            assert optimizer.sum_of_squares(codec.decoded_sum(j, coded)) == (
                optimizer.sum_of_squares(decoded)
            )
            result, after = optimizer.step(
                j, stage.parameter_shard(j), decoded, scale, r, for_others=for_others
            )
            arrays += [array for array in (part, coded, result) if not isinstance(array, Late)]
            if for_others:
                after = codec.applied(j, stage.parameter_shard(j), result)
            stage.stage_parameters(j, after)
        sent.append([bytes(array.data) for array in arrays if array.dtype != "float32"])
        stage.finish_round()
    return sent


def test_moments_that_outgrow_a_device_go_to_the_host(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    computing = Computing(updates_on_device=True)
    stage = stage_apart(spec, 0, Logged(), computing=computing)
    optimizer = build_optimizer(spec, stage)
    zeros, num_left = torch.zeros, [3]

    def full(*size: Any, **options: Any) -> torch.Tensor:
        if "device" in options:
            num_left[0] -= 1
            if num_left[0] < 0:
                raise torch.OutOfMemoryError
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", full)
    for j in range(len(stage.shard_sizes)):
        optimizer.create(j)
    lines = [r.getMessage() for r in caplog.records if "no room" in r.getMessage()]
    assert lines == ["cpu has no room for more optimizer state: the host's memory"]


def test_a_cpu_copies_nothing() -> None:
    copies = copies_of(torch.device("cpu"))
    x = torch.ones(3)
    assert copies.to_device(x) is x
    assert copies.to_host(x).wait() is x


def test_a_gradient_that_is_read_twice_is_collected_again_after_more_work(spec: RunSpec) -> None:
    data = open_data(spec)
    apart = [stage_apart(spec, i, Logged()) for i in range(3)]
    fly(apart, (0, 0), *batch(data, 0))
    first = gradient(apart[0])
    assert torch.equal(gradient(apart[0]), first)
    fly(apart, (0, 1), *batch(data, 1))
    assert not torch.equal(gradient(apart[0]), first)
    apart[0].retract((0, 1))
    torch.testing.assert_close(gradient(apart[0]), first, rtol=0, atol=1e-5)
