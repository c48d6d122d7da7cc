"""When a replica is not needed in its stage any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, bitmap
from swarmnet.simulation.clock import run
from swarmnet.swarm.lifecycle.departure import DRAIN_S, Departure
from swarmnet.wire import Message
from tests.swarm.one_replica import OneReplica

NUM_ROUNDS = 10


def departure_of(pair: OneReplica) -> Departure:
    rounds: Any = SimpleNamespace(is_settling=False, updates=SimpleNamespace(is_owing=False))
    handover: Any = SimpleNamespace(has_any=lambda r: False, may_give=lambda: False)
    return Departure(pair.gossip, NUM_ROUNDS, pair.steps, pair.replica, rounds, handover)


def other_holds(pair: OneReplica, shards: list[int], state: str = ACTIVE) -> None:
    """The record of another replica of the stage arrives."""
    other = pair.caller("other", 1e9, feeds=False).gossip.own
    there = replace(other, version=9, stage=0, state=state, holds=bitmap(shards, 1))
    pair.gossip.view.merge(there, asyncio.get_running_loop().time())


def test_the_only_peer_of_a_stage_may_leave_it_but_not_move_away() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        departure = departure_of(pair)
        assert not await departure.until_handed_over(alone=False)
        assert await departure.hand_over()
        assert pair.gossip.own.state == LEAVING
        await pair.close()

    run(scenario())


def test_others_have_to_hold_its_shards_first() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        pair.replica.optimizer.create(0)
        other_holds(pair, [])
        departure = departure_of(pair)
        leaving = asyncio.ensure_future(departure.hand_over())
        await asyncio.sleep(DRAIN_S / 2)
        assert not leaving.done()
        other = replace(pair.gossip.view.get("other"), version=10, holds=bitmap([0], 1))  # type: ignore[type-var]
        pair.gossip.view.merge(other, asyncio.get_running_loop().time())
        assert await leaving
        await pair.close()

    run(scenario())


def test_a_newcomer_is_waited_for_and_a_microbatch_too_as_long_as_there_is_time() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        return Message()

    async def scenario() -> None:
        for state in (JOINING, ACTIVE):
            pair = OneReplica()
            other_holds(pair, [0], state)
            flights = pair.steps.flights
            flights.start(flights.enter((0, 1), "feeder"), never())
            began = asyncio.get_running_loop().time()
            assert not await departure_of(pair).hand_over()
            assert asyncio.get_running_loop().time() - began >= DRAIN_S
            await pair.close()

    run(scenario())
