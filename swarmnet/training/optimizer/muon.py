"""Muon (Jordan et al., 2024) on the matrices of a stage's decoder layers, AdamW on all else.

A matrix's step is its momentum (Nesterov's), made nearly orthogonal by five Newton-Schulz
iterations. Such a step has singular values near 1. It is scaled by 0.2 sqrt(max(rows, columns)), so
that its numbers are as large as those of AdamW's (Liu et al., 2025, arXiv 2502.16982): the learning
rate and the weight decay of an AdamW run carry over. The state of a matrix is one vector.

A shard has whole matrices, or none (`training.models.matrices`). A momentum is the same bits at
every owner: each of its operations is one that IEEE 754 defines. A product of matrices is not, for
libraries and processors add in other orders. So the primary of a shard alone makes its step, and
the backups follow it: they step the momentum, and take its result. Where that does not come, one of
them makes the rest of the step from the momentum that it has
(docs/decisions/0023-the-primary-alone-orthogonalizes.md).

Where exchanges are delayed, matrices are not ahead of what the optimizer has: AdamW's lead
(`shards`) needs a second moment, and Muon suffers little from a step of delay.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.ports import Rest
from swarmnet.protocol.codecs import NONE
from swarmnet.spec import OptimizerSpec
from swarmnet.training.cores import CORES
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.models.matrices import ITERATIONS
from swarmnet.training.optimizer.rates import learning_rate
from swarmnet.training.optimizer.sharded import ShardedOptimizer, ShardState, Stepper
from swarmnet.training.optimizer.shards import MAX_STEPS, adamw_stepper, cut_segments, is_square
from swarmnet.training.optimizer.store import Store
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.optimizer")

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, X X^T X and (X X^T)^2 X. They make small singular values grow fastest, and leave all
between 0.7 and 1.2."""
LEAST_NORM = 1e-7
"""A matrix of a smaller one makes a smaller step."""
ADAMW_SIZE = 0.2
"""Root mean square of the numbers of an AdamW step, over its rate."""


class ShardedMuon(ShardedOptimizer):
    """The state of a shard of matrices: the running mean of the gradient. Of another: AdamW's."""

    max_steps = MAX_STEPS

    def __init__(
        self,
        parameters: Sequence[ParameterRange],
        shard_sizes: Sequence[int],
        matrices: Collection[str],
        spec: OptimizerSpec,
        store: Store | None = None,
        codec: str = NONE,
        device: torch.device | None = None,
    ) -> None:
        """`parameters`: of the stage. `matrices`: names of those that Muon steps; a shard has
        nothing but these, each whole, or none of them. `device`: where matrices are multiplied, the
        host's where it has no room; all else is the host's. The rest as for `ShardedOptimizer`."""
        super().__init__(shard_sizes, store, codec)
        self._device = device or torch.device("cpu")
        self._spec = spec
        self._segments = cut_segments(parameters, shard_sizes)
        self._matrices: list[list[ParameterRange]] = []
        """Of each shard, with where they begin in it."""
        start = 0
        for size in shard_sizes:
            inside = [p for p in parameters if p.start < start + size and p.stop > start]
            muon = [p for p in inside if p.name in matrices]
            is_whole = all(start <= p.start and p.stop <= start + size for p in muon)
            assert not muon or (is_whole and len(muon) == len(inside)), "a matrix is cut"
            self._matrices.append(
                [ParameterRange(p.name, p.start - start, p.shape, p.num_elements) for p in muon]
            )
            start += size

    def num_moments(self, shard_index: int) -> int:
        return 1 if self._matrices[shard_index] else 2

    def is_repeatable(self, shard_index: int) -> bool:
        return not self._matrices[shard_index]

    def _foretells(self, shard_index: int) -> bool:
        return not self._matrices[shard_index]

    def _steps_in_parts(self, shard_index: int) -> bool:
        return not self._matrices[shard_index]

    def _stepper(
        self, shard_index: int, state: ShardState, round_index: int, *, is_delayed: bool
    ) -> Stepper:
        if not self._matrices[shard_index]:
            segments = self._segments[shard_index]
            return adamw_stepper(self._spec, segments, state, round_index, is_delayed=is_delayed)
        momentum, rest = state.vectors[0], self._rest(shard_index, state.vectors[0], round_index)

        def advance(part: slice, own: Tensor, gradient: Tensor) -> Tensor:
            step_momentum(momentum, gradient, self._spec.momentum)
            return rest(part, own, gradient)

        return advance

    def _rest(self, shard_index: int, momentum: Tensor, round_index: int) -> Stepper:
        """The step from a momentum that has this gradient already."""
        spec, rate = self._spec, learning_rate(self._spec, round_index)

        def advance(part: slice, own: Tensor, gradient: Tensor) -> Tensor:
            ahead = nesterov(momentum, gradient, spec.momentum)
            for p in self._matrices[shard_index]:
                values = p.part_of(own)
                if spec.weight_decay:
                    values.mul_(1 - rate * spec.weight_decay)
                size = ADAMW_SIZE * max(p.shape) ** 0.5
                values.sub_(self._orthogonal(p.part_of(ahead)).mul_(rate * size))
            return own

        return advance

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        try:
            return orthogonal(matrix.to(self._device)).to(matrix.device)
        except RuntimeError as error:
            if not accelerators.is_out_of_memory(error):
                raise
            log.warning("%s has no room for a step of Muon: the host makes it", self._device)
            return orthogonal(matrix)

    def follow(
        self,
        shard_index: int,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
    ) -> Rest:
        """As the port says. What coding loses of the rest is not kept: nobody knows here what the
        primary's has lost."""
        state = self._states[shard_index]
        total = self._finite(shard_index, gradient_sum, scale)
        step_momentum(state.vectors[0], total * scale, self._spec.momentum)
        state.steps += 1
        before, state.ahead = state.ahead, None
        momentum = state.vectors[0]

        def rest(parameters: Array, for_others: bool) -> tuple[Array, Array]:
            return self._made(
                shard_index,
                parameters,
                total,
                scale,
                self._rest(shard_index, momentum, round_index),
                before=before,
                ahead=None,
                for_others=for_others,
                name=self._results(round_index),
            )

        return rest

    def _is_possible(self, shard_index: int, vectors: Sequence[Tensor]) -> bool:
        return bool(self._matrices[shard_index]) or is_square(vectors[1])


def step_momentum(momentum: Tensor, gradient: Tensor, beta: float) -> None:
    """The running mean of the gradient, in place: three operations, each rounded once, so that the
    bits are the same everywhere."""
    momentum.mul_(beta).add_(gradient * (1 - beta))


def nesterov(momentum: Tensor, gradient: Tensor, beta: float) -> Tensor:
    """The momentum with the newest gradient once more, as the next step would have it."""
    return (momentum * beta).add_(gradient * (1 - beta))


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz iterations, fp32 [m, n] of any finite numbers: the matrix with the same
    singular vectors, and singular values near 1 where they were not far below the largest. A new
    tensor."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=LEAST_NORM)
    product = CORES.product if x.is_cpu else torch.mm
    for _ in range(ITERATIONS):
        products = product(x, x.T)
        x = a * x + product(b * products + c * product(products, products), x)
    return (x.T if is_tall else x).clone(memory_format=torch.contiguous_format)
