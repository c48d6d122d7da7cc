"""What the page knows of a run, and what changed since a visitor was last told.

A visitor is given everything once (`state`), then differences (`tick`), as often as the run changes
but not more than `TICK_S` allows. Who cannot keep up is given everything anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swarmnet.observe.events import Event, HeldOut, RoundFinished, is_for_programs
from swarmnet.observe.text import sentence
from swarmnet.observe.view_model import GivenRow, PeerRow, ViewModel
from swarmnet.printable import printable
from swarmnet.spec import RunSpec, describe

TICK_S = 0.5
"""Shortest time between two messages to a visitor."""
MAX_ROUNDS_KEPT = 4000
"""Points of a curve; when there are more, older ones go."""
MAX_EVENTS_KEPT = 500
MAX_WAITING = 16
"""Messages that wait for a slow visitor; then it gets a new `state`."""
MAX_VISITORS = 64
HISTORY_EVERY_S = 5.0
MAX_HISTORY = 240
"""Points of one peer's history: twenty minutes."""
MAX_PEERS_KEPT = 4096
RECENT_EVENTS_OF_A_PEER = 20

Message = dict[str, Any]


def about(spec: RunSpec) -> Message:
    """What stays the same in a run."""
    return {
        "name": shown(spec.name),
        "run_id": spec.run_id,
        "description": shown(describe(spec)),
        "num_stages": spec.pipeline.num_stages,
        "rounds": spec.optimizer.rounds,
        "global_batch": spec.pipeline.global_batch,
        "microbatch": spec.pipeline.microbatch,
        "replication": spec.sync.replication,
        "sync_mode": spec.sync.mode,
    }


def event_json(event: Event, rounds: int) -> Message:
    """A line of the event log."""
    values = event.to_json()
    return {
        "t": values["time_unix_s"],
        "kind": values["event"],
        "peer": shown(values.get("peer_id", "")),
        "stage": values.get("stage", values.get("to_stage", -1)),
        "count": values.get("count", 1),
        "text": shown(sentence(event, rounds)),
    }


def round_point(event: RoundFinished, model: ViewModel) -> list[float | None]:
    """A point of the curves: round, unix seconds, loss, tokens/s, seconds, peers, and the seconds
    of compute, exchange and waiting."""
    split = model.split
    parts = (split.compute_s, split.exchange_s, split.waiting_s) if split else (None, None, None)
    head: tuple[float | None, ...] = (
        event.round + 1,
        event.time_unix_s,
        event.loss,
        event.tokens_per_s or None,
        event.seconds or None,
        event.peers,
    )
    return [_short(x) for x in (*head, *parts)]


def model_json(model: ViewModel) -> Message:
    """The view model without its peers and what they gave, which travel as differences."""
    values = asdict(replace(model, peers=(), given=()))
    del values["peers"], values["given"]
    values["num_live"] = model.num_live
    values["uncovered"] = list(model.uncovered)
    return shown(values)


def peer_json(row: PeerRow | GivenRow) -> Message:
    """A row of a table."""
    return shown(asdict(row))


