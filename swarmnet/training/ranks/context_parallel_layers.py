"""The passes of one rank where each has a part of every sequence: context parallelism, by ring
attention (`ring`).

Every rank has all parameters, and its own positions of what lies between the beginning of the stage
and its end. What comes from other stages and goes to them is whole sequences: each rank takes its
part of these, and gathers the others' parts. A rank's gradients are those of its positions, and
rank 0 adds them up once a round.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarmnet.ports import StepKey
from swarmnet.training.accelerators import CPU
from swarmnet.training.models.base import (
    CachePlan,
    LayerBuilder,
    LayerContext,
    ModelPlan,
    documents_of,
)
from swarmnet.training.ranks.cut_layers import CutLayers
from swarmnet.training.ranks.cut_plan import CutPlan
from swarmnet.training.ranks.cuts import Cutting, in_rows
from swarmnet.training.ranks.part_dropout import NUM_DIMS_OF_WEIGHTS, Drawn, drawn_in_part
from swarmnet.training.ranks.ring import Ring, part_of_rank, whole
from swarmnet.training.ranks.tensor_parallel import Region, both_ways, unchanged
from swarmnet.training.ranks.texts.shared_text import SharedText
from swarmnet.training.ranks.zigzag import Zigzag, is_long_enough

NOTHING_IS_CUT = CutPlan({}, 0, 0, 0, 0, shares_heads=False)
"""All of each matrix is on every rank."""


def _place(zigzag: Zigzag, rank: int, shape: torch.Size) -> Drawn:
    """A `Place`, of what layers draw for in training: (samples, positions, numbers), or tokens of
    all samples and their numbers; and weights of attention, of positions beside all positions."""
    if len(shape) == NUM_DIMS_OF_WEIGHTS:
        assert tuple(shape[2:]) == (zigzag.size(rank), zigzag.length), "weights of another kind"
        of_heads = (*shape[:2], zigzag.length, zigzag.length)
        rows = zigzag.pieces(rank)
        return Drawn(of_heads, lambda drawn: torch.cat([drawn[:, :, r] for r in rows], dim=2))
    width, num_tokens = shape[-1], shape[:-1].numel()
    of_all = (num_tokens // zigzag.size(rank), zigzag.length, width)

    def part(drawn: Tensor) -> Tensor:
        return part_of_rank(zigzag, rank, drawn.view(of_all)).view(shape)

    return Drawn(of_all, part)


class ContextParallelLayers(CutLayers):
    """The layers of one rank: whole matrices, and a part of each sequence, and of each text that
    the model writes. What is too short to be cut is computed by all ranks alike."""

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        region: Region,
        cut: Cutting = NOTHING_IS_CUT,
        longest_text: int = 0,
        **options: Any,
    ) -> None:
        """`region`: of gradients that ranks have a part of (`sequence_parallel`); `cut`: how the
        ranks of a row cut matrices; `longest_text`: tokens that a text which ranks share may have,
        0 where the model says it; the rest as for `CutLayers`."""
        self._column = region.column
        self._gathers = False
        self._zigzag: Zigzag | None = None
        """Of the pass that runs; None where each rank has whole sequences."""
        inner = plan.loss

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            zigzag = self._zigzag
            if zigzag is None:
                return inner(outputs, targets)
            mine = inner(outputs, part_of_rank(zigzag, self._column.rank, targets))
            return both_ways(mine, self._column.all_reduce, unchanged)

        is_apart = options["device"].type != CPU
        cache = self._cache(plan.cache, longest_text, is_apart=is_apart)
        plan = dataclasses.replace(plan, loss=loss, cache=cache)
        cut = in_rows(NOTHING_IS_CUT, cut, region.row.num_ranks, region.num_ranks)
        super().__init__(plan, builders, region=region, cut=cut, **options)
        if plan.is_random:
            length = plan.inputs.shape[0]
            zigzag = Zigzag(length, self._column.num_ranks)
            self.place = partial(_place, zigzag, self._column.rank)
            self.drawing = partial(drawn_in_part, self.place)

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        region, length = self._column, x.shape[1]
        self._zigzag = None
        if not is_long_enough(length, region.num_ranks):
            return super().run(key, x, context)
        self._zigzag = zigzag = Zigzag(length, region.num_ranks)
        mine = partial(part_of_rank, zigzag, region.rank)
        all_of = partial(whole, zigzag, region)
        x = both_ways(x, mine, all_of)
        x = super().run(key, x, self._context_here(zigzag, context, x.device))
        is_whole = not self.is_last or self._gathers
        return both_ways(x, all_of, mine) if is_whole else x

    def _cache(self, plan: CachePlan | None, longest: int, *, is_apart: bool) -> CachePlan | None:
        """Of texts that ranks share. What is kept of them is counted in the memory that all ranks
        have, or in that which each has apart."""
        if plan is None:
            return None
        return dataclasses.replace(
            plan,
            make=partial(SharedText, self._column),
            numbers=-(-plan.numbers // self._column.num_ranks) if is_apart else plan.numbers,
            max_tokens=min((n for n in (plan.max_tokens, longest) if n), default=0),
        )

    def extend(self, x: Tensor, context: LayerContext) -> Tensor:
        region, text, count = self._column, context.cache, x.shape[1]
        assert isinstance(text, SharedText)
        self._zigzag = zigzag = None
        if is_long_enough(count, region.num_ranks):
            self._zigzag = zigzag = Zigzag(count, region.num_ranks)
        one = text.begin(count, zigzag)
        context = dataclasses.replace(context, cache=None, sequence=one)
        if zigzag is None:
            x = super().extend(x, context)
        else:
            mine = partial(part_of_rank, zigzag, region.rank)
            assert context.positions is not None
            context = dataclasses.replace(
                context,
                positions=mine(context.positions),
                tokens=None if context.tokens is None else mine(context.tokens),
            )
            x = super().extend(mine(x), context)
            x = x if self.is_last else whole(zigzag, region, x)
        text.end(one)
        return x

    def _last_token(self, x: Tensor) -> Tensor:
        """All ranks go on with it, so that what they find of it is alike."""
        x = super()._last_token(x)
        if self._zigzag is None:
            return x
        # The last piece of zigzag order is the first rank's.
        return self._column.all_reduce(x if self._column.rank == 0 else torch.zeros_like(x))

    def _context_here(
        self, zigzag: Zigzag, context: LayerContext | None, device: torch.device
    ) -> LayerContext:
        """Of this rank's positions."""
        context = context or LayerContext()
        mine = partial(part_of_rank, zigzag, self._column.rank)
        positions, tokens, documents = context.positions, context.tokens, None
        if positions is not None:
            documents = documents_of(positions)
        else:
            positions = torch.arange(zigzag.length, device=device).unsqueeze(0)
        return dataclasses.replace(
            context,
            positions=mine(positions),
            tokens=None if tokens is None else mine(tokens),
            sequence=Ring(zigzag, self._column, documents),
        )

    @contextlib.contextmanager
    def evaluating(self, *, is_whole_batch: bool, wants_outputs: bool) -> Iterator[None]:
        self._gathers = wants_outputs
        try:
            with super().evaluating(is_whole_batch=is_whole_batch, wants_outputs=wants_outputs):
                yield
        finally:
            self._gathers = False
