"""What a stage keeps is chosen by what there is room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.spec import LoraSpec, ModelSpec, RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.custom_data import CustomData
from swarmnet.training.data import open_data
from swarmnet.training.memory import offload
from swarmnet.training.memory.activation_choice import (
    MIN_IN_FLIGHT,
    POLICIES,
    choose_activations,
    expected_in_flight,
    known_activations,
    traced_activations,
)
from swarmnet.training.memory.plan import BF16, FP32, Precision, stage_activations
from swarmnet.training.memory.stage_table import StageTable
from swarmnet.training.models.registry import model_plan
from swarmnet.training.stage import build_stage
from swarmnet.wire import Array
from tests.training.flights import batch
from tests.training.memory.test_memory_plan import kept_bytes
from tests.training.specs import MODEL, small_spec, write_text

GPT = {"hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 128}


@given(
    st.floats(0, 1e9),
    st.integers(1, 100),
    st.sampled_from([FP32, BF16]),
    st.integers(0, 2),
)
def test_the_quickest_that_fits_else_the_one_with_most_room(
    free_bytes: float, in_flight: int, precision: Precision, stage: int
) -> None:
    spec = small_spec(model=GPT, pipeline={"num_stages": 3})
    one = stage_activations(spec, stage, precision)
    assert one is not None
    choice = choose_activations(one, free_bytes=free_bytes, in_flight=in_flight)
    fitting = [p for p in POLICIES if one.held(p, in_flight)[0] <= free_bytes]
    if fitting:
        assert choice.activations == fitting[0]
    assert choice.max_in_flight >= MIN_IN_FLIGHT
    if choice.max_in_flight > MIN_IN_FLIGHT:
        assert one.held(choice.activations, choice.max_in_flight)[0] <= free_bytes
        if not one.is_last:
            assert one.held(choice.activations, choice.max_in_flight + 1)[0] > free_bytes


def test_less_memory_takes_one_policy_after_the_other() -> None:
    spec = small_spec(model=GPT | {"num_hidden_layers": 16}, pipeline={"num_stages": 2})
    one = stage_activations(spec, 0, FP32)
    assert one is not None
    seen: list[str] = []
    for megabytes in range(200, 0, -1):
        policy = choose_activations(one, free_bytes=megabytes * 1e6, in_flight=8).activations
        if policy not in seen:
            seen.append(policy)
    assert seen[0] == "keep"
    assert seen[1] == "blocks"
    assert len(seen) >= 3


def test_microbatches_in_flight_follow_the_pipeline() -> None:
    def expected(**pipeline: Any) -> int:
        return expected_in_flight(small_spec(pipeline=pipeline))

    assert expected(num_stages=2, global_batch=800) == 6
    assert expected(num_stages=4, global_batch=800) == 11
    assert expected(num_stages=4, global_batch=8) == 4  # there are no more in a round
    assert expected(num_stages=2, global_batch=800, max_in_flight=3) == 6


CUSTOM = Path(__file__).parents[3] / "examples" / "custom_model.py"


def custom_spec(batch: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {
                "kind": "custom",
                "builder": f"{CUSTOM}:build",
                "options": {"width": 16, "num_blocks": 4},
            },
            "optimizer": {"learning_rate": 1e-2, "rounds": 4},
            "pipeline": {"num_stages": 3, "global_batch": batch, "microbatch": batch},
        }
    )


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
def test_a_custom_model_is_traced_without_memory(precision: Precision) -> None:
    spec = custom_spec(64)
    plan = model_plan(spec)
    assert plan.data is not None
    data, targets = batch(CustomData(plan.data(spec)), 0)
    for k in range(3):
        one = known_activations(spec, k, precision)
        assert one is not None
        inputs = Array(data.dtype, data.shape, bytes(data.data))
        stage = build_stage(spec, k, computing=Computing(precision.name))  # type: ignore[arg-type]
        measured, output = kept_bytes(stage, inputs, targets)
        between = one.held("keep", 1)[0] - one.passing - one.grad_came
        assert between == pytest.approx(measured, rel=0.02), f"stage {k}"
        data = output or data


def test_the_trace_of_a_llama_finds_what_the_formula_says() -> None:
    spec = small_spec(model=GPT | {"max_position_embeddings": 16}, pipeline={"num_stages": 3})
    for k in range(3):
        traced, formula = (f(spec, k, FP32) for f in (traced_activations, stage_activations))
        assert formula is not None
        assert traced.held("keep", 1)[0] == pytest.approx(formula.held("keep", 1)[0], rel=0.02)
        assert traced.inputs == formula.inputs
        assert traced.sent == formula.sent


ADAPTERS = {
    "none": None,
    "two": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def of_family(spec: RunSpec) -> RunSpec:
    """The same model, as transformers has it."""
    config = spec.model.model_dump(include=set(MODEL)) | {"model_type": "llama"}
    model = ModelSpec.model_validate({"kind": "transformers", "config": config})
    data = spec.data.model_copy(update={"sequence_length": spec.sequence_length})
    return spec.model_copy(update={"model": model, "data": data})


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("is_built_in", [True, False], ids=["llama", "transformers"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
def test_what_is_kept_for_adapters_is_what_is_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    policy: Any,
    is_built_in: bool,
    adapters: str,
) -> None:
    """A matrix that is not trained keeps no input; layers before the first adapter keep nothing."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    pipeline = {"num_stages": 3, "microbatch": 4, "layers": (2, 2, 3)}
    spec = small_spec(write_text(tmp_path), pipeline=pipeline)
    data, targets = batch(open_data(spec), 0)
    if not is_built_in:
        spec = of_family(spec)
    if (targeted := ADAPTERS[adapters]) is not None:
        lora = LoraSpec(r=4, lora_alpha=8.0, target_modules=targeted)
        spec = spec.model_copy(update={"lora": lora})
    computing = Computing(precision.name, policy, folder=str(tmp_path))  # type: ignore[arg-type]
    table, first = StageTable(spec), 0
    for k, layers in enumerate(spec.pipeline.layers):
        inputs = Array(data.dtype, data.shape, bytes(data.data))
        stage = build_stage(spec, k, computing=computing)
        for p in (p for module in stage.layers.modules for p in module.parameters()):
            if not p.requires_grad:  # nobody has brought the base
                p.data.fill_(0.01)
        measured, output = kept_bytes(stage, inputs, targets)
        planned = table.needs(first, first + layers, precision).activations
        first += layers
        for one in (known_activations(spec, k, precision), planned):
            assert one is not None
            if not stage.is_last:
                more = one.held(policy, 2)[0] - one.held(policy, 1)[0]
                assert more == pytest.approx(measured, rel=0.03), f"stage {k}"
            elif policy == "keep":
                between = one.held(policy, 1)[0] - one.passing
                assert between == pytest.approx(measured, rel=0.03)
        data = output or data


def test_where_nobody_knows_the_graph_is_kept() -> None:
    choice = choose_activations(None, free_bytes=0.0, in_flight=4)
    assert (choice.activations, choice.needed_bytes) == ("keep", None)
