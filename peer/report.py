"""From view to screen and metrics: what every command that watches a run does at each look."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console

from peer.events import Event
from peer.metrics import MetricsFile
from peer.monitor import Monitor
from peer.options import ScreenName
from peer.screen import Screen
from swarmnet.protocol.view import View
from swarmnet.spec import RunSpec


def monitor_of(spec: RunSpec) -> Monitor:
    """A monitor for a run."""
    return Monitor(
        num_stages=spec.pipeline.num_stages,
        global_batch=spec.pipeline.global_batch,
        rounds=spec.optimizer.rounds,
    )


class Reporter:
    """A monitor, a screen and, where asked for, a metrics file. A context manager."""

    def __init__(self, spec: RunSpec, screen: Screen, metrics: MetricsFile | None = None) -> None:
        self.spec = spec
        self.monitor = monitor_of(spec)
        self.screen = screen
        self.metrics = metrics

    @classmethod
    def open(
        cls, spec: RunSpec, mode: ScreenName, metrics: Path | None, *, append: bool
    ) -> Reporter:
        """Raises `UserError` where the metrics file cannot be written."""
        file = None if metrics is None else MetricsFile(metrics, append=append)
        return cls(spec, Screen(Console(highlight=False), mode), file)

    def look(self, view: View, now: float, unix_s: float) -> list[Event]:
        """Tells screen and file what is new in `view`. `now`: the clock of the view, seconds;
        `unix_s`: for the events."""
        live = frozenset(record.peer_id for record in view.live(now))
        events = self.monitor.observe(view.records(), live, now, unix_s)
        if self.metrics is not None:
            self.metrics.write(events)
        self.screen.show(self.spec, self.monitor.view_model(), events)
        return events

    def close(self) -> None:
        """Idempotent."""
        self.screen.close()
        if self.metrics is not None:
            self.metrics.close()

    def __enter__(self) -> Reporter:
        self.screen.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
