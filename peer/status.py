"""`swarmnet status`: one look at a run from outside."""

from __future__ import annotations

import asyncio
import json
import time

from rich.console import Console

from peer.observing import JoinRun, RunObserver, join_run
from peer.options import TransportName
from peer.report import monitor_of
from peer.screen import dashboard
from peer.view_model import ViewModel
from swarmnet.spec import describe

LOOK_S = 3.0
"""How long an observer gathers records before it judges."""
NEWS_WAIT_S = 0.5
"""Longest time between looks."""
LOOK_PAUSE_S = 0.1
"""Shortest time between looks."""


async def show_status(
    address: str,
    *,
    as_json: bool,
    transport: TransportName,
    console: Console,
    join: JoinRun = join_run,
    look_s: float = LOOK_S,
) -> None:
    """Prints coverage, throughput, round and loss. Raises `UserError` where nobody answers."""
    observer = await join([address], transport)
    try:
        model = await _look(observer, look_s)
        spec = observer.spec
    finally:
        await observer.close()
    if as_json:
        about = {"name": spec.name, "run_id": spec.run_id}
        console.file.write(json.dumps({**about, **model.to_json()}) + "\n")
    else:
        console.print(describe(spec), highlight=False, markup=False)
        console.print(dashboard(spec, model))


async def _look(observer: RunObserver, look_s: float) -> ViewModel:
    """Gathers what gossip brings for `look_s` seconds. Tokens/s are known only where rounds end
    in that time; all else is in the records."""
    loop = asyncio.get_running_loop()
    monitor = monitor_of(observer.spec)
    until = loop.time() + look_s
    while (now := loop.time()) < until:
        live = frozenset(record.peer_id for record in observer.view.live(now))
        monitor.observe(observer.view.records(), live, now, time.time())
        await observer.wait_news(min(NEWS_WAIT_S, max(0.0, until - loop.time())))
        await asyncio.sleep(LOOK_PAUSE_S)
    return monitor.view_model()
