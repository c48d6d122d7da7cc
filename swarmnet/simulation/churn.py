"""The times of joins, leaves, crashes and stalls: a Poisson process, or a trace from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmnet.errors import DataError
from swarmnet.files import text_of

JOIN, LEAVE, CRASH, STALL, REJOIN = "join", "leave", "crash", "stall", "rejoin"
PARTITION, ONE_WAY = "partition", "one_way"
ACTIONS = (JOIN, LEAVE, CRASH, STALL, REJOIN, PARTITION, ONE_WAY)
MAX_TRACE_EVENTS = 1_000_000
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ChurnEvent:
    """An event of one peer. Where `peer` is empty, the simulation draws one."""

    at_s: float
    action: str
    peer: str = ""
    duration_s: float = 0.0
    """Of a stall, a partition or a one-way loss of reachability; of the absence before a crashed
    peer rejoins."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}; one of {', '.join(ACTIONS)}")
        if not 0 <= self.at_s < float("inf") or not 0 <= self.duration_s < float("inf"):
            raise ValueError("a time of a churn event is out of range")


@dataclass(frozen=True, slots=True)
class ChurnRates:
    """Events per hour, in the whole swarm."""

    join: float = 0.0
    leave: float = 0.0
    crash: float = 0.0
    stall: float = 0.0
    rejoin: float = 0.0
    """Crashes after which the same machine rejoins."""
    partition: float = 0.0
    one_way: float = 0.0
    mean_stall_s: float = 10.0
    mean_absence_s: float = 15.0
    mean_partition_s: float = 10.0

    @classmethod
    def replacing(cls, num_peers: int, fraction_per_hour: float) -> ChurnRates:
        """`fraction_per_hour` of the peers leave or crash and as many new ones join; three of four
        crash."""
        gone = num_peers * fraction_per_hour
        return cls(join=gone, leave=0.25 * gone, crash=0.75 * gone)


def poisson(
    rates: ChurnRates, until_s: float, rng: random.Random, begin_s: float = 0.0
) -> list[ChurnEvent]:
    """Independent events at these rates, in order of time."""
    events = []
    means = {
        STALL: rates.mean_stall_s,
        REJOIN: rates.mean_absence_s,
        PARTITION: rates.mean_partition_s,
        ONE_WAY: rates.mean_partition_s,
    }
    for action in ACTIONS:
        per_s = getattr(rates, action) / HOUR_S
        at = begin_s
        while per_s > 0 and (at := at + rng.expovariate(per_s)) < until_s:
            mean_s = means.get(action, 0.0)
            duration_s = rng.expovariate(1 / mean_s) if mean_s else 0.0
            events.append(ChurnEvent(at, action, duration_s=duration_s))
    return sorted(events, key=lambda e: (e.at_s, ACTIONS.index(e.action)))


def read_trace(path: Path) -> list[ChurnEvent]:
    """One JSON object a line with the fields of `ChurnEvent`; a line that begins with `#` is a
    comment. Raises `DataError`."""
    events = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            events.append(ChurnEvent(**json.loads(line)))
        except (ValueError, TypeError) as e:
            raise DataError(f"{path}, line {number}: {e}") from None
        if len(events) > MAX_TRACE_EVENTS:
            raise DataError(f"{path}: more than {MAX_TRACE_EVENTS} events")
    return sorted(events, key=lambda e: e.at_s)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for raw in file:
                line = text_of(raw, path, DataError).strip()
                if line and not line.startswith("#"):
                    yield line
    except OSError as e:
        raise DataError(f"cannot read the trace {path}: {e.strerror}") from None
