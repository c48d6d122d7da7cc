"""The composition root: a peer made of real parts, and the observer that looks at a run.

Nothing else in the project knows which transport, device or data a peer has.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from peer.beside import Beside, peers_beside, say_run_beside, tell_run
from peer.commands.invites import Admitted, admission_of, admit, date_of
from peer.computing import choose_computing, free_bytes_of
from peer.counted import COUNTED_FILE, CountedMicrobatches
from peer.faults import arm_from_environment
from peer.joining import FILE_MARK, WaysIn, find_living, find_run, read_addresses
from peer.known_peers import KnownPeers
from peer.loop import spare_old_objects
from peer.machine.limit_keeper import Keeper
from peer.machine.limits import LIMITS_FILE, change_limits
from peer.machine.memory_cap import MemoryCap, free_memory, stage_needs, tree_bytes
from peer.observe.health import tell_health
from peer.options import AUTO_STAGES, PeerOptions, TransportName, with_overrides
from peer.ranks import build_ranked_stage, choose_devices, open_ranks, until_over
from peer.ready import ReadyFile
from peer.seats import SeatCount, Seats, seat_dir
from peer.speed import expected_stage_s
from peer.state_dir import next_incarnation
from peer.stuck import until_stuck
from swarmnet import __version__
from swarmnet.errors import (
    AddressError,
    DataError,
    UserError,
)
from swarmnet.identity import Identity as Key
from swarmnet.identity import verify
from swarmnet.protocol.membership.addresses import in_turns, of_all, peer_of
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.spec import RunSpec, load_spec
from swarmnet.swarm.membership.discovery import Directory
from swarmnet.swarm.membership.gossip import Gossip, Tasks
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.membership.relaying import Relaying
from swarmnet.swarm.messages import LOGITS, InferRequest
from swarmnet.swarm.peer import Identity, Machine, Peer
from swarmnet.swarm.pipeline.step import infer_through
from swarmnet.swarm.pipeline.wiring import Wiring
from swarmnet.swarm.recovery.restart import Disk
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.transport.base import Transport
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.direct import DirectListener
from swarmnet.wire import Array

if TYPE_CHECKING:
    from swarmnet.training.ranks.local_group import LocalGroup

log = logging.getLogger("swarmnet.peer")

AGENT = f"swarmnet/{__version__}"
OPTIMIZER_FOLDER = "optimizer"
"""In the state folder, for `[sync] optimizer_store = "disk"`."""
JOIN_ATTEMPTS_S = 30.0
LOOK_AT_ADDRESSES_S = 2.0
FINISH_WAIT_S = 60.0
"""How long after its last round a run may take for the last measurement on held-out data."""

WARN_BEFORE_EXPIRY_S = 86_400.0
LEAVE_BEFORE_EXPIRY_S = 60.0
"""Of an invite: time enough to hand over."""
LONGEST_SLEEP_S = 86_400.0
"""A machine's clock may be set meanwhile."""


@dataclass(frozen=True, slots=True)
class KeySigner:
    """Signs with this peer's key, and checks anybody's signature by peer id."""

    key: Key

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        return verify(peer_id, data, signature)


@dataclass(frozen=True, slots=True)
class Net:
    """A transport, and what the directory needs of its carrier."""

    transport: ChannelTransport
    p2p: Callable[[], Any] | None
    on_restart: Callable[[Callable[[], None]], None] | None


async def open_net(
    name: TransportName,
    key: Key,
    *,
    host: str,
    port: int,
    announce: Sequence[str],
    direct_port: int | None = None,
) -> Net:
    """A started transport of the wanted kind. `direct_port`: where to listen for direct
    connections; None: none are made. Raises `AddressError` where a port is taken."""
    direct = None if direct_port is None else DirectListener(host, direct_port)
    if name == "p2pd":
        from swarmnet.transport.libp2p.p2pd import P2pdCarrier

        carrier = P2pdCarrier(key, host=host, port=port, announce=announce)
        transport = ChannelTransport(carrier, agent=AGENT, direct=direct, identity=key)
        await transport.start()
        return Net(transport, lambda: carrier.p2p, carrier.on_restart)
    from swarmnet.transport.libp2p.py_libp2p import PyLibp2pCarrier

    other = PyLibp2pCarrier(key, host=host, port=port, announce=announce)
    transport = ChannelTransport(other, agent=AGENT, direct=direct, identity=key)
    await transport.start()
    return Net(transport, None, None)


