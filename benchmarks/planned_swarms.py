"""Random swarms, planned and simulated. For `benchmarks/planning.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from swarmnet.protocol.planning.cost import Costs, Round
from swarmnet.protocol.planning.model import Held, Job, Layer, Machine, Update
from swarmnet.protocol.planning.search import cut_of
from swarmnet.protocol.sync_modes import DELAYED, LOCAL, ZERO
from swarmnet.simulation.clock import run
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import Link
from swarmnet.simulation.population import FORWARD_PART
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import Simulation

ROUNDS = 8
"""That are simulated after the first ones."""
WARM_ROUNDS = 3
MBIT = 1e6 / 8


@dataclass(frozen=True)
class Compared:
    """A swarm, as planned and as simulated."""

    about: str
    planned: Round
    simulated: float
    """Samples/s."""
    samples: int
    """Of a round."""

    @property
    def ratio(self) -> float:
        """Planned over simulated."""
        return self.samples / self.planned.seconds / self.simulated


def random_scenario(seed: int) -> Scenario:
    """One to four stages of one to three replicas, on links from poor to good."""
    rng = random.Random(f"planned swarm {seed}")
    stages = rng.randint(1, 4)
    peers = stages * rng.randint(1, 2) + rng.randrange(stages)
    microbatch = rng.choice((2, 4, 8))
    link = Link(
        rng.choice((20, 50, 200)) * MBIT, rng.choice((100, 500)) * MBIT, rng.uniform(0.001, 0.03)
    )
    return Scenario(
        seed=seed,
        peers=peers,
        stages=stages,
        global_batch=microbatch * rng.choice((16, 32, 64)),
        samples_per_microbatch=microbatch,
        service_s=rng.choice((0.1, 0.2, 0.4)),
        speed_ratio=rng.choice((1.0, 2.0, 4.0)),
        link=link,
        sizes=Sizes(
            num_shards=8,
            shard_parameters=rng.choice((10_000, 100_000)),
            activation_numbers=128 * rng.choice((64, 512, 2048)),
            width=128,
            codec=rng.choice(("none", "int8")),
            update_codec=rng.choice(("none", "int8")),
        ),
        sync_mode=(mode := rng.choice((ZERO, DELAYED, LOCAL))),
        owes_weights=mode == ZERO and rng.random() < 0.5,
        local_steps=5,
        replication=2,
        bounds=Bounds(progress_s=3600.0),
        keep_log=False,
    )


def job_of(scenario: Scenario) -> Job:
    """A layer a stage; a FLOP is a device second of the middle machine."""
    sizes, each = scenario.sizes, scenario.samples_per_microbatch
    layer = Layer(
        flops=scenario.service_s * FORWARD_PART / each,
        parameters=sizes.num_shards * sizes.shard_parameters,
        activation_bytes=sizes.activation_bytes / each,
        gradient_bytes=sizes.gradient_bytes / each,
    )
    return Job(
        layers=(layer,) * scenario.stages,
        tokens=1,
        microbatch=each,
        global_batch=scenario.num_slots * each,
        update=Update(
            scenario.sync_mode, sizes.update_codec, scenario.replication, scenario.local_steps
        ),
        memory=lambda first, end, num_stages, memory: Held(
            0, 0, "keep", 4, computes_again=False, splits=scenario.owes_weights and first > 0
        ),
        backward=1 / FORWARD_PART - 1,
        splits_pay=True,
    )


async def _played(scenario: Scenario) -> tuple[Compared, str | None]:
    simulation = Simulation(scenario)
    try:
        result = await simulation.play()
        machines, serves = [], []
        for name, member in simulation.monitor.members.items():
            host, replica = simulation.population.hosts[name], member.peer.replica
            machines.append(
                Machine(
                    name,
                    host.speed,
                    host.link.up_bytes_per_s,
                    host.link.down_bytes_per_s,
                    2 * host.link.latency_s,
                )
            )
            serves.append(-1 if replica is None else replica.index)
    finally:
        await simulation.population.close()
    costs = Costs(job_of(scenario))
    planned = costs.of(cut_of([1] * scenario.stages), machines, serves)
    assert planned is not None
    counts = [serves.count(k) for k in range(scenario.stages)]
    about = f"{scenario.stages} stages of {counts}, {scenario.sync_mode}"
    return Compared(about, planned, result.samples_per_s, costs.job.global_batch), result.broken


def compared(seed: int) -> Compared:
    """Plans and simulates. Raises `RuntimeError` where the simulation breaks."""
    scenario = random_scenario(seed)
    first = scenario.service_s * scenario.num_slots * scenario.stages / scenario.peers
    scenario = replace(
        scenario,
        until_s=(WARM_ROUNDS + ROUNDS) * 2 * first + 15,
        warmup_s=WARM_ROUNDS * 2 * first + 15,
    )
    found, broken = run(_played(scenario), seed=scenario.seed)
    if broken:
        raise RuntimeError(f"seed {seed}: {broken}")
    return found


def line(seed: int) -> tuple[str, float]:
    """A row of the table, and planned samples/s over simulated ones."""
    found = compared(seed)
    now = found.planned
    return (
        f"| {seed} | {found.about} | {found.simulated:.2f} | "
        f"{found.samples / now.seconds:.2f} | {found.ratio:.2f} |"
    ), found.ratio
