"""What a machine brings into the swarm: its device, data, disk, and the parts of a stage."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmnet.ports import Data, Device, InitialWeights, LocalSteps, Optimizer, Stage, Worker
from swarmnet.swarm.initial.data import SharedData
from swarmnet.swarm.recovery.checkpointing import Disk


async def _never() -> None:
    await asyncio.Event().wait()


@dataclass
class Machine:
    """What a machine brings into the swarm."""

    build: Callable[[int], tuple[Stage, Optimizer]]
    """The parts of a stage, by its index; runs on the worker."""
    device: Device
    worker: Worker
    data: Data | None = None
    disk: Disk | None = None
    """Where checkpoints are kept; None for nowhere."""
    build_local: Callable[[Any, Any], LocalSteps | None] = lambda stage, optimizer: None
    """The own steps of a replica, where the run's mode has them; runs on the worker."""
    until_lost: Callable[[], Coroutine[Any, Any, None]] = _never
    """Raises `StageLost` when the stage that was built last is gone, though the peer is not."""
    services: dict[int, float] = field(default_factory=dict)
    """Device seconds of a microbatch, by the stage that the device serves: all seats of a machine
    share one device."""
    free: Callable[[], None] = lambda: None
    """Gives memory that is not used any more back to the machine; runs on the worker."""
    free_bytes: Callable[[], float] = lambda: math.inf
    """Of the device's memory, now."""
    measure: Callable[[], float] = lambda: 0.0
    """Device seconds that a microbatch is likely to take in a stage of middle cost, before any was
    served; 0 where that is unknown. Runs on the worker."""
    measure_products: Callable[[], float] | None = None
    """FLOP/s of products of matrices in an optimizer's step; None where it has none. Runs on the
    worker."""
    weights: InitialWeights | None = None
    """What the run began from; None where that is random and each machine makes it."""
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the files of the run, here or not, in bytes, by SHA-256."""
    read_file: Callable[[str, int, int], bytes | None] = lambda sha256, offset, num_bytes: None
    """At most so many bytes of a file of the run, from an offset on; None where it is not here.
    Blocks."""
    stage_costs: tuple[float, ...] | None = None
    """Of each stage, in any unit; None where all are alike."""
    shared: SharedData | None = None
    """Of the data, what it gives to others or may get; None for nothing."""
