"""What a machine does with microbatches that are not its own, or with its place on their way."""

from __future__ import annotations

import asyncio

from swarmnet.methods.microbatch import COMMIT, STEP, Commit, StepRequest
from swarmnet.protocol.slots import flight_id, slot_of
from swarmnet.simulation.stage import SyntheticData, activation
from tests.hostile.attacker import Attacker
from tests.hostile.trial import trial
from tests.swarm.harness import SIZES, Swarm

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
