"""Calls between the seats of one machine: there is no wire, the handler is called, and arrays are
handed over as they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnet.errors import ChannelClosed
from swarmnet.transport.calls.heads import Route
from swarmnet.transport.handlers import Handlers
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")


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
        """As over the wire, the handler of most methods runs on when the caller gives up. Raises as
        a call over the wire would: `RemoteError` or `ChannelClosed`."""
        if self._handlers.is_closed:
            raise ChannelClosed("this transport is closed")

        def progress(note: Message) -> None:
            if on_progress is not None and not task.done():
                try:
                    on_progress(note)
                except Exception:
                    log.exception("the progress of %s was not understood", method)

        work = self._handlers.answer_or_refuse(
            route, self._peer_id, run_id, method, message, progress
        )
        task = self._handlers.start(self._peer_id, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ChannelClosed("this transport is closed") from None
            task.add_done_callback(_seen)
            if self._handlers.ends_with_caller(method):
                task.cancel()
            raise

    def notify(self, route: Route, run_id: str, method: str, message: Message) -> None:
        """One-way; never raises."""
        if not self._handlers.is_closed:
            work = self._handlers.hear(route, self._peer_id, run_id, method, message)
            self._handlers.start(self._peer_id, work)


def _seen(task: asyncio.Task[Message]) -> None:
    """Takes note of a failure that nobody waited for."""
    if not task.cancelled():
        task.exception()
