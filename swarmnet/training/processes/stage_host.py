"""A stage in a process of its own, on that process's side: does the peer's calls on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

import swarmnet.training.accelerators as accelerators
from swarmnet.errors import NotReady, SwarmnetError
from swarmnet.ports import LossResult
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.processes.children import ProcessLost
from swarmnet.training.processes.frames import Link
from swarmnet.training.processes.shared_memory import SharedFloats, Tray
from swarmnet.training.processes.stage_process import Result, error_values
from swarmnet.training.stage import TorchStage
from swarmnet.wire import Array

Build = Callable[[dict[str, Any]], tuple[TorchStage, str]]
"""Makes the stage that the peer has told, whose layers have `shared`; and the line that says how it
computes."""


class SharedLayers(StageLayers):
    """The layers of a stage on one device, with canonical vectors that the peer maps too."""

    overlaps_rounds = False
    shared: SharedFloats

    def _host_vectors(self, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.shared = SharedFloats(2 * total)
        return self.shared.values[:total], self.shared.values[total:]


class StageHost:
    """The stage, and the calls on it."""

    def __init__(self, build: Build, free_bytes: Callable[[], float]) -> None:
        """`free_bytes`: of the memory that the stage computes with."""
        self._build = build
        self._free_bytes = free_bytes
        self._stage: TorchStage | None = None
        self._shards: list[Array] = []
        """Of the copy that is to be kept for texts."""
        self.shared: SharedFloats | None = None
        self.calls: dict[str, Callable[..., Result | None]] = {
            "build": self._begin,
            "forward": self._forward,
            "backward": self._backward,
            "forward_backward": self._forward_backward,
            "recompute": self._recompute,
            "retract": lambda values, _: self.stage.retract(_key(values)),
            "forget": lambda values, _: self.stage.forget(_key(values)),
            "evaluate": self._evaluate,
            "collect": self._collect,
            "finish_round": self._finish_round,
            "put_base": self._put_base,
            "text_shard": lambda _, arrays: self._shards.extend(arrays),
            "text_copy": self._text_copy,
            "text_drop_copy": lambda _, __: self._generation.drop_copy(),
            "text_extend": self._text_extend,
            "text_drop": lambda values, _: self._generation.drop(values["session"]),
        }

    @property
    def stage(self) -> TorchStage:
        """Raises `NotReady` before it is built."""
        if self._stage is None:
            raise NotReady("no stage is built here")
        return self._stage

    def answer(self, call: str, values: dict[str, Any], arrays: list[Array]) -> Result:
        """What a call comes to. Raises what it raises."""
        told, found = self.calls[call](values, arrays) or ({}, [])
        return {"max_in_flight": self.stage.max_in_flight, **told}, found

    def is_mendable(self, error: BaseException) -> bool:
        """The peer may go on with the stage after it. An error of a GPU spoils all that comes after
        it in its process, and ranks of which one is lost are of no use."""
        if isinstance(error, (SwarmnetError, ValueError)):
            return not isinstance(error, ProcessLost)
        if not isinstance(error, RuntimeError) or self._stage is None:
            return False
        is_cpu = self._stage.layers.device.type == accelerators.CPU
        return is_cpu or accelerators.is_out_of_memory(error)

    # ---- calls ------------------------------------------------------------------------------

    def _begin(self, values: dict[str, Any], _: list[Array]) -> Result:
        stage, line = self._build(values)
        shared = getattr(stage.layers, "shared", None)
        assert isinstance(shared, SharedFloats), "its vectors are for two processes"
        self._stage, self.shared = stage, shared
        names = ("pass_tokens", "max_tokens", "copy_bytes", "token_bytes", "text_bytes")
        texts, base = stage.generation, stage.base
        about = {
            "line": line,
            "free_bytes": self._free_bytes(),
            "num_elements": shared.values.numel(),
            "base": {"shard_sizes": list(base.shard_sizes), "missing": list(base.missing)},
            "generation": None if texts is None else {n: getattr(texts, n) for n in names},
        }
        return about, []

    def _forward(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        inputs, targets = arrays[0], arrays[1] if len(arrays) > 1 else None
        return {}, [self.stage.forward(_key(values), inputs, values["documents"], targets)]

    def _backward(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        return {}, _some(self.stage.backward(_key(values), arrays[0]))

    def _forward_backward(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        documents = values["documents"]
        return _loss(self.stage.forward_backward(_key(values), arrays[0], arrays[1], documents))

    def _recompute(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        inputs, targets, *rest = arrays
        grad, documents = rest[0] if rest else None, values["documents"]
        made = self.stage.recompute_pass(_key(values), inputs, targets, grad, documents)()
        about = {
            "has_outputs": made.outputs is not None,
            "loss_sum": made.loss_sum,
            "num_tokens": made.num_tokens,
        }
        return about, _some(made.outputs, made.grad_inputs)

    def _evaluate(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        targets = arrays[1] if len(arrays) > 1 else None
        found = self.stage.evaluate(arrays[0], targets, values["documents"])
        return _loss(found) if isinstance(found, LossResult) else ({}, [found])

    def _collect(self, _: dict[str, Any], __: list[Array]) -> None:
        self.stage.vectors.gradient_shard(0)

    def _finish_round(self, _: dict[str, Any], __: list[Array]) -> Result:
        self.stage.finish_round()
        routed = [[r.layer, r.shares, r.dropped, r.entropy] for r in self.stage.routed]
        return {"routed": routed, "free_bytes": self._free_bytes()}, []

    def _put_base(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        self.stage.base.put(values["shard"], arrays[0])
        return {"missing": list(self.stage.base.missing)}, []

    @property
    def _generation(self) -> Any:
        return self.stage.generation

    def _text_copy(self, _: dict[str, Any], __: list[Array]) -> None:
        shards, self._shards = self._shards, []
        self._generation.copy(shards)

    def _text_extend(self, values: dict[str, Any], arrays: list[Array]) -> Result:
        return {}, list(self._generation.extend(values.pop("session"), *arrays, **values))


def serve(link: Link, host: StageHost) -> None:
    """Does the peer's calls until it closes the link, which raises `EOFError`; raises what the
    stage does not outlive."""
    tray: Tray | None = None
    number = 0
    while True:
        call, values, _, fd = link.receive()
        number += 1
        if call == "open":
            tray = Tray(fd)
            link.answer(number, is_refused=False)
            continue
        assert tray is not None
        try:
            told, found = host.answer(call, values["values"], tray.take(values["arrays"]))
        except Exception as error:
            if not host.is_mendable(error):
                raise
            link.answer(number, True, json.dumps(error_values(error)))
            continue
        text = json.dumps({"values": told, "arrays": tray.put(found)})
        shared = host.shared.fd if call == "build" and host.shared is not None else None
        link.answer(number, False, text, shared)


def _key(values: dict[str, Any]) -> tuple[int, int]:
    round_index, microbatch_id = values["key"]
    return round_index, microbatch_id


def _some(*arrays: Array | None) -> list[Array]:
    return [array for array in arrays if array is not None]


def _loss(made: LossResult) -> Result:
    about = {"loss_sum": made.loss_sum, "num_tokens": made.num_tokens}
    return about, _some(made.grad_inputs)
