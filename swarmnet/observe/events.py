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
    """Something that happened at `time_unix_s`, seconds since 1970, by the onlooker's clock."""

    name: ClassVar[str] = ""
    """In `--metrics`, which people's programs read: it stays whatever the class is called."""
    time_unix_s: float

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
    loss: float
    """Nats per token, mean over the round's tokens."""
    samples: int
    tokens: int
    seconds: float
    """Since the round before; 0 where the onlooker did not see that one end."""
    tokens_per_s: float
    """0 where `seconds` is."""
    peers: int
    """Live peers that serve or are about to serve a stage."""
    spread: float = 0.0
    """The largest `protocol.membership.records.Record.spread`; 0 where replicas are equal."""

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
    loss: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class PeerJoined(Event):
    """A peer was seen for the first time, or again."""

    name: ClassVar[str] = "peer_joined"

    peer_id: str
    stage: int
    """-1 while it has chosen none."""


@dataclass(frozen=True, slots=True)
class PeerPaused(Event):
    """A peer serves no stage for now, by its owner's wish."""

    name: ClassVar[str] = "peer_paused"

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerResumed(Event):
    """A paused peer is back."""

    name: ClassVar[str] = "peer_resumed"

    peer_id: str


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """A peer is no longer live."""

    name: ClassVar[str] = "peer_lost"

    peer_id: str
    stage: int
    clean: bool
    """It said goodbye."""


@dataclass(frozen=True, slots=True)
class Migrated(Event):
    """A peer serves another stage than before."""

    name: ClassVar[str] = "migrated"

    peer_id: str
    from_stage: int
    to_stage: int


@dataclass(frozen=True, slots=True)
class SyncMode(Event):
    """Mode `auto` has chosen how exchanges go, from a round on."""

    name: ClassVar[str] = "sync_mode"

    round: int
    mode: str
    round_s: float
    """Seconds that a round is open."""
    exchange_s: float


@dataclass(frozen=True, slots=True)
class ContributionDropped(Event):
    """A replica's gradients of shards were not finite and did not count."""

    name: ClassVar[str] = "contribution_dropped"

    peer_id: str
    """Who sent them."""
    count: int
    reporter: str = ""
    """The primary that says so."""


CHECKPOINT_SAVED = "checkpoint_saved"
COUNTED = {
    "rerouted": "rerouted",  # microbatches sent another way because a peer failed them
    "retracted": "retracted",  # contributions of orphaned microbatches, taken out again
    "samples_lost": "samples_lost",  # they were counted and yet are in no update
    "slots_doubled": "slots_doubled",  # by two feeders, over different replicas: twice in an update
    "diverged": "diverged",  # after a partition the result of others was taken over
    "shard_reset": "shard_reset",  # all holders of its optimizer state were lost
    "shard_promoted": "shard_promoted",  # the peer became its primary, the one before being lost
    "checkpoints": CHECKPOINT_SAVED,
    "contributions_clipped": "contributions_clipped",  # cut to the median norm
}
"""Names of `Counted` events, by the key of `Record.totals` whose growth they tell."""


@dataclass(frozen=True, slots=True)
class Counted(Event):
    """Something that a peer counts happened to it."""

    what: str
    """A value of `COUNTED`."""
    peer_id: str
    count: int

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
