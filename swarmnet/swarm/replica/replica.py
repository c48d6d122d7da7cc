"""The stage that a peer serves, and the round that it is in.

The rules are a table (`protocol.update.replica_phase`): a round at a replica is open (microbatches
come and go), then closed (their gradients are averaged), then finished: the parameters change and
the next one opens. The switch happens on the device thread, between two pieces of work, so that no
microbatch ever meets the parameters of another round; but beside its work where that is of a round
which is open already.

In mode `delayed` the next round may be opened *ahead*, when everything of the present one has been
launched and is in flight: its parameters are there already. A replica then works on both,
with parameters and a gradient buffer for each (two versions, as in PipeDream-2BW, Narayanan et al.
2021), and no machine runs out of work between two rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import TypeVar

from swarmnet.errors import NotReady, Stale
from swarmnet.ports import (
    OTHER,
    Check,
    Device,
    LocalSteps,
    Optimizer,
    Stage,
    StepKey,
    Worker,
)
from swarmnet.protocol.pipeline.ledger import Ledger
from swarmnet.protocol.pipeline.measurements import Measurements
from swarmnet.protocol.sync_modes import Switch, SyncPlan
from swarmnet.protocol.update.replica_phase import Phase
from swarmnet.swarm.replica.transitions import Transitions
from swarmnet.wire import Array

T = TypeVar("T")


@dataclass
class Replica:
    """A peer's copy of a stage. What happens to it goes through `transitions`."""

    stage: Stage
    optimizer: Optimizer
    device: Device
    worker: Worker
    start: InitVar[Phase]
    plan: SyncPlan = field(default_factory=SyncPlan)
    local: LocalSteps | None = None
    """Where replicas make steps of their own between exchanges."""

    def __post_init__(self, start: Phase) -> None:
        self.ledger = Ledger()
        self.transitions = Transitions(
            start, self.stage, self.local, self.device, self.worker, self.ledger
        )
        self.changed = self.transitions.changed
        self.measured = Measurements()
        self.digests = b""
        """Of every shard of the common parameters."""
        self.samples = 0
        """Committed in the round before, see `protocol.membership.records.Record.samples`."""

    # ---- questions --------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where it is in its round."""
        return self.transitions.phase

    @property
    def round(self) -> int:
        """The round that it is in."""
        return self.phase.round

    @property
    def synced(self) -> bool:
        """Holds the parameters of its round, and may serve microbatches."""
        return self.phase.is_whole

    @property
    def closed(self) -> bool:
        """The round is being averaged; no more microbatches."""
        return self.phase.is_closed(self.round)

    @property
    def ahead(self) -> bool:
        """Microbatches of the next round come and go already."""
        return self.phase.is_ahead

    @property
    def service_s(self) -> float:
        """Moving average of the device seconds of a microbatch, forward and backward together; 0
        while unknown."""
        return self.measured.service.seconds

    @property
    def index(self) -> int:
        return self.stage.stage_index

    @property
    def num_shards(self) -> int:
        return len(self.stage.shard_sizes)

    @property
    def largest_shard_bytes(self) -> int:
        """Of its parameters, or its gradient, in fp32."""
        return 4 * max(self.stage.shard_sizes, default=0)

    @property
    def current_exchange(self) -> int:
        """The exchange whose input the present common parameters are."""
        return self.phase.exchange(self.plan)

    def check_shard(self, stage_index: int, shard_index: int) -> None:
        """Raises `NotReady` unless this replica has the shard."""
        if stage_index != self.index or shard_index >= self.num_shards:
            raise NotReady(f"stage {stage_index} is not served here")
        if not self.synced:
            raise NotReady("still joining")

    def is_open(self, round_index: int) -> bool:
        """As `Phase.is_open`, and so on."""
        return self.phase.is_open(round_index)

    def takes(self, round_index: int) -> bool:
        return self.phase.takes(round_index)

    def is_closed(self, round_index: int) -> bool:
        return self.phase.is_closed(round_index)

    async def enter(self, round_index: int, wait_s: float, *, leaves_nothing: bool = False) -> None:
        """Returns when `round_index` is open here; for what leaves nothing in a gradient, before
        others know of it. Raises `Stale` where it is over, `NotReady` where it does not begin
        within `wait_s`."""

        def open_or_over() -> bool:
            phase = self.phase
            lets_in = phase.takes(round_index) if leaves_nothing else phase.lets_in(round_index)
            return self.round > round_index or lets_in

        if not open_or_over() and self.is_closed(round_index):
            raise Stale(f"round {round_index} is closed here", round=self.round)
        if not await self.changed.until(open_or_over, wait_s):
            raise NotReady(f"round {round_index} has not begun here", round=self.round)
        if self.round > round_index:
            raise Stale(f"round {round_index} is over here", round=self.round)

    # ---- work -------------------------------------------------------------------------------

    async def run(
        self, kind: str, key: StepKey, part: float, work: Callable[[], T], check: Check
    ) -> T:
        """Runs device work of a microbatch, unless its round closed meanwhile (`Stale`), or `check`
        raises; and learns how long such work takes. `part`: of all work for the microbatch."""

        def still_wanted() -> None:
            check()
            if not self.takes(key[0]):
                raise Stale(f"round {key[0]} is closed here", round=self.round)

        loop, is_done = asyncio.get_running_loop(), True
        self.measured.pass_waits(loop.time())
        try:
            value, took_s = await self.device.timed(kind, work, key[0], still_wanted)
        except asyncio.CancelledError:
            is_done = False
            raise
        finally:
            self.measured.pass_ended(loop.time(), is_done=is_done)
        self.measured.worked(took_s, part)
        return value

    async def settle(self) -> None:
        """Has the device do all that passes of the round have left: it is quicker at it than the
        worker, which reads the gradient then."""
        if self.stage.is_owing:
            await self.device.run(OTHER, self.stage.settle, self.round)

    async def gradient(self) -> tuple[Array, ...]:
        """Views of the shards of the closed round's gradient."""
        await self.settle()
        stage = self.stage
        return await self.worker.run(
            lambda: tuple(stage.gradient_shard(j) for j in range(self.num_shards))
        )

    def common_shard(self, shard_index: int) -> Array:
        """A view of the parameters that all replicas of the stage have in common: those of the
        round, or, where replicas make steps of their own, those of the last exchange."""
        if self.local is not None:
            return self.local.common_shard(shard_index)
        return self.stage.parameter_shard(shard_index)

    def put_common(self, shard_index: int, values: Array) -> None:
        """On the worker: puts a shard of the parameters that all replicas of the stage have in
        common aside for the coming round. Raises `ProtocolViolation` where it does not fit."""
        if self.local is not None:
            self.local.set_common(shard_index, values)
        else:
            self.stage.stage_parameters(shard_index, values)

    async def measure_digests(self) -> bytes:
        """Digests of every shard of the common parameters, for the own record."""
        of: Stage | LocalSteps = self.stage if self.local is None else self.local
        self.digests = await self.worker.run(
            lambda: b"".join(of.digest(j) for j in range(self.num_shards))
        )
        return self.digests

    def counted(self, num_samples: int) -> None:
        """So many samples are behind the parameters of the present round, or the coming one."""
        self.samples = num_samples

    def decided(self, switches: tuple[Switch, ...]) -> None:
        """The swarm changes the mode of its exchanges then."""
        self.plan = replace(self.plan, switches=switches)


def decides_tied(replica: Replica, shard: int) -> bool:
    """Another stage holds the shard too, and its step is made by this one."""
    return replica.index == 0 and shard < replica.stage.tied_shards


def follows_tied(replica: Replica, shard: int) -> bool:
    """Another stage holds the shard too, and makes its step."""
    return replica.index > 0 and shard < replica.stage.tied_shards
