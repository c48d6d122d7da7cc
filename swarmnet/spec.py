"""The run's spec: everything that every peer of a run must agree on.

A person writes it as `run.toml`. Its canonical form (`swarmnet.run_identity`) is what travels from
peer to peer, and the hash of that is the run's name among machines, `run_id`: peers whose specs
differ in one digit are in different runs. What may differ from machine to machine (addresses,
threads, where the data lies) is no part of it; see `peer.options`.

A person may leave some numbers to the program. Whoever starts a run chooses them (*resolves* the
spec, see `RunSpec.resolved`), so that all peers, also of a later version, train on the same ones.

Every failure is a `SpecError` of one line that says what to do.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from rfc8785 import IntegerDomainError

from swarmnet.errors import SpecError, one_line
from swarmnet.files import text_of
from swarmnet.identity import MAX_PEER_ID_CHARS, is_peer_id
from swarmnet.llama_keys import honoured
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import (
    AUTO,
    AUTO_BOUNDARY_CODEC,
    AUTO_UPDATE_CODEC,
    INT8,
    NONE,
    TOPK,
    TOPK_DENSITIES,
    TOPK_DENSITY,
    kept_by,
    sparse_codec,
)
from swarmnet.protocol.pipeline.mixing import check_weights
from swarmnet.protocol.planning.exchange import largest_message_bytes
from swarmnet.protocol.slots import MAX_SLOTS, SlotPlan, slot_plan
from swarmnet.protocol.sync_modes import NO_END
from swarmnet.run_identity import MAX_WHOLE, from_json, run_id_of, to_json, written_values
from swarmnet.version import __version__

MAX_SPEC_BYTES = 1 << 16
"""A spec that is longer is refused, whether it is a file or comes from a peer."""
MAX_TEXT = 1024
"""Characters of one text in a spec."""
MAX_LIST = 1024
"""Entries of one list in a spec."""
MAX_PARTS = 64
"""Names of matrices that are several in one, and the parts of one, at most."""
MAX_PART = 1 << 20
MAX_STAGES = 4096
MAX_RAMP_ROUND = 1 << 40
BOUNDARY_CODEC_KEY, UPDATE_CODEC_KEY = "[pipeline] codec", "[sync] codec"
CODEC_TABLES = ("pipeline", "sync")
CODEC_KEYS = {BOUNDARY_CODEC_KEY, UPDATE_CODEC_KEY}
PARTS_KEY = "[optimizer] parts"
MAX_FILE_BYTES = 64 << 20
"""Of a tokenizer or another file of a run."""
LARGE_FILES, SMALL_FILE_BYTES = ("tokenizer.json", "weights.sha256"), 1 << 20
"""The others are small: every peer reads them."""
RUN_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "weights.sha256",
)
"""Files that a run may have. The last one is the list of its initial shards' hashes."""
MAX_SEQUENCE = 1 << 22
DEFAULT_SEQUENCE = 1024
"""Tokens of a sample where a model has been trained on longer ones and the run says nothing."""
ALL_LINEAR = "all-linear"
"""As the only entry of `[lora] target_modules`: every linear layer of the decoder layers."""
LORA_RANK, LORA_ALPHA = 8, 8.0
"""PEFT's defaults."""
NUM_BYTE_TOKENS = 256
SYNC_WARMUP_PART, MAX_SYNC_WARMUP_ROUNDS = 3, 1000
"""Where `[sync] warmup_rounds` is left to the program: one in so many rounds, and at most so
many."""
DEFAULT_INCLUDE = ("*.txt", "*.md", "*.rst", "*.py")
HELD_OUT_NAME = "held-out"
"""In place of a source's name: `--data held-out=PATH` is this machine's `held_out_paths`."""
DEFAULT_TEXT_FIELD = "text"
PYTHON_STDLIB = "python-stdlib"
"""As an entry of `[data] paths`: the sources of the standard library of the Python that runs."""
BYTES_TOKENIZER = "bytes"

LLAMA_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
EXPERT_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "capacity_factor",
)
ROUTER_KEYS = ("router_aux_loss_coef", "router_z_loss_coef")
ROUTER_AUX_LOSS, ROUTER_Z_LOSS, EXPERTS_PER_TOKEN = 0.01, 0.001, 2
"""Of the built-in model with experts, where the run does not say."""
MAX_VOCABULARY = 1 << 22
MIN_SUBSPACE, MIN_SUBSPACE_LAYERS = 8, 2
BUILDER_PATTERN = re.compile(r"[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has control characters; write plain text on one line")
    return text


def _exact_in_json(seed: int) -> int:
    if seed > MAX_WHOLE:
        raise ValueError(
            f"must be below 2^53 ({MAX_WHOLE + 1}), as JSON keeps larger whole numbers inexactly; "
            "choose another one"
        )
    return seed


def _length(value: Any) -> int | str:
    is_number = type(value) is int and 0 <= value <= MAX_SEQUENCE
    if not is_number and value != AUTO:
        raise ValueError(f'must be tokens, 0 to {MAX_SEQUENCE}, or "{AUTO}"')
    return AUTO if value == AUTO else int(value)


def _ramp(value: Any) -> Any:
    is_list = isinstance(value, list | tuple) and len(value) <= MAX_LIST
    if not is_list or any(
        not isinstance(pair, list | tuple)
        or [type(n) for n in pair] != [int, int]
        or not 0 <= pair[0] <= MAX_RAMP_ROUND
        for pair in value
    ):
        raise ValueError("must be pairs of a round and samples, as [[0, 64], [2000, 256]]")
    return tuple(map(tuple, value))


@dataclass(frozen=True, slots=True)
class Unit:
    """What the number of a key counts, for readers of the reference."""

    name: str


class FilledIn:
    """Marks a key that nobody writes: whoever starts the run fills it in."""


FILLED_IN = FilledIn()
Layers = Annotated[int, Unit("layers")]
Heads = Annotated[int, Unit("heads")]
Width = Annotated[int, Unit("dimensions")]
Tokens = Annotated[int, Unit("tokens")]
Epochs = Annotated[float, Unit("epochs")]
Microbatches = Annotated[int, Unit("microbatches")]
Rounds = Annotated[int, Unit("rounds")]
Stages = Annotated[int, Unit("stages")]
Samples = Annotated[int, Unit("samples")]
Parameters = Annotated[int, Unit("parameters")]
Replicas = Annotated[int, Unit("replicas")]
Bytes = Annotated[int, Unit("bytes")]

Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_printable)]
NonEmptyText = Annotated[Text, Field(min_length=1)]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""SHA-256, hex; may be empty."""
LayerCounts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1 << 14)], ...],
    Field(strict=False, max_length=4096),
    Unit("layers"),
]
BatchRamp = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_ramp), Unit("[round, samples]")]
Texts = Annotated[tuple[NonEmptyText, ...], Field(strict=False, max_length=MAX_LIST)]
Names = Annotated[
    Texts, BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
]
"""Of files; a person may write a single one without brackets."""


class _Table(BaseModel):
    """Frozen, strict about types (no "3" for 3), closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
    )


def _check_plain(values: Any, name: str) -> None:
    try:
        to_json(values)
    except IntegerDomainError:
        raise ValueError(
            f"{name} may hold whole numbers up to 2^53 - 1 ({MAX_WHOLE}) only, as JSON keeps "
            "larger ones inexactly; write it as a text"
        ) from None
    except (ValueError, RecursionError):
        raise ValueError(
            f"{name} may hold finite numbers, texts, booleans, lists and tables only"
        ) from None


class Spread(_Table):
    """How a parameter is divided whose parts are spread over it; by either `rows` or `columns`."""

    rows: tuple[int, ...] = ()
    """Their proportions in the rows of a period, which recurs `times` times."""
    columns: tuple[int, ...] = ()
    times: int = 1


Shares = tuple[int, ...] | Spread
"""Proportions of rows of parts that lie one behind the other, or how parts are spread."""


def _parts(value: Any) -> dict[str, Shares] | str:
    """Of matrices that are several in one."""
    if value == AUTO:
        return AUTO
    if isinstance(value, dict) and len(value) <= MAX_PARTS:
        found = {name: _shares(shares) for name, shares in value.items() if _is_name(name)}
        parts = {name: shares for name, shares in found.items() if shares is not None}
        if len(parts) == len(value):
            return parts
    raise ValueError(
        'must be names with the proportions of their parts, as { "self_attn.qkv_proj" = [4, 1, 1], '
        '"self_attn.kv_b_proj" = { rows = [1, 1], times = 16 } }'
    )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_TEXT and name.isprintable()


