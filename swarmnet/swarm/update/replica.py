"""The stage that a peer serves, and the round that it is in.

The rules are a table (`protocol.update.replica_phase`): a round at a replica is open (microbatches
come and go), then closed (their gradients are averaged), then finished: the parameters change and
the next one opens. The switch happens on the device thread, between two pieces of work, so that no
microbatch ever meets the parameters of another round.

In mode `delayed` the next round may be opened *ahead*, when everything of the present one has been
launched and is in flight: its parameters are there already. A replica then works on both,
with parameters and a gradient buffer for each (two versions, as in PipeDream-2BW, Narayanan et al.
2021), and no machine runs out of work between two rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarmnet.errors import NotReady, Stale
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.pipeline.ledger import Ledger
from swarmnet.protocol.update.replica_phase import (
    Aim,
    Close,
    Command,
    Declared,
    DropAhead,
    Event,
    FinishRound,
    Flush,
    Give,
    Given,
    Heard,
    KeepBoth,
    Lose,
    Open,
    OpenAhead,
    OpenInPart,
    Phase,
    Refused,
    State,
)
from swarmnet.protocol.update.sync_modes import Switch, SyncPlan
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.ports import OTHER, Check, Device, LocalSteps, Optimizer, Stage, StepKey, Worker
from swarmnet.swarm.update.measurements import Measurements
from swarmnet.wire import Array

T = TypeVar("T")


@dataclass
class Replica:
    """A peer's copy of a stage. Nobody else changes it: what happens to it are methods."""

    stage: Stage
    optimizer: Optimizer
    device: Device
    worker: Worker
    phase: Phase
    plan: SyncPlan = field(default_factory=SyncPlan)
    local: LocalSteps | None = None
    """Where replicas make steps of their own between exchanges."""

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.changed = Condition()
        self.measured = Measurements()
        self.digests = b""
        """Of every shard of the common parameters."""
        self.samples = 0
        """Committed in the round before, see `protocol.membership.records.Record.samples`."""
        self._turn = threading.Lock()
        """Events come from the loop, and from the device thread where the device has to be between
        two pieces of work."""

    # ---- questions --------------------------------------------------------------------------

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

    def is_fed(self, round_index: int, view: View, now: float, num_slots: int) -> bool:
        """All of a round has been launched, as far as records or others' calls show."""
        return self.phase.knows(round_index, Heard.LAUNCHED) or progress.is_launched(
            view, round_index, now, num_slots
        )

    def is_over(self, round_index: int) -> bool:
        """Others have closed the round, as far as their calls show."""
        return self.phase.knows(round_index, Heard.OVER)

    async def enter(self, round_index: int, wait_s: float) -> None:
        """Returns when `round_index` is open here. Raises `Stale` where it is over, `NotReady`
        where it does not begin within `wait_s`."""

        def open_or_over() -> bool:
            return self.round > round_index or self.phase.lets_in(round_index)

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

        value, took_s = await self.device.timed(kind, work, key[0], still_wanted)
        self.measured.worked(took_s, part)
        return value

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

    # ---- what happens -----------------------------------------------------------------------

    def aim(self, round_index: int) -> None:
        """The parameters of this round are being fetched."""
        if round_index != self.round:
            self._apply(Aim(round_index))

    def heard_over(self, round_index: int) -> bool:
        """Another replica's call shows that it has closed `round_index`. True when that is news;
        only of the round that this replica is in."""
        return self._hears(round_index, Heard.OVER)

    def heard_launched(self, round_index: int) -> bool:
        """Likewise: all of it is launched, or about to be, for another replica works on the next
        one."""
        return self._hears(round_index, Heard.LAUNCHED)

    async def open_round(self, round_index: int, *, synced: bool) -> None:
        """Makes the parameters put aside the present ones and begins a round. `synced`: they are
        whole."""
        last = self.round
        await self._on_device(Open(round_index) if synced else OpenInPart(round_index))
        self.ledger.finish_round(max(last, round_index - 1))
        self.changed.notify_all()

    @property
    def is_declaring(self) -> bool:
        """The others of the stage are being told that it serves."""
        return self.phase.state is State.DECLARING

    def declared(self) -> None:
        """They have been told."""
        self._apply(Declared())
        self.changed.notify_all()

    async def open_ahead(self) -> None:
        """Lets microbatches of the next round in; the parameters put aside are that round's."""
        await self._on_device(OpenAhead())
        self.changed.notify_all()

    def give(self) -> None:
        """Another replica is being told that the samples are its own now: until it has answered the
        round does not end here."""
        self._apply(Give())

    def gave(self, *, is_refused: bool) -> None:
        """It has, or never will."""
        self._apply(Refused() if is_refused else Given())
        self.changed.notify_all()

    async def close_round(self) -> None:
        """No microbatch of the round adds to the gradient after this returns."""
        await self._until_given()
        await self._carry_out(self._apply(Close()))

    async def flush(self) -> None:
        """Makes the parameters put aside the present ones, with which the exchange of the closed
        round itself begins."""
        await self._on_device(Flush())
        self.changed.notify_all()

    async def lose(self) -> None:
        """What is here does not hold, or is too old: it is fetched again."""
        await self._until_given()
        await self._carry_out(self._apply(Lose()))

    async def _until_given(self) -> None:
        """Not for long: the call has a deadline (`swarm.recovery.handover`)."""
        while self.phase.state is State.GIVING:
            await self.changed.wait()

    def _hears(self, round_index: int, what: Heard) -> bool:
        with self._turn:
            before, self.phase = self.phase, self.phase.hears(round_index, what)
            return self.phase is not before

    def _apply(self, event: Event) -> Command | None:
        with self._turn:
            self.phase, command = self.phase.after(event)
        return command

    async def _carry_out(self, command: Command | None) -> None:
        """Behind what the device has to do already."""
        if isinstance(command, DropAhead):
            self.ledger.drop_round(command.round)
        if command is not None:
            await self.device.run(OTHER, lambda: self._change(command), self.round)

    async def _on_device(self, event: Event) -> None:
        """Between two pieces of the device's work."""

        def switch() -> None:
            if isinstance(event, OpenAhead):  # this replica may have begun to give meanwhile
                self._change(self._apply(event))
                return
            # First the parameters: who copies them and is in the round before notices afterwards.
            _, command = self.phase.after(event)
            self._change(command)
            self._apply(event)

        await self.device.run(OTHER, switch, self.round)

    def _change(self, command: Command | None) -> None:
        """On the device."""
        if isinstance(command, FinishRound):
            self.stage.finish_round()
            if self.local is not None:
                self.local.finish_round()
        elif isinstance(command, KeepBoth):
            self.stage.open_ahead(command.round)
        elif isinstance(command, DropAhead):
            self.stage.drop_ahead()
