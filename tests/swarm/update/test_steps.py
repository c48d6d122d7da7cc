"""The work of an exchange on one shard."""

from __future__ import annotations

from typing import Any

from swarmnet.protocol.update import commands as do
from swarmnet.simulation.clock import run
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.steps import ExchangeSteps


def test_work_that_is_given_up_before_it_begins_leaves_nothing_behind() -> None:
    """A coroutine that nobody awaits is an error of this test run (pyproject.toml)."""

    async def scenario() -> None:
        tasks, unused = Tasks("test"), None
        parts: Any = (unused,) * 6
        steps = ExchangeSteps(0, *parts, tasks, lambda j, event: None, lambda error: None)
        steps.carry_out(0, do.FindNorm(1))
        await tasks.close()
        assert len(tasks) == 0

    run(scenario())
