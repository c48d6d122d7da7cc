"""What only the data of a run tell, found by whoever starts it: the length of its samples, the
number of rounds, and the fingerprints."""

from __future__ import annotations

import logging
import math

from swarmnet.errors import DataError
from swarmnet.plurals import counted
from swarmnet.ports import Data
from swarmnet.protocol.codecs import AUTO
from swarmnet.spec import RunSpec
from swarmnet.training.data.held_out import MOST_TIMES, is_less_than_sample
from swarmnet.training.data.opening import (
    Place,
    encoder_of,
    held_out_fraction,
    open_data,
    open_store,
    placed,
)
from swarmnet.training.data.text_data import TextData

log = logging.getLogger("swarmnet.data")

WHOLE = 8
"""The length that is found is a multiple of this."""


def with_length(spec: RunSpec, place: Place) -> RunSpec:
    """The spec with a number for `[data] sequence_length = "auto"`: as many tokens as 95 % of the
    dialogues need, of the source whose dialogues are longest; where no source has dialogues, as
    many as without a word. The spec's model is known. Raises `DataError`."""
    if spec.data.sequence_length != AUTO:
        return spec
    if spec.model.kind == "custom":
        raise DataError(
            f'[data] sequence_length = "{AUTO}" is for language models; write a number of tokens'
        )
    longest = spec.longest_context
    encoder = encoder_of(spec, place)
    sources = placed(spec.data, place.paths)
    stores = [open_store(s, encoder, longest) for s in sources if s.messages_field]
    wanted = [-(-store.about.lengths[1] // WHOLE) * WHOLE for store in stores]
    if len(stores) < len(sources):
        wanted.append(spec.sequence_length)
    length = min(max(wanted), longest)
    log.warning('[data] sequence_length = "%s": samples of %s tokens', AUTO, f"{length:,}")
    return spec.with_sequence_length(length)


def with_data(spec: RunSpec, place: Place) -> RunSpec:
    """The spec with its rounds and the fingerprints of the data. The spec's model is known.

    Raises:
        DataError: the data cannot be read, or have no end where epochs are to be counted.
        SpecError: there are too many rounds, or too few for the warm-up.
    """
    spec, data = open_to_start(spec, place)
    rounds = num_rounds(spec, data) if spec.data.epochs else spec.optimizer.rounds
    if not isinstance(data, TextData):
        return spec.with_data(rounds=rounds, fingerprint="")
    return spec.with_data(
        rounds=rounds, fingerprint=data.fingerprint, held_out=data.held_out_fingerprint
    )


def open_to_start(spec: RunSpec, place: Place) -> tuple[RunSpec, Data]:
    """The data of a run that starts, and its spec with what is held out of few data. Says where
    that is not what was asked for. Raises as `with_data`."""
    fraction = held_out_fraction(spec.data)
    of_few = spec.with_held_out_documents() if fraction else spec
    data = open_data(of_few, place)  # what there is enough of is divided alike
    if not isinstance(data, TextData) or not fraction:
        return spec, data
    trained, length = data.sources[: data.num_trained], data.sequence_length
    if any(is_less_than_sample(source.store, fraction, length) for source in trained):
        spec = of_few
    held_out, total = data.num_held_out_tokens, sum(s.about.num_tokens for s in trained)
    if not held_out:
        log.warning(
            "[data] nothing is held out, and no held-out loss is measured: there is one document, "
            "or all are equal; name other files with held_out_paths"
        )
    elif held_out > MOST_TIMES * fraction * total:
        log.warning(
            "[data] held_out_fraction = %g: %d of %s (%.0f %%) are held out and not "
            "learned, for it is a document at least; held_out_fraction = 0 learns all of them",
            fraction,
            held_out,
            counted(total, "token"),
            100 * held_out / total,
        )
    return spec, data


def num_rounds(spec: RunSpec, data: Data) -> int:
    """Rounds that hold `[data] epochs`; the last one may go into the next epoch. Raises
    `DataError`."""
    if isinstance(data, TextData):
        num_samples = data.samples_of(spec.data.epochs, spec.data.epoch_source)
    elif data.num_samples is None:
        raise DataError("[data] epochs: the model's data have no end; write [optimizer] rounds")
    else:
        num_samples = math.ceil(spec.data.epochs * data.num_samples)
    return max(spec.pipeline.rounds_of(num_samples), 1)


def is_same(spec: RunSpec, data: Data) -> bool:
    """Whether this machine reads what the run trains on, as far as that is known."""
    if not spec.data.fingerprint or not isinstance(data, TextData):
        return True
    return data.fingerprint == spec.data.fingerprint


def measures_the_same(spec: RunSpec, data: Data) -> bool:
    """Whether what this machine would measure on is the run's, as far as that is known; also where
    it has nothing to measure on."""
    known = spec.data.held_out_fingerprint
    if not known or not isinstance(data, TextData):
        return True
    return data.held_out_fingerprint in ("", known)
