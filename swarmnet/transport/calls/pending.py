"""The calls that one side has made and that are not answered yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.errors import ChannelClosed, ProtocolViolation, RemoteError
from swarmnet.transport.frames import PART_BYTES
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")


@dataclass(slots=True)
class PendingCall:
    """A call that waits for its reply."""

    remote: str
    """Peer id of the callee."""
    method: str
    future: asyncio.Future[Message]
    on_progress: Callable[[Message], None] | None
    on_part: Callable[[], None] | None
    _part_bytes: int = 0
    """Of the reply, that have come since `on_part` was called."""

    def progressed(self, note: Message) -> None:
        """A progress message has come. The call fails where it is none."""
        if self.on_progress is None:
            return
        try:
            self.on_progress(note)
        except ProtocolViolation as e:
            if not self.future.done():
                self.future.set_exception(e)
        except Exception:
            log.exception("the progress of %s was not understood", self.method)

    def part_came(self, num_bytes: int) -> None:
        """Bytes of the reply's arrays have."""
        self._part_bytes += num_bytes
        if self.on_part is not None and self._part_bytes >= PART_BYTES:
            self._part_bytes = 0
            self.on_part()


class PendingCalls:
    """Calls by their ids, which count from 1 and wrap around at 32 bits."""

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}
        self._num_made = 0

    def next_id(self) -> int:
        """The id of the next call."""
        self._num_made += 1
        return self._num_made & 0xFFFFFFFF

    def was_made(self, call_id: int) -> bool:
        """Has there been a call with this id? After the wrap-around every id has been used."""
        return call_id <= self._num_made

    def add(
        self,
        call_id: int,
        remote: str,
        method: str,
        on_progress: Callable[[Message], None] | None,
        on_part: Callable[[], None] | None = None,
    ) -> asyncio.Future[Message]:
        """The future reply. It fails with a `RemoteError` where the callee answers with an error,
        with `ChannelClosed` where the connection is lost. `on_part`: called whenever as much of
        its arrays has come as a part holds."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = PendingCall(remote, method, future, on_progress, on_part)
        return future

    def remove(self, call_id: int) -> None:
        """The caller waits no more. Idempotent."""
        self._calls.pop(call_id, None)

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def is_waiting(self, call_id: int) -> bool:
        """Does the caller still wait for an answer?"""
        call = self._calls.get(call_id)
        return call is not None and not call.future.done()

    def method_of(self, call_id: int) -> str | None:
        """None where no such call is pending."""
        call = self._calls.get(call_id)
        return None if call is None else call.method

    def progress(self, call_id: int, note: Message) -> None:
        """A progress message has arrived."""
        call = self._calls.get(call_id)
        if call is not None:
            call.progressed(note)

    def part(self, call_id: int, num_bytes: int) -> None:
        """Bytes of a reply's arrays have come. Fewer than a part holds do not count: whoever sends
        one byte at a time keeps nobody waiting."""
        call = self._calls.get(call_id)
        if call is not None:
            call.part_came(num_bytes)

    def reply(self, call_id: int, reply: Message) -> None:
        """A reply has arrived; without effect where the caller gave up."""
        call = self._calls.get(call_id)
        if call is not None and not call.future.done():
            call.future.set_result(reply)

    def fail(self, call_id: int, error: RemoteError) -> None:
        """An error has arrived; without effect where the caller gave up."""
        if self.is_waiting(call_id):
            self._calls[call_id].future.set_exception(error)

    def lose(self, reason: str, remote: str | None = None) -> None:
        """The connection to a peer is gone (None: every connection): its calls fail with
        `ChannelClosed`."""
        for call in list(self._calls.values()):
            if remote in (None, call.remote) and not call.future.done():
                text = f"the channel to {call.remote[-8:]} closed: {reason}"
                call.future.set_exception(ChannelClosed(text))
