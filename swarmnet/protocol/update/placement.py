"""The owners of shards, by weighted rendezvous hashing.

Every peer computes, from names and weights alone, the same ordered list of owners of each
shard. Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); with the
score -weight / ln(h), h uniform in (0, 1), a peer comes first with probability proportional to
its weight, and whether a peer beats another does not depend on a third: a peer that joins or
leaves moves only the shards that it gains or loses.

Which owner of a shard comes first is shared out: between the owners of a group of shards, in the
parts in which the scores would have it in the mean, and not by chance. A group is all shards with
the same owners, so there is much to share out where there are few replicas, and that is where
chance weighs: of four shards of two equal peers, it makes one peer the primary of three or four
more often than not, and that peer's uplink is what all wait for. The optimizer state is at all
owners, so none moves with it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, permutations
from statistics import fmean

from swarmnet.protocol.membership.records import Record

HASH_BITS = 52
"""Bits of the hash that are used: (x + 1/2) / 2^52 is exact in a double and never 0 or 1."""
MAX_RATIO = 16.0
"""Weight of a peer over the mean of all but the largest weight, at most."""
SLOW_BYTES_PER_S = 10e3
"""A slower link counts as this."""
FAST_BYTES_PER_S = 125e6
"""1 Gbit/s. A faster link does not limit an update: a measurement beyond tells how busy the machine
was. All such links count alike."""

SLOW_FLOPS_PER_S = 1e9
"""Slower products of matrices count as this."""


def owners(stage: int, shard_index: int, weights: Mapping[str, float]) -> list[str]:
    """All peers of `weights`, the best owner of the shard first. Weights must be positive."""
    return sorted(weights, key=lambda p: (-_score(stage, shard_index, p, weights[p]), p))


def _score(stage: int, shard_index: int, peer_id: str, weight: float) -> float:
    if not 0 < weight < math.inf:
        raise ValueError(f"the weight of a peer must be positive and finite, not {weight}")
    return -weight / _log_draw(stage, shard_index, peer_id)


KEPT_DRAWS = 1 << 16
"""Peers times shards whose hash is remembered: memberships change by one peer at a time."""


@lru_cache(maxsize=KEPT_DRAWS)
def _log_draw(stage: int, shard_index: int, peer_id: str) -> float:
    return math.log(_draw(f"{stage}|{shard_index}|{peer_id}"))


def _draw(name: str) -> float:
    """Uniform in (0, 1)."""
    x = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> (64 - HASH_BITS)
    return (x + 0.5) / 2**HASH_BITS


MOST_DRAWN = 5
"""Of more owners a shard the weights themselves are taken: there are too many orders of drawing."""
KEPT_PLACEMENTS = 64
"""Memberships whose placement is remembered."""


class Placement:
    """The owners of every shard of one stage under one membership."""

    def __init__(
        self, stage: int, num_shards: int, weights: Mapping[str, float], replication: int
    ) -> None:
        """`replication`: owners a shard (fewer where there are fewer peers)."""
        if replication < 1:
            raise ValueError("a shard needs at least one owner")
        self.stage = stage
        self.num_shards = num_shards
        self.replication = replication
        self.weights = dict(weights)
        self._orders = [tuple(owners(stage, j, self.weights)) for j in range(num_shards)]
        self._share_out()
        self._owned: dict[str, list[int]] = {p: [] for p in self.weights}
        for j in range(num_shards):
            for peer_id in self.owners(j):
                self._owned[peer_id].append(j)

    def _share_out(self) -> None:
        """Who comes first of the owners of each shard: systematic sampling in each group."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for j in range(self.num_shards):
            groups.setdefault(tuple(sorted(self.owners(j))), []).append(j)
        for group, shards in groups.items():
            if len(group) < 2:
                continue
            ends = list(accumulate(self._first_parts(group)))
            start = _draw(f"{self.stage}|{'|'.join(group)}")
            for k, j in enumerate(shards):
                at = (start + k / len(shards)) % 1.0 * ends[-1]
                first = group[min(bisect_right(ends, at), len(group) - 1)]
                rest = (p for p in self._orders[j] if p != first)
                self._orders[j] = (first, *rest)

    def _first_parts(self, group: Sequence[str]) -> list[float]:
        """How often each of these is the best owner of a shard, where they are its owners: by the
        scores, owners are drawn by weight one after the other."""
        if len(group) > MOST_DRAWN:
            return [self.weights[p] for p in group]
        total = sum(self.weights.values())
        parts = dict.fromkeys(group, 0.0)
        for drawn in permutations(group):
            part, left = 1.0, total
            for peer_id in drawn:
                weight = self.weights[peer_id]
                part *= weight / max(left, weight)
                left -= weight
            parts[drawn[0]] += part
        return [parts[p] for p in group]

    def order(self, shard_index: int) -> tuple[str, ...]:
        """All peers: the primary, the other owners, then the others, each after who is a better
        owner."""
        return self._orders[shard_index]

    def owners(self, shard_index: int) -> tuple[str, ...]:
        """The first `replication` of the order, the primary first."""
        return self._orders[shard_index][: self.replication]

    def primary(self, shard_index: int) -> str | None:
        """The first owner; None where there are no peers."""
        order = self._orders[shard_index]
        return order[0] if order else None

    def owned_by(self, peer_id: str) -> list[int]:
        """Shards of which the peer is an owner, ascending."""
        return list(self._owned.get(peer_id, ()))


