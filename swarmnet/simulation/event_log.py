"""The event log of a simulation, and its hash: one scenario, one history."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any


class EventLog:
    """Lines of the form `time kind name=value ...`, times in virtual seconds."""

    def __init__(self, now: Callable[[], float], *, keeps_lines: bool = True) -> None:
        """`keeps_lines`: where False, there is only the hash of the lines."""
        self._now = now
        self._keeps_lines = keeps_lines
        self._hash = blake2b(digest_size=16)
        self._lines: list[str] = []

    def write(self, kind: str, **facts: Any) -> None:
        """Adds a line; it decides the hash."""
        line = f"{self._now():.6f} {kind} " + " ".join(f"{k}={v}" for k, v in facts.items())
        self._hash.update(line.encode() + b"\n")
        if self._keeps_lines:
            self._lines.append(line)

    @property
    def digest(self) -> str:
        """Of all lines so far."""
        return self._hash.hexdigest()

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines so far; empty where they are not kept."""
        return tuple(self._lines)
