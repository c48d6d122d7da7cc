"""The transport port without a network: peers of one process call each other.

For tests and simulation, as public API. Messages pass by value (packed, unpacked, arrays copied),
so that what could not travel fails here too. Nobody says hello: peers of one process have the same
version. Time is the loop's: on a virtual-time loop, hours of network pass in seconds. `Network`
decides how long a message takes, and whether it arrives; the hub can kill, freeze and part peers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from swarmnet.errors import (
    AddressError,
    ChannelClosed,
    DeadlineExceeded,
    ProtocolViolation,
    RemoteError,
    Unreachable,
)
from swarmnet.protocol.leftovers import Leftovers
from swarmnet.protocol.timing import ANSWER_S, LEAST_WAIT_S
from swarmnet.transport.bans import Bans
from swarmnet.transport.base import Gate, Handler, Traffic
from swarmnet.transport.calls.heads import FIRST_SEATS, as_remote, describe, parse_error
from swarmnet.transport.calls.pending import PendingCalls
from swarmnet.transport.frames import NOTIFY, PROGRESS, REPLY, REQUEST, check_arrays
from swarmnet.transport.handlers import Handlers
from swarmnet.transport.listeners import Listeners
from swarmnet.wire import MAX_BODY_BYTES, Array, Message, pack, unpack_plain

log = logging.getLogger("swarmnet.transport")

OVERHEAD_BYTES = 40
"""Headers of the frames of a message, about."""
LOCAL_DELAY_S = 0.0005
MANY_ENTRIES = 32
"""A mapping with more is measured by its first entry."""
METERED_BYTES = 64 << 10
"""Messages longer than this say how fast an uplink is."""
BACKGROUND_BYTES = 256 << 10
"""A part of a message in the background: longer than on the wire, for the sake of large
simulations."""
UNREACHABLE_AFTER_S = 5.0
"""How long it takes to find out that nobody answers behind a partition."""


class Network(Protocol):
    """How messages travel."""

    def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float | None:
        """Seconds until a message that is sent now arrives; None where it never does."""


@runtime_checkable
class MeteredNetwork(Network, Protocol):
    """One whose uplinks have a bandwidth."""

    def upload_s(self, source: str, num_bytes: int) -> float:
        """Seconds that so many bytes keep the uplink of `source` busy."""

    def upload_queue(self, source: str, now: float) -> int:
        """Bytes that wait for the uplink of `source`."""


@dataclass
class Behind:
    """What a peer sends in the background, one message after the other."""

    leftovers: Leftovers = field(default_factory=Leftovers)
    messages: deque[Delivery] = field(default_factory=deque)


@dataclass
class Delivery:
    """A message in the background."""

    target: str
    left_bytes: int
    """Not sent yet."""
    deliver: Callable[[], None]
    """What happens when the last ones have arrived."""
    is_wanted: Callable[[], bool]
    """Else it is not begun."""
    is_begun: bool = False


class EvenNetwork:
    """Every message takes the same time."""

    def __init__(self, delay_s: float = LOCAL_DELAY_S) -> None:
        self._delay_s = delay_s

    def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float | None:
        return self._delay_s


@dataclass
class MemoryHub:
    """Where the peers of one process find each other."""

    network: Network = field(default_factory=EvenNetwork)
    copy: bool = True
    """False: bodies and arrays pass by reference, sizes are estimated. For large simulations."""

    def __post_init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self._frozen: dict[str, list[Callable[[], None]]] = {}
        self._parted: dict[frozenset[str], None] = {}
        self._places: dict[str, dict[str, str]] = {}
        self._behind: dict[str, Behind] = {}
        self._stale: dict[frozenset[str], None] = {}
        """Pairs whose connection leads nowhere, since one of them has moved."""
        network = self.network
        self._metered = network if isinstance(network, MeteredNetwork) else None

    def transport(self, peer_id: str) -> MemoryTransport:
        """A new endpoint."""
        self.transports[peer_id] = MemoryTransport(self, peer_id)
        return self.transports[peer_id]

    # ---- faults -----------------------------------------------------------------------------

    def kill(self, peer_id: str) -> None:
        """As SIGKILL: its channels close at once, and nobody answers at its address."""
        transport = self.transports.pop(peer_id, None)
        self._frozen.pop(peer_id, None)
        self._behind.pop(peer_id, None)
        if transport is not None:
            transport.die()
        self._stale = {pair: None for pair in self._stale if peer_id not in pair}

    def freeze(self, peer_id: str) -> None:
        """As SIGSTOP: what is sent to it waits; what it sends waits."""
        self._frozen.setdefault(peer_id, [])

    def thaw(self, peer_id: str) -> None:
        """As SIGCONT."""
        for deliver in self._frozen.pop(peer_id, []):
            deliver()

    def partition(self, a: str, b: str) -> None:
        """Nothing passes between two peers any more; their channels do not notice by themselves."""
        self._parted[frozenset((a, b))] = None

    def heal(self, a: str, b: str) -> None:
        """The reverse of `partition`."""
        self._parted.pop(frozenset((a, b)), None)

    # ---- addresses --------------------------------------------------------------------------

    def place(self, peer_id: str, addresses: Mapping[str, str]) -> None:
        """Where a peer can be dialled from now on: multiaddrs (without peer id, in the order in
        which it tells them), each with the network that it is on. Only who is on a network itself
        reaches its addresses; so one address may be different machines to different peers. In a
        hub with places everybody has one, and peers find each other by addresses only.

        The connections of a peer that moves lead nowhere, and nobody notices: they neither close
        nor answer until somebody drops them."""
        if self._places.get(peer_id) == addresses:
            return
        self._places[peer_id] = dict(addresses)
        transport = self.transports.get(peer_id)
        for other in transport.connected() if transport is not None else ():
            self._stale[frozenset((peer_id, other))] = None

    @property
    def has_places(self) -> bool:
        return bool(self._places)

    def addresses_of(self, peer_id: str) -> list[str]:
        """Without the peer id at their ends."""
        return list(self._places[peer_id]) if self._places else ["/memory"]

    def found_at(self, source: str, address: str) -> str | None:
        """Who answers when `source` dials an address."""
        networks = set(self._places.get(source, {}).values())
        for peer_id, addresses in self._places.items():
            if addresses.get(address) in networks and peer_id in self.transports:
                return peer_id
        return None

    def finds(self, source: str, peer_id: str, known: Sequence[str]) -> bool:
        """Does a peer answer `source` at any of its known addresses?"""
        return not self.has_places or any(self.found_at(source, a) == peer_id for a in known)

    def is_stale(self, a: str, b: str) -> bool:
        return bool(self._stale) and frozenset((a, b)) in self._stale

    def renew(self, a: str, b: str) -> None:
        """There is a new connection between two peers."""
        self._stale.pop(frozenset((a, b)), None)

    def is_parted(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self._parted

    # ---- delivery ---------------------------------------------------------------------------

    def in_transit(self, kind: int, message: Message) -> Message:
        """The message as it will arrive. Raises `ProtocolViolation` where it could not travel."""
        if not self.copy:
            return message
        check_arrays(kind, message.arrays)
        arrays = tuple(
            Array(a.dtype, a.shape, bytes(memoryview(a.data).cast("B")) if a.num_bytes else b"")
            for a in message.arrays
        )
        return Message(_by_value(message.body), arrays, message.is_background)

    def meter(self, sender: MemoryTransport, num_bytes: int) -> None:
        """Long messages tell the sender how fast its uplink is, where the network has any."""
        if num_bytes > METERED_BYTES and self._metered is not None:
            seconds = self._metered.upload_s(sender.peer_id, num_bytes)
            sender.traffic.upload.total.add(num_bytes, seconds)

    def queued_bytes(self, peer_id: str) -> int:
        """Long messages that wait for the uplink of a peer."""
        if self._metered is None:
            return 0
        now = asyncio.get_running_loop().time()
        return self._metered.upload_queue(peer_id, now)

    def when_awake(self, peer_id: str, work: Callable[[], None]) -> None:
        """Does what happens at a peer: now, or when it is thawed."""
        if peer_id in self._frozen:
            self._frozen[peer_id].append(work)
        else:
            work()

    def send(self, source: str, target: str, num_bytes: int, deliver: Callable[[], None]) -> None:
        """Calls `deliver` when a message has arrived, if it does."""
        if source in self._frozen:
            self._frozen[source].append(lambda: self.send(source, target, num_bytes, deliver))
            return
        loop = asyncio.get_running_loop()
        delay_s = self.network.delivery_s(source, target, num_bytes, loop.time())
        if delay_s is None or (self._parted and self.is_parted(source, target)):
            return
        if self.is_stale(source, target):
            return
        loop.call_later(delay_s, self.when_awake, target, deliver)

    def send_behind(
        self,
        source: str,
        target: str,
        num_bytes: int,
        deliver: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        """The same of a message in the background: its parts take what is left of the uplink.
        `is_wanted()`: asked before the first of them."""
        if self._metered is None or num_bytes <= METERED_BYTES:
            return self.send(source, target, num_bytes, deliver)
        behind = self._behind.setdefault(source, Behind())
        behind.messages.append(Delivery(target, num_bytes, deliver, is_wanted))
        if len(behind.messages) == 1:
            self._send_parts(source, behind)
        return None

    def _send_parts(self, source: str, behind: Behind) -> None:
        """As many as there is room for now; the others later."""
        loop, network = asyncio.get_running_loop(), self._metered
        while network is not None and behind.messages and self._behind.get(source) is behind:
            message, now = behind.messages[0], loop.time()
            if not message.is_begun and not message.is_wanted():
                behind.messages.popleft()
                continue
            backlog_s = network.upload_s(source, network.upload_queue(source, now))
            wait_s = behind.leftovers.wait_s(backlog_s, now)
            if wait_s > 0:
                loop.call_later(max(LEAST_WAIT_S, wait_s), self._send_parts, source, behind)
                return
            part = min(message.left_bytes, BACKGROUND_BYTES)
            message.is_begun, message.left_bytes = True, message.left_bytes - part
            if not message.left_bytes:
                behind.messages.popleft()
            deliver = _nothing if message.left_bytes else message.deliver
            self.send(source, message.target, part, deliver)
            behind.leftovers.sent(network.upload_s(source, part), now)


class MemoryTransport:
    """An endpoint of a hub; implements `transport.base.Transport`."""

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self.peer_id = peer_id
        self.traffic = Traffic(
            queued_bytes=lambda: hub.queued_bytes(peer_id),
            queued_to=lambda _: hub.queued_bytes(peer_id),  # an uplink sends in the order of calls
        )
        self.run_id = ""
        self.is_dead = False
        self.calls = PendingCalls()
        self._hub = hub
        self._handlers = Handlers()
        self._links: dict[str, None] = {}
        self._known: dict[str, tuple[str, ...]] = {}
        self._connected = Listeners()
        self._disconnected = Listeners()
        self._bans = Bans()
        self._ending: dict[tuple[str, int], asyncio.Task[None]] = {}
        """What is being served and ends with its caller."""

    # ---- the port ---------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return [f"{a}/p2p/{self.peer_id}" for a in self._hub.addresses_of(self.peer_id)]

    def set_run(self, run_id: str) -> None:
        self.run_id = run_id

    def handle(self, method: str, handler: Handler, *, ends_with_caller: bool = False) -> None:
        self._handlers.add(method, handler, ends_with_caller=ends_with_caller)

    def guard(self, gate: Gate) -> None:
        self._handlers.guard(gate)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        if self._hub.has_places and addresses:
            self._known[peer_id] = tuple(a.removesuffix(f"/p2p/{peer_id}") for a in addresses)

    def forget(self, peer_id: str) -> None:
        if peer_id not in self._links:
            self._known.pop(peer_id, None)

    def connected(self) -> list[str]:
        return list(self._links)

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self._connected.add(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self._disconnected.add(callback)

    async def dial(self, address: str, timeout_s: float = ANSWER_S) -> str:
        peer_id = address.rpartition("/p2p/")[2]
        if "/p2p/" not in address or not peer_id:
            raise AddressError(f"{address[:200]} does not end in /p2p/<peer id>")
        if peer_id == self.peer_id:
            raise AddressError("that is this peer's own address")
        if self._hub.has_places and peer_id not in self._links:
            there = self._hub.found_at(self.peer_id, address.rpartition("/p2p/")[0])
            if there is None:
                raise Unreachable(f"{address}: connection refused: nothing listens there")
            if there != peer_id:
                raise Unreachable(f"{address}: another peer answers there")
            self.learn(peer_id, [address, *self._known.get(peer_id, ())])
        try:
            async with asyncio.timeout(timeout_s):
                await self._link(peer_id)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout_s:.0f} s") from None
        return peer_id

    async def dial_back(self, asker: str, address: str, timeout_s: float) -> str:
        await self.dial(address, timeout_s)
        return ""

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        sent = self._hub.in_transit(REQUEST, message)
        try:
            async with asyncio.timeout(timeout_s):
                remote = await self._link(peer_id)
                call_id = self.calls.next_id()
                future = self.calls.add(call_id, peer_id, method, on_progress)

                def arrived() -> None:
                    remote.requested(self, call_id, method, sent)

                try:
                    self._send(peer_id, method, sent, arrived)
                    return await future
                finally:
                    self.calls.remove(call_id)
                    if future.cancelled() and remote.ends_with_caller(method):
                        self._give_up(remote, call_id)
        except TimeoutError:
            text = f"{method}: {peer_id[-8:]} did not answer within {timeout_s:.1f} s"
            raise DeadlineExceeded(text) from None

    async def drop(self, peer_id: str) -> None:
        remote = self._hub.transports.get(peer_id)
        pair = (self.peer_id, peer_id)
        is_heard = not (self._hub.is_stale(*pair) or self._hub.is_parted(*pair))
        if remote is not None and is_heard and peer_id in self._links:
            self._hub.when_awake(peer_id, functools.partial(remote.lose, self.peer_id))
        self.lose(peer_id)

    def ban(self, peer_id: str, reason: str) -> None:
        if peer_id == self.peer_id:
            return
        self._bans.add(peer_id, asyncio.get_running_loop().time())
        log.warning("%s broke the protocol (%s): its stream was closed", peer_id[-8:], reason)
        remote = self._hub.transports.get(peer_id)
        if remote is not None:
            self._hub.when_awake(peer_id, functools.partial(remote.lose, self.peer_id))
        self.lose(peer_id)

    def has_banned(self, peer_id: str) -> bool:
        """Whether a peer has no connection to this one for a while."""
        if not self._bans:  # as a rule
            return False
        return self._bans.is_banned(peer_id, asyncio.get_running_loop().time())

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        remote = self._hub.transports.get(peer_id)
        if remote is None or self.is_dead or peer_id == self.peer_id:
            return
        if self._is_barred(remote):
            return
        if peer_id not in self._links and not self._hub.finds(
            self.peer_id, peer_id, self._known.get(peer_id, ())
        ):
            return
        try:
            sent = self._hub.in_transit(NOTIFY, message)
        except ProtocolViolation as e:
            log.warning("%s was not sent: %s", method, e)
            return
        if not self._hub.is_parted(self.peer_id, peer_id):
            self._connect(remote)
        self._send(peer_id, method, sent, lambda: remote.notified(self, method, sent))

    async def close(self) -> None:
        await self._handlers.close()
        if self._hub.transports.get(self.peer_id) is self:  # not the one that came after it
            self._hub.kill(self.peer_id)

    # ---- channels ---------------------------------------------------------------------------

    async def _link(self, peer_id: str) -> MemoryTransport:
        if self.is_dead:
            raise ChannelClosed("this transport is closed")
        remote = self._hub.transports.get(peer_id)
        if remote is None or remote is self:
            raise Unreachable(f"{peer_id[-8:]}: connection refused: nothing listens there")
        if self._is_barred(remote):
            raise Unreachable(f"{peer_id[-8:]}: the connection was closed at once")
        if peer_id not in self._links:
            if self._hub.is_parted(self.peer_id, peer_id):
                await asyncio.sleep(UNREACHABLE_AFTER_S)
                raise Unreachable(f"{peer_id[-8:]}: no answer in time")
            if not self._hub.finds(self.peer_id, peer_id, self._known.get(peer_id, ())):
                raise Unreachable(f"{peer_id[-8:]}: nobody answers at any address of it")
        self._connect(remote)
        return remote

    def _is_barred(self, remote: MemoryTransport) -> bool:
        return self.has_banned(remote.peer_id) or remote.has_banned(self.peer_id)

    def _connect(self, remote: MemoryTransport) -> None:
        if remote.peer_id not in self._links:
            self._hub.renew(self.peer_id, remote.peer_id)
        self.meet(remote.peer_id)
        remote.meet(self.peer_id)

    def meet(self, peer_id: str) -> None:
        """There is a connection to a peer."""
        if peer_id not in self._links:
            self._links[peer_id] = None
            self._connected.tell(peer_id)

    def lose(self, peer_id: str) -> None:
        """The connection to a peer is gone, if there was one."""
        if self._links.pop(peer_id, 0) == 0:
            return
        self.calls.lose("the connection was lost", peer_id)
        for (caller, _), work in list(self._ending.items()):
            if caller == peer_id:
                work.cancel()
        asyncio.get_running_loop().call_soon(self._disconnected.tell, peer_id)

    def die(self) -> None:
        """Its process is gone."""
        self.is_dead = True
        self._handlers.cancel()
        for other in list(self._links):
            remote = self._hub.transports.get(other)
            if remote is not None and not self._hub.is_stale(self.peer_id, other):
                # Bound now: the same id may soon be another's.
                self._hub.when_awake(other, functools.partial(remote.lose, self.peer_id))
        self._links.clear()
        self.calls.lose("closed here")

    # ---- messages ---------------------------------------------------------------------------

    def ends_with_caller(self, method: str) -> bool:
        """As `Handlers.ends_with_caller`."""
        return self._handlers.ends_with_caller(method)

    def _give_up(self, remote: MemoryTransport, call_id: int) -> None:
        """Tells a callee that nobody waits for its answer."""

        def arrived() -> None:
            remote.given_up(self.peer_id, call_id)

        self._hub.send(self.peer_id, remote.peer_id, OVERHEAD_BYTES, arrived)

    def given_up(self, caller: str, call_id: int) -> None:
        """A caller waits no more for what ends with it."""
        work = self._ending.get((caller, call_id))
        if work is not None:
            work.cancel()

    def _send(
        self,
        target: str,
        method: str,
        message: Message,
        deliver: Callable[[], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        num_bytes = OVERHEAD_BYTES + sum(a.num_bytes for a in message.arrays)
        num_bytes += len(pack(message.body)) if self._hub.copy else estimated_bytes(message.body)
        self.traffic.add_sent(method, num_bytes)
        self._hub.meter(self, num_bytes)
        remote = self._hub.transports.get(target)

        def arrived() -> None:
            if remote is not None and not remote.is_dead:
                remote.traffic.add_received(method, num_bytes)
                deliver()

        if message.is_background:
            self._hub.send_behind(self.peer_id, target, num_bytes, arrived, is_wanted)
        else:
            self._hub.send(self.peer_id, target, num_bytes, arrived)

    def requested(
        self, caller: MemoryTransport, call_id: int, method: str, message: Message
    ) -> None:
        """A request has arrived."""
        if self.has_banned(caller.peer_id):
            return  # its connection was closed, and the call has failed
        work = self._serve(caller, call_id, method, message)
        task = self._handlers.start(caller.peer_id, work)
        if self.ends_with_caller(method):
            key = (caller.peer_id, call_id)
            self._ending[key] = task
            task.add_done_callback(lambda _: self._ending.pop(key, None))

    def notified(self, caller: MemoryTransport, method: str, message: Message) -> None:
        """A notification has arrived."""
        if self.has_banned(caller.peer_id):
            return
        work = self._handlers.hear(FIRST_SEATS, caller.peer_id, caller.run_id, method, message)
        self._handlers.start(caller.peer_id, work)

    async def _serve(
        self, caller: MemoryTransport, call_id: int, method: str, message: Message
    ) -> None:
        def progress(note: Message) -> None:
            try:
                sent = self._hub.in_transit(PROGRESS, note)
            except ProtocolViolation as e:
                log.warning("progress of %s was not sent: %s", method, e)
                return
            self._send(caller.peer_id, method, sent, lambda: caller.calls.progress(call_id, sent))

        try:
            answer = await self._handlers.answer_or_refuse(
                FIRST_SEATS, caller.peer_id, caller.run_id, method, message, progress
            )
            reply = self._hub.in_transit(REPLY, answer)
        except (RemoteError, ProtocolViolation) as e:
            self._send_error(caller, call_id, method, as_remote(e))
        else:
            self._send(
                caller.peer_id,
                method,
                reply,
                lambda: caller.calls.reply(call_id, reply),
                lambda: caller.calls.is_waiting(call_id),
            )

    def _send_error(
        self, caller: MemoryTransport, call_id: int, method: str, e: RemoteError
    ) -> None:
        described = describe(e)
        if self._hub.copy:
            try:
                described = _by_value(described)
            except ProtocolViolation as wrong:
                log.warning("the details of an error of %s cannot travel: %s", method, wrong)
                described = [*described[:2], {}]

        def arrived() -> None:
            if caller.calls.is_waiting(call_id):
                caller.calls.fail(call_id, parse_error(described))

        self._send(caller.peer_id, method, Message(described), arrived)


def _nothing() -> None:
    """More of the message is to come."""


def _by_value(body: Any) -> Any:
    """The body after its journey. Raises `ProtocolViolation` where it could not travel."""
    try:
        packed = pack(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise ProtocolViolation(f"a body that cannot travel: {str(e)[:100]}") from None
    if len(packed) > MAX_BODY_BYTES:
        raise ProtocolViolation(f"a body of {len(packed)} bytes; at most {MAX_BODY_BYTES}")
    return unpack_plain(packed)


def estimated_bytes(value: Any) -> int:
    """About how long a body would be in msgpack; cheap."""
    kind = type(value)
    fixed = FIXED_BYTES.get(kind)
    if fixed is not None:
        return fixed
    if kind is str or kind is bytes:
        return len(value) + 2
    if kind is dict:
        if len(value) > MANY_ENTRIES:  # such as stamps: all about as long
            key = next(iter(value))
            return 3 + len(value) * (estimated_bytes(key) + estimated_bytes(value[key]))
        return 3 + sum(estimated_bytes(k) + estimated_bytes(v) for k, v in value.items())
    if kind is tuple or kind is list:
        total = 3
        for v in value:
            total += estimated_bytes(v)
        return total
    if isinstance(value, (bool, int)):
        return 3
    if isinstance(value, (str, bytes)):
        return len(value) + 2
    total, names = _fields(kind)  # type: ignore[arg-type]
    for name in names:
        part = getattr(value, name)
        kind = type(part)
        if kind is str or kind is bytes:
            total += len(part) + 2
        else:
            total += FIXED_BYTES.get(kind) or estimated_bytes(part)
    return total


FIXED_BYTES: dict[type, int] = {type(None): 3, bool: 3, int: 3, float: 9}


@functools.lru_cache(maxsize=1024)
def _fields(kind: type) -> tuple[int, tuple[str, ...]]:
    """What the names of a class's fields take, and the names."""
    names = tuple(getattr(kind, "__dataclass_fields__", ()) or getattr(kind, "__slots__", ()))
    return 3 + sum(len(n) + 1 for n in names), names
