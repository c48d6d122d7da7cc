"""The description of a simulation, and its result."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarmnet.protocol.codecs import INT8
from swarmnet.protocol.membership.assignment import Adaptive, Assigner
from swarmnet.protocol.membership.pace import GossipSettings
from swarmnet.protocol.slots import slot_plan
from swarmnet.protocol.sync_modes import DELAYED, GOSSIP, LOCAL, ZERO
from swarmnet.simulation.churn import ChurnEvent, ChurnRates
from swarmnet.simulation.coding import Coding, PassCoding
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import FAST_LINK, Link
from swarmnet.simulation.stage import Sizes
from swarmnet.swarm.settings import WaitLimits

SERVICE_S = 4.0
MICROBATCHES_PER_REPLICA = 200
STAGE_PARAMETERS = 50_000_000
STAGE_SHARDS = 64
SEQUENCE_TOKENS, WIDTH = 1024, 1024
"""Of an activation."""
CHECK_S = 10.0
"""`Scenario.check_s` of `large_swarm`."""


@dataclass(frozen=True)
class Scenario:
    """A swarm and its faults. The same scenario gives the same history, bit for bit."""

    seed: int = 0
    peers: int = 6
    """Peers that start with the run, within `start_s`."""
    stages: int = 2
    rounds: int = 1_000_000
    """The simulation ends when every live peer has finished them, or after `until_s`."""
    until_s: float = 60.0
    """Virtual seconds."""
    churn_until_s: float = float("inf")
    """No fault begins after this time; those that are open end by themselves."""
    global_batch: int = 64
    samples_per_microbatch: int = 4
    sizes: Sizes = field(default_factory=Sizes)
    coding: Coding = field(default_factory=Coding)
    """How fast every machine codes, whatever its speed."""
    service_s: float = 0.05
    """Device seconds of one microbatch, forward and backward, at a machine of speed 1, without
    coding."""
    owes_weights: bool = False
    """In mode `zero`: a backward pass has two parts, of which the second, half of it, is done when
    the device has nothing else to do."""
    service_sigma: float = 0.0
    """Of the logarithm: by how much the device time of the same work varies."""
    speed_ratio: float = 4.0
    """Fastest machine over slowest; speeds are log-uniform, and 1 in the middle."""
    home_links: bool = False
    """Log-normal home links; else every peer has `link`."""
    link: Link = FAST_LINK
    paired_links: bool = False
    """Each two peers have such a link for themselves (`SimulatedNetwork.is_paired`)."""
    links: tuple[Link, ...] = ()
    """Of the first machines, in the order of their arrival, in place of these."""
    house: int = 0
    """So many machines, in the order of their arrival, share the link of the first of them, and a
    fast one between them; 0: each has its own."""
    has_households: bool = False
    """Machines of one house have its key."""
    loss: float = 0.0
    churn: ChurnRates = field(default_factory=ChurnRates)
    trace: tuple[ChurnEvent, ...] = ()
    keep_covered: bool = True
    """No fault takes a stage's last replica."""
    lasting: int = 0
    """The first peers, as many as this, never die. Newcomers are told of peers that the others
    see."""
    max_peers: int = 12
    clip: bool = True
    sync_mode: str = ZERO
    """One of `protocol.sync_modes`."""
    replication: int = 2
    """Owners of each shard's optimizer state."""
    local_steps: int = 1
    """Rounds between two exchanges of a shard, in the modes `local` and `gossip`."""
    fragments: int = 1
    """Groups of shards that are exchanged in different rounds, in mode `local`."""
    warmup_rounds: int = 0
    """First rounds, in which exchanges happen as soon as possible, whatever the mode."""
    settled_rounds: int = 0
    """Where set, the run ends when all replicas have made this number of rounds after
    `churn_until_s`."""
    start_s: float = 2.0
    check_s: float = 0.25
    bounds: Bounds = field(default_factory=Bounds)
    limits: WaitLimits = field(default_factory=WaitLimits)
    gossip: GossipSettings = field(default_factory=GossipSettings)
    warmup_s: float = 0.0
    """Virtual seconds that are left out of the throughput and of its bound."""
    assigner: Callable[[int], Assigner] = Adaptive
    """Makes what assigns a peer to a stage, for a run with so many copies of its state."""
    keeps_books: bool = True
    """Compares what was committed with what was averaged."""
    keep_log: bool = True
    """Keeps the event log's lines; its hash is always made."""

    @property
    def num_slots(self) -> int:
        """Microbatches of a round."""
        return slot_plan(self.global_batch, self.samples_per_microbatch).most

    def pass_coding(self, stage_index: int) -> tuple[PassCoding, PassCoding]:
        """Of a microbatch's forward and backward pass in a stage."""
        has_before, has_after = stage_index > 0, stage_index < self.stages - 1
        values = self.sizes.activation_numbers
        return (
            self.coding.forward(
                self.sizes.boundary, values, has_before=has_before, has_after=has_after
            ),
            self.coding.backward(
                self.sizes.boundary, values, has_before=has_before, has_after=has_after
            ),
        )

    def rng(self, name: str) -> random.Random:
        """A generator for one part of the simulation, whose numbers no other part changes."""
        return random.Random(f"{self.seed}|{name}")


