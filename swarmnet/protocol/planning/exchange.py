"""Bytes that the replicas of a stage send each other in a round, by mode and codec."""

from __future__ import annotations

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
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL

AUTO_SHARDS = 64
"""Of the largest stage, about, where the spec leaves their size open: enough to spread over dozens
of replicas, few enough that a digest of each fits into a record."""
MIN_SHARD_PARAMETERS = 16_384
"""Of a shard whose size the spec leaves open."""
OFFERED_VECTORS = 4
"""In mode `gossip`, from each partner to the other: parameters, their change, two moments; of what
Muon steps one moment less."""


def auto_shard_parameters(num_parameters: int) -> int:
    """Of a shard, where the largest stage has so many."""
    return max(MIN_SHARD_PARAMETERS, -(-num_parameters // AUTO_SHARDS))


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
    n, psi = num_replicas, num_parameters
    names = codec_in(mode, codec)
    g, s, r = map(number_bytes, (names.contributions, names.for_backups, names.results))
    if mode == GOSSIP:
        offered = (OFFERED_VECTORS * psi - num_muon) * s * (n - n % 2) / n / local_steps
        return offered, offered
    owners = min(replication, n)
    own = 1 / n if part is None else part
    backed = (1 - own) * (owners - 1) / max(1, n - 1)
    sent = g * (1 - own) + own * (s * (owners - 1) + r * (n - owners))
    received = g * own * (n - 1) + s * backed + r * max(0.0, 1 - own - backed)
    if mode == LOCAL:  # the outer step is every owner's
        return psi * sent / local_steps, psi * received / local_steps
    results = num_muon * r
    return psi * sent + results * own * (owners - 1), psi * received + results * backed
