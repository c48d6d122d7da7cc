"""Muon (Jordan et al., 2024) on the matrices of a stage's decoder layers, AdamW on all else.

A matrix's step is its momentum (Nesterov's), made nearly orthogonal by five Newton-Schulz
iterations. Such a step has singular values near 1. It is scaled by 0.2 sqrt(max(rows, columns)), so
that its numbers are as large as those of AdamW's (Liu et al., 2025, arXiv 2502.16982). The state of
a matrix is one vector.

A matrix is a parameter, or a part of one that is several in one. A shard has whole matrices, or
none (`training.models.matrices`). A momentum is the same bits at
every owner: each of its operations is one that IEEE 754 defines. A product of matrices is not, for
libraries and processors add in other orders. So the primary of a shard alone makes its step, and
the backups follow it: they step the momentum, and take its result. Where that does not come, one of
them makes the rest of the step from the momentum that it has
(docs/decisions/0023-the-primary-alone-orthogonalizes.md).

Where exchanges are delayed, the parameters that replicas get are ahead of the optimizer's own by
the step once more. So those that gradients are taken at move by 2 u - v, with the newest step u and
v the one before it: what that lacked is added (error feedback of the delay, arXiv 2606.30634; the
figures are in docs/decisions/0041-muon-is-a-step-ahead.md). The primary keeps by how much they are
ahead, a vector. A backup keeps in its place the direction that the step is made of, for it has no
products; who needs the step, since another one leads or it looks at a result, makes it of that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.ports import Rest
from swarmnet.protocol.codecs import NONE
from swarmnet.spec import OptimizerSpec
from swarmnet.training.cores import CORES
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.models.matrices import (
    ITERATIONS,
    MATRIX_MOMENTS,
    OTHER_MOMENTS,
    Matrix,
    blocks_of,
)
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


@dataclass(frozen=True, slots=True)
class Lead:
    """By how much the parameters that a shard's last step has given are ahead, not yet made."""

    direction: Tensor
    """What the step is made of (`nesterov`), fp32 [size]."""
    rate: float


