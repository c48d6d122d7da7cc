"""Models of transformers, cut into layers: the same numbers, and the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from swarmnet.errors import SpecError
from swarmnet.ports import LossResult
from swarmnet.run_identity import to_json
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.attention import packed
from swarmnet.training.attention.documents import PackedSequence
from swarmnet.training.computing import Computing
from swarmnet.training.memory.activation_choice import known_activations
from swarmnet.training.memory.plan import FP32
from swarmnet.training.models import family_probe
from swarmnet.training.models.adapter import AttendsBy, adapter_plan
from swarmnet.training.models.base import (
    LayerContext,
    TakesContext,
    describe_parameters,
    own_parameters,
    tie,
)
from swarmnet.training.models.family_probe import check_documents_apart
from swarmnet.training.models.model_config import load_config, read_config
from swarmnet.training.models.registry import model_plan
from swarmnet.training.models.shrunk import shrunk_configs
from swarmnet.training.models.source_weights import INDEX_FILE, SourceWeights, saved_tensors
from swarmnet.training.stage import build_stage
from tests.training.packed import document

LENGTH, VOCABULARY = 24, 120
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3 moe": ("qwen3_moe", EXPERTS),
}


def saved(folder: Path, family: str, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A small random model of a family in a Hugging Face folder."""
    kind, more = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**COMMON, **more}, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def travelled(folder: Path) -> dict[str, Any]:
    """A config as it is in the spec that a joiner gets: 30.0 is 30 there."""
    values: dict[str, Any] = json.loads(to_json(read_config(folder).values))
    return values


def model_of(folder: Path) -> ModelSpec:
    return ModelSpec.model_validate({"kind": "transformers", "config": travelled(folder)})


def built(folder: Path) -> tuple[Any, list[Any], Tensor]:
    """The plan, its layers with the folder's weights, and these as one vector."""
    plan = adapter_plan(model_of(folder), LENGTH)
    modules = [layer.build().eval() for layer in plan.layers]
    tie(plan.layers, modules)
    ranges = describe_parameters(plan.layers)
    weights = SourceWeights(folder, travelled(folder), [r.name for r in ranges])
    weights.check(ranges)
    flat = weights.flat(ranges, 0, ranges[-1].stop)
    with torch.no_grad():
        for (_, p), r in zip(own_parameters(plan.layers, modules), ranges, strict=True):
            p.copy_(r.part_of(flat))
    return plan, modules, flat


def through(modules: list[Any], tokens: Tensor, context: LayerContext | None = None) -> Tensor:
    x = tokens.int()
    with torch.no_grad():
        for module in modules:
            takes = (context,) if context and isinstance(module, TakesContext) else ()
            x = module(x, *takes)
    return x


