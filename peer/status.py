"""`swarmnet status`: one look at a run from outside."""

from __future__ import annotations

import asyncio
import json
import time

from rich.console import Console

from peer.observing import JoinRun, RunObserver, join_run
from peer.report import monitor_of
from peer.screen import dashboard
from peer.view_model import ViewModel
from swarmnet.spec import describe

LOOK_S = 3.0
"""How long an observer gathers records before it judges."""
NEWS_WAIT_S = 0.5
"""A swarm that has said nothing new for so long has said all."""


async def show_status(
    address: str, *, as_json: bool, transport: str, console: Console, join: JoinRun = join_run
) -> None:
    """Prints coverage, throughput, round and loss. Raises `UserError` where nobody answers."""
    observer = await join([address], transport)
    try:
        model = await _look(observer)
        spec = observer.spec
    finally:
        await observer.close()
    if as_json:
        about = {"name": spec.name, "run_id": spec.run_id}
        console.file.write(json.dumps({**about, **model.to_json()}) + "\n")
    else:
        console.print(describe(spec), highlight=False, markup=False)
        console.print(dashboard(spec, model))


async def _look(observer: RunObserver) -> ViewModel:
    """Gathers what gossip brings for `LOOK_S`. Rates are measured by peers, except tokens/s, which
    is known where a round ends while we look."""
    loop = asyncio.get_running_loop()
    monitor = monitor_of(observer.spec)
    until = loop.time() + LOOK_S
    while (now := loop.time()) < until:
        live = frozenset(record.peer_id for record in observer.view.live(now))
        monitor.observe(observer.view.records(), live, now, time.time())
        await observer.wait_news(min(NEWS_WAIT_S, max(0.0, until - loop.time())))
    return monitor.view_model()
