"""The data of a run: read, tokenized or found tokenized, divided and packed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.errors import DataError
from swarmnet.plurals import counted
from swarmnet.protocol.pipeline.mixing import Mixture
from swarmnet.spec import HELD_OUT_NAME, DataSpec, RunSpec, SourceSpec
from swarmnet.training.custom_data import CustomData
from swarmnet.training.data.cache import cached, key_of, ordered
from swarmnet.training.data.encoding import (
    Encoder,
    FileEncoder,
    check_vocabulary,
    open_encoder,
    tokenizer_files,
)
from swarmnet.training.data.files import find_files
from swarmnet.training.data.formats import format_of, included, reader_of
from swarmnet.training.data.held_out import divide
from swarmnet.training.data.order import seed_of
from swarmnet.training.data.packing import DialogueSamples, Documents, Samples, TextSamples
from swarmnet.training.data.store import Store, StoreWriter
from swarmnet.training.data.text_data import SourceData, TextData
from swarmnet.training.data.tokenizing import Tokenizing
from swarmnet.training.models.registry import model_plan
from swarmnet.training.tokenizer_files import TOKENIZER_FILE

if TYPE_CHECKING:
    from swarmnet.ports import Data

log = logging.getLogger("swarmnet.data")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a machine has the data of a run, as far as that is not where the run says."""

    paths: tuple[str, ...] = ()
    """In place of the source's; of several sources, and of held-out data, as NAME=PATH."""
    tokenizer: str = ""
    """A tokenizer.json, or `bytes`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run, by name."""
    reads_held_out: bool = True
    """The spec's `held_out_paths` may be read: a spec from the network never chooses files."""


def open_data(spec: RunSpec, place: Place = Place()) -> Data:
    """The microbatches of a run.

    Raises:
        DataError: the data cannot be read, are too few, or do not fit the vocabulary.
        SpecError: a custom model cannot be loaded.
    """
    plan = model_plan(spec)
    if plan.data is not None:
        return CustomData(plan.data(spec))
    if plan.inputs.dtype != "int32" or len(plan.inputs.shape) != 1:
        raise DataError("[model] builder: the model does not take text, so its plan must give data")
    return open_text(
        spec, place, sequence_length=plan.inputs.shape[0], vocab_size=plan.inputs.num_values
    )


def open_text(spec: RunSpec, place: Place, *, sequence_length: int, vocab_size: int) -> TextData:
    """Text as samples of `sequence_length` tokens. Raises `DataError`."""
    encoder = encoder_of(spec, place)
    sources = placed(spec.data, place.paths)
    if not sources:
        raise DataError("[data] paths is missing; name text files or folders")
    held_out = held_out_source(spec.data, place, sources[0])
    stores = [
        (source, open_store(source, encoder, sequence_length)) for source in (*sources, *held_out)
    ]
    for _, store in stores:
        for line in store.about.lines:
            log.warning("%s", line)
    return text_of(
        spec, encoder, stores, len(sources), sequence_length=sequence_length, vocab_size=vocab_size
    )


def text_of(
    spec: RunSpec,
    encoder: Encoder,
    stores: Sequence[tuple[SourceSpec, Store]],
    num_trained: int,
    *,
    sequence_length: int,
    vocab_size: int,
) -> TextData:
    """Samples of sources that are tokens already: the first `num_trained` are trained on. Raises
    `DataError`."""
    opened = []
    for k, (source, store) in enumerate(stores):
        check_vocabulary(encoder, store.about.highest, vocab_size)
        division = divide(
            store,
            held_out_fraction(spec.data),
            sequence_length,
            holds_samples=spec.data.held_out_least == "sample",
        )
        seed = seed_of(spec.seed, "documents", k) if k < num_trained else 0
        trained, rest = (
            _samples_of(
                Documents(division, 0 if held_out else seed, held_out=held_out),
                sequence_length,
                encoder.end or 0,
                masks=spec.data.document_mask,
            )
            for held_out in (False, True)
        )
        if k < num_trained:
            most = 0 if store.about.is_dialogues else sequence_length
            if trained.num_samples < 1 or trained.num_tokens <= most:
                raise too_few(source, store, sequence_length)
        else:  # all of it is measured on
            trained, rest = rest, trained
        opened.append(SourceData(source, store, trained, rest))
    return TextData(
        opened,
        Mixture.of([source.weight for source, _ in stores[:num_trained]]),
        encoder,
        seed=spec.seed,
        sequence_length=sequence_length,
        samples_per_microbatch=spec.pipeline.microbatch,
        held_out_microbatches=spec.data.held_out_microbatches,
        document_mask=spec.data.document_mask,
    )


def held_out_fraction(data: DataSpec) -> float:
    """Of each source, that is not trained on."""
    if data.held_out_paths or not data.held_out_microbatches:
        return 0.0
    return data.held_out_fraction


