"""A stage that several ranks of a machine compute together: what each of them has, and how rank 0
leads. It tells the others each call before it makes it. For tensor parallelism and for fully
sharded stages alike.

The canonical vectors (parameters, gradients) lie in memory that all ranks map, in the same order as
in a stage of one rank: shards, digests and checkpoints do not know how many ranks there are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from swarmnet.batch import Documents
from swarmnet.errors import NotReady, SwarmnetError, one_line
from swarmnet.ports import Base, LossResult, Passage, StageResult, StepKey, undivided
from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.models.base import LayerBuilder, ModelPlan
from swarmnet.training.passes.generation import StageGeneration, fill
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.processes.sessions import SessionNumbers
from swarmnet.training.processes.shared_memory import SharedFloats
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

T = TypeVar("T")

OF_LAYERS = ("fetch_parameters", "store_gradients")
"""Calls of other ranks that are for the layers of their stage."""


OF_TEXTS = ("copy", "take", "drop_copy", "extend", "drop")
"""Those for texts that the model writes."""


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
    def shares_copies(self) -> bool:
        """A copy of the parameters lies in memory that all ranks map, as these do."""
        return False

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
            module = builder.build()
        if any(buffer.is_meta for buffer in module.buffers()):
            # What a layer has beside is not there: it is built once more, and that is kept of it.
            built = super()._build(builder)
            for name, buffer in built.named_buffers():
                _set_buffer(module, name, buffer)
        return module


class RankStage(TorchStage):
    """A stage at one rank. All ranks must call `forward`, `backward`, `forward_backward`,
    `retract`, `evaluate` and `finish_round` alike."""

    layers: RankLayers

    def finish_round(self) -> None:
        """At ranks other than 0, which writes the canonical vectors."""
        self.kept.keep_round(None)
        self.routers.finish(None)
        self.layers.fetch_parameters()


class LeadBase:
    """Implements `ports.Base` at rank 0. Each rank has its part of it, from the same values."""

    def __init__(self, inner: Base, together: Callable[..., Any]) -> None:
        self.shard_sizes = inner.shard_sizes
        self._inner = inner
        self._together = together

    @property
    def missing(self) -> Sequence[int]:
        return self._inner.missing

    def put(self, shard_index: int, values: Array) -> None:
        work = partial(self._inner.put, shard_index, values)
        self._together("put_base", work, {"shard": shard_index}, (values,))


class LeadGeneration:
    """Implements `ports.Generation` at rank 0. All ranks keep their part of the keys and values, by
    a number for each session."""

    def __init__(
        self,
        inner: StageGeneration,
        together: Callable[..., Any],
        later: Callable[..., None],
        layers: RankLayers,
    ) -> None:
        """`together`, `later`: tell the other ranks a call, and make it here. `layers`: of this
        rank."""
        self.pass_tokens, self.max_tokens = inner.pass_tokens, inner.max_tokens
        self.copy_bytes, self.token_bytes = inner.copy_bytes, inner.token_bytes
        self.text_bytes = inner.text_bytes
        self._inner = inner
        self._together = together
        self._later = later
        self._layers = layers
        self._numbers = SessionNumbers()

    def copy(self, shards: Sequence[Array]) -> None:
        if not self._layers.shares_copies:
            self._together("text_copy", partial(self._inner.copy, shards), {}, shards)
            return
        shared = shared_copy(self._layers)
        flat = values_of(shared, self._layers)
        fill(flat, shards)  # before any rank reads it
        self._together("text_take", partial(self._inner.take, flat), fd=shared.fd)

    def drop_copy(self) -> None:
        self._later("text_drop_copy", {}, self._inner.drop_copy)

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
        number = self._numbers.of(session)
        about: dict[str, Any] = {
            "position": position,
            "is_copied": is_copied,
            "num_logits": num_logits,
            "exact": exact,
        }
        work = partial(self._inner.extend, number, inputs, **about)
        result: tuple[Array, ...] = self._together(
            "text_extend", work, {"session": [number], **about}, (inputs,)
        )
        return result

    def drop(self, session: Hashable) -> None:
        number = self._numbers.drop(session)
        if number is not None:
            work = partial(self._inner.drop, number)
            self._later("text_drop", {"session": [number]}, work)


class LeadStage(RankStage):
    """Rank 0's stage: implements `ports.Stage` for the swarm, and tells the other ranks each
    call before it makes it. All that the swarm sees of it is a stage. Its passages are undivided:
    all ranks refuse a microbatch, or none, before the next call."""

    def __init__(self, *arguments: Any, group: LocalGroup, **options: Any) -> None:
        """`group`: of the ranks; the rest as for `TorchStage`. Raises `RankLost` where a rank is
        gone."""
        self._group = group
        self._lock = threading.Lock()
        self._put_off: deque[tuple[str, dict[str, Any], Callable[[], None]]] = deque()
        self._is_whole = True
        super().__init__(*arguments, **options)
        self.vectors.make_whole = self._collect
        self.base = LeadBase(self.layers.base, self._together)
        if isinstance(self.generation, StageGeneration):
            about_texts = self._together, self._later, self.layers
            self.generation = LeadGeneration(self.generation, *about_texts)
        about = {"stage": self.stage_index, "computing": self.computing.values()}
        group.send("build", about, fd=self.layers.shared.fd)
        group.join()

    def forward_pass(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,
    ) -> Passage[Array]:
        work = super().forward_pass(key, inputs, documents, targets)
        values = {"key": list(key), "documents": documents}
        arrays = (inputs,) if targets is None or not self.layers.routes else (inputs, targets)
        return undivided(lambda: self._together("forward", work, values, arrays))

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
        self._later("forget", {"key": list(key)}, partial(self.kept.forget, key))

    def finish_round(self) -> None:
        with self._lock:
            self._group.join()  # nobody computes with the parameters that change now
            self._do_put_off()
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
        fd: int | None = None,
    ) -> T:
        with self._lock:
            self._do_put_off()
            number = self._group.send(call, values, arrays, fd)
            is_refused = False
            if adds:
                self._is_whole = False
            try:
                with self._group.at_call():
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
            self._do_put_off()
            return result

    def _later(self, call: str, values: dict[str, Any], work: Callable[[], None]) -> None:
        """What changes no result, from any thread. While a call runs it waits for the end of it,
        so that it comes between the same two calls at all ranks."""
        self._put_off.append((call, values, work))
        if self._lock.acquire(blocking=False):
            try:
                self._do_put_off()
            finally:
                self._lock.release()

    def _do_put_off(self) -> None:
        """With the lock held."""
        while self._put_off:
            call, values, work = self._put_off.popleft()
            if self._group.failure is None:
                self._group.send(call, values)
            work()

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


def lead(
    spec: RunSpec,
    stage_index: int,
    group: LocalGroup,
    computing: Computing | None,
    layers: Callable[..., RankLayers],
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had. `layers`: makes rank 0's,
    with the arguments of `StageLayers`. Raises `RankLost` where a rank is gone."""
    make = partial(LeadStage, group=group, make_layers=layers)
    stage = build_stage(spec, stage_index, device=group.devices[0], computing=computing, make=make)
    assert isinstance(stage, LeadStage)
    return stage


