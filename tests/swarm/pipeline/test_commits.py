"""A replica hears that a microbatch counts before, or when, it hears that the round is over."""

from __future__ import annotations

import pytest

from swarmnet.protocol.update.sync_modes import DELAYED, ZERO
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import Link, SimulatedNetwork
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.swarm import Simulation
from swarmnet.swarm.messages import CommittedReply, CommittedRequest
from swarmnet.swarm.pipeline.feeder import Feeder
from swarmnet.swarm.update.rounds import Rounds

WAY_S = 0.5
"""From one peer to another."""
STAGES = 4


@pytest.mark.parametrize("mode", [ZERO, DELAYED])
def test_nobody_has_to_ask_about_what_counts(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A question costs two ways, and all stages wait for the norm of the one that asks."""
    asked, rounds = list[int](), set[int]()
    answer, finish = Feeder.committed, Rounds.finish

    def answers(self: Feeder, question: CommittedRequest, asker: str) -> CommittedReply:
        reply = answer(self, question, asker)
        if asker != self.gossip.own.peer_id:
            asked.extend(reply.microbatch_ids)
        return reply

    async def finishes(self: Rounds, r: int) -> None:
        rounds.add(r)
        await finish(self, r)

    make = SimulatedNetwork.__post_init__

    def made(network: SimulatedNetwork) -> None:
        make(network)
        network.jitter = 0.0  # messages of one channel do not pass each other

    monkeypatch.setattr(SimulatedNetwork, "__post_init__", made)
    monkeypatch.setattr(Feeder, "committed", answers)
    monkeypatch.setattr(Rounds, "finish", finishes)
    scenario = Scenario(
        seed=1,
        peers=2 * STAGES,
        stages=STAGES,
        links=tuple(Link(1e9, 1e9, WAY_S / 2) for _ in range(2 * STAGES)),
        until_s=120.0,
        start_s=0.5,
        global_batch=16,
        sync_mode=mode,
        service_s=0.01,
        speed_ratio=1.0,
        keep_log=False,
    )

    async def simulated() -> None:
        result = await Simulation(scenario).run()
        assert result.broken is None

    run(simulated())
    assert len(rounds) > 10
    assert not asked
