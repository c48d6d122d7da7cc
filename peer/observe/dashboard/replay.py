"""A film of a run, made of its metrics file: what the page was told then, message by message.

A metrics file has an event a line, and every so often (`state`) all that a screen shows. Files
without these are played too: who was where is then worked out from the events alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer.observe.dashboard.hub import MAX_EVENTS_KEPT, event_json, thin
from peer.observe.events import COUNTED, Event, event_from_json
from swarmnet.errors import UserError
from swarmnet.spec import MAX_STAGES

MAX_FILE_BYTES = 1 << 30
MAX_LINE_CHARS = 1 << 24
MAX_FRAMES = 2000
"""Of a film; what happens within a frame is shown at its end."""

Frame = dict[str, Any]


def make_film(path: Path) -> Frame:
    """The whole film: `about`, and `frames` as the hub's ticks with a time `t` (unix seconds) each.
    Raises `UserError`."""
    run = _Run(path)
    frames = list(_joined(run.messages()))
    if not frames:
        raise UserError(f"{path} has no event of a run; give a file that --metrics has written")
    return {"kind": "replay", "mode": "replay", "about": run.about, "frames": frames}


def check_file(path: Path) -> None:
    """Raises `UserError` where a film cannot be made."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB")
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    make_film(path)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects that have an event and a time; a line that was cut off in the middle is left out."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for line in file:
                if len(line) > MAX_LINE_CHARS:
                    continue
                try:
                    values = json.loads(line, parse_constant=lambda _: None)
                except (ValueError, RecursionError):
                    continue
                if isinstance(values, dict) and isinstance(values.get("event"), str):
                    t = values.get("time_unix_s")
                    if isinstance(t, (int, float)) and 0 <= t < 1e12:
                        yield values
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None


