"""Who feeds which slots of a round, who owns a shard, and when a round is over, by the words of
`docs/protocol.md`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import permutations
from typing import Any

Record = Mapping[str, Any]


def slots_of(found: Mapping[str, Any]) -> set[int]:
    """Of a set of slots as it travels."""
    first, bits = found["first"], found["bits"]
    assert (bits[:1] != b"\0" and bits[-1:] != b"\0") if bits else first == 0, "not the shortest"
    return {8 * (first + i) + k for i, byte in enumerate(bits) for k in range(8) if byte >> k & 1}


def feeders(live: Sequence[Record]) -> list[str]:
    """Among the live peers."""
    able = [r for r in live if r.get("state") == "active" and r.get("has_data", False)]
    first = sorted(r["peer_id"] for r in able if r["stage"] == 0)
    return first or sorted(r["peer_id"] for r in able)[:1]


def share(rank: int, num_feeders: int, num_slots: int) -> range:
    """The slots of the feeder of a rank."""
    size, rest = divmod(num_slots, num_feeders)
    start = rank * size + min(rank, rest)
    return range(start, start + size + (1 if rank < rest else 0))


def draw(name: str) -> float:
    x = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 12
    return (x + 0.5) / 2**52


def orders(
    stage: int, num_shards: int, weights: Mapping[str, float], replication: int
) -> list[list[str]]:
    """The order of each shard of a stage."""
    found = []
    for j in range(num_shards):
        scores = {p: -w / math.log(draw(f"{stage}|{j}|{p}")) for p, w in weights.items()}
        found.append(sorted(weights, key=lambda p: (-scores[p], p)))
    groups: dict[tuple[str, ...], list[int]] = {}
    for j, order in enumerate(found):
        groups.setdefault(tuple(sorted(order[:replication])), []).append(j)
    for owners, shards in groups.items():
        if len(owners) < 2:
            continue
        parts = first_parts(owners, weights)
        start = draw("|".join((str(stage), *owners)))
        for k, j in enumerate(shards):
            place = (start + k / len(shards)) % 1.0 * sum(parts)
            first = owners[-1]
            for owner, end in zip(owners, ends(parts), strict=True):
                if place < end:
                    first = owner
                    break
            found[j] = [first, *(p for p in found[j] if p != first)]
    return found


def ends(parts: Sequence[float]) -> list[float]:
    return [sum(parts[: i + 1]) for i in range(len(parts))]


def first_parts(owners: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """How often each of the owners would come first."""
    if len(owners) > 5:
        return [weights[p] for p in owners]
    parts = dict.fromkeys(owners, 0.0)
    for drawn in permutations(owners):
        part, left = 1.0, sum(weights.values())
        for p in drawn:
            part *= weights[p] / max(left, weights[p])
            left -= weights[p]
        parts[drawn[0]] += part
    return [parts[p] for p in owners]


def is_due(j: int, r: int, *, rounds: int, warmup: int, local_steps: int, fragments: int) -> bool:
    """In the modes `local` and `gossip`: whether shard j is exchanged after round r."""
    if r < warmup or r >= rounds - 1:
        return True
    offset = j % fragments * local_steps // fragments
    return (r + 1 + offset) % local_steps == 0
