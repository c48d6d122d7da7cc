"""Coded shards at a replica: their forms, their sizes, and what a coded result leads to."""

from __future__ import annotations

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import NONE, coded_form, row_bytes
from swarmnet.swarm.replica.replica import Replica
from swarmnet.wire import Array


def coded_bytes(replica: Replica, shard: int) -> int:
    """On the wire, of the largest of what an exchange sends for a shard: contribution, sum or coded
    result."""
    names, size = replica.optimizer.codec.names, replica.stage.shard_sizes[shard]
    return max(row_bytes(codec, size) for codec in (names.contributions, names.sums, names.results))


def stage_bytes(replica: Replica) -> int:
    """Of all shards."""
    return sum(coded_bytes(replica, j) for j in range(replica.num_shards))


def check_coded(replica: Replica, what: str, codec: str, shard: int, values: Array) -> None:
    """Raises `ProtocolViolation` unless the array has the form of the shard in this codec."""
    size = replica.stage.shard_sizes[shard]
    if (values.dtype, values.shape) != coded_form(codec, (size,), 0):
        kind = "fp32" if codec == NONE else codec
        raise ProtocolViolation(f"{what} of shard {shard}: {size} {kind} numbers are wanted")


def check_contribution(replica: Replica, shard: int, values: Array) -> None:
    """Raises `ProtocolViolation` unless the array has the form of a contribution, of any kind."""
    names, form = replica.optimizer.codec.names, (values.dtype, values.shape)
    short = names.of_contribution(is_short=True)
    is_short = form == names.form(short, replica.stage.shard_sizes[shard])
    check_coded(replica, "gradient", short if is_short else names.contributions, shard, values)


def check_for_backup(replica: Replica, shard: int, values: Array) -> None:
    """Raises `ProtocolViolation` unless the array has the form of what the backups of a shard
    get."""
    names = replica.optimizer.codec.names
    if names.tells_results:
        _check_change(replica, shard, values)
    else:
        check_coded(replica, "sum", names.sums, shard, values)


def check_result(replica: Replica, shard: int, values: Array) -> None:
    """Raises `ProtocolViolation` unless the array has the form of the parameters of a shard, or of
    their coded change, which is of use to whoever has the present ones."""
    if replica.synced and values.dtype != "float32":
        _check_change(replica, shard, values)
    else:
        check_coded(replica, "the result", NONE, shard, values)


def _check_change(replica: Replica, shard: int, values: Array) -> None:
    """Of a coded result, of any kind."""
    names, form = replica.optimizer.codec.names, (values.dtype, values.shape)
    plain = names.of_result(is_plain=True)
    is_plain = form == names.form(plain, replica.stage.shard_sizes[shard])
    check_coded(replica, "the result", plain if is_plain else names.results, shard, values)


def applied(replica: Replica, shard: int, result: Array) -> Array:
    """On the worker: a shard of the coming round's common parameters. `result`: the parameters, or
    their coded change. Raises `ProtocolViolation` where it is none."""
    return replica.optimizer.codec.applied(shard, replica.common_shard(shard), result)
