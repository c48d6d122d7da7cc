"""What an update costs on the wire, against its formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnet.spec import RunSpec
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

NUM_REPLICAS = 4
FIRST, LAST = 5, 7
"""Rounds that are measured: after every owner has its state."""


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_bytes_of_an_update(tmp_path: Path, replication: int) -> None:
    """Of 2(N - 1)/N, the least an all-reduce can do, plus (R - 1)/N for the backups."""
    values = tiny_spec(tmp_path, num_stages=1, rounds=9).model_dump()
    values["sync"]["replication"] = replication
    values["model"] |= {"hidden_size": 64, "intermediate_size": 256}
    spec = RunSpec.model_validate(values)

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}")

        def sent() -> int:
            peers = [m.peer for m in swarm.members.values()]
            return sum(sum(p.transport.traffic.sent_bytes.values()) for p in peers)

        await swarm.until_round(FIRST)
        before = sent()
        await swarm.until_round(LAST)
        vector_bytes = sum(4 * p.numel() for p in swarm.parameters().values())
        measured = (sent() - before) / (LAST - FIRST) / NUM_REPLICAS / vector_bytes
        formula = (2 * (NUM_REPLICAS - 1) + replication - 1) / NUM_REPLICAS
        print(f"R = {replication}: {measured:.3f} gradients a peer and round, formula {formula}")
        assert measured == pytest.approx(formula, rel=0.03)

    in_virtual_time(scenario, spec)