def follow_lead(
    spec: RunSpec, device: torch.device, layers: Callable[..., RankLayers]
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0. `layers`: makes its own, with the arguments of
    `StageLayers` and `fd`, of the shared memory."""

    def build(stage_index: int, computing: Computing, fd: int | None) -> TorchStage:
        make = partial(RankStage, make_layers=partial(layers, fd=fd))
        return build_stage(spec, stage_index, device=device, computing=computing, make=make)

    return following(build)


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

    def call(name: str) -> Callable[..., None]:
        def run(values: dict[str, Any], arrays: list[Any], _: int | None) -> None:
            if name == "evaluate" and len(arrays) == 1:
                arrays = [*arrays, None]
            keys = [tuple(values["key"])] if "key" in values else []
            beside = [values["documents"]] if "documents" in values else []
            if name == "forward":  # what routers are told comes last
                arrays, told = arrays[:1], arrays[1:]
                beside += told
            assert stage is not None
            of = stage.layers if name in OF_LAYERS else stage
            getattr(of, name)(*keys, *arrays, *beside)

        return run

    def put_base(values: dict[str, Any], arrays: list[Array], _: int | None) -> None:
        assert stage is not None
        stage.base.put(values["shard"], arrays[0])

    names = (
        "forward",
        "backward",
        "forward_backward",
        "retract",
        "forget",
        "evaluate",
        "finish_round",
        *OF_LAYERS,
    )

    def of_text(name: str) -> Callable[..., None]:
        def run(values: dict[str, Any], arrays: list[Any], fd: int | None) -> None:
            assert stage is not None
            assert isinstance(stage.generation, StageGeneration)
            if name == "copy":
                stage.generation.copy(arrays)
            elif name == "take":
                stage.generation.take(values_of(shared_copy(stage.layers, fd), stage.layers))
            else:
                getattr(stage.generation, name)(*values.pop("session", ()), *arrays, **values)

        return run

    special = {"build": build, "put_base": put_base}
    special |= {f"text_{name}": of_text(name) for name in OF_TEXTS}
    return special | {name: call(name) for name in names}


def shared_copy(layers: RankLayers, fd: int | None = None) -> SharedFloats:
    """Memory for a copy of the parameters. `fd`: as of `SharedFloats`."""
    num_bytes = layers.dtype.itemsize * layers.num_parameters
    return SharedFloats(-(-num_bytes // 4), fd)


def values_of(shared: SharedFloats, layers: RankLayers) -> Tensor:
    """The copy that lies there, in the dtype of the passes."""
    return shared.values.view(layers.dtype)[: layers.num_parameters]


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """To the device, what a layer has beside its parameters."""
    for name, buffer in list(module.named_buffers()):
        _set_buffer(module, name, buffer.to(device))


def _set_buffer(module: nn.Module, name: str, buffer: Tensor) -> None:
    within, _, own = name.rpartition(".")
    setattr(module.get_submodule(within), own, buffer)
