"""Writes the messages of a channel to its stream, as fast as the stream and the upload cap take
them."""

from __future__ import annotations

import asyncio

from swarmnet.transport.base import Traffic
from swarmnet.transport.calls.outbox import Outbox
from swarmnet.transport.pacing import Pacer

WRITE_BUFFER_BYTES = 256 << 10
"""Written and not yet taken by the operating system: what a small message waits behind at most."""
BATCH_BYTES = 128 << 10
"""Written at a time, about."""
JOINED_BYTES = 8 << 10
"""Smaller pieces are written as one."""


class Writer:
    """A `pacing.Sender`: takes frames from an outbox whenever the stream has room."""

    def __init__(
        self, outbox: Outbox, pacer: Pacer, traffic: Traffic, remote: str, *, is_direct: bool
    ) -> None:
        """`remote`: peer id of the other end; `is_direct`: its bytes count as direct ones."""
        self._outbox = outbox
        self._pacer = pacer
        self._traffic = traffic
        self._remote = remote
        self._is_direct = is_direct
        self._transport: asyncio.Transport | None = None
        self._is_open = True
        self._is_paused = False
        self._is_pumping = False
        self._written_bytes = 0
        self._metered_bytes: int | None = None
        """Taken by the stream when it was last metered; None while it is not saturated."""

    def begin(self, transport: asyncio.Transport) -> None:
        """Writes to this stream from now on."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport = transport

    @property
    def queued_bytes(self) -> int:
        """Of large messages: to be sent, and not yet taken by the operating system; without those
        of the background. All of it may wait for a peer that does not read."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._outbox.bulk_bytes + written

    @property
    def uplink_bytes(self) -> int:
        """Of these, what waits for the uplink: none where the peer holds the stream up."""
        now = asyncio.get_running_loop().time()
        return 0 if self._traffic.upload.is_slow(self, now) else self.queued_bytes

    def pause(self) -> None:
        """The stream's buffer is full."""
        self._is_paused = True
        self._meter()

    def resume(self) -> None:
        """The stream's buffer has room again."""
        self._is_paused = False
        self._meter()
        self.pump()
        if not self._is_paused:
            self._meter(ended=True)

    def pump(self) -> None:
        """Writes as much of the outbox as the stream, and the cap on the upload, take; to be called
        when something was put into it."""
        if self._is_pumping:
            return  # a write that failed at once came back here
        self._is_pumping = True
        try:
            while self._is_open and self._transport is not None and not self._is_paused:
                bulk, behind = self._pacer.may_send(), self._outbox.has_background
                is_due = behind and self._pacer.is_background_due()
                buffers = self._take_background() if is_due else []
                buffers += self._take(bulk) or self._take_background()
                if not buffers:
                    if not bulk and self._outbox.has_bulk:
                        self._pacer.wait(self)
                    if self._outbox.has_background:
                        self._pacer.wait_background(self)
                    return
                self._written_bytes += sum(map(len, buffers))  # before: it may be full at once
                self._transport.writelines(buffers)
        finally:
            self._is_pumping = False

    def end(self) -> None:
        """The stream is gone: forgets what was to be sent. Idempotent."""
        self._is_open = False
        if self._metered_bytes is not None:
            now = asyncio.get_running_loop().time()
            self._traffic.upload.drained(self, 0, now, ended=True)
        self._outbox.clear()
        self._pacer.forget(self)

    def _take(self, bulk: bool) -> list[bytes | memoryview]:
        """Frames for one write; small ones, and the head and first part of a large message, go to
        the operating system together."""
        frames: list[bytes | memoryview] = []
        small: list[bytes | memoryview] = []
        num_bytes = 0
        while num_bytes < BATCH_BYTES:
            taken = self._outbox.take(bulk=bulk)
            if taken is None:
                break
            method, frame = taken
            size = sum(map(len, frame))
            num_bytes += size
            self._traffic.add_sent(method, size, is_direct=self._is_direct)
            for piece in frame:
                if len(piece) < JOINED_BYTES:
                    small.append(piece)
                    continue
                if small:
                    frames.append(b"".join(small))
                    small = []
                frames.append(piece)
        if small:
            frames.append(b"".join(small))
        self._pacer.sent(num_bytes)
        return frames

    def _take_background(self) -> list[bytes | memoryview]:
        """A frame of the background, where there is room for it on the uplink behind all that is to
        be sent."""
        if not self._outbox.has_background or not self._pacer.may_send_background():
            return []
        taken = self._outbox.take_background()
        if taken is None:
            return []
        method, frame = taken
        num_bytes = sum(map(len, frame))
        self._traffic.add_sent(method, num_bytes, is_direct=self._is_direct)
        self._pacer.sent(num_bytes, is_background=True)
        return list(frame)

    def _meter(self, ended: bool = False) -> None:
        """Tells how much a stream that had more to send has taken."""
        if self._transport is None:
            return
        now = asyncio.get_running_loop().time()
        taken = self._written_bytes - self._transport.get_write_buffer_size()
        upload = self._traffic.upload
        if self._metered_bytes is None:
            upload.began(self, self._remote, now)
        else:
            upload.drained(self, max(0, taken - self._metered_bytes), now, ended=ended)
        self._metered_bytes = None if ended else taken