@dataclass(frozen=True)
class Sample:
    """The swarm at one moment."""

    at_s: float
    samples_per_s: float
    """Committed since the last sample."""
    bound_per_s: float
    best_per_s: float
    peers: int
    round: int


@dataclass(frozen=True)
class Result:
    """The result of a scenario."""

    log_hash: str
    broken: str | None
    """The invariant that did not hold, and when."""
    virtual_s: float
    rounds: int
    samples: int
    """Committed in the whole run."""
    samples_per_s: float
    """After the warm-up."""
    bound_per_s: float
    """Max-flow of the live machines, each in the stage that it served; mean over the same time."""
    best_per_s: float
    """The same with the best assignment of machines to stages."""
    rerouted: int
    retracted: int
    moved: int
    settled_samples: int
    """Committed in rounds whose updates are made: losses are known of these only."""
    samples_lost: int
    """Committed and not in the update of a shard: for each round, those of the worst shard of all
    stages."""
    samples_lost_mean: float
    """The same as a mean over all shards of all stages: the amount of wasted work."""
    reported_lost: int
    """Lost samples by the peers' own counters."""
    stages_restarted: int
    shards_reset: int
    faults: dict[str, int]
    recovery_s: tuple[float, ...]
    """From each crash to the commit of the last microbatch that was inside the dead peer."""
    control_bytes_per_peer_s: float
    bytes_per_peer_s: float
    longest_island_s: float
    """Longest time for which a peer was in a part of the swarm that did not see the rest, though no
    cut separated them."""
    breakdown: dict[str, float]
    """Activity of the machines after the warm-up, as parts of their capacity (see `breakdown`)."""
    checks: int
    samples_over_time: tuple[Sample, ...]
    log: tuple[str, ...] = ()

    @property
    def fraction_of_bound(self) -> float:
        return self.samples_per_s / self.bound_per_s if self.bound_per_s else 0.0

    @property
    def fraction_of_best(self) -> float:
        return self.samples_per_s / self.best_per_s if self.best_per_s else 0.0

    @property
    def assignment_quality(self) -> float:
        """The bound of the actual assignment over that of the best one: the aim of rebalancing."""
        return self.bound_per_s / self.best_per_s if self.best_per_s else 0.0


