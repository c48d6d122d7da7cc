"""Which stage a newcomer takes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import JOINING
from swarmnet.simulation.clock import run
from swarmnet.swarm.lifecycle.arrival import StageChoice
from swarmnet.swarm.lifecycle.opening import Speed
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.resource_limits import ResourceLimits
from tests.swarm.lifecycle.test_speed import machine_of
from tests.swarm.one_replica import OneReplica

NUM_STAGES = 3


def chosen(wanted: int | None, fits: set[int], **others: int) -> tuple[int, Any]:
    """The choice of a newcomer, beside replicas at some stages, and its record."""

    async def scenario() -> tuple[int, Any]:
        pair = OneReplica()
        for name, stage in others.items():
            other = pair.caller(name, 1e9)
            other.gossip.update(stage=stage)
            pair.gossip.records.take(other.gossip.own_record.seal())
        limits = ResourceLimits(unfit=lambda k: "" if k in fits else "it needs more memory")
        machine = machine_of(pair)
        gossip, rng = pair.gossip, random.Random(0)
        gossip.update(state=JOINING, stage=-1)
        choice = StageChoice(
            gossip,
            NUM_STAGES,
            machine=machine,
            recovery=Recovery(gossip, NUM_STAGES, None, False, Reconnecting(gossip, rng)),
            assigner=assignment.Adaptive(),
            resource_limits=limits,
            speed=Speed(machine, gossip.transport, 1),
            rng=rng,
        )
        try:
            return await choice.claim(wanted), gossip.own
        finally:
            await pair.close()

    return run(scenario())


def test_an_empty_stage_is_taken_and_announced() -> None:
    stage, own = chosen(None, {0, 1, 2}, a=0, b=1)
    assert stage == own.stage == 2
    assert own.state == JOINING


def test_only_stages_that_fit_are_taken() -> None:
    assert chosen(None, {0, 1}, a=0, b=1)[0] in (0, 1)


def test_what_the_user_wants_comes_first() -> None:
    assert chosen(0, {0, 1, 2}, a=0, b=1)[0] == 0


@pytest.mark.parametrize(("wanted", "fits"), [(None, set()), (1, {0, 2})])
def test_where_nothing_fits_the_user_is_told(wanted: int | None, fits: set[int]) -> None:
    with pytest.raises(UserError, match="needs more memory"):
        chosen(wanted, fits)
