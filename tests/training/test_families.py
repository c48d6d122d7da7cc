"""Families of transformers beyond the usual ones: what their layers need, what their folders have,
and what is refused of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from swarmnet.errors import SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.byte_tokenizer import byte_tokenizer_files
from swarmnet.training.models import family_probe
from swarmnet.training.models.adapter import adapter_plan
from swarmnet.training.models.base import (
    LayerContext,
    TakesContext,
    describe_base,
    describe_parameters,
)
from swarmnet.training.models.family_probe import Tried, checked, try_family
from swarmnet.training.models.matrices import blocks_of, family_parts, muon_matrices
from swarmnet.training.models.model_config import load_config, longest_context
from swarmnet.training.models.shrunk import shrunk_configs
from swarmnet.training.models.source_weights import SourceWeights
from swarmnet.training.resolving import described, resolve_run
from tests.training.test_adapter import model_of, through

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LINEAR = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
INDEXED = {"mlp_layer_types": ["dense"] * 4, "index_topk": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LINEAR, **EXPERTS},
    "qwen3_5_text": LINEAR,
    "minimax": {"head_dim": 16, "num_local_experts": 4, "block_size": 8},
    "olmo_hybrid": {"num_key_value_heads": 4, **LINEAR, "linear_num_key_heads": 4},
}


def folder_of(path: Path, kind: str, **changes: Any) -> Any:
    """A small random model in a Hugging Face folder, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **FAMILIES.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    for name, data in byte_tokenizer_files(64).items():
        (path / name).write_bytes(data)
    return model


def canonical(kind: str, **values: Any) -> dict[str, Any]:
    config: dict[str, Any] = load_config({"model_type": kind, **values}).canonical_values
    return config


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_are_the_model_and_go_on_with_a_text(kind: str) -> None:
    """Layers of several kinds; a stage may have one of them only."""
    torch.manual_seed(0)
    config = canonical(kind, **{**SIZES, **FAMILIES[kind]})
    model = AutoModelForCausalLM.from_config(copy.deepcopy(load_config(config))).eval()
    plan = adapter_plan(family_probe.ModelSpec(kind="transformers", config=config), 24)
    modules = [layer.build().eval() for layer in plan.layers]
    state = model.state_dict()
    for layer, module in zip(plan.layers, modules, strict=True):
        module.load_state_dict({n: state[f"{layer.name}.{n}"] for n in module.state_dict()})
    tokens = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens).logits
    largest = theirs.abs().max()
    assert (through(modules, tokens) - theirs).abs().max() < 1e-5 * largest
    assert try_family(config) == Tried()
    assert plan.cache is not None
    assert plan.cache.fixed_numbers == 4 * 16 * 16
    stages = [(some, plan.cache.make()) for some in (modules[:3], modules[3:5], modules[5:])]
    found = []
    for part in (slice(0, 11), slice(11, 15), *(slice(at, at + 1) for at in range(15, 24))):
        x, positions = tokens[:, part].int(), torch.arange(24)[None, part]
        for some, cache in stages:
            x = stage_of(some, x, LayerContext(positions, cache))
        found.append(x)
    assert (torch.cat(found, dim=1) - theirs).abs().max() < 1e-5 * largest


def stage_of(modules: Sequence[Any], x: Tensor, context: LayerContext) -> Tensor:
    with torch.no_grad():
        for module in modules:
            x = module(x, context) if isinstance(module, TakesContext) else module(x)
    return x


def test_a_family_whose_cache_gives_other_numbers_writes_nothing() -> None:
    config = canonical("deepseek_v32", num_hidden_layers=4, **INDEXED)
    assert try_family(config) == Tried(writes=False)
    spec = family_probe.ModelSpec(kind="transformers", config=config)
    plan = adapter_plan(spec, 16)
    assert plan.cache is not None
    assert checked(plan, config).cache is None


