"""Several peers on one machine's channels.

A `Seat` is a `Transport` of its own for the swarm code, with an id of its own
(`protocol.membership.seats`). On the wire its messages say from which seat to which they go;
between the seats of one machine there is no wire (`LocalCalls`): the handler is called, arrays are
handed over as they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from swarmnet.errors import ChannelClosed, SwarmnetError
from swarmnet.protocol.membership.seats import seat_id
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.transport.base import Gate, Handler, Traffic
from swarmnet.transport.calls.heads import Route
from swarmnet.transport.calls.remote_errors import as_remote
from swarmnet.transport.handlers import Handlers
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")


class Channels(Protocol):
    """The machine's, as far as a seat hears of them."""

    def on_connected(self, callback: Callable[[str], None]) -> None: ...

    def on_disconnected(self, callback: Callable[[str], None]) -> None: ...

    def forget(self, callback: Callable[[str], None]) -> None:
        """`callback` hears of no channel any more."""


class Machine(Protocol):
    """The transport whose channels the seats share."""

    peer_id: str
    run_id: str
    traffic: Traffic

    def addresses(self) -> list[str]: ...

    def set_run(self, run_id: str) -> None: ...

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None: ...

    async def dial(self, address: str, timeout_s: float) -> str: ...

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None,
        seat: int,
    ) -> Message:
        """A call by one of the machine's seats."""

    async def drop(self, peer_id: str) -> None: ...

    def notify(self, peer_id: str, method: str, message: Message, *, seat: int) -> None:
        """A notification by one of the machine's seats."""

    def connected(self) -> list[str]: ...

    @property
    def channels(self) -> Channels: ...


class Seat:
    """A further peer behind a machine's channels; the first is the `ChannelTransport` itself."""

    def __init__(self, machine: Machine, handlers: Handlers, seat: int) -> None:
        """`handlers`: the machine's; `seat`: from 1."""
        self.peer_id = seat_id(machine.peer_id, seat)
        self.seat = seat
        self.traffic: Traffic = machine.traffic
        """The machine's: a link is shared."""
        self._machine = machine
        self._handlers = handlers
        self._callbacks: list[Callable[[str], None]] = []
        """That the machine's channels tell."""
        handlers.open_seat(seat)

    def addresses(self) -> list[str]:
        return self._machine.addresses()

    def set_run(self, run_id: str) -> None:
        if run_id != self._machine.run_id:
            self._machine.set_run(run_id)

    def handle(self, method: str, handler: Handler) -> None:
        self._handlers.add(method, handler, self.seat)

    def guard(self, gate: Gate) -> None:
        self._handlers.guard(gate, self.seat)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self._machine.learn(peer_id, addresses)

    async def dial(self, address: str, timeout_s: float = ANSWER_S) -> str:
        return await self._machine.dial(address, timeout_s)

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        return await self._machine.call(
            peer_id, method, message, timeout_s=timeout_s, on_progress=on_progress, seat=self.seat
        )

    async def drop(self, peer_id: str) -> None:
        await self._machine.drop(peer_id)

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        self._machine.notify(peer_id, method, message, seat=self.seat)

    def connected(self) -> list[str]:
        return [*self._machine.connected(), self._machine.peer_id]

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)
        self._machine.channels.on_connected(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)
        self._machine.channels.on_disconnected(callback)

    async def close(self) -> None:
        """Nothing is served here any more, and nothing heard; the machine's channels stay."""
        self._handlers.remove_seat(self.seat)
        for callback in self._callbacks:
            self._machine.channels.forget(callback)


class LocalCalls:
    """Calls from one seat of a machine to another."""

    def __init__(self, peer_id: str, handlers: Handlers) -> None:
        """`peer_id`: the machine's; `handlers`: those of all its seats."""
        self._peer_id = peer_id
        self._handlers = handlers

    async def call(
        self,
        route: Route,
        run_id: str,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
    ) -> Message:
        """Like any handler, the handler runs on when the caller gives up. Raises as a call over
        the wire would: `RemoteError` or `ChannelClosed`."""
        if self._handlers.is_closed:
            raise ChannelClosed("this transport is closed")

        def progress(note: Message) -> None:
            if on_progress is not None and not task.done():
                try:
                    on_progress(note)
                except Exception:
                    log.exception("the progress of %s was not understood", method)

        work = self._answer(route, run_id, method, message, progress)
        task = self._handlers.start(self._peer_id, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ChannelClosed("this transport is closed") from None
            task.add_done_callback(_seen)
            raise

    def notify(self, route: Route, run_id: str, method: str, message: Message) -> None:
        """One-way; never raises."""
        if not self._handlers.is_closed:
            self._handlers.start(self._peer_id, self._hear(route, run_id, method, message))

    async def _answer(
        self,
        route: Route,
        run_id: str,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
    ) -> Message:
        try:
            return await self._handlers.answer(
                route, self._peer_id, run_id, method, message, progress
            )
        except SwarmnetError as e:
            raise as_remote(e) from None
        except Exception as e:
            log.exception("%s failed", method)
            raise as_remote(e) from None

    async def _hear(self, route: Route, run_id: str, method: str, message: Message) -> None:
        try:
            await self._handlers.answer(
                route, self._peer_id, run_id, method, message, lambda _: None
            )
        except SwarmnetError as e:
            log.debug("%s from seat %d: %s", method, route[0], e)
        except Exception:
            log.exception("%s failed", method)


def _seen(task: asyncio.Task[Message]) -> None:
    """Takes note of a failure that nobody waited for."""
    if not task.cancelled():
        task.exception()
