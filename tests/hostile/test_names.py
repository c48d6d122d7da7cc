"""One machine with many names, which are free: what their records say changes nothing, and honest
newcomers are found among them."""

from __future__ import annotations

import asyncio

import pytest

from tests.hostile.attacker import Attacker
from tests.hostile.attacks import Attack, feed, observe
from tests.hostile.trial import NUM_REPLICAS, NUM_STAGES, trial
from tests.swarm.harness import Swarm


@pytest.mark.parametrize("attack", [observe, feed])
def test_many_names_are_worth_nothing(attack: Attack) -> None:
    async def attack_and_join(attacker: Attacker, swarm: Swarm) -> None:
        work = asyncio.get_running_loop().create_task(attack(attacker, swarm))
        try:
            await asyncio.sleep(1.0)
            swarm.start("newcomer")
            await asyncio.get_running_loop().create_future()
        finally:
            work.cancel()

    def look(swarm: Swarm, attacker: Attacker) -> None:
        newest = max(swarm.rounds())
        assert all(r >= newest - 2 for r in swarm.rounds()), swarm.describe()
        now = asyncio.get_running_loop().time()
        for member in swarm.members.values():
            counted = {r.peer_id for r in member.peer.view.counted(now)}
            assert counted >= set(swarm.members), member.peer_id
        assert len(swarm.members) == NUM_STAGES * NUM_REPLICAS + 1
        assert not swarm.total("samples_lost")

    pace = trial(attack_and_join, look=look)
    assert pace.held(), pace
