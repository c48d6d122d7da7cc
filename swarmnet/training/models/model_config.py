"""A model's config.json: which keys count, which values can be honoured, and transformers' config
object for it.

Whoever starts a run reads the file (`read_config`); what others get is its canonical form, every
key of the family with its value. Neither names code: a family comes from transformers' own
registry, and keys that choose kernels, remote code or quantization are refused or left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmnet.errors import SpecError, one_line
from swarmnet.needs import install_command

log = logging.getLogger("swarmnet.models")

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 1 << 18
MAX_NUMBER = 1 << 30
"""Of any whole number in a config; the limits below are closer."""
LIMITS = {
    "hidden_size": 1 << 17,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 19,
    "moe_intermediate_size": 1 << 19,
    "shared_expert_intermediate_size": 1 << 19,
    "vocab_size": 1 << 22,
    "num_local_experts": 1 << 12,
    "num_experts": 1 << 12,
    "partial_rotary_factor": 1,
}
MAX_ENTRIES = 1 << 12
MAX_TEXT = 256
MAX_DEPTH = 4

LEGACY_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
"""Names that older files have for what `rope_parameters` and `layer_types` say now."""
UNDECLARED_KEYS = ("head_dim", "attention_bias")
"""Layers of some families look for them though the family does not declare them."""
DTYPE_KEYS = ("dtype", "torch_dtype")
DTYPES = ("float32", "bfloat16", "float16")
SILENT_KEYS = """
    _name_or_path _model_name_or_path name_or_path architectures auto_map model_type
    transformers_version transformers_weights unsloth_version _attn_implementation
    attn_implementation _attn_implementation_autoset experts_implementation use_cache
    output_attentions output_hidden_states return_dict is_decoder torchscript use_return_dict
    id2label label2id num_labels problem_type gradient_checkpointing pruned_heads
    chunk_size_feed_forward is_encoder_decoder pretraining_tp cross_attention_hidden_size
    add_cross_attention finetuning_task prefix use_bfloat16 task_specific_params tf_legacy_loss
    decoder_start_token_id sep_token_id tokenizer_class
    max_length min_length do_sample early_stopping num_beams num_beam_groups temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens diversity_penalty
    bos_token_id eos_token_id pad_token_id unk_token_id
"""
"""They change no number of a training pass."""
SILENT = frozenset(SILENT_KEYS.split())
TRAINS_ROUTERS, ROUTER_LOSS = "output_router_logits", "router_aux_loss_coef"
"""The first says that a model is trained on the loss of its routers too, the second how much. What
a run does says its own `[model] router_aux_loss_coef`."""
REFUSED_WHERE_SET = {
    "quantization_config": "its weights must be fp32, bf16 or fp16",
    "compression_config": "its weights must be fp32, bf16 or fp16",
    "use_bidirectional_attention": "training is causal",
    "per_layer_config": "layers of one model must be alike",
}


class MissingModels(SpecError):
    """transformers is not installed."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadConfig:
    """What of a config.json counts."""

    values: dict[str, Any]
    """Canonical: every key of the family."""
    dtype: str
    """Of the weights, where the file says it; else empty."""
    ignored: tuple[str, ...]
    """Keys that the family does not know."""
    router_loss: float | None = None
    """Coefficient of the routers' loss, where the file says that it is trained on."""


def require_transformers() -> Any:
    """The module. Raises `MissingModels`, one line with the command that brings it."""
    try:
        import transformers
    except ImportError:
        raise MissingModels(
            "this run's model needs transformers on this machine: "
            + install_command("transformers")
        ) from None
    return transformers


