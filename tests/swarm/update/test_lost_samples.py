"""Samples that are counted and in no update are told, once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.pipeline.progress import RoundProgress
from tests.swarm.harness import SIZES, Swarm, in_virtual_time, tiny_spec

ROUNDS = 20


@pytest.mark.parametrize("sync", [{}, {"mode": "delayed"}, {"mode": "local", "local_steps": 4}])
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_died_with_a_replica_is_told(
    tmp_path: Path, sync: dict[str, object], is_killed: bool
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        for i in range(6):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(6)
        lost = 0
        if is_killed:
            victim = swarm.members["peer-5"].peer.replica
            assert victim is not None
            while not victim.ledger.committed(victim.round):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            lost = sum(e.num_samples for e in victim.ledger.committed(victim.round))
            swarm.kill("peer-5")
        await swarm.until_round(ROUNDS)
        told = swarm.total("samples_lost")
        own_steps = 4 if sync.get("mode") == "local" else 2
        assert lost <= told <= own_steps * spec.pipeline.global_batch
        assert (told > 0) == is_killed

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_primary_that_lacks_the_word_of_a_feeder_believes_what_others_contribute(
    tmp_path: Path,
) -> None:
    """It closes the round by a contribution that comes, before it has heard of its last microbatch:
    of four contributors the claims would be cut, and the report call that samples lost."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"peer-{i}", stage=i)
        await swarm.until_round(2)
        peer = swarm.members["peer-1"].peer
        exchanges = peer.exchanges
        assert exchanges is not None
        books, num_slots = exchanges.books, 4
        whole = num_slots * SIZES.tokens_per_microbatch

        def known() -> RoundProgress:
            now = asyncio.get_running_loop().time()
            return progress.round_progress(peer.view, exchanges.current, now, num_slots)

        await swarm.until(lambda: known().num_flights == num_slots - 1)
        r = exchanges.current
        assert books.counted_tokens(r) < books.counted_behind(r, 0) == whole

    in_virtual_time(scenario, spec, is_synthetic=True)


class FarPeer:
    """A network in which all that one peer sends and gets is late."""

    def delivery_s(self, source: str, target: str, size: int, now: float) -> float | None:
        return 0.15 if FAR in (source, target) else 0.0005


FAR = "peer-3"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_newcomers_give_in_the_first_round_is_in_its_update(tmp_path: Path, seed: int) -> None:
    """Two come while it is open. One of them leads a shard, and has not seen the other at work."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, global_batch=256)

    async def scenario(swarm: Swarm) -> None:
        swarm.hub.network = FarPeer()
        for i in range(2):
            swarm.start(f"peer-{i}", stage=i, speed=0.3)
        # A round takes six such seconds; by now these two have seen each other at work.
        await asyncio.sleep(3.0)
        for name in ("peer-2", FAR):
            swarm.start(name, stage=1, speed=0.3)
        await swarm.until_round(2)
        assert all(m.peer.gossip.own.active_from == 0 for m in swarm.members.values())
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec, is_synthetic=True, seed=seed)
