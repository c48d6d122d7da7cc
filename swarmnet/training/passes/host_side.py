"""What a stage is on the host, wherever its passes are computed: the forms of what comes and goes,
and the shards of its canonical vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.batch import Documents
from swarmnet.ports import StageResult
from swarmnet.training.late_arrays import array_of
from swarmnet.training.models.base import LayerBuilder, ParameterRange
from swarmnet.training.passes.boundary import Boundary
from swarmnet.training.passes.recomputation import difference
from swarmnet.training.passes.round_vectors import Computes, RoundVectors
from swarmnet.wire import Array


class HostSide:
    """The part of `ports.Stage` that takes no pass."""

    def __init__(
        self,
        computes: Computes,
        boundary: Boundary,
        builders: tuple[LayerBuilder, ...],
        ranges: tuple[ParameterRange, ...],
        *,
        reuses_gradient: bool,
    ) -> None:
        """
        Args:
            computes: with the vectors.
            boundary: of the stage.
            builders: of its layers.
            ranges: of their parameters.
            reuses_gradient: as of `RoundVectors`.
        """
        self._boundary = boundary
        self.builders = builders
        self.device: torch.device = computes.device
        """Where passes compute, as far as this process can tell."""
        self.parameter_ranges = ranges
        self.num_parameters = ranges[-1].stop
        self.update_copies = computes.update_copies
        """To the device where updates are made there; None: they are made on the host."""
        self.is_on_host = computes.update_copies is None
        self.vectors = RoundVectors(computes, reuses_gradient=reuses_gradient)
        self.shard_sizes = self.vectors.shard_sizes

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the parameters by name (Hugging Face's for a Llama), until `finish_round`."""
        flat = self.vectors.present.parameters
        return {r.name: r.part_of(flat) for r in self.parameter_ranges}

    # ---- microbatches -----------------------------------------------------------------------

    def check(self, inputs: Array, targets: Array, documents: Documents | None = None) -> None:
        self._boundary.check_inputs(inputs)
        self._boundary.check_targets(targets)
        self._boundary.check_documents(inputs, documents)

    def check_gradient(self, grad_outputs: Array) -> None:
        self._boundary.check_gradient(grad_outputs)

    @property
    def is_owing(self) -> bool:
        """As the port says; so the next."""
        return False

    def settle(self) -> None:
        pass

    def difference(self, ours: StageResult, theirs: StageResult) -> float:
        return difference(self._boundary, ours, theirs)

    # ---- shards -----------------------------------------------------------------------------

    def gradient_shard(self, shard_index: int) -> Array:
        return array_of(self.vectors.gradient_shard(shard_index), self.update_copies)

    def copy_gradient(self, shard_index: int) -> Array:
        return array_of(self.vectors.copy_gradient(shard_index), self.update_copies)

    def parameter_shard(self, shard_index: int) -> Array:
        return array_of(self.vectors.present.parameter_shards[shard_index], self.update_copies)

    def digest(self, shard_index: int) -> bytes:
        return self.vectors.digest(shard_index)

    def stage_parameters(self, shard_index: int, values: Array) -> None:
        self.vectors.put_aside(shard_index, values)

    def coming_shard(self, shard_index: int) -> Array | None:
        coming = self.vectors.coming_shard(shard_index)
        return None if coming is None else array_of(coming, self.update_copies)

    def coming_digest(self, shard_index: int) -> bytes:
        return self.vectors.coming_digest(shard_index)