def read_table(path: Path, where: str) -> dict[str, Any]:
    """A config of JSON. Raises `SpecError`, whose line begins with `where`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        values = json.loads(raw)
        if len(raw) > MAX_CONFIG_BYTES or not isinstance(values, dict):
            raise ValueError("it is no table, or too long")
    except OSError as error:
        raise SpecError(f"{where}: cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: {path} is not valid JSON: {one_line(error, 100)}") from None
    return values


def read_config(folder: Path) -> ReadConfig:
    """The config.json of a Hugging Face folder. Raises `SpecError` where a key cannot be
    honoured."""
    path = folder / CONFIG_FILE
    given = read_table(path, "[model] from")
    known = _known_keys(_config_class(str(given.get("model_type", ""))))
    for key, why in REFUSED_WHERE_SET.items():
        if given.get(key):
            raise SpecError(f"{path}: {key} is not supported: {why}")
    used = {k: v for k, v in given.items() if k in known or k in LEGACY_KEYS or k in DTYPE_KEYS}
    ignored = [k for k in given if _is_news(k, given[k]) and k not in used]
    dtype = next((str(used.pop(k)) for k in DTYPE_KEYS if used.get(k)), "")
    used = {k: v for k, v in used.items() if k not in DTYPE_KEYS}
    config = _made(str(given["model_type"]), used, str(path))
    router_loss = None
    if given.get(TRAINS_ROUTERS) is True:
        router_loss = getattr(config, ROUTER_LOSS, None)
    return ReadConfig(config.canonical_values, dtype, tuple(sorted(ignored)), router_loss)


def _is_news(key: str, value: Any) -> bool:
    known = key in SILENT or key in REFUSED_WHERE_SET or key == TRAINS_ROUTERS
    return not known and value is not None


def load_config(values: Mapping[str, Any]) -> Any:
    """transformers' config for canonical values. One object for equal values: it is not to be
    changed. Raises `SpecError`."""
    try:
        key = json.dumps(values, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise SpecError("[model] config: it holds more than plain values") from None
    return _loaded(key)


@functools.lru_cache(maxsize=16)
def _loaded(key: str) -> Any:
    values = json.loads(key)
    kind = str(values.pop("model_type", ""))
    for name, why in REFUSED_WHERE_SET.items():
        if values.get(name):
            raise SpecError(f"[model] config: {name} is not supported: {why}")
        values.pop(name, None)
    if values.pop(TRAINS_ROUTERS, None):
        raise SpecError(
            f"[model] config: {TRAINS_ROUTERS} is a folder's key; write [model] {ROUTER_LOSS}"
        )
    unknown = sorted(values.keys() - _known_keys(_config_class(kind)))
    if unknown:
        raise SpecError(
            f"[model] config: {unknown[0][:80]!r} is not known to the {kind} of this machine's "
            f"transformers; update it: {install_command('transformers', options='-U')}"
        )
    return _made(kind, values, "[model] config")


def longest_context(config: Any) -> float:
    """Tokens of the longest sequence that a model is made for; infinite where the family has no
    limit. A position encoding that is stretched reaches further than the config's own number."""
    longest = getattr(config, "max_position_embeddings", None)
    if not longest:
        return math.inf
    stretched = (
        t["factor"] * (t.get("original_max_position_embeddings") or longest)
        for t in rope_tables(getattr(config, "rope_parameters", None))
        if isinstance(t.get("factor"), int | float)
    )
    return int(max(longest, *stretched, 0))


def rope_tables(rope: Any) -> list[Mapping[str, Any]]:
    """What a config says of its position encoding: a table, and those within it for kinds of
    layers."""
    whole = rope if isinstance(rope, Mapping) else {}
    return [t for t in (whole, *whole.values()) if isinstance(t, Mapping)]


