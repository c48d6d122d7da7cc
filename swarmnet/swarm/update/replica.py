"""The stage that a peer serves, and the round that it is in.

A round at a replica is open (microbatches come and go), then closed (their gradients are
averaged), then finished: the parameters change and the next one opens. The switch happens
on the device thread, between two pieces of work, so that no microbatch ever meets the
parameters of another round.

In mode `delayed` the next round may be opened *ahead*, when everything of the present one has been
launched and is in flight: its parameters are there already. A replica then works on both,
with parameters and a gradient buffer for each (two versions, as in PipeDream-2BW, Narayanan et al.
2021), and no machine runs out of work between two rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnet.errors import NotReady, Stale
from swarmnet.protocol.histogram import Histogram
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.pipeline.ledger import Ledger
from swarmnet.protocol.pipeline.service_time import ServiceTime
from swarmnet.protocol.update.sync_modes import SyncPlan
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.ports import OTHER, Check, Device, LocalSteps, Optimizer, Stage, StepKey, Worker
from swarmnet.wire import Array

T = TypeVar("T")


GIVING_WAIT_S = 20.0
"""How long a round does not end because its gradient is being given away."""


@dataclass
class Replica:
    """A peer's copy of a stage. Mutable; owned by `swarm.peer.Peer`."""

    stage: Stage
    optimizer: Optimizer
    device: Device
    worker: Worker
    round: int
    plan: SyncPlan = field(default_factory=SyncPlan)
    local: LocalSteps | None = None
    """Where replicas make steps of their own between exchanges."""
    synced: bool = False
    """Holds the parameters of `round` and may serve microbatches."""
    closed: bool = False
    """The round is being averaged; no more microbatches."""
    flushed: bool = False
    """The common parameters are those of the round's end already: the run's last exchange."""
    ahead: bool = False
    """Microbatches of the next round come and go already."""
    is_join_declared: bool = False
    """The others of the stage are being told that it has begun: nothing comes in before they know,
    or they might end the round without it."""
    launched: int = -1
    """The newest round of which, by what others ask of this replica, all is launched, or about to
    be."""
    ledger: Ledger = field(default_factory=Ledger)
    changed: Condition = field(default_factory=Condition)
    digests: bytes = b""
    samples: int = 0
    """Committed in the round before, see `protocol.membership.records.Record.samples`."""
    open_s: float = 0.0
    """How long the last round was open here."""
    began_at: float = 0.0
    """Of the loop's clock: since when microbatches of the present round come and go here."""
    ahead_at: float = 0.0
    """The same of the next one, where that is open ahead."""
    given: int = -1
    """The round whose gradient was given to another replica: nothing more of it is taken in."""
    is_giving: bool = False
    """Another replica is being told that the samples are its own now."""
    over: int = -1
    """The newest round that, by what others ask of this replica, is over for them."""
    service: ServiceTime = field(default_factory=ServiceTime)
    sent_bytes: int = 0
    """Of the arrays that the newest microbatch made this replica send."""
    services: Histogram = field(default_factory=Histogram)
    """Device seconds of a microbatch, one value for each forward and each backward."""
    rounds: Histogram = field(default_factory=Histogram)
    """Seconds of rounds, from opening to opening."""
    exchanges: Histogram = field(default_factory=Histogram)
    """Seconds of exchanges."""

    @property
    def service_s(self) -> float:
        """Moving average of the device seconds of a microbatch, forward and backward together; 0
        while unknown."""
        return self.service.seconds

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
        return self.round if self.flushed else self.plan.parameter_version(self.round)

    def check_shard(self, stage_index: int, shard_index: int) -> None:
        """Raises `NotReady` unless this replica has the shard."""
        if stage_index != self.index or shard_index >= self.num_shards:
            raise NotReady(f"stage {stage_index} is not served here")
        if not self.synced:
            raise NotReady("still joining")

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

    async def enter(self, round_index: int, wait_s: float) -> None:
        """Returns when `round_index` is open here. Raises `Stale` where it is over, `NotReady`
        where it does not begin within `wait_s`."""

        def open_or_over() -> bool:
            takes = self.takes(round_index) and not self.is_join_declared
            return self.round > round_index or takes

        if not open_or_over() and self.round == round_index and self.closed:
            raise Stale(f"round {round_index} is closed here", round=self.round)
        if not await self.changed.until(open_or_over, wait_s):
            raise NotReady(f"round {round_index} has not begun here", round=self.round)
        if self.round > round_index:
            raise Stale(f"round {round_index} is over here", round=self.round)

    def heard_over(self, round_index: int) -> bool:
        """Another replica's call shows that it has closed `round_index`. True when that is news;
        only of the round that this replica is in."""
        if round_index != self.round or self.over >= round_index or not self.synced:
            return False
        self.over = round_index
        return True

    def heard_launched(self, round_index: int) -> bool:
        """Likewise: all of it is launched, or about to be, for another replica works on the next
        one."""
        if round_index != self.round or self.launched >= round_index or not self.synced:
            return False
        self.launched = round_index
        return True

    def is_fed(self, round_index: int, view: View, now: float, num_slots: int) -> bool:
        """All of a round has been launched, as far as records or others' calls show."""
        return self.launched >= round_index or progress.is_launched(
            view, round_index, now, num_slots
        )

    def is_over(self, round_index: int) -> bool:
        """Others have closed the round, as far as their calls show."""
        return self.over >= round_index

    def is_open(self, round_index: int) -> bool:
        return self.round == round_index and self.synced and not self.closed

    def takes(self, round_index: int) -> bool:
        """May microbatches of a round come and go here?"""
        if self.ahead and round_index == self.round + 1:
            return self.synced
        return self.is_open(round_index)

    def is_closed(self, round_index: int) -> bool:
        """Microbatches of the round come too late here."""
        return round_index < self.round or (round_index == self.round and self.closed)

    async def run(
        self, kind: str, key: StepKey, part: float, work: Callable[[], T], check: Check
    ) -> T:
        """Runs device work of a microbatch, unless its round closed meanwhile (`Stale`), or `check`
        raises; and learns how long such work takes. `part`: of all work for the microbatch."""

        def still_wanted() -> None:
            check()
            if not self.takes(key[0]):
                raise Stale(f"round {key[0]} is closed here", round=self.round)

        value, took_s = await self.device.timed(kind, work, key[0], still_wanted)
        self.service.add(took_s, part)
        self.services.add(took_s / part)
        return value

    async def close_round(self) -> None:
        """No microbatch of the round adds to the gradient after this returns."""
        await self.changed.until(lambda: not self.is_giving, GIVING_WAIT_S)

        def close() -> None:
            self.closed = True

        self.closed = True
        await self.device.run(OTHER, close, self.round)

    async def open_round(self, round_index: int, *, synced: bool) -> None:
        """Makes the parameters put aside the present ones and opens a round."""

        def switch() -> None:
            self.stage.finish_round()
            if self.local is not None:
                self.local.finish_round()
            self.round = round_index
            self.synced = synced
            self.closed = False
            self.ahead = False
            self.given = -1

        last = self.round
        await self.device.run(OTHER, switch, last)
        self.ledger.finish_round(max(last, round_index - 1))
        self.changed.notify_all()

    async def open_ahead(self) -> None:
        """Lets microbatches of the next round in; the parameters put aside are that round's."""

        def switch() -> None:
            self.stage.open_ahead(self.round + 1)
            self.ahead = True

        await self.device.run(OTHER, switch, self.round)
        self.changed.notify_all()

    async def drop_ahead(self) -> None:
        """Forgets what was done of the next round."""
        if self.ahead:
            self.ahead = False
            self.ledger.drop_round(self.round + 1)
            await self.device.run(OTHER, self.stage.drop_ahead, self.round)

    async def measure_digests(self) -> bytes:
        """Digests of every shard of the common parameters, for the own record."""
        of: Stage | LocalSteps = self.stage if self.local is None else self.local
        self.digests = await self.worker.run(
            lambda: b"".join(of.digest(j) for j in range(self.num_shards))
        )
        return self.digests
