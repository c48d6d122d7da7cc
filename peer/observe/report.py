"""From view to screen and metrics: what every command that watches a run does at each look."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from peer.console import make_console, patient
from peer.log import sum_up
from peer.observe.dashboard.hub import Hub, Offers, state_of
from peer.observe.metrics import MetricsFile
from peer.observe.screen import PeerConsole, Screen
from peer.options import ScreenName
from swarmnet.errors import UserError
from swarmnet.observe.charts import Charts
from swarmnet.observe.events import Event, PeerJoined
from swarmnet.observe.monitor import RunMonitor
from swarmnet.observe.notify import Notifier, open_notifier
from swarmnet.observe.text import short_id
from swarmnet.observe.view_model import ViewModel
from swarmnet.plurals import counted
from swarmnet.protocol.dialing.addresses import others_to_name, peer_of
from swarmnet.protocol.membership.records import ACTIVE, JOINING
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.trouble import Trouble
from swarmnet.runtime.joining.ready import JOIN_WORDS
from swarmnet.runtime.observing import Say, monitor_of
from swarmnet.runtime.text import listed
from swarmnet.spec import RunSpec, describe

if TYPE_CHECKING:
    from peer.machine.limit_keeper import Keeper
    from swarmnet.runtime.run import RunningPeer

log = logging.getLogger("swarmnet.peer")

LOOK_EVERY_S = 0.1
"""Between two looks of a peer at its own view: records tell of the newest `KEPT_ROUNDS` rounds
only, and those of a small model are short."""
LAST_WORDS_S = 10.0
"""How long the last round and measurement are waited for before the run is said to be done."""
STATE_EVERY_S, STATE_EVERY_S_PER_PEER = 10.0, 0.2
"""Between two `state` lines of a metrics file."""
MAX_OTHERS_CHARS = 400
"""Of the list of a peer's further addresses."""
PLAIN_WIDTH = 120
"""Columns of output that goes to no terminal."""


def speaks_for_all(view: View, now: float) -> bool:
    """Whether this peer prints what is of the whole run, where all print to one log: the first of
    the live replicas does, by peer id; while there is none, the first of those that have met the
    run and chosen a stage of it. One that leaves does not."""
    members = [record for record in view.live(now) if record.stage >= 0]
    active = [r.peer_id for r in members if r.state == ACTIVE]
    joining = [r.peer_id for r in members if r.state == JOINING]
    return view.own_peer_id == min(active or joining, default="")


class Reporter:
    """A monitor, a screen and, where asked for, a metrics file and a web page. A context manager
    that opens and closes the screen; file and page belong to the caller."""

    def __init__(
        self,
        spec: RunSpec,
        mode: ScreenName = "auto",
        metrics: MetricsFile | None = None,
        hub: Hub | None = None,
        notifier: Notifier | None = None,
        charts: Charts | None = None,
    ) -> None:
        self.spec = spec
        self.monitor = monitor_of(spec)
        self.screen = Screen(make_console(PeerConsole, PLAIN_WIDTH, patient(sys.stdout)), mode)
        self._is_shared = mode == "shared"
        self.metrics = metrics
        self.hub = hub
        self.notifier = notifier
        self.charts = charts
        self._state_at = float("-inf")
        self._trouble = Trouble()

    def look(self, view: View, now: float, unix_s: float, limits: str = "") -> list[Event]:
        """Tells screen and file what is new in `view`. `now`: the clock of the view, seconds;
        `unix_s`: for the events; `limits`: of this machine's peer."""
        sum_up(time.monotonic())
        events = self.monitor.look(view, now, unix_s)
        model = self.monitor.view_model()
        if self.metrics is not None:
            self._write(self.metrics, events, model, now, unix_s)
        if self.hub is not None:
            self.hub.tell(model, events, now, unix_s)
        if self.notifier is not None:
            self.notifier.look(model, now)
        if self.charts is not None:
            self.charts.write(events, model)
        if self._is_shared and not speaks_for_all(view, now):
            return events
        # Its person knows that this peer is there.
        own = view.own_peer_id
        news = [e for e in events if not (isinstance(e, PeerJoined) and e.peer_id == own)]
        self.screen.show(self.spec, model, news, limits)
        return events

    def _write(
        self,
        metrics: MetricsFile,
        events: Sequence[Event],
        model: ViewModel,
        now: float,
        unix_s: float,
    ) -> None:
        """Where the disk is full, say, the run goes on, and so does the screen; what happens
        meanwhile is not in the file."""
        if not events and not self._is_state_due(model, now):
            return
        try:
            metrics.write(events)
            self._write_state(metrics, model, now, unix_s)
        except UserError as e:
            more = self._trouble.failed(now)
            if more is not None:
                log.warning("%s; what happens now is not there%s", e, more)
            return
        if self._trouble.is_over():
            log.warning("--metrics %s is written again", metrics.path)

    def _is_state_due(self, model: ViewModel, now: float) -> bool:
        """The more peers, the more seldom."""
        return now - self._state_at >= max(STATE_EVERY_S, STATE_EVERY_S_PER_PEER * len(model.peers))

    def _write_state(
        self, metrics: MetricsFile, model: ViewModel, now: float, unix_s: float
    ) -> None:
        """What a replay shows between the events."""
        if not self._is_state_due(model, now):
            return
        self._state_at = now
        metrics.write_state(state_of(self.spec, model), unix_s)

    def __enter__(self) -> Reporter:
        self.screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.close()
        if self.charts is not None:
            self.charts.close()


