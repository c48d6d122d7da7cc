"""A stage whose passes another process computes: on a device of its own, whose errors are not those
of the peer, or on ranks.

The canonical vectors (parameters, gradients) lie in memory that both processes map, in the same
order as in a stage of one process. So updates, digests and checkpoints are made here, and see
nothing of it. What comes and goes is checked here by its form, and by its values there.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from swarmnet.batch import Documents
from swarmnet.ports import (
    LossResult,
    Passage,
    RouterReport,
    StageResult,
    StepKey,
    undivided,
)
from swarmnet.protocol.codecs import BoundaryCodec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.memory.device_copies import copies_of
from swarmnet.training.memory.parameter_copies import ParameterCopies
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    TensorSpec,
    describe_parameters,
)
from swarmnet.training.passes.boundary import Boundary
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.passes.recomputation import Recomputation
from swarmnet.training.passes.round_vectors import RoundVectors
from swarmnet.training.processes.shared_memory import SharedFloats
from swarmnet.training.processes.stage_process import StageProcess
from swarmnet.wire import Array

CPU = torch.device("cpu")


class LayersElsewhere(StageLayers):
    """What the vectors of a stage need of layers that are in another process."""

    overlaps_rounds = False

    def __init__(  # nothing is built here
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        stage_index: int,
        num_stages: int,
        shown: Vectors,
    ) -> None:
        self.plan, self.builders = plan, builders
        self.device, self.dtype = CPU, torch.float32
        self.stage_index, self.is_last = stage_index, stage_index == num_stages - 1
        self.copies, self.update_copies = copies_of(CPU), None
        self.parameter_copies = ParameterCopies(at_once=True)
        self.shown = shown

    def show(self, vectors: Vectors) -> None:
        self.shown = vectors


class ApartStage:
    """Implements `ports.Stage`, of a stage that `process` computes. Passages are undivided: the
    other process does the host's part of them too."""

    can_open_ahead = False
    """There is one pair of vectors, as with ranks."""

    def __init__(
        self,
        plan: ModelPlan,
        layers: tuple[LayerBuilder, ...],
        *,
        process: StageProcess,
        about: dict[str, Any],
        stage_index: int,
        num_stages: int,
        shard_size: int | Sequence[int],
        microbatch: int,
        tied_shards: int,
        codec: BoundaryCodec,
        inputs: TensorSpec | None,
        document_mask: bool,
        reuses_gradient: bool,
        **_: Any,
    ) -> None:
        """Has the process build the stage, for which `about` tells it all that it needs. The rest
        as of `TorchStage`, whose further arguments are for that process. Raises what it raises
        there, or `StageLost`."""
        self.process = process
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_last = stage_index == num_stages - 1
        self.tied_shards = tied_shards
        self.routed: tuple[RouterReport, ...] = ()
        self.parameter_ranges = describe_parameters(layers)
        self.num_parameters = total = self.parameter_ranges[-1].stop
        self.update_copies = None
        """Updates are made on the host."""
        told, _arrays = process.call("build", about)
        self.max_in_flight: int = told["max_in_flight"]
        self.free_bytes: float = told["free_bytes"]
        """Of the memory that the process computes with, when the round began."""
        self.line: str = told["line"]
        """How the process computes, for people."""
        shared = SharedFloats(told["num_elements"], process.take_descriptor())
        values, gradients = shared.values[:total], shared.values[total : 2 * total]
        self._shared = shared
        vectors = Vectors(values, gradients, shard_size)
        self.layers = LayersElsewhere(plan, layers, stage_index, num_stages, vectors)
        self.vectors = RoundVectors(self.layers, reuses_gradient=reuses_gradient)
        self.vectors.make_whole = self._collect
        self.shard_sizes = self.vectors.shard_sizes
        self.base = ApartBase(process, told["base"])
        self.generation = (
            None if told["generation"] is None else ApartGeneration(process, told["generation"])
        )
        self._is_whole = True
        boundary = Boundary(
            plan,
            inputs or plan.inputs,
            TensorSpec("float32", layers[-1].output_shape),
            stage_index=stage_index,
            microbatch=microbatch,
            dtype=torch.float32,
            copies=self.layers.copies,
            refusals=None,
            codec=codec,
            document_mask=document_mask,
        )
        self._boundary = boundary
        self._recomputation = Recomputation(self.layers, boundary, self.vectors, None)

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the parameters by name, until `finish_round`."""
        flat = self.vectors.present.parameters
        return {r.name: r.part_of(flat) for r in self.parameter_ranges}

    # ---- microbatches -----------------------------------------------------------------------

    def check(self, inputs: Array, targets: Array, documents: Documents | None = None) -> None:
        self._boundary.check_inputs(inputs)
        self._boundary.check_targets(targets)
        self._boundary.check_documents(inputs, documents)

    def check_gradient(self, grad_outputs: Array) -> None:
        self._boundary.check_gradient(grad_outputs)

    def forward_pass(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,
    ) -> Passage[Array]:
        arrays = [inputs] if targets is None else [inputs, targets]
        about = {"key": key, "documents": documents}

        def work() -> Array:
            return self._call("forward", about, arrays)[1][0]

        return undivided(work)

    def backward_pass(self, key: StepKey, grad_outputs: Array) -> Passage[Array | None]:
        def work() -> Array | None:
            _, found = self._call("backward", {"key": key}, [grad_outputs], adds=True)
            return found[0] if found else None

        return undivided(work)

    def loss_pass(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> Passage[LossResult]:
        about = {"key": key, "documents": documents}

        def work() -> LossResult:
            told, found = self._call("forward_backward", about, [inputs, targets], adds=True)
            grad = found[0] if found else None
            return LossResult(told["loss_sum"], told["num_tokens"], grad)

        return undivided(work)

    def recompute_pass(
        self,
        key: StepKey,
        inputs: Array,
        targets: Array,
        grad_outputs: Array | None,
        documents: Documents | None = None,
    ) -> Passage[StageResult]:
        arrays = [inputs, targets, *([] if grad_outputs is None else [grad_outputs])]
        about = {"key": key, "documents": documents}

        def work() -> StageResult:
            told, found = self._call("recompute", about, arrays)
            outputs = found.pop(0) if told["has_outputs"] else None
            grad = found.pop(0) if found else None
            return StageResult(outputs, grad, told["loss_sum"], told["num_tokens"])

        return undivided(work)

    def difference(self, ours: StageResult, theirs: StageResult) -> float:
        return self._recomputation.difference(ours, theirs)

    def retract(self, key: StepKey) -> None:
        self._call("retract", {"key": key}, adds=True)

    def forget(self, key: StepKey) -> None:
        self.process.later("forget", {"key": key})

    def evaluate(
        self,
        inputs: Array,
        targets: Array | None,
        documents: Documents | None = None,
        round_index: int | None = None,  # no round is open ahead here
    ) -> Array | LossResult:
        arrays = [inputs] if targets is None else [inputs, targets]
        told, found = self._call("evaluate", {"documents": documents}, arrays)
        return found[0] if found else LossResult(told["loss_sum"], told["num_tokens"])

    # ---- shards -----------------------------------------------------------------------------

    def gradient_shard(self, shard_index: int) -> Array:
        return from_tensor(self.vectors.gradient_shard(shard_index))

    def copy_gradient(self, shard_index: int) -> Array:
        return from_tensor(self.vectors.copy_gradient(shard_index))

    def parameter_shard(self, shard_index: int) -> Array:
        return from_tensor(self.vectors.present.parameter_shards[shard_index])

    def digest(self, shard_index: int) -> bytes:
        return xxhash.xxh3_64_digest(self.parameter_shard(shard_index).data)

    def stage_parameters(self, shard_index: int, values: Array) -> None:
        self.vectors.put_aside(shard_index, values)

    def coming_shard(self, shard_index: int) -> Array | None:
        coming = self.vectors.coming_shard(shard_index)
        return None if coming is None else from_tensor(coming)

    # ---- rounds -----------------------------------------------------------------------------

    def finish_round(self) -> None:
        self.vectors.finish_round()
        told, _ = self._call("finish_round")
        self.free_bytes = told["free_bytes"]
        self.routed = tuple(
            RouterReport(layer, tuple(shares), *rest) for layer, shares, *rest in told["routed"]
        )
        self._is_whole = True

    def open_ahead(self, round_index: int) -> None:
        raise MemoryError("a stage in a process of its own has one pair of vectors")

    def drop_ahead(self) -> None:
        """No round is open ahead here."""

    # ---- inside -----------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        values: dict[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        *,
        adds: bool = False,
    ) -> tuple[dict[str, Any], list[Array]]:
        if adds:
            self._is_whole = False
        told, found = self.process.call(name, values, arrays)
        self.max_in_flight = told["max_in_flight"]
        return told, found

    def _collect(self) -> None:
        """Has the whole gradient where both see it."""
        if not self._is_whole:
            self._call("collect")
            self._is_whole = True


class ApartBase:
    """Implements `ports.Base`."""

    def __init__(self, process: StageProcess, told: dict[str, Any]) -> None:
        self.shard_sizes: tuple[int, ...] = tuple(told["shard_sizes"])
        self.missing: list[int] = told["missing"]
        self._process = process

    def put(self, shard_index: int, values: Array) -> None:
        told, _ = self._process.call("put_base", {"shard": shard_index}, [values])
        self.missing = told["missing"]


class ApartGeneration:
    """Implements `ports.Generation`."""

    def __init__(self, process: StageProcess, told: dict[str, int]) -> None:
        self.pass_tokens, self.max_tokens = told["pass_tokens"], told["max_tokens"]
        self.copy_bytes, self.token_bytes = told["copy_bytes"], told["token_bytes"]
        self.text_bytes = told["text_bytes"]
        self._process = process
        self._numbers: dict[Hashable, int] = {}
        """By session, its name in the other process."""
        self._next = itertools.count()

    def copy(self, shards: Sequence[Array]) -> None:
        for shard in shards:  # one by one: the memory between the two is no larger than a shard
            self._process.call("text_shard", {}, [shard])
        self._process.call("text_copy")

    def drop_copy(self) -> None:
        self._process.later("text_drop_copy", {})

    def extend(
        self,
        session: Hashable,
        inputs: Array,
        position: int,
        *,
        is_copied: bool,
        num_logits: int,
        exact: bool = False,
    ) -> tuple[Array, ...]:
        number = self._numbers.get(session)
        if number is None:
            number = self._numbers[session] = next(self._next)
        about = {
            "session": number,
            "position": position,
            "is_copied": is_copied,
            "num_logits": num_logits,
            "exact": exact,
        }
        return tuple(self._process.call("text_extend", about, [inputs])[1])

    def drop(self, session: Hashable) -> None:
        number = self._numbers.pop(session, None)
        if number is not None:
            self._process.later("text_drop", {"session": number})
