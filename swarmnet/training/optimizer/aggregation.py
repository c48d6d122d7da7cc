"""Aggregates of gradients of which some may be false.

Every function takes the contributions to one shard (fp32 vectors, each a sum over `tokens[i]`
tokens) in an order that all primaries agree on, and gives the *sum* over all those tokens that the
mean rule would have given had everybody been honest: the rule works on gradients per token, its
result is multiplied by the number of tokens. So what comes after (clipping over all stages, the
step) is the same for every rule.

None keeps state from round to round: a backup that takes over in the middle of an update gets the
same result, bit for bit. All work in pieces of `PIECE` elements, so that little memory is needed
beside the contributions.

- Trimmed mean by coordinate: Yin et al., 2018 (arXiv 1803.01498).
- CenteredClip: Karimireddy et al., 2021 (arXiv 2012.10333), from the median by coordinate, its
  radius half the median of the distances. On a shard for itself, as in Gorbunov et al., 2021
  (arXiv 2106.11257).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarmnet.training.cores import Work, over

TRIM_FRACTION = 0.25
"""Of the contributions, that are dropped at each end of a coordinate (at least one)."""
CLIP_ITERATIONS = 3
RADIUS = 0.5
"""Of CenteredClip, over the median distance: what is far away moves the center by so much at most,
and beginning at the median the center needs no more."""
"""Of CenteredClip."""
PIECE = 1 << 16
"""Elements that are worked on at a time."""


def scaled_sum(contributions: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Sum of `factors[i] * contributions[i]`, in the order given; with all factors 1 the plain sum,
    bit for bit."""
    total = torch.zeros_like(contributions[0])
    for i, (values, factor) in enumerate(zip(contributions, factors, strict=True)):
        if i == 0:
            torch.mul(values, factor, out=total)
        else:
            total.add_(values, alpha=factor)
    return total


def trimmed_mean(contributions: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
    """By coordinate: the `trimmed(n)` largest and smallest gradients per token are dropped, the
    others averaged by their tokens. Bears up to `trimmed(n)` false contributors."""
    drop = trimmed(len(contributions))
    weights = torch.tensor(tokens, dtype=torch.float32)
    out = torch.empty_like(contributions[0])

    def work(part: slice) -> None:
        ordered, places = _per_token(contributions, tokens, part).sort(dim=0, stable=True)
        kept = slice(drop, len(contributions) - drop)
        kept_weights = weights[places[kept]]
        out[part] = (ordered[kept] * kept_weights).sum(dim=0) / kept_weights.sum(dim=0)

    _over(out, work)
    return out.mul_(float(sum(tokens)))


def trimmed(num_contributions: int) -> int:
    """How many are dropped at each end; at least one is left."""
    wanted = max(1, math.floor(TRIM_FRACTION * num_contributions))
    return min(wanted, (num_contributions - 1) // 2)


def centered_clip(
    contributions: Sequence[Tensor], tokens: Sequence[int], iterations: int = CLIP_ITERATIONS
) -> Tensor:
    """CenteredClip: v becomes v + mean of (g - v) * min(1, radius / |g - v|), a few times.

    v begins as the median by coordinate. Noise in a gradient per token falls as 1/sqrt(tokens), so
    each contributor's radius is half the median of |g - v| sqrt(tokens), over the root of its own
    tokens. The mean is weighted by tokens.
    """
    center = _median(contributions, tokens)
    total = float(sum(tokens))
    for _ in range(iterations):
        distances = [
            _distance(g, n, center) * math.sqrt(n)
            for g, n in zip(contributions, tokens, strict=True)
        ]
        radius = RADIUS * sorted(distances)[(len(distances) - 1) // 2]
        scales = [
            n / total * (1.0 if d <= radius else radius / d)
            for n, d in zip(tokens, distances, strict=True)
        ]
        weights = torch.tensor(scales).unsqueeze(1)

        def work(part: slice, weights: Tensor = weights) -> None:
            differences = _per_token(contributions, tokens, part) - center[part]
            center[part] += (weights * differences).sum(dim=0)

        _over(center, work)
    return center.mul_(total)


def _median(contributions: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
    """By coordinate, of the gradients per token; the mean of the middle two at even numbers."""
    out = torch.empty_like(contributions[0])
    low, high = (len(contributions) - 1) // 2, len(contributions) // 2

    def work(part: slice) -> None:
        ordered = _per_token(contributions, tokens, part).sort(dim=0).values
        out[part] = (ordered[low] + ordered[high]) / 2

    _over(out, work)
    return out


def _distance(contribution: Tensor, num_tokens: int, center: Tensor) -> float:
    squares = 0.0
    for part in _pieces(center.numel()):
        difference = contribution[part] / num_tokens - center[part]
        squares += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
    return math.sqrt(squares)


def _per_token(contributions: Sequence[Tensor], tokens: Sequence[int], part: slice) -> Tensor:
    """(contributors, elements of the piece)."""
    return torch.stack([g[part] / n for g, n in zip(contributions, tokens, strict=True)])


def _over(vector: Tensor, work: Work) -> None:
    """Has all of it worked on, piece by piece, by helpers too (`cores`)."""

    def whole(part: slice) -> None:
        for piece in _pieces(part.stop - part.start):
            work(slice(part.start + piece.start, part.start + piece.stop))

    over(vector, whole)


def _pieces(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, PIECE):
        yield slice(start, min(start + PIECE, num_elements))