def tokens_of(seed: int = 1, samples: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_files_are_those_of_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    model = saved(tmp_path, family, tied)
    plan, modules, flat = built(tmp_path)
    with torch.no_grad():
        theirs = model(tokens_of()).logits
    assert ((through(modules, tokens_of()) - theirs).abs().max() / theirs.abs().max()) < 1e-5
    named = {r.name: r.part_of(flat) for r in describe_parameters(plan.layers)}
    files = load_file(tmp_path / "model.safetensors")
    ours = saved_tensors(travelled(tmp_path), named)
    assert ours.keys() == files.keys()
    assert all(torch.equal(ours[name], files[name]) for name in files)


def test_a_low_precision_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral", False, torch.bfloat16)
    plan, _, flat = built(tmp_path)
    named = {r.name: r.part_of(flat) for r in describe_parameters(plan.layers)}
    files = load_file(tmp_path / "model.safetensors")
    ours = saved_tensors(travelled(tmp_path), named)
    assert all(torch.equal(ours[name].bfloat16(), files[name]) for name in files)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_packed_documents_is_that_of_each_alone(tmp_path: Path, family: str) -> None:
    saved(tmp_path, family, False)
    stage = build_stage(run_of(tmp_path, 1, document_mask=True), 0)
    inputs, targets = (from_tensor(tokens_of(seed).int()) for seed in (1, 2))
    documents = ((10, 14), (1, 20, 3))
    result = stage.forward_backward((0, 1), inputs, targets, documents)
    packed = torch.cat([to_tensor(stage.gradient_shard(j)) for j in range(len(stage.shard_sizes))])
    alone = 0.0
    for i, k in ((i, k) for i, lengths in enumerate(documents) for k in range(len(lengths))):
        pair = (document(array, documents, i, k) for array in (inputs, targets))
        found = stage.evaluate(*pair)
        assert isinstance(found, LossResult)
        alone += found.loss_sum
    assert result.loss_sum == pytest.approx(alone, rel=1e-6)
    assert stage.evaluate(inputs, targets, documents) == LossResult(result.loss_sum, 48)
    joined = stage.evaluate(inputs, targets)
    assert isinstance(joined, LossResult)
    assert joined.loss_sum != pytest.approx(alone, rel=2e-6)
    assert packed.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "more", "length", "message"),
    [
        ("qwen3_next", {}, LENGTH, "does not keep documents apart"),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 32},
            64,
            "shorten sequence_length",
        ),
    ],
)
def test_a_family_that_does_not_keep_documents_apart_is_refused(
    kind: str, more: dict[str, Any], length: int, message: str
) -> None:
    config = CONFIG_MAPPING[kind](**{**COMMON, **more})
    values = {"model_type": kind} | {
        k: v for k, v in config.to_dict().items() if k in COMMON.keys() | more.keys()
    }
    with pytest.raises(SpecError, match=message) as caught:
        check_documents_apart(load_config(values).canonical_values, length)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "more", "by_sequence"),
    [
        ("deepseek_v3", {}, True),  # its values are narrower than its keys
        ("deepseek_v3", {"v_head_dim": 48}, False),  # and here they are wider
        ("granite", {}, True),
    ],
)
def test_uncommon_attention_keeps_documents_apart(
    kind: str, more: dict[str, Any], by_sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"model_type": kind, "num_hidden_layers": 2, **more})
    smaller = [small | more for small in shrunk_configs(config.canonical_values)]
    monkeypatch.setattr(family_probe, "shrunk_configs", lambda _: smaller)
    assert check_documents_apart(config.canonical_values, LENGTH) is by_sequence


