"""Families of transformers whose sequences lie on several ranks: the numbers of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.training.computing import Computing
from swarmnet.training.memory import offload
from swarmnet.training.memory.activation_choice import known_activations
from swarmnet.training.memory.plan import BF16, FP32, Precision
from swarmnet.training.models.adapter import AttendsBy, layer_window
from swarmnet.training.models.model_config import load_config
from swarmnet.training.ranks import cut_trial
from swarmnet.training.ranks.context_parallel_stage import (
    build_context_parallel_stage,
    check_sequences,
)
from swarmnet.training.ranks.ring import Ring
from swarmnet.training.stage import TorchStage, build_stage
from tests.swarm.lora_runs import lora_run
from tests.training.flights import gradient, parameters
from tests.training.memory.test_memory_plan import kept_bytes
from tests.training.ranks.test_family_ranks import (
    DOCUMENTS,
    POLICIES,
    close,
    close_by_name,
    compare,
    renew,
    spec_of,
    tokens,
)
from tests.training.ranks.test_lora_ranks import ALL, fill, randomize
from tests.training.ranks.test_tensor_parallel import ranks
from tests.training.ranks.threads import draw_by_thread, rank_threads
from tests.training.test_adapter import FAMILIES, LENGTH, LONG
from tests.training.test_families import folder_of
from tests.training.test_lora import gradient_of, stages_of

WINDOW = {"sliding_window": LENGTH}
SMALLER = {"num_hidden_layers": 2}
CAPPED = {"head_dim": 16, "attn_logit_softcapping": 0.02}
"""Scores of a small model are small."""
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": FAMILIES["llama 3"],
    "mistral": ("mistral", WINDOW),
    "qwen3": FAMILIES["qwen3"],
    "gemma3": ("gemma3_text", FAMILIES["gemma3"][1] | WINDOW),
    "mixtral": FAMILIES["mixtral"],
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "values narrower than keys": (
        "deepseek_v3",
        {**MLA, "v_head_dim": 16, "first_k_dense_replace": 4, "num_key_value_heads": 4},
    ),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "gemma3, windows": ("gemma3_text", FAMILIES["gemma3"][1] | {"sliding_window": 7}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "gemma2, caps of scores": ("gemma2", CAPPED | WINDOW),
    "gemma2, caps and windows": ("gemma2", CAPPED | {"sliding_window": 7}),
}


@pytest.fixture(autouse=True)
def all_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)


@pytest.mark.parametrize("family", MODELS)
def test_a_family_that_shares_sequences_has_the_numbers_of_one_rank(
    family: str, tmp_path: Path
) -> None:
    """Documents, one matrix or two, and what is kept, in turn. Five ranks divide 24 positions into
    pieces of two and three."""
    kind, more = MODELS[family]
    number = list(MODELS).index(family)
    num_ranks = 5 if number % 4 == 1 else 2
    spec = spec_of(kind, 1, number % 2 == 0, **more, **SMALLER)
    one = [build_stage(spec, 0, computing=Computing())]
    with rank_threads(spec, num_ranks, mode="context") as group:
        computing = Computing(activations=POLICIES[number % 4], folder=str(tmp_path))
        many: list[TorchStage] = [build_context_parallel_stage(spec, 0, group, computing)]
        assert torch.equal(parameters(many[0]), parameters(one[0]))
        compare(one, many)


DRAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("qwen3", {"head_dim": 16}),
    "window": ("mistral", {"sliding_window": 5}),
    "caps and windows": ("gemma2", CAPPED | {"sliding_window": 7}),
    "outputs too": ("phi3", {"resid_pdrop": 0.3, "embd_pdrop": 0.2}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_a_model_leaves_out_is_that_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents, one matrix or two, and what is kept, in turn."""
    kind, more = DRAWS[name]
    number = list(DRAWS).index(name)
    spec = spec_of(kind, 1, number % 2 == 0, attention_dropout=0.3, **more, **SMALLER)
    check_sequences(spec, 3)
    one = build_stage(spec, 0, computing=Computing())
    draw_by_thread(monkeypatch, one)
    with rank_threads(spec, 3 if number % 2 else 2, mode="context") as group:
        computing = Computing(activations=POLICIES[number % 4], folder=str(tmp_path))
        compare([one], [build_context_parallel_stage(spec, 0, group, computing)])