def run_settings(spec: RunSpec) -> RunSettings:
    """What the swarm code needs of a spec."""
    return RunSettings(
        run_id=spec.run_id,
        num_stages=spec.pipeline.num_stages,
        global_batch=spec.pipeline.global_batch,
        samples_per_microbatch=spec.pipeline.microbatch,
        rounds=spec.optimizer.rounds,
        grad_clip_norm=spec.optimizer.grad_clip_norm,
        replication=spec.sync.replication,
        aggregation=spec.sync.aggregation,
        evaluate_every=spec.pipeline.evaluate_every,
        max_in_flight=spec.pipeline.max_in_flight,
        sync_mode=spec.sync.mode,
        local_steps=spec.sync.local_steps,
        fragments=spec.sync.fragments,
        sync_warmup_rounds=spec.sync_warmup_rounds,
    )


def build_machine(
    spec: RunSpec,
    options: PeerOptions,
    group: LocalGroup | None = None,
    beside: Machine | None = None,
) -> Machine:
    """The device of this machine; `group`: its other ranks, where it has any. `beside`: of another
    seat of the machine, which shares its device and feeds.

    Raises `DataError`, `SpecError` or `UserError`."""
    from swarmnet.training.data import open_data
    from swarmnet.training.device import DeviceThread, WorkerThread, set_num_threads
    from swarmnet.training.models.registry import model_plan, stage_costs
    from swarmnet.training.optimizer.local_steps import build_local_steps, build_optimizer
    from swarmnet.training.optimizer.store import open_store
    from swarmnet.training.stage import build_stage

    if options.threads:
        set_num_threads(options.threads)
    run, spec = spec, spec.with_builder(options.model_builder(spec))

    devices = choose_devices(spec, options)
    store = open_store(spec.sync.optimizer_store, options.state_dir / OPTIMIZER_FOLDER)

    def build(stage_index: int) -> tuple[Any, Any]:
        computing, line = choose_computing(spec, options, stage_index, devices)
        _say(line)
        if group is None:
            stage = build_stage(spec, stage_index, device=devices[0], computing=computing)
        else:
            stage = build_ranked_stage(spec, stage_index, options, group, computing)
        return stage, build_optimizer(spec, stage, store)

    def build_local(stage: Any, optimizer: Any) -> Any:
        return build_local_steps(spec, stage, optimizer, store)

    data = None
    paths, tokenizer = options.data_paths(spec), options.data_tokenizer(spec)
    if options.feed and beside is None and paths and not tokenizer:
        name = PurePath(spec.data.tokenizer).name
        log.warning("this machine's %s was not named (--tokenizer): it does not feed", name)
    elif options.feed and beside is None and (paths or spec.model.kind == "custom"):
        try:
            data = open_data(spec, list(paths) or None, tokenizer)
        except DataError as e:
            if options.starts_run or options.data:
                raise
            log.warning("%s; this peer serves but does not feed", e)
    elif options.feed and beside is None:
        log.warning("this machine's data was not named (--data): it serves but does not feed")
    disk = open_disk(run, spec, options)
    if beside is not None:
        own = beside.device.seat()
        return replace(
            beside, build=build, device=own, data=None, disk=disk, build_local=build_local
        )
    costs, device = stage_costs(model_plan(spec), spec.pipeline.num_stages), DeviceThread()

    def measure() -> float:
        if group is not None:  # one rank says nothing of all
            return 0.0
        whole_s = expected_stage_s(
            spec,
            costs,
            options.state_dir,
            device=devices[0],
            precision=options.precision,
            num_threads=options.threads,
        )
        return whole_s / device.share

    return Machine(
        build,
        device,
        WorkerThread(),
        data,
        disk,
        build_local,
        free=free_memory,
        measure=measure,
        stage_costs=tuple(costs) if all(cost > 0 for cost in costs) else None,
    )