def test_attention_that_a_family_calls_is_that_of_documents() -> None:
    """With its own scale, and fewer heads for keys and values."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, heads, LENGTH, 8) for heads in (4, 2, 2))
    of = torch.arange(LENGTH).expand(2, -1) // 7 + 1
    about: dict[str, Any] = {"scale": 0.9, "enable_gqa": True}
    with AttendsBy(PackedSequence(of)):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, **about)
        with pytest.raises(RuntimeError, match="not plainly causal"):
            F.scaled_dot_product_attention(q, k, v, is_causal=False, **about)
    sees = (of.unsqueeze(2) == of.unsqueeze(1)).tril().unsqueeze(1)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, **about)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_alone_and_a_mask_have_one_gradient(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, family, False)
    spec, made, calls = run_of(tmp_path, document_mask=True), [], []
    attend = PackedSequence.attend

    def counted(self: PackedSequence, *tensors: Tensor) -> Tensor:
        calls.append(self)
        return attend(self, *tensors)

    model_plan(spec)  # a small model of the family is tried once
    monkeypatch.setattr(PackedSequence, "attend", counted)
    for ways in ({"cpu": PackedSequence}, {}):
        monkeypatch.setattr(packed, "PACKED", ways)
        made.append(gradient_of(spec, Computing()))
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)
    config = spec.model.config
    windows = (config.get("sliding_window"), config.get("attention_chunk_size"))
    is_long = any(w is not None and w < LENGTH for w in windows)
    layers = config["num_hidden_layers"]
    assert len(calls) == (0 if is_long else layers), "attention was not asked for"


@pytest.mark.parametrize("family", ["llama 3", "gemma3", "qwen3 moe"])
def test_a_cache_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    saved(tmp_path, family, False)
    plan, modules, _ = built(tmp_path)
    tokens = tokens_of(samples=1)
    assert plan.cache is not None
    cache, found = plan.cache.make(), []
    for part in (slice(0, 11), *(slice(at, at + 1) for at in range(11, LENGTH))):
        context = LayerContext(torch.arange(LENGTH)[None, part], cache)
        found.append(through(modules, tokens[:, part], context))
    torch.testing.assert_close(
        torch.cat(found, dim=1), through(modules, tokens), rtol=1e-4, atol=1e-5
    )


def run_of(folder: Path, num_stages: int = 2, *, document_mask: bool = False) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"kind": "transformers", "config": travelled(folder)},
            "data": {
                "paths": ["python-stdlib"],
                "sequence_length": LENGTH,
                "document_mask": document_mask,
            },
            "optimizer": {"learning_rate": 1e-3, "rounds": 4},
            "pipeline": {"num_stages": num_stages, "global_batch": 4, "microbatch": 2},
            "sync": {"shard_parameters": 4096},
        }
    )


def gradient_of(spec: RunSpec, computing: Computing) -> Tensor:
    """Of a microbatch of packed documents through two stages."""
    stages = [build_stage(spec, k, computing=computing) for k in range(2)]
    inputs, targets = (from_tensor(tokens_of(seed).int()) for seed in (1, 2))
    documents = ((9, 9, 6), (24,))
    outputs = stages[0].forward((0, 1), inputs, documents)
    result = stages[1].forward_backward((0, 1), outputs, targets, documents)
    assert result.grad_inputs is not None
    stages[0].backward((0, 1), result.grad_inputs)
    shards = [to_tensor(s.gradient_shard(j)) for s in stages for j in range(len(s.shard_sizes))]
    return torch.cat(shards).clone()


POLICIES = [
    ("gemma3", Computing(activations="blocks")),
    ("mixtral", Computing(activations="recompute")),
    ("llama 3", Computing(activations="offload")),
    ("gemma3", Computing(precision="bf16")),
    pytest.param("llama 3", Computing(compile=True), marks=pytest.mark.long),
    pytest.param("gemma3", Computing(compile=True), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "computing"), POLICIES)
def test_policies_and_precisions_make_the_same_gradient(
    tmp_path: Path, family: str, computing: Computing
) -> None:
    saved(tmp_path, family, False)
    spec = run_of(tmp_path, document_mask=True)
    exact, found = gradient_of(spec, Computing()), gradient_of(spec, computing)
    tolerance = 0.1 if computing.precision == "bf16" else 1e-4
    assert (found - exact).norm() / exact.norm() < tolerance


def test_a_stage_has_its_own_layers_and_a_memory_plan(tmp_path: Path) -> None:
    saved(tmp_path, "llama 2", False)
    spec = run_of(tmp_path, 4)
    names = [r.name for r in build_stage(spec, 1).parameter_ranges]
    assert 0 < len(names) < 20
    assert known_activations(spec, 1, FP32) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_scaling type spiral"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "evil.Model"}}, "code that comes with"),
        ({"hidden_size": 1 << 30}, "hidden_size = 1073741824 is beyond"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 is beyond"),
        ({"hidden_size": 0}, "must be more than 0"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    saved(tmp_path, "llama 2", False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecError, match=message) as caught:
        adapter_plan(model_of(tmp_path), LENGTH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../b"}}',
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_an_index_that_cannot_be_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(SpecError, match=rf"{INDEX_FILE}: ") as caught:
        SourceWeights(tmp_path, {}, [])
    assert "\n" not in str(caught.value)


def test_keys_of_no_consequence_are_accepted(tmp_path: Path) -> None:
    saved(tmp_path, "llama 2", False)
    path = tmp_path / "config.json"
    before = read_config(tmp_path)
    more = {
        "torch_dtype": "bfloat16",
        "is_llama_config": True,
        "_attn_implementation": "org/kernel",
        "attn_implementation": "org/kernel",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    after = read_config(tmp_path)
    assert after.ignored == ("is_llama_config",)
    assert after.values == before.values
    assert load_config(after.values)._attn_implementation == "sdpa"  # noqa: SLF001  chosen here


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("granite", {"embedding_multiplier": 2.0}, "outside its layers"),
        ("gpt2", {}, "declares no pipeline"),
    ],
)
def test_a_family_that_cannot_be_cut_is_refused(
    tmp_path: Path, kind: str, more: dict[str, Any], message: str
) -> None:
    CONFIG_MAPPING[kind](**{**COMMON, **more}).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=message):
        adapter_plan(model_of(tmp_path), LENGTH)