def test_ranks_that_are_processes_leave_out_the_same() -> None:
    spec = spec_of("qwen3", 1, True, head_dim=16, attention_dropout=0.3, **SMALLER)
    with ranks(spec, 2, mode="context") as group:
        compare([build_stage(spec, 0)], [build_context_parallel_stage(spec, 0, group)])


def test_stages_between_others() -> None:
    """Embedding and output matrix are one, and both stages have the whole of it."""
    spec = spec_of("qwen2", 2, True, **SMALLER)
    one = [build_stage(spec, k, computing=Computing()) for k in range(2)]
    with (
        rank_threads(spec, 2, mode="context") as first,
        rank_threads(spec, 3, mode="context") as last,
    ):
        many: list[TorchStage] = [
            build_context_parallel_stage(spec, k, group, Computing(activations="recompute"))
            for k, group in enumerate((first, last))
        ]
        assert many[0].tied_shards
        compare(one, many)
        renew(one, many)
        compare(one, many, round_index=1)


def test_keys_travel_with_as_many_heads_as_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[tuple[int, int]] = []
    attend = Ring.attend

    def counted(self: Ring, q: Tensor, k: Tensor, v: Tensor, *about: Any) -> Tensor:
        heads.append((q.shape[2], k.shape[2]))
        return attend(self, q, k, v, *about)

    monkeypatch.setattr(Ring, "attend", counted)
    spec = spec_of("llama", 1, document_mask=False, **SMALLER)
    with rank_threads(spec, 2, mode="context") as group:
        many = build_context_parallel_stage(spec, 0, group, Computing())
        heads.clear()  # of the trial
        many.forward_backward((0, 0), tokens(1), tokens(2))
        group.join()
    assert heads == [(4, 2)] * 2 * 2


def test_low_precision() -> None:
    """Close to one rank in fp32; what is taken out again leaves nothing but rounding."""
    spec = spec_of("gemma3_text", 1, True, **MODELS["gemma3"][1], **SMALLER)
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 2, mode="context") as group:
        many = build_context_parallel_stage(spec, 0, group, Computing("bf16"))
        for stage in (one, many):
            stage.forward_backward((0, 0), tokens(1), tokens(2), DOCUMENTS[0])
        ours, theirs = gradient(many), gradient(one)
        assert 1e-5 < ((ours - theirs).norm() / theirs.norm()) < 0.05
        many.retract((0, 0))
        assert gradient(many).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("on_experts", [False, True])
