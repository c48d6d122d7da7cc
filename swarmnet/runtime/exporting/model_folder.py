"""A trained model as a Hugging Face folder: weights, config, tokenizer, template, end tokens, and a
model card."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnet.errors import UserError
from swarmnet.files import is_full
from swarmnet.plurals import counted
from swarmnet.spec import ModelSpec, RunSpec, batches_of
from swarmnet.training.byte_tokenizer import byte_tokenizer_files
from swarmnet.training.end_tokens import added_texts, end_tokens
from swarmnet.training.tokenizer_files import (
    END_TOKENS,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    json_table,
)

MODEL_FILE, CONFIG_FILE, README_FILE = "model.safetensors", "config.json", "README.md"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
WEIGHTS_LIST = "weights.sha256"
"""Of a run's files, the one that is no part of a model."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NOT_OF_MIXTURES = ("attention_bias", "mlp_bias", "pretraining_tp")
"""Keys of a Llama's config that those of its mixtures do not have."""
MIXTRAL_NAMES = re.compile(r"\.mlp\.(experts\.\d+\.)?(gate|gate_proj|up_proj|down_proj)\.weight$")
MIXTRAL_PARTS = {"gate": "gate", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NO_EXPERT = 8
"""Width of a shared expert that gives nothing."""
NOTHING = {
    "shared_expert.gate_proj": (NO_EXPERT, -1),
    "shared_expert.up_proj": (NO_EXPERT, -1),
    "shared_expert.down_proj": (-1, NO_EXPERT),
    "shared_expert_gate": (1, -1),
}
"""Shapes of its matrices; -1 for the model's width."""
SHOWN_PATHS = 5
SHOWN_CHARACTERS = 16
"""Of a run's id."""
CARD = """---
library_name: {library}
{front}---

# {name}

Parameters of round {round} of the swarmnet run `{run_id}`, {dtype}.

{lines}
"""
ENDS_NOTE = (
    "What ends a text is in `generation_config.json`: give `generate` that one "
    "(`GenerationConfig.from_pretrained`), for it takes the base model's otherwise."
)
BYTES_NOTE = "The tokenizer is one of bytes: a token is a byte, and byte 0 ends a text."


@dataclass(frozen=True, slots=True)
class Trained:
    """A model of a run, at one round."""

    spec: RunSpec
    round: int
    named: Mapping[str, Tensor]
    """Its parameters."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run, by name."""
    held_out: Mapping[int, float] = field(default_factory=dict)
    """Measured losses, by round."""
    is_merged: bool = False
    """Adapters are in the weights."""
    exact: frozenset[str] = frozenset()
    """Names of buffers among them: they are written as they are, whatever the dtype of the
    weights."""
    base: str = ""
    """The model that the run began from as this machine finds it, for adapters; empty where only
    its name is known."""

    @property
    def is_adapter(self) -> bool:
        """Adapters alone."""
        return self.spec.lora is not None and not self.is_merged

    def whole(self, base: Mapping[str, Tensor]) -> Trained:
        """The whole model. `base`: what was not trained, by name."""
        from swarmnet.training.models.base import describe_buffers
        from swarmnet.training.models.lora import merge
        from swarmnet.training.models.registry import model_plan

        lora, exact = self.spec.lora, frozenset[str]()
        named = {**self.named, **base} if lora is None else merge(self.named, base, lora)
        if base:
            exact = frozenset(r.name for r in describe_buffers(model_plan(self.spec).layers))
        return replace(self, named=named, is_merged=lora is not None, exact=exact)


def check_out(out: Path) -> None:
    """Raises `UserError` where a folder cannot be made there."""
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"{out} is there already; name a new folder")
    except OSError as e:
        raise UserError(f"cannot use {out}: {e.strerror or e}") from None