def test_a_family_that_does_something_else_in_layers_or_in_training_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = canonical("deepseek_v3", num_hidden_layers=4)
    small = next(s for s in shrunk_configs(config) if s["num_key_value_heads"] == 4)
    whole, tokens, logits = family_probe.whole_model(small)
    tried = family_probe.small_tried(small, whole, tokens, logits)
    assert tried == Tried()
    other = family_probe.small_tried(small, whole, tokens, logits + 1.0)
    assert other.fault == "layer by layer it computes something else than as a whole"
    gate = next(type(m) for n, m in whole.named_modules() if n.endswith("mlp.gate"))
    forward = gate.forward

    def balancing(self: Any, *args: Any) -> Any:
        if self.training:
            self.e_score_correction_bias += 0.1
        return forward(self, *args)

    monkeypatch.setattr(gate, "forward", balancing)
    tried = family_probe.small_tried(small, whole, tokens, logits)
    assert tried.fault.startswith("training changes model.layers.1.mlp.gate.e_score")
    family_probe.try_small.cache_clear()  # it is another family now
    with pytest.raises(SpecError, match="deepseek_v3 is not supported: training changes"):
        checked(adapter_plan(family_probe.ModelSpec(kind="transformers", config=small), 8), config)
    family_probe.try_small.cache_clear()  # and the former one again


@pytest.mark.parametrize("kind", ["hrm_text", "dots1", "longcat_flash"])
def test_whatever_a_family_s_code_does_is_one_line(kind: str) -> None:
    with pytest.raises(SpecError, match=rf"model_type {kind} cannot be cut into layers") as caught:
        adapter_plan(family_probe.ModelSpec(kind="transformers", config=canonical(kind)), 8)
    assert "\n" not in str(caught.value)


def changed(folder: Path, changes: dict[str, Tensor], *dropped: str) -> SourceWeights:
    """The folder's weights with other tensors, and without some."""
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if n not in dropped}
    save_file(tensors | changes, path, metadata={"format": "pt"})
    spec = model_of(folder)
    plan = dataclasses.replace(adapter_plan(spec, 16), has_weights=True)
    ranges = (*describe_parameters(plan.layers), *describe_base(plan, plan.layers))
    return SourceWeights(folder, spec.config, [r.name for r in ranges])


def test_a_tensor_without_a_place_ends_the_start_unless_transformers_leaves_it_out(
    tmp_path: Path,
) -> None:
    folder_of(tmp_path, "qwen3_5_text")
    names = ("mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    by_rule = {name: torch.zeros(2) for name in names}
    assert set(changed(tmp_path, by_rule).unused) == by_rule.keys()
    more = {f"model.layers.{i}.extra.bias": torch.zeros(2) for i in range(5)}
    match = r"type qwen3_5_text has no place for model\.layers\.0\.extra\.bias, .* and 2 more: the"
    with pytest.raises(SpecError, match=match) as caught:
        changed(tmp_path, more)
    assert "\n" not in str(caught.value)


def test_a_buffer_that_a_folder_lacks_ends_the_start(tmp_path: Path) -> None:
    folder_of(tmp_path, "minimax")
    name = "model.layers.1.self_attn.slope_rate"
    with pytest.raises(SpecError, match=f"it has no tensor for {name}"):
        changed(tmp_path, {}, name)


def test_a_tied_matrix_may_stand_under_either_name_or_twice(tmp_path: Path) -> None:
    folder_of(tmp_path, "llama", tie_word_embeddings=True)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    matrix = load_file(tmp_path / "model.safetensors")[embedding]
    for changes, dropped in (({head: matrix.clone()}, ()), ({head: matrix}, (embedding,))):
        weights = changed(tmp_path, changes, *dropped)
        first = describe_parameters(adapter_plan(model_of(tmp_path), 16).layers)[0]
        assert torch.equal(first.part_of(weights.flat([first], 0, first.stop)), matrix)
        assert weights.unused == ()
    with pytest.raises(SpecError, match=r"lm_head.weight and .* differ, though config.json says"):
        changed(tmp_path, {embedding: matrix, head: matrix + 1.0})


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("llama", set()),
        ("phi3", {"qkv_proj", "gate_up_proj"}),
        ("mixtral", {"experts"}),
        ("minimax", {"qkv_proj"}),
    ],
)
def test_muon_leaves_matrices_that_are_several_and_not_named_to_adamw(
    kind: str, left: set[str]
) -> None:
    config = canonical(kind, **{**SIZES, **FAMILIES.get(kind, {})})
    spec = family_probe.ModelSpec(kind="transformers", config=config)
    layers = adapter_plan(spec, 24).layers
    ranges = describe_parameters(layers)
    inside = [r for r in ranges if r.name.startswith("model.layers.") and len(r.shape) > 1]

    def others(parts: Any) -> set[str]:
        starts = {b.start for b in blocks_of(muon_matrices(layers, parts))}
        assert starts
        found = [r for r in inside if r.start not in starts]
        return {part for r in found for part in r.name.split(".")}

    assert left <= others({})
    assert bool(others({})) is bool(left)
    assert not others(family_parts(spec, layers)) & left


