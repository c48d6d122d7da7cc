"""The handlers of a machine's seats, and the tasks in which they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarmnet.errors import NotReady
from swarmnet.protocol.membership.seats import seat_id
from swarmnet.protocol.rate import RateLimiter
from swarmnet.transport.base import Handler, Request
from swarmnet.transport.calls.heads import Route
from swarmnet.wire import Message

T = TypeVar("T")


class Handlers:
    """A `served.Service`. The first seat is always there; its number is 0."""

    def __init__(self, calls_per_peer: RateLimiter | None = None) -> None:
        """`calls_per_peer`: how often a peer may call; None: as often as it likes."""
        self.is_closed = False
        self._calls_per_peer = calls_per_peer
        self._first: dict[str, Handler] = {}
        self._by_seat: dict[int, dict[str, Handler]] = {0: self._first}
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._num_running: dict[str, int] = {}

    # ---- seats ------------------------------------------------------------------------------

    def open_seat(self, seat: int) -> None:
        """A seat without handlers, in place of any that had this number."""
        self._by_seat[seat] = {}

    def remove_seat(self, seat: int) -> None:
        """Calls to it are answered `NotReady` from now on."""
        self._by_seat.pop(seat, None)

    def add(self, method: str, handler: Handler, seat: int = 0) -> None:
        """Serves `method` at a seat; without effect where the seat was removed."""
        if seat in self._by_seat:
            self._by_seat[seat][method] = handler

    def __getitem__(self, method: str) -> Handler:
        """The first seat's handler of a method. Raises `KeyError`."""
        return self._first[method]

    def serves(self, method: str) -> bool:
        """Is there a handler at any seat?"""
        if method in self._first:
            return True
        return any(method in handlers for handlers in self._by_seat.values())

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
        where there is none, and what the handler raises."""
        caller, target = route
        handlers = self._by_seat.get(target)
        handler = None if handlers is None else handlers.get(method)
        if handler is None:
            raise NotReady(f"{method[:64]} is not served here")
        return await handler(Request(seat_id(remote, caller), run_id, method, message, progress))

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
