"""What a screen shows of a run: plain values, drawn by terminal, `status --json` and web page
alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swarmnet.observe.events import HeldOut


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer."""

    peer_id: str
    stage: int
    """-1: none yet."""
    state: str
    live: bool
    round: int
    samples_per_s: float
    """What its device could do of its stage; 0 while not measured."""
    queue_length: int
    sent_bytes: int
    received_bytes: int
    links: int
    """Peers that it is connected with over libp2p."""
    direct_links: int
    """Peers that it exchanges bulk data with over a direct connection."""
    direct_sent_bytes: int
    """Of those sent."""
    rerouted: int
    agent: str
    started_unix_s: float = 0.0
    upload_bytes_per_s: float = 0.0
    """Measured; 0 while unknown."""
    busy: float = 0.0
    """Part of the last round in which its device worked, 0 to 1."""
    has_data: bool = False
    paused: str = ""
    """Why it serves no stage for now, by its owner's wish."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage's coverage."""

    stage: int
    num_replicas: int
    num_joining: int
    samples_per_s: float
    """Of its replicas together."""
    fewest_owners: int | None = None
    """Live owners of the optimizer shard that has the fewest; None while unknown."""
    num_thin_shards: int = 0
    """Optimizer shards with fewer owners than the run wants."""
    is_bottleneck: bool = False
    """Of all stages, the one with the least throughput; none where all are about as fast."""
    risk: str = ""
    """What may go wrong here, in words; empty for nothing."""


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Where the seconds of the last round went, mean over the replicas."""

    compute_s: float
    exchange_s: float
    waiting_s: float
    """For microbatches, while the round was open."""


@dataclass(frozen=True, slots=True)
class ViewModel:
    """A run at one moment."""

    round: int
    """The round being made, from 0; `rounds` when the run has done them all."""
    rounds: int
    """Length of the run; 0 where it has no end."""
    launched: int
    """Samples of this round."""
    committed: int
    """Samples of this round."""
    global_batch: int
    done: bool
    """Every stage has made the last update."""
    loss: float | None
    """Of the last finished round, nats per token."""
    tokens_per_s: float | None
    """Over the last finished rounds."""
    held_out_round: int | None
    held_out_loss: float | None
    held_out_bits_per_byte: float | None
    stages: tuple[StageRow, ...]
    peers: tuple[PeerRow, ...]
    totals: dict[str, int]
    """Sums over peers of what their records count, since they started."""
    spread: float = 0.0
    """Largest distance of two replicas that met, over the norm of their parameters."""
    samples_per_s: float | None = None
    """Committed, over the last finished rounds."""
    split: RoundSplit | None = None
    data_risk: str = ""
    """That the run hangs on one feeder, and what to do, in words; empty where it does not."""

    @property
    def num_live(self) -> int:
        """Live peers."""
        return sum(peer.live for peer in self.peers)

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Stages that nobody serves."""
        return tuple(row.stage for row in self.stages if row.num_replicas == 0)

    def to_json(self) -> dict[str, Any]:
        """For `swarmnet status --json`."""
        return {**asdict(self), "num_live": self.num_live, "uncovered": list(self.uncovered)}


@dataclass(frozen=True, slots=True)
class Summary:
    """A run, looked back upon by an onlooker who saw it from its first round."""

    rounds: int
    """Finished."""
    tokens: int
    tokens_per_s: float
    """In the rounds whose beginning and end were seen."""
    held_out_first: HeldOut | None
    held_out_last: HeldOut | None
    totals: Mapping[str, int]
    """As of `ViewModel`."""
    bytes_per_token: float
    """Sent, all peers together, over a token trained."""