def small_swarm(seed: int) -> Scenario:
    """One of the small swarms of the sweep: up to 12 peers, 1 to 4 stages, every kind of fault."""
    rng = random.Random(f"small swarm {seed}")
    stages = rng.randint(1, 4)
    peers = rng.randint(2 * stages, 12)
    until_s = rng.uniform(8.0, 22.0)

    def per_hour(most: float) -> float:
        """Events in the whole of such a short history, as a rate."""
        return rng.choice((0.0, rng.uniform(0.0, most))) * 3600.0 / until_s

    churn = ChurnRates(
        join=per_hour(3),
        leave=per_hour(2),
        crash=per_hour(4),
        stall=per_hour(3),
        rejoin=per_hour(3),
        partition=per_hour(1.5),
        one_way=per_hour(2),
        mean_stall_s=rng.choice((1.0, 4.0, 12.0)),
        mean_absence_s=rng.choice((0.5, 5.0)),
        mean_partition_s=rng.choice((1.0, 4.0, 12.0)),
    )
    return Scenario(
        seed=seed,
        peers=peers,
        stages=stages,
        until_s=until_s + 150.0,
        settled_rounds=1,
        churn_until_s=until_s,
        global_batch=rng.choice((16, 32, 64)),
        sizes=Sizes(num_shards=rng.choice((1, 2, 5)), shard_parameters=rng.choice((4096, 60_000))),
        service_s=rng.choice((0.1, 0.4)),
        speed_ratio=rng.choice((1.0, 10.0)),
        home_links=rng.random() < 0.5,
        loss=rng.choice((0.0, 0.01)),
        churn=churn,
        clip=rng.random() < 0.7,
        gossip=GossipSettings(interval_s=0.5),
        limits=_small_limits(seed),
    )


def _small_limits(seed: int) -> WaitLimits:
    """In a third of the swarms peers move within seconds, because such a history is too short for
    the usual cooldowns."""
    if random.Random(f"moves {seed}").random() < 1 / 3:
        return WaitLimits(balance_every_s=1.0, move_cooldown_s=2.0)
    return WaitLimits()


def small_swarm_in(mode: str, seed: int) -> Scenario:
    """A small swarm of the sweep in another mode. It ends after an exchange of all shards."""
    warmup_rounds = random.Random(f"warm-up {mode} {seed}").choice((0, 0, 4, 15))
    scenario = replace(small_swarm(seed), sync_mode=mode, warmup_rounds=warmup_rounds)
    if mode not in (LOCAL, GOSSIP):
        return scenario
    rng = random.Random(f"{mode} {seed}")
    steps = rng.choice((1, 2, 3, 5))
    fragments = rng.randint(1, steps) if mode == LOCAL else 1
    return replace(scenario, local_steps=steps, fragments=fragments, settled_rounds=steps + 1)


def large_swarm(
    peers: int,
    stages: int,
    until_s: float,
    churn: ChurnRates,
    seed: int = 0,
    *,
    service_s: float = SERVICE_S,
    microbatches_per_replica: int = MICROBATCHES_PER_REPLICA,
    sequences: int = 1,
    codec: str = INT8,
    update_codec: str = INT8,
) -> Scenario:
    """A swarm of volunteers: heterogeneous machines on home links, peers that join and leave.

    A stage has 50 million parameters, exchanged in `update_codec` (`[sync] codec`). A microbatch is
    `sequences` sequences of 1,024 tokens of width 1,024, sent in `codec` (`[pipeline] codec`). Each
    sequence takes a machine of middle speed `service_s` seconds in its stage (4 s: about 0.1
    TFLOP/s that reach the model). A round has `microbatches_per_replica` microbatches for each
    replica of a stage; its exchange runs beside the next round."""
    return Scenario(
        seed=seed,
        peers=peers,
        stages=stages,
        until_s=until_s,
        global_batch=sequences * max(8, microbatches_per_replica * peers // stages),
        samples_per_microbatch=sequences,
        sizes=Sizes(
            num_shards=STAGE_SHARDS,
            shard_parameters=STAGE_PARAMETERS // STAGE_SHARDS,
            activation_numbers=sequences * SEQUENCE_TOKENS * WIDTH,
            width=WIDTH,
            codec=codec,
            update_codec=update_codec,
        ),
        sync_mode=DELAYED,
        service_s=sequences * service_s,
        speed_ratio=10.0,
        home_links=True,
        churn=churn,
        max_peers=2 * peers,
        start_s=min(30.0, until_s / 10),
        check_s=min(CHECK_S, max(1.0, until_s / 100)),
        warmup_s=min(1800.0, until_s / 4),
        bounds=Bounds(converge_s=1800.0, progress_s=3600.0),
        keep_log=False,
    )