# ---- what is refused of one kind of model is refused of the others ----------------------------


BUILDER = """
import torch
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec

def build():
    tokens = TensorSpec("int32", (8,), num_values=256)
    layers = (LayerBuilder("a", lambda: torch.nn.Embedding(256, 256), 1.0, (8, 256)),)
    return ModelPlan(layers, tokens, tokens, loss=None, count=None)
"""


def run_over(folder: Path, tmp_path: Path, **tables: dict[str, Any]) -> RunSpec:
    (tmp_path / "text.txt").write_text("abc " * 4000)
    values: dict[str, Any] = {
        "model": {"from": str(folder)},
        "data": {"paths": [str(tmp_path / "text.txt")], "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-3, "rounds": 4},
        "pipeline": {"num_stages": 2, "global_batch": 4, "microbatch": 2},
    }
    for table, fields in tables.items():
        values[table] = values.get(table, {}) | fields
    return RunSpec.model_validate(values)


REFUSED = [
    ({"data": {"sequence_length": 257}}, r"sequence_length \(257\) must not be more than the mod"),
    ({"pipeline": {"num_stages": 5}}, r"num_stages \(5\) must not be more than the model's layers"),
    ({"model": {"rope_theta": 5e5}}, r"rope_theta is for kind \"llama\" only"),
    ({"model": {"rms_norm_eps": 1e-6}}, r"rms_norm_eps is for kind \"llama\" only"),
]
LORA = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
TARGETS = [
    (["q_proj", "v_porj"], "no linear layer 'v_porj'; there are: down_proj"),
    (["q_proj", "mlp"], "no linear layer 'mlp'"),
    (["q_proj", "embed_tokens"], "embed_tokens is outside the decoder layers"),
    (["self_attn.q_prj"], "no linear layer 'self_attn.q_prj'"),
]


@pytest.mark.parametrize(("tables", "message"), REFUSED)
def test_a_model_from_a_folder_is_refused_what_the_built_in_one_is(
    tmp_path: Path, tables: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    folder_of(folder, "llama")
    config = json.loads(json.dumps(model_of(folder).config))
    written = run_over(folder, tmp_path, **tables)
    adapted = run_over(folder, tmp_path, **tables, lora=LORA)
    values = written.model_dump()
    values["model"] |= {"source": "", "config": config}
    for spec in (written, adapted, RunSpec.model_validate(values)):
        for start in (resolve_run, described):
            if start is described and not spec.model.source:
                continue
            with pytest.raises(SpecError, match=message) as caught:
                start(spec)
            assert "\n" not in str(caught.value)
    assert resolve_run(run_over(folder, tmp_path, data={"sequence_length": 256})).spec


@pytest.mark.parametrize(("names", "message"), TARGETS)
@pytest.mark.parametrize("lora", [LORA, {"r": 4}, {}])
def test_an_adapter_that_is_not_there_is_refused_however_much_is_given(
    tmp_path: Path, names: list[str], message: str, lora: dict[str, Any]
) -> None:
    folder_of(tmp_path / "model", "llama")
    spec = run_over(tmp_path / "model", tmp_path, lora={**lora, "target_modules": names})
    for start in (resolve_run, described):
        with pytest.raises(SpecError, match=message):
            start(spec)


def test_a_vocabulary_of_fewer_than_all_bytes_is_refused(tmp_path: Path) -> None:
    config = canonical("llama", **{**SIZES, "vocab_size": 200})
    values = run_over(tmp_path, tmp_path).model_dump()
    values["model"] = {"kind": "transformers", "config": config}
    with pytest.raises(SpecError, match=r"vocab_size \(200\) must be at least 256 for tokenizer"):
        resolve_run(RunSpec.model_validate(values))


def test_a_config_in_the_spec_is_written_with_all_its_keys(tmp_path: Path) -> None:
    """As one of a folder is: another version of transformers may have other defaults."""
    values = run_over(tmp_path, tmp_path).model_dump()
    values["model"] = {"kind": "transformers", "config": {"model_type": "llama", **SIZES}}
    spec = resolve_run(RunSpec.model_validate(values)).spec
    assert spec.model.config == json.loads(json.dumps(canonical("llama", **SIZES)))
    values["model"]["config"]["output_router_logits"] = True
    with pytest.raises(SpecError, match=r"output_router_logits is a folder's key; write \[model\]"):
        resolve_run(RunSpec.model_validate(values))


def test_a_custom_model_s_own_length_is_not_overruled_in_silence(tmp_path: Path) -> None:
    values = run_over(tmp_path, tmp_path).model_dump()
    path = tmp_path / "model.py"
    path.write_text(BUILDER)
    values["model"] = {"kind": "custom", "builder": f"{path}:build"}
    with pytest.raises(SpecError, match=r"builder's model takes samples of 8 tokens; leave it"):
        resolve_run(RunSpec.model_validate(values))


@pytest.mark.parametrize(
    ("kind", "values", "longest"),
    [
        ("llama", {"max_position_embeddings": 256}, 256),
        (
            "llama",
            {
                "max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            },
            1024,
        ),
        (
            "llama",
            {
                "max_position_embeddings": 1024,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            },
            1024,
        ),
        ("gemma3_text", {"max_position_embeddings": 512}, 512),
        ("kimi_linear", {"model_max_length": 300}, 300),
    ],
)
def test_the_longest_context_is_what_positions_reach(
    kind: str, values: dict[str, Any], longest: int
) -> None:
    assert longest_context(load_config({"model_type": kind, **values})) == longest


def test_a_start_says_which_families_write_no_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = run_over(tmp_path, tmp_path).model_dump()
    small = next(iter(shrunk_configs(canonical("deepseek_v32", num_hidden_layers=4, **INDEXED))))
    values["model"] = {"kind": "transformers", "config": {**small, "vocab_size": 256}}
    with caplog.at_level(logging.WARNING, "swarmnet.models"):
        resolve_run(RunSpec.model_validate(values))
    assert "models of type deepseek_v32 are trained and exported, but write no texts" in caplog.text


def test_what_is_too_large_to_be_tried_is_not_built() -> None:
    """A config from others may have sizes that nobody shrinks; this one would take 32 GB."""
    config = canonical("opt", ffn_dim=1 << 27, num_hidden_layers=2)
    with pytest.raises(ValueError, match="too large to be tried"):
        family_probe.whole_model(next(iter(shrunk_configs(config))))
    assert try_family(config) == Tried()