def _shares(value: Any) -> Shares | None:
    """Each kind of division in one form, so that it has one run id. None: it is none."""
    if isinstance(value, Spread):
        value = written_values(value)
    if not isinstance(value, dict):
        return _proportions(value)
    rows, columns = (_proportions(value.get(side, ())) for side in ("rows", "columns"))
    times = value.get("times", 1)
    is_whole = type(times) is int and 0 < times <= MAX_PART
    if (
        not value.keys() <= Spread.model_fields.keys()
        or rows is None
        or columns is None
        or bool(rows) is bool(columns)
        or not is_whole
    ):
        return None
    return rows if rows and times == 1 else Spread(rows=rows, columns=columns, times=times)


def _proportions(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, list | tuple) and len(value) <= MAX_PARTS
    if not is_list or not all(type(n) is int and 0 < n <= MAX_PART for n in value):
        return None
    return tuple(value)


def _plain(parts: dict[str, Shares] | str) -> Any:
    """As they are given."""
    if isinstance(parts, str):
        return parts
    return {k: written_values(x) if isinstance(x, Spread) else x for k, x in parts.items()}


Parts = Annotated[
    dict[str, Shares] | Literal["auto"], PlainValidator(_parts), PlainSerializer(_plain)
]


class ModelSpec(_Table):
    """`[model]`: what is trained. Names and conventions are those of Hugging Face
    `LlamaConfig`, so that a checkpoint's config.json can be copied line by line."""

    kind: Literal["llama", "custom", "transformers"] = "llama"
    """The kind of model. `llama`: the built-in language model. `custom`: your own, from `builder`.
    `transformers`: a Hugging Face model, which `from` names. With `from` you may leave this out."""

    source: Text = Field(default="", alias="from")
    """The model to begin from: a Hugging Face folder on the machine that starts the run, or
    ORG/NAME of its hub. The other keys of `[model]`, the tokenizer and the chat template come from
    there. Other peers do not need the folder."""

    continues: Text = ""
    """The run to continue. This run begins with its last parameters. Write its id (as in the name
    of its folder of checkpoints), RUN@ROUND for an earlier round, or a state folder, on the machine
    that starts this run. The program replaces it by RUN@ROUND."""

    moments: Annotated[bool, FILLED_IN] = False
    """The optimizer's moments go on too, from the end of the run that is continued. They do over
    any cut into stages and shards, where both runs have the same kind of optimizer."""

    base: Annotated[Text, FILLED_IN] = ""
    """Name of the model that the run began from, for the model card. It comes from the folder."""

    config: Annotated[dict[NonEmptyText, Any], FILLED_IN] = Field(
        default_factory=dict, max_length=MAX_LIST
    )
    """The model's architecture, as in the config.json of its folder."""

    dtype: Annotated[Literal["", "float32", "bfloat16", "float16"], FILLED_IN] = ""
    """Number format of the weights in the folder. Exports are written in it too."""

    license: Annotated[Text, FILLED_IN] = ""
    """License of the model that the run began from, as its card says."""

    weights: Annotated[Digest, FILLED_IN] = ""
    """SHA-256 of the list of the initial shards' hashes. Empty: the weights are random."""

    hidden_size: Width = Field(default=0, ge=0, le=1 << 17)
    """Width of the residual stream."""

    num_hidden_layers: Layers = Field(default=0, ge=0, le=1 << 14)
    """Number of decoder layers, over all stages."""

    num_attention_heads: Heads = Field(default=0, ge=0, le=1 << 12)
    """Query heads of a layer. The number must divide `hidden_size`."""

    num_key_value_heads: Heads = Field(default=0, ge=0, le=1 << 12)
    """Key and value heads of a layer. The number must divide `num_attention_heads`. If you leave it
    out, it is `num_attention_heads` (no grouping)."""

    intermediate_size: Width = Field(default=0, ge=0, le=1 << 19)
    """Width of the SwiGLU feed-forward layer."""

    vocab_size: Tokens = Field(default=0, ge=0, le=MAX_VOCABULARY)
    """Tokens that the model knows. 256 is enough for the tokenizer `bytes`."""

    max_position_embeddings: Tokens = Field(default=0, ge=0, le=1 << 22)
    """The longest sequence that the model takes. A sample is as long, unless `[data]
    sequence_length` is given."""

    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=1)
    """Small number that RMSNorm adds to the mean square before its root."""

    rope_theta: float = Field(default=10000.0, ge=1)
    """Base of the rotary position encoding's wavelengths."""

    initializer_range: float = Field(default=0.02, gt=0, le=1)
    """Standard deviation of the normal distribution that weights start from."""

    subspace: Width = Field(default=0, ge=0, le=1 << 17)
    """Width of the subspace that all layers but the last write into, around a fixed embedding of
    each token. So many numbers a token cross the boundaries between stages, and not `hidden_size`.
    0: the layers write into the whole width."""

    subspace_seed: Annotated[int, FILLED_IN] = Field(default=0, ge=0, le=MAX_WHOLE)
    """Seed of the fixed embedding of `subspace`."""

    num_experts: int = Field(default=0, ge=0, le=1 << 12)
    """Number of experts in place of each feed-forward layer. A router chooses some of them for each
    token. 0: one feed-forward layer for all tokens. A config.json may have it as
    `num_local_experts`."""

    num_experts_per_tok: int = Field(default=0, ge=0, le=1 << 12)
    """Number of experts that a token meets. If you leave it out, it is 2."""

    moe_intermediate_size: int = Field(default=0, ge=0, le=1 << 19)
    """Width of an expert's SwiGLU layer. 0: that of `intermediate_size`."""

    shared_expert_intermediate_size: int = Field(default=0, ge=0, le=1 << 19)
    """Width of one more expert, which all tokens meet, behind a gate of its own. 0: there is
    none."""

    norm_topk_prob: bool = True
    """Whether the weights of a token's experts add up to 1. `false`: they are the router's
    probabilities, as they must be where a token meets one expert only."""

    capacity_factor: float = Field(default=0.0, ge=0, le=1e6)
    """Largest part of a sample's choices that an expert takes in training, as a multiple of an
    equal share. Later tokens go without it. 0: an expert takes all."""

    router_aux_loss_coef: float | None = Field(default=None, ge=0, le=1e3)
    """Weight of the loss by which routers learn to use all experts, the mean over layers. If you
    leave it out, it is 0.01 with `num_experts`. Beside `from`, for a mixture of experts, it is that
    of its config.json where that says `output_router_logits`, else 0."""

    router_z_loss_coef: float | None = Field(default=None, ge=0, le=1e3)
    """Weight of the loss that keeps the routers' logits small, the mean over layers. If you leave
    it out, it is 0.001 with `num_experts`, else 0."""

    builder: Text = ""
    """Python file and function that make a custom model, such as `examples/custom_model.py:build`.
    The function returns the layers and the loss."""

    options: dict[NonEmptyText, Any] = Field(default_factory=dict, max_length=MAX_LIST)
    """Keyword arguments that the builder of a custom model gets. They are plain values."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("from"):
            return {"kind": "transformers", **values}
        if values.get("kind", "llama") == "llama":
            values = honoured(values)
            heads = values.get("num_attention_heads", 0)
            return {"num_key_value_heads": heads, **_with_experts(values)}
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.kind == "custom":
            self._check_custom()
        elif self.kind == "transformers":
            self._check_transformers()
        else:
            self._check_llama()
        if self.kind != "transformers" and (self.source or self.config):
            raise ValueError('from and config are for kind = "transformers" only')
        if self.kind != "transformers" and self.weights and not self.continues:
            raise ValueError("weights goes with from or continues")
        self._check_subspace()
        if self.moments and not (self.continues and self.weights):
            raise ValueError("moments is filled in where the run continues another; remove it")
        return self

    def _check_transformers(self) -> None:
        if not self.source and not self.config:
            raise ValueError(
                'kind "transformers" begins from a folder: write from = "FOLDER" and nothing else'
            )
        for name in (*LLAMA_SIZES, *EXPERT_KEYS, "builder", "options"):
            if getattr(self, name):
                raise ValueError(f"{name} comes from the config.json that from names; remove it")
        _check_plain(self.config, "config")

    def _check_llama(self) -> None:
        for name in LLAMA_SIZES:
            if getattr(self, name) == 0:
                raise ValueError(f'{name} is missing; kind "llama" needs it')
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads ({heads}) must divide hidden_size ({self.hidden_size})"
            )
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
            )
        if self.head_size % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads ({self.head_size}) must be even: "
                "the rotary encoding turns pairs"
            )
        if self.builder or self.options:
            raise ValueError('builder and options are for kind = "custom" only; remove them')
        self._check_experts()

    def _check_experts(self) -> None:
        experts, chosen = self.num_experts, self.num_experts_per_tok
        if not experts:
            for name in (*EXPERT_KEYS, *ROUTER_KEYS):
                if getattr(self, name):
                    raise ValueError(f"{name} goes with num_experts; remove it, or add that")
            return
        if not 1 <= chosen <= experts or experts < 2:
            raise ValueError(
                f"num_experts_per_tok ({chosen}) must be at least 1 and at most num_experts "
                f"({experts}), of which there are 2 or more"
            )
        if chosen == 1 and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob: the weight of a single expert would always be 1, and its router "
                "would not learn from the loss; write norm_topk_prob = false, or "
                "num_experts_per_tok = 2"
            )
        if self.subspace:
            raise ValueError("subspace does not go with num_experts; remove one of them")

    def _check_subspace(self) -> None:
        if not self.subspace:
            if self.subspace_seed:
                raise ValueError("subspace_seed goes with subspace; remove it")
        elif self.kind == "transformers":
            raise ValueError(
                "subspace is for a model that is trained from its beginning, and the layers of one "
                'that from names write into the whole width; remove it: [pipeline] codec = "int4" '
                "sends few bytes too"
            )
        elif self.kind == "custom":
            raise ValueError(
                "subspace is for the built-in Llama; remove it, and give the narrow tensor to the "
                "next layer in your builder"
            )
        elif not MIN_SUBSPACE <= self.subspace < self.hidden_size:
            raise ValueError(
                f"subspace ({self.subspace}) must be at least {MIN_SUBSPACE} and less than "
                f"hidden_size ({self.hidden_size}); a fourth or an eighth of it is usual"
            )
        elif self.num_hidden_layers < MIN_SUBSPACE_LAYERS:
            raise ValueError(
                f"subspace: the last layer writes into the whole width, so num_hidden_layers "
                f"({self.num_hidden_layers}) must be at least {MIN_SUBSPACE_LAYERS}"
            )

    def _check_custom(self) -> None:
        for name in (*LLAMA_SIZES, *EXPERT_KEYS, *ROUTER_KEYS):
            if getattr(self, name):
                raise ValueError(
                    f'{name} is for kind "llama" only; pass it to your builder in [model.options]'
                )
        if not BUILDER_PATTERN.fullmatch(self.builder):
            raise ValueError('builder must be "path/file.py:function" for kind = "custom"')
        _check_plain(self.options, "options")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def expert_size(self) -> int:
        """Width of an expert's feed-forward layer."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def active_intermediate_size(self) -> int:
        """Width of the feed-forward layers that a token meets in a layer, together."""
        if not self.num_experts:
            return self.intermediate_size
        return self.num_experts_per_tok * self.expert_size + self.shared_expert_intermediate_size

    @property
    def router_losses(self) -> tuple[float, float]:
        """The coefficients of the routers' own losses: balance and z, each of the mean over
        layers."""
        is_own = self.kind == "llama" and self.num_experts > 0
        usual = (ROUTER_AUX_LOSS, ROUTER_Z_LOSS) if is_own else (0.0, 0.0)
        given = (self.router_aux_loss_coef, self.router_z_loss_coef)
        balance, z = (u if g is None else g for u, g in zip(usual, given, strict=True))
        return balance, z

    @property
    def num_parameters(self) -> int:
        """Parameters of the Llama (embeddings not tied); 0 for a custom model."""
        return self._count(self.num_experts * self.expert_size)

    @property
    def num_active_parameters(self) -> int:
        """Of them, those that a token meets."""
        return self._count(self.num_experts_per_tok * self.expert_size)

    def _count(self, experts_width: int) -> int:
        """`experts_width`: of the counted experts' layers, together."""
        if self.kind != "llama":
            return 0
        width, kv_width = self.hidden_size, self.num_key_value_heads * self.head_size
        attention = 2 * width * width + 2 * width * kv_width
        inner, routers = self.intermediate_size, 0
        if self.num_experts:
            inner = experts_width + self.shared_expert_intermediate_size
            routers = width * (self.num_experts + bool(self.shared_expert_intermediate_size))
        layer = attention + 3 * width * inner + routers + 2 * width
        whole = 2 * self.vocab_size * width + self.num_hidden_layers * layer + width
        if not self.subspace:
            return whole
        written = width + self.intermediate_size  # numbers that each of a layer's outputs is of
        saved = self.vocab_size + (self.num_hidden_layers - 1) * written
        return whole - saved * (width - self.subspace)