def _samples_of(documents: Documents, length: int, fill: int, *, masks: bool) -> Samples:
    if documents.division.store.about.is_dialogues:
        return DialogueSamples(documents, length, fill)
    return TextSamples(documents, length, fill, masks=masks)


def encoder_of(spec: RunSpec, place: Place) -> Encoder:
    """The run's tokenizer. What this machine names comes before what the run has; what lies beside
    it does not. Raises `DataError`."""
    tokenizer, files = place.tokenizer or spec.data.tokenizer, dict(place.files)
    if place.tokenizer or TOKENIZER_FILE not in files:
        beside = tokenizer_files(tokenizer)
        files = {**beside, **files}
        if TOKENIZER_FILE in beside:
            files[TOKENIZER_FILE] = beside[TOKENIZER_FILE]
    return open_encoder(tokenizer, files, spec.model.config.get("eos_token_id"))


def placed(data: DataSpec, paths: Sequence[str]) -> tuple[SourceSpec, ...]:
    """The run's sources, where this machine has them. Raises `DataError`."""
    sources = data.sources
    if not sources and paths:  # of a custom model
        return (SourceSpec(name="data", paths=tuple(paths)),)
    if not paths:
        return sources
    own = _by_source(data, paths)
    if not own.keys() - {HELD_OUT_NAME} and not data.source:
        raise DataError(
            f"--data {paths[0]}: say where the data that are trained on lie, too (--data PATH)"
        )
    if missing := [source.name for source in sources if source.name not in own]:
        raise DataError(
            f"--data: where is {missing[0]}? Say --data {missing[0]}=PATH for each of the run's "
            "sources"
        )
    return tuple(s.model_copy(update={"paths": tuple(own[s.name])}) for s in sources)


def held_out_source(data: DataSpec, place: Place, first: SourceSpec) -> tuple[SourceSpec, ...]:
    """The source of `held_out_paths`, where the run has them and this machine too. Raises
    `DataError` where this machine names some and the run has none."""
    own = _by_source(data, place.paths).get(HELD_OUT_NAME, ())
    if own and not data.held_out_paths:
        raise DataError(
            f"--data {HELD_OUT_NAME}={own[0]}: this run has no held_out_paths, it measures on a "
            "part of its own data; leave it out"
        )
    if not data.held_out_paths or not data.held_out_microbatches:
        return ()
    paths = tuple(own) or (data.held_out_paths if place.reads_held_out else ())
    if not paths:
        log.warning("[data] held-out data were not named (--data held-out=PATH): not measured here")
        return ()
    return (first.model_copy(update={"name": HELD_OUT_NAME, "paths": paths}),)


def open_store(source: SourceSpec, encoder: Encoder, sequence_length: int) -> Store:
    """The tokens of a source, of the cache where they are there. Raises `DataError`."""
    template = ""
    if source.messages_field:
        if not isinstance(encoder, FileEncoder):
            raise DataError(
                '[data] messages_field needs a chat template, and tokenizer = "bytes" has none; '
                "name a tokenizer.json"
            )
        template = encoder.open_template()
    found = ordered(find_files(source.paths, included(source)))
    hashes = [
        "".join((content, *format_of(file.path), reader_of(file.path))) for content, file in found
    ]
    options: tuple[object, ...] = (encoder.identity, source.text_field, source.messages_field)
    if template:
        options += (template, sequence_length)

    def write(folder: Path) -> None:
        end = None if template else encoder.end
        writer = StoreWriter(folder, encoder.dtype, end, bool(template))
        try:
            tokenizing = Tokenizing(source, encoder, writer, sequence_length if template else 0)
            tokenizing.run([file for _, file in found])
        finally:
            writer.close()

    return cached(key_of(hashes, *options), write)


def too_few(source: SourceSpec, store: Store, sequence_length: int) -> DataError:
    """The line for a source without a whole sample."""
    return DataError(
        f"[data] {source.paths[0]} has {counted(store.about.num_tokens, 'token')}, too few for "
        f"sequences of {sequence_length} beside what is held out; add text or shorten [data] "
        "sequence_length"
    )


def _by_source(data: DataSpec, paths: Sequence[str]) -> dict[str, list[str]]:
    """Of `--data`: paths by the name of their source."""
    names = [source.name for source in data.sources] if data.source else []
    own: dict[str, list[str]] = {}
    for path in paths:
        name, equals, rest = path.partition("=")
        if equals and name in (*names, HELD_OUT_NAME):
            own.setdefault(name, []).append(rest)
        elif data.source:
            raise DataError(f"--data {path}: the run has sources {', '.join(names)}; say NAME=PATH")
        else:
            own.setdefault("data", []).append(path)
    return own