def open_disk(run: RunSpec, model: RunSpec, options: PeerOptions) -> Disk | None:
    """This peer's checkpoints; None where `--checkpoint-every 0` wants none. `model`: the spec as
    this machine builds it. Raises `UserError` where they cannot be read."""
    from swarmnet.training.checkpoint import CheckpointStore
    from swarmnet.training.device import WorkerThread

    if not options.checkpoint_every:
        return None
    store = CheckpointStore(
        options.state_dir,
        run,
        keep=options.keep_checkpoints,
        every=options.checkpoint_every,
        model=model,
    )
    found = store.available()
    for line in store.unreadable:
        log.warning("a checkpoint cannot be used: %s", line)
    disk = WorkerThread("disk")
    return Disk(store, disk, options.checkpoint_every, found, tuple(store.unreadable))


@dataclass
class RunningPeer:
    """A peer at work, as the screen and the metrics see it."""

    spec: RunSpec
    peer: Peer
    addresses: Sequence[str]
    limits: Callable[[], str]
    """What its owner lets it take, and why it is paused; a line, or nothing."""

    @property
    def view(self) -> View:
        return self.peer.view


async def run_peer(options: PeerOptions, show: Callable[[RunningPeer], Any] | None = None) -> None:
    """The life of `swarmnet peer`: returns when it has left the swarm.

    `show(running)` may return a coroutine that runs beside the peer (a screen, metrics).
    """
    async with AsyncExitStack() as stack:
        change_limits(options.state_dir, options.limits)
        key = Key.load_or_create(options.state_dir / "identity.key")
        spec = None
        if options.spec is not None:
            spec = with_overrides(load_spec(options.spec), rounds=options.rounds, seed=options.seed)
        net = await open_net(
            options.transport,
            key,
            host=options.host,
            port=options.port,
            announce=options.announce,
            direct_port=options.direct_port if options.direct else None,
        )
        stack.push_async_callback(net.transport.close)
        known = KnownPeers.load(options.state_dir)
        known.own = net.transport.addresses()
        given = list(options.join)
        if options.ready_file is not None and options.ready_file.is_dir():
            given.append(f"{FILE_MARK}{options.ready_file}")
        ways = WaysIn(known, given)
        beside: list[Beside] = []
        if spec is None:
            found, spec = await find_run(
                net.transport, options.join, known, _say, patience_s=options.patience_s
            )
            neighbours = [found]
        else:  # it may be there already: this peer started it once, and starts again
            beside = await asyncio.to_thread(peers_beside, options.state_dir, options.ready_file)
            ours = in_turns(b.addresses for b in beside if b.run_id == spec.run_id)
            ours = [a for a in ours if peer_of(a) != key.peer_id]
            neighbours = await find_living(net.transport, known, spec.run_id, ours)
            if neighbours and known.run_id != spec.run_id:
                _say("this run is alive beside this peer already: joining it")
            if not neighbours and known.run_id == spec.run_id and known.peers:
                _say(f"none of the {len(known.peers)} peers met before answers; it goes on looking")
        if known.run_id != spec.run_id:
            known.run_id, known.peers = spec.run_id, {}
        own = net.transport.addresses()
        stack.callback(tell_run(options.state_dir, spec.run_id, spec.name, own))
        admitted = admit(spec, key.peer_id, options.invite, options.state_dir)
        group = await asyncio.to_thread(open_ranks, spec, options)
        if group is not None:
            stack.push_async_callback(asyncio.to_thread, group.close)
        machine = await asyncio.to_thread(build_machine, spec, options, group)
        stack.push_async_callback(machine.device.close)
        stack.push_async_callback(machine.worker.close)
        if machine.disk is not None:
            stack.push_async_callback(machine.disk.worker.close)
        device = choose_devices(spec, options)[0]
        free_bytes = float(free_bytes_of(device))
        first = replace(machine, device=machine.device.seat())
        peer = compose(spec, options, net.transport, key, first, admitted)
        arm_from_environment(peer)
        tasks = Tasks("peer")
        stack.push_async_callback(tasks.close)
        tasks.start(say_run_beside(net.transport, beside, spec.run_id, spec.name))
        await ways.read()
        peer.reconnecting.remembered = ways.remembered
        directory: Directory | None = None

        async def make_seat(seat: int) -> Peer:
            its = replace(
                options, state_dir=seat_dir(options.state_dir, seat), stage=None, feed=False
            )
            its.state_dir.mkdir(exist_ok=True)
            desk = await asyncio.to_thread(build_machine, spec, its, None, machine)
            if desk.disk is not None:
                stack.push_async_callback(desk.disk.worker.close)
            further = compose(
                spec, its, net.transport.seat(seat), key, desk, admitted, peer.resource_limits
            )
            if directory is not None:
                directory.also(further.gossip)
            return further

        async def one() -> int:
            return 1

        count = SeatCount(spec, options, peer, free_bytes, device) if group is None else one
        changes = group is None and options.stages == AUTO_STAGES
        seats = Seats(peer, count, make_seat, changes)
        keeper = await asyncio.to_thread(keeper_of, seats, spec, options, net.transport, machine)
        keeper.start()
        if isinstance(count, SeatCount):
            count.free_bytes = min(free_bytes, keeper.memory.room_bytes)
        tasks.start(keeper.run())
        if admitted.not_after_unix_s:
            tasks.start(_stop_when_expired(seats, admitted.not_after_unix_s))
        if net.p2p is not None and net.on_restart is not None:
            directory = Directory(peer.gossip, spec.pipeline.num_stages, net.p2p, peer.rng)
            net.on_restart(directory.daemon_restarted)
            await directory.start(of_all(ways.remembered(), own))
            tasks.start(directory.run())
        carrier: Any = net.transport
        relaying = Relaying(carrier, peer.gossip, peer.rng, offers=options.relay)
        tasks.start(relaying.run())
        tasks.start(known.keep(spec.run_id, peer.view))
        tasks.start(ways.keep())
        tasks.start(
            follow_addresses(net.transport, options.state_dir, spec.run_id, spec.name, known)
        )
        spare_old_objects()
        addresses = net.transport.addresses()
        if options.ready_file is not None:
            ready = ReadyFile(options.ready_file, net.transport, spec.run_id, spec.name)
            ready.write()
            stack.callback(ready.remove)
            tasks.start(ready.keep())
        if show is not None:
            tasks.start(show(RunningPeer(spec, peer, addresses, lambda: keeper.line)))
        if options.metrics_port is not None:
            from peer.observe.prometheus import serve_metrics

            server = serve_metrics(peer, spec, options.metrics_host, options.metrics_port)
            # Its thread may wait for this loop: the loop must go on while the server ends.
            stack.push_async_callback(asyncio.to_thread, server.shutdown)
        if options.health_file is not None:
            tasks.start(tell_health(options.health_file, peer))
        if options.exit_when_done:
            tasks.start(_stop_when_done(peer, spec.optimizer.rounds, seats.stop))
        life = asyncio.get_running_loop().create_task(seats.run(neighbours))
        try:
            threads: dict[str, Any] = {"device": machine.device, "averaging": machine.worker}
            await until_over(life, group, until_stuck(threads))
        except asyncio.CancelledError:
            if options.screen != "quiet":
                _say("handing over and leaving, as soon as others have what only this peer has")
            seats.stop()
            try:
                await life
            except asyncio.CancelledError:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
                raise