def _with_experts(values: dict[str, Any]) -> dict[str, Any]:
    """With what is filled in where there are experts."""
    if "num_local_experts" in values:
        values = {k: v for k, v in values.items() if k != "num_local_experts"} | {
            "num_experts": values["num_local_experts"]
        }
    if not values.get("num_experts"):
        return values
    chosen = values.get("num_experts_per_tok", EXPERTS_PER_TOKEN)
    return {"num_experts_per_tok": chosen, "norm_topk_prob": chosen != 1, **values}


class SourceSpec(_Table):
    """`[[data.source]]`: one of several sources of data, which are mixed by weight."""

    name: Text = ""
    """Name of the source, for people, for `--data NAME=PATH` and for `epoch_of`. If you leave it
    out, sources are 1, 2, ... in their order."""

    paths: Names = ()
    """Files or folders, or the word `python-stdlib`."""

    include: Names = DEFAULT_INCLUDE
    """Which files of a folder are read, as `include` of `[data]`."""

    text_field: NonEmptyText = DEFAULT_TEXT_FIELD
    """The field of a record that has its text, as `text_field` of `[data]`."""

    messages_field: Text = ""
    """The field of a record that has its messages, as `messages_field` of `[data]`."""

    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Share of the samples, compared with the weights of the other sources."""

    @model_validator(mode="after")
    def _check(self) -> SourceSpec:
        _check_include(self.include)
        if not self.paths:
            raise ValueError("paths is missing; name text files or folders")
        if self.name == HELD_OUT_NAME or "=" in self.name:
            raise ValueError(f"name {self.name!r} is taken, or has a =; choose another")
        return self


def _check_include(include: tuple[str, ...]) -> None:
    if not include:
        raise ValueError('include must not be empty; "*" takes every file')
    for glob in include:
        if "/" in glob or "\\" in glob:
            raise ValueError(f"include {glob!r} must be a file name's glob, without folders")


class LoraSpec(_Table):
    """`[lora]`: the model that `[model] from` names, or with which the run of `[model] continues`
    ended, stays as it is, and adapters beside some of its linear layers are trained (Hu et al.,
    2022). Names and defaults are those of PEFT's `LoraConfig`."""

    source: Text = Field(default="", alias="from")
    """A PEFT adapter to go on from: its folder on the machine that starts the run. `r`,
    `lora_alpha`, `target_modules` and `use_rslora` come from there. Without it, adapters begin at
    random."""

    r: int | None = Field(default=None, ge=1, le=1 << 14)
    """Rank of the adapters. If you leave it out, it is 8."""

    lora_alpha: float | None = Field(default=None, gt=0, le=1e6)
    """Adapters are scaled by `lora_alpha / r`. If you leave it out, it is 8."""

    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Part of an adapter's inputs that training leaves out at random."""

    target_modules: Texts = ()
    """Linear layers that get an adapter, by the ends of their names, such as `q_proj`.
    `["all-linear"]`: all in the decoder layers. `experts.gate_up_proj` and `experts.down_proj`: the
    matrices of experts, each with adapters of its own. If you leave it out, PEFT's choice for the
    family counts, mostly `q_proj` and `v_proj`."""

    use_rslora: bool = False
    """Adapters are scaled by `lora_alpha / sqrt(r)` instead."""

    base_dtype: Literal["", "bfloat16", "int8", "nf4"] = ""
    """How the model's own weights are kept. `bfloat16`: they are rounded to it once, and linear
    layers keep them so, also where passes are fp32. `int8`, `nf4`: the linear layers of decoder
    layers keep them in 8 or 4 bits. Empty: the precision of the passes."""

    adapter: Annotated[Digest, FILLED_IN] = ""
    """SHA-256 of the adapter that the run began from, or of the name of the run whose adapters and
    base it began with. Empty: adapters began at random."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("target_modules") == ALL_LINEAR:
            return {**values, "target_modules": (ALL_LINEAR,)}
        return values

    @model_validator(mode="after")
    def _check(self) -> LoraSpec:
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ValueError(f'target_modules: "{ALL_LINEAR}" goes alone')
        return self

    @property
    def rank(self) -> int:
        return self.r or LORA_RANK

    @property
    def alpha(self) -> float:
        return self.lora_alpha or LORA_ALPHA

    @property
    def is_open(self) -> bool:
        """Whoever starts the run is to fill in something."""
        is_named = self.target_modules not in ((), (ALL_LINEAR,))
        return bool(self.source) or self.r is None or self.lora_alpha is None or not is_named


class DataSpec(_Table):
    """`[data]`: what is learned from. A custom model may do without."""

    paths: Names = ()
    """Text, `.jsonl` or `.parquet` files (also `.gz`, `.zst`) or folders, or the word
    `python-stdlib`. The content is the same on every machine. A peer that has it in another place
    says so with `--data`."""

    include: Names = DEFAULT_INCLUDE
    """Which files of a folder are read, at any depth: globs on the file's name. The default adds
    what else the readers know: `*.jsonl`, `*.parquet`, `*.gz` and `*.zst`."""

    text_field: NonEmptyText = DEFAULT_TEXT_FIELD
    """The field of a `.jsonl` or `.parquet` record that has its text."""

    messages_field: Text = ""
    """The field of a record that has the messages of a dialogue, each with `role` and `content`; it
    takes the place of `text_field`. The tokenizer's chat template makes the messages a text. Only
    what the assistant says is learned."""

    source: tuple[SourceSpec, ...] = Field(default=(), strict=False, max_length=64)
    """Several sources, mixed by weight, in place of `paths`."""

    epochs: Epochs = Field(default=0.0, ge=0, le=1e6)
    """Length of the run, as the number of times that each document is learned. It takes the place
    of `[optimizer] rounds`: whoever starts the run counts the rounds."""

    epoch_of: Text = ""
    """Name of the source whose epochs count, where there are several. If you leave it out, it is
    the first."""

    tokenizer: NonEmptyText = BYTES_TOKENIZER
    """`bytes` (256 tokens), or the path of a Hugging Face `tokenizer.json`. A model that `from`
    names brings its own."""

    sequence_length: Annotated[int | str, PlainValidator(_length), Unit("tokens")] = 0
    """Length of a training sequence; one sequence is one sample. 0: the model's
    `max_position_embeddings`, and with `from` at most 1024. `auto`: as long as 95 % of the
    dialogues need, in whole eights, at most the model's context. Whoever starts the run measures
    that."""

    held_out_fraction: float = Field(default=0.02, ge=0, le=0.5)
    """Part of the text that is never trained on, in whole documents. 0: no held-out loss is
    measured."""

    held_out_least: Annotated[Literal["sample", "document"], FILLED_IN] = "sample"
    """What is held out where `held_out_fraction` is less than a sample: as much as a sample, or a
    document."""

    held_out_microbatches: Microbatches = Field(default=8, ge=0, le=1 << 16)
    """Size of a held-out measurement. 0: none is made."""

    document_mask: bool = False
    """Attention and positions stay inside a document, also where several share a sample."""

    held_out_paths: Names = ()
    """Files or folders to measure on, in place of a part of `paths`. They are read as the first
    source is."""

    fingerprint: Annotated[Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")], FILLED_IN] = ""
    """Fingerprint of all documents as tokens. A peer whose data have another one does not feed."""

    held_out_fingerprint: Annotated[
        Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")], FILLED_IN
    ] = ""
    """Fingerprint of `held_out_paths` as tokens. A peer whose files have another one feeds, and
    measures nothing."""

    @model_validator(mode="after")
    def _check(self) -> DataSpec:
        _check_include(self.include)
        if self.source:
            for key in ("paths", "include", "text_field", "messages_field"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} belongs into each [[data.source]]; remove it here")
            names = [source.name for source in self.sources]
            if len(set(names)) < len(names):
                raise ValueError("[[data.source]]: two have the same name")
            if self.epoch_of and self.epoch_of not in names:
                raise ValueError(f"epoch_of must be one of {', '.join(names)}")
            check_weights([source.weight for source in self.source])
        elif self.epoch_of:
            raise ValueError("epoch_of is for several [[data.source]]; remove it")
        return self

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """All of them, with names; none where a custom model needs none."""
        if self.source:
            return tuple(
                s if s.name else s.model_copy(update={"name": str(k)})
                for k, s in enumerate(self.source, 1)
            )
        if not self.paths:
            return ()
        return (
            SourceSpec(
                name="data",
                paths=self.paths,
                include=self.include,
                text_field=self.text_field,
                messages_field=self.messages_field,
            ),
        )

    @property
    def measures(self) -> bool:
        """A part of the text, or other files, are to be measured on."""
        is_held_out = self.held_out_fraction > 0 or bool(self.held_out_paths)
        return bool(self.sources) and is_held_out and self.held_out_microbatches > 0

    @property
    def epoch_source(self) -> int:
        """Number of the source whose epochs count."""
        names = [source.name for source in self.sources]
        return names.index(self.epoch_of) if self.epoch_of else 0


class OptimizerSpec(_Table):
    """`[optimizer]`: AdamW (Loshchilov and Hutter, 2019), with Muon (Jordan et al., 2024) for the
    matrices of decoder layers or without, and a schedule of the learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """The optimizer. `muon`: matrices of decoder layers make orthogonal steps, scaled to the size
    of AdamW's, which all other parameters make. Weight decay is decoupled, and applied to matrices
    only."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of the matrices' gradients, with `muon`."""

    parts: Parts = Field(default_factory=dict)
    """With `muon`, how parameters of decoder layers that are several matrices are divided into
    these: by the last parts of a name, without `.weight`, in which proportion the rows are shared
    out, as `{ "self_attn.qkv_proj" = [4, 1, 1] }`. Where the parts of each head come together,
    `{ rows = [1, 1], times = 16 }`; `columns` in place of `rows` shares out columns. Of three
    dimensions, each matrix along the first one is divided so. Without numbers, the parameter is
    AdamW's. `auto`: as the family of `transformers` has them; whoever starts the run fills them
    in."""

    learning_rate: float = Field(gt=0, le=10)
    """The highest learning rate, reached at the end of the warm-up."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up. `cosine`: half a cosine down, to the end of
    the run. `wsd`: it stays, and goes down in the last `decay_rounds`. `constant`: it stays for as
    long as the run lasts."""

    decay_rounds: Rounds = Field(default=0, ge=0, le=1 << 40)
    """Last rounds of the run, in which `wsd` lowers the learning rate."""

    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a part of `learning_rate`. `constant` does not use
    it."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""

    eps: float = Field(default=1e-8, gt=0, le=1)
    """Small number that AdamW adds to the root of the second moment."""

    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """Weight decay, per unit of learning rate."""

    warmup_rounds: Rounds = Field(default=0, ge=0, le=1 << 40)
    """Rounds in which the learning rate grows linearly from near 0."""

    rounds: Rounds = Field(ge=0, le=1 << 40)
    """Length of the run, in updates. Leave it out where `[data] epochs` says it. 0, with
    `constant`: the run has no end, and both `warmup_rounds`, here and in `[sync]`, must be
    given."""

    grad_clip_norm: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient, over all stages together. A larger gradient is scaled down to
    it. 0: no clipping."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerSpec:
        if self.rounds and self.warmup_rounds >= self.rounds:
            raise ValueError(
                f"warmup_rounds ({self.warmup_rounds}) must be less than rounds ({self.rounds})"
            )
        if self.kind != "muon" and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError('momentum goes with kind = "muon"; AdamW has beta1')
        if self.kind != "muon" and self.parts:
            raise ValueError('parts goes with kind = "muon"; remove it')
        if self.schedule != "wsd" and self.decay_rounds:
            raise ValueError('decay_rounds goes with schedule = "wsd"; remove it')
        if self.schedule == "wsd" and not self.decay_rounds:
            raise ValueError(
                'decay_rounds is missing; schedule = "wsd" lowers the rate in so many rounds, a '
                "tenth or a fifth of the run, say"
            )
        if self.rounds and self.warmup_rounds + self.decay_rounds > self.rounds:
            raise ValueError(
                f"warmup_rounds ({self.warmup_rounds}) and decay_rounds ({self.decay_rounds}) "
                f"together must not be more than rounds ({self.rounds})"
            )
        return self

    @property
    def end(self) -> int:
        """The round with which the run is over, once its epochs are counted: its number of rounds;
        `NO_END` where it has none."""
        return self.rounds or NO_END


