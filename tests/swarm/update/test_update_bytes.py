"""What an update costs on the wire, against its formula."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swarmnet.protocol.audit import Draw
from swarmnet.protocol.planning.exchange import exchanged_bytes
from swarmnet.spec import RunSpec
from swarmnet.training.models.registry import stage_matrix_parameters
from tests.swarm.harness import Swarm, coded, in_virtual_time, tiny_spec

NUM_REPLICAS = 4
SHARD = 16_384
"""Parameters of a shard: what is signed of one is of the same size, however large it is."""
FIRST, LAST = 5, 7
"""Rounds that are measured: after every owner has its state."""


def audit(swarm: Swarm, rate: float) -> None:
    """From now on so many of the sums are made again."""
    for name, member in swarm.members.items():
        member.peer.exchanges.audits.draw = Draw(random.Random(name), rate)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_bytes_of_an_update(tmp_path: Path, replication: int) -> None:
    """Of 2(N - 1)/N, the least that an all-reduce can do: backups get the sum, and no result."""
    values = tiny_spec(tmp_path, num_stages=1, rounds=9, num_layers=3).model_dump()
    values["sync"] |= {"replication": replication, "shard_parameters": SHARD}
    values["model"] |= {"hidden_size": 64, "intermediate_size": 256}
    spec = RunSpec.model_validate(values)

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}")

        def sent() -> int:
            peers = [m.peer for m in swarm.members.values()]
            return sum(sum(p.transport.traffic.sent_bytes.values()) for p in peers)

        await swarm.until_round(FIRST)
        audit(swarm, 0.0)
        before = sent()
        await swarm.until_round(LAST)
        vector_bytes = sum(4 * p.numel() for p in swarm.parameters().values())
        measured = (sent() - before) / (LAST - FIRST) / NUM_REPLICAS / vector_bytes
        formula = 2 * (NUM_REPLICAS - 1) / NUM_REPLICAS
        print(f"R = {replication}: {measured:.3f} gradients a peer and round, formula {formula}")
        assert measured == pytest.approx(formula, rel=0.03)

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("num_replicas", [pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    ("mode", "codec", "kind"),
    [
        ("delayed", "none", "adamw"),
        ("zero", "int4", "adamw"),
        ("local", "topk", "adamw"),
        ("local", "topk-208", "adamw"),
        ("gossip", "int8", "adamw"),
        *(
            pytest.param(mode, "none", "adamw", marks=pytest.mark.long)
            for mode in ("local", "gossip")
        ),
        *(
            pytest.param(mode, "int8", "adamw", marks=pytest.mark.long)
            for mode in ("zero", "delayed")
        ),
        ("zero", "int8", "muon"),
        ("gossip", "none", "muon"),
    ],
)
def test_bytes_of_a_round_in_the_other_modes(
    tmp_path: Path, mode: str, codec: str, kind: str, num_replicas: int
) -> None:
    """On average over two exchanges of everything; what `swarmnet plan` says."""
    local_steps = 2
    sync = {"mode": mode, "local_steps": local_steps, "shard_parameters": SHARD} | coded(codec)
    values = tiny_spec(tmp_path, num_stages=1, rounds=12, num_layers=3, sync=sync).model_dump()
    values["model"] |= {"hidden_size": 64, "intermediate_size": 256}
    values["optimizer"]["kind"] = kind
    spec = RunSpec.model_validate(values)
    num_muon = stage_matrix_parameters(spec, 0)
    first, last = 4, 4 + 2 * local_steps

    async def scenario(swarm: Swarm) -> None:
        for i in range(num_replicas):
            swarm.start(f"peer-{i}")

        def sent() -> int:
            peers = [m.peer for m in swarm.members.values()]
            return sum(sum(p.transport.traffic.sent_bytes.values()) for p in peers)

        def is_quiet(round_index: int) -> bool:
            """The round has begun, and no exchange runs beside it (any more)."""
            if min(swarm.rounds()) < round_index:
                return False
            owing = [m.peer.updates.is_owing for m in swarm.members.values()]
            return mode != "delayed" or not any(owing)

        await swarm.until(lambda: is_quiet(first))
        audit(swarm, 0.0)
        before = sent()
        await swarm.until(lambda: is_quiet(last))
        measured = (sent() - before) / (last - first) / num_replicas
        num_parameters = swarm.flat("peer-0").numel()
        plain, formula = (
            exchanged_bytes(
                num_parameters, num_replicas, 2, mode, local_steps, c, num_muon=num_muon
            )[0]
            for c in ("none", codec)
        )
        print(
            f"{mode}, N = {num_replicas}: {measured:,.0f} a peer and round, formula {formula:,.0f}"
        )
        # What peers tell each other beside stays as it is.
        assert measured == pytest.approx(formula, abs=0.03 * plain)

    in_virtual_time(scenario, spec)
