"""`swarmnet status`: one look at a run from outside."""

from __future__ import annotations

import asyncio
import json
import time

from rich.console import Console
from rich.live import Live

from peer.observe.screen import dashboard
from peer.options import StatusOptions
from swarmnet.observe.view_model import ViewModel
from swarmnet.printable import printable
from swarmnet.runtime.observing import (
    JoinRun,
    RunObserver,
    join_run,
    monitor_of,
    wait_for_run,
)
from swarmnet.spec import describe

LOOK_S = 3.0
"""How long an observer gathers records before it judges."""
NEWS_WAIT_S = 0.5
"""Longest time between looks."""
LOOK_PAUSE_S = 0.1
"""Shortest time between looks."""


async def show_status(
    options: StatusOptions, console: Console, *, join: JoinRun = join_run, look_s: float = LOOK_S
) -> None:
    """Prints coverage, throughput, round and loss. Raises `UserError` where nobody answers."""
    observer = await join([options.address], options.transport)
    try:
        model = await _look(observer, look_s)
        spec = observer.spec
    finally:
        await observer.close()
    if options.as_json:
        about = {"name": spec.name, "run_id": spec.run_id}
        console.file.write(json.dumps({**about, **model.to_json()}) + "\n")
    else:
        console.print(printable(describe(spec)), highlight=False, markup=False)
        console.print(dashboard(spec, model))


async def watch_status(
    options: StatusOptions,
    console: Console,
    *,
    join: JoinRun = wait_for_run,
    look_s: float | None = None,
) -> None:
    """The same, live, until it is stopped; waits for a run that is not there yet. `look_s` ends it,
    for tests."""
    observer = await join([options.address], options.transport)
    try:
        loop = asyncio.get_running_loop()
        monitor = monitor_of(observer.spec)
        until = None if look_s is None else loop.time() + look_s
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while until is None or loop.time() < until:
                monitor.look(observer.view, loop.time(), time.time())
                live.update(dashboard(observer.spec, monitor.view_model()), refresh=True)
                await observer.wait_news(NEWS_WAIT_S)
                await asyncio.sleep(LOOK_PAUSE_S)
    finally:
        await observer.close()


async def _look(observer: RunObserver, look_s: float) -> ViewModel:
    """Gathers what gossip brings for `look_s` seconds. Tokens/s are known only where rounds end
    in that time; all else is in the records."""
    loop = asyncio.get_running_loop()
    monitor = monitor_of(observer.spec)
    until = loop.time() + look_s
    while (now := loop.time()) < until:
        monitor.look(observer.view, now, time.time())
        await observer.wait_news(min(NEWS_WAIT_S, max(0.0, until - loop.time())))
        await asyncio.sleep(LOOK_PAUSE_S)
    return monitor.view_model()
