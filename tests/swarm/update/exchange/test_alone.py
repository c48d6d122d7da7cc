"""The updates of a replica that has its stage to itself: it does not do what is for others, and its
parameters are those of one that does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update import exchanges
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.swarm.update.exchange.turns import Exports, Turns
from swarmnet.training.optimizer import sharded
from swarmnet.training.optimizer.sharded import ShardedOptimizer
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


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_shards_share_the_turns_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Sums, steps and results: three turns of all shards, and each shard as before with two."""
    monkeypatch.setattr(exchanges, "CODED_AT_ONCE_BYTES", 0)
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"codec": codec})
    together, run_all = list[int](), InlineWorker.run_all

    async def counted(
        self: InlineWorker, pieces: Sequence[Callable[[], object]], *, side_by_side: bool
    ) -> None:
        assert side_by_side
        together.append(len(pieces))
        await run_all(self, pieces, side_by_side=side_by_side)

    monkeypatch.setattr(InlineWorker, "run_all", counted)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        await swarm.until_round(OTHERS_COME)
        replica: Any = swarm.members["peer-0"].peer.replica
        assert replica.num_shards > 5
        turns = 3 if codec == "none" else 4  # contributions are coded first
        assert together == [replica.num_shards] * turns * OTHERS_COME
        swarm.start("peer-1")
        await swarm.until_round(OTHERS_COME + 2)
        before = len(together)
        await swarm.until_round(ROUNDS)
        assert len(together) == before

    in_virtual_time(scenario, spec)


def turns_of(
    worker: InlineWorker, tasks: Tasks, exports: Exports | None = None, *, is_alone: bool = True
) -> Turns:
    replica: Any = SimpleNamespace(
        worker=worker,
        num_shards=2,
        optimizer=SimpleNamespace(is_repeatable=lambda shard: True),
        stage=SimpleNamespace(is_on_host=True),
    )
    proofs: Any = SimpleNamespace(is_of_use=not is_alone)
    return Turns(replica, proofs, tasks, exports or Exports())


def test_what_is_given_up_before_its_turn_is_left_undone() -> None:
    done = list[str]()

    async def main() -> None:
        tasks, worker = Tasks("test"), InlineWorker(1.0)
        turns = turns_of(worker, tasks)

        async def piece(name: str) -> str:
            return await turns.run(lambda: done.append(name) or name)  # type: ignore[func-returns-value]

        first, second = tasks.start(piece("first")), tasks.start(piece("second"))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second == "second"
        assert first.cancelled()
        third = tasks.start(piece("third"))
        await asyncio.sleep(0.5)
        await tasks.close()
        assert third.cancelled()
        await worker.close()
        await asyncio.sleep(2.0)

    run_virtual(main())
    assert done == ["second"]


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_error_is_that_of_its_piece_or_of_the_worker(*, is_alone: bool) -> None:
    async def main() -> None:
        tasks, worker = Tasks("test"), InlineWorker()
        turns = turns_of(worker, tasks, is_alone=is_alone)

        def fails() -> None:
            raise ValueError("no step")

        good, bad = tasks.start(turns.run(lambda: 1)), tasks.start(turns.run(fails))
        assert await good == 1
        with pytest.raises(ValueError, match="no step"):
            await bad
        await worker.close()
        with pytest.raises(RuntimeError, match="closed"):
            await turns.run(lambda: 1)
        await tasks.close()

    run_virtual(main())


@pytest.mark.parametrize("is_alone", [True, False])
def test_no_step_comes_between_two_copies_of_an_export(*, is_alone: bool) -> None:
    """Which begins in the turn of the loop in which the steps are begun."""
    done = list[str]()

    async def main() -> None:
        tasks, worker, exports = Tasks("test"), InlineWorker(1.0), Exports()

        async def export() -> None:
            exports.begin()
            for name in ("copy", "copy"):
                await worker.run(lambda name=name: done.append(name))  # type: ignore[misc]
            exports.end()

        turns = turns_of(worker, tasks, exports, is_alone=is_alone)
        steps = [tasks.start(turns.run(lambda: done.append("step"))) for _ in range(2)]
        steps.append(tasks.start(export()))
        await asyncio.gather(*steps)
        await tasks.close()

    run_virtual(main())
    inside = done[done.index("copy") + 1 :]
    assert inside[0] == "copy"
