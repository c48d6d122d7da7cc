"""`swarmnet data`: what a model sees of a run's data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console

from peer.console import without_controls
from peer.options import DataOptions
from swarmnet.batch import IGNORED
from swarmnet.errors import DataError
from swarmnet.plurals import counted
from swarmnet.spec import RunSpec, batches_of
from swarmnet.training.data import Place, TextData
from swarmnet.training.data.encoding import Encoder
from swarmnet.training.data.packing import Sample
from swarmnet.training.data.resolving import num_rounds, open_to_start, with_length

OPENS, CLOSES = "⟦", "⟧"
"""Around text that is not learned."""


def show_data(options: DataOptions, console: Console) -> None:
    """Prints what is known of each source. Raises `DataError` or `SpecError`."""
    from swarmnet.runtime.joining.starting import files_of_run

    spec, contents = files_of_run(options.spec, options.tokenizer)
    place = Place(options.data, options.tokenizer, contents)
    spec, data = open_to_start(with_length(spec, place), place)
    if not isinstance(data, TextData):
        raise DataError("[model] builder: the model has data of its own; only text is shown")
    rounds = num_rounds(spec, data) if spec.data.epochs else spec.optimizer.rounds
    if options.as_json:
        values = _values(data, rounds, options.samples)
        values["sequence_length"] = spec.sequence_length
        console.print_json(json.dumps(values), ensure_ascii=True)
        return
    for k, source in enumerate(data.sources):
        about = source.about
        _say(console, f"{source.source.name}: {', '.join(source.source.paths)}")
        num = about.num_documents
        documents = counted(num, "document", ",")
        _say(console, f"  {documents}, {counted(about.num_tokens, 'token', ',')}")
        if about.is_dialogues:
            _say(console, f"  {about.num_learned:,} of them are what the assistant says: learned")
        if about.lengths:
            half, most, longest = (f"{length:,}" for length in about.lengths)
            _say(
                console,
                f"  dialogues: half have at most {counted(half, 'token')}, 95 % at most {most}, "
                f"the longest {longest}; a sample has {spec.sequence_length:,}",
            )
        trained, held_out = source.samples, source.held_out
        _say(
            console,
            f"  trained on: {counted(trained.num_tokens, 'token', ',')}, "
            f"{counted(trained.num_samples, 'sample', ',')}",
        )
        share = 100 * held_out.num_tokens / max(about.num_tokens, 1)
        _say(console, f"  held out: {counted(held_out.num_tokens, 'token', ',')} ({share:.1f} %)")
        if about.left_out:
            _say(console, f"  left out or cut: {_counted(about.left_out)}")
        if k < data.num_trained:
            for n in range(min(options.samples, trained.num_samples)):
                _say(console, f"  sample {n + 1}:")
                _say(console, shown(data, data.source_sample(k, n)))
    _say(console, _length(spec, data, rounds))
    if data.held_out_fingerprint:
        _say(console, f"held-out fingerprint {data.held_out_fingerprint}")
    _say(console, f"fingerprint {data.fingerprint}")


def shown(data: TextData, sample: Sample) -> str:
    """The text of a sample; what is not learned is between `OPENS` and `CLOSES`."""
    tokens, learned, empty = _tokens(data, sample)
    parts = []
    place = 0
    for is_learned, run in groupby(learned):
        before, place = place, place + len(list(run))
        text = _gained(data.encoder, tokens[:place], before)
        parts.append(text if is_learned else f"{OPENS}{text}{CLOSES}")
    return "".join(parts) + (f" ({empty:,} places are empty)" if empty else "")


def _gained(encoder: Encoder, tokens: Sequence[int], before: int) -> str:
    """What the text of some tokens has more than that of the first `before`: a decoder may drop the
    space that a text begins with."""
    start, whole = encoder.decode(tokens[:before]), encoder.decode(tokens)
    return whole[len(start) :] if whole.startswith(start) else encoder.decode(tokens[before:])


def _tokens(data: TextData, sample: Sample) -> tuple[list[int], list[bool], int]:
    """Tokens of a sample, which of them are learned, and how many places after them are empty."""
    targets = sample.targets.tolist()
    tokens = [*sample.inputs.tolist(), targets[-1]]
    learned = [target != IGNORED for target in targets]
    learned = [learned[0], *learned]  # the first token is no target, and nothing else is known
    if not learned[-1]:
        tokens.pop()
        learned.pop()
    fill, size = data.encoder.end or 0, len(tokens)
    while size > 1 and not learned[size - 1] and tokens[size - 1] == tokens[size - 2] == fill:
        size -= 1
    return tokens[:size], learned[:size], len(tokens) - size


def _values(data: TextData, rounds: int, num_samples: int) -> dict[str, Any]:
    """For programs."""
    sources = []
    for k, source in enumerate(data.sources):
        wanted = min(num_samples, source.samples.num_samples) if k < data.num_trained else 0
        values = asdict(source.about)
        values |= {
            "name": source.source.name,
            "samples": source.samples.num_samples,
            "trained_tokens": source.samples.num_tokens,
            "held_out_tokens": source.held_out.num_tokens,
            "shown": [shown(data, data.source_sample(k, n)) for n in range(wanted)],
        }
        sources.append(values)
    return {
        "sources": sources,
        "rounds": rounds,
        "fingerprint": data.fingerprint,
        "held_out_fingerprint": data.held_out_fingerprint,
    }


def _length(spec: RunSpec, data: TextData, rounds: int) -> str:
    pipeline = spec.pipeline
    samples = pipeline.samples_before(rounds)
    epoch = data.samples_of(1.0, spec.data.epoch_source)
    if spec.is_endless:
        in_epoch = (
            pipeline.rounds_of(epoch) if pipeline.batch_ramp else epoch / pipeline.global_batch
        )
        return (
            f"no end: an epoch is {counted(in_epoch, 'round', '.3g')} of "
            f"{counted(batches_of(pipeline), 'sample')}"
        )
    return (
        f"{counted(rounds, 'round', ',')} of {counted(batches_of(pipeline), 'sample')}: "
        f"{counted(samples / epoch, 'epoch', '.3g')}"
    )


def _counted(left_out: dict[str, int]) -> str:
    return ", ".join(
        counted(count, "file", ",") if why == "files" else f"{count:,} {why}"
        for why, count in sorted(left_out.items())
    )


def _say(console: Console, line: str) -> None:
    console.print(without_controls(line), markup=False, highlight=False, soft_wrap=True)
