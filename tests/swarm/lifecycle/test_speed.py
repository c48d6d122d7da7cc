"""What a machine announces of its speed."""

from __future__ import annotations

from dataclasses import replace

from swarmnet.simulation.clock import run
from swarmnet.swarm.lifecycle.opening import Speed
from swarmnet.swarm.machine import Machine
from tests.swarm.one_replica import OneReplica, learn

SAMPLES = 4


def machine_of(pair: OneReplica, costs: tuple[float, ...] | None = None) -> Machine:
    replica = pair.replica
    return Machine(
        lambda stage_index: (replica.stage, replica.optimizer),
        replica.device,
        replica.worker,
        measure=lambda: 2.0,
        stage_costs=costs,
    )


def test_the_expected_rate_is_by_the_cost_of_a_stage_and_what_other_seats_serve() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        machine = machine_of(pair, costs=(1.0, 3.0))
        speed = Speed(machine, pair.gossip.transport, SAMPLES)
        assert speed.expected_rate(0) == 0.0, "nothing is known"
        await speed.measure()
        assert speed.expected_rate(0) == SAMPLES / 1.0
        assert speed.expected_rate(1) == SAMPLES / 3.0
        machine.services[7] = 1.0
        assert speed.expected_rate(0) == SAMPLES / 2.0
        speed.stopped(7)
        assert speed.expected_rate(0) == SAMPLES / 1.0
        await pair.close()

    run(scenario())


def test_what_was_measured_replaces_what_was_expected() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        speed = Speed(machine_of(pair), pair.gossip.transport, SAMPLES)
        await speed.measure()
        assert speed.rate(pair.replica) == SAMPLES / 2.0
        learn(pair.replica, 0.5)
        assert speed.rate(pair.replica) == SAMPLES / 0.5
        speed.learn(pair.replica)
        speed.stopped(pair.replica.index)
        assert speed.expected_rate(3) == SAMPLES / 0.5
        await pair.close()

    run(scenario())


def test_a_machine_that_cannot_be_measured_announces_nothing() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        machine = replace(machine_of(pair), measure=lambda: 0.0)
        speed = Speed(machine, pair.gossip.transport, SAMPLES)
        await speed.measure()
        assert speed.rate(pair.replica) == 0.0
        await pair.close()

    run(scenario())
