"""When a peer may send, all its channels together, direct or not.

Its owner may cap the upload. Small messages go at once then, and are paid for; parts of large ones
wait their turn, a channel after the other, a write each. Messages in the background
(`Message.is_background`) take what the others leave of the uplink, in turn too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from swarmnet.protocol.bandwidth import UploadMeter
from swarmnet.protocol.leftovers import Backlog, Leftovers
from swarmnet.protocol.resource_limits import UploadBucket
from swarmnet.protocol.timing import LEAST_WAIT_S


class Sender(Protocol):
    """A channel."""

    def pump(self) -> None:
        """Writes what it may."""


class Queue:
    """Senders that wait for the same thing, which each of them has for one write in turn."""

    def __init__(
        self, wait_s: Callable[[], float], before: Callable[[], None] = lambda: None
    ) -> None:
        """`wait_s()`: seconds until one may write; `before()` is called before one does."""
        self._wait_s = wait_s
        self._before = before
        self._waiting: dict[Sender, None] = {}
        self._serving = False
        self._timer: asyncio.TimerHandle | None = None

    def may_send(self) -> bool:
        """May the next write be that of who asks?"""
        if self._waiting and not self._serving:
            return False  # others are first
        return self._wait_s() <= 0

    def wait(self, sender: Sender) -> None:
        """Has `sender.pump()` called when it is its turn."""
        self._waiting.setdefault(sender)
        if self._timer is None and not self._serving:
            self._set_timer()

    def forget(self, sender: Sender) -> None:
        """It waits no more."""
        self._waiting.pop(sender, None)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
        self._stop()

    def serve(self) -> None:
        """Lets write who may."""
        self._stop()
        self._serving = True
        try:
            self._before()
            while self._waiting and self._wait_s() <= 0:
                sender = next(iter(self._waiting))
                del self._waiting[sender]
                sender.pump()
                self._before()
        finally:
            self._serving = False
        if self._waiting:
            self._set_timer()

    def _set_timer(self) -> None:
        wait_s = max(LEAST_WAIT_S, self._wait_s())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.serve)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Pacer:
    """Says when bulk may be sent, and when the background."""

    def __init__(
        self, upload: UploadMeter | None = None, queued_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`upload`: knows the rate of the uplink; `queued_bytes()`: of large messages, without the
        background, that no stream has taken yet."""
        self._upload = upload or UploadMeter()
        self._queued_bytes = queued_bytes
        self._bucket = UploadBucket()
        self._backlog = Backlog()
        self._leftovers = Leftovers()
        self._bulk = Queue(lambda: self._bucket.wait_s(_now()), self._serve_due)
        self._background = Queue(self._background_wait_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The cap."""
        return self._bucket.bytes_per_s

    def limit(self, bytes_per_s: float | None) -> None:
        """Sets the cap; None = none."""
        self._bucket.limit(bytes_per_s, _now())
        self._bulk.serve()
        self._background.serve()

    def may_send(self) -> bool:
        """May the next write have parts of large messages?"""
        return self._bucket.bytes_per_s is None or self._bulk.may_send()

    def may_send_background(self) -> bool:
        """May the next write be a part of a message in the background?"""
        return self._background.may_send()

    def is_background_due(self) -> bool:
        """May it be that even before large messages?"""
        return self._leftovers.is_due(_now()) and self._background.may_send()

    def _serve_due(self) -> None:
        """Under a cap there is never room behind the others."""
        if self._leftovers.is_due(_now()):
            self._background.serve()

    def sent(self, num_bytes: int, *, is_background: bool = False) -> None:
        """So many bytes were written."""
        now, rate = _now(), self._rate()
        self._bucket.spend(num_bytes, now)
        self._backlog.add(num_bytes, rate, now)
        if is_background and rate > 0:
            self._leftovers.sent(num_bytes / rate, now)

    def wait(self, sender: Sender) -> None:
        """Has `sender.pump()` called when bulk of it may be sent."""
        self._bulk.wait(sender)

    def wait_background(self, sender: Sender) -> None:
        """Has `sender.pump()` called when there is room for the background."""
        self._background.wait(sender)

    def forget(self, sender: Sender) -> None:
        """It waits no more."""
        self._bulk.forget(sender)
        self._background.forget(sender)

    def close(self) -> None:
        """Idempotent."""
        self._bulk.clear()
        self._background.clear()

    def _rate(self) -> float:
        """Bytes/s of the uplink; 0 where that is not known."""
        measured, cap = self._upload.known_bytes_per_s, self._bucket.bytes_per_s
        return measured if cap is None else min(measured or cap, cap)

    def _background_wait_s(self) -> float:
        now, rate = _now(), self._rate()
        if rate <= 0:
            return self._bucket.wait_s(now)
        backlog_s = self._backlog.seconds(now) + self._queued_bytes() / rate
        return max(self._bucket.wait_s(now), self._leftovers.wait_s(backlog_s, now))


def _now() -> float:
    return asyncio.get_running_loop().time()
