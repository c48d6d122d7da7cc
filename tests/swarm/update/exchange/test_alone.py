"""The updates of a replica that has its stage to itself: it does not do what is for others, and its
parameters are those of one that does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.training.optimizer import sharded
from swarmnet.training.optimizer.sharded import ShardedOptimizer
from swarmnet.training.passes.round_vectors import RoundVectors
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

ROUNDS = 6
OTHERS_COME = 3


@pytest.mark.parametrize("mode", ["zero", "delayed"])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_sum_of_one_is_not_copied_and_not_looked_at_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, codec: str
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"codec": codec, "mode": mode})
    found, num_copied, num_looked = list[dict[str, torch.Tensor]](), [0, 0], [0, 0]
    add, look = ShardedOptimizer.sum, sharded.is_finite_scaled

    def counted_sum(self: ShardedOptimizer, contributions: Any) -> Array:
        num_copied[len(found)] += 1
        return add(self, contributions)

    def counted_look(values: torch.Tensor, scale: float) -> bool:
        num_looked[len(found)] += 1
        return look(values, scale)

    monkeypatch.setattr(ShardedOptimizer, "sum", counted_sum)
    monkeypatch.setattr(sharded, "is_finite_scaled", counted_look)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        await swarm.until_round(OTHERS_COME)
        seen = num_copied[len(found)], num_looked[len(found)]
        assert seen == (0, 0) or found, "it does what is for others"
        swarm.start("peer-1")
        await swarm.until_round(ROUNDS)
        assert num_copied[len(found)] > seen[0], "with two there are sums"
        found.append({name: p.clone() for name, p in swarm.parameters().items()})
        num_copied.append(0)
        num_looked.append(0)

    in_virtual_time(scenario, spec)
    with monkeypatch.context() as patch:
        patch.setattr(Proofs, "is_of_use", True)
        in_virtual_time(scenario, spec)
    ours, theirs = found
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_gradient_that_is_not_finite_is_found(tmp_path: Path, bad: float) -> None:
    """The step is not made, and the ones after it are."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)
    digests = dict[int, bytes]()

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        await swarm.until_round(1)
        peer = swarm.members["peer-0"].peer
        replica: Any = peer.replica
        take = replica.gradient

        async def spoiled() -> tuple[Array, ...]:
            shards = await take()
            digests[replica.round] = replica.digests
            if replica.round == 2:
                for shard in replica.stage.vectors.present.gradient_shards:
                    shard[-1] = bad
            return shards

        replica.gradient = spoiled
        await swarm.until_round(ROUNDS - 1)
        assert peer.gossip.own.strikes

    in_virtual_time(scenario, spec)
    assert digests[2] == digests[3], "no step was made"
    assert len(set(digests.values())) == len(digests) - 1


@pytest.mark.parametrize("mode", ["zero", "delayed"])
@pytest.mark.parametrize("num_peers", [1, 2])
def test_the_digests_of_a_round_are_known_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, num_peers: int
) -> None:
    """Nobody waits for a pass over all parameters."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"mode": mode})
    num_hashed, late = 0, list[int]()
    real, measure = RoundVectors._hashed, Replica.measure_digests  # noqa: SLF001

    def hashed(self: RoundVectors, shard: torch.Tensor) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return real(self, shard)

    async def measured(self: Replica) -> bytes:
        before = num_hashed
        found = await measure(self)
        if self.round > 1:
            late.append(num_hashed - before)
        return found

    monkeypatch.setattr(RoundVectors, "_hashed", hashed)
    monkeypatch.setattr(Replica, "measure_digests", measured)

    async def scenario(swarm: Swarm) -> None:
        for i in range(num_peers):
            swarm.start(f"peer-{i}")
        await swarm.until_round(ROUNDS)

    in_virtual_time(scenario, spec)
    assert late
    assert not any(late)
