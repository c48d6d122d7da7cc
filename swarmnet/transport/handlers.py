"""The handlers of a machine's seats, and the tasks in which they run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from swarmnet.errors import NotReady, RemoteError, SwarmnetError, Unsupported
from swarmnet.protocol.membership.peer_ids import seat_id
from swarmnet.protocol.rate import RateLimiter
from swarmnet.transport.base import Envelope, Gate, Handler, Request
from swarmnet.transport.calls.heads import Route, as_remote
from swarmnet.wire import Message, Packed, unpack_plain

log = logging.getLogger("swarmnet.transport")

T = TypeVar("T")


class Handlers:
    """A `served.Service`. The first seat is always there; its number is 0."""

    def __init__(self, calls_per_peer: RateLimiter | None = None) -> None:
        """`calls_per_peer`: how often a peer may call; None: as often as it likes."""
        self.is_closed = False
        self._calls_per_peer = calls_per_peer
        self._first: dict[str, Handler] = {}
        self._by_seat: dict[int, dict[str, Handler]] = {0: self._first}
        self._gates: dict[int, Gate] = {}
        self._ending: set[str] = set()
        """Methods whose work ends with its caller."""
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._num_running: dict[str, int] = {}

    # ---- seats ------------------------------------------------------------------------------

    def open_seat(self, seat: int) -> None:
        """A seat without handlers, in place of any that had this number."""
        self._by_seat[seat] = {}
        self._gates.pop(seat, None)

    def remove_seat(self, seat: int) -> None:
        """Calls to it are answered `NotReady` from now on."""
        self._by_seat.pop(seat, None)
        self._gates.pop(seat, None)

    def guard(self, gate: Gate, seat: int = 0) -> None:
        """As `Transport.guard`, for a seat."""
        self._gates[seat] = gate
        for method in self._by_seat.get(seat, ()):
            self._must_know(method, seat)

    def add(
        self, method: str, handler: Handler, seat: int = 0, *, ends_with_caller: bool = False
    ) -> None:
        """Serves `method` at a seat; without effect where the seat was removed. Raises `ValueError`
        where the seat's gate does not know the method."""
        if seat in self._by_seat:
            self._must_know(method, seat)
            self._by_seat[seat][method] = handler
            if ends_with_caller:
                self._ending.add(method)

    def _must_know(self, method: str, seat: int) -> None:
        gate = self._gates.get(seat)
        if gate is not None and not gate.knows(method):
            raise ValueError(f"it is not said who may call {method}")

    def __getitem__(self, method: str) -> Handler:
        """The first seat's handler of a method. Raises `KeyError`."""
        return self._first[method]

    def serves(self, method: str) -> bool:
        """Is there a handler at any seat?"""
        if method in self._first:
            return True
        return any(method in handlers for handlers in self._by_seat.values())

    def ends_with_caller(self, method: str) -> bool:
        """Is the handler of a method to be cancelled when its caller waits no more?"""
        return method in self._ending

    def has_standing(self, machine: str) -> bool:
        """Whether a peer on that machine has been let in here; everyone where there is no gate."""
        gates = self._gates
        return not gates or any(gate.has_standing(machine) for gate in gates.values())

    def check(self, route: Route, envelope: Envelope) -> None:
        """Raises what a call from the machine `envelope.remote` would be refused with, as far as
        that is known before its body is decoded and its arrays have come."""
        caller, target = route
        if envelope.method not in self._by_seat.get(target, ()):
            raise self._unserved(envelope.method, target)
        gate = self._gates.get(target)
        if gate is not None:
            gate.check(replace(envelope, remote=seat_id(envelope.remote, caller)))

    async def answer(
        self,
        route: Route,
        remote: str,
        run_id: str,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
    ) -> Message:
        """What the handler of a method says to a seat of the machine `remote`. Raises `NotReady`
        or `Unsupported` where there is none, what the gate of the callee's seat raises, and what
        the handler raises."""
        caller, target = route
        handlers = self._by_seat.get(target)
        handler = None if handlers is None else handlers.get(method)
        if handler is None:
            raise self._unserved(method, target)
        peer_id, body, gate = seat_id(remote, caller), message.body, self._gates.get(target)
        if gate is not None:
            num_bytes = len(body.data) if isinstance(body, Packed) else 0
            arrays = sum(array.num_bytes for array in message.arrays)
            body = gate.enter(Envelope(peer_id, run_id, method, num_bytes, arrays), body)
        elif isinstance(body, Packed):
            body = unpack_plain(body.data)
        request = Request(peer_id, run_id, method, Message(body, message.arrays), progress)
        return await handler(request)

    async def answer_or_refuse(
        self,
        route: Route,
        remote: str,
        run_id: str,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
    ) -> Message:
        """As `answer`, but raises `RemoteError` alone, as the caller will see it."""
        try:
            return await self.answer(route, remote, run_id, method, message, progress)
        except SwarmnetError as e:
            raise as_remote(e) from None
        except Exception as e:
            log.exception("%s failed", method)
            raise as_remote(e) from None

    async def hear(
        self, route: Route, remote: str, run_id: str, method: str, message: Message
    ) -> None:
        """A notification: nobody waits for its outcome."""
        try:
            await self.answer(route, remote, run_id, method, message, lambda _: None)
        except SwarmnetError as e:
            log.debug("%s from %s: %s", method, seat_id(remote, route[0])[-8:], e)
        except Exception:
            log.exception("%s failed", method)

    def _unserved(self, method: str, seat: int) -> RemoteError:
        """What a call of a method without a handler is answered. It may be served later where the
        seat's gate knows it, or where there is no gate yet to ask."""
        gate = self._gates.get(seat)
        if gate is None or gate.knows(method):
            return NotReady(f"{method[:64]} is not served here")
        return Unsupported(f"{method[:64]} is no method here; do without, or ask a newer peer")

    # ---- tasks ------------------------------------------------------------------------------

    def allows(self, remote: str) -> bool:
        """Counts a call of a peer; False where it calls too often."""
        limiter = self._calls_per_peer
        return limiter is None or limiter.allows(remote, asyncio.get_running_loop().time())

    def num_running(self, remote: str) -> int:
        """Handlers that work for a peer."""
        return self._num_running.get(remote, 0)

    def start(self, remote: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a handler for a peer; it lives until it is done or `close` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = remote
        self._num_running[remote] = self.num_running(remote) + 1
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        remote = self._tasks.pop(task)
        self._num_running[remote] -= 1
        if not self._num_running[remote]:
            del self._num_running[remote]

    async def close(self) -> None:
        """Cancels what runs and waits for its end. Requests that come meanwhile are still started:
        close again once the channels are closed."""
        self.is_closed = True
        await asyncio.gather(*self.cancel(), return_exceptions=True)

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancels what runs; returns it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks
