"""What the spec of a run leaves to the program, chosen by whoever starts the run: numbers, and all
that a model's folder has to say."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.errors import DataError, SpecError
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import AUTO
from swarmnet.run_identity import MAX_WHOLE
from swarmnet.spec import BYTES_TOKENIZER, CODEC_KEYS, NUM_BYTE_TOKENS, RunSpec
from swarmnet.training.continuing import Ended, SavedRuns
from swarmnet.training.models.base import derive_seed
from swarmnet.training.models.initial_weights import EndedWeights, InitialLayout, InitialSources
from swarmnet.training.models.lora import present, target_names
from swarmnet.training.models.lora_folder import family_targets, read_adapter
from swarmnet.training.models.matrices import check_matrices
from swarmnet.training.models.model_folder import (
    BESIDE_TOKENIZER,
    find_folder,
    has_weights,
    read_bounded,
    read_folder,
    small_files,
)
from swarmnet.training.models.registry import (
    model_plan,
    muon_parts,
    shard_parameters,
    split_stages,
)

if TYPE_CHECKING:
    from swarmnet.training.data.opening import Place

log = logging.getLogger("swarmnet.models")

LLAMA_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range")
"""Keys of `[model]` that have a value also where they are left out."""
TOKENIZER_FILE, WEIGHTS_FILE = "tokenizer.json", "weights.sha256"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run as every peer of it will read it."""

    spec: RunSpec
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run's files, by name; of those that this machine has."""


def resolve(spec: RunSpec, builder: str = "") -> RunSpec:
    """`resolve_run`, without the files."""
    return resolve_run(spec, builder).spec


def resolve_run(
    spec: RunSpec, builder: str = "", place: Place | None = None, past: SavedRuns | None = None
) -> Resolved:
    """The spec with its open keys filled in (`RunSpec.open_keys`); one that has none comes back as
    it is. `builder`: where this machine has a custom model's code, in place of the spec's. `place`:
    where it has the data, of which the spec gets the fingerprints; None where it has none. `past`:
    for `[model] continues`. Takes up to seconds for a large model, and as long as it takes to read
    weights and data.

    Raises:
        DataError: the data cannot be read, or are needed and not here.
        SpecError: the model or its folder cannot be read, built or cut so.
    """
    spec, contents = with_files(_with_whole_config(spec), "" if place is None else place.tokenizer)
    check_model(spec, builder)
    adapter = spec.lora.source if spec.lora is not None else ""
    spec = _with_data(_with_lora(spec), builder, place, contents)
    if set(spec.open_keys) <= CODEC_KEYS:  # it takes no model
        return Resolved(spec.resolved(layers=(), shard_parameters=0), contents)
    model = spec.with_builder(builder or spec.model.builder)
    plan = model_plan(model)
    if spec.optimizer.kind == "muon":
        spec = spec.with_parts(muon_parts(spec, plan.layers))
        model = spec.with_builder(model.model.builder)
        check_matrices(plan.layers, muon_parts(spec, plan.layers), spec.sync)
    stages = split_stages(plan, spec.pipeline.num_stages)
    size = shard_parameters(model, plan)
    layers = [len(stage) for stage in stages]
    if plan.cache is None and spec.model.kind == "transformers":
        log.warning(
            "models of type %s are trained and exported, but write no texts while they train",
            spec.model.config["model_type"],
        )
    ended: Ended | None = None
    if "[model] continues" in spec.open_keys:
        if past is None:
            raise SpecError("[model] continues: only whoever starts the run can say which one")
        written = spec.resolved(layers=layers, shard_parameters=size)
        begun = past.begun(written)
        if begun is not None:
            return Resolved(begun[0], {**contents, WEIGHTS_FILE: begun[1]})
        ended = past.ended(written)
    spec = _with_subspace(spec, ended)
    if ended is not None:
        spec = _with_adapters_of(ended, spec)
        model = spec.with_builder(model.model.builder)
    if spec.model.source or ended is not None:
        spec, contents = _with_weights(spec, model, adapter, ended, contents)
    return Resolved(spec.resolved(layers=layers, shard_parameters=size), contents)


def _with_subspace(spec: RunSpec, ended: Ended | None) -> RunSpec:
    """With the seed of the fixed embedding: that of the run that goes on."""
    model = spec.model
    if not model.subspace or model.subspace_seed:
        return spec
    seed = derive_seed(spec.seed, "subspace") % MAX_WHOLE + 1
    if ended is not None:
        seed = ended.spec.model.subspace_seed
    return spec.model_copy(update={"model": model.model_copy(update={"subspace_seed": seed})})


def _with_adapters_of(ended: Ended, spec: RunSpec) -> RunSpec:
    """The spec that says whether its adapters are those that another run ended with, where that
    had their base too."""
    if spec.lora is None or not spec.adapts_ended or ended.spec.lora is None:
        return spec
    name = hashlib.sha256(ended.name.encode()).hexdigest()
    return spec.model_copy(update={"lora": spec.lora.model_copy(update={"adapter": name})})


