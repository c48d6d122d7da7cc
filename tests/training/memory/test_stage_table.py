"""What any run of a model's layers takes, beside what a peer reckons for a stage of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.protocol.sync_modes import DELAYED
from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.memory.activation_choice import (
    FREE_PART,
    joined,
    known_activations,
    layer_kinds,
    traced_activations,
    traced_layers,
)
from swarmnet.training.memory.plan import BF16, FP32, Precision, base_bytes, state_bytes
from swarmnet.training.memory.stage_needs import choose_memory
from swarmnet.training.memory.stage_table import MachineMemory, StageTable
from swarmnet.training.models.registry import (
    model_plan,
    split_stages,
    stage_matrix_parameters,
    stage_parameter_ranges,
)
from swarmnet.training.stage import build_stage
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
    little = table.held(0, end, 1, MachineMemory(GB, held.host_bytes - 1, True, "fp32"))
    assert little is not None
    assert little.weights == "disk", "the host has no room for them beside the moments"
    on_cpu = table.held(0, end, 1, MachineMemory(GB, GB, False, "fp32"))
    assert on_cpu is not None
    assert on_cpu.host_bytes == 0
    assert on_cpu.device_bytes > held.host_bytes


TWO_CARDS = ((1, ""), (2, "tensor"), (2, "fsdp"))


def of_cards(room: float, between: float, host: float = GB) -> MachineMemory:
    """A machine with two cards of this memory."""
    return MachineMemory(
        room, host, True, "bf16", 2, TWO_CARDS, flops_per_s=1e12, between_bytes_per_s=between
    )


def test_ranks_are_as_quick_as_their_link() -> None:
    table = StageTable(small_spec(pipeline={"num_stages": 1, "microbatch": 2}))
    end = len(table.plan.layers)
    quick, slow = (table.held(0, end, 1, of_cards(GB, between)) for between in (1e15, 1e4))
    assert quick is not None
    assert (quick.ranks, quick.local, quick.part) == (2, "tensor", 1.0)
    numbers = 4 * 16 * 32  # of four blocks, 16 positions of width 32
    sums = (2 + 2) * 2 * numbers  # two forward and two backward, in bf16
    assert quick.between_s == pytest.approx(sums * 2 * (2 - 1) / 2 / 1e15)
    assert slow is not None
    assert (slow.ranks, slow.local, slow.part, slow.between_s) == (1, "", 0.5, 0.0)
    assert quick.device_bytes < slow.device_bytes, "a card has a part"


def test_what_no_card_can_hold_is_divided_and_what_no_cards_can_comes_layer_by_layer() -> None:
    spec = small_spec(pipeline={"num_stages": 1, "microbatch": 2, "global_batch": 4})
    table = StageTable(spec)
    end = len(table.plan.layers)
    whole = table.held(0, end, 1, MachineMemory(GB, GB, True, "bf16"))
    assert whole is not None
    assert (whole.ranks, whole.weights, whole.moved_s) == (1, "device", 0.0)
    needs = table.needs(0, end, BF16)
    room = 0.9 * needs.on_device("host", is_apart=True)
    divided = table.held(0, end, 1, of_cards(room, 1e4))
    assert divided is not None
    assert divided.ranks == 2, "the link is slow, and there is no other way"
    alone = MachineMemory(room, GB, True, "bf16", host_bytes_per_s=1e9, disk_bytes_per_s=1e8)
    streamed = table.held(0, end, 1, alone)
    assert streamed is not None
    assert (streamed.weights, streamed.computes_again) == ("host", True)
    assert streamed.device_bytes < room
    parameters = sum(table.trained)
    assert streamed.moved_s == pytest.approx(3 * 2 * parameters / 1e9)
    little = replace(alone, host_bytes=streamed.host_bytes - 1)
    from_disk = table.held(0, end, 1, little)
    assert from_disk is not None
    assert from_disk.weights == "disk"
    assert from_disk.moved_s == pytest.approx(10 * streamed.moved_s), "of the slower of both"
    kept = spec.model_copy(
        update={"pipeline": spec.pipeline.model_copy(update={"activations": "keep"})}
    )
    assert table.with_spec(kept).held(0, end, 1, alone) is None, "keep would hold the weights"


def test_samples_are_divided_evenly_or_not_at_all() -> None:
    for microbatch, is_possible in ((2, True), (1, False)):
        table = StageTable(small_spec(pipeline={"num_stages": 1, "microbatch": microbatch}))
        end = len(table.plan.layers)
        memory = replace(of_cards(GB, 1e15), ranks=((2, "fsdp"),))
        found = table.held(0, end, 1, memory)
        assert (found is not None and found.local == "fsdp") == is_possible


def test_the_state_is_divided_over_the_cards_of_a_peer() -> None:
    table = StageTable(small_spec(pipeline={"num_stages": 1}))
    needs = table.needs(0, len(table.plan.layers), FP32)
    free = needs.on_device("host", is_apart=True)

    def left(num_devices: int) -> float:
        chosen = choose_memory(
            needs,
            "host",
            free=free,
            policies=("keep",),
            in_flight=1,
            is_apart=True,
            may_be_on_device=False,
            num_devices=num_devices,
        )
        return chosen.left

    assert left(1) == 0.0
    assert left(2) == pytest.approx((2 * FREE_PART - 1) * free)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_backward_passes_have_two_parts_where_a_stage_owes_gradients(
    mode: str, precision: str
) -> None:
    spec = small_spec(pipeline={"num_stages": 3})
    spec = spec.model_copy(update={"sync": spec.sync.model_copy(update={"mode": mode})})
    table = StageTable(spec)
    here = MachineMemory(GB, GB, is_apart=False, precision=precision)
    apart = replace(here, is_apart=True)
    for index, (first, end) in enumerate(ranges(spec)):
        stage = build_stage(spec, index, computing=Computing(precision))  # type: ignore[arg-type]
        held = table.held(first, end, 3, here)
        assert held is not None
        assert held.activations == "keep"
        assert held.splits == (stage.owed is not None)
        assert held.splits == (index > 0 and mode == "zero" and precision != "fp16")
        on_gpu = table.held(first, end, 3, apart)
        assert on_gpu is not None
        assert not on_gpu.splits
    if mode == "zero":
        tight = table.held(*ranges(spec)[1], 3, replace(here, device_bytes=4e5))
        assert tight is not None
        assert tight.activations == "blocks"
        assert not tight.splits
