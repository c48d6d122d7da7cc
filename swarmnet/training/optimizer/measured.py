"""What the end of a round takes on the host beside its messages: measured on a shard."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from swarmnet.protocol.codecs import INT4, leaves_out
from swarmnet.protocol.planning.exchange import auto_shard_parameters
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.optimizer.shards import ShardedAdamW
from swarmnet.wire import Array

WARM_ROUNDS, TIMED_ROUNDS = 2, 5
MOST_PARAMETERS = 1 << 20


class _Replica:
    """With the state of one shard."""

    def __init__(self, spec: RunSpec, size: int, codec: str) -> None:
        ranges = [ParameterRange("weight", 0, (size,), size)]
        self.optimizer = ShardedAdamW(ranges, [size], spec.optimizer, codec=codec)
        self.optimizer.create(0)
        self.parameters = from_tensor(torch.zeros(size))
        self.adding = torch.ones(size)


def measure_round_end(
    spec: RunSpec,
    num_parameters: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float] | None:
    """Seconds of a parameter: of a replica alone, and of one of two, which leads half of the
    shards, and has the sums of the others. None in modes whose steps are others. `num_parameters`:
    of the stage. Blocks."""
    sync = spec.sync
    if sync.mode in (LOCAL, GOSSIP):
        return None
    codec = INT4 if leaves_out(sync.update_codec) else sync.update_codec
    wanted = sync.shard_parameters or auto_shard_parameters(num_parameters)
    size = min(wanted, num_parameters, MOST_PARAMETERS)
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
    alone, one, other = (_Replica(spec, size, codec) for _ in range(3))
    took: list[tuple[float, float]] = []
    for turn in range(WARM_ROUNDS + TIMED_ROUNDS):
        started = clock()
        _led(alone, gradient, [], turn)
        alone_s = clock() - started
        coded = other.optimizer.codec.contribution(0, from_tensor(gradient), keeps_error=True)
        started = clock()
        total = _led(one, gradient, [coded], turn)
        _followed(one, gradient, total, turn)
        took.append((alone_s, (clock() - started) / 2))
    alone_s, shared_s = (min(of) for of in zip(*took[WARM_ROUNDS:], strict=True))
    return alone_s / size, shared_s / size


def _led(replica: _Replica, gradient: Tensor, others: list[Array], turn: int) -> Array:
    """A shard whose primary it is; the sum for its backups. `others`: coded contributions."""
    optimizer, codec = replica.optimizer, replica.optimizer.codec
    own = codec.contribution(0, from_tensor(gradient), keeps_error=True, for_others=False)
    total = optimizer.sum([codec.decoded_contribution(0, c) for c in (own, *others)])
    coded, total = codec.coded_sum(0, total)
    optimizer.sum_of_squares(total)
    optimizer.step(0, replica.parameters, total, 1.0, turn, for_others=bool(others))
    replica.adding.zero_()
    return coded


def _followed(replica: _Replica, gradient: Tensor, coded: Array, turn: int) -> None:
    """A shard that it backs up: it contributes, and steps on the sum that comes."""
    optimizer, codec = replica.optimizer, replica.optimizer.codec
    codec.contribution(0, from_tensor(gradient), keeps_error=True)
    total = codec.decoded_sum(0, coded)
    optimizer.sum_of_squares(total)
    optimizer.step(0, replica.parameters, total, 1.0, turn, for_others=False)
    replica.adding.zero_()
