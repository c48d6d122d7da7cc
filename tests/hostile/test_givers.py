"""Peers that are asked for what a newcomer or an export needs, and give it a byte a day, or give
something else."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarmnet.methods.method import Method
from swarmnet.methods.state import FETCH_PARAMETERS, RUN_FILE, FileReply
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.timing import DAY_S
from swarmnet.simulation.clock import run
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.initial.files import PART_BYTES, FileService, fetch_file
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Array, Message
from tests.hostile.attacker import AllowAll, Name
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

DONORS = ("donor-0", "donor-1", "donor-2")
STAGE = 1
SLOW = 0.05
"""Speed of machines with which a round takes a minute: nobody can wait for its end instead."""
DATA = random.Random(5).randbytes(3 * PART_BYTES + 1000)
SHA256 = hashlib.sha256(DATA).hexdigest()


def trickle(swarm: Swarm, names: Sequence[str], method: Method) -> None:  # type: ignore[type-arg]
    """Members that do all they ought to, but for the answers to one method."""
    for name in names:
        transport = swarm.hub.transports[name]
        give = handler_of(transport, method.name)

        async def slowly(request: Request, give=give) -> Message:  # type: ignore[no-untyped-def]
            await asyncio.sleep(DAY_S)
            return await give(request)

        transport.handle(method.name, slowly)


@pytest.mark.parametrize("seed", range(2))
def test_a_newcomer_joins_while_most_donors_trickle(tmp_path: Path, seed: int) -> None:
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=3, global_batch=200, sync={"shard_parameters": 512}
    )

    async def scenario(swarm: Swarm) -> None:
        swarm.start("first", stage=0, speed=SLOW)
        for name in DONORS:
            swarm.start(name, stage=STAGE, speed=SLOW)
        await swarm.until_round(1)
        await asyncio.sleep(0.5)
        trickle(swarm, DONORS[1:], FETCH_PARAMETERS)
        peer = swarm.start("joiner", stage=STAGE, feeds=False)
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE, 45.0)
        assert peer.replica is not None
        assert peer.replica.round == 1, "not with the result of the round"

    in_virtual_time(scenario, spec, seed=seed)


def giver(hub: MemoryHub, name: str, data: bytes = DATA) -> Name:
    """One that serves a file under the right hash, whatever it is."""
    found = Name(hub, name, "run")
    found.transport.guard(AllowAll())

    def read(sha256: str, offset: int, num_bytes: int) -> bytes | None:
        return data[offset : offset + num_bytes]

    FileService(found.transport, {SHA256: len(data)}, read, InlineWorker())
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_file_comes_in_time_beside_those_that_trickle_and_those_that_lie(seed: int) -> None:
    async def scenario() -> None:
        hub, loop = MemoryHub(), asyncio.get_running_loop()
        asker = hub.transport("asker")
        givers = ["honest", "lies", "silent", "small", "other"]
        giver(hub, "honest")
        giver(hub, "lies", DATA[:-1] + b"?")
        Name(hub, "silent", "run").is_silent_to(RUN_FILE)
        byte = (Array("uint8", (1,), b"x"),)
        Name(hub, "small", "run").answer(RUN_FILE, lambda _: FileReply(len(DATA)), byte)
        Name(hub, "other", "run").answer(RUN_FILE, lambda _: FileReply(2**62), byte)
        got = await fetch_file(asker, givers, SHA256, len(DATA), random.Random(seed))
        assert got == DATA, seed
        assert loop.time() < 180.0, seed

    run(scenario())
