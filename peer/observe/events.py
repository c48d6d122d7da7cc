"""What happens in a run, as an onlooker sees it. `to_json` gives the lines of `--metrics`."""

from __future__ import annotations

import re
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from swarmnet.spec import MAX_STAGES

LARGEST = 2.0**62
STAGES = ("stage", "from_stage", "to_stage")
"""Of a number in a file of events."""
_MISSING = object()


def _snake(kind: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `time_unix_s`, seconds since 1970, by the onlooker's clock."""

    time_unix_s: float

    @property
    def name(self) -> str:
        """The event's name in `--metrics`: the class's, in snake case."""
        return _snake(type(self))

    def to_json(self) -> dict[str, Any]:
        """One line of `--metrics`."""
        values = asdict(self)
        time_unix_s = values.pop("time_unix_s")
        return {"event": self.name, **values, "time_unix_s": time_unix_s}


@dataclass(frozen=True, slots=True)
class RoundFinished(Event):
    """An update was made."""

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

    @property
    def name(self) -> str:
        return "round"

    def to_json(self) -> dict[str, Any]:
        values = Event.to_json(self)
        if not self.spread:  # of runs whose replicas may differ only
            del values["spread"]
        return values


@dataclass(frozen=True, slots=True)
class HeldOut(Event):
    """A new measurement on held-out data."""

    round: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class PeerJoined(Event):
    """A peer was seen for the first time, or again."""

    peer_id: str
    stage: int
    """-1 while it has chosen none."""


@dataclass(frozen=True, slots=True)
class PeerPaused(Event):
    """A peer serves no stage for now, by its owner's wish."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerResumed(Event):
    """A paused peer is back."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """A peer is no longer live."""

    peer_id: str
    stage: int
    clean: bool
    """It said goodbye."""


@dataclass(frozen=True, slots=True)
class Migrated(Event):
    """A peer serves another stage than before."""

    peer_id: str
    from_stage: int
    to_stage: int


@dataclass(frozen=True, slots=True)
class Rerouted(Event):
    """A peer sent microbatches another way because a peer failed them."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class Retracted(Event):
    """A peer took the contributions of orphaned microbatches out again."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class SamplesLost(Event):
    """Samples that were counted and yet are in no update."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class Diverged(Event):
    """After a partition a peer gave up its result of a round for that of others."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class ShardReset(Event):
    """All holders of a shard's optimizer state were lost; it began again from zero."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class ShardPromoted(Event):
    """A peer became the primary of shards whose primary was lost."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class SyncMode(Event):
    """Mode `auto` has chosen how exchanges go, from a round on."""

    round: int
    mode: str
    round_s: float
    """Seconds that a round is open."""
    exchange_s: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A peer wrote checkpoints."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class ContributionsClipped(Event):
    """A primary cut gradients of replicas of its stage to the median norm."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class ContributionDropped(Event):
    """A replica's gradients of shards were not finite and did not count."""

    peer_id: str
    """Who sent them."""
    count: int
    reporter: str = ""
    """The primary that says so."""


COUNTED: dict[str, type[Any]] = {
    "rerouted": Rerouted,
    "retracted": Retracted,
    "samples_lost": SamplesLost,
    "diverged": Diverged,
    "shard_reset": ShardReset,
    "shard_promoted": ShardPromoted,
    "checkpoints": CheckpointSaved,
    "contributions_clipped": ContributionsClipped,
}
"""Keys of `Record.totals` whose growth is an event."""


def _kinds() -> dict[str, type[Any]]:
    plain = (HeldOut, PeerJoined, PeerLost, Migrated, SyncMode, ContributionDropped)
    kinds: dict[str, type[Any]] = {_snake(kind): kind for kind in (*plain, *COUNTED.values())}
    return {**kinds, "round": RoundFinished}


def event_from_json(values: dict[str, Any]) -> Event | None:
    """The reverse of `to_json`; None for what is no such event, is damaged, or is of another
    version."""
    kind = _kinds().get(str(values.get("event")))
    if kind is None:
        return None
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
