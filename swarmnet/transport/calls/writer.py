"""Writes the messages of a channel to its stream, as fast as the stream and the upload cap take
them."""

from __future__ import annotations

import asyncio
import logging
from asyncio import selector_events

from swarmnet.protocol.timing import ANSWER_S, UPKEEP_S
from swarmnet.transport.base import Traffic
from swarmnet.transport.calls.outbox import Outbox, Outgoing, Stalled
from swarmnet.transport.calls.replies import ReplyRoom
from swarmnet.transport.frames import ANSWERS
from swarmnet.transport.pacing import Pacer

log = logging.getLogger("swarmnet.transport")

WRITE_BUFFER_BYTES = 256 << 10
"""Written and not yet taken by the operating system: what a small message waits behind at most."""
NARROW_BUFFER_BYTES = 16 << 10
"""Likewise, of a stream to a machine without standing. Not 0: uvloop's TLS never says then that all
of it was taken."""
BATCH_BYTES = 128 << 10
"""Written at a time, about."""
JOINED_BYTES = 8 << 10
"""Smaller pieces are written as one."""
UNREAD_S, UNREAD_BY_STRANGER_S = UPKEEP_S, ANSWER_S
"""A stream that is full, and takes nothing more for so long, is closed: nobody reads at its other
end."""


class Writer:
    """A `pacing.Sender`: takes frames from an outbox whenever the stream has room. A
    `replies.Reader` too: the peer at the other end. And the `served.Answers` of its channel."""

    def __init__(
        self,
        outbox: Outbox,
        pacer: Pacer,
        traffic: Traffic,
        replies: ReplyRoom,
        remote: str,
        *,
        is_direct: bool,
    ) -> None:
        """`replies`: is told what waits; `remote`: peer id of the other end; `is_direct`: its bytes
        count as direct ones."""
        self._outbox = outbox
        self._pacer = pacer
        self._traffic = traffic
        self._replies = replies
        self.remote = remote
        self.is_open = True
        self.why_ended = ""
        """Where the stream was ended here, for the calls that were open on it."""
        self._is_direct = is_direct
        self._transport: asyncio.Transport | None = None
        self._keeps_buffers = False
        """`writelines` of asyncio's own stream over a socket copies nothing from Python 3.12 on, so
        that what changes later would be sent; and it does not say that the stream is full, up to
        3.12.8 and 3.13.1 (https://github.com/python/cpython/issues/127655)."""
        self._is_paused = False
        self._is_pumping = False
        self._is_narrow = False
        self._unread: asyncio.TimerHandle | None = None
        """Runs while the stream takes nothing."""
        self._written_bytes = 0
        self._metered_bytes: int | None = None
        """Taken by the stream when it was last metered; None while it is not saturated."""

    def begin(self, transport: asyncio.Transport) -> None:
        """Writes to this stream from now on."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport = transport
        self._keeps_buffers = type(transport).__module__ == selector_events.__name__

    def narrow(self, is_narrow: bool) -> None:
        """`is_narrow`: the stream gets no more while anything that was written waits; what it takes
        says nothing of the uplink then. So a stream to a machine without standing keeps little, and
        it is known how much."""
        if is_narrow == self._is_narrow or self._transport is None:
            return
        self._is_narrow = is_narrow
        if self._metered_bytes is not None:
            self._meter(ended=True)
        high = NARROW_BUFFER_BYTES if is_narrow else WRITE_BUFFER_BYTES
        self._transport.set_write_buffer_limits(high=high)

    @property
    def waiting_bytes(self) -> int:
        """Of all messages: to be sent, and not yet taken by the operating system."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._outbox.waiting_bytes + written

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
        is_stranger = self._replies.is_stranger(self.remote)
        longest_s = UNREAD_BY_STRANGER_S if is_stranger else UNREAD_S
        self._read_on()
        self._unread = asyncio.get_running_loop().call_later(longest_s, self.give_up)

    def resume(self) -> None:
        """The stream's buffer has room again."""
        self._is_paused = False
        self._read_on()
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
            while self.is_open and self._transport is not None and not self._is_paused:
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
                if self._keeps_buffers:
                    self._transport.write(b"".join(buffers))
                else:
                    self._transport.writelines(buffers)
        finally:
            self._is_pumping = False
            self._tell_waiting()

    def send(self, message: Outgoing) -> None:
        """`served.Answers`"""
        if not self.is_open:
            return
        if message.kind in ANSWERS:
            self.narrow(self._replies.is_stranger(self.remote))
        try:
            self._outbox.put(message)
            self.pump()
        except Stalled as e:
            self.abort(str(e))

    def withdraw_reply(self, call_id: int) -> None:
        """`served.Answers`"""
        self._outbox.withdraw_reply(call_id)
        self.pump()

    def give_up(self) -> None:
        """`replies.Reader`"""
        log.debug("%s does not read what it is sent", self.remote[-8:])
        self.abort("it does not read what is sent to it")

    def abort(self, reason: str) -> None:
        """Closes the stream at once, of which its channel hears as of any end."""
        if self._transport is not None and self.is_open:
            self.why_ended = reason
            self._transport.abort()
            self.end()

    def end(self) -> None:
        """The stream is gone: forgets what was to be sent. Idempotent."""
        self.is_open = False
        self._read_on()
        if self._metered_bytes is not None:
            now = asyncio.get_running_loop().time()
            self._traffic.upload.drained(self, 0, now, ended=True)
        self._outbox.clear()
        self._pacer.forget(self)
        self._replies.waits(self, self.remote, 0, asyncio.get_running_loop().time())

    def _tell_waiting(self) -> None:
        if self.is_open:
            now = asyncio.get_running_loop().time()
            self._replies.waits(self, self.remote, self.waiting_bytes, now)

    def _read_on(self) -> None:
        """The peer reads, or its stream is gone."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
        if self._transport is None or (self._is_narrow and self._metered_bytes is None):
            return
        now = asyncio.get_running_loop().time()
        taken = self._written_bytes - self._transport.get_write_buffer_size()
        upload = self._traffic.upload
        if self._metered_bytes is None:
            upload.began(self, now)
        else:
            upload.drained(self, max(0, taken - self._metered_bytes), now, ended=ended)
        self._metered_bytes = None if ended else taken
