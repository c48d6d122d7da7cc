"""The weight of each contribution to a gradient, by its tokens and by its norm.

A contribution is a sum over the tokens that its sender claims. Both may be false. These decisions
need only the norms and the claims of the contributors, never their gradients. Rules that need the
gradients (trimmed mean, CenteredClip) are in `training.optimizer.aggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low

MEAN, MEDIAN_CLIP, TRIMMED_MEAN, CENTERED_CLIP = (
    "mean",
    "median_clip",
    "trimmed_mean",
    "centered_clip",
)
RULES = (MEAN, MEDIAN_CLIP, TRIMMED_MEAN, CENTERED_CLIP)
MIN_CONTRIBUTORS = 4
"""With fewer contributors no majority can tell which one is wrong: every rule is the mean."""
CLIP_TOLERANCE = 2.0
"""A contribution is not changed up to this multiple of its fair norm."""
TOKEN_SLACK = 1.25
"""The claims of all contributors may add up to this multiple of the tokens that the feeders
counted: tokens that a feeder counted just before it died may be missing from its last record."""


LARGEST_PER_TOKEN = 1e15
"""Norm of a contribution to a shard, per token. Parameters are never larger either."""


def is_sound(squares: float, num_tokens: int) -> bool:
    """Whether a contribution with this sum of squares may count: False where it is not finite, or
    so large that no stage would accept the result."""
    return math.isfinite(squares) and math.sqrt(squares) <= LARGEST_PER_TOKEN * num_tokens


def whole_count(tokens: int, num_counted: int, num_slots: int) -> int:
    """The tokens of a round, of which the feeders have counted `tokens` in `num_counted` of its
    microbatches, as far as is known here; 0 where nothing is. A round ends at a replica as soon as
    it has at another one, and the word of a feeder may be on its way yet: the others counted as
    much a microbatch, as a rule. By what has come alone, honest claims would be cut."""
    if not num_counted:
        return 0
    return math.ceil(tokens * max(num_slots, num_counted) / num_counted)


def room_for(counted: int) -> int:
    """The most tokens that all contributors may claim, where the feeders have counted so many."""
    return math.floor(counted * TOKEN_SLACK)


def fair_tokens(claims: Mapping[str, int], counted: int) -> dict[str, int]:
    """The token counts to believe.

    Claims whose sum is within `TOKEN_SLACK` of the feeders' count are accepted, so nothing changes
    among honest peers. Beyond that a claim is false, and the largest claims are cut down to one
    level at which the sum fits. `counted` = 0: unknown, all claims are accepted.
    """
    room = room_for(counted)
    if counted <= 0 or sum(claims.values()) <= room:
        return dict(claims)
    left = room
    level = 0
    ascending = sorted(claims.values())
    for i, claim in enumerate(ascending):
        level = left // (len(ascending) - i)
        if claim > level:
            break
        left -= claim
    return {p: min(claim, max(level, 1)) for p, claim in claims.items()}


def clip_factors(squares: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """The factor for each contributor's sum: 1, or less where its norm is too large.

    `squares`: sum of squares of the whole contribution (all shards that are known), `tokens` behind
    it. The gradient *per token* of honest contributors has a similar norm where the signal
    prevails, and a norm that shrinks as 1/sqrt(tokens) where the noise does. The fair norm of a
    contributor is the larger of the two medians, so that one with few tokens is not taken for an
    attacker. The lower median makes sure that half of the contributors cannot raise it.

    Up to `CLIP_TOLERANCE` times its fair norm a contribution is not changed. Beyond, at k times the
    fair norm, it is cut to the fair norm, and its tokens count 1/k. So the largest count least. (If
    it were only cut to the fair norm, noise would still hide the smallest gradients, and AdamW
    makes as large steps on those as on others.) The weighted sum is divided by all tokens, also
    those that do not count in full. That would shorten the step, which matters for an outer step in
    mode `local`; so all factors are enlarged in proportion. Where none is cut, or with fewer than
    `MIN_CONTRIBUTORS`, all factors are 1.
    """
    if len(squares) < MIN_CONTRIBUTORS:
        return dict.fromkeys(squares, 1.0)
    norms = {p: math.sqrt(s) / tokens[p] for p, s in squares.items()}
    signal = median_low(norms.values())
    noise = median_low(n * math.sqrt(tokens[p]) for p, n in norms.items())
    weights = {}
    for p, norm in norms.items():
        fair = max(signal, noise / math.sqrt(tokens[p]))
        weights[p] = 1.0 if norm <= CLIP_TOLERANCE * fair else fair / norm
    if min(weights.values()) == 1.0:
        return weights
    fullness = sum(weights[p] * tokens[p] for p in weights) / sum(tokens[p] for p in weights)
    return {
        p: weight**2 / fullness if weight < 1.0 else 1 / fullness for p, weight in weights.items()
    }


def is_alike(own_squares: float, own_tokens: int, squares: float, tokens: int) -> bool:
    """Whether another gradient may be added to the own one without making it look like an attack.
    Both are sums over tokens; the rule is that of `clip_factors`, for two contributors. False where
    it is not finite; True where there is no own gradient, as the primary judges then."""
    if not math.isfinite(squares) or tokens <= 0:
        return False
    if own_tokens <= 0:
        return True
    own_norm, norm = math.sqrt(own_squares) / own_tokens, math.sqrt(squares) / tokens
    fair = max(own_norm, own_norm * math.sqrt(own_tokens / tokens))
    return norm <= CLIP_TOLERANCE * fair
