"""The passes of one rank under tensor parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from swarmnet.ports import StepKey
from swarmnet.training.models.base import LayerBuilder, LayerContext, ModelPlan
from swarmnet.training.ranks.cut_layers import CutLayers
from swarmnet.training.ranks.cut_plan import CutPlan, mark_of
from swarmnet.training.ranks.part_dropout import (
    NUM_DIMS_OF_WEIGHTS,
    Drawn,
    Place,
    both,
    drawn_in_part,
    narrowed,
)
from swarmnet.training.ranks.tensor_parallel import (
    Region,
    gather_last,
    join,
    split,
    vocabulary_parallel_loss,
)


def heads_of(region: Region, cut: CutPlan) -> Place:
    """Weights of attention may be of a rank's heads. All else that families draw for is whole on
    each rank, or their trial tells."""

    def place(shape: torch.Size) -> Drawn | None:
        is_part = len(shape) == NUM_DIMS_OF_WEIGHTS
        is_part = is_part and shape[1] * region.num_ranks == cut.num_heads
        return narrowed(shape, 1, cut.num_heads, shape[1] * region.rank) if is_part else None

    return place


class ParallelLayers(CutLayers):
    """The layers of one rank under tensor parallelism: a part of most matrices."""

    routes = True

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        region: Region,
        cut: CutPlan,
        **options: Any,
    ) -> None:
        """As `CutLayers`; the loss is cut here."""
        self._row = region.row
        self._vocab_size = cut.vocab_size
        self._has_head = builders[-1].name == "lm_head"
        if self._has_head:
            loss = functools.partial(vocabulary_parallel_loss, self._row, cut.vocab_size)
            plan = dataclasses.replace(plan, loss=loss)
        super().__init__(plan, builders, region=region, cut=cut, **options)
        is_compiled = self._computing.compile
        cut.parallelize(builders, self.modules, self._row, is_compiled=is_compiled)
        self.place = both(self.place, heads_of(self._row, cut))
        self.drawing = functools.partial(drawn_in_part, self.place)

    def extend(self, x: Tensor, context: LayerContext) -> Tensor:
        self._row.begin(1)  # a few tokens are not split by positions
        return super().extend(x, context)

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        region = self._row
        region.begin(x.shape[1])
        if self.stage_index > 0:
            x = split(region, x)
        x = super().run(key, x, context)
        return x if self._has_head else join(region, x)

    def _of_pass(self, context: LayerContext) -> LayerContext:
        context = super()._of_pass(context)
        if context.fixed is None or not self._row.is_split:
            return context
        return dataclasses.replace(context, fixed=self._row.slice(context.fixed))

    @contextlib.contextmanager
    def evaluating(self, *, is_whole_batch: bool, wants_outputs: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._has_head and wants_outputs:
                whole = mark_of(self._computing.compile)(
                    lambda _, __, logits: gather_last(self._row, self._vocab_size, logits)
                )
                hook = self.modules[-1].register_forward_hook(whole)
                stack.callback(hook.remove)
            stack.enter_context(
                super().evaluating(is_whole_batch=is_whole_batch, wants_outputs=wants_outputs)
            )
            yield