class ShardedMuon(ShardedOptimizer):
    """The state of a shard of matrices: the running mean of the gradient. Of another: AdamW's."""

    max_steps = MAX_STEPS

    def __init__(
        self,
        parameters: Sequence[ParameterRange],
        shard_sizes: Sequence[int],
        matrices: Sequence[Matrix],
        spec: OptimizerSpec,
        store: Store | None = None,
        codec: str = NONE,
        device: torch.device | None = None,
    ) -> None:
        """`parameters`: of the stage. `matrices`: those that Muon steps, whole parameters or parts
        of them; a shard has nothing but these, with their blocks whole, or none of them.
        `device`: where matrices are multiplied, the host's where it has no room; all else is the
        host's. The rest as for `ShardedOptimizer`."""
        super().__init__(shard_sizes, store, codec)
        self._device = device or torch.device("cpu")
        self._spec = spec
        self._segments = cut_segments(parameters, shard_sizes)
        self._leads: dict[int, Lead] = {}
        """By shard of matrices that was followed here, and is ahead since."""
        self._matrices: list[list[Matrix]] = []
        """Of each shard, with where they lie in it."""
        start = 0
        for size in shard_sizes:
            stop = start + size
            muon = [m for m in matrices if m.block.start < stop and m.block.stop > start]
            is_whole = all(start <= b.start and b.stop <= stop for b in blocks_of(muon))
            is_full = sum(m.num_elements for m in muon) == size
            assert not muon or (is_whole and is_full), "a matrix is cut"
            self._matrices.append([m.moved(-start) for m in muon])
            start += size

    def num_moments(self, shard_index: int) -> int:
        return MATRIX_MOMENTS if self._matrices[shard_index] else OTHER_MOMENTS

    def is_repeatable(self, shard_index: int) -> bool:
        return not self._matrices[shard_index]

    def _steps_in_parts(self, shard_index: int) -> bool:
        return not self._matrices[shard_index]

    def _stepper(
        self, shard_index: int, state: ShardState, round_index: int, *, is_delayed: bool
    ) -> Stepper:
        if not self._matrices[shard_index]:
            segments = self._segments[shard_index]
            return adamw_stepper(self._spec, segments, state, round_index, is_delayed=is_delayed)
        momentum = state.vectors[0]
        rest = self._rest(shard_index, momentum, round_index, is_delayed=is_delayed)

        def advance(part: slice, own: Tensor, gradient: Tensor) -> Tensor:
            step_momentum(momentum, gradient, self._spec.momentum)
            return rest(part, own, gradient)

        return advance

    def _rest(
        self, shard_index: int, momentum: Tensor, round_index: int, *, is_delayed: bool
    ) -> Stepper:
        """The step from a momentum that has this gradient already."""
        spec, rate = self._spec, learning_rate(self._spec, round_index)

        def advance(part: slice, own: Tensor, gradient: Tensor) -> Tensor:
            direction = nesterov(momentum, gradient, spec.momentum)
            wanted = torch.empty_like(own) if is_delayed else own
            for m in self._matrices[shard_index]:
                values = m.view_of(own)
                if spec.weight_decay:
                    values.mul_(1 - rate * spec.weight_decay)
                step = self._step_along(m, direction, rate)
                values.sub_(step)
                if is_delayed:
                    torch.sub(values, step, out=m.view_of(wanted))
            return wanted

        return advance

    def _step_along(self, matrix: Matrix, direction: Tensor, rate: float) -> Tensor:
        """What a step takes away from a matrix, but for weight decay, in the shape of a view of
        it."""
        size = ADAMW_SIZE * max(matrix.shape) ** 0.5
        made = self._orthogonal(matrix.matrix_of(direction)).mul_(rate * size)
        return matrix.spread(made)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        try:
            return orthogonal(matrix.to(self._device)).to(matrix.device)
        except RuntimeError as error:
            if not accelerators.is_out_of_memory(error):
                raise
            log.warning("%s has no room for a step of Muon: the host makes it", self._device)
            return orthogonal(matrix)

    # ---- how far parameters are ahead -------------------------------------------------------

    def _made_ahead(self, shard_index: int, lead: Lead) -> Tensor:
        ahead = self._store.zeros(self._sizes[shard_index])
        for m in self._matrices[shard_index]:
            torch.neg(self._step_along(m, lead.direction, lead.rate), out=m.view_of(ahead))
        return ahead

    def _make_ahead(self, shard_index: int) -> None:
        lead = self._leads.pop(shard_index, None)
        if lead is not None:
            self._states[shard_index].ahead = self._made_ahead(shard_index, lead)

    def create(self, shard_index: int) -> None:
        self._leads.pop(shard_index, None)
        super().create(shard_index)

    def drop(self, shard_index: int) -> None:
        self._leads.pop(shard_index, None)
        super().drop(shard_index)

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        self._make_ahead(shard_index)
        return super().export(shard_index)

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        super().load(shard_index, values, arrays)
        self._leads.pop(shard_index, None)

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
        """As `ShardedOptimizer`."""
        self._make_ahead(shard_index)
        how = round_index, is_delayed, for_others, is_finite
        return super().step(shard_index, parameters, gradient_sum, scale, *how)

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
        momentum, beta, gradient = state.vectors[0], self._spec.momentum, total * scale
        step_momentum(momentum, gradient, beta)
        state.steps += 1
        before, state.ahead = state.ahead, None
        lead = self._leads.pop(shard_index, None)
        if is_delayed:
            direction = self._store.zeros(total.numel())
            direction.copy_(nesterov(momentum, gradient, beta))
            rate = learning_rate(self._spec, round_index)
            self._leads[shard_index] = Lead(direction, rate)

        def rest(parameters: Array, for_others: bool) -> tuple[Array, Array]:
            return self._made(
                shard_index,
                parameters,
                total,
                scale,
                self._rest(shard_index, momentum, round_index, is_delayed=is_delayed),
                before=before if lead is None else self._made_ahead(shard_index, lead),
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
