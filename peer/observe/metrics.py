"""Events as JSON lines, for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarmnet.errors import UserError
from swarmnet.files import LinesFile
from swarmnet.observe.events import Event

MAX_METRICS_BYTES = 512 << 20
"""Of the file; with the one that was set aside before it there are twice as many at most."""


class MetricsFile:
    """`--metrics FILE`: one JSON object a line, flushed at once.

    Args:
        append: go on with an existing file (a peer that was started again) or begin anew.

    Raises:
        UserError: the file cannot be opened or, later, written.
    """

    def __init__(
        self, path: Path, *, append: bool = False, max_bytes: int = MAX_METRICS_BYTES
    ) -> None:
        self.path = path
        self._file = LinesFile(path, max_bytes)
        try:
            self._file.open(anew=not append)
        except OSError as error:
            raise UserError(f"cannot write --metrics {path}: {_reason(error)}") from None

    def write(self, events: Iterable[Event]) -> None:
        """Writes and flushes."""
        self._write([event.to_json() for event in events])

    def write_state(self, state: dict[str, Any], unix_s: float) -> None:
        """All that a screen shows, for a replay; writes and flushes."""
        self._write([{"event": "state", **state, "time_unix_s": unix_s}])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        try:
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            self._file.append(text.encode())
        except OSError as error:
            raise UserError(f"cannot write --metrics {self.path}: {_reason(error)}") from None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """What is written later opens the file again. Idempotent."""
        self._file.close()


@contextmanager
def open_metrics(path: Path | None, *, append: bool) -> Iterator[MetricsFile | None]:
    """`MetricsFile`, or None where no file was asked for."""
    if path is None:
        yield None
        return
    with MetricsFile(path, append=append) as file:
        yield file


def _reason(error: OSError) -> str:
    return error.strerror or os.strerror(error.errno or 0)
