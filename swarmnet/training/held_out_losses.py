"""Held-out losses that a peer has heard of, in a file beside its checkpoints: which of them is the
best, and what a model card says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from swarmnet.files import write_whole
from swarmnet.protocol.membership.records import MAX_LOSS

FILE = "held_out.json"
MAX_BYTES = 4 << 20
MAX_KEPT = 100_000


def read_losses(folder: Path) -> dict[int, float]:
    """By round; empty where nothing can be read."""
    try:
        with (folder / FILE).open("rb") as file:
            values = json.loads(file.read(MAX_BYTES))
        losses = {int(r): float(loss) for r, loss in values.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
    # Others hear of them, and take no message with a number that is out of range.
    return {r: x for r, x in losses.items() if 0 <= r < 2**63 and 0 <= x <= MAX_LOSS}


def add_losses(folder: Path, losses: Mapping[int, float]) -> None:
    """Writes what is new. Raises `OSError`."""
    known = read_losses(folder)
    found = {**known, **losses}
    if found == known:
        return
    kept = {r: found[r] for r in sorted(found)[-MAX_KEPT:]}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, json.dumps(kept) + "\n")


def best_round(losses: Mapping[int, float], among: set[int]) -> int | None:
    """The round with the lowest loss among some; the earliest of equals. None where none of them
    was measured. A loss counts as the median of it and of the ones before and after, for each was
    measured by another peer: a single false one makes no round the best that is not about as
    good."""
    rounds = sorted(losses)
    median = {}
    for i, r in enumerate(rounds):
        around = [losses[q] for q in rounds[max(0, i - 1) : i + 2]]
        median[r] = sorted(around)[len(around) // 2]
    measured = sorted(among & losses.keys())
    return min(measured, key=lambda r: (median[r], losses[r])) if measured else None
