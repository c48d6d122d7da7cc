"""Mixtures of transformers learn from the losses of their routers as the built-in model does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmnet.errors import SpecError
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.arrays import to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.models.model_folder import read_folder
from swarmnet.training.stage import build_stage
from tests.swarm.harness import relative_difference
from tests.training.passes.test_routing import KEY, arrays, fly, gradients, oracle, stages_of
from tests.training.specs import MODEL, small_spec, write_text

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 256,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}
FAMILIES = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}


def imported(folder: Path, family: str, num_layers: int, **model: Any) -> RunSpec:
    """A run over a config alone, from random weights."""
    config_class = type(AutoConfig.for_model(family))
    known = {f.name for f in dataclasses.fields(config_class)} | {"head_dim"}
    sizes = {**SIZES, "num_hidden_layers": num_layers, FAMILIES[family]: 4}
    config = {"model_type": family, **{k: v for k, v in sizes.items() if k in known}}
    values = small_spec(write_text(folder)).model_dump()
    values["model"] = {"kind": "transformers", "config": config, **model}
    values["pipeline"]["num_stages"] = min(2, num_layers)
    return RunSpec.model_validate(values)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_layer_s_loss_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """Which takes all layers as one; of one layer it is the same."""
    spec = imported(tmp_path, family, 1, router_aux_loss_coef=0.5)
    stage = build_stage(spec, 0)
    x, targets = arrays(spec, 0)
    loss = stage.forward_backward(KEY, x, targets)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**spec.model.config, router_aux_loss_coef=0.5)
    )
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in stage.state_dict().items():
            names[name].copy_(value)
    theirs = model(to_tensor(x).long(), output_router_logits=True)
    logits, wanted = theirs.logits.flatten(0, 1), to_tensor(targets).flatten().long()
    main = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    (main + loss.num_tokens * 0.5 * theirs.aux_loss).backward()
    assert loss.loss_sum == pytest.approx(main.item(), rel=1e-5)
    expected = {n: p.grad for n, p in names.items() if p.grad is not None}
    assert relative_difference(gradients([stage]), expected) < 1e-5
    stage.finish_round()
    assert [len(r.shares) for r in stage.routed] == [4]


@pytest.mark.parametrize("activations", ["keep", "blocks", "recompute"])
def test_imported_mixtures_learn_from_their_routers_losses(
    tmp_path: Path, activations: Any
) -> None:
    losses = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    spec = imported(tmp_path, "mixtral", 3, **losses)
    stages = stages_of(spec, Computing(activations=activations))
    for slot in range(2):
        fly(stages, (0, slot), *arrays(spec, slot))
    trainer, _ = oracle(spec, [0, 1])
    assert relative_difference(gradients(stages), trainer.gradients()) < 1e-5
    plain, _ = oracle(imported(tmp_path, "mixtral", 3), [0, 1])
    assert relative_difference(gradients(stages), plain.gradients()) > 1e-2
    stages[0].retract((0, 1))
    stages[1].retract((0, 1))
    trainer, _ = oracle(spec, [0])
    assert relative_difference(gradients(stages), trainer.gradients()) < 1e-5


def test_a_folder_says_whether_its_routers_learn(tmp_path: Path) -> None:
    """In transformers' way; who starts the run may say otherwise."""
    values = imported(tmp_path, "mixtral", 1).model.config
    values = {**values, "router_aux_loss_coef": 0.02, "output_router_logits": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").write_text("{}")
    found = [
        read_folder(tmp_path, ModelSpec.model_validate({"from": str(tmp_path), **said}))[0]
        for said in ({}, {"router_aux_loss_coef": 0.3}, {"router_aux_loss_coef": 0.0})
    ]
    assert [model.router_losses[0] for model in found] == [0.02, 0.3, 0.0]
    assert "output_router_logits" not in found[0].config
    (tmp_path / "config.json").write_text(json.dumps({**values, "output_router_logits": False}))
    read, _ = read_folder(tmp_path, ModelSpec.model_validate({"from": str(tmp_path)}))
    assert read.router_losses == (0.0, 0.0)


def test_a_model_without_routers_has_no_loss_of_them(tmp_path: Path) -> None:
    spec = imported(tmp_path, "mixtral", 2, router_z_loss_coef=0.1)
    values = spec.model_dump()
    values["model"]["config"] = {"model_type": "llama", **MODEL}
    with pytest.raises(SpecError, match=r"router_z_loss_coef: this model \(llama\) has no routers"):
        build_stage(RunSpec.model_validate(values), 0)
