"""Flights of microbatches: joined, told of, doomed and dropped."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import NotReady
from swarmnet.simulation.clock import run
from swarmnet.swarm.pipeline.flights import FURTHER_S, Flight, Flights
from swarmnet.transport.base import Request
from swarmnet.wire import Message

WORK_S = 2.0


async def work() -> Message:
    await asyncio.sleep(WORK_S)
    return Message()


def begin(flights: Flights, round_index: int, microbatch_id: int, feeder: str) -> Flight:
    flight = flights.enter((round_index, microbatch_id), feeder)
    flights.start(flight, work())
    return flight


def test_what_is_inside_and_what_is_a_receipt() -> None:
    async def scenario() -> None:
        flights = Flights()
        flight = begin(flights, 0, 1, "feeder")
        assert flights.num_in_flight == 1
        await asyncio.sleep(WORK_S / 2)
        assert flights.passage_s() == WORK_S / 2, "of the oldest here"
        await flight.task
        flights.completed(flight)
        assert flights.passage_s() == WORK_S
        await asyncio.sleep(0)
        assert flights.num_in_flight == 0
        assert flights.get((0, 1)) is flight, "its receipt"
        flights.forget((0, 1))
        assert (0, 1) not in flights

    run(scenario())


def test_callers_hear_of_another_way_at_once_and_of_the_same_one_later() -> None:
    async def scenario() -> None:
        flight = begin(Flights(), 0, 1, "feeder")
        heard: list[tuple[str, ...]] = []
        flight.join(Request("a", "", "step", Message(), lambda note: heard.append(note.body.path)))
        flight.moved(("b",))
        flight.moved(("b", "c"))
        flight.moved(("b", "c", "d"))
        assert heard == [("b",)]
        await asyncio.sleep(FURTHER_S)
        assert heard[1:] == [("b", "c", "d")]
        flight.moved(("b", "c", "d", "e"))
        flight.moved(("x",))
        flight.silence()
        await asyncio.sleep(2 * FURTHER_S)
        assert heard[2:] == [("x",)]

    run(scenario())


def test_a_doomed_flight_does_no_more_work() -> None:
    async def scenario() -> None:
        flights = Flights()
        here, beyond, other = (
            begin(flights, 0, i, name) for i, name in enumerate(("gone", "gone", "there"))
        )
        beyond.leaves()
        beyond.moved(("b",))
        assert flights.beyond() == {(0, 1): ("b",)}
        flights.doom("gone")
        with pytest.raises(NotReady):
            here.check()
        other.check()
        await asyncio.sleep(WORK_S)
        assert beyond.task.cancelled()
        assert not here.task.cancelled()

    run(scenario())


def test_a_round_that_is_dropped_takes_those_before_it_along() -> None:
    async def scenario() -> None:
        flights = Flights()
        started = [begin(flights, r, 1, "feeder") for r in (3, 4, 5)]
        flights.drop_round(4)
        await asyncio.sleep(WORK_S)
        assert [f.task.cancelled() for f in started] == [True, True, False]
        assert [(r, 1) in flights for r in (3, 4, 5)] == [False, False, True]
        await flights.close()

    run(scenario())
