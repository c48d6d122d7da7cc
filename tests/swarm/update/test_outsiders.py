"""Calls of peers that have no part in the round: they get an answer, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import SwarmnetError
from swarmnet.methods.records import Records, SignedRecord
from swarmnet.methods.state import FetchRequest
from swarmnet.methods.update import (
    AdoptedRequest,
    AdoptRequest,
    BallotRequest,
    ContributionsRequest,
    MirrorRequest,
    ReduceRequest,
)
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.transport.memory import MemoryTransport
from swarmnet.wire import Array, Message, pack
from tests.hostile.attacker import norm_said
from tests.swarm.harness import SIZES, OpenSigner, Swarm, in_virtual_time, tiny_spec

ROUNDS = 12
SHARD = Array("float32", (SIZES.shard_parameters,), bytes(4 * SIZES.shard_parameters))


def bodies(r: int, run_id: str) -> Iterator[tuple[str, Message]]:
    """What could end a round, or change what it comes to."""
    for ahead in (0, 1, 2, 100):
        for term in (0, 1, 64):
            yield "reduce", Message(ReduceRequest(r + ahead, 0, (0,), (0,), (term,)))
            yield "ballot", Message(BallotRequest(r + ahead, 0, (0,), (term,), is_final=True))
    yield "reduce", Message(ReduceRequest(r, 0, (1,), (1000,), (1,)), (SHARD,))
    yield "mirror", Message(MirrorRequest(r, 0, 0, 1.0, r, 1, 1.0), (SHARD,))
    yield "adopt", Message(AdoptRequest(r, 0, 0), (SHARD,))
    yield "adopted", Message(AdoptedRequest(r, 0, 4, 64))
    for ahead in range(20):
        said = norm_said(OpenSigner(), run_id, "outsider", r + ahead, 0, {0: 1e30})
        yield "norm", Message(said)
        yield "contributions", Message(ContributionsRequest(r + ahead, 0, (0,), ("x",), (1e30,)))
    yield "offer", Message(FetchRequest(r, 0, 0))
    yield "fetch_moments", Message(FetchRequest(r, 0, 0))


class Outsider:
    """Calls every peer all the time."""

    def __init__(self, swarm: Swarm, **said: Any) -> None:
        self.swarm, self.said = swarm, said
        self.transport: MemoryTransport = swarm.hub.transport("outsider")
        self.transport.set_run(swarm.spec.run_id)
        self.version = 0
        self.answered: set[str] = set()

    async def run(self) -> None:
        while True:
            self.version += 1
            for name, r in zip(self.swarm.members, self.swarm.rounds(), strict=True):
                self.said["round"] = max(0, r)
                run_id = self.swarm.spec.run_id
                record = Record("outsider", run_id, 1, self.version, **self.said)
                known = Records(records=(SignedRecord(pack(record), b""),))
                self.transport.notify(name, "records", Message(known))
                for method, message in bodies(max(0, r), self.swarm.spec.run_id):
                    asyncio.get_running_loop().create_task(self._call(name, method, message))
            await asyncio.sleep(0.5)

    async def _call(self, name: str, method: str, message: Message) -> None:
        try:
            await self.transport.call(name, method, message, timeout_s=60.0)
            self.answered.add(method)
        except SwarmnetError:
            pass


def rounds_take(folder: Path, attack: Callable[[Swarm], Outsider | None]) -> tuple[float, set[str]]:
    """Seconds until the last round, of three replicas of one stage; and what was answered."""
    spec = tiny_spec(folder, num_stages=1, rounds=ROUNDS, global_batch=64)
    took: list[float] = []
    answered: set[str] = set()

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", speed=0.1)
        await swarm.until_round(2)
        outsider, loop = attack(swarm), asyncio.get_running_loop()
        attacking = loop.create_task(outsider.run()) if outsider else None
        began = loop.time()
        await swarm.until_round(ROUNDS)
        took.append(loop.time() - began)
        if attacking is not None and outsider is not None:
            attacking.cancel()
            answered.update(outsider.answered)
        num_counted = [len(ids) for _, ids in sorted(swarm.counted.items())]
        assert num_counted == [spec.pipeline.global_batch // spec.pipeline.microbatch] * ROUNDS
        for name in ("round_missed", "samples_lost", "norm_missed", "not_counted"):
            assert swarm.total(name) == 0, name

    in_virtual_time(scenario, spec, is_synthetic=True)
    return took[0], answered


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        ({"state": JOINING, "stage": 0}, {"reduce"}),
        pytest.param({"state": JOINING}, set(), marks=pytest.mark.long),
        pytest.param({"state": LEAVING, "stage": 1}, set(), marks=pytest.mark.long),
        ({"state": ACTIVE, "stage": 1}, set()),
    ],
)
def test_a_peer_without_a_part_in_the_round_changes_nothing(
    tmp_path: Path, said: dict[str, Any], answers: set[str]
) -> None:
    usual_s, _ = rounds_take(tmp_path, lambda swarm: None)
    attacked_s, answered = rounds_take(tmp_path, lambda swarm: Outsider(swarm, **said))
    assert attacked_s == pytest.approx(usual_s, rel=0.05)
    assert answered <= answers | {"fetch_moments"}