class PipelineSpec(_Table):
    """`[pipeline]`: how the model and the batch are cut."""

    num_stages: Stages = Field(ge=1, le=MAX_STAGES)
    """Number of stages: contiguous slices of the model, of which a peer holds one. A stage has at
    least one layer."""

    layers: LayerCounts = ()
    """Layers of each stage, first to last, as `swarmnet plan --measure` prints them. Embedding,
    last norm and head count as one layer each. If you leave it out, whoever starts the run cuts by
    estimated cost."""

    global_batch: Samples = Field(ge=1, le=1 << 32)
    """Samples behind one update, over the whole swarm. With `batch_ramp`, of the last rounds."""

    batch_ramp: BatchRamp = ()
    """A batch that grows: rounds, and the samples behind one update from there on, as `[[0, 64],
    [2000, 256]]`. The first round is 0, and the last number of samples is `global_batch`."""

    microbatch: Samples = Field(ge=1, le=1 << 20)
    """Samples that travel together. The number must divide `global_batch`."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the passes, on machines that do not choose their own (`--precision`).
    `auto`: bf16 on GPUs that have it, fp16 on other GPUs, fp32 on CPUs. Sums of gradients and the
    optimizer are fp32 in any case."""

    activations: Literal["auto", "keep", "blocks", "recompute", "offload"] = "auto"
    """What a stage keeps between forward and backward. `keep`: the whole graph. `blocks`: the input
    of each layer. `recompute`: the input of the stage. With both, the rest is computed again.
    `offload`: the graph's tensors, moved from a GPU to main memory, or from there to the disk.
    `auto`: each machine chooses by its free memory."""

    max_in_flight: Microbatches = Field(default=0, ge=0, le=1 << 16)
    """Microbatches that a feeder has under way at a time. 0: each feeder chooses."""

    codec: Literal["auto", "none", "bf16", "int8", "int6", "int4"] = "none"
    """How activations and their gradients are coded between stages: `none` (fp32), `bf16`, `int8`,
    `int6` or `int4`. With the last two, gradients have 6 or 4 bits, and activations 7. All peers
    use the same codec, also for held-out losses. `auto`: whoever starts the run takes what
    measurements have shown to be harmless."""

    evaluate_every: Rounds = Field(default=10, ge=0, le=1 << 40)
    """Rounds between held-out measurements. 0: only the end of the run is measured."""

    @model_validator(mode="after")
    def _check(self) -> PipelineSpec:
        if self.layers and len(self.layers) != self.num_stages:
            raise ValueError(
                f"layers names {counted(len(self.layers), 'stage')}, but num_stages is "
                f"{self.num_stages}; leave layers out, and measure again"
            )
        if self.global_batch % self.microbatch:
            raise ValueError(
                f"global_batch ({self.global_batch}) must be a multiple of "
                f"microbatch ({self.microbatch})"
            )
        if self.global_batch // self.microbatch > MAX_SLOTS:
            raise ValueError(
                f"global_batch ({self.global_batch}) is more than {MAX_SLOTS} microbatches of "
                f"{self.microbatch}; make microbatch larger"
            )
        if self.batch_ramp:
            self._check_ramp()
        return self

    def _check_ramp(self) -> None:
        firsts, samples = zip(*self.batch_ramp, strict=True)
        if firsts[0] != 0:
            raise ValueError(
                f"batch_ramp begins with round {firsts[0]}; begin it with [0, SAMPLES]"
            )
        for (first, n), (later, more) in pairwise(self.batch_ramp):
            if later <= first or more <= n:
                raise ValueError(
                    f"batch_ramp has [{later}, {more}] after [{first}, {n}]; rounds and samples "
                    "must both grow"
                )
        if samples[-1] != self.global_batch:
            raise ValueError(
                f"batch_ramp ends with {counted(samples[-1], 'sample')}, and global_batch is "
                f"{self.global_batch}; make them the same"
            )
        if uneven := [n for n in samples if n < 1 or n % self.microbatch]:
            raise ValueError(
                f"batch_ramp has {counted(uneven[0], 'sample')}; it must be a multiple of "
                f"microbatch ({self.microbatch})"
            )

    @property
    def slots(self) -> SlotPlan:
        """Microbatches of each round."""
        return slot_plan(self.global_batch, self.microbatch, self.batch_ramp)

    def batch_of(self, round_index: int) -> int:
        """Samples behind the update of a round."""
        return self.microbatch * self.slots.of(round_index)

    def samples_before(self, round_index: int) -> int:
        """Samples behind the updates of all rounds before this one."""
        return self.microbatch * self.slots.before(round_index)

    def rounds_of(self, num_samples: int) -> int:
        """The fewest rounds that have together so many samples."""
        return self.slots.rounds_of(-(-num_samples // self.microbatch))


class SyncSpec(_Table):
    """`[sync]`: how the replicas of a stage stay one."""

    mode: Literal["zero", "delayed", "local", "gossip", "auto"] = "zero"
    """When replicas exchange what. `zero`: sharded optimizer state, one exact update a round.
    `delayed`: the same update, made beside the next round's microbatches, which still use the
    parameters without it. `local`: each replica makes its own steps, and all are averaged every
    `local_steps` rounds. `gossip`: the same, with one random partner at a time. `auto`: `zero` or
    `delayed`, by how long exchanges take."""

    warmup_rounds: Rounds = Field(default=-1, ge=-1, le=1 << 40)
    """First rounds of the run, in which exchanges come as soon as they can, because a model changes
    fastest then: `delayed` and `auto` work as `zero`, and `local` and `gossip` exchange after every
    round. -1: a third of the run, at most 1000."""

    local_steps: Rounds = Field(default=20, ge=1, le=1 << 20)
    """Rounds between two exchanges, with `local` and `gossip`."""

    fragments: int = Field(default=1, ge=1, le=1 << 12)
    """Parts of a stage that are exchanged in different rounds, to spread the load, with `local`."""

    outer_learning_rate: float = Field(default=0.7, gt=0, le=4)
    """Part of the averaged change that is taken over, with `local` and `gossip`."""

    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the averaged change, with `local`."""

    gossip_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov momentum of the averaged change, with `gossip`."""

    shard_parameters: Parameters = Field(default=0, ge=0, le=1 << 32)
    """Size of a shard, the part of a stage whose optimizer state has owners of its own. 0: whoever
    starts the run chooses. In stages of less than 4 million parameters, 65,536 take a third of the
    CPU at the end of a round that smaller shards take."""

    replication: Replicas = Field(default=2, ge=1, le=64)
    """Replicas that hold each shard's optimizer state."""

    aggregation: Literal["mean", "median_clip", "trimmed_mean", "centered_clip"] = "median_clip"
    """How the replicas' gradients become one. `mean`: all count. `median_clip`: one whose norm is
    more than twice the median is cut to the median. `trimmed_mean`: the extremes of each coordinate
    do not count. `centered_clip`: large differences from the middle are clipped. With fewer than 4
    contributors it is always `mean`."""

    codec: Literal["auto", "none", "bf16", "int8", "int4", "topk"] = "none"
    """How updates are coded: gradients, their sums, and the changes that come back. `none` (fp32),
    `bf16`, `int8`, `int4` (sums in 6 bits), or, with `local` only, `topk` (the larger half of the
    changes, in 2 bits). What coding loses of one update is added to the next. `gossip` takes `none`
    or `int8`. `auto`: whoever starts the run takes what measurements have shown to be harmless."""

    topk_density: float = Field(default=0.5, gt=0, le=0.5)
    """Part of the changes that `topk` sends. 0.5: half of them, with results in 4 bits. From 0.01
    to 0.08 it is of results too, which backups get in place of sums; 0.05 was measured, and costs
    much of the loss in runs of fewer than a hundred exchanges."""

    optimizer_store: Literal["memory", "disk"] = "memory"
    """Where peers keep optimizer state, unless they choose their own place (`--optimizer-memory`).
    `memory`: that of the host, or of a GPU that has room. `disk`: memory-mapped files in the state
    folder."""

    @model_validator(mode="after")
    def _check(self) -> SyncSpec:
        if self.codec == TOPK and self.mode != "local":
            raise ValueError(
                'codec = "topk" is for changes over many steps: it goes with mode = "local"'
            )
        if self.mode == "gossip" and self.codec not in (AUTO, NONE, INT8):
            raise ValueError('codec is "none" or "int8" with mode = "gossip"')
        if self.topk_density != TOPK_DENSITY:
            low, high = TOPK_DENSITIES
            if self.codec != TOPK:
                raise ValueError('topk_density goes with codec = "topk"; remove it')
            if not low <= self.topk_density <= high:
                raise ValueError(f"topk_density is {TOPK_DENSITY}, or from {low} to {high}")
        return self

    @property
    def update_codec(self) -> str:
        """How updates are coded, by a name of `protocol.codecs`: `codec`, and of `topk` with fewer
        numbers how many."""
        if self.codec == TOPK and self.topk_density != TOPK_DENSITY:
            return sparse_codec(kept_by(self.topk_density))
        return self.codec

    def largest_message_bytes(self, num_parameters: int, num_moments: int) -> int:
        """Of what a shard of so many parameters is sent in, with so many moments each. An open
        codec is what a run that starts now has."""
        codec = chosen_update_codec(self) if self.codec == AUTO else self.update_codec
        return largest_message_bytes(num_parameters, num_moments, self.mode, codec)


def chosen_update_codec(sync: SyncSpec) -> str:
    """What is given, else what a run that starts now has."""
    if sync.codec != AUTO:
        return sync.codec
    return NONE if sync.mode == "gossip" else AUTO_UPDATE_CODEC


class FileSpec(_Table):
    """A file of the run that every peer can get from any other."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the file."""
    size: Bytes = Field(ge=0, le=MAX_FILE_BYTES)
    """Size of the file."""


class SecuritySpec(_Table):
    """`[security]`: who may take part."""

    admission: Literal["open", "invite"] = "open"
    """Who may take part. `open`: anyone who knows an address. `invite`: holders of an invite from
    the run's owner (`swarmnet invite`); every peer refuses the others."""

    owner: str = Field(default="", max_length=MAX_PEER_ID_CHARS)
    """Public key of the run's owner, with `invite`. `swarmnet invite --key FILE` prints it."""

    @model_validator(mode="after")
    def _check(self) -> SecuritySpec:
        if self.admission == "open" and self.owner:
            raise ValueError('[security] owner goes with admission = "invite"')
        if self.admission == "invite" and not is_peer_id(self.owner):
            raise ValueError(
                "[security] owner must be a public key; `swarmnet invite --key owner.key` makes "
                "a key and prints the line"
            )
        return self


class RunSpec(_Table):
    """A run, whole."""

    name: NonEmptyText = "swarmnet run"
    """Name of the run, for people. Screens show it."""

    seed: Annotated[int, AfterValidator(_exact_in_json)] = Field(default=0, ge=0)
    """Seed of the initial weights and of the order of the data."""

    model: ModelSpec
    lora: LoraSpec | None = None
    data: DataSpec = DataSpec()
    optimizer: OptimizerSpec
    pipeline: PipelineSpec
    sync: SyncSpec = SyncSpec()
    security: SecuritySpec = SecuritySpec()
    files: Annotated[dict[NonEmptyText, FileSpec], FILLED_IN] = Field(
        default_factory=dict, max_length=len(RUN_FILES)
    )
    """Tokenizer, chat template and the like, by name."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample of a language model; 0 where that is not known yet. Where the data are
        to say it, and have not, what it would be without a word."""
        written = self.data.sequence_length
        if written and written != AUTO:
            return int(written)
        if self.model.kind != "transformers":
            return self.model.max_position_embeddings
        return min(self.longest_context, DEFAULT_SEQUENCE) if self.model.config else 0

    @property
    def longest_context(self) -> int:
        """Tokens that the model takes at once, as far as its config says."""
        if self.model.kind != "transformers":
            return self.model.max_position_embeddings
        return int(self.model.config.get("max_position_embeddings", DEFAULT_SEQUENCE))

    @property
    def is_endless(self) -> bool:
        """The run has no last round."""
        return not self.optimizer.rounds and not self.data.epochs

    @property
    def is_bytes(self) -> bool:
        """A token is a byte."""
        return self.data.tokenizer == BYTES_TOKENIZER and "tokenizer.json" not in self.files

    @property
    def sync_warmup_rounds(self) -> int:
        """Rounds of the warm-up of `[sync]`; 0 in mode `zero`, which needs none."""
        return 0 if self.sync.mode == "zero" else self._chosen_warmup

    @property
    def _chosen_warmup(self) -> int:
        """`[sync] warmup_rounds`, or the number that the program chooses."""
        if self.sync.warmup_rounds < 0:
            return min(self.optimizer.rounds // SYNC_WARMUP_PART, MAX_SYNC_WARMUP_ROUNDS)
        return self.sync.warmup_rounds

    @property
    def adapts_ended(self) -> bool:
        """Adapters are trained beside what another run ended with, not beside a folder's model."""
        is_named = bool(self.model.source or self.model.base)
        return self.lora is not None and bool(self.model.continues) and not is_named

    @property
    def open_keys(self) -> tuple[str, ...]:
        """The keys whose numbers are left to the program, such as `[pipeline] layers`; none in the
        spec of a run that was started."""
        keys = {
            "[model] from": bool(self.model.source),
            "[model] continues": bool(self.model.continues) and not self.model.weights,
            "[model] subspace_seed": bool(self.model.subspace) and not self.model.subspace_seed,
            "[data] epochs": self.data.epochs > 0,
            "[lora]": self.lora is not None and self.lora.is_open,
            PARTS_KEY: self.optimizer.parts == AUTO,
            "[data] sequence_length": self.data.sequence_length == AUTO
            or (self.model.kind == "transformers" and self.data.sequence_length == 0),
            "[pipeline] layers": not self.pipeline.layers,
            BOUNDARY_CODEC_KEY: self.pipeline.codec == AUTO,
            UPDATE_CODEC_KEY: self.sync.codec == AUTO,
            "[sync] shard_parameters": self.sync.shard_parameters == 0,
            "[sync] warmup_rounds": self.sync.warmup_rounds < 0,
        }
        return tuple(key for key, is_open in keys.items() if is_open)

    def resolved(self, *, layers: Iterable[int], shard_parameters: int) -> RunSpec:
        """This run with its open keys filled in, as every peer will read it: with the given layers
        of each stage and parameters of a shard, and the usual warm-up; what is given in the spec
        stays. Raises `SpecError`.

        `[optimizer] parts` has been filled in (`with_parts`)."""
        values = self.model_dump()
        pipeline, sync = values["pipeline"], values["sync"]
        if self.model.kind == "transformers":
            values["data"]["sequence_length"] = self.sequence_length
        pipeline["layers"] = pipeline["layers"] or tuple(layers)
        pipeline["codec"], sync["codec"] = self._chosen_codecs
        sync["shard_parameters"] = sync["shard_parameters"] or shard_parameters
        sync["warmup_rounds"] = self._chosen_warmup
        # A custom model's option 1.0 arrives as 1: the starter's builder shall get that too.
        return RunSpec.from_canonical(_validate(values, "the resolved spec").canonical())

    def with_parts(self, parts: Mapping[str, Shares]) -> RunSpec:
        """This run with these parts of matrices, where it leaves them open. Raises `SpecError`."""
        if self.optimizer.parts != AUTO:
            return self
        return self._changed(PARTS_KEY, optimizer={"parts": dict(parts)})

    def with_chosen_codecs(self) -> RunSpec:
        """This run with the codecs that it would be started with."""
        boundary, update = self._chosen_codecs
        pipeline = self.pipeline.model_copy(update={"codec": boundary})
        sync = self.sync.model_copy(update={"codec": update})
        return self.model_copy(update={"pipeline": pipeline, "sync": sync})

    @property
    def _chosen_codecs(self) -> tuple[str, str]:
        """Of boundaries and of updates: what is given, else what a run that starts now has."""
        boundary: str = self.pipeline.codec
        if boundary == AUTO:
            boundary = NONE if self.model.kind == "custom" else AUTO_BOUNDARY_CODEC
        return boundary, chosen_update_codec(self.sync)

    @model_validator(mode="before")
    @classmethod
    def _leave_rounds_open(cls, values: Any) -> Any:
        """Where the run is as long as its epochs."""
        if not isinstance(values, dict):
            return values
        data, optimizer = values.get("data"), values.get("optimizer")
        if isinstance(data, dict) and data.get("epochs") and isinstance(optimizer, dict):
            return {**values, "optimizer": {"rounds": 0, **optimizer}}
        return values

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        model, data, pipeline = self.model, self.data, self.pipeline
        unknown = sorted(self.files.keys() - set(RUN_FILES))
        if unknown:
            raise ValueError(f"[files] {unknown[0][:80]!r} is no file that a run has")
        small = self.files.keys() - set(LARGE_FILES)
        if long := sorted(name for name in small if self.files[name].size > SMALL_FILE_BYTES):
            raise ValueError(f"[files] {long[0]} is longer than {SMALL_FILE_BYTES >> 20} MiB")
        if bool(model.weights) != ("weights.sha256" in self.files):
            raise ValueError("[model] weights goes with the file weights.sha256")
        if not self.optimizer.rounds and not data.epochs:
            self._check_endless()
        if self.optimizer.rounds and data.epochs:
            raise ValueError(
                "[optimizer] rounds and [data] epochs both say how long the run is; remove one"
            )
        ramp = pipeline.batch_ramp
        if self.optimizer.rounds and ramp and ramp[-1][0] >= self.optimizer.rounds:
            raise ValueError(
                f"[pipeline] batch_ramp grows in round {ramp[-1][0]}, and the last round is "
                f"{self.optimizer.rounds - 1}; leave that out, and lower global_batch"
            )
        if self.lora is not None and self.optimizer.kind == "muon":
            raise ValueError(
                '[optimizer] kind = "muon" is for the matrices of decoder layers, which [lora] '
                'does not train; write kind = "adamw"'
            )
        if self.lora is not None and not (model.source or model.weights or model.continues):
            raise ValueError(
                "[lora] trains adapters beside a model's weights: name its folder with [model] "
                "from, or the run that ended with them with [model] continues"
            )
        if self.lora is not None and model.kind == "custom":
            raise ValueError(
                "[lora] is for models of known layers, not for those of a builder; give your "
                "layers adapters of their own"
            )
        if model.kind != "custom" and not data.sources:
            raise ValueError(
                f'[data] paths is missing; name text files or folders, or "{PYTHON_STDLIB}"'
            )
        if model.kind != "llama":
            return self
        if data.sequence_length != AUTO and self.sequence_length > model.max_position_embeddings:
            raise ValueError(
                f"[data] sequence_length ({data.sequence_length}) must not be more than [model] "
                f"max_position_embeddings ({model.max_position_embeddings})"
            )
        if pipeline.num_stages > model.num_hidden_layers:
            raise ValueError(
                f"[pipeline] num_stages ({pipeline.num_stages}) must not be more than "
                f"[model] num_hidden_layers ({model.num_hidden_layers})"
            )
        if data.tokenizer == BYTES_TOKENIZER and model.vocab_size < NUM_BYTE_TOKENS:
            raise ValueError(
                f"[model] vocab_size ({model.vocab_size}) must be at least {NUM_BYTE_TOKENS} "
                'for tokenizer = "bytes"'
            )
        return self

    def _check_endless(self) -> None:
        if self.optimizer.schedule != "constant":
            raise ValueError(
                "[optimizer] rounds must be at least 1; 0, for a run without an end, goes with "
                'schedule = "constant"'
            )
        if self.sync.mode != "zero" and self.sync.warmup_rounds < 0:
            raise ValueError(
                "[sync] warmup_rounds must be given where the run has no end "
                "([optimizer] rounds = 0), for it is a part of the run else"
            )

    def canonical(self) -> bytes:
        """The one byte string of this spec, see `swarmnet.run_identity`."""
        return to_json(written_values(self))

    @property
    def run_id(self) -> str:
        """32 hex digits, the hash of `canonical()`."""
        return run_id_of(self.canonical())

    @classmethod
    def from_canonical(cls, data: bytes) -> RunSpec:
        """The spec that a peer sent. Checked as a file is; the caller compares `run_id`.

        Raises:
            SpecError: it is too long, no JSON, not valid, of another version of the program, or not
                in canonical form.
        """
        source = "the swarm's spec"
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError(f"{source}: longer than {MAX_SPEC_BYTES} bytes; it is refused")
        try:
            values = from_json(data)
        except (ValueError, RecursionError):
            raise SpecError(f"{source}: not valid JSON; the peer that sent it is faulty") from None
        spec = _validate(values, source, _explain_received)
        if spec.canonical() != data:
            raise SpecError(f"{source}: not in canonical form; the peer that sent it is faulty")
        return spec

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any], run_id: str) -> RunSpec:
        """The spec that a checkpoint of the run names. Raises `SpecError`."""
        source = "the checkpoint's spec"
        try:
            spec = _validate(from_json(json.dumps(values)), source, _explain_received)
        except (TypeError, ValueError, RecursionError):
            raise SpecError(f"{source}: not valid JSON") from None
        if run_id != spec.run_id:
            raise SpecError(f"{source} is not that of its run")
        return spec

    def with_rounds(self, rounds: int) -> RunSpec:
        """This run with another length; a warm-up and a decay that no longer fit shrink in
        proportion, and a batch does not grow beyond its end. Raises `SpecError`."""
        old = self.optimizer
        warmup, decay = old.warmup_rounds, old.decay_rounds
        if warmup >= rounds or warmup + decay > rounds:
            whole = max(old.rounds, warmup + decay, warmup + 1)
            warmup = warmup * max(rounds, 0) // whole
            decay = min(decay, max(decay * max(rounds, 0) // whole, 1))
        optimizer = {"rounds": rounds, "warmup_rounds": warmup, "decay_rounds": decay}
        ramp = tuple(step for step in self.pipeline.batch_ramp if step[0] < max(rounds, 1))
        pipeline = {"batch_ramp": ramp, "global_batch": ramp[-1][1]} if ramp else {}
        return self._changed(
            "--rounds", optimizer=optimizer, data={"epochs": 0.0}, pipeline=pipeline
        )

    def with_sequence_length(self, sequence_length: int) -> RunSpec:
        """This run with samples of so many tokens. Raises `SpecError`."""
        changes = {"sequence_length": sequence_length}
        return self._changed("[data] sequence_length", data=changes)

    def with_data(
        self, *, rounds: int, fingerprint: str, held_out: str = "", held_out_least: str = ""
    ) -> RunSpec:
        """This run with what only its data tell: rounds in place of epochs, the fingerprints
        (`held_out`: of `held_out_paths`), and what is held out at least. Raises `SpecError`."""
        data = {
            "epochs": 0.0,
            "fingerprint": fingerprint,
            "held_out_fingerprint": held_out,
            "held_out_least": held_out_least or self.data.held_out_least,
        }
        return self._changed("[data] epochs", optimizer={"rounds": rounds}, data=data)

    def with_held_out_documents(self) -> RunSpec:
        """This run with a document held out where less than a sample is asked for."""
        return self._changed("[data] held_out_fraction", data={"held_out_least": "document"})

    def with_values(self, values: Mapping[str, Any]) -> RunSpec:
        """A run of these values. Raises `SpecError`."""
        return _validate(dict(values), "the resolved spec")

    def with_builder(self, builder: str) -> RunSpec:
        """This run with a custom model's code taken from elsewhere: for use on this machine only,
        since its `run_id` is another."""
        if builder == self.model.builder:
            return self
        return self._changed("--builder", model={"builder": builder})

    def with_seed(self, seed: int) -> RunSpec:
        """This run with another seed."""
        return _validate(self.model_dump() | {"seed": seed}, "--seed")

    def _changed(self, source: str, **tables: dict[str, Any]) -> RunSpec:
        """This run with other values in its tables. Raises `SpecError`; `source` begins its
        line."""
        values = self.model_dump()
        for table, changes in tables.items():
            values[table] |= changes
        return _validate(values, source)


TABLES: dict[str, type[_Table]] = {
    "model": ModelSpec,
    "lora": LoraSpec,
    "data": DataSpec,
    "optimizer": OptimizerSpec,
    "pipeline": PipelineSpec,
    "sync": SyncSpec,
    "security": SecuritySpec,
}


def load_spec(path: Path) -> RunSpec:
    """Reads a `run.toml`, or the same tables as JSON where the name ends in `.json`. Raises
    `SpecError`."""
    return spec_of_values(read_values(path), path.name)


def read_values(path: Path) -> Any:
    """What such a file says, unchecked. Raises `SpecError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    text = text_of(raw, path, SpecError)
    return _values_of(text, path.name, is_json=path.suffix == ".json")


def parse_spec(text: str, source: str = "run.toml") -> RunSpec:
    """The spec that a TOML text describes. Raises `SpecError`; `source` begins its line."""
    return spec_of_values(_values_of(text, source, is_json=False), source)


def _values_of(text: str, source: str, *, is_json: bool) -> Any:
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise SpecError(f"{source}: longer than {MAX_SPEC_BYTES} bytes; a spec is a short file")
    try:
        return json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        name = "JSON" if is_json else "TOML"
        raise SpecError(f"{source}: not valid {name}: {one_line(error, MAX_TEXT)}") from None


def spec_of_values(values: Any, source: str) -> RunSpec:
    """The spec that tables describe, as people write them: what they leave out is the program's to
    choose. Raises `SpecError`; `source` begins its line."""
    if not isinstance(values, dict):
        raise SpecError(f"{source}: a spec is a table")
    values = dict(values)
    for table in CODEC_TABLES:
        # A canonical spec that does not say has `none`, for ever; who writes a file leaves it open.
        given = values.get(table, {} if table == "sync" else None)
        if isinstance(given, dict):
            values[table] = {"codec": AUTO, **given}
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("kind") == "muon":
        values["optimizer"] = {"parts": AUTO, **optimizer}
    spec = _validate(values, source)
    if spec.is_endless and "warmup_rounds" not in values["optimizer"]:
        raise SpecError(
            f"{source}: [optimizer] warmup_rounds must be given where the run has no end "
            "(rounds = 0); 0 for none"
        )
    return spec


def values_of_spec(spec: RunSpec) -> dict[str, Any]:
    """What makes the same run by `spec_of_values`: plain values, for JSON."""
    values: dict[str, Any] = from_json(spec.canonical())
    for table in CODEC_TABLES:
        values[table] = {"codec": getattr(spec, table).codec, **values.get(table, {})}
    values["optimizer"]["warmup_rounds"] = spec.optimizer.warmup_rounds
    if spec.optimizer.kind == "muon":
        values["optimizer"].setdefault("parts", {})
    return values


def describe(spec: RunSpec) -> str:
    """The run in one line, for people."""
    model, pipeline = spec.model, spec.pipeline
    what = model.builder
    if model.kind == "llama":
        what = (
            f"llama of {model.num_parameters / 1e6:.2f} M parameters "
            f"({counted(model.num_hidden_layers, 'layer')}, width {model.hidden_size}, "
            + (f"subspace of {model.subspace}, " if model.subspace else "")
            + (_about_experts(model) if model.num_experts else "")
            + f"sequences of {spec.sequence_length})"
        )
    elif model.kind == "transformers":
        what = (
            f"{model.base or model.source} ({model.config.get('model_type', 'a folder')}, "
            f"sequences of {spec.sequence_length})"
        )
    if spec.lora is not None:
        targets = ", ".join(spec.lora.target_modules) or "some layers"
        what += f", LoRA of rank {spec.lora.rank} on {targets}"
    epochs = counted(spec.data.epochs, "epoch", "g")
    length = counted(spec.optimizer.rounds, "round") if spec.optimizer.rounds else epochs
    if spec.is_endless:
        length = "without an end"
    stages = counted(pipeline.num_stages, "stage")
    return (
        f"{spec.name}: {what}, {stages}, global batch {batches_of(pipeline)} "
        f"in microbatches of {pipeline.microbatch}, {length}"
    )


def batches_of(pipeline: PipelineSpec) -> str:
    """The samples behind one update, for people."""
    first, *later = pipeline.batch_ramp or ((0, pipeline.global_batch),)
    return ", ".join([str(first[1]), *(f"{n} from round {r} on" for r, n in later)])


def _about_experts(model: ModelSpec) -> str:
    return (
        f"{model.num_experts_per_tok} of {counted(model.num_experts, 'expert')} a token, "
        f"{model.num_active_parameters / 1e6:.2f} M parameters active, "
    )


def _validate(
    values: Any, source: str, explain: Callable[[ValidationError], str] | None = None
) -> RunSpec:
    if not isinstance(values, dict):
        raise SpecError(f"{source}: a spec is a table")
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        raise SpecError(f"{source}: {(explain or _explain)(error)}") from None


def _explain_received(error: ValidationError) -> str:
    """One line for a spec that came from a peer or a disk: what is unknown in it is newer than this
    program."""
    for kind in ("extra_forbidden", "literal_error"):
        for e in error.errors(include_url=False, include_context=False):
            if e["type"] == kind:
                name = _name(tuple(_shown(part) for part in e["loc"]))
                value = f" = {_shown(e['input'])}" if kind == "literal_error" else ""
                return (
                    f"{name}{value} is not known to swarmnet {__version__}; the run needs a newer "
                    "one: update this machine's swarmnet"
                )
    return _explain(error)


def _explain(error: ValidationError) -> str:
    """One line for the failure that is most likely the cause of the others: a misspelt key is
    also a missing one."""
    errors = error.errors(include_url=False, include_context=False)
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    first: Any = (unknown or errors)[0]
    kind, loc = first["type"], tuple(_shown(part) for part in first["loc"])
    if kind == "extra_forbidden":
        return _explain_unknown(loc)
    name = _name(loc)
    message = one_line(first["msg"].removeprefix("Value error, "), MAX_TEXT)
    if kind == "missing":
        return f"{name} is missing; add it"
    if kind == "value_error":
        return f"{name} {message}" if name else message
    given = one_line(repr(first["input"]))
    message = message[:1].lower() + message[1:]
    return f"{name} = {given[:80]}: {message}"


def _explain_unknown(loc: tuple[str, ...]) -> str:
    key, is_top, is_source = loc[-1], len(loc) == 1, loc[:2] == ("data", "source")
    table: type[BaseModel] = RunSpec
    where = ""
    if is_source:
        table, where = SourceSpec, "[[data.source]] "
    elif not is_top:
        table, where = TABLES.get(loc[0], FileSpec), f"[{loc[0]}] "
    elsewhere = "" if is_source else next((t for t, c in TABLES.items() if key in _keys(c)), "")
    if elsewhere:
        outside = " outside a table" if is_top else ""
        return f"{where}{key} is unknown{outside}; it belongs to [{elsewhere}]"
    near = _nearest(key, _keys(table))
    if is_top and near in TABLES:
        return f"[{key}] is unknown; did you mean [{near}]?"
    hint = f"did you mean {near}?" if near else f"known are {', '.join(_keys(table))}"
    return f"{where}{key} is unknown; {hint}"


def _keys(table: type[BaseModel]) -> list[str]:
    """As a person writes them."""
    return [field.alias or name for name, field in table.model_fields.items()]


def _nearest(key: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)), "")


def _name(loc: tuple[str, ...]) -> str:
    """`[table] key`, or the name of a top-level key."""
    if not loc:
        return ""
    if loc[0] not in TABLES:
        return " ".join(loc)
    if loc[:2] == ("data", "source") and len(loc) > 2:
        return " ".join(("[[data.source]]", f"number {int(loc[2]) + 1}:", *loc[3:]))
    return " ".join((f"[{loc[0]}]", *loc[1:]))


def _shown(value: Any) -> str:
    """Of what somebody else wrote: short and on one line."""
    text = value if isinstance(value, str) else repr(value)
    return (text if text.isprintable() else repr(text))[:80]