def _with_weights(
    spec: RunSpec,
    model: RunSpec,
    adapter: str,
    ended: Ended | None,
    contents: dict[str, bytes],
) -> tuple[RunSpec, dict[str, bytes]]:
    """The spec with what it begins from in place of where that lies. `model`: as this machine
    builds it. Raises `SpecError`."""
    folder = find_folder(spec.model.source) if spec.model.source else None
    layout = InitialLayout.of(model)
    trained = None if ended is None else ended.weights(model, layout)
    is_stepped = any(layout.trained_sizes)  # adapters that begin at random have no moments
    if trained is not None and is_stepped and trained.no_moments:
        log.warning("[model] continues: moments begin at zero: %s", trained.no_moments)
    elif trained is not None and is_stepped:
        layout = replace(layout, has_moments=True)
    dtype, hashes = _weights(model, layout, folder, adapter, trained)
    if ended is not None and folder is not None and any(layout.base):
        ended.check_base(layout, hashes, folder)
    changes: dict[str, Any] = {"source": "", "dtype": spec.model.dtype or dtype}
    if ended is not None:
        changes |= {"continues": ended.name, "moments": layout.has_moments}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update=changes)})
    if hashes:
        contents = {**contents, WEIGHTS_FILE: hashes}
        spec = _with_file_specs(spec, contents)
    return spec, contents


def _with_data(
    spec: RunSpec, builder: str, place: Place | None, contents: Mapping[str, bytes]
) -> RunSpec:
    if place is None:
        if spec.data.sequence_length == AUTO:
            raise DataError(
                f'[data] sequence_length = "{AUTO}": whoever starts the run looks how long its '
                "dialogues are; name the data (--data), or write a number"
            )
        if spec.data.epochs:
            raise DataError(
                "[data] epochs: whoever starts the run counts its rounds, and needs the data for "
                "that; name them (--data), or write [optimizer] rounds"
            )
        return spec
    from swarmnet.training.data.resolving import with_data, with_length

    place = replace(place, files=contents)
    spec = with_length(spec, place)
    read = with_data(spec.with_builder(builder or spec.model.builder), place)
    return spec.with_data(
        rounds=read.optimizer.rounds,
        fingerprint=read.data.fingerprint,
        held_out=read.data.held_out_fingerprint,
        held_out_least=read.data.held_out_least,
    )


def described(spec: RunSpec) -> RunSpec:
    """The spec with what its model's config.json says, and the codecs that it would be started
    with, which is enough to plan it; nothing is read but that, and the data where they say how long
    samples are. Raises `SpecError`."""
    written = spec
    spec = spec.with_chosen_codecs()
    if spec.model.source and not spec.model.config:
        from swarmnet.training.models.model_config import read_config

        folder = find_folder(spec.model.source)
        read = read_config(folder)
        values: dict[str, Any] = {"config": read.values, "base": spec.model.source}
        if spec.model.router_aux_loss_coef is None:
            values["router_aux_loss_coef"] = read.router_loss
        spec = spec.model_copy(update={"model": spec.model.model_copy(update=values)})
        check_model(spec)
    spec = _with_lora(spec)
    if spec.optimizer.parts == AUTO:
        spec = spec.with_parts(
            muon_parts(spec, model_plan(spec).layers) if spec.model.kind == "transformers" else {}
        )
    if spec.data.sequence_length != AUTO:
        return spec
    from swarmnet.training.data.opening import Place
    from swarmnet.training.data.resolving import with_length

    try:
        return with_length(spec, Place(files=with_files(written)[1]))
    except DataError as error:
        usual = spec.sequence_length
        log.warning("%s; reckoned with samples of %s tokens", error, f"{usual:,}")
        return spec.with_sequence_length(usual)


