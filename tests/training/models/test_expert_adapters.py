"""Adapters on experts: PEFT's numbers, names and files; rows of an expert meet its own alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmnet.errors import SpecError
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.spec import LoraSpec, RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.memory import offload
from swarmnet.training.memory.activation_choice import known_activations
from swarmnet.training.memory.plan import FP32, base_bytes, held_parts, plan_memory
from swarmnet.training.models.base import describe_base
from swarmnet.training.models.family_probe import check_experts_adapted
from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
from swarmnet.training.models.lora_folder import PREFIX, adapter_tensors
from swarmnet.training.models.model_config import read_config
from swarmnet.training.models.registry import model_plan
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.flights import gradient, named
from tests.training.memory.test_memory_plan import kept_bytes
from tests.training.specs import small_spec
from tests.training.test_families import folder_of
from tests.training.test_lora import gradient_of, randomize, stages_of, tokens

KEY = (0, 1)
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "initializer_range": 0.2}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "both": ("mixtral", {"num_local_experts": 4, "initializer_range": 0.2}, ["q_proj", *BOTH]),
    "the first alone": ("qwen3_moe", {"num_experts": 4} | SIZES, ["mlp.experts.gate_up_proj"]),
    "beside a shared one": (
        "qwen2_moe",
        {"num_experts": 4, "shared_expert_intermediate_size": 16} | SIZES,
        ["down_proj", "experts.down_proj", "layers.1.mlp.experts.gate_up_proj"],
    ),
}


def trained_of(stages: list[TorchStage]) -> dict[str, Tensor]:
    return {name: values.clone() for s in stages for name, values in s.state_dict().items()}


def with_peft(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    )


def logits_of(stages: list[TorchStage]) -> Tensor:
    x = tokens()
    for stage in stages:
        found = stage.evaluate(x, None)
        assert isinstance(found, Array)
        x = found
    return to_tensor(x)


@pytest.mark.parametrize("case", CASES)
def test_numbers_names_and_files_are_those_of_peft(case: str, tmp_path: Path) -> None:
    kind, sizes, targets = CASES[case]
    folder = tmp_path / "model"
    folder_of(folder, kind, **sizes)
    spec, _ = lora_run(folder, tmp_path, lora={**LORA, "target_modules": targets})
    stages = stages_of(spec, folder)
    plain = logits_of(stages)
    randomize(stages)
    found, trained = logits_of(stages), trained_of(stages)
    assert (found - plain).abs().max() > 0.01 * plain.abs().max()
    write_folder(tmp_path / "out", Trained(spec, 3, trained))
    theirs = with_peft(folder, tmp_path / "out")
    words, targets_BS = to_tensor(tokens()).long(), to_tensor(tokens(2)).long()
    logits = theirs(words).logits
    torch.testing.assert_close(found, logits.detach(), rtol=0, atol=1e-5)

    # What training adds up is what torch's own backward pass finds.
    flat = gradient_of(stages)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets_BS.flatten(), reduction="sum"
    )
    loss.backward()
    start, ours = 0, {}
    for stage in stages:
        part = flat[start : start + stage.num_parameters]
        ours |= named(stage, part)
        start += stage.num_parameters
    expected = {n.replace(".default.", "."): p.grad for n, p in theirs.named_parameters()}
    for name, values in adapter_tensors(ours).items():
        grad = expected[name]
        assert grad is not None
        assert (values - grad).norm() < 1e-5 * grad.norm(), name

    # The whole model with the adapters in its weights is the same, and so is a run from the folder.
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    write_folder(tmp_path / "whole", Trained(spec, 3, trained).whole(state))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(whole(words).logits.detach(), found, rtol=0, atol=1e-5)
    again, hashes = lora_run(folder, tmp_path, lora={"from": str(tmp_path / "out")})
    assert again.lora is not None
    assert again.lora.target_modules == tuple(sorted(targets))
    weights = ModelWeights(again, hashes, folder, adapter=tmp_path / "out")
    layout = InitialLayout.of(again)
    for k in range(2):
        first = len(layout.base_sizes[k])
        shards = [weights.shard(k, first + j) for j in range(len(layout.trained_sizes[k]))]
        values = torch.cat([to_tensor(s) for s in shards if s is not None])
        for r in layout.trained[k]:
            assert torch.equal(r.part_of(values), trained[r.name])


def beside_trained(full: TorchStage, spec: RunSpec, lora: dict[str, Any]) -> TorchStage:
    """A stage of adapters over what another one has. The run that it goes on from is left out."""
    stage = build_stage(with_lora(spec, lora), 0, computing=Computing())
    fill(stage, full)
    return stage


def with_lora(spec: RunSpec, lora: dict[str, Any]) -> RunSpec:
    return spec.model_copy(update={"lora": LoraSpec.model_validate(lora)})


def fill(stage: TorchStage, full: TorchStage) -> None:
    values = full.state_dict()
    ranges = describe_base(stage.layers.plan, stage.layers.builders)
    flat = torch.cat([values[r.name].flatten() for r in ranges])
    start = 0
    for number, size in enumerate(stage.base.shard_sizes):
        stage.base.put(number, from_tensor(flat[start : start + size].clone()))
        start += size


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ({}, ["q_proj", *BOTH]),
        ({"shared_expert_intermediate_size": 16}, ["down_proj", "experts.down_proj"]),
    ],
    ids=["mixtral", "qwen2_moe"],
)
def test_the_built_in_model_s_are_of_its_family_s_shape(
    model: dict[str, Any], targets: list[str], tmp_path: Path
) -> None:
    spec = small_spec(
        model=EXPERTS | model, pipeline={"num_stages": 1, "microbatch": 4, "global_batch": 8}
    )
    full = build_stage(spec, 0, computing=Computing())
    lora = {**LORA, "target_modules": targets}
    stage = beside_trained(full, spec, lora)
    randomize([stage])
    found, trained = logits_of([stage]), trained_of([stage])
    assert (found - logits_of([full])).abs().max() > 0.01 * found.abs().max()
    base = {name: values.clone() for name, values in full.state_dict().items()}
    write_folder(tmp_path / "base", Trained(spec, 0, base))
    adapted = Trained(with_lora(spec, lora), 3, trained, base=str(tmp_path / "base"))
    write_folder(tmp_path / "out", adapted)
    with torch.no_grad():
        words = to_tensor(tokens()).long()
        theirs = with_peft(tmp_path / "base", tmp_path / "out")(words).logits
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
        write_folder(tmp_path / "whole", adapted.whole(base))
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(words).logits
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_policies_make_the_same_gradient_and_take_it_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    folder = tmp_path / "model"
    folder_of(folder, "mixtral", num_local_experts=4)
    spec, _ = lora_run(folder, tmp_path, lora={**LORA, "target_modules": BOTH})
    expected = None
    for policy in ("keep", "blocks", "recompute", "offload"):
        computing = Computing("fp32", policy, folder=str(tmp_path))
        stages = stages_of(spec, folder, computing)
        randomize(stages)
        found = gradient_of(stages)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        for stage in stages:
            stage.retract(KEY)
            assert gradient(stage).norm() < 1e-5 * expected.norm()


def test_an_expert_that_no_token_has_chosen_learns_nothing() -> None:
    spec = small_spec(
        model=EXPERTS | {"num_experts_per_tok": 1, "num_hidden_layers": 1},
        pipeline={"num_stages": 1, "microbatch": 4, "global_batch": 8},
    )
    full = build_stage(spec, 0, computing=Computing())
    with torch.no_grad():
        router = full.state_dict()["model.layers.0.mlp.gate.weight"]
        router[1], router[2:] = -router[0], 0.0
    stage = beside_trained(full, spec, {**LORA, "target_modules": BOTH})
    randomize([stage])
    stage.forward_backward(KEY, tokens(), tokens(2))
    of = {n.split("expert_adapters.")[1]: g for n, g in named(stage, gradient(stage)).items()}
    for name in ("gate_up_proj", "down_proj"):
        a_ErI = of[f"{name}.lora_A.weight"].unflatten(0, (4, 4))
        b_OrE = of[f"{name}.lora_B.weight"].unflatten(1, (4, 4))
        assert all(a_ErI[e].any() and b_OrE[..., e].any() for e in (0, 1))
        assert not a_ErI[2:].any()
        assert not b_OrE[..., 2:].any()


def test_the_plan_counts_them() -> None:
    plain = small_spec(
        model=EXPERTS, pipeline={"num_stages": 1, "microbatch": 4, "global_batch": 8}
    )
    spec = with_lora(plain, {**LORA, "target_modules": BOTH})
    width, inner, rank, layers = 32, 48, 4, 4
    pairs = layers * 4 * rank * ((width + 2 * inner) + (inner + width))
    (row,) = plan_memory(spec, num_replicas=1, in_flight=1)
    assert row.num_parameters == pairs
    assert row.gradients == FP32.gradients * pairs
    assert held_parts(spec, 0, 2)[0] == 0.5, "a rank has those of its experts"
    full = build_stage(plain, 0, computing=Computing())
    stage = build_stage(spec, 0, computing=Computing(activations="keep"))
    fill(stage, full)
    randomize([stage])
    one = known_activations(spec, 0, FP32)
    assert one is not None
    measured, _ = kept_bytes(stage, tokens(), tokens(2))
    assert 0.5 * one.graph < measured <= one.held("keep", 1)[0]


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_a_base_takes_what_the_plan_says(dtype: Any, tmp_path: Path) -> None:
    """Stacks stay in the precision of the passes, linear layers in the run's."""
    folder = tmp_path / "model"
    folder_of(folder, "mixtral", num_local_experts=4, intermediate_size=200)
    lora = {**LORA, "target_modules": BOTH, "base_dtype": dtype}
    spec, _ = lora_run(folder, tmp_path, lora=lora, num_stages=1)
    stage = build_stage(spec, 0, computing=Computing())
    parameters = [p for m in stage.layers.modules for p in m.parameters()]
    held = sum(p.nbytes for p in parameters if not p.requires_grad)
    assert base_bytes(spec, 0, FP32) == pytest.approx(held, rel=0.05)


