"""The learning rate of each round, by `[optimizer] schedule`. Pure: every peer finds the same.

A run whose length is not known yet has a constant rate. Another run that continues it brings the
rate down (`wsd` with all of its rounds for that, or `cosine`), from whichever of its rounds is
liked best."""

from __future__ import annotations

import math

from swarmnet.spec import OptimizerSpec


def learning_rate(spec: OptimizerSpec, round_index: int) -> float:
    """The rate of the step that ends a round, of a run whose epochs are counted. It grows linearly
    over `warmup_rounds`, and the first round already moves. What comes then reaches
    `min_learning_rate_ratio` in the last round, and stays there; but for a constant rate."""
    if round_index < spec.warmup_rounds:
        return spec.learning_rate * (round_index + 1) / spec.warmup_rounds
    if spec.schedule == "constant":
        return spec.learning_rate
    high = _left_by_wsd if spec.schedule == "wsd" else _left_by_cosine
    low = spec.min_learning_rate_ratio
    return spec.learning_rate * (low + (1.0 - low) * high(spec, round_index))


def _left_by_cosine(spec: OptimizerSpec, round_index: int) -> float:
    """Half a cosine from the warm-up on (Loshchilov and Hutter, 2017): 1 down to 0."""
    span = max(spec.rounds - 1 - spec.warmup_rounds, 1)
    progress = min((round_index - spec.warmup_rounds) / span, 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _left_by_wsd(spec: OptimizerSpec, round_index: int) -> float:
    """1 until the decay, whose first round is lower already, then one less a square root, down to 0
    (Haegele et al., 2024, arXiv 2405.18392)."""
    done = round_index + 1 - (spec.rounds - spec.decay_rounds)
    progress = min(max(done, 0) / spec.decay_rounds, 1.0)
    return 1.0 - math.sqrt(progress)
