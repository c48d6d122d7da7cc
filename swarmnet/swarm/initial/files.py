"""The spec and the files of a run (a tokenizer, a chat template): every peer has them, and gives
them to others, also to those that are yet to join.

The spec is known by the run's id, which is its hash, and a file by its hash and its size, which
stand in the spec. So it does not matter who sends them, and no more is taken in than was announced.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from swarmnet.errors import Busy, NotReady, ProtocolViolation, SwarmnetError
from swarmnet.methods.contact import SPEC, SpecReply
from swarmnet.methods.state import RUN_FILE, FileReply, FileRequest
from swarmnet.ports import Worker
from swarmnet.protocol.timing import ANSWER_S, BULK_S
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.timing import MAX_TRIES, RETRY_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.peer")

PART_BYTES = 1 << 20
MAX_OTHERS_HERE = 4
"""Other runs of which a line is said: anybody may name any."""
SHOWN_CHARACTERS = 16
"""Of a run's id, in a line."""


class SpecService:
    """Gives the run's spec to newcomers, which know only an address."""

    def __init__(self, transport: Transport, run_id: str, spec: bytes) -> None:
        """`spec`: its canonical bytes."""
        self._run_id = run_id
        self._spec = spec
        self._others_here: list[str] = []
        serve(transport, SPEC, self._on_spec)

    async def _on_spec(self, request: Request[None]) -> Message[SpecReply]:
        """One that is in a run already starts that one, and looks whether another is alive here."""
        other, own = request.run_id, self._run_id
        if other not in ("", own, *self._others_here) and len(self._others_here) < MAX_OTHERS_HERE:
            self._others_here.append(other)
            log.warning(
                "a peer that starts another run (%s) found this one (%s) alive; each needs a "
                "--ready-file of its own, and a compose project",
                other[:SHOWN_CHARACTERS],
                own[:SHOWN_CHARACTERS],
            )
        return Message(SpecReply(own, self._spec))


async def fetch_spec(transport: Transport, peer_id: str, timeout_s: float = ANSWER_S) -> SpecReply:
    """The spec of the run that a peer belongs to; the caller checks the hash."""
    reply = await call(transport, peer_id, SPEC, Message(), timeout_s=timeout_s)
    return reply.body


class FileService:
    """Gives the run's files to whoever asks."""

    def __init__(
        self,
        transport: Transport,
        sizes: Mapping[str, int],
        read: Callable[[str, int, int], bytes | None],
        worker: Worker,
    ) -> None:
        """`sizes`: of the files of the run in bytes, by SHA-256. `read(sha256, offset, num_bytes)`:
        a part of one, None where it is not here."""
        self._sizes = sizes
        self._read = read
        self._worker = worker
        serve(transport, RUN_FILE, self._on_file)

    async def _on_file(self, request: Request[FileRequest]) -> Message[FileReply]:
        wanted = request.message.body
        size, part = self._sizes.get(wanted.sha256), b""
        if size is not None and wanted.offset >= size:  # known without the disk, nor the worker
            return _reply(size, part)
        if size is not None:
            num_bytes = min(PART_BYTES, size - wanted.offset)
            read = await self._worker.run(
                lambda: self._read(wanted.sha256, wanted.offset, num_bytes)
            )
            part = b"" if read is None else read
        if size is None or not part:
            raise NotReady("this peer has no such file")
        return _reply(size, part)


def _reply(size: int, part: bytes) -> Message[FileReply]:
    return Message(FileReply(size), (Array("uint8", (len(part),), part),))


async def fetch_file(
    transport: Transport, peer_ids: Sequence[str], sha256: str, size: int
) -> bytes:
    """A file of the run, from any of some peers, checked. Raises `SwarmnetError` where none of them
    gives it."""
    error: SwarmnetError = NotReady("nobody to ask")
    for peer_id in peer_ids:
        try:
            data = await _fetch_from(transport, peer_id, sha256, size)
        except SwarmnetError as e:
            error = e
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        error = ProtocolViolation("a file does not match its hash")
    raise error


async def _fetch_from(transport: Transport, peer_id: str, sha256: str, size: int) -> bytes:
    data = bytearray()
    tries = 0
    while len(data) < size:
        try:
            reply = await call(
                transport,
                peer_id,
                RUN_FILE,
                Message(FileRequest(sha256, len(data))),
                timeout_s=BULK_S,
            )
        except Busy as e:
            tries += 1
            if tries > MAX_TRIES:
                raise
            await asyncio.sleep(max(RETRY_S, min(e.backlog_s, BULK_S)))
            continue
        if reply.body.size != size or len(reply.arrays) != 1:
            raise ProtocolViolation("a file of another size than the run says")
        part = bytes(reply.arrays[0].data)
        if not 0 < len(part) <= min(PART_BYTES, size - len(data)):
            raise ProtocolViolation("a part of a file that is too long or empty")
        data += part
    return bytes(data)