async def open_page(
    stack: AsyncExitStack,
    spec: RunSpec,
    host: str,
    listener: socket.socket,
    allowed: Sequence[str] = (),
    offers: Offers | None = None,
) -> tuple[Hub, str]:
    """A dashboard of a run that the caller will look at, and its address. `host`: as the user
    named it; `allowed`: further hosts under which it is asked for; `offers`: to its visitors."""
    from peer.observe.dashboard.app import live_app
    from peer.observe.dashboard.server import serving

    hub = Hub(spec, offers)
    address = await stack.enter_async_context(serving(live_app(hub, host, allowed), listener))
    stack.callback(hub.close)  # before the server ends: it would cut streams off, with a traceback
    return hub, address


def ports_line(ports: Sequence[int]) -> str:
    """What a router is to forward, and a firewall to let in."""
    if len(ports) < 2:
        return f"listens on TCP port {', '.join(map(str, ports)) or 'of no address'}"
    return f"listens on TCP ports {ports[0]} and {ports[1]} (the second for large messages)"


def join_line(addresses: Sequence[str]) -> str:
    """What somebody types who joins through this peer."""
    return f"{JOIN_WORDS}{addresses[0]}"


async def report_peer(
    running: RunningPeer,
    mode: ScreenName,
    metrics: MetricsFile | None,
    page: tuple[str, socket.socket, Sequence[str]] | None,
    keeper: Keeper,
    removable: Callable[[], str] = str,
    notify: str = "",
    charts: Charts | None = None,
    *,
    shows_join: bool = False,
) -> None:
    """Says how to join, and then what the peer sees, until it is cancelled. `page`: host, socket
    and further hosts of the dashboard, where one is wanted. `keeper`: of its owner's limits.
    `removable`: what to say of what the run has left on the disk when it is done; it may block.
    `notify`: an address for messages, or empty. `charts`: where the run is drawn.
    `shows_join`: the page says how to join."""
    stays = not running.options.exit_when_done
    and_now = "this peer goes on serving the model (Ctrl-C ends it)" if stays else "this peer ends"
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        hub = None
        if page is not None:
            replay = None if metrics is None else metrics.path
            offers = Offers(replay, (lambda: join_line(running.addresses)) if shows_join else None)
            hub, shown_at = await open_page(stack, running.spec, *page, offers)
        notifier = await open_notifier(stack, notify, running.spec)
        reporter = stack.enter_context(Reporter(running.spec, mode, metrics, hub, notifier, charts))
        say = reporter.screen.say
        if not reporter.screen.is_quiet:
            say(describe(running.spec))
            own = short_id(peer_of(running.addresses[0]))
            say(f"to join this run (this peer is {own}):")
        say(join_line(running.addresses))
        if (others := others_to_name(running.addresses)) and not reporter.screen.is_quiet:
            say(f"or, where that cannot be reached: {listed(others, ', ', MAX_OTHERS_CHARS)}")
        if not reporter.screen.is_quiet:
            say(ports_line(running.transport.ports()))
        if page is not None and not reporter.screen.is_quiet:
            say(f"dashboard: {shown_at}")
        if keeper.line and not reporter.screen.is_quiet:
            say(f"limits: {keeper.line}")
        done_at = float("inf")
        is_told = reporter.screen.is_quiet
        try:
            while True:
                reporter.look(running.view, loop.time(), time.time(), keeper.line)
                # Of a run that is stopped more can be told when this peer has left.
                if reporter.monitor.done and reporter.monitor.ends_with is None:
                    done_at = min(done_at, loop.time())
                    is_all = reporter.monitor.all_told or loop.time() - done_at > LAST_WORDS_S
                    if is_all and not is_told:
                        is_told = True
                        await tell_end(reporter.monitor, say, and_now, removable)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:  # the last measurement may have come since, or the end of a run that is stopped
            reporter.look(running.view, loop.time(), time.time(), keeper.line)
            if reporter.monitor.done and not is_told:
                await tell_end(reporter.monitor, say, "this peer ends", removable)


async def tell_end(
    monitor: RunMonitor, say: Say, and_now: str, removable: Callable[[], str]
) -> None:
    """That the run is over, and what of it may be removed here; that may block. `and_now`: what
    becomes of this peer where nobody has ordered that it ends."""
    if monitor.ends_with is None:
        say(f"the run has done its {counted(monitor.rounds, 'round')}; {and_now}")
    else:
        done = counted(monitor.view_model().round, "round")
        say(f"the run's owner has ended it after {done}; this peer ends")
    if line := await asyncio.to_thread(removable):
        say(line)
