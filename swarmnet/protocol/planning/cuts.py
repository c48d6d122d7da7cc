"""The assignment of layers to stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts layers into contiguous, non-empty stages so that the most expensive stage is as
    cheap as possible; among such cuts, the most even one (least sum of squares).

    Dynamic programming in O(stages x layers^2). Raises `ValueError` where there are fewer layers
    than stages."""
    num_layers = len(costs)
    if num_stages < 1 or num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    if any(not 0 <= c < float("inf") for c in costs):
        raise ValueError("the cost of a layer must be finite and not negative")
    sums = list(accumulate(costs, initial=0.0))

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first]

    bottleneck = [cost(0, end) for end in range(num_layers + 1)]
    for k in range(2, num_stages + 1):
        bottleneck = [float("inf")] * k + [
            min(max(bottleneck[cut], cost(cut, end)) for cut in range(k - 1, end))
            for end in range(k, num_layers + 1)
        ]
    limit = bottleneck[num_layers] * (1 + 1e-9)
    return _most_even(sums, num_stages, limit)


def _most_even(sums: list[float], num_stages: int, limit: float) -> list[range]:
    """The cut with the least sum of squares among those with no stage above `limit`."""
    num_layers = len(sums) - 1
    infinity = float("inf")
    best: list[list[tuple[float, int]]] = [[(infinity, 0)] * (num_layers + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, num_stages + 1):
        row = [(infinity, 0)] * (num_layers + 1)
        for end in range(k, num_layers + 1):
            row[end] = min(
                (best[k - 1][cut][0] + (sums[end] - sums[cut]) ** 2, cut)
                if sums[end] - sums[cut] <= limit
                else (infinity, cut)
                for cut in range(k - 1, end)
            )
        best.append(row)
    stages, end = [], num_layers
    for k in range(num_stages, 0, -1):
        cut = best[k][end][1]
        stages.append(range(cut, end))
        end = cut
    return stages[::-1]
