"""What happens in a run, as an onlooker sees it. `to_json` gives the lines of `--metrics`."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from swarmnet.spec import MAX_STAGES

LARGEST = 2.0**62
STAGES = ("stage", "from_stage", "to_stage")
"""Of a number in a file of events."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run."""

    name: ClassVar[str] = ""
    """In `--metrics`, which people's programs read: it stays whatever the class is called."""
    time_unix_s: float
    """When the onlooker saw it, seconds since 1970."""

    def to_json(self) -> dict[str, Any]:
        """One line of `--metrics`."""
        values = asdict(self)
        time_unix_s = values.pop("time_unix_s")
        return {"event": self.name, **values, "time_unix_s": time_unix_s}


@dataclass(frozen=True, slots=True)
class RoundFinished(Event):
    """An update was made."""

    name: ClassVar[str] = "round"

    round: int
    """Number of the round, from 0."""
    loss: float
    """Training loss, nats per token, mean over the round's tokens."""
    samples: int
    """Samples behind the update."""
    tokens: int
    """Tokens behind the update."""
    seconds: float
    """Time since the round before. 0 where the onlooker did not see that one end."""
    tokens_per_s: float
    """Speed of the round. 0 where `seconds` is 0."""
    peers: int
    """Live peers that serve a stage, or are about to."""
    spread: float = 0.0
    """Largest distance of two replicas that met, over the norm of their parameters. Lines of runs
    whose replicas are equal leave it out."""

    def to_json(self) -> dict[str, Any]:
        values = Event.to_json(self)
        if not self.spread:  # of runs whose replicas may differ only
            del values["spread"]
        return values


@dataclass(frozen=True, slots=True)
class HeldOut(Event):
    """A new measurement on held-out data."""

    name: ClassVar[str] = "held_out"

    round: int
    """The round after which it was measured."""
    loss: float
    """Held-out loss, nats per token."""
    bits_per_byte: float
    """Held-out loss, in bits for each byte of the text."""


@dataclass(frozen=True, slots=True)
class PeerJoined(Event):
    """A peer was seen for the first time, or again."""

    name: ClassVar[str] = "peer_joined"

    peer_id: str
    """The peer."""
    stage: int
    """Its stage. -1 while it has chosen none."""


@dataclass(frozen=True, slots=True)
class PeerPaused(Event):
    """A peer serves no stage for now, by its owner's wish."""

    name: ClassVar[str] = "peer_paused"

    peer_id: str
    """The peer."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, slots=True)
class PeerResumed(Event):
    """A paused peer is back."""

    name: ClassVar[str] = "peer_resumed"

    peer_id: str
    """The peer."""


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """A peer is no longer live."""

    name: ClassVar[str] = "peer_lost"

    peer_id: str
    """The peer."""
    stage: int
    """The stage that it served. -1: none."""
    clean: bool
    """Whether it said goodbye."""


@dataclass(frozen=True, slots=True)
class Migrated(Event):
    """A peer serves another stage than before."""

    name: ClassVar[str] = "migrated"

    peer_id: str
    """The peer."""
    from_stage: int
    """Its stage before."""
    to_stage: int
    """Its stage now."""


@dataclass(frozen=True, slots=True)
class SyncMode(Event):
    """Mode `auto` has chosen how exchanges go, from a round on."""

    name: ClassVar[str] = "sync_mode"

    round: int
    """The first round of the mode."""
    mode: str
    """`zero` or `delayed`."""
    round_s: float
    """Seconds that a round is open."""
    exchange_s: float
    """Seconds that an exchange takes."""


@dataclass(frozen=True, slots=True)
class ContributionDropped(Event):
    """A replica's gradients of shards were not finite and did not count."""

    name: ClassVar[str] = "contribution_dropped"

    peer_id: str
    """The peer that sent them."""
    count: int
    """Number of shards."""
    reporter: str = ""
    """The peer that refused them."""


CHECKPOINT_SAVED = "checkpoint_saved"
COUNTED = {
    "rerouted": "rerouted",
    "retracted": "retracted",
    "samples_lost": "samples_lost",
    "slots_doubled": "slots_doubled",
    "diverged": "diverged",
    "shard_reset": "shard_reset",
    "shard_promoted": "shard_promoted",
    "checkpoints": CHECKPOINT_SAVED,
    "checkpoints_failed": "checkpoints_failed",
    "checkpoints_resumed": "checkpoints_resumed",
    "contributions_clipped": "contributions_clipped",
}
"""Names of `Counted` events, by the key of `Record.totals` whose growth they tell."""
MEANINGS = {
    "rerouted": "Microbatches were sent another way, because a peer failed them.",
    "retracted": "Contributions of orphaned microbatches were taken out of a gradient again.",
    "samples_lost": "Samples were counted, and yet are in no update.",
    "slots_doubled": "Slots were counted by two feeders over different replicas: they are twice in "
    "an update.",
    "diverged": "After a partition, the peer took over the result of others.",
    "shard_reset": "All holders of a shard's optimizer state were lost; it began afresh.",
    "shard_promoted": "The peer became primary of shards, because the one before was lost.",
    CHECKPOINT_SAVED: "The peer saved a checkpoint.",
    "checkpoints_failed": "The peer cannot save checkpoints any more: its disk is full, say.",
    "checkpoints_resumed": "The peer saves checkpoints again.",
    "contributions_clipped": "Contributions were cut to the median norm.",
}
"""Of `Counted` events, by name."""


@dataclass(frozen=True, slots=True)
class Counted(Event):
    """Something that a peer counts happened to it."""

    what: str
    """A value of `COUNTED`; in a line it is the event's name."""
    peer_id: str
    """The peer that counts."""
    count: int
    """How often, since the last such event of the peer."""

    def to_json(self) -> dict[str, Any]:
        values = Event.to_json(self)
        values["event"] = values.pop("what")
        return values


def is_for_programs(event: Event) -> bool:
    """In the metrics, and told to no person."""
    return isinstance(event, Counted) and event.what == CHECKPOINT_SAVED


KINDS: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (
        RoundFinished,
        HeldOut,
        PeerJoined,
        PeerPaused,
        PeerResumed,
        PeerLost,
        Migrated,
        SyncMode,
        ContributionDropped,
    )
} | dict.fromkeys(COUNTED.values(), Counted)
"""By name."""


def event_from_json(values: dict[str, Any]) -> Event | None:
    """The reverse of `to_json`; None for what is no such event, is damaged, or is of another
    version."""
    name = str(values.get("event"))
    kind = KINDS.get(name)
    if kind is None:
        return None
    values = {**values, "what": name}
    given: dict[str, Any] = {}
    for f in fields(kind):
        value = values.get(f.name, _MISSING)
        if value is _MISSING:
            if f.default is MISSING:
                return None
            continue
        wanted: Any = {"int": int, "float": (int, float), "str": str, "bool": bool}[str(f.type)]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            return None
        if isinstance(value, (int, float)) and not abs(value) < LARGEST:
            return None
        if f.name in STAGES and value >= MAX_STAGES:
            return None
        given[f.name] = value
    event: Event = kind(**given)
    return event
