"""A seat whose stage is in a process of its own, as the peer's process has it."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarmnet.errors import UsageError, UserError
from swarmnet.runtime.apart.seat_devices import Devices, num_sharing, seat_devices, threads_each
from swarmnet.runtime.apart.stage_program import PROGRAM, told
from swarmnet.runtime.computing import DEVICE, DISK, HOST, check_options, host_place
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.stuck import Working, until_stuck
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.training.processes.stage_process import StageProcess

log = logging.getLogger("swarmnet.peer")


def open_seats(spec: RunSpec, options: PeerOptions) -> list[ApartSeat]:
    """The seats of this machine that compute in processes of their own: all, or none. No process is
    started yet. Raises `SpecError` or `UserError`."""
    seats = seat_devices(spec, options)
    if seats is None:
        return []
    check_apart(options)
    if seats[0][0] == "cpu":  # a GPU is asked by the process that computes on it, and no other
        check_options(spec, options, list(seats[0]))
    built = spec.with_builder(options.model_builder(spec))
    return [ApartSeat(built, options, seats, seat) for seat in range(len(seats))]


def check_apart(options: PeerOptions) -> None:
    """Raises `UsageError` where a seat in a process of its own does not go with other options."""
    if options.optimizer_memory == DEVICE:
        raise UsageError(
            "--optimizer-memory device: seats in processes of their own make updates on the host; "
            "use host, or --stages 1"
        )
    if options.weights_memory in (HOST, DISK):
        raise UsageError(
            f"--weights-memory {options.weights_memory}: seats in processes of their own keep "
            "weights on their devices; use device, or --stages 1"
        )


HANGS = "it has been at one piece of work for minutes and does not answer"


class ApartSeat:
    """What builds the stages of a seat, each in a new process on the seat's devices."""

    def __init__(
        self, spec: RunSpec, options: PeerOptions, seats: list[Devices], seat: int
    ) -> None:
        """`spec`: as this machine builds it; `seats`: devices of all of them, by seat."""
        self._spec = spec
        self._devices = seats[seat]
        self._options = replace(
            options,
            stages=str(num_sharing(seats, seat)),
            threads=threads_each(options, seats),
            optimizer_memory="disk" if host_place(spec, options) == DISK else "host",
            weights_memory="device",
        )
        self._process: StageProcess | None = None
        self._stage: Any = None

    def build(self, stage_index: int) -> Any:
        """A stage; the process of the one before ends. Blocks for seconds. Raises what building it
        raises, or `StageLost`."""
        from swarmnet.training.processes.apart_stage import ApartStage
        from swarmnet.training.processes.stage_process import StageProcess
        from swarmnet.training.stage import build_stage

        self.close()
        self._process = process = StageProcess(stage_index, PROGRAM)
        about = told(self._spec, self._options, stage_index, self._devices)
        make: Any = functools.partial(ApartStage, process=process, about=about)
        try:
            self._stage = build_stage(self._spec, stage_index, make=make)
        except BaseException:
            self.close()
            raise
        log.warning("%s; in a process of its own", self._stage.line)
        return self._stage

    @property
    def is_on_cpu(self) -> bool:
        return self._devices[0] == "cpu"

    def free_bytes(self) -> float:
        """Of the memory that it computes with, as it was when its round began."""
        return math.inf if self._stage is None else float(self._stage.free_bytes)

    async def until_lost(self, device: Working) -> None:
        """Returns when the process is told to end; raises `StageLost` when it has ended otherwise,
        or hangs at a piece of work. `device`: the thread that gives it work."""
        process = self._process
        assert process is not None
        stuck = asyncio.ensure_future(until_stuck({"device": device}))
        watch = asyncio.ensure_future(process.watch())
        try:
            await asyncio.wait((stuck, watch), return_when=asyncio.FIRST_COMPLETED)
            if stuck.done() and isinstance(stuck.exception(), UserError):
                await asyncio.to_thread(process.fail, HANGS)
            await watch
        finally:
            stuck.cancel()
            watch.cancel()
            await asyncio.gather(stuck, watch, return_exceptions=True)

    def close(self) -> None:
        """Ends the process. Blocks."""
        process, self._process, self._stage = self._process, None, None
        if process is not None:
            process.close()
