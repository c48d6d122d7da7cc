"""The weights that a run began from, on one machine; implements `swarm.ports.InitialWeights`."""

from __future__ import annotations

import logging
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from swarmnet.errors import ProtocolViolation, SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.models.base import describe_parameters
from swarmnet.training.models.model_folder import open_weights
from swarmnet.training.models.registry import (
    model_plan,
    shard_parameters,
    split_stages,
    stage_shards,
)
from swarmnet.training.models.source_weights import SourceWeights, shard_hash
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.models")

HASH_BYTES = 32


class ModelWeights:
    """Initial shards by their hashes, from a model's folder where this machine has it."""

    def __init__(self, spec: RunSpec, hashes: bytes, folder: Path | None) -> None:
        """`hashes`: the run's file of them. `folder`: of the model; None where it is not here.

        Raises:
            SpecError: the hashes are not those of the run's shards, or the folder is not of its
                model.
        """
        plan = model_plan(spec)
        self._stages = [
            describe_parameters(layers) for layers in split_stages(plan, spec.pipeline.num_stages)
        ]
        size = shard_parameters(spec, plan)
        num_stages = spec.pipeline.num_stages
        self._sizes = [stage_shards(plan, num_stages, k, size) for k in range(num_stages)]
        self._first = [0, *accumulate(len(sizes) for sizes in self._sizes)]
        self._hashes = hashes
        if len(hashes) != HASH_BYTES * self._first[-1]:
            raise SpecError("the list of the run's initial shards has another length than the run")
        self._source: SourceWeights | None = None
        if folder is not None:
            self._source = open_weights(folder, spec.model.config, self._stages)
        self.is_here = folder is not None
        self._shard = lru_cache(maxsize=1)(self._read)

    def shard(self, stage_index: int, shard_index: int) -> Array | None:
        if self._source is None or not self._has(stage_index, shard_index):
            return None
        return self._shard(stage_index, shard_index)

    def is_right(self, stage_index: int, shard_index: int, values: Array) -> bool:
        if not self._has(stage_index, shard_index):
            return False
        try:
            return shard_hash(to_tensor(values)) == self._hash(stage_index, shard_index)
        except ProtocolViolation:
            return False

    def _has(self, stage_index: int, shard_index: int) -> bool:
        known = 0 <= stage_index < len(self._sizes)
        return known and 0 <= shard_index < len(self._sizes[stage_index])

    def _hash(self, stage_index: int, shard_index: int) -> bytes:
        at = HASH_BYTES * (self._first[stage_index] + shard_index)
        return self._hashes[at : at + HASH_BYTES]

    def _read(self, stage_index: int, shard_index: int) -> Array | None:
        assert self._source is not None
        sizes = self._sizes[stage_index]
        start = sum(sizes[:shard_index])
        try:
            values = self._source.flat(self._stages[stage_index], start, start + sizes[shard_index])
        except SpecError as error:
            log.warning("%s", error)
            self.is_here = False
            return None
        if shard_hash(values) != self._hash(stage_index, shard_index):
            log.warning(
                "%s: its weights are not those that this run began from; they are not used",
                self._source.folder,
            )
            self.is_here = False
            return None
        return from_tensor(values)
