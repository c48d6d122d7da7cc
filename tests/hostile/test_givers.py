"""Peers that are asked for what a newcomer or an export needs, and give it a byte a day, or give
something else: also under many names, which vouch for each other."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from swarmnet.methods.method import Method
from swarmnet.methods.state import FETCH_PARAMETERS, RUN_FILE, FileReply
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import DAY_S
from swarmnet.runtime.exporting.models import DiskParts, Wanted, fetch_trained
from swarmnet.simulation.clock import run
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.initial.files import PART_BYTES, FileService, fetch_file
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.model_fetch import fetch_model
from swarmnet.swarm.recovery.restart import Disk
from swarmnet.swarm.settings import WaitLimits
from swarmnet.training.checkpoint import CheckpointStore, Meta, load_parameters
from swarmnet.training.models.registry import stage_shard_sizes
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Array, Message
from tests.hostile.against import SPEED, Watch, build
from tests.hostile.attacker import AllowAll, Attacker, Name, NamedSigner
from tests.hostile.attacks import have_others
from tests.hostile.trial import NUM_REPLICAS, NUM_STAGES, honest_spec
from tests.swarm.handlers import handler_of
from tests.swarm.harness import SIZES, Swarm, in_virtual_time, tiny_spec

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


# ---- under many names ------------------------------------------------------------------------

TOLD_S = 1.0
"""How long the liars have told before somebody comes."""
JOINS_S = 20.0
NUM_NAMES = (8, 20, 200)
"""As many as are no flood, and more."""


def false_shards(sizes: list[list[int]]) -> list[list[Array]]:
    """Parameters that nobody has trained."""
    return [[Array("float32", (n,), b"\0\0\x80\x3f" * n) for n in of_stage] for of_stage in sizes]


async def during(
    swarm: Swarm,
    num_names: int,
    sizes: list[list[int]],
    rounds_ahead: int,
    then: Callable[[], Awaitable[None]],
) -> None:
    """While the names tell."""
    victims = sorted(swarm.members)
    attacker = Attacker(swarm.hub, swarm.spec.run_id, victims, random.Random(0))
    attack = have_others(num_names, false_shards(sizes), rounds_ahead)

    async def tell() -> None:
        await attack(attacker, swarm)

    work = asyncio.get_running_loop().create_task(tell())
    try:
        await asyncio.sleep(TOLD_S)
        await then()
        if work.done():
            work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        attacker.leave()


async def onlooker(swarm: Swarm, through: str) -> Gossip:
    """Somebody who was told of one peer."""
    transport = swarm.hub.transport("onlooker")
    transport.set_run(swarm.spec.run_id)
    own = Record("onlooker", swarm.spec.run_id, 1, 0, state=OBSERVING)
    view = View("onlooker")
    gossip = Gossip(transport, view, NamedSigner("onlooker"), own, random.Random(0), quiet=True)
    await gossip.exchange(through)
    view.named(through)
    return gossip


@pytest.mark.parametrize("rounds_ahead", [0, 1])
@pytest.mark.parametrize("num_names", NUM_NAMES[:2])
def test_a_newcomer_gets_the_parameters_of_those_that_train(
    tmp_path: Path, num_names: int, rounds_ahead: int
) -> None:
    """In the first stage and in the last."""
    watch = Watch()
    num_honest = NUM_STAGES * NUM_REPLICAS

    async def scenario(swarm: Swarm) -> None:
        make = functools.partial(build, watch)
        for i in range(num_honest):
            swarm.start(f"peer-{i}", stage=i % NUM_STAGES, speed=SPEED, build=make)
        await swarm.until_round(10)
        watch.look(swarm)
        sizes = [[SIZES.shard_parameters] * SIZES.num_shards] * NUM_STAGES

        async def joins() -> None:
            for stage in range(NUM_STAGES):
                peer = swarm.start(f"newcomer-{stage}", stage=stage, speed=SPEED, build=make)
                await swarm.until(lambda peer=peer: peer.gossip.own.state == ACTIVE, JOINS_S)
                watch.look(swarm)

        await during(swarm, num_names, sizes, rounds_ahead, joins)
        assert not watch.findings

    in_virtual_time(scenario, honest_spec(tmp_path), is_synthetic=True, signer=NamedSigner)


@pytest.mark.parametrize(
    ("num_stages", "num_names"), [(1, 20), *((NUM_STAGES, n) for n in NUM_NAMES)]
)
def test_who_fetches_the_model_gets_what_was_trained(
    tmp_path: Path, num_stages: int, num_names: int
) -> None:
    """From checkpoints: the newest, and that with the least loss; and as it is now."""
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=100_000, evaluate_every=2)
    sizes = [stage_shard_sizes(spec, k) for k in range(num_stages)]

    async def scenario(swarm: Swarm) -> None:
        stores = [CheckpointStore(tmp_path / f"peer-{i}", spec, every=2) for i in range(8)]
        for i, store in enumerate(stores):
            swarm.start(f"peer-{i}", stage=i % num_stages, disk=Disk(store, InlineWorker(), 2))
        await swarm.until_round(6)

        async def exports() -> None:
            gossip = await onlooker(swarm, "peer-0")
            for wanted in (Wanted(), Wanted(best=True)):
                parts = DiskParts(tmp_path / f".{wanted.best}.part", spec.run_id)
                trained = await fetch_trained(
                    spec, gossip.transport, gossip, parts, InlineWorker(), wanted
                )
                paths = [store.path(trained.round) for store in stores]
                saved = [load_parameters(path, Meta.read(path)) for path in paths if path.exists()]
                assert saved
                for parameters in saved:
                    for name, values in parameters.items():
                        assert values.equal(trained.named[name])
            honest = {m.peer.gossip.own.peer_id for m in swarm.members.values()}
            digests = set[bytes]()

            async def note() -> None:
                while True:
                    records = gossip.view.records()
                    digests.update(r.digests for r in records if r.peer_id in honest)
                    await gossip.changed.wait(0.1)

            noting = asyncio.get_running_loop().create_task(note())
            _, shards = await fetch_model(
                gossip.transport, gossip, sizes, WaitLimits(), random.Random(0)
            )
            noting.cancel()
            for of_stage in shards:
                found = b"".join(xxhash.xxh3_64_digest(shard.data) for shard in of_stage)
                assert found in digests

        await during(swarm, num_names, sizes, 0, exports)

    in_virtual_time(scenario, spec, signer=NamedSigner)
