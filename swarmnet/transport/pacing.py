"""The upload cap of a peer: all its channels, direct or not, share one bucket.

Small messages always go at once, and are paid for; parts of large ones wait their turn, a channel
after the other, a write each.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from swarmnet.protocol.resource_limits import UploadBucket
from swarmnet.protocol.timing import LEAST_WAIT_S


class Sender(Protocol):
    """A channel."""

    def pump(self) -> None:
        """Writes what it may."""


class Pacer:
    """Says when bulk may be sent."""

    def __init__(self) -> None:
        self._bucket = UploadBucket()
        self._waiting: dict[Sender, None] = {}
        self._serving = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """The cap."""
        return self._bucket.bytes_per_s

    def limit(self, bytes_per_s: float | None) -> None:
        """Sets the cap; None = none."""
        self._bucket.limit(bytes_per_s, asyncio.get_running_loop().time())
        self._serve()

    def may_send(self) -> bool:
        """May the next write have parts of large messages?"""
        if self._bucket.bytes_per_s is None:
            return True
        if self._waiting and not self._serving:
            return False  # others are first
        return self._bucket.wait_s(asyncio.get_running_loop().time()) <= 0

    def sent(self, num_bytes: int) -> None:
        """So many bytes were written."""
        if self._bucket.bytes_per_s is not None:
            self._bucket.spend(num_bytes, asyncio.get_running_loop().time())

    def wait(self, sender: Sender) -> None:
        """Has `sender.pump()` called when it is its turn."""
        self._waiting.setdefault(sender)
        if self._timer is None and not self._serving:
            self._set_timer()

    def forget(self, sender: Sender) -> None:
        """It waits no more."""
        self._waiting.pop(sender, None)

    def close(self) -> None:
        """Idempotent."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = max(LEAST_WAIT_S, self._bucket.wait_s(loop.time()))
        self._timer = loop.call_later(wait_s, self._serve)

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        self._serving = True
        try:
            while self._waiting and self._bucket.wait_s(loop.time()) <= 0:
                sender = next(iter(self._waiting))
                del self._waiting[sender]
                sender.pump()
        finally:
            self._serving = False
        if self._waiting:
            self._set_timer()
