"""A film of a run, made of its metrics file: what the page was told then, message by message.

A metrics file has an event a line, and every so often (`state`), from the first look on, all that a
screen shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from peer.observe.dashboard.hub import MAX_EVENTS_KEPT, event_json, shown, thin
from swarmnet.errors import UserError
from swarmnet.files import older
from swarmnet.observe.events import Event, event_from_json, is_for_programs
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
        self._peers: dict[str, Frame] = {}
        self._given: dict[str, Frame] = {}
        self._split: Frame = {}

    def messages(self) -> Iterator[Frame]:
        """A message a line."""
        before = older(self._path)
        lines = chain(_lines(before) if before.exists() else (), _lines(self._path))
        for values in lines:
            t = float(values["time_unix_s"])
            if values["event"] == "state":
                yield from self._state(t, values)
                continue
            event = event_from_json(values)
            if event is None:
                continue
            yield {"kind": "tick", "t": t, **self._of_event(event, values)}

    def _state(self, t: float, values: dict[str, Any]) -> Iterator[Frame]:
        about, model, peers = (shown(values.get(k)) for k in ("about", "model", "peers"))
        if not (isinstance(about, dict) and isinstance(model, dict) and isinstance(peers, list)):
            return
        num_stages = about.get("num_stages")
        is_number = isinstance(num_stages, int) and 0 <= num_stages <= MAX_STAGES
        if is_number and isinstance(model.get("stages"), list):
            self.about |= about
            split = model.get("split")
            self._split = split if isinstance(split, dict) else {}
            rows = {str(p["peer_id"]): p for p in peers if isinstance(p, dict) and "peer_id" in p}
            gone = dict.fromkeys(p for p in self._peers if p not in rows)
            self._peers = rows
            frame = {"kind": "tick", "t": t, "model": model, "peers": {**rows, **gone}}
            yield frame | self._of_given(shown(values.get("given")))

    def _of_given(self, found: Any) -> Frame:
        """Older files have none."""
        given = found if isinstance(found, list) else []
        rows = {str(g["machine"]): g for g in given if isinstance(g, dict) and "machine" in g}
        gone = dict.fromkeys(m for m in self._given if m not in rows)
        self._given = rows
        return {"given": {**rows, **gone}} if rows or gone else {}

    def _of_event(self, event: Event, values: dict[str, Any]) -> Frame:
        name, t = values["event"], values["time_unix_s"]
        if name == "round":
            head = [values["round"] + 1, t, values["loss"], values["tokens_per_s"] or None]
            parts = ("compute_s", "exchange_s", "waiting_s")
            split = [self._split.get(part) for part in parts]
            return {"rounds": [[*head, values["seconds"] or None, values["peers"], *split]]}
        if name == "held_out":
            return {"held_out": [[values["round"], t, values["loss"]]]}
        if is_for_programs(event):
            return {}
        return {"events": [event_json(event, int(self.about["rounds"]))]}


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
    for key in ("peers", "given"):
        if key in message:
            frame[key] = {**frame.get(key, {}), **message[key]}
    for key in ("rounds", "held_out", "events"):
        if key in message:
            frame.setdefault(key, []).extend(message[key])
    del frame.get("events", [])[:-MAX_EVENTS_KEPT]
    for key in ("rounds", "held_out"):
        thin(frame.get(key, []))
