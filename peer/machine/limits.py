"""`limits.toml` in a peer's state folder: what the owner of the machine lets it take. Written by
`swarmnet limits` (or a person), read again by the peer whenever it changes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peer.options import LimitOptions
from swarmnet.errors import UserError
from swarmnet.files import text_of, write_whole
from swarmnet.protocol.resource_limits import (
    BILLED,
    OwnerLimits,
    parse_rate,
    parse_share,
    parse_size,
    parse_span,
    rate_text,
    share_text,
    size_text,
    span_text,
)

LIMITS_FILE = "limits.toml"
MAX_FILE_BYTES = 64 << 10
NO_LIMIT = "none"
HEAD = """\
# What this machine's owner lets the peer take. Change it while the peer runs, here or with
# `swarmnet limits`; a line that is not here sets no limit.
"""


def _text(parse: Callable[[str], float]) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if not isinstance(value, str):
            raise ValueError("it is written in quotes, with its unit")
        return parse(value)

    return read


def _hours(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError('it is a list such as ["22:00-07:00"]')
    return tuple(map(parse_span, value))


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it is true or false")
    return value


READERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_upload": ("max_upload_bytes_per_s", _text(parse_rate)),
    "max_memory": ("max_memory_bytes", _text(parse_size)),
    "max_device_share": ("max_device_share", _text(parse_share)),
    "hours": ("hours", _hours),
    "pause_when_busy": ("pause_when_busy", _yes_or_no),
    "pause_on_battery": ("pause_on_battery", _yes_or_no),
    "pause_on_metered": ("pause_on_metered", _yes_or_no),
    "paused": ("paused", _yes_or_no),
    **{name: (f"{name}_bytes", _text(parse_size)) for name in BILLED},
}
"""By key of the file: the field of `OwnerLimits`, and how it is read."""


def changed(limits: OwnerLimits, options: LimitOptions, paused: bool | None) -> OwnerLimits:
    """The limits after what a command line says; None = nothing. Raises `UserError`."""
    changes: dict[str, Any] = {}
    for key, value in (asdict(options) | {"paused": paused}).items():
        if value is None or value == ():
            continue
        field, read = READERS[key]
        if value in (NO_LIMIT, (NO_LIMIT,)):
            changes[field] = () if key == "hours" else None
            continue
        try:
            changes[field] = read(list(value) if key == "hours" else value)
        except ValueError as e:
            raise UserError(f"--{key.replace('_', '-')}: {e}") from None
    try:
        return replace(limits, **changes)
    except ValueError as e:
        raise UserError(str(e)) from None


def read_limits(path: Path) -> OwnerLimits:
    """No limits where there is no file. Raises `UserError`, one line."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return OwnerLimits()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise UserError(f"{path} is too large to be a file of limits")
    return parse_limits(text, str(path))


def parse_limits(text: bytes, where: str) -> OwnerLimits:
    """Raises `UserError`, one line."""
    try:
        values = tomllib.loads(text_of(text, where))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is not TOML: {' '.join(str(e).split())}") from None
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key not in READERS:
            near = get_close_matches(key, READERS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{where}: unknown key {key[:40]!r}{hint}")
        field, read = READERS[key]
        try:
            fields[field] = read(value)
        except ValueError as e:
            raise UserError(f"{where}: {key}: {e}") from None
    try:
        return OwnerLimits(**fields)
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None


def limits_text(limits: OwnerLimits) -> str:
    """As `parse_limits` reads it."""
    lines = []
    if limits.max_upload_bytes_per_s is not None:
        lines.append(f'max_upload = "{rate_text(limits.max_upload_bytes_per_s)}"')
    for name in BILLED:
        amount = getattr(limits, f"{name}_bytes")
        if amount is not None:
            lines.append(f'{name} = "{size_text(amount)}"')
    if limits.max_memory_bytes is not None:
        lines.append(f'max_memory = "{size_text(limits.max_memory_bytes)}"')
    if limits.max_device_share is not None:
        lines.append(f'max_device_share = "{share_text(limits.max_device_share)}"')
    if limits.hours:
        spans = ", ".join(f'"{span_text(span)}"' for span in limits.hours)
        lines.append(f"hours = [{spans}]")
    for key in ("pause_when_busy", "pause_on_battery", "pause_on_metered", "paused"):
        lines.append(f"{key} = {str(getattr(limits, key)).lower()}")
    return HEAD + "\n".join(lines) + "\n"


def write_limits(path: Path, limits: OwnerLimits) -> None:
    """Atomically. Raises `UserError`."""
    try:
        write_whole(path, limits_text(limits))
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from None


def change_limits(
    state_dir: Path, options: LimitOptions, paused: bool | None = None
) -> OwnerLimits:
    """Reads, changes where something is asked for, writes. Raises `UserError`."""
    path = state_dir / LIMITS_FILE
    before = read_limits(path)
    after = changed(before, options, paused)
    is_asked = options != LimitOptions() or paused is not None
    if after != before or (is_asked and not path.exists()):
        write_limits(path, after)
    return after


def the_state_dir(wanted: Path | None, candidates: Sequence[Path]) -> Path:
    """The folder of the peer that is meant. Raises `UserError` where that is not clear."""
    if wanted is not None:
        if not wanted.is_dir():
            raise UserError(f"{wanted} is no peer's state folder; name one with --state-dir")
        return wanted
    there = [path for path in candidates if path.is_dir()]
    if len(there) == 1:
        return there[0]
    if not there:
        raise UserError("no peer has run here yet; name its state folder with --state-dir")
    names = ", ".join(str(path) for path in there[:4])
    raise UserError(f"several peers have run here; name one with --state-dir: {names}")