def model_classes(config: Any) -> tuple[Any, Any]:
    """The family's base model and causal language model, of transformers' own registry."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    return MODEL_MAPPING[type(config)], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _config_class(kind: str) -> Any:
    require_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in CONFIG_MAPPING_NAMES or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SpecError(
            f"[model] model_type {kind[:80]!r} is not supported: transformers has no decoder of "
            "that name (code that comes with a model is never run)"
        )
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


def _known_keys(config_class: Any) -> frozenset[str]:
    """Keys of the family itself."""
    from transformers import PreTrainedConfig

    common = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    own = {f.name for f in dataclasses.fields(config_class)}
    mapped = config_class.attribute_map  # two names of one key; files may have either
    names = (own - common) | mapped.keys() | set(mapped.values())
    return frozenset((names | set(UNDECLARED_KEYS)) - REFUSED_WHERE_SET.keys() - {TRAINS_ROUTERS})


def _made(kind: str, values: Mapping[str, Any], source: str) -> Any:
    """A config object with its canonical values. Raises `SpecError`."""
    config_class = _config_class(kind)
    _check_sizes(values, source)
    _check_rope(values, source)
    floats = {
        f.name: float(values[f.name])
        for f in dataclasses.fields(config_class)
        if type(values.get(f.name)) is int and _is_real(f)
    }
    try:
        config = config_class(**json.loads(json.dumps({**values, **floats})))
    except Exception as error:  # each of transformers' checks has its own kind
        text = one_line(error)
        raise SpecError(f"{source}: transformers refuses it: {text}") from None
    if kind not in (config.model_type, getattr(config_class, "model_type", "")):
        raise SpecError(f"{source}: model_type {kind} is not supported")
    base, _ = model_classes(config)
    has_sdpa = base._supports_sdpa  # noqa: SLF001  what a family declares has no public name
    config._attn_implementation = "sdpa" if has_sdpa else "eager"  # noqa: SLF001  never by a file
    config._experts_implementation = "eager"  # noqa: SLF001  the others need GPUs of some kind
    config.canonical_values = _canonical(config, kind)
    return config


def _is_real(field: dataclasses.Field[Any]) -> bool:
    """The key takes no whole numbers, as which a spec's canonical JSON writes 30.0."""
    kinds = {field.type, *typing.get_args(field.type)}
    return type(field.default) is float or (float in kinds and int not in kinds)


def _canonical(config: Any, kind: str) -> dict[str, Any]:
    known = _known_keys(type(config))
    written = config.to_dict()
    values = {key: written[key] for key in sorted(known) if key in written}
    return {"model_type": kind, **json.loads(json.dumps(values))}


def _check_sizes(values: Any, source: str, depth: int = 0) -> None:
    """Before anything is made of them: no number, text or list beyond what a model may have."""
    if depth > MAX_DEPTH:
        raise SpecError(f"{source}: tables within tables within tables")
    if isinstance(values, Mapping):
        if len(values) > MAX_ENTRIES:
            raise SpecError(f"{source}: more than {MAX_ENTRIES} keys")
        for key, value in values.items():
            limit = LIMITS.get(key, MAX_NUMBER)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not -limit <= value <= limit:
                raise SpecError(f"{source}: {key} = {value} is beyond {limit}")
            if key in LIMITS and is_number and value <= 0:
                raise SpecError(f"{source}: {key} = {value} must be more than 0")
            _check_sizes(value, source, depth + 1)
    elif isinstance(values, list | tuple):
        if len(values) > MAX_ENTRIES:
            raise SpecError(f"{source}: a list of more than {MAX_ENTRIES} entries")
        for value in values:
            _check_sizes(value, source, depth + 1)
    elif isinstance(values, str) and len(values) > MAX_TEXT:
        raise SpecError(f"{source}: a text of more than {MAX_TEXT} characters")


def _check_rope(values: Mapping[str, Any], source: str) -> None:
    """Raises `SpecError` for a kind of position encoding that transformers does not have."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in ("rope_scaling", "rope_parameters"):
        for one in rope_tables(values.get(name)):
            kind = one.get("rope_type", one.get("type", "default"))
            if kind not in ("default", *ROPE_INIT_FUNCTIONS):
                raise SpecError(f"{source}: {name} type {str(kind)[:40]} is not supported")
