"""A replica's own steps of `[optimizer]` between two exchanges, over its whole stage.

Memory, beside parameters and gradients: the common parameters (4 bytes a parameter) and the
moments (8 of AdamW, 4 of Muon), all of the stage, for a replica that steps alone cannot share them
out. With Muon's own steps mode `local` is MuLoCo (Therien et al., 2025, arXiv 2505.23725).

The gradient is clipped by the norm of the replica's own stage: there is no exchange in such a
round, hence no norm over all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import xxhash
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.spec import OptimizerSpec, RunSpec
from swarmnet.training.arrays import from_tensor, sum_of_squares, to_tensor
from swarmnet.training.models.matrices import muon_matrices
from swarmnet.training.models.registry import muon_parts
from swarmnet.training.optimizer.muon import ShardedMuon
from swarmnet.training.optimizer.outer import OuterNesterov
from swarmnet.training.optimizer.sharded import ShardedOptimizer
from swarmnet.training.optimizer.shards import ShardedAdamW
from swarmnet.training.optimizer.store import DeviceStore, HostStore, MemoryStore, Store
from swarmnet.training.stage import TorchStage
from swarmnet.wire import Array

Inner = ShardedAdamW | ShardedMuon
"""The steps of `[optimizer]`."""
CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


class TorchLocalSteps:
    """Implements `ports.LocalSteps` for one stage."""

    def __init__(
        self, stage: TorchStage, optimizer: Inner, outer: OuterNesterov, spec: OptimizerSpec
    ) -> None:
        """`optimizer`: of this replica alone; it comes to own every shard. `outer`: for `meet`."""
        self._stage = stage
        self._outer = outer
        self._spec = spec
        self._optimizer = optimizer
        self._clip = spec.grad_clip_norm
        self._shards = range(len(stage.shard_sizes))
        self._common = [to_tensor(stage.parameter_shard(j)).clone() for j in self._shards]
        self._coming: dict[int, Tensor] = {}
        self._stepped: dict[int, Array] = {}
        self.tokens = [0] * len(self._shards)
        self.changes = 0
        for j in self._shards:
            optimizer.create(j)

    def common_shard(self, shard_index: int) -> Array:
        return from_tensor(self._common[shard_index])

    def set_common(self, shard_index: int, values: Array) -> None:
        self.changes += 1
        self._stage.stage_parameters(shard_index, values)
        self._coming[shard_index] = to_tensor(values)

    def digest(self, shard_index: int) -> bytes:
        return xxhash.xxh3_64_digest(self.common_shard(shard_index).data)

    def step(self, num_tokens: int, round_index: int) -> None:
        self._stepped.clear()
        if num_tokens <= 0:
            return
        gradients = [self._stage.gradient_shard(j) for j in self._shards]
        norm = math.sqrt(sum(self._optimizer.sum_of_squares(g) for g in gradients)) / num_tokens
        if not math.isfinite(norm):
            raise ProtocolViolation("the gradient of this replica is not finite")
        self.changes += 1
        clip = min(1.0, self._clip / (norm + CLIP_EPSILON)) if self._clip > 0 else 1.0
        for j, gradient in enumerate(gradients):
            before = self._stage.parameter_shard(j)
            _, after = self._optimizer.step(j, before, gradient, clip / num_tokens, round_index)
            self._stepped[j] = after
            self._stage.stage_parameters(j, after)
            self.tokens[j] += num_tokens

    def exchanged(self, shards: Iterable[int]) -> None:
        for j in shards:
            self.tokens[j] = 0

    def change(self, shard_index: int, weight: float) -> Array:
        return from_tensor((self._common[shard_index] - self._fast(shard_index)) * weight)

    def offer(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        values, moments = self._optimizer.export(shard_index)
        common = from_tensor(self._common[shard_index].clone())
        arrays = (common, self.change(shard_index, 1.0), *moments)
        codec = self._outer.codec
        return values, tuple(codec.coded_sum(shard_index, array)[0] for array in arrays)

    def meet(
        self,
        shard_index: int,
        theirs: tuple[dict[str, Any], tuple[Array, ...]] | None,
        round_index: int,
    ) -> tuple[float, float]:
        self.changes += 1
        common, fast = self._common[shard_index], self._fast(shard_index)
        change, mean, apart = common - fast, common, 0.0
        if theirs is None:
            new = self._outer.pair_step(shard_index, common, change, mean, round_index)
        else:
            values, arrays = theirs
            own = self._optimizer.export(shard_index)
            mine = (common, change, *map(to_tensor, own[1]))
            if len(arrays) != len(mine):
                raise ProtocolViolation(f"an offer of this shard is {len(mine)} arrays")
            seen = [self._seen(shard_index, m, a) for m, a in zip(mine, arrays, strict=True)]
            their_common, their_change, their_mean, *squares = seen
            apart = sum_of_squares(fast - (their_common - their_change))
            change, mean = (change + their_change) / 2, (common + their_common) / 2
            moments = tuple(
                from_tensor(m) for m in (their_mean, *(s.clamp_min(0.0) for s in squares))
            )
            try:
                self._average_moments(shard_index, own, values, moments)
                new = self._outer.pair_step(shard_index, common, change, mean, round_index)
            except ProtocolViolation:
                self._optimizer.load(shard_index, *own)  # nothing of theirs stays
                raise
        self.set_common(shard_index, from_tensor(new))
        return apart, 0.0 if theirs is None else sum_of_squares(fast)

    def _average_moments(
        self,
        shard_index: int,
        exported: tuple[dict[str, Any], tuple[Array, ...]],
        values: dict[str, Any],
        arrays: tuple[Array, ...],
    ) -> None:
        """The mean of the own moments, `exported`, and a partner's. Moments begin at zero, so
        that those of few steps are too small: they are compared with that taken out (Kingma and Ba,
        2015, section 3)."""
        own_values, own = exported
        self._optimizer.load(shard_index, values, arrays)  # checks them
        own_steps, their_steps = own_values["steps"], values["steps"]
        if not own_steps:
            return
        averaged = []
        spec = self._spec
        betas = (spec.beta1, spec.beta2) if len(own) == 2 else (spec.momentum,)
        for beta, mine, other in zip(betas, own, arrays, strict=True):
            value = to_tensor(mine)
            if their_steps:
                bias, their_bias = 1 - beta**own_steps, 1 - beta**their_steps
                value = (value + to_tensor(other) * (bias / their_bias)) / 2
            averaged.append(from_tensor(value))
        self._optimizer.load(shard_index, own_values, tuple(averaged))

    def _fast(self, shard_index: int) -> Tensor:
        """The own parameters after the newest step."""
        stepped = self._stepped.get(shard_index)
        return to_tensor(stepped or self._stage.parameter_shard(shard_index))

    def _seen(self, shard_index: int, own: Tensor, array: Array) -> Tensor:
        """A partner's vector. Where it is coded, what coding does to the own one is taken for what
        it has done to the partner's: so what both have in common stays as it is, and what one
        gains the other loses."""
        codec = self._outer.codec
        values = to_tensor(codec.decoded_sum(shard_index, array))
        if not math.isfinite(sum_of_squares(values)):
            raise ProtocolViolation(f"shard {shard_index} of a partner is not finite")
        if codec.names.sums == NONE:
            return values
        _, decoded = codec.coded_sum(shard_index, from_tensor(own))
        return own + (values - to_tensor(decoded))

    def finish_round(self) -> None:
        self._stepped.clear()
        coming, self._coming = self._coming, {}
        for j, values in coming.items():
            self._common[j].copy_(values)

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        return self._optimizer.export(shard_index)

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        wanted = self._optimizer.num_moments(shard_index)
        if len(arrays) != wanted:
            how_many = "one array" if wanted == 1 else "two arrays"
            raise ProtocolViolation(f"the moments of shard {shard_index} are {how_many}")
        self.changes += 1
        self._optimizer.load(shard_index, values, arrays)


def build_local_steps(
    spec: RunSpec, stage: TorchStage, outer: ShardedOptimizer, store: Store | None = None
) -> TorchLocalSteps | None:
    """The own steps of a stage's replica; None where the run's mode has none."""
    if not isinstance(outer, OuterNesterov):
        return None
    optimizer = _inner(spec, stage, store)  # nobody else steps on it
    return TorchLocalSteps(stage, optimizer, outer, spec.optimizer)


def _inner(spec: RunSpec, stage: TorchStage, store: Store | None, codec: str = NONE) -> Inner:
    """The steps of `[optimizer]`, made by the host."""
    ranges, sizes = stage.parameter_ranges, stage.shard_sizes
    if spec.optimizer.kind == "muon":
        matrices = muon_matrices(stage.builders, muon_parts(spec, stage.builders))
        return ShardedMuon(ranges, sizes, matrices, spec.optimizer, store, codec, stage.device)
    return ShardedAdamW(ranges, sizes, spec.optimizer, store, codec)


def build_optimizer(
    spec: RunSpec, stage: TorchStage, store: HostStore | None = None
) -> Inner | OuterNesterov:
    """What the owners of a stage's shards step with, by the run's mode; it owns none yet. `store`:
    of state, or where the stage's update is made on the device, of what that has no room for."""
    sync, ranges, sizes = spec.sync, stage.parameter_ranges, stage.shard_sizes
    if sync.mode not in (LOCAL, GOSSIP):
        copies = stage.update_copies
        if copies is None:
            return _inner(spec, stage, store, sync.update_codec)
        place = DeviceStore(copies.device, store or MemoryStore())
        return ShardedAdamW(ranges, sizes, spec.optimizer, place, sync.update_codec, copies)
    return OuterNesterov(
        sizes,
        sync.outer_learning_rate,
        sync.gossip_momentum if sync.mode == GOSSIP else sync.outer_momentum,
        spec.sync_warmup_rounds,
        spec.optimizer.end - 1,
        store,
        sync.update_codec,
    )
