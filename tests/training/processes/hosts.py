"""Stages in processes of their own, for tests: real ones, and such that are threads of this
process. What only processes do (dying, hanging) is not in the latter."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from swarmnet.batch import Documents
from swarmnet.ports import LossResult, StepKey
from swarmnet.runtime.apart.stage_program import PROGRAM, told
from swarmnet.runtime.options import PeerOptions
from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.processes import stage_host
from swarmnet.training.processes.apart_stage import ApartStage
from swarmnet.training.processes.children import Child
from swarmnet.training.processes.frames import Link
from swarmnet.training.processes.stage_host import SharedLayers, StageHost
from swarmnet.training.processes.stage_process import StageProcess
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array


class WholeStage(ApartStage):
    """With whole passes, as `TorchStage` has them."""

    def forward(self, key: StepKey, inputs: Array, documents: Documents | None = None) -> Array:
        return self.forward_pass(key, inputs, documents)()

    def backward(self, key: StepKey, grad_outputs: Array) -> Array | None:
        return self.backward_pass(key, grad_outputs)()

    def forward_backward(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> LossResult:
        return self.loss_pass(key, inputs, targets, documents)()


class _Thread:
    """What is asked of a process, of one that is none."""

    pid = 0

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 0


class ThreadProcess(StageProcess):
    """Its program is a thread, which computes the stage as it is told here."""

    def __init__(self, spec: RunSpec, stage_index: int, computing: Computing) -> None:
        self._spec = spec
        self._computing = computing
        super().__init__(stage_index, "")

    def _start(self, index: int, name: str) -> Child:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._work, args=(theirs,), daemon=True).start()
        return Child(index, name, cast(Any, _Thread()), ours, time.monotonic())

    def _work(self, connection: socket.socket) -> None:
        link = Link(connection)
        try:
            stage_host.serve(link, StageHost(self._build, lambda: 7.0))
        except EOFError:
            connection.close()
        except BaseException as error:
            link.broken(f"{type(error).__name__}: {error}")

    def _build(self, _: dict[str, Any]) -> tuple[TorchStage, str]:
        make = functools.partial(TorchStage, make_layers=SharedLayers)
        computing = self._computing
        return build_stage(self._spec, self._stage_index, computing=computing, make=make), "made"


@contextmanager
def thread_stages(
    spec: RunSpec,
    computing: Computing = Computing(),  # noqa: B008  it is immutable
) -> Iterator[list[WholeStage]]:
    """All stages of a run, each in a thread that stands for a process."""
    processes = [ThreadProcess(spec, k, computing) for k in range(spec.pipeline.num_stages)]
    try:
        yield [_stage(spec, k, process, {}) for k, process in enumerate(processes)]
    finally:
        for process in processes:
            process.close()


@contextmanager
def process_stage(
    spec: RunSpec, stage_index: int, devices: Sequence[str], folder: Path, **options: Any
) -> Iterator[WholeStage]:
    """One stage, in a real process, on so many ranks."""
    process = StageProcess(stage_index, PROGRAM)
    about = told(spec, PeerOptions(folder, threads=1, **options), stage_index, tuple(devices))
    try:
        yield _stage(spec, stage_index, process, about)
    finally:
        process.close()


def _stage(spec: RunSpec, k: int, process: StageProcess, about: dict[str, Any]) -> WholeStage:
    make: Any = functools.partial(WholeStage, process=process, about=about)
    stage: Any = build_stage(spec, k, make=make)
    assert isinstance(stage, WholeStage)
    return stage
