"""What any run of a model's layers takes, beside what a peer reckons for a stage of a run."""

from __future__ import annotations

import pytest

from swarmnet.protocol.sync_modes import DELAYED
from swarmnet.spec import RunSpec
from swarmnet.training.memory.activation_choice import (
    joined,
    known_activations,
    layer_kinds,
    traced_activations,
    traced_layers,
)
from swarmnet.training.memory.plan import BF16, FP32, Precision, base_bytes, state_bytes
from swarmnet.training.memory.stage_table import MachineMemory, StageTable
from swarmnet.training.models.registry import (
    model_plan,
    split_stages,
    stage_matrix_parameters,
    stage_parameter_ranges,
)
from tests.training.specs import small_spec

GB = 1e9


def ranges(spec: RunSpec) -> list[tuple[int, int]]:
    found, first = [], 0
    for layers in split_stages(model_plan(spec), spec.pipeline.num_stages):
        found.append((first, first + len(layers)))
        first += len(layers)
    return found


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("precision", [FP32, BF16])
@pytest.mark.parametrize("subspace", [0, 8])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_range_of_layers_needs_what_a_stage_of_them_does(
    num_stages: int, precision: Precision, subspace: int, kind: str
) -> None:
    spec = small_spec(
        model={"subspace": subspace}, pipeline={"num_stages": num_stages}, optimizer={"kind": kind}
    )
    table = StageTable(spec)
    for k, (first, end) in enumerate(ranges(spec)):
        needs = table.needs(first, end, precision)
        trained = stage_parameter_ranges(spec, k)[-1].stop
        muon = stage_matrix_parameters(spec, k)
        state = state_bytes(trained, 1, 2, precision, spec.sync.mode, spec.sync.codec, muon)
        plain = state_bytes(trained, 1, 2, precision, spec.sync.mode, spec.sync.codec)
        assert needs.optimizer == plain[2] - 4 * muon
        assert (needs.weights, needs.gradients, needs.optimizer, needs.exchange) == state
        assert needs.activations == known_activations(spec, k, precision)
        assert needs.base >= base_bytes(spec, k, precision)


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_layers_that_are_traced_apart_come_to_the_stage_that_is_traced(
    precision: Precision,
) -> None:
    spec = small_spec(pipeline={"num_stages": 3})
    plan = model_plan(spec)
    kinds = layer_kinds(plan.layers)
    for k, (first, end) in enumerate(ranges(spec)):
        layers = traced_layers(spec, plan, precision, kinds, begins=first == 0)
        one = joined(layers[first:end], precision, is_last=end == len(layers))
        other = traced_activations(spec, k, precision)
        for policy in ("keep", "blocks", "recompute", "offload"):
            here, there = one.held(policy, 3), other.held(policy, 3)
            assert here == pytest.approx(there, rel=0.03), (k, policy)


def test_a_small_card_keeps_less_and_a_smaller_one_has_no_room() -> None:
    long = {"max_position_embeddings": 256}
    table = StageTable(small_spec(model=long, pipeline={"num_stages": 2, "global_batch": 64}))

    def policy(room: float) -> str | None:
        held = table.held(0, 3, 2, MachineMemory(room, GB, True, "bf16"))
        return None if held is None else held.activations

    whole = table.held(0, 3, 2, MachineMemory(GB, GB, True, "bf16"))
    assert whole is not None
    assert policy(GB) == "keep"
    assert policy(0.9 * whole.device_bytes) == "blocks"
    assert policy(0.02 * whole.device_bytes) is None


def test_device_and_host_are_told_apart() -> None:
    spec = small_spec(pipeline={"num_stages": 1})
    table = StageTable(spec)
    end = len(table.plan.layers)
    large = table.held(0, end, 1, MachineMemory(GB, GB, True, "fp32"))
    assert large is not None
    assert large.host_bytes == 0, "the GPU has room for the moments"
    delayed = spec.model_copy(update={"sync": spec.sync.model_copy(update={"mode": DELAYED})})
    table = table.with_spec(delayed)
    held = table.held(0, end, 1, MachineMemory(GB, GB, True, "fp32"))
    assert held is not None
    needs = table.needs(0, end, FP32)
    assert held.host_bytes == needs.weights + needs.gradients + needs.optimizer + needs.exchange
    assert table.held(0, end, 1, MachineMemory(GB, held.host_bytes - 1, True, "fp32")) is None
    on_cpu = table.held(0, end, 1, MachineMemory(GB, GB, False, "fp32"))
    assert on_cpu is not None
    assert on_cpu.host_bytes == 0
    assert on_cpu.device_bytes > held.host_bytes
