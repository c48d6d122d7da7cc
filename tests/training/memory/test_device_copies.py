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
from swarmnet.training.memory.device_copies import OneMemory, OnHost, copies_of
from swarmnet.training.stage import TorchStage, build_stage
from tests.training.flights import batch, fly, gradient, optimizers_of, parameters, update
from tests.training.specs import small_spec, write_text


class Logged(OneMemory):
    """Copies, as a GPU's do; `num_inward` and `num_outward` count them."""

    is_apart = True

    def __init__(self) -> None:
        self.num_inward = self.num_outward = 0

    def to_device(self, tensor: torch.Tensor, after: Any = None) -> torch.Tensor:
        self.num_inward += 1
        return tensor.clone()

    def to_host(self, tensor: torch.Tensor) -> OnHost:
        self.num_outward += 1
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
