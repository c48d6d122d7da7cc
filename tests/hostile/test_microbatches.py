"""What a machine does with microbatches that are not its own, or with its place on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swarmnet.methods.contact import PING
from swarmnet.methods.microbatch import (
    ADMIT,
    COMMIT,
    INFER,
    STEP,
    AdmitReply,
    Commit,
    StepProgress,
    StepRequest,
)
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.slots import flight_id, slot_of
from swarmnet.simulation.stage import SyntheticData, activation
from swarmnet.swarm.pipeline.feeder import Journal
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.hostile.attacker import Attacker, NamedSigner
from tests.hostile.trial import Attack, trial
from tests.swarm.harness import SIZES, Swarm, in_virtual_time, tiny_spec

MICROBATCH = 4
"""Samples."""
NUM_SLOTS = 8
"""Of a round."""


def only_honest(swarm: Swarm, attacker: Attacker) -> None:
    """All slots that count were counted by honest feeders, each once."""
    names = {name.peer_id for name in attacker.names}
    assert swarm.total("slots_doubled") == 0
    done = min(swarm.rounds())
    for r in range(done - 20, done - 2):
        slots = swarm.counted[r]
        assert sorted(slots) == list(range(NUM_SLOTS)), (r, slots)
        assert not names & {p for path in swarm.paths[r].values() for p in path}


def test_no_stranger_has_a_slot() -> None:
    """It sends its own data into all slots of each round, at both stages, and commits them."""

    async def takes_slots(attacker: Attacker, swarm: Swarm) -> None:
        name = attacker.name()
        calls = asyncio.TaskGroup()

        async def take(target: str, stage: int, r: int, the_id: int) -> None:
            inputs = SyntheticData(MICROBATCH).microbatch([the_id]).inputs
            if stage:
                inputs = activation((r, the_id), SIZES)
            body = StepRequest(r, the_id, stage, name.peer_id, MICROBATCH)
            await name.call(target, STEP, body, (inputs, inputs), timeout_s=1.0)
            commit = Commit(r, (the_id,))
            await name.call(target, COMMIT, commit, timeout_s=1.0)

        async with calls:
            while True:
                r = max(swarm.rounds())
                for slot in range(NUM_SLOTS):
                    the_id = flight_id(name.run_id, name.peer_id, 1, r, slot, slot)
                    assert slot_of(the_id) == slot
                    for target, member in swarm.members.items():
                        stage = member.peer.gossip.own.stage
                        calls.create_task(take(target, stage, r, the_id))
                await asyncio.sleep(0.1)

    pace = trial(takes_slots, look=only_honest)
    assert pace.held(), pace


def swallows(num_names: int, *, has: bool | None, tells: int) -> Attack:
    """Names that are the fastest by their own word take microbatches, and give nothing back. `has`:
    what they answer who asks whether they have it; None: nothing. `tells`: so often they say that
    it has come further."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        async def never(request: Request[StepRequest]) -> Message[None]:
            for n in range(tells):
                request.progress(Message(StepProgress(("beyond",) * min(n, 1))))
                await asyncio.sleep(0.5)
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        for _ in range(num_names):
            name = attacker.name()
            name.answer(PING, lambda body: None)
            if has is None:
                name.is_silent_to(ADMIT, INFER)
            else:
                name.answer(ADMIT, lambda body: AdmitReply(0.0, known=has))
            name.transport.handle(STEP.name, never)
        says = {"state": ACTIVE, "addresses": ("/memory",), "samples_per_s": 1e6}
        while True:
            says["round"] = max(swarm.rounds())
            for number, name in enumerate(attacker.names):
                name.tell(attacker.victims, name.record(stage=number % 2, **says))
            await asyncio.sleep(0.2)

    return attack


@pytest.mark.parametrize(("num_names", "has", "tells"), [(2, True, 100), (6, None, 0)])
def test_who_swallows_microbatches_gets_few(num_names: int, has: bool | None, tells: int) -> None:
    pace = trial(swallows(num_names, has=has, tells=tells), look=only_honest)
    assert pace.held(), pace


@dataclass
class Ids(Journal):
    """Of the microbatches that a feeder has counted, with their rounds."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def round_counted(self, round_index: int, paths: Mapping[int, tuple[str, ...]]) -> None:
        self.found += [(round_index, the_id) for the_id in paths]


def test_nobody_knows_the_id_of_a_microbatch_before_it_comes(tmp_path: Path) -> None:
    """Otherwise a member could bring something else under that id, and be joined by its feeder."""
    ids = Ids()
    spec = tiny_spec(tmp_path, num_stages=1, rounds=4)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", journal=ids)
        await swarm.until_round(4)

    in_virtual_time(scenario, spec, is_synthetic=True, signer=NamedSigner)
    assert len(ids.found) > 8
    for r, the_id in ids.found:
        numbers = range(len(ids.found))
        known = (flight_id(spec.run_id, "peer-0", 1, r, n, slot_of(the_id)) for n in numbers)
        assert the_id not in set(known)
