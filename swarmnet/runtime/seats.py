"""The peers of one machine that serves several stages: one after the other takes its stage, all
work on one device and leave together."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.errors import SwarmnetError, UsageError, UserError
from swarmnet.plurals import counted
from swarmnet.protocol.membership.peer_ids import MAX_SEATS, machine_of
from swarmnet.protocol.membership.seats import Room, room_for
from swarmnet.runtime.options import AUTO_STAGES, PeerOptions
from swarmnet.runtime.state_dir import SEAT_FOLDER
from swarmnet.spec import RunSpec
from swarmnet.swarm.peer import Peer

log = logging.getLogger("swarmnet.peer")

IN_FLIGHT = 4
"""Microbatches of which a stage keeps the graph, as a guess where the run names no number."""
LOOK_EVERY_S = 60.0
"""Mean time between two looks whether the machine should serve more or fewer stages."""
LOOKS_BEFORE_LEAVING = 3
"""Looks in a row that must find fewer stages enough."""
POLL_S = 0.2
GB = 1e9
FAILURES = (SwarmnetError, OSError, RuntimeError)
"""What a peer that cannot be, or has no memory or disk any more, ends with."""


def seat_dir(state_dir: Path, seat: int) -> Path:
    """Where a seat keeps its checkpoints: the first in the state folder itself."""
    return state_dir / f"{SEAT_FOLDER}{seat}" if seat else state_dir


def further_seats(state_dir: Path) -> list[Path]:
    """The folders of the other seats that a machine had."""
    return [path for seat in range(1, MAX_SEATS) if (path := seat_dir(state_dir, seat)).is_dir()]


@dataclass
class Seats:
    """All peers of this machine."""

    first: Peer
    num_seats: Callable[[int], Awaitable[int]]
    """How many there shall be, where there are so many now; asked when the first has taken its
    stage, and then, where the number may change, every `LOOK_EVERY_S`."""
    make: Callable[[int, AsyncExitStack], Awaitable[Peer]]
    """A further one, by its number; the stack takes apart what it is made of, when it has left."""
    changes: bool = False
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.further: dict[int, tuple[Peer, asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()
        self._too_many = 0
        self._unsaved: list[str] = []
        """Of the further ones that have left."""

    async def run(self, neighbours: list[str]) -> None:
        """Returns when all have left. Where one fails that a person wants, the others are cut off
        too. Raises `UserError` where one has left what only it had on no disk."""
        first = asyncio.ensure_future(self.first.run(neighbours))
        keeping = asyncio.ensure_future(self._keep())
        try:
            while not first.done() or self.further:
                waited = [task for task in self._lives(first, keeping) if not task.done()]
                # Not for ever: the keeper may have started another one meanwhile.
                await asyncio.wait(waited, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in self._lives(first, keeping):
                    if task.done():
                        task.result()
                self.further = {s: e for s, e in self.further.items() if not e[1].done()}
                if first.done():
                    self.stop()
            if lost := [line for line in (self.first.unsaved, *self._unsaved) if line]:
                raise UserError("; ".join(lost))
        finally:
            tasks = self._lives(first, keeping)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _lives(self, *tasks: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        return [*tasks, *(life for _, life in self.further.values())]

    @property
    def peers(self) -> list[Peer]:
        """Those that there are now."""
        return [self.first, *(peer for peer, _ in self.further.values())]

    def stop(self) -> None:
        """Asks all to hand over and leave."""
        self._stopping.set()
        for peer in self.peers:
            peer.stop()

    async def _keep(self) -> None:
        """Starts one peer after the other, so that none takes a stage that another is about to; and
        where the number may change, lets one go that the swarm has no need of any more."""
        while self.first.replica is None:
            await self.first.gossip.changed.wait(POLL_S)
        while not self._stopping.is_set():
            wanted = await self.num_seats(1 + len(self.further))
            while 1 + len(self.further) < wanted and not self._stopping.is_set():
                if not await self._add():
                    break
            if not self.changes:
                return
            self._too_many = self._too_many + 1 if 1 + len(self.further) > wanted else 0
            if self._too_many >= LOOKS_BEFORE_LEAVING:
                self._let_go()
            await asyncio.sleep(LOOK_EVERY_S * self.rng.uniform(0.7, 1.3))

    async def _add(self) -> bool:
        """One more; returns when it has its stage, or False where it has ended without."""
        seat = next(i for i in range(1, MAX_SEATS) if i not in self.further)
        async with AsyncExitStack() as parts:
            try:
                peer = await self.make(seat, parts)
            except FAILURES as e:
                self._go_on_after(e)
                return False
            life = asyncio.ensure_future(self._live(peer, parts.pop_all()))
        self.further[seat] = (peer, life)
        if self._stopping.is_set():
            peer.stop()
        while peer.replica is None and not life.done():
            await peer.gossip.changed.wait(POLL_S)
        return not life.done()

    async def _live(self, peer: Peer, parts: AsyncExitStack) -> None:
        """The life of a further one."""
        try:
            async with parts:
                await peer.run([self.first.gossip.own.peer_id])
                self._unsaved.append(peer.unsaved)
        except FAILURES as e:
            self._go_on_after(e)

    def _go_on_after(self, error: Exception) -> None:
        """The machine goes on without a further stage where it took that by itself. Raises the
        error where a person wants it."""
        if not self.changes:
            raise error
        log.warning("no further stage here for now: %s", error)

    def _let_go(self) -> None:
        """The seat whose stage has the most others leaves; none whose stage has no other."""
        now = asyncio.get_running_loop().time()
        others = {
            seat: sum(
                r.peer_id != peer.gossip.own.peer_id
                for r in peer.view.replicas(peer.gossip.own.stage, now)
            )
            for seat, (peer, _) in self.further.items()
        }
        seat = max(others, key=lambda s: (others[s], s))
        if others[seat]:
            peer = self.further[seat][0]
            log.warning("stage %d has others now: this peer leaves it", peer.gossip.own.stage)
            peer.stop()
            self._too_many = 0


@dataclass
class SeatCount:
    """How many stages this machine serves; says so in a line whenever it changes."""

    spec: RunSpec
    options: PeerOptions
    first: Peer
    free_bytes: float
    """Before any stage was built."""
    device: str = "cpu"
    last: int = 0

    def limit_free(self, num_bytes: float) -> None:
        """No more than this may be taken, whatever is free."""
        self.free_bytes = min(self.free_bytes, num_bytes)

    async def __call__(self, num_here: int) -> int:
        """`num_here`: that it serves now. Raises `UserError`."""
        if self.options.stages == AUTO_STAGES:
            num_seats, why = await self._by_room(num_here)
        else:
            num_seats, why = int(self.options.stages or 1), "as chosen"
        num_stages = self.spec.pipeline.num_stages
        if num_seats > num_stages:
            raise UsageError(
                f"--stages {num_seats}: this run has {num_stages}, and a machine serves each of "
                f"them once; --stages {num_stages} is the most"
            )
        if num_seats != self.last and (num_seats > 1 or self.options.stages == AUTO_STAGES):
            log.warning("serves %d of %s: %s", num_seats, counted(num_stages, "stage"), why)
        self.last = num_seats
        return num_seats

    def _built(self) -> RunSpec:
        """The run with this machine's builder: a spec never chooses code."""
        return self.spec.with_builder(self.options.model_builder(self.spec))

    async def _by_room(self, num_here: int) -> tuple[int, str]:
        from swarmnet.training.computing import choose_precision
        from swarmnet.training.memory.plan import PRECISIONS, plan_memory

        spec, now = self._built(), asyncio.get_running_loop().time()
        own = machine_of(self.first.gossip.own.peer_id)
        rates = [
            [
                r.samples_per_s
                for r in self.first.view.members(k, now)
                if machine_of(r.peer_id) != own
            ]
            for k in range(spec.pipeline.num_stages)
        ]
        in_flight = spec.pipeline.max_in_flight or IN_FLIGHT
        precision = PRECISIONS[choose_precision(spec, self.options.precision, self.device)]
        rows = await asyncio.to_thread(
            plan_memory, spec, num_replicas=1, in_flight=in_flight, precision=precision
        )
        stage_s = await asyncio.to_thread(self.first.machine.measure)
        speed = spec.pipeline.microbatch / stage_s if stage_s else 0.0
        left_bytes = await asyncio.to_thread(self.first.machine.free_bytes)
        room = room_for(
            [row.total for row in rows], self.free_bytes, speed, rates, num_here, left_bytes
        )
        why = describe_room(room, rows[0].total, self.free_bytes, left_bytes, speed)
        kept = 0 if self.last else await asyncio.to_thread(self._seats_before)
        if kept > room.num_seats:
            return min(kept, len(rows)), f"{why}; so many have checkpoints here"
        return room.num_seats, why

    def _seats_before(self) -> int:
        """Seats whose checkpoints of this run are in the state folder: it may be the only ones that
        there are."""
        from swarmnet.training.checkpoint import CheckpointStore

        model = self._built()

        def has_any(seat: int) -> bool:
            folder = seat_dir(self.options.state_dir, seat)
            return bool(CheckpointStore(folder, self.spec, model=model).available())

        return 1 + max((seat for seat in range(1, MAX_SEATS) if has_any(seat)), default=0)


def describe_room(
    room: Room, stage_bytes: float, free_bytes: float, left_bytes: float, samples_per_s: float
) -> str:
    """Why so many, for the user."""
    speed = f"{samples_per_s:.1f} samples/s" if samples_per_s else "speed not measured"
    nobody = f", {room.uncovered} had nobody" if room.uncovered else ""
    return (
        f"room for {room.by_memory} ({stage_bytes / GB:.2f} GB each of {free_bytes / GB:.1f} GB "
        f"free, {left_bytes / GB:.1f} GB now), {speed} (fast enough for {room.by_speed}){nobody}"
    )