def write_folder(out: Path, trained: Trained, dtype: str = "") -> str:
    """A Hugging Face folder, whole or not at all; returns what was done, in a line. `dtype`: a key
    of `DTYPES`; that of the model which the run began from where it is empty. Raises `UserError`
    where it cannot be written."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    spec = trained.spec
    of_model = "float32" if trained.is_adapter else spec.model.dtype
    written = DTYPES.get(dtype) or of_model or "float32"
    weights_file = ADAPTER_FILE if trained.is_adapter else MODEL_FILE
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    about = {
        "format": "pt",
        "run_id": spec.run_id,
        "round": str(trained.round),
    }
    try:
        beside.mkdir(parents=True)
        try:
            tensors = _tensors(trained, getattr(torch, written))
            save_file(
                {n: tensors[n].contiguous() for n in sorted(tensors)},
                beside / weights_file,
                metadata=about,
            )
            for name, data in _files(trained, written).items():
                (beside / name).write_bytes(data)
            shutil.copymode(beside / README_FILE, beside / weights_file)  # it is to be shared
            if out.is_dir():
                out.rmdir()
            beside.rename(out)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror or e}") from None
    except SafetensorError as e:
        why = os.strerror(errno.ENOSPC) if is_full(e) else " ".join(str(e).split())[:200]
        raise UserError(f"cannot write {out}: {why}") from None
    num_parameters = sum(t.numel() for t in tensors.values())
    return f"{out}: round {trained.round}, {num_parameters:,} parameters"


def _tensors(trained: Trained, dtype: Any) -> Mapping[str, Tensor]:
    """Under the names that the family's files have. `dtype`: torch's, of parameters."""
    whole: Mapping[str, Tensor] = trained.named
    if trained.spec.model.subspace:
        from swarmnet.training.models.subspace import folded

        whole = folded(trained.spec.model, whole)
    if not trained.is_adapter:
        whole = saved_names(trained.spec.model, whole)
    named = {n: t if n in trained.exact else t.to(dtype) for n, t in whole.items()}
    if trained.is_adapter:
        from swarmnet.training.models.lora_folder import adapter_tensors

        return adapter_tensors(named)
    if trained.spec.model.kind != "transformers":
        return named
    from swarmnet.training.models.source_weights import TIED, saved_tensors

    config = trained.spec.model.config
    tied = TIED if config.get("tie_word_embeddings") else {}  # two stages may have had it
    return saved_tensors(config, {n: t for n, t in named.items() if n not in tied})


def _files(trained: Trained, dtype: str) -> dict[str, bytes]:
    """All but the weights, by name."""
    spec = trained.spec
    files = {README_FILE: _card(trained, dtype).encode()}
    if spec.model.kind == "custom":
        return files
    files |= {name: data for name, data in trained.files.items() if name != WEIGHTS_LIST}
    if spec.is_bytes:
        files |= byte_tokenizer_files(spec.model.max_position_embeddings)
    elif TOKENIZER_FILE in files and TOKENIZER_CONFIG_FILE not in files:
        files[TOKENIZER_CONFIG_FILE] = _json(_tokenizer_config(files[TOKENIZER_FILE]))
    ends = end_tokens(spec, files)
    files[GENERATION_FILE] = _json(_generation_config(spec, files, ends))
    if spec.lora is not None and trained.is_adapter:
        from swarmnet.training.models.lora_folder import adapter_config
        from swarmnet.training.models.registry import model_plan

        base = trained.base or spec.model.base
        config = adapter_config(spec.lora, base, model_plan(spec))
        return {**files, ADAPTER_CONFIG: _json(config)}
    files[CONFIG_FILE] = _json(_config(spec, dtype, ends))
    return files


def _config(spec: RunSpec, dtype: str, ends: list[int]) -> dict[str, Any]:
    """config.json."""
    values = model_config(spec.model, ends)
    if spec.model.kind == "transformers":
        from swarmnet.training.models.model_config import load_config, model_classes

        config = load_config(spec.model.config)
        _, causal = model_classes(config)
        values = {"architectures": [causal.__name__], **config.canonical_values}
    return {**values, "dtype": dtype, "torch_dtype": dtype}


def model_config(model: ModelSpec, ends: list[int]) -> dict[str, Any]:
    """config.json of the built-in model. `ends`: tokens that end a text."""
    values = llama_config(model, ends)
    if not model.num_experts:
        return values
    values |= {
        "num_experts_per_tok": model.num_experts_per_tok,
        "output_router_logits": False,
        "router_aux_loss_coef": model.router_losses[0],
    }
    for name in NOT_OF_MIXTURES:
        del values[name]
    if _is_mixtral(model):
        return values | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": model.expert_size,
            "num_local_experts": model.num_experts,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        }
    return values | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_size,
        "shared_expert_intermediate_size": model.shared_expert_intermediate_size or NO_EXPERT,
        "norm_topk_prob": model.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": False,
        "use_sliding_window": False,
    }


def saved_names(model: ModelSpec, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Parameters of the built-in model under the names of its family's files."""
    if not model.num_experts:
        return named
    if _is_mixtral(model):
        return {MIXTRAL_NAMES.sub(_mixtral_name, name): t for name, t in named.items()}
    if model.shared_expert_intermediate_size:
        return named
    found = dict(named)  # the family always has a shared expert: one that gives nothing
    for name, router in named.items():
        if name.endswith(".mlp.gate.weight"):
            layer, width = name.removesuffix("gate.weight"), router.shape[1]
            for part, shape in NOTHING.items():
                sizes = (width if n < 0 else n for n in shape)
                found[f"{layer}{part}.weight"] = router.new_zeros(*sizes)
    return found


