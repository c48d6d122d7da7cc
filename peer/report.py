"""From view to screen and metrics: what every command that watches a run does at each look."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console

from peer.events import Event
from peer.metrics import MetricsFile
from peer.monitor import Monitor
from peer.options import ScreenName
from peer.screen import Screen
from swarmnet.protocol.view import View
from swarmnet.spec import RunSpec, describe

LOOK_EVERY_S = 0.1
"""Between two looks of a peer at its own view: records tell of the newest `KEPT_ROUNDS` rounds
only, and those of a small model are short."""


PLAIN_WIDTH = 120
"""Columns of output that goes to no terminal."""


class Running(Protocol):
    """A peer at work; `peer.daemon.RunningPeer` is one."""

    @property
    def spec(self) -> RunSpec: ...

    @property
    def view(self) -> View: ...

    @property
    def address(self) -> str: ...


def monitor_of(spec: RunSpec) -> Monitor:
    """A monitor for a run."""
    return Monitor(
        num_stages=spec.pipeline.num_stages,
        global_batch=spec.pipeline.global_batch,
        rounds=spec.optimizer.rounds,
        measures=bool(spec.data.paths)
        and spec.data.held_out_fraction > 0
        and spec.data.held_out_microbatches > 0,
    )


def make_console() -> Console:
    """Wide enough for the tables where there is no terminal to ask."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class Reporter:
    """A monitor, a screen and, where asked for, a metrics file. A context manager that opens and
    closes the screen; the file belongs to the caller."""

    def __init__(
        self, spec: RunSpec, mode: ScreenName = "auto", metrics: MetricsFile | None = None
    ) -> None:
        self.spec = spec
        self.monitor = monitor_of(spec)
        self.screen = Screen(make_console(), mode)
        self.metrics = metrics

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


async def report_peer(running: Running, mode: ScreenName, metrics: MetricsFile | None) -> None:
    """Says how to join, and then what the peer sees, until it is cancelled."""
    loop = asyncio.get_running_loop()
    with Reporter(running.spec, mode, metrics) as reporter:
        say = reporter.screen.say
        if not reporter.screen.is_quiet:
            say(describe(running.spec))
            say("to join this run:")
        say(f"swarmnet peer --join {running.address}")
        while True:
            reporter.look(running.view, loop.time(), time.time())
            await asyncio.sleep(LOOK_EVERY_S)
