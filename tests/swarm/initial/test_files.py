"""What it costs a peer to give the files of its run to whoever asks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarmnet.errors import NotReady
from swarmnet.methods.state import RUN_FILE, FileRequest
from swarmnet.simulation.clock import run
from swarmnet.swarm.calls import call
from swarmnet.swarm.initial.files import PART_BYTES, FileService, fetch_file
from swarmnet.transport.memory import MemoryHub, MemoryTransport
from swarmnet.wire import Message
from tests.hostile.attacker import AllowAll

DATA = bytes(1000) + bytes(range(256)) * (PART_BYTES // 128)
SHA256, MISSING, UNKNOWN = hashlib.sha256(DATA).hexdigest(), "0" * 64, "1" * 64


@dataclass
class CountingWorker:
    """Does the work at once, and knows how often it had any."""

    num_jobs: int = 0
    read_bytes: list[int] = field(default_factory=list)

    async def run(self, work: Callable[[], Any]) -> Any:
        self.num_jobs += 1
        found = work()
        self.read_bytes.append(len(found or b""))
        return found

    async def close(self) -> None:
        """There is nothing to close."""


def read(sha256: str, offset: int, num_bytes: int) -> bytes | None:
    return DATA[offset : offset + num_bytes] if sha256 == SHA256 else None


def pair() -> tuple[MemoryTransport, CountingWorker]:
    hub, worker = MemoryHub(), CountingWorker()
    asker = hub.transport("asker")
    giver = hub.transport("giver")
    giver.guard(AllowAll())
    FileService(giver, {SHA256: len(DATA), MISSING: 10}, read, worker)
    return asker, worker


def test_a_file_comes_part_by_part_and_no_byte_is_read_twice() -> None:
    async def scenario() -> None:
        asker, worker = pair()
        assert await fetch_file(asker, ["giver"], SHA256, len(DATA), random.Random(0)) == DATA
        assert worker.read_bytes == [PART_BYTES, PART_BYTES, 1000]

    run(scenario())


def test_what_cannot_be_given_costs_the_worker_nothing() -> None:
    async def scenario() -> None:
        asker, worker = pair()
        for offset in (len(DATA), len(DATA) + 1, 2**62):
            message = Message(FileRequest(SHA256, offset))
            reply = await call(asker, "giver", RUN_FILE, message, timeout_s=1.0)
            assert reply.body.size == len(DATA)
            assert not reply.arrays[0].num_bytes
        with pytest.raises(NotReady, match="no such file"):
            await call(asker, "giver", RUN_FILE, Message(FileRequest(UNKNOWN, 0)), timeout_s=1.0)
        assert not worker.num_jobs
        with pytest.raises(NotReady, match="no such file"):
            await call(asker, "giver", RUN_FILE, Message(FileRequest(MISSING, 0)), timeout_s=1.0)

    run(scenario())