def _is_mixtral(model: ModelSpec) -> bool:
    """Its files are Mixtral's, which more programs read; else they are Qwen2-MoE's."""
    return model.norm_topk_prob and not model.shared_expert_intermediate_size


def _mixtral_name(found: re.Match[str]) -> str:
    return f".block_sparse_moe.{found[1] or ''}{MIXTRAL_PARTS[found[2]]}.weight"


def llama_config(model: ModelSpec, ends: list[int]) -> dict[str, Any]:
    """config.json of `transformers.LlamaForCausalLM`. `ends`: tokens that end a text."""
    end = ends[0] if ends else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "initializer_range": model.initializer_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _generation_config(
    spec: RunSpec, files: Mapping[str, bytes], ends: list[int]
) -> dict[str, Any]:
    config = spec.model.config
    values = {
        "bos_token_id": config.get("bos_token_id"),
        "pad_token_id": config.get("pad_token_id", ends[0] if ends else None),
    }
    values |= json_table(files.get(GENERATION_FILE, b""))
    values["eos_token_id"] = ends[0] if len(ends) == 1 else (ends or None)
    return {key: value for key, value in values.items() if value is not None}


def _tokenizer_config(tokenizer: bytes) -> dict[str, Any]:
    """Of a tokenizer that came alone."""
    names = added_texts(tokenizer)
    end = next((name for name in END_TOKENS if name in names), None)
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return values if end is None else {**values, "eos_token": end}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _card(trained: Trained, dtype: str) -> str:
    spec = trained.spec
    front = ""
    if spec.model.license:
        front += f"license: {spec.model.license}\n"
    if "/" in spec.model.base:
        front += f"base_model: {spec.model.base}\n"
    return CARD.format(
        front=front,
        library="peft" if trained.is_adapter else "transformers",
        name=spec.name,
        round=trained.round,
        run_id=spec.run_id,
        dtype=dtype,
        lines="\n".join(f"- {line}" for line in _about(trained)),
    )


def _about(trained: Trained) -> list[str]:
    spec, model, held_out = trained.spec, trained.spec.model, trained.held_out
    lines = []
    if model.kind == "transformers":
        licence = f" (licence: {model.license})" if model.license else " (licence: see there)"
        lines.append(f"Base model: {model.base}{licence}")
    if spec.lora is not None:
        base = model.base
        if spec.adapts_ended:
            run, _, round_ = model.continues.partition("@")
            base = (
                f"the model that `swarmnet export` writes of round {round_} of run "
                f"`{run[:SHOWN_CHARACTERS]}`"
            )
        what = "merged into the weights"
        if trained.is_adapter:
            what = f"which `peft` loads beside the base model. They need {base}, unchanged"
        targets = ", ".join(spec.lora.target_modules)
        lines.append(f"LoRA adapters of rank {spec.lora.rank} on {targets}, {what}")
    if trained.is_adapter:
        lines.append(ENDS_NOTE)
    if model.kind == "custom":
        lines.append("A custom model: load `model.safetensors` into what the run's builder makes.")
    elif spec.is_bytes:
        lines.append(BYTES_NOTE)
    elif TOKENIZER_FILE not in trained.files:
        name = Path(spec.data.tokenizer).name
        lines.append(f"The tokenizer is the run's `{name}`: copy it here as `tokenizer.json`.")
    paths = [Path(path).name for path in spec.data.paths[:SHOWN_PATHS]]
    if paths:
        more = " and more" if len(spec.data.paths) > SHOWN_PATHS else ""
        lines.append(f"Data: {', '.join(paths)}{more}, in sequences of {spec.sequence_length}")
    optimizer = "Muon and AdamW" if spec.optimizer.kind == "muon" else "AdamW"
    of_all = "" if spec.is_endless else f" of {spec.optimizer.rounds}"
    rounds = counted(f"{trained.round}{of_all}", "round")
    lines.append(
        f"Run: {rounds} of {counted(batches_of(spec.pipeline), 'sample')},  {optimizer} with a "
        f"learning rate of {spec.optimizer.learning_rate:g}"
    )
    if held_out:
        best = min(sorted(held_out), key=lambda r: held_out[r])
        shown = {"before": 0, "best": best, "last measured": max(held_out)}
        losses = [
            f"{what} {held_out[r]:.4f} (round {r})" for what, r in shown.items() if r in held_out
        ]
        lines.append(f"Held-out loss: {', '.join(losses)}")
    return lines
