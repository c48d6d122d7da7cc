"""The Llama is Hugging Face's, number for number, and starts the same wherever it is built."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnet.spec import ModelSpec
from swarmnet.training.models.base import build_layer
from swarmnet.training.models.llama import llama_plan
from swarmnet.training.models.registry import split_stages
from tests.training.specs import MODEL


def whole_model(spec: ModelSpec, seed: int = 0) -> tuple[torch.nn.Sequential, dict]:
    plan = llama_plan(spec, spec.max_position_embeddings)
    modules = {layer.name: build_layer(plan, layer, seed) for layer in plan.layers}
    state = {f"{n}.{k}": p for n, m in modules.items() for k, p in m.named_parameters()}
    return torch.nn.Sequential(*modules.values()), state


def hugging_face(spec: ModelSpec) -> LlamaForCausalLM:
    names = [*MODEL, "rms_norm_eps", "rope_theta", "initializer_range"]
    config = LlamaConfig(
        **{name: getattr(spec, name) for name in names},
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("num_key_value_heads", [4, 2, 1])
def test_logits_equal_hugging_face(num_key_value_heads: int) -> None:
    spec = ModelSpec(**{**MODEL, "num_key_value_heads": num_key_value_heads})
    model, state = whole_model(spec)
    theirs = hugging_face(spec)
    theirs.load_state_dict(state, strict=True)  # names and shapes map one to one
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens.int()), theirs(tokens).logits, rtol=1e-5, atol=1e-6)


def test_loss_gradients_equal_hugging_face() -> None:
    spec = ModelSpec(**MODEL)
    model, state = whole_model(spec)
    theirs = hugging_face(spec)
    theirs.load_state_dict(state, strict=True)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = llama_plan(spec, spec.max_position_embeddings).loss(
        model(tokens[:, :-1].int()), tokens[:, 1:].int()
    )
    (loss / 30).backward()
    theirs(tokens, labels=tokens).loss.backward()
    assert {n for n, _ in theirs.named_parameters()} == set(state)
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(state[name].grad, p.grad, rtol=1e-4, atol=1e-6)


def test_number_of_parameters_is_that_of_the_spec() -> None:
    spec = ModelSpec(**MODEL)
    _, state = whole_model(spec)
    assert sum(p.numel() for p in state.values()) == spec.num_parameters


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    spec = ModelSpec(**MODEL)
    plan = llama_plan(spec, spec.max_position_embeddings)
    _, state = whole_model(spec, seed=3)
    torch.manual_seed(99)
    torch.rand(7)
    before = torch.get_rng_state()
    layer = plan.layers[2]
    module = build_layer(plan, layer, 3)
    assert torch.equal(torch.get_rng_state(), before)
    for name, p in module.named_parameters():
        assert torch.equal(p, state[f"{layer.name}.{name}"])
    other = build_layer(plan, layer, 4)
    assert not torch.equal(other.mlp.up_proj.weight, module.mlp.up_proj.weight)
    q, o = module.self_attn.q_proj.weight, module.self_attn.o_proj.weight
    assert not torch.equal(q, o)
    assert abs(q.std().item() - spec.initializer_range) < 0.002


def test_the_head_counts_when_layers_are_split() -> None:
    wide = ModelSpec(**{**MODEL, "vocab_size": 4096})
    stages = split_stages(llama_plan(wide, wide.max_position_embeddings), 2)
    assert not any("layers" in layer.name for layer in stages[1])
    narrow = split_stages(llama_plan(ModelSpec(**MODEL), MODEL["max_position_embeddings"]), 2)
    assert narrow[0][0].name == "model.embed_tokens"
    assert abs(len(narrow[0]) - len(narrow[1])) <= 1
