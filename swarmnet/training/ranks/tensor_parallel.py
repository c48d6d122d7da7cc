"""What ranks say to each other under tensor parallelism: collectives that autograd can go through,
and a loss of logits that are cut by vocabulary.

The cut is Megatron's (Shoeybi et al., 2019): a decoder layer needs two all-reduces forward and two
backward. With sequence parallelism (Korthikanti et al., 2022) norms and residuals hold a slice of
the sequence on each rank, and each all-reduce becomes a reduce-scatter and an all-gather: the same
bytes, less memory. They are written by hand, so that every rank runs the same ones in the same
order: a call that all ranks are given with the same arguments needs no other agreement.

Which matrices are cut how, `cut_plan` says.

Shapes: B samples, S positions, D width, V tokens, N = B x S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from swarmnet.batch import IGNORED
from swarmnet.training.ranks.cuts import part_of

SEQUENCE_DIM = 1


# ---- collectives ----------------------------------------------------------------------------


class Region:
    """The ranks that hold one stage together, as one of them sees them.

    `group` is a bare process group: nothing of it is global to the process.
    """

    def __init__(
        self, group: Any, rank: int, num_ranks: int, *, sequence_parallel: bool = False
    ) -> None:
        self.group = group
        self.rank = rank
        self.num_ranks = num_ranks
        self.sequence_parallel = sequence_parallel
        self.is_split = False
        """In the pass that runs, tensors between the cut matrices are split by positions."""
        self._entered: tuple[Tensor, Tensor] | None = None

    @property
    def row(self) -> Region:
        """Of all ranks, those that cut matrices among them, where that is not what all do."""
        return self

    @property
    def column(self) -> Region:
        """Likewise those that share samples or positions."""
        return self

    def begin(self, length: int) -> None:
        """Before a pass over sequences of `length`; one that cannot be split evenly is not."""
        self.is_split = self.sequence_parallel and length % self.num_ranks == 0
        self._entered = None

    def enter(self, x: Tensor) -> Tensor:
        """`enter`, once for several matrices that are given the same tensor one after the other:
        autograd adds up what comes back from them before the ranks do."""
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        known, entered = self._entered or (None, x)
        if known is not x or entered.requires_grad != needs_gradient:
            entered = enter(self, x)
            self._entered = x, entered
        return entered

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A new tensor. Never in place: autograd may hand the same gradient to two functions."""
        total = x.clone(memory_format=torch.contiguous_format)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.group.allreduce([total], options).wait()
        return total

    def gather(self, x: Tensor) -> Tensor:
        """The slices of all ranks, one behind the other along the sequence."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=SEQUENCE_DIM)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's slice of the sum."""
        parts = [p.contiguous() for p in x.chunk(self.num_ranks, dim=SEQUENCE_DIM)]
        mine = torch.empty_like(parts[0])
        self.group.reduce_scatter([mine], [parts], dist.ReduceScatterOptions()).wait()
        return mine

    def slice(self, x: Tensor) -> Tensor:
        """This rank's slice."""
        return x.chunk(self.num_ranks, dim=SEQUENCE_DIM)[self.rank].contiguous()


class _BothWays(torch.autograd.Function):
    """One function of the tensor forward, another one of its gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, way: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return way(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def both_ways(
    x: Tensor, way: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """`way(x)`, whose gradient with respect to `x` is `back` of its own. Neither works in place,
    and what `way` returns is not `x` itself."""
    return cast(Tensor, _BothWays.apply(x, way, back))


def unchanged(x: Tensor) -> Tensor:
    """A view."""
    return x.view_as(x)


class _VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits that are cut by vocabulary, summed over tokens; no rank ever has
    a whole row of them. Two all-reduces of N values forward, none backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, start: int, region: Region
    ) -> Tensor:
        highest_N = region.all_reduce(logits_NV.amax(dim=-1), dist.ReduceOp.MAX)
        shifted_NV = logits_NV - highest_N.unsqueeze(-1)
        local_N = targets_N - start
        is_here_N = (local_N >= 0) & (local_N < logits_NV.shape[-1])
        has_loss_N = targets_N != IGNORED
        index_N1 = torch.where(is_here_N, local_N, 0).unsqueeze(-1)
        wanted_N = shifted_NV.gather(-1, index_N1).squeeze(-1) * is_here_N
        exp_NV = shifted_NV.exp_()
        sums_N, wanted_N = region.all_reduce(torch.stack((exp_NV.sum(dim=-1), wanted_N)))
        softmax_NV = exp_NV.div_(sums_N.unsqueeze(-1))
        ctx.save_for_backward(softmax_NV, index_N1, is_here_N, has_loss_N)
        return (sums_N.log() - wanted_N).masked_fill(~has_loss_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax_NV, index_N1, is_here_N, has_loss_N = ctx.saved_tensors
        grad_NV = softmax_NV * has_loss_N.unsqueeze(-1)
        grad_NV.scatter_add_(-1, index_N1, -is_here_N.to(grad_NV.dtype).unsqueeze(-1))
        return grad_NV.mul_(grads[0]), None, None, None


def vocabulary_parallel_loss(
    region: Region, vocab_size: int, logits_BSV: Tensor, targets_BS: Tensor
) -> Tensor:
    """As `models.llama.next_token_loss`, of this rank's logits."""
    start, _ = part_of(vocab_size, region.rank, region.num_ranks)
    logits_NV = logits_BSV.flatten(0, 1)
    loss = _VocabularyLoss.apply(logits_NV, targets_BS.flatten().long(), start, region)
    return cast(Tensor, loss)


# ---- around matrices that are cut -----------------------------------------------------------


def enter(region: Region, x: Tensor) -> Tensor:
    """Before matrices that are cut by rows. What the ranks have gathered they use unlike, so that
    its gradient is their sum."""
    if region.is_split:
        return both_ways(x, region.gather, region.reduce_scatter)
    return both_ways(x, unchanged, region.all_reduce)


def leave(region: Region, x: Tensor) -> Tensor:
    """After matrices that are cut by columns."""
    if region.is_split:
        return both_ways(x, region.reduce_scatter, region.gather)
    return both_ways(x, region.all_reduce, unchanged)


def gather_last(region: Region, size: int, x: Tensor) -> Tensor:
    """The whole last dimension, of `size`, from each rank's part. All ranks go on alike with it."""
    start, stop = part_of(size, region.rank, region.num_ranks)

    def whole(part: Tensor) -> Tensor:
        found = part.new_zeros((*part.shape[:-1], size))
        found[..., start:stop] = part
        return region.all_reduce(found)  # a sum with zeros is exact

    return both_ways(x, whole, lambda grad: grad[..., start:stop].contiguous())


def split_last(region: Region, x: Tensor) -> Tensor:
    """This rank's part of the last dimension of what all ranks have."""
    size = x.shape[-1]
    start, stop = part_of(size, region.rank, region.num_ranks)

    def whole(grad: Tensor) -> Tensor:
        found = grad.new_zeros((*grad.shape[:-1], size))
        found[..., start:stop] = grad
        return region.all_reduce(found)

    return both_ways(x, lambda one: one[..., start:stop].contiguous(), whole)


def split(region: Region, x: Tensor) -> Tensor:
    """At the beginning of a stage that is not the first."""
    return both_ways(x, region.slice, region.gather) if region.is_split else x


def join(region: Region, x: Tensor) -> Tensor:
    """At the end of a stage whose last layer is not the output matrix."""
    return both_ways(x, region.gather, region.slice) if region.is_split else x
