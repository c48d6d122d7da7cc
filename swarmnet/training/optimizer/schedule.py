"""The learning rate as a function of the round."""

from __future__ import annotations

import math

from swarmnet.spec import OptimizerSpec


def learning_rate(spec: OptimizerSpec, round_index: int) -> float:
    """Linear warm-up over `warmup_rounds` (the first round already moves), then half a cosine
    (Loshchilov and Hutter, 2017) down to `min_learning_rate_ratio` at the last round, and that
    from there on. Pure: every peer finds the same rate."""
    if round_index < spec.warmup_rounds:
        return spec.learning_rate * (round_index + 1) / spec.warmup_rounds
    span = max(spec.rounds - 1 - spec.warmup_rounds, 1)
    progress = min((round_index - spec.warmup_rounds) / span, 1.0)
    low = spec.min_learning_rate_ratio
    return spec.learning_rate * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress)))