async def follow_addresses(
    transport: Transport, state_dir: Path, run_id: str, name: str, known: KnownPeers
) -> None:
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
        told = known.own = now
        tell_run(state_dir, run_id, name, now)


def keeper_of(
    seats: Seats, spec: RunSpec, options: PeerOptions, transport: Any, machine: Machine
) -> Keeper:
    """Who keeps this machine's peers to the limits in the state folder."""
    import psutil

    def stages() -> list[int]:
        return [peer.replica.index for peer in seats.peers if peer.replica is not None]

    built = spec.with_builder(options.model_builder(spec))
    base_bytes = tree_bytes(psutil.Process())
    memory = MemoryCap(stage_needs(built), base_bytes)
    path = options.state_dir / LIMITS_FILE
    device: Any = machine.device
    return Keeper(path, seats.first.resource_limits, transport, device, memory, stages)


def _say(line: str) -> None:
    log.warning("%s", line)


def compose(
    spec: RunSpec,
    options: PeerOptions,
    transport: Transport,
    key: Key,
    machine: Machine,
    admitted: Admitted = Admitted(),  # noqa: B008  it is immutable
    resource_limits: ResourceLimits | None = None,
) -> Peer:
    """A `Peer` of real parts. `resource_limits`: of the machine's first seat."""
    if options.stage is not None and not 0 <= options.stage < spec.pipeline.num_stages:
        raise UserError(
            f"--stage {options.stage}: this run has stages 0 to {spec.pipeline.num_stages - 1}"
        )
    now_unix_s = time.time()
    peer = Peer(
        transport=transport,
        signer=KeySigner(key),
        identity=Identity(
            run_id=spec.run_id,
            spec=spec.canonical(),
            incarnation=next_incarnation(options.state_dir, now_unix_s),
            started_unix_s=now_unix_s,
            agent=AGENT,
            credential=admitted.credential,
        ),
        admission=admitted.admission,
        settings=run_settings(spec),
        machine=machine,
        rng=random.Random(f"{transport.peer_id}|{now_unix_s}"),
        limits=Limits(),
        wanted_stage=options.stage,
        feeds=options.feed,
        begin_anew=options.begin_anew,
        resource_limits=resource_limits or ResourceLimits(),
    )
    if peer.feeder is not None:
        counted = CountedMicrobatches(
            options.state_dir / COUNTED_FILE, spec.run_id, lambda: peer.gossip.own.history
        )
        peer.feeder.on_commit, peer.on_history = counted, counted.renamed
    return peer


