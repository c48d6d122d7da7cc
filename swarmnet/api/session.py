"""A run as a program has it open: this machine's peers, if any, and an observer. Lives on the loop
of a `Life`; each function here opens one kind, and closes it at the end of its block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.api.given import Given, SpecLike, spec_file
from swarmnet.api.history import History
from swarmnet.observe.events import Event
from swarmnet.observe.monitor import RunMonitor
from swarmnet.observe.view_model import ViewModel
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.local.processes import (
    PEER_COMMAND,
    STOP_STEPS,
    PeerProcesses,
    check_kept,
    run_folder,
    used_folder,
)
from swarmnet.runtime.local.swarm import (
    SAVE_WAIT_S,
    SAVING_STEPS,
    LocalSwarm,
    begin_local,
    invite_in,
    local_processes,
)
from swarmnet.runtime.local.watching import LOOK_EVERY_S, LOOK_PAUSE_S, watch_run
from swarmnet.runtime.observing import (
    JoinRun,
    RunObserver,
    join_run,
    monitor_of,
    with_invite,
)
from swarmnet.runtime.options import (
    LocalChoices,
    PeerChoices,
    TransportName,
    arguments_for,
)
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.runtime.writing.writer import Text

log = logging.getLogger("swarmnet.api")

Sink = Callable[[Sequence[Event], ViewModel, float], None]
"""(what is new, the run as it is, now by the clock of its view)."""
PEER = "peer"
"""Name of the only one that a program starts."""


def _say(line: str) -> None:
    log.info("%s", line)


def _warn(line: str) -> None:
    log.warning("%s", line)


@dataclass
class Session:
    """What is open; an `Onlooker` of its run."""

    observer: RunObserver
    address: str
    """For others to join the run by."""
    monitor: RunMonitor
    processes: PeerProcesses | None = None
    state_dirs: Sequence[Path] = ()
    """Of this machine's peers, where a model of code can be had from them only."""
    base: str = ""
    """The model that the run began from, where this machine knows that."""
    history: History[Event] = field(default_factory=History)
    sinks: list[Sink] = field(default_factory=list)
    """Told of every look."""
    _writer: Any = None

    @property
    def spec(self) -> RunSpec:
        return self.observer.spec

    async def watch(self) -> None:
        """Tells the history what happens, until the run has done its rounds. Raises
        `SwarmnetError` where no peer of this machine is left."""
        await watch_run(self.observer, self, self.processes, _warn)

    def look(self, view: View, now: float, unix_s: float) -> list[Event]:
        events = self.monitor.look(view, now, unix_s)
        self.history.add(events)
        model = self.monitor.view_model() if self.sinks else None
        for tell in self.sinks:
            assert model is not None
            tell(events, model, now)
        return events

    async def status(self, unix_s: float) -> ViewModel:
        """As of now."""
        self.look(self.observer.view, asyncio.get_running_loop().time(), unix_s)
        return self.monitor.view_model()

    async def export(self, out: Path, options: Mapping[str, Any]) -> str:
        """Writes the model; returns what was done, in a line. `options`: of `Wanted`."""
        from swarmnet.runtime.exporting.models import (
            Wanted,
            export_checkpoints,
            export_observed,
        )

        weights = options.get("weights")
        wanted = Wanted(**options, base=self.base if weights is None else str(weights))
        if self.spec.model.kind == "custom" and self.state_dirs:
            await self._until_saved()
            return await asyncio.to_thread(export_checkpoints, self.state_dirs, out, wanted)
        return await export_observed(self.observer, out, wanted)

    async def _until_saved(self) -> None:
        """A run that has done its rounds is exported as it ended: its peers of this machine save
        that when the last round is over, and may take a while for it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SAVE_WAIT_S
        while self.monitor.done and loop.time() < end:
            if await asyncio.to_thread(self._least_saved) >= self.monitor.view_model().end:
                return
            await self.observer.wait_news(LOOK_EVERY_S)
            await asyncio.sleep(LOOK_PAUSE_S)

    def _least_saved(self) -> int:
        """The newest round that each state folder has of the run, the least of them. Blocks."""
        from swarmnet.training.checkpoint import find_checkpoints

        rounds = []
        for folder in self.state_dirs:
            metas = (meta for _, meta in find_checkpoints(folder))
            rounds.append(max((m.round for m in metas if m.run_id == self.spec.run_id), default=0))
        return min(rounds)

    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        stops: Sequence[str],
    ) -> str:
        """A text that goes on with the prompt, or an answer to the last of some messages.
        `options`: of `Sampling`, None for what was not said."""
        pieces: History[str] = History()
        await self.write(prompt, options, stops, pieces)
        return "".join(pieces.rest(0)[0])

    async def write(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        stops: Sequence[str],
        pieces: History[str],
    ) -> None:
        """`generate`, piece by piece: readers of `pieces` have each as it comes, and hear of what
        goes wrong."""
        try:
            text = await self._text(prompt, options, stops)
            async for piece in text:
                pieces.add([piece])
        except Exception as error:
            pieces.end(error)
            raise
        finally:
            pieces.end()

    async def _text(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        stops: Sequence[str],
    ) -> Text:
        from swarmnet.runtime.texts import answer, continue_text, open_writer
        from swarmnet.runtime.writing.sampling import Sampling
        from swarmnet.runtime.writing.writer import longest_text

        Sampling().with_options(options)  # wrong ones are known at once
        longest_text(self.spec)
        if self._writer is None:
            self._writer = await open_writer(self.observer)
        sampling = self._writer.sampling.with_options(options)
        if isinstance(prompt, str):
            return await continue_text(self._writer, prompt, sampling, _warn, stops)
        return await answer(self._writer, prompt, sampling, _warn, stops)


@asynccontextmanager
async def local_session(
    spec: SpecLike | None,
    given: Given,
    choices: LocalChoices,
    state_dir: Path | None = None,
    *,
    command: Sequence[str] = PEER_COMMAND,
    join: JoinRun = join_run,
) -> AsyncIterator[Session]:
    """A swarm on this machine. `choices.spec` is set here. `state_dir`: where the run is kept, and
    goes on. `command` and `join` are there for tests."""
    with run_folder() if state_dir is None else used_folder(state_dir) as folder:
        path = await asyncio.to_thread(spec_file, spec, given, folder)
        started, choices = await begin_local(replace(choices, spec=path))
        if state_dir is not None:
            check_kept(folder, started.spec.run_id)
        steps = STOP_STEPS if state_dir is None else SAVING_STEPS
        processes = local_processes(folder, choices, command, steps)
        swarm = LocalSwarm(started, choices, processes)
        try:
            observer = await swarm.start(_say, join)
            try:
                yield Session(
                    observer,
                    swarm.address,
                    monitor_of(started.spec),
                    processes,
                    swarm.state_dirs,
                    started.model,
                )
            finally:
                await observer.close()
        finally:
            await processes.stop()


@asynccontextmanager
async def peer_session(
    spec: SpecLike | None,
    given: Given,
    choices: PeerChoices,
    *,
    command: Sequence[str] = PEER_COMMAND,
    join: JoinRun = join_run,
) -> AsyncIterator[Session]:
    """One peer of this machine, which starts a run or joins one (`choices.join`)."""
    with run_folder() as folder:
        if not choices.join:
            path = await asyncio.to_thread(spec_file, spec, given, folder)
            choices = replace(choices, spec=path)
        processes = PeerProcesses(folder, command, SAVING_STEPS, invite_in(choices.invite))
        words = arguments_for(replace(choices, invite=""), PeerChoices)
        try:
            child = await processes.start(PEER, ["--plain", *words], keeps_state=True)
            ready = await processes.wait_ready(child, _say)
            look = with_invite(join, choices.invite)
            observer = await look(list(ready.addresses), choices.transport)
            try:
                yield Session(observer, ready.address, monitor_of(observer.spec), processes)
            finally:
                await observer.close()
        finally:
            await processes.stop()


@asynccontextmanager
async def watching_session(
    addresses: Sequence[str], transport: TransportName, invite: str, *, join: JoinRun = join_run
) -> AsyncIterator[Session]:
    """A run elsewhere, without taking part."""
    observer = await with_invite(join, invite)(list(addresses), transport)
    try:
        yield Session(observer, addresses[0], monitor_of(observer.spec))
    finally:
        await observer.close()
