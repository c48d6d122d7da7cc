"""The spec and the files of a run (a tokenizer, a chat template): every peer has them, and gives
them to others, also to those that are yet to join.

The spec is known by the run's id, which is its hash, and a file by its hash and its size, which
stand in the spec. So it does not matter who sends them, and no more is taken in than was announced.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from swarmnet.causes import Failures
from swarmnet.errors import Busy, NotReady, ProtocolViolation
from swarmnet.methods.contact import SPEC, SpecReply
from swarmnet.methods.state import RUN_FILE, FileReply, FileRequest
from swarmnet.ports import Worker
from swarmnet.protocol.timing import ANSWER_S, BULK_S
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.downloads import Downloads
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
    transport: Transport,
    givers: Sequence[str],
    sha256: str,
    size: int,
    rng: random.Random,
    failures: Failures | None = None,
) -> bytes:
    """A file of the run, from some peers, checked; others may be added to `givers` meanwhile. Its
    parts come from any of them; where they do not make the file, all of it from one. Raises
    `SwarmnetError` where they do not give it; `failures` takes why, of each."""
    downloads = Downloads(rng, failures)

    async def part_from(giver: str) -> bytes:
        return await _ask(transport, giver, FileRequest(sha256, len(data)), size)

    async def all_from(giver: str) -> bytes:
        return await _whole(transport, giver, sha256, size)

    data = bytearray()
    while len(data) < size:
        data += await _when_free(downloads, givers, part_from, min(PART_BYTES, size - len(data)))
    if _is_right(data, sha256):
        return bytes(data)
    return await _when_free(downloads, givers, all_from, size)


async def _when_free(
    downloads: Downloads,
    givers: Sequence[str],
    ask: Callable[[str], Awaitable[bytes]],
    num_bytes: int,
) -> bytes:
    """A piece. Waits where all that have it are busy."""
    for _ in range(MAX_TRIES):
        try:
            return (await downloads.piece(givers, ask, num_bytes))[1]
        except Busy as e:
            await asyncio.sleep(max(RETRY_S, min(e.backlog_s, BULK_S)))
    raise NotReady("all that have the file are busy")


async def _whole(transport: Transport, giver: str, sha256: str, size: int) -> bytes:
    """All of a file from one peer, which may be busy between two parts. Raises `SwarmnetError`."""
    data, num_busy = bytearray(), 0
    while len(data) < size:
        try:
            data += await _ask(transport, giver, FileRequest(sha256, len(data)), size)
            num_busy = 0
        except Busy as e:
            num_busy += 1
            if num_busy > MAX_TRIES:
                raise
            await asyncio.sleep(max(RETRY_S, min(e.backlog_s, BULK_S)))
    if not _is_right(data, sha256):
        raise ProtocolViolation("a file does not match its hash")
    return bytes(data)


async def _ask(transport: Transport, giver: str, request: FileRequest, size: int) -> bytes:
    """The part of a file that begins where the request says. Raises `SwarmnetError`."""
    reply = await call(transport, giver, RUN_FILE, Message(request), timeout_s=BULK_S)
    if reply.body.size != size or len(reply.arrays) != 1:
        raise ProtocolViolation("a file of another size than the run says")
    part = bytes(reply.arrays[0].data)
    if len(part) != min(PART_BYTES, size - request.offset):
        raise ProtocolViolation("a part of a file that is too long or too short")
    return part


def _is_right(data: bytes | bytearray, sha256: str) -> bool:
    return hashlib.sha256(data).hexdigest() == sha256
