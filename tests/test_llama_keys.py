"""A Llama's config.json can be copied into `[model]`: what is done anyway is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import MixtralConfig

from swarmnet.spec import ModelSpec
from tests.training.specs import MODEL


@pytest.mark.parametrize(
    "more",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
        {"head_dim": 8, "hidden_act": "silu", "tie_word_embeddings": False},
        {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "use_cache": True},
        {"rope_scaling": {"rope_type": "default"}, "pretraining_tp": 1, "eos_token_id": 2},
    ],
)
def test_values_that_are_implemented_anyway(more: dict[str, Any]) -> None:
    assert ModelSpec.model_validate({**MODEL, **more}) == ModelSpec.model_validate(MODEL)


def test_a_config_of_a_mixtral_is_one_of_experts() -> None:
    sizes = {**MODEL, "num_local_experts": 4, "num_experts_per_tok": 3}
    config = MixtralConfig(**sizes, router_aux_loss_coef=0.02, rope_theta=1e5, head_dim=8)
    written = json.loads(config.to_json_string())  # as transformers saves it
    found = ModelSpec.model_validate({k: v for k, v in written.items() if v is not None})
    assert (found.num_experts, found.num_experts_per_tok, found.expert_size) == (4, 3, 48)
    assert found.router_losses == (0.02, 0.001)
    assert found.norm_topk_prob
    assert found.rope_theta == config.rope_parameters["rope_theta"]


def test_rope_parameters_give_the_base() -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert ModelSpec.model_validate({**MODEL, **rope}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling type yarn is not"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"head_dim": 16}, "head_dim = 16 is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
    ],
)
def test_other_values_are_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSpec.model_validate({**MODEL, **more})