async def _stop_when_expired(peer: Seats, not_after_unix_s: int) -> None:
    """Leaves in good order before others refuse this peer."""
    left_s = not_after_unix_s - time.time()
    while left_s > LEAVE_BEFORE_EXPIRY_S:
        if left_s <= WARN_BEFORE_EXPIRY_S:
            log.warning("your invite ends on %s; ask for a new one", date_of(not_after_unix_s))
            await asyncio.sleep(left_s - LEAVE_BEFORE_EXPIRY_S)
        else:
            await asyncio.sleep(min(left_s - WARN_BEFORE_EXPIRY_S, LONGEST_SLEEP_S))
        left_s = not_after_unix_s - time.time()
    log.warning("your invite ends on %s: this peer leaves the run", date_of(not_after_unix_s))
    peer.stop()


async def _stop_when_done(peer: Peer, rounds: int, stop: Callable[[], None]) -> None:
    """Stops this machine's peers when the run has done its rounds and measured the result."""
    loop = asyncio.get_running_loop()
    done_at: float | None = None
    while True:
        await peer.gossip.changed.wait(1.0)
        records = peer.view.live(loop.time())
        replicas = [r for r in records if r.is_replica]
        if replicas and all(r.round >= rounds for r in replicas):
            done_at = done_at or loop.time()
            measured = any(r.held_out and r.held_out.round >= rounds for r in records)
            if measured or loop.time() - done_at > FINISH_WAIT_S:
                stop()
                return


