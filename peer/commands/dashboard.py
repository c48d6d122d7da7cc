"""`swarmnet dashboard`: the page of a run that goes on elsewhere, or of one that is over."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from peer.console import say
from peer.observe.dashboard.app import is_loopback, replay_app
from peer.observe.dashboard.replay import check_file, make_film
from peer.observe.dashboard.server import listen, serving
from peer.observe.report import open_page
from peer.options import DashboardOptions
from swarmnet.runtime.observing import JoinRun, monitor_of, wait_for_run

LOOK_EVERY_S = 0.5
"""Longest time between looks."""
LOOK_PAUSE_S = 0.2
"""Shortest time between looks."""


async def show_live(options: DashboardOptions, join: JoinRun = wait_for_run) -> None:
    """Watches a run as an observer and shows it, until cancelled; waits until somebody answers.
    Raises `UserError` where the port cannot be had."""
    host = options.host
    listener = listen(host, options.port)
    try:
        observer = await join(options.join, options.transport)
    except BaseException:
        listener.close()
        raise
    try:
        async with AsyncExitStack() as stack:
            hub, address = await open_page(
                stack, observer.spec, host, listener, options.allowed_host
            )
            _greet(address, host)
            monitor, loop = monitor_of(observer.spec), asyncio.get_running_loop()
            while True:
                now, unix_s = loop.time(), time.time()
                events = monitor.look(observer.view, now, unix_s)
                hub.tell(monitor.view_model(), events, now, unix_s)
                await observer.wait_news(LOOK_EVERY_S)
                await asyncio.sleep(LOOK_PAUSE_S)
    finally:
        await observer.close()


async def show_replay(path: Path, host: str, port: int, allowed: Sequence[str] = ()) -> None:
    """Shows a metrics file, until cancelled; what is added to it meanwhile is seen with the next
    visit. Raises `UserError`."""
    await asyncio.to_thread(check_file, path)
    app = replay_app(functools.partial(make_film, path), host, allowed)
    async with serving(app, listen(host, port)) as address:
        _greet(address, host)
        await asyncio.Event().wait()


def _greet(address: str, host: str) -> None:
    say(f"dashboard: {address}")
    if not is_loopback(host):
        say("anyone who can reach this address can look; it shows peers, speeds and losses")
