"""Looking at a run until it is done, and at this machine's peers of it."""

from __future__ import annotations

import asyncio
import time

from swarmnet.errors import SwarmnetError
from swarmnet.plurals import counted
from swarmnet.runtime.local.processes import ChildPeer, PeerProcesses
from swarmnet.runtime.observing import Onlooker, RunObserver, Say

LOOK_EVERY_S = 0.5
"""Longest time between looks."""
LOOK_PAUSE_S = 0.1
"""Shortest time between looks."""
FINAL_WAIT_S = 30.0
"""After the last update: for the last counts and the last held-out measurement to arrive."""


async def watch_run(
    observer: RunObserver, onlooker: Onlooker, processes: PeerProcesses | None, say: Say
) -> None:
    """Looks until the run is over and all of it was told. `processes`: this process's
    own peers, where it has any. One that ends before is reported and the run goes on; raises
    `SwarmnetError` when none is left."""
    loop = asyncio.get_running_loop()
    done_at: float | None = None
    while True:
        now = loop.time()
        onlooker.look(observer.view, now, time.time())
        monitor = onlooker.monitor
        if processes is not None and monitor.ends_with is None:  # else they are to end
            for child in processes.newly_dead():
                _report_death(child, say)
            if not processes.num_alive:
                raise SwarmnetError(f"every peer has ended; their logs are in {processes.folder}")
        if processes is not None:
            processes.trim_logs()
        if monitor.done:
            done_at = now if done_at is None else done_at
            is_late = now - done_at > FINAL_WAIT_S
            if monitor.all_told or is_late:
                if monitor.ends_with is not None:
                    done = counted(monitor.view_model().round, "round")
                    say(f"the run's owner has ended it after {done}")
                elif is_late:
                    say("the last held-out measurement did not arrive in time")
                return
        await observer.wait_news(LOOK_EVERY_S)
        await asyncio.sleep(LOOK_PAUSE_S)


def _report_death(child: ChildPeer, say: Say) -> None:
    say(f"{child.name} (pid {child.process.pid}) {child.how_it_ended()}; the run goes on")
    for line in child.log_tail():
        say(f"  {child.name}: {line}")
