"""The life of a peer, without a command line: it enters a run, is composed, works and leaves."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.protocol.dialing.addresses import of_all
from swarmnet.protocol.membership.assignment import measurers
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import held_out
from swarmnet.runtime.admission import Admitted, admit, date_of
from swarmnet.runtime.apart.cards import settle
from swarmnet.runtime.apart.seat import ApartSeat, open_seats
from swarmnet.runtime.compose import compose, say_if_useless
from swarmnet.runtime.computing import free_bytes_of
from swarmnet.runtime.joining.beside import say_run_beside, tell_run, watch_rendezvous
from swarmnet.runtime.joining.entry import Entry, enter
from swarmnet.runtime.joining.past import past_line
from swarmnet.runtime.joining.ready import ReadyFile
from swarmnet.runtime.joining.stopped import refuse_stopped
from swarmnet.runtime.machine import build_machine, free_when_idle
from swarmnet.runtime.options import AUTO_STAGES, PeerOptions
from swarmnet.runtime.ranks import choose_devices, open_ranks, until_over
from swarmnet.runtime.seats import SeatCount, Seats, seat_dir
from swarmnet.runtime.state_dir import Claim, until_taken
from swarmnet.runtime.stuck import until_copied, until_one, until_stuck
from swarmnet.spec import RunSpec
from swarmnet.swarm.membership.discovery import Directory
from swarmnet.swarm.membership.relaying import Relaying
from swarmnet.swarm.peer import Machine, Peer
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Transport

if TYPE_CHECKING:
    from swarmnet.training.ranks.local_group import LocalGroup

log = logging.getLogger("swarmnet.peer")

LOOK_AT_ADDRESSES_S = 2.0
FINISH_WAIT_S = 60.0
"""How long after its last round a run may take for the last measurement on held-out data."""
WARN_BEFORE_EXPIRY_S = 86_400.0
LEAVE_BEFORE_EXPIRY_S = 60.0
"""Of an invite: time enough to hand over."""
LONGEST_SLEEP_S = 86_400.0
"""A machine's clock may be set meanwhile."""


Extra = Callable[["RunningPeer"], Awaitable[Coroutine[Any, Any, None]]]
"""Something beside a peer, such as a screen: called when the peer is composed and does nothing yet;
what it returns runs until the peer has left. What it raises ends the peer."""


async def run_peer(options: PeerOptions, extras: Sequence[Extra] = ()) -> None:
    """Runs a peer until it has left the swarm. When this is cancelled the peer hands over and
    leaves first; a second time, at once.

    Raises:
        UserError: options, spec, data or device do not do; one line that says what to do.
        AddressError: nobody answers within `options.patience_s`, or a port is taken.
    """
    async with AsyncExitStack() as stack:
        entry = await enter(options, stack)
        spec, transport = entry.spec, entry.net.transport
        await _refuse_stopped(entry, options)
        admitted = admit(spec, entry.key.peer_id, options.invite, options.state_dir)
        options = await asyncio.to_thread(settle, spec, options)
        seats = await asyncio.to_thread(open_seats, spec, options)
        group = None
        if not seats:
            group = await asyncio.to_thread(open_ranks, spec, options)
        if group is not None:
            stack.push_async_callback(asyncio.to_thread, group.close)
        for seat in seats:
            stack.push_async_callback(asyncio.to_thread, seat.close)
        machine = await asyncio.to_thread(
            build_machine, spec, options, group, None, entry.run, seats[0] if seats else None
        )
        neighbours = await entry.neighbours
        await _say_past(entry, neighbours, options, machine)
        stack.push_async_callback(machine.device.close)
        stack.push_async_callback(machine.worker.close)
        for own in (machine.disk, machine.shared):
            if own is not None:
                stack.push_async_callback(own.worker.close)
        running = RunningPeer(entry, neighbours, options, admitted, machine, group, seats)
        beside: list[Coroutine[Any, Any, None]] = []
        stack.callback(_close, beside)  # where the peer fails before they have begun
        tasks = Tasks("peer")
        stack.push_async_callback(tasks.close)
        tasks.start(say_run_beside(transport, entry.beside, spec.run_id, spec.name))
        await entry.ways.read()
        for extra in extras:
            beside.append(await extra(running))
        if admitted.not_after_unix_s:
            tasks.start(_stop_when_expired(running.seats, admitted.not_after_unix_s))
        running.start_directory(tasks)
        offers = options.relay
        tasks.start(Relaying(transport, running.peer.gossip, running.peer.rng, offers=offers).run())
        tasks.start(entry.known.keep(spec.run_id, running.peer.view))
        tasks.start(entry.ways.keep())
        tasks.start(follow_addresses(transport, options.state_dir, spec))
        tasks.start(free_when_idle(machine.device))
        spare_old_objects()
        if options.ready_file is not None:
            ready = ReadyFile(options.ready_file, transport, spec.run_id, spec.name, time.time())
            ready.write()
            stack.callback(ready.remove)
            tasks.start(ready.keep())
            tasks.start(watch_rendezvous(transport, options.ready_file, spec.run_id))
        for work in beside:
            tasks.start(work)
        tasks.start(_stop_when_ordered(running.peer, running.seats.stop))
        if options.exit_when_done:
            tasks.start(stop_when_done(running.peer, spec.optimizer.end, running.seats.stop))
        await running.live()


