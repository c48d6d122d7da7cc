"""A group of tasks ends with its owner, and its failures are logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarmnet.errors import NotReady
from swarmnet.simulation.clock import run
from swarmnet.swarm.tasks import Tasks


def test_a_group_is_ended_in_the_order_of_its_starts() -> None:
    ended: list[int] = []

    async def work(i: int) -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append(i)

    async def scenario() -> None:
        tasks = Tasks("owner")
        for i in range(5):
            tasks.start(work(i))
        assert len(tasks) == 5
        await asyncio.sleep(1.0)
        await tasks.close()
        assert len(tasks) == 0

    run(scenario())
    assert ended == list(range(5))


def test_an_error_that_nobody_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One that the network may cause is no fault of the program."""

    async def fail(error: Exception) -> None:
        raise error

    async def scenario() -> None:
        tasks = Tasks("owner")
        tasks.start(fail(ValueError("a fault")))
        tasks.start(fail(NotReady("later")))
        await asyncio.sleep(1.0)
        assert len(tasks) == 0

    caplog.set_level(logging.DEBUG, "swarmnet.tasks")
    run(scenario())
    assert [(r.levelno, r.message) for r in caplog.records if r.name == "swarmnet.tasks"] == [
        (logging.ERROR, "owner: ValueError: a fault"),
        (logging.DEBUG, "owner: NotReady: later"),
    ]