def check_model(spec: RunSpec, builder: str = "") -> None:
    """What `RunSpec` asks of the built-in Llama, asked of a model whose sizes stand elsewhere, when
    a run is started or planned. `builder`: as in `resolve_run`. Raises `SpecError`."""
    model, pipeline = spec.model, spec.pipeline
    if model.kind == "llama":
        return
    for key in LLAMA_NUMBERS:
        if getattr(model, key) != type(model).model_fields[key].default:
            where = "the config.json" if model.kind == "transformers" else "[model.options]"
            raise SpecError(f'[model] {key} is for kind "llama" only, here it belongs into {where}')
    if model.kind == "custom":
        if not spec.data.sequence_length:
            return
        inputs = model_plan(spec.with_builder(builder or model.builder)).inputs
        length = inputs.shape[0] if inputs.dtype == "int32" and len(inputs.shape) == 1 else 0
        if length and spec.data.sequence_length != length:
            raise SpecError(
                f"[data] sequence_length ({spec.data.sequence_length}): the builder's model takes "
                f"samples of {counted(length, 'token')}; leave it out, or tell the builder in "
                "[model.options]"
            )
        return
    from swarmnet.training.models.model_config import load_config, longest_context

    config = load_config(model.config)
    longest = longest_context(config)
    if spec.sequence_length > longest:
        raise SpecError(
            f"[data] sequence_length ({spec.sequence_length}) must not be more than the model's "
            f"longest context ({longest})"
        )
    if pipeline.num_stages > config.num_hidden_layers:
        raise SpecError(
            f"[pipeline] num_stages ({pipeline.num_stages}) must not be more than the model's "
            f"layers ({config.num_hidden_layers})"
        )
    if spec.is_bytes and config.vocab_size < NUM_BYTE_TOKENS:
        raise SpecError(
            f"[model] vocab_size ({config.vocab_size}) must be at least {NUM_BYTE_TOKENS} for "
            'tokenizer = "bytes"'
        )


def _with_whole_config(spec: RunSpec) -> RunSpec:
    """With every key of a config that stands in the spec itself, so that another version of
    transformers takes no other defaults. Raises `SpecError`."""
    if spec.model.kind != "transformers" or spec.model.source or not spec.open_keys:
        return spec
    from swarmnet.training.models.model_config import load_config

    config = load_config(spec.model.config).canonical_values
    return spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})


def file_values(contents: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """What a spec says of files."""
    return {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for name, data in sorted(contents.items())
    }


def with_files(spec: RunSpec, own_tokenizer: str = "") -> tuple[RunSpec, dict[str, bytes]]:
    """What the model's folder says, and the files of the run. `own_tokenizer`: where this machine
    has the tokenizer, if not where the run says. Raises `SpecError`."""
    contents: dict[str, bytes] = {}
    if spec.model.source:
        model, contents = read_folder(find_folder(spec.model.source), spec.model)
        spec = spec.model_copy(update={"model": model})
    tokenizer = Path(own_tokenizer or spec.data.tokenizer).expanduser()
    is_own = spec.data.tokenizer != BYTES_TOKENIZER and TOKENIZER_FILE not in spec.files
    if is_own and tokenizer.is_file():
        contents |= {**small_files(tokenizer.parent, BESIDE_TOKENIZER), **contents}
        contents[TOKENIZER_FILE] = read_bounded(tokenizer)
    if not contents:
        return spec, contents
    return _with_file_specs(spec, contents), contents


def _with_file_specs(spec: RunSpec, contents: Mapping[str, bytes]) -> RunSpec:
    values = spec.model_dump()
    values["files"] = {**values["files"], **file_values(contents)}
    if WEIGHTS_FILE in contents:
        values["model"]["weights"] = hashlib.sha256(contents[WEIGHTS_FILE]).hexdigest()
    return spec.with_values(values)


def _with_lora(spec: RunSpec) -> RunSpec:
    """With all that `[lora]` leaves open. Raises `SpecError`, as for layers that are not there."""
    lora = spec.lora
    if lora is None:
        return spec
    if lora.source and spec.model.continues:
        raise SpecError(
            "[lora] from and [model] continues both say what adapters begin from; remove one"
        )
    if lora.source:
        lora = read_adapter(Path(lora.source).expanduser(), lora, spec.model.base)
    kind = str(spec.model.config.get("model_type", spec.model.kind))
    values: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha}
    whole = model_plan(spec.model_copy(update={"lora": None}))
    usual = () if lora.target_modules else present(whole, family_targets(kind))
    values["target_modules"] = target_names(whole, lora.target_modules or usual)
    return spec.model_copy(update={"lora": lora.model_copy(update=values)})


def _weights(
    spec: RunSpec,
    layout: InitialLayout,
    folder: Path | None,
    adapter: str,
    ended: EndedWeights | None,
) -> tuple[str, bytes]:
    """The dtype of a folder's weights and the list of the initial shards' hashes; empty where there
    are no weights. `adapter`: the folder of an adapter, or empty."""
    from swarmnet.training.models.source_weights import shard_hash

    is_needed = ended is None or spec.lora is not None
    if folder is not None and is_needed and not has_weights(folder):
        if spec.lora is not None:
            raise SpecError(
                f"[lora] trains adapters beside a model's weights, and {folder} has none; there is "
                "nothing to adapt in random ones"
            )
        return "", b""
    of_adapter = Path(adapter).expanduser() if adapter else None
    sources = InitialSources(spec, layout, folder, of_adapter, ended)
    hashes = []
    for stage, num_shards in enumerate(layout.num_shards):
        for shard in range(num_shards):
            values = sources.read(stage, shard)
            assert values is not None
            hashes.append(shard_hash(values))
    return "" if sources.model is None else sources.model.dtype, b"".join(hashes)
