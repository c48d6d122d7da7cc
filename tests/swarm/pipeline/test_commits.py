"""A replica hears that a microbatch counts before, or when, it hears that the round is over."""

from __future__ import annotations

import pytest

from swarmnet.methods.microbatch import CommittedReply, CommittedRequest
from swarmnet.protocol.sync_modes import DELAYED, ZERO
from swarmnet.simulation.network import SimulatedNetwork
from swarmnet.swarm.pipeline.feeder import Feeder
from swarmnet.swarm.update.rounds import Rounds
from tests.swarm.even_links import simulate_even_links

WAY_S = 0.5
"""From one peer to another."""
STAGES = 4
ALL_ARE_HERE = 2
"""Before that round some join, and hear of commits on ways that are just being opened."""


@pytest.mark.parametrize("mode", [ZERO, DELAYED])
def test_nobody_has_to_ask_about_what_counts(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A question costs two ways, and all stages wait for the norm of the one that asks. A slot that
    two feeders launched in the same moment may be under way when the round is over: of it one has
    to ask."""
    asked, rounds, twice = set[int](), set[int](), set[int]()
    answer, finish = Feeder.committed, Rounds.finish

    def answers(self: Feeder, question: CommittedRequest, asker: str) -> CommittedReply:
        reply = answer(self, question, asker)
        if asker != self.gossip.own.peer_id and reply.microbatch_ids:
            asked.add(question.round)
        return reply

    async def finishes(self: Rounds, r: int) -> bool:
        rounds.add(r)
        counts = [count.launched for _, count in self.gossip.view.counters.by_peer(r)]
        if len(set().union(*counts)) < sum(map(len, counts)):
            twice.add(r)
        return await finish(self, r)

    make = SimulatedNetwork.__post_init__

    def made(network: SimulatedNetwork) -> None:
        make(network)
        network.jitter = 0.0  # messages of one channel do not pass each other

    monkeypatch.setattr(SimulatedNetwork, "__post_init__", made)
    monkeypatch.setattr(Feeder, "committed", answers)
    monkeypatch.setattr(Rounds, "finish", finishes)
    simulate_even_links(WAY_S, peers=2 * STAGES, stages=STAGES, until_s=120.0, sync_mode=mode)
    assert len(rounds - twice) > 10
    assert {r for r in asked if r >= ALL_ARE_HERE} <= twice