class Observer:
    """Looks at a run without taking part in it: no record of its own, no stage."""

    def __init__(
        self, spec: RunSpec, gossip: Gossip, transport: Transport, ways: WaysIn | None = None
    ) -> None:
        self.spec = spec
        self.gossip = gossip
        self.view = gossip.view
        self.transport = transport
        self._tasks = Tasks("observer")
        self._wiring = Wiring(
            transport,
            gossip,
            Limits(),
            spec.pipeline.num_stages,
            spec.pipeline.microbatch,
            gossip.rng,
        )
        self._tasks.start(gossip.run())
        ways = ways or WaysIn(KnownPeers(Path()), ())
        missing = Reconnecting(gossip, random.Random(gossip.own.peer_id), ways.remembered)
        self._tasks.start(missing.run())
        self._tasks.start(ways.keep())

    @classmethod
    async def join(
        cls,
        addresses: Sequence[str],
        *,
        transport: TransportName = "p2pd",
        host: str = "127.0.0.1",
        patience_s: float | None = JOIN_ATTEMPTS_S,
        invite: str = "",
    ) -> Observer:
        """Finds a run through any of the addresses. Waits `patience_s` for files with them, and
        not for who does not answer; or waits for ever, for both. Looking needs no invite, not even
        where the run is closed; what costs its peers something (a sample of text, the parameters)
        does. Raises `AddressError` or `UserError`."""
        key = Key.generate()
        net = await open_net(transport, key, host=host, port=0, announce=())
        ways = WaysIn(KnownPeers(Path()), addresses)
        try:
            async with asyncio.timeout(patience_s):
                if patience_s is not None:
                    await read_addresses(addresses, _say, patience_s=patience_s)
                neighbour, spec = await find_run(
                    net.transport,
                    addresses,
                    ways.known,
                    _say,
                    patience_s=None if patience_s is None else 0.0,
                )
                net.transport.set_run(spec.run_id)
                shown = admit(spec, key.peer_id, invite, None).credential if invite else b""
                own = Record(
                    key.peer_id,
                    spec.run_id,
                    int(time.time() * 1000),
                    0,
                    state=OBSERVING,
                    credential=shown,
                )
                gossip = Gossip(
                    net.transport,
                    View(key.peer_id),
                    KeySigner(key),
                    own,
                    random.Random(key.peer_id),
                    quiet=not shown,
                    admission=admission_of(spec),
                )
                await gossip.reconcile(neighbour)
                return cls(spec, gossip, net.transport, ways)
        except TimeoutError:
            await net.transport.close()
            raise AddressError(f"no answer within {patience_s:.0f} s") from None
        except BaseException:
            await net.transport.close()
            raise

    async def wait_news(self, timeout_s: float) -> None:
        """Returns when something changed, or after `timeout_s`."""
        await self.gossip.changed.wait(timeout_s)

    async def generate(self, prompt: bytes, num_tokens: int) -> bytes:
        """Continues a prompt, token by token (bytes), through the swarm's own stages."""
        seq = self.spec.model.max_position_embeddings
        tokens = list(prompt)
        rng = random.Random(0)
        for _ in range(num_tokens):
            window = tokens[-seq:]
            inputs = Array("int32", (1, len(window)), _int32(window))
            reply = await infer_through(self._wiring, InferRequest(stage=0, mode=LOGITS), (inputs,))
            tokens.append(_sample(reply.arrays[0], rng))
        return bytes(tokens[len(prompt) :])

    async def close(self) -> None:
        """Leaves; nobody notices."""
        await self._tasks.close()
        await self.transport.close()

    async def __aenter__(self) -> Observer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


TEMPERATURE = 0.7
NUM_BYTE_TOKENS = 256


def _int32(tokens: list[int]) -> bytes:
    return b"".join(t.to_bytes(4, "little") for t in tokens)


def _sample(logits: Array, rng: random.Random) -> int:
    """A byte from the last position's logits (float32 [1, S, V]); V may be larger than 256."""
    import math
    import struct

    vocab = logits.shape[-1]
    last = bytes(memoryview(logits.data).cast("B"))[-4 * vocab :]
    row = struct.unpack(f"<{vocab}f", last)[:NUM_BYTE_TOKENS]
    top = max(row)
    weights = [math.exp((x - top) / TEMPERATURE) for x in row]
    return rng.choices(range(len(row)), weights)[0]


__all__ = ["Observer", "RunningPeer", "run_peer"]
