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
    """Its public key, which is its name."""
    stage: int
    """The stage that it serves. -1: none yet."""
    state: str
    """What it says that it does, such as `joining`, `active` or `leaving`."""
    live: bool
    """Whether it answers."""
    round: int
    """The round that it is in."""
    samples_per_s: float
    """What its device could do of its stage. 0 while not measured."""
    queue_length: int
    """Pieces of work that wait there."""
    sent_bytes: int
    """Bytes that it has sent."""
    received_bytes: int
    """Bytes that it has received."""
    links: int
    """Peers that it is connected with over libp2p."""
    direct_links: int
    """Peers that it exchanges bulk data with over a direct connection."""
    direct_sent_bytes: int
    """Bytes that it has sent over direct connections; `sent_bytes` has them too."""
    rerouted: int
    """Microbatches that it sent another way, because a peer failed them."""
    agent: str
    """Its program and version."""
    started_unix_s: float = 0.0
    """When it was started, seconds since 1970."""
    upload_bytes_per_s: float = 0.0
    """Measured speed of its uplink. 0 while unknown."""
    busy: float = 0.0
    """Part of the last round in which its device worked, 0 to 1."""
    has_data: bool = False
    """Whether it has the run's data, and feeds."""
    paused: str = ""
    """Why it serves no stage for now, by its owner's wish. Empty: it is not paused."""
    samples_computed: int = 0
    """Samples that it computed for its stage, forward and backward, since it was started."""
    allowances: tuple[tuple[str, int, int], ...] = ()
    """What its owner allows it in a day or a month: what, bytes so far, and bytes at most."""
    household: str = ""
    """The key of the household that it is of. Empty: of none."""
    busiest_expert: float = 0.0
    """How often the busiest expert of a layer of its stage was chosen in the last round, over an
    even share. 0: it has no experts."""
    expert_drops: float = 0.0
    """Part of the choices in a layer of its stage for which experts had no room, 0 to 1."""


@dataclass(frozen=True, slots=True)
class GivenRow:
    """What one machine has given to the run, by its peers' own records: the sum over all its seats
    and starts since the onlooker began, and over what those had done before that were there."""

    machine: str
    """Its public key: the name of its first peer."""
    samples_computed: int
    """Samples that it computed for a stage, forward and backward, and that counted."""
    sent_bytes: int
    """Bytes that it has sent."""
    received_bytes: int
    """Bytes that it has received."""
    serving_s: float
    """Seconds for which the onlooker saw it serve a stage."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage's coverage."""

    stage: int
    """Number of the stage, from 0."""
    num_replicas: int
    """Peers that serve it."""
    num_joining: int
    """Peers that are about to serve it."""
    samples_per_s: float
    """What its replicas together could do."""
    fewest_owners: int | None = None
    """Live owners of the optimizer shard that has the fewest. None while unknown."""
    num_thin_shards: int = 0
    """Optimizer shards with fewer owners than the run wants."""
    is_bottleneck: bool = False
    """Whether it has the least throughput of all stages. None has, where all are about as fast."""
    risk: str = ""
    """What may go wrong here, in words. Empty: nothing."""


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Where the seconds of the last round went, mean over the replicas."""

    compute_s: float
    """Seconds of computing."""
    exchange_s: float
    """Seconds of exchanging gradients."""
    waiting_s: float
    """Seconds of waiting for microbatches, while the round was open."""


@dataclass(frozen=True, slots=True)
class ViewModel:
    """A run at one moment."""

    round: int
    """The round being made, from 0. It is `rounds` when the run has done them all."""
    rounds: int
    """Length of the run. 0 where it has no end."""
    launched: int
    """Samples of this round that were started."""
    committed: int
    """Samples of this round that are done."""
    global_batch: int
    """Samples of a round."""
    done: bool
    """Whether the run is over: every stage has made the last update, or the one with which its
    owner ends it."""
    loss: float | None
    """Training loss of the last finished round, nats per token."""
    tokens_per_s: float | None
    """Speed over the last finished rounds."""
    held_out_round: int | None
    """The round of the newest held-out loss."""
    held_out_loss: float | None
    """Newest held-out loss, nats per token."""
    held_out_bits_per_byte: float | None
    """Held-out loss, in bits for each byte of the text."""
    stages: tuple[StageRow, ...]
    """A row for each stage."""
    peers: tuple[PeerRow, ...]
    """A row for each peer."""
    totals: dict[str, int]
    """Sums over peers of what their records count, since they started."""
    spread: float = 0.0
    """Largest distance of two replicas that met, over the norm of their parameters."""
    samples_per_s: float | None = None
    """Committed samples a second, over the last finished rounds."""
    split: RoundSplit | None = None
    """Where the seconds of the last round went."""
    data_risk: str = ""
    """That the run hangs on one feeder, and what to do, in words. Empty where it does not."""
    ends_with: int | None = None
    """How many rounds its owner lets it have (`swarmnet stop`). None: no such order is known."""
    given: tuple[GivenRow, ...] = ()
    """What each machine gave, also those that are gone: who computed most comes first."""

    @property
    def num_live(self) -> int:
        """Live peers."""
        return sum(peer.live for peer in self.peers)

    @property
    def end(self) -> int:
        """Rounds that it will have done; 0 where no end is known."""
        ends = [n for n in (self.rounds or None, self.ends_with) if n is not None]
        return min(ends, default=0)

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
