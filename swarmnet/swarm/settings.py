"""The numbers of a run that the swarm code needs, without the spec's file format."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.protocol.backoff import LONGEST_PAUSE_S
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.membership.records import MAX_SHARDS, record_bytes
from swarmnet.protocol.membership.run_bounds import RunBounds
from swarmnet.protocol.slots import SlotPlan, sample_indices, slot_plan
from swarmnet.protocol.sync_modes import ZERO, RunEnd, SyncPlan
from swarmnet.protocol.timing import BULK_S, CONNECT_S, PATIENCE_S, UPKEEP_S


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Of the run, the same at every peer."""

    run_id: str
    num_stages: int
    global_batch: int
    """Samples behind one update; with `batch_ramp` at most."""
    samples_per_microbatch: int
    rounds: int
    """Length of the run; `NO_END` where it has none."""
    seed: int = 0
    """Of the order of the samples."""
    num_shards: tuple[int, ...] = ()
    """Of each stage, where that is known."""
    products: tuple[float, ...] = ()
    """Of each stage, FLOPs of a primary's products of matrices for each byte of its results, over
    all its shards; empty where primaries make none."""
    num_values: int = 0
    """Of a token, at most; 0 where the model is not of tokens, or that is not known."""
    grad_clip_norm: float = 0.0
    """0 for none."""
    replication: int = 2
    """Owners of each shard's optimizer state."""
    aggregation: str = "mean"
    """A rule of `protocol.update.robust`."""
    evaluate_every: int = 10
    """Rounds between measurements on held-out data; 0 for only at the end."""
    max_in_flight: int = 0
    """Microbatches in flight per feeder; 0 for automatic."""
    boundary_codec: str = NONE
    """`[pipeline] codec`."""
    sync_mode: str = ZERO
    local_steps: int = 1
    """Rounds between two exchanges, where replicas make steps of their own."""
    fragments: int = 1
    """Groups of shards that are exchanged in different rounds, likewise."""
    sync_warmup_rounds: int = 0
    """First rounds in which exchanges come as soon as they can, whatever the mode."""
    batch_ramp: tuple[tuple[int, int], ...] = ()
    """Rounds, and the samples behind each update from there on; empty where these are the same in
    all."""
    begins_with_moments: bool = False
    """The optimizer's state is not empty at the beginning of the run: another one's goes on."""
    stop: RunEnd = field(default_factory=RunEnd, compare=False)
    """Of this peer, as it hears of it: the one of its view."""

    @property
    def end(self) -> int:
        """No microbatch of this round, or of one after it, is begun."""
        return min(self.rounds, self.stop.round)

    @property
    def max_record_bytes(self) -> int:
        """Of what a peer says of itself."""
        return record_bytes(max(self.num_shards, default=MAX_SHARDS), self.slots.most)

    @property
    def bounds(self) -> RunBounds:
        """Of what a peer can say of itself."""
        return RunBounds(
            self.num_stages,
            self.rounds,
            self.slots,
            self.samples_per_microbatch,
            self.num_values,
            self.num_shards,
        )

    @property
    def slots(self) -> SlotPlan:
        """Microbatches of each round."""
        return slot_plan(self.global_batch, self.samples_per_microbatch, self.batch_ramp)

    def samples_of(self, round_index: int, slot: int, num_samples: int | None) -> list[int]:
        """The samples of a slot, of data that has `num_samples` (None: no end)."""
        return sample_indices(
            seed=self.seed,
            round_index=round_index,
            slot=slot,
            slots=self.slots,
            samples_per_slot=self.samples_per_microbatch,
            num_samples=num_samples,
        )

    @property
    def plan(self) -> SyncPlan:
        """When the replicas of a stage exchange what."""
        return SyncPlan(
            self.sync_mode,
            self.rounds,
            self.local_steps,
            self.fragments,
            warmup_rounds=self.sync_warmup_rounds,
        )


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Bounds of waits and queues, with their units."""

    max_waiting_forwards: int = 3
    """Forward work that may wait for the device before a replica answers `Busy`."""
    max_waiting_announced: int = 32
    """The same for microbatches whose callers have asked before: they know how long it takes..."""
    max_waiting_s: float = 240.0
    """...as long as the device has no more than so much to do: behind a slow one, they would wait
    while others run out of work (tests/swarm/pipeline/test_room.py)."""
    max_open_steps: int = 256
    """Microbatches inside one replica at a time."""
    route_wait_s: float = PATIENCE_S
    """How long a microbatch may look for a replica of the next stage that lives."""
    enter_wait_s: float = PATIENCE_S
    """How long a call from a coming round may wait for it to begin."""
    patience_s: float = 1.0
    """A feeder launches beyond its quota when the others have been quiet for this long. It protects
    from flights of one slot from two feeders (tests/protocol/pipeline/test_launching.py)."""
    reduce_wait_s: float = BULK_S
    """Longest wait of a primary for contributions, where no known uplink needs longer and no round
    runs beside."""
    reduce_wait_min_s: float = 5.0
    """Shortest such wait beyond what an exchange usually takes: a replica that waits for a silent
    feeder's word is late itself, and it takes 2.5 s to know that a feeder is silent. It protects
    the gradients of such replicas (tests/swarm/update/test_exchange_pace.py)."""
    norm_wait_s: float = PATIENCE_S
    """Longest wait for the gradient norm over all stages, likewise."""
    fetch_timeout_s: float = BULK_S
    max_serving: int = 4
    """Shards that a donor sends at a time."""
    max_fetching: int = 8
    """Shards that a joiner asks for at a time."""
    commit_question_s: float = CONNECT_S
    """How long a feeder may take to say whether it committed an orphan."""
    balance_every_s: float = UPKEEP_S
    """Mean time between a peer's looks at whether it should serve another stage."""
    move_margin: float = 0.15
    """By what fraction a move must speed up the poorer of its two stages."""
    move_proposals: int = 2
    """Looks in a row that must name the same move."""
    move_cooldown_s: float = LONGEST_PAUSE_S
    """A peer that has joined a stage serves it for so long before it may move."""