@lru_cache(maxsize=KEPT_PLACEMENTS)
def placed(
    stage: int, num_shards: int, weights: tuple[tuple[str, float], ...], replication: int
) -> Placement:
    """The placement under a membership. Cached, because every shard of every update needs it."""
    return Placement(stage, num_shards, dict(weights), replication)


def short_of_owners(placement: Placement, records: Iterable[Record], peer_id: str) -> list[int]:
    """Shards, ascending, that a peer should own and does not hold, and that have fewer holders than
    they should have owners: one more death could be that of the last holder. `records`: of the live
    replicas that count as possible owners."""
    known = {r.peer_id: r for r in records}
    own = known.get(peer_id)
    if own is None:
        return []
    wanted = [j for j in placement.owned_by(peer_id) if not own.holds_shard(j)]
    enough = min(placement.replication, len(known))
    return [j for j in wanted if sum(r.holds_shard(j) for r in known.values()) < enough]


def weights_from(records: Iterable[Record], flops_per_byte: float = 0.0) -> dict[str, float]:
    """Weights of replicas: their upload bandwidth (bytes/s), between `SLOW_BYTES_PER_S` and
    `FAST_BYTES_PER_S`, rounded to a power of two so that the noise of measurements does not move
    shards. An unknown bandwidth counts as the geometric mean of the others.

    So the weight of a measured peer depends on its own bandwidth alone, and does not change when
    other peers join or leave. The exception is a peer far above the rest: no weight is above
    `MAX_RATIO` times the mean of all but the largest. So a huge link, or a false claim of one, does
    not make its owner hold everything. That bound moves smoothly with the swarm, and so do the
    shards of a peer at the bound.

    `flops_per_byte`: a primary's products of matrices, for each byte of its results. These take it
    time before it sends the results to all others, so its weight is what it sends in the time of
    both. Where no bandwidth is known, all links count as fast. The weights of replicas of which one
    does not say how fast it multiplies are their bandwidths alone, for that one knows no others."""
    known = list(records)
    rates = {r.peer_id: r.upload_bytes_per_s for r in known}
    exponents = {p: _exponent(rate) for p, rate in rates.items() if rate > 0}
    usual = fmean(exponents.values()) if exponents else 0.0
    weights = {p: 2.0 ** exponents.get(p, usual) for p in rates}
    if len(weights) < 2:
        return weights
    if flops_per_byte and all(r.product_flops_per_s for r in known):
        if not exponents:
            weights = dict.fromkeys(rates, 2.0 ** _exponent(FAST_BYTES_PER_S))
        sent = 2.0 ** round(math.log2(len(known) - 1))
        for r in known:
            speed = 2.0 ** round(math.log2(max(r.product_flops_per_s, SLOW_FLOPS_PER_S)))
            weights[r.peer_id] = 1 / (1 / weights[r.peer_id] + flops_per_byte / (sent * speed))
    others = sorted(weights.values())[:-1]
    bound = MAX_RATIO * sum(others) / len(others)
    return {p: min(w, bound) for p, w in weights.items()}


def _exponent(bytes_per_s: float) -> int:
    within = min(max(bytes_per_s, SLOW_BYTES_PER_S), FAST_BYTES_PER_S)
    return round(math.log2(within))
