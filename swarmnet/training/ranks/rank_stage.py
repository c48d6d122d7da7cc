"""A stage that several ranks of a machine compute together: what each of them has, and how rank 0
leads. It tells the others each call before it makes it. For tensor parallelism and for fully
sharded stages alike.

The canonical vectors (parameters, gradients) lie in memory that all ranks map, in the same order as
in a stage of one rank: shards, digests and checkpoints do not know how many ranks there are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from swarmnet.batch import Documents
from swarmnet.errors import NotReady, SwarmnetError, one_line
from swarmnet.ports import LossResult, Passage, StageResult, StepKey, undivided
from swarmnet.training.computing import Computing
from swarmnet.training.models.base import LayerBuilder, ModelPlan
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.ranks.local_group import LocalGroup, SharedFloats
from swarmnet.training.stage import TorchStage
from swarmnet.wire import Array

T = TypeVar("T")

OF_LAYERS = ("fetch_parameters", "store_gradients")
"""Calls of other ranks that are for the layers of their stage."""


class RankLayers(StageLayers):
    """The layers of one rank. How they hold their part of the parameters, subclasses say."""

    generates = False
    may_keep_less = False
    routes = False
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

    def finish_round(self) -> None:
        """At ranks other than 0, which writes the canonical vectors."""
        self.kept.keep_round(None)
        self.layers.fetch_parameters()


class LeadStage(RankStage):
    """Rank 0's stage: implements `ports.Stage` for the swarm, and tells the other ranks each
    call before it makes it. All that the swarm sees of it is a stage. Its passages are undivided:
    all ranks refuse a microbatch, or none, before the next call."""

    def __init__(self, *arguments: Any, group: LocalGroup, **options: Any) -> None:
        """`group`: of the ranks; the rest as for `TorchStage`. Raises `RankLost` where a rank is
        gone."""
        self._group = group
        self._lock = threading.Lock()
        self._forgotten: deque[StepKey] = deque()
        self._is_whole = True
        super().__init__(*arguments, **options)
        self.vectors.make_whole = self._collect
        about = {"stage": self.stage_index, "computing": self.computing.values()}
        group.send("build", about, fd=self.layers.shared.fd)
        group.join()
        self.layers.shared.close_fd()

    def forward_pass(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,  # for routers, which ranks do not train
    ) -> Passage[Array]:
        work = super().forward_pass(key, inputs, documents)
        values = {"key": list(key), "documents": documents}
        return undivided(lambda: self._together("forward", work, values, (inputs,)))

    def backward_pass(self, key: StepKey, grad_outputs: Array) -> Passage[Array | None]:
        work, values = super().backward_pass(key, grad_outputs), {"key": list(key)}
        return undivided(
            lambda: self._together("backward", work, values, (grad_outputs,), adds=True)
        )

    def loss_pass(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> Passage[LossResult]:
        work = super().loss_pass(key, inputs, targets, documents)
        values = {"key": list(key), "documents": documents}
        arrays = (inputs, targets)
        return undivided(
            lambda: self._together("forward_backward", work, values, arrays, adds=True)
        )

    def recompute_pass(self, *_: Any, **__: Any) -> Passage[StageResult]:
        raise NotReady("a stage on several ranks computes no microbatch of others again")

    def retract(self, key: StepKey) -> None:
        work = partial(super().retract, key)
        self._together("retract", work, {"key": list(key)}, adds=True)

    def evaluate(
        self,
        inputs: Array,
        targets: Array | None,
        documents: Documents | None = None,
        round_index: int | None = None,  # no round is open ahead where there are ranks
    ) -> Array | LossResult:
        work = partial(super().evaluate, inputs, targets, documents)
        arrays = (inputs,) if targets is None else (inputs, targets)
        return self._together("evaluate", work, {"documents": documents}, arrays)

    def forget(self, key: StepKey) -> None:
        """From any thread. While a call runs it waits for the end of it, so that it comes between
        the same two calls at all ranks."""
        self._forgotten.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_all()
            finally:
                self._lock.release()

    def finish_round(self) -> None:
        with self._lock:
            self._group.join()  # nobody computes with the parameters that change now
            self._forgotten.clear()
            TorchStage.finish_round(self)
            self.layers.clear_slots()
            self._group.send("finish_round")
            self.layers.fetch_parameters()
            self._is_whole = True

    # ---- inside -----------------------------------------------------------------------------

    def _together(
        self,
        call: str,
        work: Callable[[], T],
        values: dict[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        *,
        adds: bool = False,
    ) -> T:
        with self._lock:
            self._forget_all()
            number = self._group.send(call, values, arrays)
            is_refused = False
            if adds:
                self._is_whole = False
            try:
                result = work()
            except (SwarmnetError, ValueError):
                is_refused = True
                raise
            except RuntimeError as error:  # of a collective: another rank is gone
                self._group.fail(f"rank 0: {one_line(error)}")
                self._group.join()
                raise
            finally:
                self._group.report(number, is_refused)
            self._forget_all()
            return result

    def _forget_all(self) -> None:
        """With the lock held."""
        keys = []
        while self._forgotten:
            keys.append(self._forgotten.popleft())
        if keys and self._group.failure is None:
            self._group.send("forget", {"keys": [list(key) for key in keys]})
        for key in keys:
            self.kept.forget(key)

    def _collect(self) -> None:
        """Makes the canonical gradient whole."""
        if self._is_whole:
            return
        with self._lock:
            if not self.layers.adds_in_shared_memory:
                self._group.send("store_gradients")
                self.layers.store_gradients()
            self._group.join()
            self.layers.add_slots()
            self._is_whole = True


def following(
    build_rank: Callable[[int, Computing, int | None], TorchStage],
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0; `build_rank(stage_index, computing, fd)` makes its
    `RankStage`."""
    stage: RankStage | None = None

    def build(values: dict[str, Any], _: list[Array], fd: int | None) -> None:
        nonlocal stage
        stage = None  # its memory first
        built = build_rank(values["stage"], Computing(**values["computing"]), fd)
        assert isinstance(built, RankStage)
        stage = built

    def forget(values: dict[str, Any], _: list[Array], __: int | None) -> None:
        assert stage is not None
        for key in values["keys"]:
            stage.forget(tuple(key))

    def call(name: str) -> Callable[..., None]:
        def run(values: dict[str, Any], arrays: list[Any], _: int | None) -> None:
            if name == "evaluate" and len(arrays) == 1:
                arrays = [*arrays, None]
            keys = [tuple(values["key"])] if "key" in values else []
            beside = [values["documents"]] if "documents" in values else []
            assert stage is not None
            of = stage.layers if name in OF_LAYERS else stage
            getattr(of, name)(*keys, *arrays, *beside)

        return run

    names = (
        "forward",
        "backward",
        "forward_backward",
        "retract",
        "evaluate",
        "finish_round",
        *OF_LAYERS,
    )
    return {"build": build, "forget": forget} | {name: call(name) for name in names}
