"""Ranks or seats, where a machine has several cards and nobody says: by a measured copy of two.

Ranks of one stage wait for each other four times a layer, so they take a fast link. Seats tell each
other codes of activations once a stage.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, replace

from swarmnet.plurals import counted
from swarmnet.runtime.computing import DEVICE, DISK, HOST
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import most_ranks
from swarmnet.runtime.text import size
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

PROGRAM = "swarmnet.runtime.apart.card_program"
PATIENCE_S = 120.0
"""For the measurement: an interpreter and a card start, which takes seconds."""
ALL_REDUCES = 4
"""Of a layer, in both passes (Megatron-LM)."""
PASSES = 3
"""Forward passes that both passes of a layer take the time of."""
SEAT_AT_WORK = 0.8
"""Part of its time in which a seat has work: the stages of a run are not all as fast."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Two cards."""

    copied_per_s: float
    """Bytes from one to the other."""
    flops_per_s: float
    """Of one, in products of matrices in the precision of passes."""
    number_bytes: int
    """Of a number in that precision."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer, with a microbatch."""

    flops: float
    """Of its forward pass."""
    numbers: float
    """Of what it gives."""


def told_part(layer: Layer, num_ranks: int, measured: Measured) -> float:
    """Of a layer's time, what ranks take to tell each other: all-reduces in a ring."""
    computes_s = PASSES * layer.flops / (num_ranks * measured.flops_per_s)
    bytes_each = 2 * (num_ranks - 1) / num_ranks * layer.numbers * measured.number_bytes
    tells_s = ALL_REDUCES * bytes_each / measured.copied_per_s
    return tells_s / (tells_s + computes_s)


def seats_instead(num_cards: int, num_stages: int, num_ranks: int, told: float) -> int:
    """Seats of one card each that do more than so many ranks of one stage; 0 where none do.
    `told`: as `told_part` gives it."""
    num_seats = min(num_cards, num_stages)
    does_more = num_seats * SEAT_AT_WORK > num_ranks * (1.0 - told)
    return num_seats if does_more and num_seats > 1 else 0


def settle(spec: RunSpec, options: PeerOptions) -> PeerOptions:
    """The options, with seats where neither ranks nor stages are named and seats do more; says why
    in a line. Blocks for seconds where a machine has several cards. Raises `UserError` where this
    machine's person must name the model's code, or as `most_ranks`."""
    import swarmnet.training.accelerators as accelerators

    if _is_named(options) or accelerators.kind() != accelerators.CUDA:
        return options
    num_cards = 0 if options.device == accelerators.CPU else accelerators.num_devices()
    if min(num_cards, spec.pipeline.num_stages) < 2:
        return options
    spec = spec.with_builder(options.model_builder(spec))
    num_ranks = most_ranks(spec, options, num_cards)
    told, why = 0.0, "this model is not cut over ranks"
    if num_ranks > 1:
        told, why = _measured_part(spec, options, num_ranks)
    num_seats = seats_instead(num_cards, spec.pipeline.num_stages, num_ranks, told)
    taken = (
        f"{counted(num_seats, 'stage')}, each on its own"
        if num_seats
        else f"{counted(num_ranks, 'rank')} of a stage"
    )
    other = f"--tp {num_ranks} takes ranks" if num_seats else "--stages N takes stages"
    log.warning("%d GPUs: %s: %s; %s", num_cards, why, taken, other)
    return replace(options, stages=str(num_seats)) if num_seats else options


def _is_named(options: PeerOptions) -> bool:
    """Something is asked for that ranks, or seats, alone can do."""
    return (
        options.num_ranks is not None
        or options.local != "tensor"
        or options.sequence_parallel
        or options.stages != ""
        or options.stage is not None
        or options.optimizer_memory == DEVICE
        or options.weights_memory in (HOST, DISK)
    )


def _measured_part(spec: RunSpec, options: PeerOptions, num_ranks: int) -> tuple[float, str]:
    """As `told_part`, and in words. 0 where nothing was measured: ranks are what was before."""
    from swarmnet.training.models.registry import model_plan

    wanted = spec.pipeline.precision if options.precision == "auto" else options.precision
    try:
        found = measure("cuda:0", "cuda:1", wanted)
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        return 0.0, f"the copy between them was not measured ({type(error).__name__})"
    block = next((x for x in model_plan(spec).layers if x.is_block and x.cost > 0), None)
    if block is None:
        return 0.0, "the work of a layer is not known"
    numbers = float(spec.pipeline.microbatch)
    for length in block.output_shape:
        numbers *= length
    layer = Layer(block.cost * spec.pipeline.microbatch, numbers)
    told = told_part(layer, num_ranks, found)
    rate = size(found.copied_per_s)
    return (
        told,
        f"{rate} a second between two, for which {counted(num_ranks, 'rank')} wait {told:.0%}",
    )


def measure(first: str, second: str, precision: str) -> Measured:
    """Of two devices, in a process of its own: this one asks no card anything. Raises `OSError`,
    `SubprocessError`, `ValueError` or `TypeError` where nothing is found."""
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, first, second, precision],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found = Measured(**json.loads(done.stdout))
    if not min(found.copied_per_s, found.flops_per_s) > 0:
        raise ValueError("a rate that is none")
    return found
