"""Peers that begin a run together hear of each other while its first rounds go by."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from swarmnet.protocol.records import Record
from swarmnet.swarm.peer import Peer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 12
EARLY = "peer-5"


@pytest.mark.parametrize("late", ["peer-1", "peer-9"])
@pytest.mark.parametrize("deaf_s", [0.2, 3.0])
def test_who_has_not_heard_of_the_others_makes_no_update_without_them(
    tmp_path: Path, late: str, deaf_s: float
) -> None:
    """It begins at the first round, as they did, and its feeder says that the round is over.
    Whichever of the two has the lower peer id: it is not the one that was alone whose parameters
    hold."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        peers = [
            swarm.start("peer-0", stage=0),
            swarm.start(EARLY, stage=1),
            swarm.start(late, stage=1, feeds=False),
        ]
        first, early, other = peers
        heard_at = math.inf

        def hears_late(peer: Peer, name: str) -> None:
            merge = peer.gossip.view.merge

            def hears(record: Record, now: float) -> bool:
                return (record.peer_id != name or now >= heard_at) and merge(record, now)

            peer.gossip.view.merge = hears  # type: ignore[method-assign]

        for peer, name in ((first, late), (early, late), (other, EARLY)):
            hears_late(peer, name)
        await swarm.until(lambda: early.gossip.own.round >= 1)
        assert other.replica is not None
        assert other.replica.round == 0
        heard_at = loop.time() + deaf_s
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4
        assert early.gossip.own.totals.get("samples_lost", 0) == 0

    in_virtual_time(scenario, spec)