def _close(beside: Sequence[Coroutine[Any, Any, None]]) -> None:
    for work in beside:
        work.close()


class RunningPeer:
    """All peers of this machine, composed of what it has: the first, and one for each further stage
    that the machine serves. Also what a screen, metrics or an owner's limits read."""

    def __init__(
        self,
        entry: Entry,
        neighbours: list[str],
        options: PeerOptions,
        admitted: Admitted,
        machine: Machine,
        group: LocalGroup | None,
        apart: Sequence[ApartSeat] = (),
    ) -> None:
        """`apart`: seats that compute in processes of their own; all of them, or none."""
        self.spec = entry.spec
        self.options = options
        self.transport = entry.net.transport
        self.machine = machine
        device = "cpu" if apart else choose_devices(self.spec, options)[0]
        free_bytes = float(free_bytes_of(device))
        own = replace(machine, device=machine.device.seat())
        say_if_useless(options.household, self.spec.sync.mode)
        self.peer = compose(
            self.spec,
            options,
            self.transport,
            entry.key,
            own,
            admitted,
            remembered=entry.ways.remembered,
        )
        """The first of this machine's peers."""
        self.room = None
        """How many stages the machine serves; None where its ranks serve one."""
        if group is None:
            self.room = SeatCount(self.spec, options, self.peer, free_bytes, device)
        changes = group is None and options.stages == AUTO_STAGES
        self.seats = Seats(self.peer, self.room or _one, self._make_seat, changes)
        """All of them."""
        self._entry = entry
        self._neighbours = neighbours
        self._admitted = admitted
        self._group = group
        self._apart = apart
        self._devices: list[Any] = [machine.device]
        self._share: float | None = None
        self._threads: dict[str, Any] = {"averaging": machine.worker}
        """That this process ends with where they hang."""
        if not apart:
            self._threads["device"] = machine.device
        self._directory = self._open_directory()

    @property
    def view(self) -> View:
        return self.peer.view

    @property
    def addresses(self) -> Sequence[str]:
        return self.transport.addresses()

    def _open_directory(self) -> Directory | None:
        """The DHT, where the transport's carrier has one."""
        net = self._entry.net
        if net.p2p is None or net.on_restart is None:
            return None
        num_stages = self.spec.pipeline.num_stages
        directory = Directory(self.peer.gossip, num_stages, net.p2p, self.peer.rng)
        net.on_restart(directory.daemon_restarted)
        return directory

    async def _make_seat(self, seat: int, parts: AsyncExitStack) -> Peer:
        options, transport = self.options, self.transport.seat(seat)
        parts.push_async_callback(transport.close)
        its = replace(options, state_dir=seat_dir(options.state_dir, seat), stage=None, feed=False)
        its.state_dir.mkdir(exist_ok=True)
        apart = self._apart[seat] if self._apart else None
        desk = await asyncio.to_thread(
            build_machine, self.spec, its, None, self.machine, None, apart
        )
        if apart is not None:
            self._own_threads(seat, desk, parts)
        parts.push_async_callback(desk.worker.run, desk.free)
        if desk.disk is not None:
            parts.push_async_callback(desk.disk.worker.close)
        further = compose(
            self.spec,
            its,
            transport,
            self._entry.key,
            desk,
            self._admitted,
            self.peer.resource_limits,
        )
        if self._directory is not None:
            self._directory.also(further.gossip)
            parts.callback(self._directory.without, further.gossip)
        return further

    def _own_threads(self, seat: int, desk: Machine, parts: AsyncExitStack) -> None:
        """Of a further seat that shares none."""
        device: Any = desk.device
        parts.push_async_callback(asyncio.to_thread, self._apart[seat].close)
        parts.push_async_callback(desk.device.close)
        parts.push_async_callback(desk.worker.close)
        name = f"averaging of seat {seat}"
        self._threads[name] = desk.worker
        parts.callback(self._threads.pop, name)
        self._devices.append(device)
        parts.callback(self._devices.remove, device)
        device.limit_share(self._share)

    def limit_share(self, share: float | None) -> None:
        """As of a device, of all that this machine has."""
        self._share = share
        for device in self._devices:
            device.limit_share(share)

    def start_directory(self, tasks: Tasks) -> None:
        """`tasks` run it."""
        if self._directory is not None:
            known = of_all(self._entry.ways.remembered(), self.addresses)
            tasks.start(self._directory.run(known))

    async def live(self) -> None:
        """Until all have left. Cancelled once, they hand over and leave."""
        life = asyncio.get_running_loop().create_task(self.seats.run(self._neighbours))
        try:
            folder, transport = self.options.state_dir, self._entry.net.transport
            copied = until_copied(self.peer.gossip, folder)
            claim = Claim(folder, self._entry.key, lambda: tell(folder, self.spec, transport))
            taken = until_taken(claim)
            watches = until_one(until_stuck(self._threads), copied, taken)
            await until_over(life, self._group, watches)
        except asyncio.CancelledError:
            if not self.options.is_quiet:
                _say("handing over and leaving, as soon as others have what only this peer has")
            self.seats.stop()
            try:
                await life
            except asyncio.CancelledError:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
                raise


