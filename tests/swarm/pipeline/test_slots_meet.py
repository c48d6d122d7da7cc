"""Two flights of one slot at one replica: the second counts only where the first never will."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import Refused, Taken
from swarmnet.methods.microbatch import Commit
from swarmnet.protocol.slots import SlotPlan
from swarmnet.simulation.clock import run
from swarmnet.swarm.pipeline.step import Contested
from tests.swarm.one_replica import WORK_S, OneReplica

SLOT = 5
FIRST, SECOND, AGAIN = (n << 16 | SLOT for n in (1, 2, 3))


def test_a_second_flight_is_refused_until_its_slot_is_free() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        a, b = pair.caller("a", 1e9), pair.caller("b", 1e9)
        await a.step(FIRST)
        with pytest.raises(Taken) as raised:
            await b.step(SECOND)
        assert raised.value.details.get("counted") is None
        asked = pair.steps.events.get_nowait()
        assert asked == Contested(0), "its feeder is asked whether it still has it"
        await b.step(SECOND + 1)  # another slot
        await a.step(AGAIN)  # its own feeder has given the first one up
        pair.steps.commit(Commit(0, (FIRST,)), "a")
        with pytest.raises(Taken) as raised:
            await b.step(SECOND)
        assert raised.value.details["counted"] is True
        await pair.close()

    run(scenario())


def test_a_flight_that_never_comes_back_keeps_a_slot_for_no_longer_than_others_take() -> None:
    """Its feeder would say for ever that it is under way."""

    async def scenario() -> None:
        pair = OneReplica()
        a, b = pair.caller("a", 1e9), pair.caller("b", 1e9)
        await b.step(SECOND + 1)  # how long one takes
        await a.step(FIRST)
        await asyncio.sleep(WORK_S)
        with pytest.raises(Taken):
            await b.step(SECOND)
        await asyncio.sleep(2 * WORK_S)
        await b.step(SECOND)
        await a.step(FIRST + 2)
        await b.step(SECOND + 2)  # it is found out
        pair.steps.commit(Commit(0, (SECOND,)), "b")
        with pytest.raises(Taken) as raised:
            await a.step(AGAIN)
        assert raised.value.details["counted"] is True
        await pair.close()

    run(scenario())


def test_a_slot_that_no_round_has_is_refused() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        pair.steps.slots = SlotPlan(((0, SLOT + 1), (1, SLOT + 2)))
        a = pair.caller("a", 1e9)
        await a.step(FIRST)
        with pytest.raises(Refused, match="has 6 slots"):
            await a.step(FIRST + 1)
        await pair.close()

    run(scenario())
