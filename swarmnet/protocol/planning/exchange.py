"""Bytes that the replicas of a stage send each other in a round, by mode and codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TypeAlias

from swarmnet.protocol.codecs import (
    CHUNK,
    INT4,
    INT8,
    NONE,
    UpdateCodec,
    leaves_out,
    row_bytes,
    update_codec,
)
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL

AUTO_SHARDS = 64
"""Of the largest stage, about, where the spec leaves their size open: enough to spread over dozens
of replicas, few enough that a digest of each fits into a record."""
MIN_SHARD_PARAMETERS = 16_384
"""Of a shard whose size the spec leaves open."""
OFFERED_VECTORS = 4
"""In mode `gossip`, from each partner to the other: parameters, their change, two moments; of what
Muon steps one moment less."""
MAX_MESSAGE_BYTES = 1 << 30
"""That the arrays of one message have at most; as the transport's."""
MAX_SHARD_PARAMETERS = MAX_MESSAGE_BYTES // (4 * OFFERED_VECTORS)
"""Of a shard whose size the spec leaves open: whatever the mode, one message holds all of it."""


def auto_shard_parameters(num_parameters: int) -> int:
    """Of a shard, where the largest stage has so many."""
    wanted = max(MIN_SHARD_PARAMETERS, -(-num_parameters // AUTO_SHARDS))
    return min(wanted, MAX_SHARD_PARAMETERS)


def largest_message_bytes(num_parameters: int, num_moments: int, mode: str, codec: str) -> int:
    """Of what a shard of so many parameters is sent in. No message about it is larger than that
    with its state: the moments of `[optimizer]` in fp32, and in the first one of a run that goes on
    with those of another their number of steps. Where exchanges may be delayed, or results are
    coded, an owner's has by how much parameters are ahead, too; in mode `local` beside the one
    outer moment. In mode `gossip` an offer has the parameters and their change beside moments."""
    names, each = codec_in(mode, codec), row_bytes(NONE, num_parameters)
    moments = num_moments * each + row_bytes(NONE, 1)
    if mode == GOSSIP:
        return max(moments, (2 + num_moments) * row_bytes(names.sums, num_parameters))
    if mode == LOCAL:
        return max(moments, (1 + (names.results != NONE)) * each)
    is_ahead = mode in (DELAYED, AUTO) or names.results != NONE
    return max(moments, (num_moments + is_ahead) * each)


def number_bytes(codec: str) -> float:
    """Of a number in a long row."""
    return row_bytes(codec, CHUNK) / CHUNK


def codec_in(mode: str, codec: str) -> UpdateCodec:
    """What `[sync] codec` would be in another mode than the run's."""
    if mode == GOSSIP and update_codec(codec).sums != NONE:
        return update_codec(INT8)
    return update_codec(INT4 if leaves_out(codec) and mode != LOCAL else codec)


def contributed_bytes(
    num_parameters: int, mode: str, local_steps: int, codec: str, part: float
) -> float:
    """Of what `exchanged_bytes` says that a replica sends in a round, its contribution."""
    every = local_steps if mode == LOCAL else 1
    return num_parameters * number_bytes(codec_in(mode, codec).contributions) * (1 - part) / every


def exchanged_bytes(
    num_parameters: int,
    num_replicas: int,
    replication: int,
    mode: str,
    local_steps: int,
    codec: str = NONE,
    part: float | None = None,
    num_muon: int = 0,
) -> tuple[float, float]:
    """What a replica sends to others of its stage in a round, and what comes to it.

    It sends to each of N primaries its part of the gradient (g bytes a parameter, by the codec),
    to R - 1 backups their sums (s bytes), to each of the others the results of its own shards (r
    bytes): Psi (g (N - 1) + s (R - 1) + r (N - R)) / N, with g = r = s = 4 where nothing is coded,
    and in mode `local` so much every `local_steps` rounds. A backup whose arithmetic differs from
    the primary's in the last bit gets the results too, and so do all of the `num_muon` parameters
    that Muon steps, for the primary alone has them. Where results keep few numbers, backups get
    them in place of sums (s = r). To it come the gradients of all others as
    a primary, and of other shards the sum (as one of their backups) or the result.

    In mode `gossip` an offer of four vectors goes to the partner every `local_steps` rounds, and
    one comes; of an odd number one has none.

    `part`: of the shards whose primary it is, by its upload bandwidth among the replicas'; 1 / N
    where not given, which is the average."""
    n, own = num_replicas, 1 / num_replicas if part is None else part
    here = _at(1, False, n, replication)
    others = tuple((n - 1) * x for x in here)
    return _crossing(num_parameters, n, 1, own, here, others, mode, local_steps, codec, num_muon)


@dataclass(frozen=True, slots=True)
class Home:
    """Replicas of a stage behind one link."""

    replicas: int
    part: float
    """Of the shards, those whose primary is one of them."""
    has_key: bool = False
    """Where a round has an exchange, one of them gives and takes for all."""


def crossing_bytes(
    num_parameters: int,
    homes: Sequence[Home],
    replication: int,
    mode: str,
    local_steps: int,
    codec: str = NONE,
    num_muon: int = 0,
) -> list[tuple[float, float]]:
    """What crosses each home's link in a round, up and down: `exchanged_bytes` without what stays
    there.

    A household contributes once to each shard whose primary is elsewhere. It gets the result once,
    or the sum in place of it where it has a backup; other homes get either for each replica. Which
    replicas are backups is even."""
    num = sum(home.replicas for home in homes)
    at = [_at(h.replicas, h.has_key and mode != LOCAL, num, replication) for h in homes]
    all_of = [sum(values) for values in zip(*at, strict=True)]
    how = mode, local_steps, codec, num_muon
    found = []
    for home, here in zip(homes, at, strict=True):
        others = tuple(a - b for a, b in zip(all_of, here, strict=True))
        of = num_parameters, num, home.replicas, home.part
        found.append(_crossing(*of, here, others, *how))
    return found


def inside_bytes(num_parameters: int, num_replicas: int, mode: str, codec: str) -> float:
    """What each replica of a household sends to the others of it in a round: as head of its part of
    the shards results, and contributions to the other heads. As much comes to it."""
    names = codec_in(mode, codec)
    each = number_bytes(names.contributions) + number_bytes(names.results)
    return num_parameters * each * (num_replicas - 1) / num_replicas


_At: TypeAlias = tuple[float, ...]
"""Of a shard, at a home that does not have its primary, or at several: contributions to it, its
backups, and results of it that are fetched; on average."""


def _at(replicas: int, has_key: bool, num_replicas: int, replication: int) -> _At:
    others, backups = num_replicas - 1, min(replication, num_replicas) - 1
    backed = backups * replicas / max(1, others)
    if not has_key:
        return replicas, backed, replicas - backed
    is_without = (
        comb(others - replicas, backups) / comb(others, backups) if replicas <= others else 0
    )
    return 1, backed, is_without


def _crossing(
    num_parameters: int,
    num_replicas: int,
    replicas: int,
    own: float,
    here: _At,
    others: _At,
    mode: str,
    local_steps: int,
    codec: str,
    num_muon: int,
) -> tuple[float, float]:
    """Bytes up and down of a home with so many `replicas`, which lead a part `own` of the shards.
    `others`: at all other homes together."""
    n, psi = num_replicas, num_parameters
    names = codec_in(mode, codec)
    g, s, r = map(number_bytes, (names.contributions, names.for_backups, names.results))
    if mode == GOSSIP:
        offered = (OFFERED_VECTORS * psi - num_muon) * s * (n - n % 2) / n / local_steps
        leaves = offered * replicas * (n - replicas) / max(1, n - 1)
        return leaves, leaves
    given, backed, fetched = here
    sent = g * given * (1 - own) + own * (s * others[1] + r * others[2])
    received = g * own * others[0] + (1 - own) * (s * backed + r * fetched)
    if mode == LOCAL:  # the outer step is every owner's
        return psi * sent / local_steps, psi * received / local_steps
    results = num_muon * r
    return psi * sent + results * own * others[1], psi * received + results * (1 - own) * backed
