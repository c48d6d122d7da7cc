"""A stage whose passes another process computes: on a device of its own, whose errors are not those
of the peer, or on ranks.

The canonical vectors (parameters, gradients) lie in memory that both processes map, in the same
order as in a stage of one process. So updates, digests and checkpoints are made here, and see
nothing of it. What comes and goes is checked here by its form, and by its values there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

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
from swarmnet.training.memory.device_copies import DeviceCopies, copies_of
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    TensorSpec,
    describe_parameters,
)
from swarmnet.training.passes.boundary import Boundary
from swarmnet.training.passes.host_side import HostSide
from swarmnet.training.processes.sessions import SessionNumbers
from swarmnet.training.processes.shared_memory import SharedFloats
from swarmnet.training.processes.stage_process import StageProcess
from swarmnet.wire import Array


class ComputesElsewhere:
    """Implements `Computes`: another process does, with the one pair of vectors that it maps."""

    overlaps_rounds = False
    device, dtype = torch.device("cpu"), torch.float32
    update_copies: DeviceCopies | None = None

    def __init__(self, shown: Vectors) -> None:
        self.shown = shown

    def show(self, vectors: Vectors) -> None:
        assert vectors is self.shown, "there is one pair"

    def refresh_copies(self) -> None:
        """It does so when the round is over."""


class ApartStage(HostSide):
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
        told, _arrays = process.call("build", about)
        self.max_in_flight: int = told["max_in_flight"]
        self.free_bytes: float = told["free_bytes"]
        """Of the memory that the process computes with, when the round began."""
        self.line: str = told["line"]
        """How the process computes, for people."""
        ranges = describe_parameters(layers)
        total = ranges[-1].stop
        self._shared = shared = SharedFloats(told["num_elements"], process.take_descriptor())
        values, gradients = shared.values[:total], shared.values[total : 2 * total]
        computes = ComputesElsewhere(Vectors(values, gradients, shard_size))
        boundary = Boundary(
            plan,
            inputs or plan.inputs,
            TensorSpec("float32", layers[-1].output_shape),
            stage_index=stage_index,
            microbatch=microbatch,
            dtype=computes.dtype,
            copies=copies_of(computes.device),
            refusals=None,
            codec=codec,
            document_mask=document_mask,
        )
        super().__init__(computes, boundary, layers, ranges, reuses_gradient=reuses_gradient)
        self.vectors.make_whole = self._collect
        self.base = ApartBase(process, told["base"])
        self.generation = (
            None if told["generation"] is None else ApartGeneration(process, told["generation"])
        )
        self._is_whole = True

    # ---- microbatches -----------------------------------------------------------------------

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
        self._numbers = SessionNumbers()

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
        about = {
            "session": self._numbers.of(session),
            "position": position,
            "is_copied": is_copied,
            "num_logits": num_logits,
            "exact": exact,
        }
        return tuple(self._process.call("text_extend", about, [inputs])[1])

    def drop(self, session: Hashable) -> None:
        number = self._numbers.drop(session)
        if number is not None:
            self._process.later("text_drop", {"session": number})
