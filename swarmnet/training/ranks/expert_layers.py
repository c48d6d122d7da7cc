"""The passes of one rank where each has some experts of every layer: expert parallelism (GShard,
arXiv 2006.16668).

A rank has samples of its own, and all that is not an expert. In each layer with experts a token's
row goes to the ranks of the experts that it has chosen, and what they make of it comes back: two
collectives forward, and two backward. What comes from other stages and goes to them is whole
microbatches: each rank takes its samples, and gathers the others'.

All ranks make the same collectives in the same order. A rank without a sample (of a text, which
rank 0 has, or of a small batch that is evaluated) is *idle*: it computes with one that is not its
own, sends nothing to experts, and its results are thrown away. Its experts work.

Shapes: D width, E experts, R rows: choices of this rank's tokens, C rows that its experts get.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmnet.ports import StepKey
from swarmnet.training.models.base import LayerBuilder, LayerContext, ModelPlan
from swarmnet.training.models.experts import (
    STACKS,
    Dispatched,
    Experts,
    Product,
    adapted_stack,
    combined,
    expert_of,
    is_stack,
)
from swarmnet.training.models.lora import A
from swarmnet.training.models.routing import Heard
from swarmnet.training.ranks.cut_layers import CutLayers
from swarmnet.training.ranks.cuts import Cut, Cutting, in_rows, part_of
from swarmnet.training.ranks.part_dropout import Drawn, drawn_in_part, narrowed
from swarmnet.training.ranks.tensor_parallel import Region, both_ways, unchanged


def samples_of(size: int, rank: int, num_ranks: int) -> slice:
    """Those of a rank, of `size` samples: as many as any other has, or one more at the first."""
    return slice(-(-size * rank // num_ranks), -(-size * (rank + 1) // num_ranks))


def _part(samples: slice, x: Tensor) -> Tensor:
    return x[samples].clone()


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertCut:
    """Which parameters a rank holds: those of its experts, and all others whole."""

    num_experts: int

    def cut(
        self,
        name: str,
        shape: Sequence[int],
        rank: int,
        num_ranks: int,
        *,
        sequence_parallel: bool = False,
    ) -> Cut:
        """As `Cutting.cut`."""
        number = expert_of(name)
        start, stop = part_of(self.num_experts, rank, num_ranks)
        if is_stack(name):
            return Cut(0, start, stop, "own")
        if (adapter := adapted_stack(name)) is not None:
            if adapter[1] == A:
                rank_of_pair = shape[0] // self.num_experts
                return Cut(0, start * rank_of_pair, stop * rank_of_pair, "own")
            return Cut(1, start, stop, "own", packs=shape[1] // self.num_experts)
        if number is None:  # of its samples alone
            return Cut(0, 0, shape[0], "partial")
        is_here = start <= number < stop
        return Cut(0, 0, shape[0], "own") if is_here else Cut(0, 0, 0, "absent")


class ExpertExchange:
    """Brings rows to the ranks of their experts and back, for `models.experts.SharedExperts`.
    Experts get rows in the order in which one rank with all samples would give them."""

    def __init__(self, region: Region, num_experts: int) -> None:
        self._region = region
        self._parts = [
            range(*part_of(num_experts, r, region.num_ranks)) for r in range(region.num_ranks)
        ]
        self.here = self._parts[region.rank]
        self._is_idle = False

    @contextlib.contextmanager
    def idle(self, is_idle: bool) -> Iterator[None]:
        """In this context the rank's tokens may not be its own: nothing is sent then. Layers that a
        backward pass computes again are outside of it: training has no idle ranks."""
        self._is_idle = is_idle
        try:
            yield
        finally:
            self._is_idle = False

    def through(self, x_RD: Tensor, sizes_E: Tensor, product: Product) -> Tensor:
        """As `SharedExperts.through`; zeros for rows behind all experts', and where it is idle."""
        if self._is_idle:
            sizes_E = torch.zeros_like(sizes_E)
        num_here, num_ranks = len(self.here), self._region.num_ranks
        experts_of = [len(part) for part in self._parts]
        sizes_C = self._all_to_all(sizes_E, experts_of, [num_here] * num_ranks)
        sizes = [0, *accumulate(sizes_E.tolist())]
        sent = [sizes[part.stop] - sizes[part.start] for part in self._parts]
        got = sizes_C.view(num_ranks, num_here).sum(dim=1).tolist()
        there, back = (
            partial(self._all_to_all, sent=sent, got=got),
            partial(self._all_to_all, sent=got, got=sent),
        )
        rows_CD = both_ways(x_RD[: sizes[-1]], there, back)
        if sum(got):
            rows_CD = self._in_order_of_experts(rows_CD, sizes_C, product)
        # Else there is no product, and the rows stand for it: the way back in the backward pass
        # has to begin somewhere.
        y_RD = both_ways(rows_CD, back, there)
        return torch.cat((y_RD, torch.zeros_like(x_RD[sizes[-1] :])))

    def _in_order_of_experts(self, rows_CD: Tensor, sizes: Tensor, product: Product) -> Tensor:
        """The products of rows that lie in the order of the ranks that they are from."""
        num_here = len(self.here)
        numbers = torch.arange(num_here, device=sizes.device).repeat(self._region.num_ranks)
        order_C = numbers.repeat_interleave(sizes, output_size=len(rows_CD)).argsort(stable=True)
        place_C = order_C.argsort()
        x_CD = Dispatched.apply(rows_CD, order_C, place_C, 1)
        return product(x_CD, sizes.view(-1, num_here).sum(0)).index_select(0, place_C)

    def _all_to_all(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """The rows that ranks have for this one, one rank's after another's, `got` of each; of this
        rank's rows, `sent` go to each."""
        rows = rows.contiguous()
        came = rows.new_empty((sum(got), *rows.shape[1:]))
        options = dist.AllToAllOptions()
        self._region.group.alltoall_base(came, rows, got, sent, options).wait()
        return came


def _share(stack: Any, num_experts: int, exchange: ExpertExchange) -> None:
    """Lets experts of a model of transformers, of which those are here that are this rank's, go
    through the exchange."""
    alone = stack.forward  # of the family's class
    stack.num_experts = len(exchange.here)

    def product(x_CD: Tensor, sizes_E: Tensor) -> Tensor:
        numbers = torch.arange(len(sizes_E), device=x_CD.device)
        numbers_C1 = numbers.repeat_interleave(sizes_E, output_size=len(x_CD)).unsqueeze(1)
        made: Tensor = alone(x_CD, numbers_C1, x_CD.new_ones(numbers_C1.shape))
        return made

    def forward(x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        through = partial(exchange.through, product=product)
        return combined(x_TD, chosen_TK.flatten(), weights_TK, num_experts, through)

    stack.forward = forward


def _place(microbatch: int, region: Region, shape: torch.Size) -> Drawn:
    """A `Place`, of what is drawn for samples or for their tokens."""
    mine = samples_of(microbatch, region.rank, region.num_ranks)
    each = shape[0] // (mine.stop - mine.start)
    return narrowed(shape, 0, each * microbatch, each * mine.start)


class ExpertLayers(CutLayers):
    """The layers of one rank: some experts of each layer, all that is no expert, and a part of the
    samples."""

    routes = True

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        region: Region,
        num_experts: int,
        microbatch: int,
        cut: Cutting | None = None,
        **options: Any,
    ) -> None:
        """`region`: of gradients that ranks have a part of (`sequence_parallel`); `num_experts`: of
        a layer; `microbatch`: samples; `cut`: how the ranks of a row cut matrices, where there are
        rows; the rest as for `CutLayers`."""
        self._column = column = region.column
        self._gathers = False
        self._mine = slice(0, 0)
        """Of the samples of the pass that runs, those of this rank."""
        inner = plan.loss

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return both_ways(inner(outputs, targets[self._mine]), column.all_reduce, unchanged)

        plan = dataclasses.replace(plan, loss=loss)
        own = ExpertCut(num_experts)
        both = in_rows(own, cut or own, region.row.num_ranks, region.num_ranks)
        super().__init__(plan, builders, region=region, cut=both, **options)
        self._exchange = ExpertExchange(column, num_experts)
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, Experts):
                    part.shared = self._exchange
                elif isinstance(getattr(part, STACKS[0], None), nn.Parameter):
                    _share(part, num_experts, self._exchange)
        self.place = partial(_place, microbatch, column)
        self.drawing = partial(drawn_in_part, self.place)

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        num_samples = x.shape[0]
        self._mine = mine = samples_of(num_samples, self._column.rank, self._column.num_ranks)
        is_idle = mine.start == mine.stop
        part = partial(_part, slice(0, 1) if is_idle else mine)
        whole = partial(self._whole, num_samples)
        x = both_ways(x, part, whole)
        if context is not None:
            if context.routing is not None:
                context.routing.of_ranks = partial(self._heard_by_all, num_samples, mine)
            positions, tokens = context.positions, context.tokens
            context = dataclasses.replace(
                context,
                positions=None if positions is None else part(positions),
                tokens=None if tokens is None else part(tokens),
            )
        with self._exchange.idle(is_idle):
            x = super().run(key, x, context)
        x = x[:0] if is_idle else x
        is_whole = not self.is_last or self._gathers
        return both_ways(x, whole, part) if is_whole else x

    def extend(self, x: Tensor, context: LayerContext) -> Tensor:
        is_idle = self._column.rank > 0
        with self._exchange.idle(is_idle):
            y = super().extend(x, context)
        # Whether its numbers are finite all are to find alike.
        return self._column.all_reduce(torch.zeros_like(y) if is_idle else y)

    @contextlib.contextmanager
    def evaluating(self, *, is_whole_batch: bool, wants_outputs: bool) -> Iterator[None]:
        self._gathers = wants_outputs
        try:
            with super().evaluating(is_whole_batch=is_whole_batch, wants_outputs=wants_outputs):
                yield
        finally:
            self._gathers = False

    # ---- inside -----------------------------------------------------------------------------

    def _whole(self, num_samples: int, x: Tensor) -> Tensor:
        """The samples of all ranks from those of each."""
        region = self._column
        counts = [samples_of(num_samples, r, region.num_ranks) for r in range(region.num_ranks)]
        mine = x.new_zeros((counts[0].stop, *x.shape[1:]))  # nobody has more than rank 0
        mine[: x.shape[0]] = x
        parts = [torch.empty_like(mine) for _ in counts]
        region.group.allgather([parts], [mine]).wait()
        return torch.cat([part[: n.stop - n.start] for part, n in zip(parts, counts, strict=True)])

    def _heard_by_all(self, num_samples: int, mine: slice, one: Heard) -> Heard:
        """Of what the router of a layer did with this rank's samples."""
        beside = torch.stack((one.dropped.double(), one.entropy.double()))
        whole = self._column.all_reduce(torch.cat((one.chosen_E.double(), beside)))
        return Heard(
            whole[:-2].long(),
            whole[-2].long(),
            whole[-1].float(),
            one.num_tokens // (mine.stop - mine.start) * num_samples,
        )