def test_what_cannot_be_adapted_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder_of(folder, "mixtral", num_local_experts=4)

    def refused(match: str, **lora: Any) -> None:
        with pytest.raises(SpecError, match=match) as caught:
            lora_run(folder, tmp_path, lora={**LORA, "target_modules": BOTH, **lora})
        assert "\n" not in str(caught.value)

    refused(r"lora_dropout does not go with adapters on experts", lora_dropout=0.1)
    for name in ("gate_up_proj", "down_proj", "experts.0.w1", "w2"):
        there = r"there are: .*v_proj, experts.down_proj, experts.gate_up_proj"
        refused(f"{name} is of experts, .*{there}", target_modules=["q_proj", name])
    other = tmp_path / "other"
    folder_of(other, "gpt_oss", num_local_experts=4, head_dim=16, num_experts_per_tok=2)
    with pytest.raises(SpecError, match="experts of model_type gpt_oss compute in a way"):
        check_experts_adapted(read_config(other).values)
    check_experts_adapted(read_config(folder).values)


def test_a_folder_with_one_expert_s_matrices_apart_is_refused(tmp_path: Path) -> None:
    """As PEFT wrote them before transformers had stacks."""
    folder = tmp_path / "model"
    folder_of(folder, "mixtral", num_local_experts=4)
    spec, _ = lora_run(folder, tmp_path, lora={**LORA, "target_modules": BOTH})
    out = tmp_path / "out"
    write_folder(out, Trained(spec, 3, trained_of(stages_of(spec, folder))))
    assert not any(PREFIX in r.name for r in InitialLayout.of(spec).trained[0])
    assert model_plan(spec).has_base
    path = out / "adapter_config.json"
    config = json.loads(path.read_text())
    assert config["target_modules"] == []
    path.write_text(json.dumps(config | {"target_parameters": [], "target_modules": ["w1"]}))
    with pytest.raises(SpecError, match="w1 is of experts"):
        lora_run(folder, tmp_path, lora={"from": str(out)})
    path.write_text(json.dumps(config | {"target_parameters": "w1"}))
    with pytest.raises(SpecError, match="target_parameters must be a list of names"):
        lora_run(folder, tmp_path, lora={"from": str(out)})
    path.write_text(json.dumps(config | {"target_parameters": ["down_proj"]}))
    with pytest.raises(SpecError, match="has more than the run's adapters"):
        lora_run(folder, tmp_path, lora={"from": str(out)})
