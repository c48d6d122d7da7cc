"""The outer step of local training: Nesterov's momentum on the averaged change of replicas.

After `local_steps` steps of their own, replicas average how far they have come from where they all
began; that distance is taken for a gradient, and the common parameters make one step on it as
`torch.optim.SGD(nesterov=True)` makes it (DiLoCo, Douillard et al. 2023). The state of a shard is
one fp32 vector; owners hold it as they hold AdamW's moments in `shards`.

In the rounds of a warm-up, and in the last of a run, the outer step is the plain mean: the whole
change, no momentum. What momentum adds is for later changes to put right, and after the last there
is none.

Where results keep few numbers (`UpdateCodec.tells_results`), the primary of a shard alone makes the
step. Backups `take` its result: what they have of a momentum fades without the changes that they do
not get, and what a result has left out is with its primary
(docs/decisions/0040-few-numbers-of-a-result.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import NONE
from swarmnet.training.arrays import LARGEST_VALUE, from_tensor, is_finite
from swarmnet.training.codecs.shards import encode_shard
from swarmnet.training.optimizer.sharded import ShardedOptimizer, ShardState, Stepper
from swarmnet.training.optimizer.store import Store
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.optimizer")


class OuterNesterov(ShardedOptimizer):
    """The state of a shard: its momentum, the decayed sum of the averaged changes."""

    max_steps = 1 << 40

    def __init__(
        self,
        shard_sizes: Sequence[int],
        rate: float,
        momentum: float,
        warmup_rounds: int = 0,
        last_round: int = -1,
        store: Store | None = None,
        codec: str = NONE,
    ) -> None:
        """`store` and `codec`: as for `ShardedOptimizer`."""
        super().__init__(shard_sizes, store, codec)
        self._warmup_rounds = warmup_rounds
        self._last_round = last_round
        self._rate = rate
        self._momentum = momentum

    def num_moments(self, shard_index: int) -> int:
        return 1

    def _steps_in_parts(self, shard_index: int) -> bool:
        return False

    def _stepper(
        self, shard_index: int, state: ShardState, round_index: int, *, is_delayed: bool
    ) -> Stepper:
        """The rate is the same in every round but the plain ones. The gradient is the change."""

        def advance(part: slice, own: Tensor, gradient: Tensor) -> Tensor:
            if self._is_plain(round_index):
                return own.copy_(self._checked(shard_index, own - gradient))
            momentum = state.vectors[0] * self._momentum
            momentum.add_(gradient)
            step = gradient.add_(momentum, alpha=self._momentum)
            new = self._checked(shard_index, own - self._rate * step)
            state.vectors[0].copy_(momentum)
            return own.copy_(new)

        return advance

    def _results(self, round_index: int) -> str:
        return self.codec.names.of_result(is_plain=self._is_plain(round_index))

    def step(
        self,
        shard_index: int,
        parameters: Array,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
        for_others: bool = True,
        is_finite: bool = False,
    ) -> tuple[Array, Array]:
        """As `ShardedOptimizer`. But where backups get the result, which is to be the same for all,
        a step that would be refused gives a change of zeros, and nothing else changes."""
        how = round_index, is_delayed, for_others, is_finite
        try:
            return super().step(shard_index, parameters, gradient_sum, scale, *how)
        except ProtocolViolation as e:
            if not self.codec.names.tells_results:
                raise
            log.warning("round %d: no step: %s", round_index, e)
        state, name = self._states[shard_index], self._results(round_index)
        present = self._values(shard_index, "parameters", parameters)
        coded = from_tensor(encode_shard(name, torch.zeros_like(present)))
        made = coded, self.codec.applied(shard_index, parameters, coded)
        state.steps += 1
        return made

    def take(
        self, shard_index: int, parameters: Array, result: Array, round_index: int
    ) -> tuple[Array, Array]:
        """As the port says. Raises `ProtocolViolation`, the state unchanged, where the result is
        none, or leads to parameters that no stage takes."""
        state = self._states[shard_index]
        new = self.codec.applied(shard_index, parameters, result)
        self._checked(shard_index, self._values(shard_index, "parameters", new))
        if not self._is_plain(round_index):
            state.vectors[0].mul_(self._momentum)
        state.steps += 1
        state.ahead = None
        return result, new

    def pair_step(
        self,
        shard_index: int,
        parameters: Tensor,
        change: Tensor,
        mean: Tensor,
        round_index: int,
    ) -> Tensor:
        """A step of one replica with its partner (NoLoCo, Kolehmainen et al. 2025): momentum on
        the `change` averaged over the two, and a pull towards the `mean` of their parameters with
        the same rate, as in the authors' code. Where a step is plain, the mean of where both are.
        Returns the new parameters, fp32 [size]. Raises `ProtocolViolation`, the state unchanged,
        where these would not do."""
        state = self._states[shard_index]
        if self._is_plain(round_index):
            new = self._checked(shard_index, mean - change)
        else:
            momentum = state.vectors[0] * self._momentum
            momentum.add_(change, alpha=-self._rate).add_(mean - parameters, alpha=self._rate)
            new = self._checked(shard_index, parameters + momentum)
            state.vectors[0].copy_(momentum)
        state.steps += 1
        return new

    def _is_plain(self, round_index: int) -> bool:
        return round_index < self._warmup_rounds or round_index == self._last_round

    def _checked(self, shard_index: int, new: Tensor) -> Tensor:
        if not is_finite(new, LARGEST_VALUE):
            raise ProtocolViolation(
                f"the outer step of shard {shard_index} leads beyond {LARGEST_VALUE:g}"
            )
        return new
