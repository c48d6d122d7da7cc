"""The work of an exchange on one shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update.roster import first_ballot
from swarmnet.simulation.clock import run
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.exchange import Steps
from swarmnet.swarm.update.optimizer_states import CREATED
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

BALLOT = first_ballot("a", is_holder=True)


def test_work_that_is_given_up_before_it_begins_leaves_nothing_behind() -> None:
    """A coroutine that nobody awaits is an error of this test run (pyproject.toml)."""

    async def scenario() -> None:
        tasks, unused = Tasks("test"), None
        parts: Any = (unused,) * 5
        steps = Steps(0, *parts, tasks)
        work = steps.work_for(0, do.FindNorm(1, None, (), BALLOT))

        async def do_it() -> None:
            await work()

        tasks.start(do_it())
        await tasks.close()
        assert len(tasks) == 0

    run(scenario())


def test_a_norm_that_comes_late_is_not_that_of_the_sum_made_since() -> None:
    """A primary that was overthrown leads again, with another sum, while what its first attempt
    waited for is on its way."""

    class Work:
        """Of `ShardWork`."""

        tells_results = False

        def __init__(self) -> None:
            self.norms = {1: asyncio.Event(), 2: asyncio.Event()}
            self.stepped: list[float] = []

        async def total(self, *_: object, **__: object) -> int:
            return len(sums)

        async def scale(self, exchange: int, j: int, total: int) -> float:
            await self.norms[total].wait()
            return 1.0 / total

        async def before(self, exchange: int, j: int, scale: float, *_: object) -> float:
            return scale

        async def step(self, exchange: int, j: int, total: object, scale: float) -> str:
            self.stepped.append(scale)
            return "result"

    async def scenario() -> None:
        tasks = Tasks("test")
        steps = Steps(0, *parts, tasks)

        def begin(command: Any) -> None:
            work = steps.work_for(0, command)

            async def do_it() -> None:
                await work()

            tasks.start(do_it())

        for attempt in (1, 2):
            sums.append(attempt)
            begin(do.Sum((), frozenset(), (), attempt))
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
            begin(do.FindNorm(attempt, None, (), BALLOT))
            await asyncio.sleep(0.0)
        work.norms[2].set()
        await asyncio.sleep(0.01)
        work.norms[1].set()
        await asyncio.sleep(0.01)
        begin(do.Step(2, BALLOT, 2))
        await asyncio.sleep(0.01)
        assert work.stepped == [0.5]
        await tasks.close()

    sums: list[int] = []
    work: Any = Work()
    replica: Any = SimpleNamespace(index=0, stage=SimpleNamespace(tied_shards=0))
    books: Any = SimpleNamespace(summed=lambda *_: None)
    unused: Any = None
    parts = (replica, work, books, unused, unused)
    run(scenario())


def test_a_state_that_is_spoiled_while_it_is_made_stands_in_for_none(tmp_path: Path) -> None:
    """Its step is overthrown while it is begun: what it makes of fresh moments is no state of the
    shard's, and is fetched of whoever has one."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        await swarm.until_round(2)
        replica, states = (
            swarm.members["peer-0"].peer.replica,
            swarm.members["peer-0"].peer.exchanges.states,
        )
        assert replica is not None
        worker: Any = replica.worker
        do_run, r = worker.run, states.replica.current_exchange + 5

        async def overthrown(work: Callable[[], Any]) -> Any:
            states.spoil(0, r)
            return await do_run(work)

        replica.optimizer.drop(0)
        worker.run = overthrown
        assert await states.make_ready(0, r) == CREATED
        worker.run = do_run
        states.stepped(0, r)
        assert not states.is_before(0, r + 1)

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=1, rounds=3))
