"""Samples that are counted and in no update are told, once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

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

    in_virtual_time(scenario, spec)
