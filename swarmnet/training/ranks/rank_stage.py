"""What one rank has of a stage that several ranks of a machine compute together.

The canonical vectors (parameters, gradients) lie in memory that all ranks map, in the same order as
in a stage of one rank: shards, digests and checkpoints do not know how many ranks there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swarmnet.training.models.base import LayerBuilder, ModelPlan
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.ranks.local_group import SharedFloats
from swarmnet.training.stage import TorchStage


class RankLayers(StageLayers):
    """The layers of one rank. How they hold their part of the parameters, subclasses say."""

    generates = False
    overlaps_rounds = False

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        shared: SharedFloats,
        rank: int,
        **options: Any,
    ) -> None:
        """
        Args:
            plan: of the model, with the loss that this rank computes.
            builders: of the stage's layers, whole.
            shared: fp32 memory that all ranks map: parameters, gradients, then what a subclass has.
            rank: of this process.
            options: of `StageLayers`.
        """
        self.shared = shared
        self._rank = rank
        super().__init__(plan, builders, **options)

    @property
    def adds_in_shared_memory(self) -> bool:
        """Passes add gradients to the shared memory itself: `store_gradients` has nothing to do."""
        return False

    def fetch_parameters(self) -> None:
        """Brings parameters from the shared memory to what this rank computes with. Gradients
        become zero."""
        raise NotImplementedError

    def store_gradients(self) -> None:
        """Brings gradients from what this rank computes with to the shared memory."""
        raise NotImplementedError

    def add_slots(self) -> None:
        """At rank 0: adds what the other ranks have of the same gradient to the canonical one."""

    def clear_slots(self) -> None:
        """At rank 0: sets to zero what lies behind parameters and gradients."""
        self.shared.values[2 * self.num_parameters :].zero_()

    def _build(self, builder: LayerBuilder) -> nn.Module:
        if self._rank == 0:
            return super()._build(builder)
        with torch.device("meta"):  # weights come from the shared memory
            return builder.build()


class RankStage(TorchStage):
    """A stage at one rank. All ranks must call `forward`, `backward`, `forward_backward`,
    `retract`, `evaluate` and `finish_round` alike."""

    layers: RankLayers

    def fetch_parameters(self) -> None:
        """As `RankLayers.fetch_parameters`."""
        self.layers.fetch_parameters()

    def store_gradients(self) -> None:
        """As `RankLayers.store_gradients`."""
        self.layers.store_gradients()

    def finish_round(self) -> None:
        """At ranks other than 0, which writes the canonical vectors."""
        self.kept.keep_round(None)
        self.fetch_parameters()
