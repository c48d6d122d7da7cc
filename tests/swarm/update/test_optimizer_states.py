"""Optimizer state that comes from another replica."""

from __future__ import annotations

import asyncio

from swarmnet.methods.state import FetchReply
from swarmnet.simulation.clock import run
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.update.optimizer_states import OptimizerStates
from swarmnet.wire import Array
from tests.swarm.one_replica import RUN, OneReplica


def states_of(pair: OneReplica) -> OptimizerStates:
    settings = RunSettings(RUN, 1, 8, 4, 9)
    return OptimizerStates(pair.gossip.transport, settings, pair.limits, pair.replica)


def exported(pair: OneReplica) -> tuple[FetchReply, tuple[Array, ...]]:
    """As another replica gives it: of the beginning of the first exchange."""
    optimizer = pair.replica.optimizer
    optimizer.create(0)
    values, arrays = optimizer.export(0)
    optimizer.drop(0)
    return FetchReply(0, values, b"lineage"), arrays


def test_what_has_come_is_told_once() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        states = states_of(pair)
        told = asyncio.ensure_future(states.loaded.wait(1.0))
        await asyncio.sleep(0)
        assert not states.has_input(0, 0)
        await states.load(0, *exported(pair), states.num_forgotten, "giver")
        assert await told
        assert states.take_loaded() == [0]
        assert states.take_loaded() == []
        assert states.has_input(0, 0)
        assert states.has_come(0)
        assert states.lineage(0) == b"lineage"
        states.stepped(0, 0)
        assert not states.has_come(0), "it has seen a step since"
        await pair.close()

    run(scenario())


def test_what_was_asked_for_before_all_was_dropped_does_not_hold() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        states = states_of(pair)
        asked_at = states.num_forgotten
        await states.forget_state()
        await states.load(0, *exported(pair), asked_at, "giver")
        assert not states.has_input(0, 0)
        assert pair.replica.optimizer.steps(0) < 0
        await pair.close()

    run(scenario())


def test_a_state_that_was_given_is_believed_once_it_makes_the_step_of_others() -> None:
    """One that makes another is given up, and its giver asked last from then on. It is not told of
    while that is being found out."""

    async def scenario() -> None:
        for is_same in (True, False, None):
            pair = OneReplica()
            states = states_of(pair)
            assert states.giver(0) == ""
            await states.load(0, *exported(pair), states.num_forgotten, "giver")
            held = states.holds()
            assert states.giver(0) == "giver"
            states.is_looked_at(0)
            assert states.holds() != held
            states.looked_at(0, "giver", is_same=is_same)
            assert states.giver(0) == ("giver" if is_same is None else "")
            assert states.has_input(0, 0) == (is_same is not False)
            assert (states.holds() == held) == (is_same is not False)
            assert list(states.doubted) == ["giver"] * (is_same is False)
            await pair.close()

    run(scenario())
