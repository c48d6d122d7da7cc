"""What a record tells of the routers of a stage with experts, among its totals. Pure.

These are no counts since the start: they are of the last round whose gradients counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

TOLD = "experts_"
BUSIEST, DROPPED = f"{TOLD}busiest", f"{TOLD}dropped"
PARTS = 1000
"""Totals are integers."""


def told_totals(routers: Iterable[tuple[Sequence[float], float]]) -> dict[str, int]:
    """Totals for a record; none of a stage without experts. `routers`: of each layer that has
    experts, the share of each in all choices, and the share of choices for which there was no
    room. Of all layers the worst are told."""
    known = [(shares, dropped) for shares, dropped in routers if shares]
    if not known:
        return {}
    return {
        BUSIEST: max(round(PARTS * len(shares) * max(shares)) for shares, _ in known),
        DROPPED: max(round(PARTS * dropped) for _, dropped in known),
    }


def told_experts(totals: Mapping[str, int]) -> tuple[float, float]:
    """What `told_totals` took in, by the word of the peer: how often the busiest expert of a layer
    was chosen over an even share, and the part of choices without room. Zeros of a stage without
    experts."""
    return totals.get(BUSIEST, 0) / PARTS, min(totals.get(DROPPED, 0), PARTS) / PARTS
