"""Adapters over a model that stays as it is: vectors, seeds, dropout, precisions, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from swarmnet.errors import ProtocolViolation, SpecError
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.spec import RunSpec, parse_spec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.layer_costs import measure_layers
from swarmnet.training.memory.activation_choice import known_activations
from swarmnet.training.memory.plan import BF16, FP32, base_bytes, plan_memory
from swarmnet.training.models import packing
from swarmnet.training.models.frozen import FrozenLinear
from swarmnet.training.models.initial_weights import InitialLayout, InitialSources, ModelWeights
from swarmnet.training.models.model_folder import find_folder
from swarmnet.training.models.registry import model_plan, stage_parameter_ranges
from swarmnet.training.resolving import described
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.swarm.initial.test_weights import folder_of
from tests.swarm.lora_runs import LORA, initial_adapters, lora_run
from tests.training.data.making import CHATML, tokenizer_folder
from tests.training.test_families import folder_of as family_folder

KEY = (0, 1)


def stages_of(
    spec: RunSpec, folder: Path, computing: Computing | None = None, adapter: Path | None = None
) -> list[TorchStage]:
    """Both stages with their base."""
    layout = InitialLayout.of(spec)
    sources = InitialSources(spec, layout, folder, adapter)
    stages = []
    for k, sizes in enumerate(layout.base_sizes):
        stage = build_stage(spec, k, computing=computing)
        assert stage.base.missing == list(range(len(sizes)))
        for j in range(len(sizes)):
            values = sources.read(k, j)
            assert values is not None
            stage.base.put(j, from_tensor(values))
        assert not stage.base.missing
        stages.append(stage)
    return stages


def tokens(seed: int = 1) -> Array:
    generator = torch.Generator().manual_seed(seed)
    return from_tensor(torch.randint(256, (4, 16), generator=generator).int())


def gradient_of(stages: list[TorchStage], key: tuple[int, int] = KEY) -> torch.Tensor:
    first, last = stages
    result = last.forward_backward(key, first.forward(key, tokens()), tokens(2))
    assert result.grad_inputs is not None
    first.backward(key, result.grad_inputs)
    shards = [to_tensor(s.gradient_shard(j)) for s in stages for j in range(len(s.shard_sizes))]
    return torch.cat(shards).clone()


def randomize(stages: list[TorchStage]) -> None:
    """B is not zero: so that the gradient of A is not either."""
    for stage in stages:
        generator = torch.Generator().manual_seed(stage.stage_index)
        for values in stage.state_dict().values():
            values.normal_(0.0, 0.1, generator=generator)
        stage.layers.parameter_copies.refresh()


def test_a_stage_s_vector_has_the_adapters_only(tmp_path: Path) -> None:
    spec, _ = lora_run(folder_of(tmp_path / "model"), tmp_path)
    layout = InitialLayout.of(spec)
    named = [r.name for ranges in layout.trained for r in ranges]
    assert len(named) == 2 * 3 * 3
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in named)
    base = {r.name for ranges in layout.base for r in ranges}
    state = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert base == state.keys()
    stage = build_stage(spec, 1)
    assert stage.tied_shards == 0
    assert sum(stage.shard_sizes) == layout.trained[1][-1].stop
    assert sum(stage.base.shard_sizes) == layout.base[1][-1].stop


def test_adapters_begin_with_the_same_bits_whatever_the_cut(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    spec, _ = lora_run(folder, tmp_path)
    found = initial_adapters(spec)
    for k in range(2):
        for name, values in build_stage(spec, k).state_dict().items():
            assert torch.equal(values, found[name])
    of_a = [v for n, v in found.items() if n.endswith("q_proj.lora_A.weight")]
    assert len({tuple(v.flatten().tolist()) for v in of_a}) == 3
    assert 0.5 / 32**0.5 < of_a[0].abs().max() <= 1 / 32**0.5  # as PEFT's kaiming_uniform_
    assert all(not v.any() for n, v in found.items() if ".lora_B." in n)
    other = lora_run(folder, tmp_path, num_stages=1)[0]
    again = build_stage(other, 0).state_dict()
    assert all(torch.equal(again[n], found[n]) for n in found)


POLICIES = [
    Computing(activations="blocks"),
    Computing(activations="recompute"),
    Computing(activations="offload"),
    Computing(precision="bf16"),
    Computing(precision="fp16"),
    pytest.param(Computing(compile=True), marks=pytest.mark.long),
]


@pytest.mark.parametrize("computing", POLICIES)
def test_policies_and_precisions_make_the_same_gradient(
    tmp_path: Path, computing: Computing
) -> None:
    folder = folder_of(tmp_path / "model")
    spec, _ = lora_run(folder, tmp_path)
    gradients = []
    for one in (Computing(), computing):
        stages = stages_of(spec, folder, one)
        randomize(stages)
        gradients.append(gradient_of(stages))
    exact, found = gradients
    tolerance = 0.1 if computing.precision != "fp32" else 1e-4
    assert (found - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("again", ["keep", "recompute", "blocks"])
def test_dropout_is_of_the_microbatch_and_the_stage(tmp_path: Path, again: Any) -> None:
    folder = folder_of(tmp_path / "model")
    lora = {**LORA, "lora_dropout": 0.3}
    spec, _ = lora_run(folder, tmp_path, lora=lora)

    def drawn(key: tuple[int, int], activations: Any = "keep") -> torch.Tensor:
        stages = stages_of(spec, folder, Computing(activations=activations))
        randomize(stages)
        return gradient_of(stages, key)

    first = drawn(KEY)
    torch.rand(7)  # what others draw does not matter
    torch.testing.assert_close(drawn(KEY, again), first, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(drawn((0, 2)), first, rtol=0.01)
    assert not torch.allclose(drawn((1, 1)), first, rtol=0.01)
    stages = stages_of(spec, folder)
    assert bytes(stages[0].evaluate(tokens(), None).data) == bytes(  # type: ignore[union-attr]
        stages[0].evaluate(tokens(), None).data  # type: ignore[union-attr]
    )


def test_retracting_takes_the_same_dropped_gradient_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    spec, _ = lora_run(folder, tmp_path, lora={**LORA, "lora_dropout": 0.3})
    stages = stages_of(spec, folder)
    randomize(stages)
    size = gradient_of(stages).norm()
    for stage in stages:
        stage.retract(KEY)
    left = [to_tensor(s.gradient_shard(j)) for s in stages for j in range(len(s.shard_sizes))]
    assert torch.cat(left).norm() < 1e-5 * size


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_base_in_bf16_is_rounded_once(tmp_path: Path, precision: Any) -> None:
    """It is the model that was rounded before, in half of the memory."""
    folder = folder_of(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(folder)
    rounded = folder_of(tmp_path / "rounded")
    model.bfloat16().float().save_pretrained(rounded)
    low, _ = lora_run(folder, tmp_path, lora={**LORA, "base_dtype": "bfloat16"})
    exact, _ = lora_run(rounded, tmp_path)
    computing = Computing(precision=precision)
    found, expected = stages_of(low, folder, computing), stages_of(exact, rounded, computing)
    for stages in (found, expected):
        randomize(stages)
    torch.testing.assert_close(gradient_of(found), gradient_of(expected), rtol=1e-5, atol=1e-6)
    linear = [m for x in found[0].layers.modules for m in x.modules() if type(m) is FrozenLinear]
    assert len(linear) == 2 * (7 - 3)
    assert all(m.weight.dtype == torch.bfloat16 for m in linear)


@pytest.mark.parametrize(("kind", "error", "part"), [("int8", 0.03, 0.52), ("nf4", 0.5, 0.27)])
def test_a_base_of_few_bits_is_one_of_rounded_weights(
    tmp_path: Path, kind: str, error: float, part: float
) -> None:
    """Near those in bf16, in the half or a quarter of their memory."""
    pytest.importorskip("torchao")
    folder = folder_of(
        tmp_path / "model", hidden_size=128, intermediate_size=256, num_key_value_heads=4
    )
    low, _ = lora_run(folder, tmp_path, lora={**LORA, "base_dtype": kind})
    exact, _ = lora_run(folder, tmp_path, lora={**LORA, "base_dtype": "bfloat16"})

    def gradient(spec: RunSpec, **computing: Any) -> tuple[torch.Tensor, list[FrozenLinear]]:
        stages = stages_of(spec, folder, Computing(**computing))
        randomize(stages)
        modules = [m for s in stages for x in s.layers.modules for m in x.modules()]
        linear = [m for m in modules if isinstance(m, FrozenLinear)]
        if spec is exact and computing:
            for ours, theirs in zip(packed, linear, strict=False):
                assert ours.packed is not None
                theirs.weight.data = ours.packed.unpacked(torch.bfloat16)
        return gradient_of(stages), linear

    found, linear = gradient(low)
    packed = [m for m in linear if m.packed is not None]
    assert len(packed) == 3 * 7
    assert packed == linear[: 3 * 7], "all but the head"
    near, _ = gradient(exact)
    assert 0.0 < (found - near).norm() < error * near.norm()
    for computing in ("keep", "recompute", "offload"):
        again, _ = gradient(exact if computing == "keep" else low, activations=computing)
        assert (again - found).norm() < 1e-4 * found.norm()
    again, _ = gradient(low, precision="bf16")
    assert (again - found).norm() < 0.1 * found.norm()

    assert all(m.weight.numel() == 0 for m in packed)
    sizes = [(m.packed.num_bytes, m.in_features * m.out_features) for m in packed if m.packed]
    assert sum(n for n, _ in sizes) < part * 2 * sum(n for _, n in sizes), "of bf16"
    ratio = base_bytes(low, 0, FP32) / base_bytes(exact, 0, FP32)
    assert part < ratio < 0.7, "the embedding stays in bf16"


def test_few_bits_without_the_library_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "model")
    monkeypatch.setattr(packing, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"base_dtype = \"nf4\" needs torchao on every machine"):
        lora_run(folder, tmp_path, lora={**LORA, "base_dtype": "nf4"})


def test_the_memory_plan_counts_the_base_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    spec, _ = lora_run(folder, tmp_path)
    layout = InitialLayout.of(spec)
    rows = plan_memory(spec, num_replicas=2, in_flight=2)
    for k, row in enumerate(rows):
        base, trained = layout.base[k][-1].stop, layout.trained[k][-1].stop
        assert base_bytes(spec, k, FP32) == 4 * base == 2 * base_bytes(spec, k, BF16)
        assert row.weights == 4 * (base + trained)
        assert row.gradients == 4 * trained
        assert row.unsharded == 4 * base + 16 * trained
        assert known_activations(spec, k, FP32) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_layers_are_measured(tmp_path: Path, dtype: torch.dtype) -> None:
    spec, _ = lora_run(folder_of(tmp_path / "model"), tmp_path)
    plan = model_plan(spec)
    assert len(measure_layers(plan, microbatch=2, dtype=dtype)) == len(plan.layers)


def test_the_base_is_kept_in_the_state_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    spec, hashes = lora_run(folder, tmp_path)
    source = ModelWeights(spec, hashes, folder)
    kept = ModelWeights(spec, hashes, None, state_dir=tmp_path / "state")
    assert not kept.is_here
    assert not kept.has_trained
    values = source.shard(1, 0)
    assert values is not None
    kept.keep(1, 0, values)
    again = ModelWeights(spec, hashes, None, state_dir=tmp_path / "state")
    assert again.is_here
    found = again.shard(1, 0)
    assert found is not None
    assert bytes(found.data) == bytes(values.data)
    assert again.shard(0, 0) is None
    path = next((tmp_path / "state" / "base").glob("*/1-0.safetensors"))
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    damaged = ModelWeights(spec, hashes, None, state_dir=tmp_path / "state")
    assert damaged.shard(1, 0) is None
    assert not path.exists()


def test_a_bf16_model_is_kept_in_half_of_the_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    LlamaForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    spec, hashes = lora_run(folder, tmp_path)
    weights = ModelWeights(spec, hashes, folder, state_dir=tmp_path)
    values = weights.shard(0, 0)
    assert values is not None
    weights.keep(0, 0, values)
    path = next((tmp_path / "base").glob("*/0-0.safetensors"))
    assert path.stat().st_size < 0.51 * len(values.data)
    again = ModelWeights(spec, hashes, None, state_dir=tmp_path).shard(0, 0)
    assert again is not None
    assert bytes(again.data) == bytes(values.data)


def test_a_false_base_is_refused(tmp_path: Path) -> None:
    spec, _ = lora_run(folder_of(tmp_path / "model"), tmp_path)
    stage = build_stage(spec, 0)
    size = stage.base.shard_sizes[0]
    with pytest.raises(ProtocolViolation, match="no shard"):
        stage.base.put(7, Array("float32", (size,), bytes(4 * size)))
    with pytest.raises(ProtocolViolation, match="the base"):
        stage.base.put(0, Array("float32", (1,), bytes(4)))
    assert stage.base.missing == [0]


def peft_adapter(folder: Path, out: Path, **config: Any) -> dict[str, torch.Tensor]:
    """A PEFT adapter of a folder's model with random numbers, and these by swarmnet's names."""
    values = {"task_type": "CAUSAL_LM", **LORA, **config}
    torch.manual_seed(3)
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(folder), LoraConfig(**values))
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    adapted.save_pretrained(out)
    state = {n: p.detach() for n, p in adapted.named_parameters() if p.requires_grad}
    return {
        n.removeprefix("base_model.model.").replace(".default.", "."): p for n, p in state.items()
    }


def test_a_run_begins_from_an_adapter_of_peft(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    theirs = peft_adapter(folder, tmp_path / "adapter", use_rslora=True)
    spec, hashes = lora_run(folder, tmp_path, lora={"from": str(tmp_path / "adapter")})
    assert spec.lora is not None
    assert (spec.lora.r, spec.lora.alpha, spec.lora.use_rslora) == (4, 8.0, True)
    assert spec.lora.target_modules == ("down_proj", "q_proj", "v_proj")
    assert not spec.lora.source
    weights = ModelWeights(spec, hashes, folder, adapter=tmp_path / "adapter")
    assert weights.has_trained
    for k in range(2):
        layout = InitialLayout.of(spec)
        numbers = range(len(layout.trained_sizes[k]))
        first = len(layout.base_sizes[k])
        shards = [weights.shard(k, first + j) for j in numbers]
        flat = torch.cat([to_tensor(s) for s in shards if s is not None])
        for r in stage_parameter_ranges(spec, k):
            assert torch.equal(r.part_of(flat), theirs[r.name])
    random, _ = lora_run(folder, tmp_path, lora={"r": 4, "target_modules": ["q_proj"]})
    assert random.run_id != spec.run_id


def test_an_adapter_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path / "model"), tmp_path / "adapter"
    peft_adapter(folder, out)

    def refused(match: str, lora: dict[str, Any] | None = None, **config: Any) -> None:
        path = out / "adapter_config.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | config))
        with pytest.raises(SpecError, match=match) as caught:
            lora_run(folder, tmp_path, lora={"from": str(out), **(lora or {})})
        assert "\n" not in str(caught.value)
        path.write_text(before)

    refused("has r = 4, not 8; leave the key out", {"r": 8})
    refused("use_dora is not supported", use_dora=True)
    refused("bias is not supported", bias="all")
    refused("no LoRA adapter", peft_type="IA3")
    refused("an adapter of org/Other, not of model", base_model_name_or_path="org/Other")
    refused("lacks model.layers.0.self_attn.k_proj", target_modules=["q_proj", "k_proj"])
    refused("has more than the run's adapters", target_modules=["q_proj"])
    refused(r"lora_A.weight is \(4, 32\), not \(2, 32\)", r=2)
    refused("there are: down_proj", target_modules=["c_attn"])
    refused("r = 0: Input should be greater", r=0)
    refused("r = 4: Input should be a valid integer", r="4")
    refused("r is null; it must be a number", r=None)
    refused("lora_alpha is null; it must be a number", lora_alpha=None)
    refused("lora_alpha = much: Input should be a valid number", lora_alpha="much")
    refused("lora_alpha = 1000.*: Input should be", lora_alpha=10**400)
    refused("target_modules must be a list of names", target_modules=5)
    refused("target_modules must be a list of names", target_modules=[5, "q_proj"])
    refused("goes alone", target_modules=["all-linear", "q_proj"])
    refused("cannot read", {"from": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("given", "named"), [("", "model"), ("models/model", "models/model"), ("org/Base", "org/Base")]
)
def test_an_exported_adapter_names_its_base_as_its_owner_does(
    tmp_path: Path, given: str, named: str
) -> None:
    spec, _ = lora_run(folder_of(tmp_path / "model"), tmp_path)
    write_folder(tmp_path / "out", Trained(spec, 3, initial_adapters(spec), base=given))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == named
    assert "They need model, unchanged" in (tmp_path / "out" / "README.md").read_text()


def test_an_export_knows_what_ends_a_turn(tmp_path: Path) -> None:
    """Of a base model with a chat template, whose own files name the end of a text alone."""
    base = folder_of(tmp_path / "model", vocab_size=400, eos_token_id=300)
    tokenizer = Path(tokenizer_folder(tmp_path / "t", CHATML))
    for file in tokenizer.parent.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    known = Tokenizer.from_file(str(tokenizer))
    end, turn = (known.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>"))
    assert end == 300
    config = base / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": null'))
    spec, _ = lora_run(base, tmp_path)
    files = {p.name: p.read_bytes() for p in base.iterdir() if p.name in spec.files}
    trained = Trained(spec, 3, initial_adapters(spec), files=files)
    model = AutoModelForCausalLM.from_pretrained(base)
    assert model.generation_config.eos_token_id == end
    write_folder(tmp_path / "adapter", trained)
    write_folder(tmp_path / "whole", trained.whole(model.state_dict()))
    for name in ("adapter", "whole"):
        assert GenerationConfig.from_pretrained(tmp_path / name).eos_token_id == [end, turn]
    assert "generation_config.json" in (tmp_path / "adapter" / "README.md").read_text()

    def says(_: Any, scores: torch.Tensor) -> torch.Tensor:
        said = torch.full_like(scores, -100.0)
        said[:, turn] = 0.0
        return said

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    given = torch.tensor([[5, 6, 7]])
    models: tuple[Any, ...] = (model, whole)
    lengths = [
        m.generate(given, max_new_tokens=9, do_sample=False, logits_processor=[says]).shape[1]
        for m in models
    ]
    assert lengths == [12, 4], "the base model goes on, and this one does not"


BAD = [
    ({"target_modules": ["q_proj", "c_attn"]}, "no linear layer 'c_attn'; there are: down_proj"),
    ({"target_modules": ["lm_head"]}, "lm_head is one matrix with another one"),
    ({"target_modules": ["all-linear", "q_proj"]}, "goes alone"),
    ({"r": 0}, "greater than or equal to 1"),
    ({"r": -3}, "greater than or equal to 1"),
    ({"lora_dropout": 1.0}, "less than 1"),
    ({"rank": 4}, r"\[lora\] rank is unknown"),
]


@pytest.mark.parametrize(("lora", "message"), BAD)
def test_bad_input_is_one_line(tmp_path: Path, lora: dict[str, Any], message: str) -> None:
    folder = folder_of(tmp_path / "model")
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in lora.items())
    text = f"""