def thin(curve: list[Any]) -> None:
    """Of a curve that has too many points, the newest eighth stays, and of the older ones the first
    of every so many rounds: a power of two, so that those that stayed before stay evenly spaced."""
    if len(curve) <= MAX_ROUNDS_KEPT:
        return
    rounds = [point[0] for point in curve]
    span = 1
    while (max(rounds) - min(rounds)) // span >= MAX_ROUNDS_KEPT // 2:
        span *= 2
    old = curve[: -MAX_ROUNDS_KEPT // 8]
    firsts = {point[0] // span: point for point in reversed(old)}
    curve[: len(old)] = reversed(firsts.values())


def state_of(spec: RunSpec, model: ViewModel) -> Message:
    """All that a screen shows, for a metrics file."""
    return {
        "about": about(spec),
        "model": model_json(model),
        "peers": [peer_json(row) for row in model.peers],
        "given": [peer_json(row) for row in model.given],
    }


@dataclass(frozen=True, slots=True)
class Offers:
    """What visitors may take away, beside the run's spec."""

    replay: Path | None = None
    """What `--metrics` writes."""
    join: Callable[[], str] | None = None
    """The line that joins the run, now; where the peer's owner shows it."""

    def described(self) -> Message:
        """Which there are."""
        return {"replay": self.replay is not None, "join": self.join is not None}


class Hub:
    """One run's past and present, and its visitors. `tell` is for whoever looks at the run."""

    def __init__(self, spec: RunSpec, offers: Offers | None = None) -> None:
        self.offers = offers or Offers()
        self.spec_json = spec.canonical()
        self.about = about(spec) | {"offers": self.offers.described()}
        self._model: Message = {}
        self._peers: dict[str, Message] = {}
        self._given: dict[str, Message] = {}
        self._given_at = float("-inf")
        self._kept: dict[str, Any] = {
            "rounds": [],
            "held_out": [],
            "events": deque(maxlen=MAX_EVENTS_KEPT),
        }
        """Two curves and the event log, as visitors have been told."""
        self._new: dict[str, list[Any]] = {key: [] for key in self._kept}
        """What they have not been told yet."""
        self._history: dict[str, deque[list[float]]] = {}
        self._history_at = float("-inf")
        self._visitors: dict[int, asyncio.Queue[Message]] = {}
        self._num_visits = 0
        self._told_at = float("-inf")

    # ---- the run's side ---------------------------------------------------------------------

    def tell(self, model: ViewModel, events: Sequence[Event], now: float, unix_s: float) -> None:
        """What the monitor said at a look. `now`: a clock that never goes back, seconds."""
        for event in events:
            if isinstance(event, RoundFinished):
                self._new["rounds"].append(round_point(event, model))
            elif isinstance(event, HeldOut):
                self._new["held_out"].append([event.round, event.time_unix_s, event.loss])
            elif not is_for_programs(event):
                self._new["events"].append(event_json(event, model.rounds))
        if now - self._told_at < TICK_S:
            return
        self._told_at = now
        self._remember(model, now, unix_s)
        message = self._difference(model, now)
        if message is not None:
            for queue in self._visitors.values():
                _offer(queue, message)

    def _difference(self, model: ViewModel, now: float) -> Message | None:
        fresh = model_json(model)
        rows = {row.peer_id: peer_json(row) for row in model.peers}
        changed = _changes(self._peers, rows)
        message: Message = {"kind": "tick"}
        if now - self._given_at >= HISTORY_EVERY_S:
            self._given_at = now
            given = {row.machine: peer_json(row) for row in model.given}
            if new_given := _changes(self._given, given):
                message["given"] = new_given
            self._given = given
        if fresh != self._model:
            message["model"] = fresh
        if changed:
            message["peers"] = changed
        for key, new in self._new.items():
            if new:
                message[key] = list(new)
                self._kept[key] += new
                new.clear()
        for curve in ("rounds", "held_out"):
            thin(self._kept[curve])
        self._model = fresh
        self._peers = rows
        return message if len(message) > 1 else None

    def _remember(self, model: ViewModel, now: float, unix_s: float) -> None:
        if now - self._history_at < HISTORY_EVERY_S:
            return
        self._history_at = now
        for row in model.peers:
            if row.peer_id not in self._history and len(self._history) >= MAX_PEERS_KEPT:
                del self._history[next(iter(self._history))]
            points = self._history.setdefault(row.peer_id, deque(maxlen=MAX_HISTORY))
            points.append(
                [
                    round(unix_s, 1),
                    _short(row.samples_per_s) or 0.0,
                    row.queue_length,
                    row.sent_bytes,
                    row.received_bytes,
                    row.round,
                    int(row.live),
                ]
            )

    # ---- the visitors' side -----------------------------------------------------------------

    def state(self) -> Message:
        """Everything."""
        return {
            "kind": "state",
            "mode": "live",
            "about": self.about,
            "model": self._model,
            "peers": self._peers,
            "given": self._given,
            **{key: list(kept) for key, kept in self._kept.items()},
        }

    def history(self, peer_id: str) -> Message:
        """Of one peer: points of (unix seconds, samples/s, queue, bytes sent, bytes received,
        round, 1 while live), and what happened to it."""
        mine = [e for e in self._kept["events"] if e["peer"] == peer_id]
        return {
            "peer_id": peer_id,
            "points": list(self._history.get(peer_id, ())),
            "events": mine[-RECENT_EVENTS_OF_A_PEER:],
        }

    @property
    def is_full(self) -> bool:
        """No more visitors."""
        return len(self._visitors) >= MAX_VISITORS

    def close(self) -> None:
        """Ends all visits."""
        for queue in self._visitors.values():
            _offer(queue, NO_MORE)

    async def visit(self) -> AsyncIterator[Message]:
        """Messages for one visitor, until it goes, or nothing more is told."""
        self._num_visits += 1
        number, queue = self._num_visits, asyncio.Queue[Message](MAX_WAITING)
        self._visitors[number] = queue
        try:
            yield self.state()
            while True:
                message = await queue.get()
                if message is NO_MORE:
                    return
                if message is TOO_SLOW:
                    _empty(queue)  # the state has what these tell
                    message = self.state()
                yield message
        finally:
            self._visitors.pop(number, None)


def _changes(before: dict[str, Message], rows: dict[str, Message]) -> dict[str, Message | None]:
    """Rows that are new or others than before; None for those that are gone."""
    changed = {key: row for key, row in rows.items() if before.get(key) != row}
    return {**changed, **dict.fromkeys(key for key in before if key not in rows)}


TOO_SLOW: Message = {"kind": "too_slow"}
NO_MORE: Message = {"kind": "no_more"}


def _offer(queue: asyncio.Queue[Message], message: Message) -> None:
    if queue.full():
        _empty(queue)
        queue.put_nowait(TOO_SLOW)
    queue.put_nowait(message)


def _empty(queue: asyncio.Queue[Message]) -> None:
    """Takes all out but `NO_MORE`."""
    waiting = [queue.get_nowait() for _ in range(queue.qsize())]
    if any(message is NO_MORE for message in waiting):
        queue.put_nowait(NO_MORE)


def _short(value: Any) -> Any:
    """Enough digits for a screen."""
    return float(f"{value:.5g}") if isinstance(value, float) and abs(value) < 1e6 else value


def shown(value: Any) -> Any:
    """As the page shows it: numbers are short, and texts of peers printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): shown(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(x) for x in value]
    return _short(value)