class _Run:
    """What is known of the run so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.about: Frame = {"name": path.name, "num_stages": 0, "rounds": 0, "description": ""}
        self._has_states = False
        self._peers: dict[str, Frame] = {}
        self._round = 0
        self._split: Frame = {}

    def messages(self) -> Iterator[Frame]:
        """A message a line."""
        for values in _lines(self._path):
            t = float(values["time_unix_s"])
            if values["event"] == "state":
                yield from self._state(t, values)
                continue
            event = event_from_json(values)
            if event is None:
                continue
            message = self._of_event(event, values)
            if not self._has_states:
                message |= self._guess(event, values)
            yield {"kind": "tick", "t": t, **message}

    def _state(self, t: float, values: dict[str, Any]) -> Iterator[Frame]:
        about, model, peers = (values.get(k) for k in ("about", "model", "peers"))
        if not (isinstance(about, dict) and isinstance(model, dict) and isinstance(peers, list)):
            return
        num_stages = about.get("num_stages")
        is_number = isinstance(num_stages, int) and 0 <= num_stages <= MAX_STAGES
        if is_number and isinstance(model.get("stages"), list):
            self._has_states = True
            self.about |= about
            split = model.get("split")
            self._split = split if isinstance(split, dict) else {}
            rows = {str(p["peer_id"]): p for p in peers if isinstance(p, dict) and "peer_id" in p}
            gone = dict.fromkeys(p for p in self._peers if p not in rows)
            self._peers = rows
            yield {"kind": "tick", "t": t, "model": model, "peers": {**rows, **gone}}

    def _of_event(self, event: Event, values: dict[str, Any]) -> Frame:
        name, t = values["event"], values["time_unix_s"]
        if name == "round":
            head = [values["round"] + 1, t, values["loss"], values["tokens_per_s"] or None]
            parts = ("compute_s", "exchange_s", "waiting_s")
            split = [self._split.get(part) for part in parts]
            return {"rounds": [[*head, values["seconds"] or None, values["peers"], *split]]}
        if name == "held_out":
            return {"held_out": [[values["round"], t, values["loss"]]]}
        if name == "checkpoint_saved":
            return {}
        return {"events": [event_json(event, int(self.about["rounds"]))]}

    def _guess(self, event: Event, values: dict[str, Any]) -> Frame:
        """Peers and stages as the events tell them."""
        name, peer_id = values["event"], values.get("peer_id")
        changed: dict[str, Frame] = {}
        if name == "round":
            self._round = values["round"] + 1
        elif isinstance(peer_id, str) and name in ("peer_joined", "peer_lost", "migrated"):
            stage = getattr(event, "to_stage", getattr(event, "stage", -1))
            left = "left" if values.get("clean") else "lost"
            state = left if name == "peer_lost" else "active"
            row = _row(peer_id, stage, state, values["time_unix_s"])
            self._peers[peer_id] = changed[peer_id] = row
            self.about["num_stages"] = max(self.about["num_stages"], stage + 1)
        elif isinstance(peer_id, str) and peer_id in self._peers and name in COUNTED_NAMES:
            row = {**self._peers[peer_id]}
            row["rerouted"] += values["count"] if name == "rerouted" else 0
            self._peers[peer_id] = changed[peer_id] = row
        self.about["rounds"] = max(self.about["rounds"], self._round)
        return {"model": self._model(values), **({"peers": changed} if changed else {})}

    def _model(self, values: dict[str, Any]) -> Frame:
        live = [p for p in self._peers.values() if p["live"]]
        counts = [sum(p["stage"] == k for p in live) for k in range(int(self.about["num_stages"]))]
        stages = [
            {
                "stage": k,
                "num_replicas": n,
                "num_joining": 0,
                "samples_per_s": 0.0,
                "risk": ""
                if n > 1
                else f"stage {k}: one failure from loss"
                if n
                else f"stage {k} has nobody: training waits",
            }
            for k, n in enumerate(counts)
        ]
        is_round = values["event"] == "round"
        return {
            "round": self._round,
            "rounds": int(self.about["rounds"]),
            "stages": stages,
            "num_live": len(live),
            **(
                {"loss": values["loss"], "tokens_per_s": values["tokens_per_s"]} if is_round else {}
            ),
        }


COUNTED_NAMES = frozenset(kind.name for kind in COUNTED.values())


def _row(peer_id: str, stage: int, state: str, t: float) -> Frame:
    return {
        "peer_id": peer_id,
        "stage": stage,
        "state": state,
        "live": state == "active",
        "round": 0,
        "samples_per_s": 0.0,
        "queue_length": 0,
        "sent_bytes": 0,
        "received_bytes": 0,
        "links": 0,
        "direct_links": 0,
        "direct_sent_bytes": 0,
        "rerouted": 0,
        "agent": "",
        "started_unix_s": t,
        "upload_bytes_per_s": 0.0,
        "busy": 0.0,
        "has_data": False,
    }


def _joined(messages: Iterator[Frame]) -> Iterator[Frame]:
    """At most about `MAX_FRAMES` frames: messages of one span of time become one."""
    found = list(messages)
    if not found:
        return
    span_s = (found[-1]["t"] - found[0]["t"]) / MAX_FRAMES
    frame: Frame | None = None
    ends_at = 0.0
    for message in found:
        if frame is not None and message["t"] <= ends_at:
            _add(frame, message)
            continue
        if frame is not None:
            yield frame
        frame, ends_at = {**message}, message["t"] + span_s
    assert frame is not None
    yield frame


def _add(frame: Frame, message: Frame) -> None:
    frame["t"] = message["t"]
    if "model" in message:
        frame["model"] = {**frame.get("model", {}), **message["model"]}
    if "peers" in message:
        frame["peers"] = {**frame.get("peers", {}), **message["peers"]}
    for key in ("rounds", "held_out", "events"):
        if key in message:
            frame.setdefault(key, []).extend(message[key])
    del frame.get("events", [])[:-MAX_EVENTS_KEPT]
    for key in ("rounds", "held_out"):
        thin(frame.get(key, []))