def test_adapters(on_experts: bool, tmp_path: Path) -> None:
    folder, lora = tmp_path / "model", {**ALL, "base_dtype": "bfloat16"}
    if on_experts:
        folder_of(folder, "mixtral", num_local_experts=4)
        lora = {**ALL, "target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    else:
        folder_of(folder, "qwen2")
    spec, _ = lora_run(folder, tmp_path, lora=lora)
    one = stages_of(spec, folder, Computing())
    with (
        rank_threads(spec, 2, mode="context") as first,
        rank_threads(spec, 3, mode="context") as last,
    ):
        many: list[TorchStage] = []
        for k, group in enumerate((first, last)):
            computing = Computing(activations="blocks")
            many.append(build_context_parallel_stage(spec, k, group, computing))
            fill(many[-1], spec, folder)
        gradients = []
        for stages in (one, many):
            randomize(stages)
            gradients.append(gradient_of(stages, (1, 1)))
        size = 0
        for stage in one:
            stop = size + stage.num_parameters
            close_by_name(stage, gradients[1][size:stop], gradients[0][size:stop])
            size = stop
        for stage in (*one, *many):
            stage.retract((1, 1))
        close(gradient_of(many, (1, 3)), gradient_of(one, (1, 3)), 1e-5)


@pytest.mark.parametrize(
    ("kind", "precision", "policy"),
    [
        ("qwen2", FP32, "keep"),
        ("qwen2", FP32, "blocks"),
        ("qwen2", BF16, "keep"),
        ("gemma2", FP32, "keep"),
        ("mistral", FP32, "keep"),
    ],
)
def test_a_rank_keeps_no_more_than_the_plan_says(
    kind: str,
    precision: Precision,
    policy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the passes, with one microbatch more in flight. The plan counts a layer's rotary
    tables for each layer, and a pass has them once. No scores are kept, though one rank keeps
    them; with dropout (`mistral`) those of a rank's own queries are."""
    more_of = {"gemma2": {"head_dim": 16}, "mistral": {"attention_dropout": 0.1}}.get(kind, {})
    spec = spec_of(kind, 3, document_mask=False, **more_of, **SMALLER)
    draw_by_thread(monkeypatch)
    computing = Computing(precision.name, policy, folder=str(tmp_path))  # type: ignore[arg-type]
    inputs, targets = tokens(1), tokens(2)
    for k in range(2):
        whole, part = (known_activations(spec, k, precision, n) for n in (1, 3))
        assert whole is not None
        assert part is not None
        with rank_threads(spec, 3, mode="context") as group:
            stage = build_context_parallel_stage(spec, k, group, computing)
            measured, output = kept_bytes(stage, inputs, targets, has_own_tables=True)
            group.join()
        more = part.held(policy, 2)[0] - part.held(policy, 1)[0]
        assert 0.9 * more <= measured <= 1.02 * more, f"stage {k}"
        if policy == "keep":
            assert part.held(policy, 1)[0] < 0.55 * whole.held(policy, 1)[0]
        inputs = output or inputs


def test_ranks_that_are_processes() -> None:
    spec = spec_of("qwen3", 1, True, head_dim=16, **SMALLER)
    with ranks(spec, 2, mode="context") as group:
        compare([build_stage(spec, 0)], [build_context_parallel_stage(spec, 0, group)])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {}, "model_type qwen3_next computes something else than one rank does"),
    ("gpt_oss", {"num_local_experts": 4}, "model_type gpt_oss does not work here"),
    (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
        "beyond 16 tokens positions of this phi3 depend on the whole sequence",
    ),
]


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    REFUSED,
    ids=["linear attention", "sinks", "positions"],
)
def test_what_ranks_cannot_share_is_one_line(kind: str, more: dict[str, Any], message: str) -> None:
    spec = spec_of(kind, 1, document_mask=False, **more)
    with pytest.raises(SpecError, match=rf"--cp 2: .*{message}.*; leave it out") as caught:
        check_sequences(spec, 2)
    assert "\n" not in str(caught.value)
    check_sequences(spec, 1)


def test_attention_that_sees_its_own_rank_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = spec_of("qwen3", 1, document_mask=False, head_dim=32).model.config
    cut_trial.try_small.cache_clear()
    cut_trial.check_shared(config, LENGTH)
    monkeypatch.setattr(AttendsBy, "__torch_function__", _as_torch_does)
    cut_trial.try_small.cache_clear()
    with pytest.raises(SpecError, match="computes something else"):
        cut_trial.check_shared(config, LENGTH)
    cut_trial.try_small.cache_clear()


def test_a_window_that_is_taken_for_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = spec_of("mistral", 1, document_mask=False, sliding_window=8).model.config
    cut_trial.try_small.cache_clear()
    cut_trial.check_shared(config, LENGTH)
    wrong = lambda config, index: layer_window(config, index) + 1  # type: ignore[operator]  # noqa: E731
    monkeypatch.setattr("swarmnet.training.models.adapter.layer_window", wrong)
    cut_trial.try_small.cache_clear()
    with pytest.raises(SpecError, match="computes something else"):
        cut_trial.check_shared(config, LENGTH)
    cut_trial.try_small.cache_clear()


def test_a_cap_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = spec_of("gemma2", 1, document_mask=False, head_dim=16).model.config
    cut_trial.try_small.cache_clear()
    cut_trial.check_shared(config, LENGTH)
    begin = AttendsBy.__init__
    uncapped = lambda self, sequence, window=0, cap=0.0: begin(self, sequence, window)  # noqa: E731
    monkeypatch.setattr(AttendsBy, "__init__", uncapped)
    cut_trial.try_small.cache_clear()
    with pytest.raises(SpecError, match="computes something else"):
        cut_trial.check_shared(config, LENGTH)
    cut_trial.try_small.cache_clear()


def test_layers_that_look_at_chunks_have_no_window() -> None:
    config = load_config({"model_type": "llama4_text", "attention_chunk_size": 8})
    assert layer_window(config, 0) is None
    with pytest.raises(SpecError, match=r"longer than the 8 that .* looks at together"):
        cut_trial.check_shared(config.canonical_values, LENGTH)


def _as_torch_does(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))