[model]
from = "{folder}"
[lora]
{table}
[data]
paths = ["python-stdlib"]
[optimizer]
learning_rate = 1e-3
rounds = 4
[pipeline]
num_stages = 2
global_batch = 4
microbatch = 2
"""
    with pytest.raises(SpecError, match=message) as caught:
        described(parse_spec(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.0.w1", "w2"])
def test_a_dense_model_has_no_experts_to_adapt(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "dense"
    family_folder(folder, "llama")
    with pytest.raises(SpecError, match=f"no linear layer '{name}'"):
        lora_run(folder, tmp_path, lora={**LORA, "target_modules": [name]})


def test_random_weights_have_nothing_to_adapt(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    spec, _ = lora_run(folder, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match="nothing to adapt in random ones"):
        lora_run(find_folder(str(folder)), tmp_path)
    values = spec.model_dump()
    values["model"] |= {"weights": ""}
    values["files"].pop("weights.sha256")
    with pytest.raises(SpecError, match=r"name its folder with \[model\] from"):
        spec.with_values(values)


def test_a_stage_without_adapters_is_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    with pytest.raises(SpecError, match="stage 1 has no parameters to train"):
        lora_run(folder, tmp_path, layers=[5, 1])


def test_what_is_left_out_is_filled_in_by_the_starter(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    spec, _ = lora_run(folder, tmp_path, lora={})
    assert spec.lora is not None
    assert (spec.lora.r, spec.lora.lora_alpha) == (8, 8.0)
    assert spec.lora.target_modules == ("q_proj", "v_proj")
    assert not spec.open_keys
    every, _ = lora_run(folder, tmp_path, lora={"target_modules": "all-linear"})
    assert every.lora is not None
    assert len(every.lora.target_modules) == 7
    assert RunSpec.from_canonical(every.canonical()) == every
