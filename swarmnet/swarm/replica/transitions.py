"""How a replica goes from one phase of its round to another (`protocol.update.replica_phase`).

What happens are the methods here, and nothing else changes the phase. Commands of the table that
change what the device works with are carried out on its thread, between two pieces of work; what
has to do with the round ahead alone is done beside it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from swarmnet.ports import OTHER, Device, LocalSteps, Stage, Worker
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
    Promote,
    Refused,
    State,
)
from swarmnet.swarm.condition import Condition


@dataclass
class Transitions:
    """The phase of one replica, and what changes it."""

    phase: Phase
    stage: Stage
    local: LocalSteps | None
    device: Device
    worker: Worker
    ledger: Ledger

    def __post_init__(self) -> None:
        self.changed = Condition()
        """Microbatches are taken that were not before, or others are not any more."""
        self._turn = threading.Lock()
        """Events come from the loop, from the device thread and from the worker."""
        self.changes = 0
        """How often parameters began to change, or had changed: odd while they do. Who copies them
        beside that looks before and after."""

    # ---- a newcomer -------------------------------------------------------------------------

    def aim(self, round_index: int) -> None:
        """The parameters of this round are being fetched."""
        if round_index != self.phase.round:
            self._apply(Aim(round_index))

    def declared(self) -> None:
        """The others of the stage have been told that this replica serves."""
        self._apply(Declared())
        self.changed.notify_all()

    # ---- from round to round ----------------------------------------------------------------

    async def open_round(self, round_index: int, *, is_whole: bool) -> None:
        """Makes the parameters put aside the present ones and begins a round. `is_whole`: none are
        missing. A round that was opened ahead begins at once, whatever the device does: what comes
        after it, such as the exchange beside it, does not wait for a pass of a large stage."""
        last = self.phase.round
        event = Open(round_index) if is_whole else OpenInPart(round_index)
        if isinstance(self.phase.after(event)[1], Promote):
            self._switch(event)
        else:
            await self.device.run(OTHER, lambda: self._switch(event), last)
        self.ledger.finish_round(max(last, round_index - 1))
        self.changed.notify_all()

    async def open_ahead(self) -> None:
        """Lets microbatches of the next round in; the parameters put aside are that round's. They
        are made ready beside what the device does."""
        command = self.phase.after(OpenAhead())[1]

        def opened() -> None:
            self._change(command)
            is_let_in = False
            try:  # this replica may have begun to give meanwhile
                is_let_in = self._apply(OpenAhead()) is not None
            finally:
                if not is_let_in:
                    self.stage.drop_ahead()

        await self.worker.run(opened)
        self.changed.notify_all()

    async def close_round(self) -> None:
        """No microbatch of the round adds to the gradient after this returns."""
        await self._until_given()
        command = self._apply(Close())
        if self.ledger.running(self.phase.round):  # else none is on the device
            await self._carry_out(command)

    async def flush(self) -> None:
        """Makes the parameters put aside the present ones, with which the exchange of the closed
        round itself begins."""
        await self.device.run(OTHER, lambda: self._switch(Flush()), self.phase.round)
        self.changed.notify_all()

    async def lose(self) -> None:
        """What is here does not hold, or is too old: it is fetched again."""
        await self._until_given()
        await self._carry_out(self._apply(Lose()))

    # ---- who leaves -------------------------------------------------------------------------

    def give(self) -> None:
        """Another replica is being told that the samples are its own now: until it has answered the
        round does not end here."""
        self._apply(Give())

    def gave(self, *, is_refused: bool) -> None:
        """It has answered, or never will."""
        self._apply(Refused() if is_refused else Given())
        self.changed.notify_all()

    async def _until_given(self) -> None:
        """Not for long: the call has a deadline (`swarm.update.handover`)."""
        while self.phase.state is State.GIVING:
            await self.changed.wait()

    # ---- what others' calls tell ------------------------------------------------------------

    def heard_over(self, round_index: int) -> bool:
        """Another replica's call shows that it has closed `round_index`. True when that is news;
        only of the round that this replica is in."""
        return self._hears(round_index, Heard.OVER)

    def heard_launched(self, round_index: int) -> bool:
        """Likewise: all of it is launched, or about to be, for another replica works on the next
        one."""
        return self._hears(round_index, Heard.LAUNCHED)

    def _hears(self, round_index: int, what: Heard) -> bool:
        with self._turn:
            before, self.phase = self.phase, self.phase.hears(round_index, what)
            return self.phase is not before

    # ---- events and commands ----------------------------------------------------------------

    def _apply(self, event: Event) -> Command | None:
        with self._turn:
            self.phase, command = self.phase.after(event)
        return command

    async def _carry_out(self, command: Command | None) -> None:
        """Behind what the device has to do already."""
        if isinstance(command, DropAhead):
            self.ledger.drop_round(command.round)
        if command is not None:
            await self.device.run(OTHER, lambda: self._change(command), self.phase.round)

    def _switch(self, event: Event) -> None:
        """An event that changes the present parameters; between two pieces of work of the device,
        or by `Promote`."""
        # First the parameters: who copies them and is in the round before notices afterwards.
        _, command = self.phase.after(event)
        self.changes += 1
        self._change(command)
        self._apply(event)
        self.changes += 1

    def _change(self, command: Command | None) -> None:
        if isinstance(command, FinishRound | Promote):
            self.stage.finish_round()
            if self.local is not None:
                self.local.finish_round()
        elif isinstance(command, KeepBoth):
            self.stage.open_ahead(command.round)
        elif isinstance(command, DropAhead):
            self.stage.drop_ahead()