async def _one(num_here: int) -> int:
    """How many stages the ranks of a machine serve."""
    return 1


def spare_old_objects() -> None:
    """To be called when everything is imported and built: the collector of cycles looks at what
    exists now no more. Torch and its friends are some hundred thousand objects that live as long
    as the process, and going through them again and again took a third of an update's CPU time."""
    gc.collect()
    gc.freeze()


async def follow_addresses(transport: Transport, state_dir: Path, spec: RunSpec) -> None:
    """Says when this machine's addresses change, and where others of it look (the transport tells
    the swarm). Until cancelled."""
    told = transport.addresses()
    while True:
        await asyncio.sleep(LOOK_AT_ADDRESSES_S)
        now = transport.addresses()
        if now == told:
            continue
        if now[:1] != told[:1]:
            _say(f"this peer has another address now: {now[0]}")
        told = now
        tell(state_dir, spec, transport)


def tell(state_dir: Path, spec: RunSpec, transport: Transport) -> None:
    """As `tell_run`."""
    addresses = transport.addresses()
    tell_run(state_dir, spec.run_id, spec.name, addresses, spec.model.continues)


async def _stop_when_expired(peer: Seats, not_after_unix_s: int) -> None:
    """Leaves in good order before others refuse this peer."""
    left_s = not_after_unix_s - time.time()
    while left_s > LEAVE_BEFORE_EXPIRY_S:
        if left_s <= WARN_BEFORE_EXPIRY_S:
            _say(f"your invite ends on {date_of(not_after_unix_s)}; ask for a new one")
            await asyncio.sleep(left_s - LEAVE_BEFORE_EXPIRY_S)
        else:
            await asyncio.sleep(min(left_s - WARN_BEFORE_EXPIRY_S, LONGEST_SLEEP_S))
        left_s = not_after_unix_s - time.time()
    _say(f"your invite ends on {date_of(not_after_unix_s)}: this peer leaves the run")
    peer.stop()


async def stop_when_done(peer: Peer, rounds: int, stop: Callable[[], None]) -> None:
    """Stops this machine's peers when the run has done its rounds and measured the result."""
    loop = asyncio.get_running_loop()
    done_at: float | None = None
    while True:
        await peer.gossip.changed.wait(1.0)
        records = peer.view.live(loop.time())
        replicas = [r for r in records if r.is_replica]
        if replicas and all(r.round >= rounds for r in replicas):
            done_at = done_at or loop.time()
            asked = measurers(peer.view, loop.time())
            measured = rounds in held_out.told(records, asked)
            if measured or not asked or loop.time() - done_at > FINISH_WAIT_S:
                stop()
                return


async def _refuse_stopped(entry: Entry, options: PeerOptions) -> None:
    """Raises `FinalError` where the run's owner has ended it."""
    neighbours = list(await entry.neighbours) if entry.spec.security.owner else []
    await refuse_stopped(entry.spec, options.state_dir, entry.net.transport, neighbours)


async def _stop_when_ordered(peer: Peer, stop: Callable[[], None]) -> None:
    """Stops this machine's peers when the run's owner has ended it, with the round that is left."""
    await peer.stopping.until_over()
    stop()


async def _say_past(
    entry: Entry, neighbours: list[str], options: PeerOptions, machine: Machine
) -> None:
    """Where this peer begins a run: which one it continues, or could."""
    is_saved = machine.disk is not None and bool(machine.disk.found)
    if options.starts_run and not neighbours and not is_saved:
        line = await asyncio.to_thread(past_line, entry.spec, options.state_dir)
        if line:
            _say(line)


def _say(line: str) -> None:
    log.warning("%s", line)
