"""Microbatches inside a replica: one task each, and the result of those that are done.

A flight belongs to the replica, not to its caller: it goes on when the caller's channel breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from swarmnet.errors import NotReady
from swarmnet.methods.microbatch import StepProgress, StepReply, StepRequest
from swarmnet.ports import StepKey
from swarmnet.protocol.pipeline.service_time import PassageTime
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Request
from swarmnet.wire import Message

FURTHER_S = LOOK_LESS_S
"""How long callers are not told that a microbatch has come further on a way that they know."""


@dataclass(eq=False)
class Track:
    """Where a microbatch is, behind the peer that has passed it on."""

    path: tuple[str, ...] = ()
    """Who has it, and through whom it went on from there, as far as is known."""

    def moved(self, path: tuple[str, ...]) -> None:
        """It is there now."""
        self.path = path


@dataclass(eq=False)
class Flight(Track):
    """A microbatch inside this replica, or its receipt. Its callers hear where it is."""

    feeder: str = ""
    began_at: float = 0.0
    """When it came, by the loop's clock."""
    is_doomed: bool = False
    """Its feeder is gone: it will never count."""
    is_beyond: bool = False
    """It is with the following stages; nothing is done for it here."""
    task: asyncio.Task[Message[StepReply]] = field(init=False)
    _calls: list[Request[StepRequest]] = field(default_factory=list)
    """Those that wait for its reply."""
    _later: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Message[StepReply]]) -> None:
        """Work on it begins."""
        self.task = task

    def doom(self) -> None:
        """Begins no more work for it. What is in the gradient already is retracted when the round
        ends."""
        self.is_doomed = True
        if self.is_beyond:
            self.task.cancel()

    def check(self) -> None:
        """Raises `NotReady` where it is doomed."""
        if self.is_doomed:
            raise NotReady("the feeder of the microbatch is gone")

    def leaves(self) -> None:
        """It goes to the following stages. Raises `NotReady` where it is doomed."""
        self.check()
        self.is_beyond = True

    def returns(self) -> None:
        """It is back from there."""
        self.is_beyond = False

    def join(self, call: Request[StepRequest]) -> None:
        """A call waits for its reply too, and hears where it is."""
        if self.path:
            call.progress(Message(StepProgress(self.path)))
        self._calls.append(call)

    def part(self, call: Request[StepRequest]) -> None:
        """A call waits no more."""
        self._calls = [c for c in self._calls if c is not call]
        if not self._calls or self.task.done():
            self.silence()

    def moved(self, path: tuple[str, ...]) -> None:
        """Tells every caller where the microbatch is: at once where it goes another way, or begins
        to go one; a little later where it has only come further, for by then it may have come
        further still."""
        before, self.path = self.path, path
        if before and path[: len(before)] == before:
            if self._later is None:
                loop = asyncio.get_running_loop()
                self._later = loop.call_later(FURTHER_S, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        self.silence()
        for call in self._calls:
            call.progress(Message(StepProgress(self.path)))

    def silence(self) -> None:
        """It has returned: where it was is of no interest any more."""
        if self._later is not None:
            self._later.cancel()
            self._later = None


class Flights:
    """The flights of one replica by (round, microbatch id). A flight that is done stays, as a
    receipt, until it is forgotten."""

    def __init__(self) -> None:
        self._flights: dict[StepKey, Flight] = {}
        self._tasks = Tasks("step")
        self._passage = PassageTime()

    @property
    def num_in_flight(self) -> int:
        """Microbatches that are inside the replica now."""
        return len(self._tasks)

    def __contains__(self, key: StepKey) -> bool:
        return key in self._flights

    def get(self, key: StepKey) -> Flight | None:
        return self._flights.get(key)

    def enter(self, key: StepKey, feeder: str) -> Flight:
        """A new flight, whose work is begun with `start`."""
        began_at = asyncio.get_running_loop().time()
        flight = self._flights[key] = Flight(feeder=feeder, began_at=began_at)
        return flight

    def start(self, flight: Flight, work: Coroutine[Any, Any, Message[StepReply]]) -> None:
        """Begins the work of a flight."""
        flight.begin(self._tasks.start(work))

    def completed(self, flight: Flight) -> None:
        """Takes the duration of a flight that succeeded into `passage_s`."""
        self._passage.add(flight.began_at, asyncio.get_running_loop().time())

    def forget(self, key: StepKey) -> None:
        """Drops a flight that failed, or a receipt that no peer needs any more."""
        self._flights.pop(key, None)

    def drop_round(self, round_index: int) -> None:
        """Ends the flights of a round and of those before it."""
        for key in [k for k in self._flights if k[0] <= round_index]:
            flight = self._flights.pop(key)
            flight.silence()
            flight.task.cancel()

    def doom(self, feeder: str) -> None:
        """A feeder is gone: work for it would have to be retracted from the gradient again."""
        for flight in list(self._flights.values()):
            if flight.feeder == feeder:
                flight.doom()

    def beyond(self) -> dict[StepKey, tuple[str, ...]]:
        """The paths of the microbatches that are with the following stages now."""
        return {key: flight.path for key, flight in self._flights.items() if flight.is_beyond}

    def passage_s(self) -> float:
        """How long a microbatch is inside this replica, with its way through the stages after it:
        usually, or that of the oldest here now where that is more."""
        inside = [f.began_at for f in self._flights.values() if not f.task.done()]
        return self._passage.longest_s(inside, asyncio.get_running_loop().time())

    def usual_s(self) -> float:
        """How long one is usually; 0 while unknown."""
        return self._passage.usual_s

    async def close(self) -> None:
        await self._tasks.close()
