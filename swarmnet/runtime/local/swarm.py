"""A whole swarm on this machine: one real `swarmnet peer` process a peer, and this process as the
observer that watches it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnet.errors import SwarmnetError, UsageError
from swarmnet.plurals import counted
from swarmnet.protocol.membership.peer_ids import MAX_SEATS
from swarmnet.runtime.joining.ready import JOIN_WORDS
from swarmnet.runtime.joining.starting import Run, start_run
from swarmnet.runtime.local.processes import PEER_COMMAND, STOP_STEPS, PeerProcesses
from swarmnet.runtime.observing import JoinRun, RunObserver, Say, join_run, with_invite
from swarmnet.runtime.options import (
    INVITE_VARIABLE,
    LOOPBACK,
    ComputeOptions,
    LinkOptions,
    LocalChoices,
    arguments_for,
    default_spec_path,
)
from swarmnet.runtime.ranks import without_effect
from swarmnet.spec import BYTES_TOKENIZER, HELD_OUT_NAME, PYTHON_STDLIB, RunSpec
from swarmnet.swarm.lifecycle.departure import LONGEST_DRAIN_S
from swarmnet.swarm.recovery.checkpointing import LAST_SAVE_S

JOIN_THROUGH = 4
"""Addresses that a newcomer is given: any of them may be gone when it starts."""
SAVE_WAIT_S = LONGEST_DRAIN_S + LAST_SAVE_S
"""What peers may take for what the model is written from."""
SAVING_STEPS = ((signal.SIGINT, SAVE_WAIT_S), *STOP_STEPS[1:])


@dataclass
class LocalSwarm:
    """The run, and its peers; `processes` ends them."""

    started: Run
    choices: LocalChoices
    processes: PeerProcesses
    more: Sequence[str] = ()
    """Further options of each peer."""
    address: str = ""
    """Of the first peer."""

    @property
    def spec(self) -> RunSpec:
        return self.started.spec

    async def start(self, say: Say, join: JoinRun = join_run) -> RunObserver:
        """Starts the peers and looks on; the caller closes what is returned. Raises `UserError`
        with what the first peer said where it did not begin, or `SwarmnetError`."""
        choices, processes = self.choices, self.processes
        seats = seats_of(self.spec.pipeline.num_stages, choices.num_peers)
        several = f"; one serves up to {counted(seats[0], 'stage')}" if seats[0] > 1 else ""
        peers = counted(choices.num_peers, "peer")
        say(f"starting {peers}{several}")
        if line := await asyncio.to_thread(without_effect, self.spec, choices):
            say(line)  # a peer says it to its log
        own = [*seat_arguments(seats[0]), *self.more]
        first = await processes.start("peer-1", first_arguments(choices, *own))
        self.address = (await processes.wait_ready(first, say)).address
        say(f"join it from this machine: {JOIN_WORDS}{self.address}")
        for num_seats in seats[1:]:
            await self._start_joiner(num_seats, self.address)
        look = with_invite(join, choices.invite)
        observer = await look([self.address], choices.transport)
        if observer.spec.run_id != self.spec.run_id:
            await observer.close()
            raise SwarmnetError("the peers train another run than the one they were given")
        return observer

    async def start_newcomer(self, observer: RunObserver) -> None:
        """One more peer, through the address of any that lives."""
        now = asyncio.get_running_loop().time()
        live = observer.view.live(now)
        addresses = [r.addresses[0] for r in live if r.is_replica and r.addresses]
        if addresses:
            most = seats_of(self.spec.pipeline.num_stages, self.choices.num_peers)[0]
            await self._start_joiner(most, *addresses[:JOIN_THROUGH])

    async def _start_joiner(self, num_seats: int, *addresses: str) -> None:
        name = f"peer-{len(self.processes.children) + 1}"
        arguments = joiner_arguments(self.choices, self.spec, *addresses)
        await self.processes.start(name, [*arguments, *seat_arguments(num_seats), *self.more])

    @property
    def state_dirs(self) -> list[Path]:
        """Of the peers."""
        return [self.processes.state_dir(child.name) for child in self.processes.children]


async def begin_local(choices: LocalChoices) -> tuple[Run, LocalChoices]:
    """The run that is meant, and the choices with what was left open. Raises `UserError`."""
    path = choices.spec or default_spec_path()
    started = await asyncio.to_thread(start_run, path, rounds=choices.rounds, seed=choices.seed)
    num_stages = started.spec.pipeline.num_stages
    seats = seats_of(num_stages, choices.num_peers)
    if seats[0] > MAX_SEATS:
        raise UsageError(f"a peer serves at most {MAX_SEATS} stages: take more --peers")
    return started, replace(choices, spec=path, threads=choices.threads_each(seats))


def seats_of(num_stages: int, num_peers: int) -> list[int]:
    """How many stages each peer serves, so that all are served; one where there are enough peers.
    The first ones have one more where they do not come out even."""
    each, more = divmod(num_stages, num_peers)
    return [max(1, each + (n < more)) for n in range(num_peers)]


def seat_arguments(num_seats: int) -> list[str]:
    """Of a peer that serves so many stages."""
    return ["--stages", str(num_seats)] if num_seats > 1 else []


def local_processes(
    folder: Path,
    choices: LocalChoices,
    command: Sequence[str] = PEER_COMMAND,
    stop_steps: Sequence[tuple[signal.Signals, float]] = STOP_STEPS,
) -> PeerProcesses:
    """Where the peers of a swarm on this machine will be."""
    return PeerProcesses(folder, command, stop_steps, invite_in(choices.invite))


def invite_in(invite: str) -> Mapping[str, str]:
    """The environment of a peer with an invite: a command line can be seen by others."""
    return {INVITE_VARIABLE: invite} if invite else {}


def first_arguments(choices: LocalChoices, *more: str) -> list[str]:
    """Of the peer that starts the run."""
    arguments = ["--spec", str(choices.spec or default_spec_path())]
    if choices.rounds is not None:
        arguments += ["--rounds", str(choices.rounds)]
    if choices.seed is not None:
        arguments += ["--seed", str(choices.seed)]
    return [*arguments, *_shared_arguments(choices), *more]


def joiner_arguments(choices: LocalChoices, spec: RunSpec, *addresses: str) -> list[str]:
    """A joiner takes neither files nor code from a spec that comes over the network; here both
    are this person's own."""
    arguments = [word for address in addresses for word in ("--join", address)]
    paths = _named_paths(spec)
    if any(path != PYTHON_STDLIB for path in paths):
        for path in paths:
            arguments += ["--data", path]
    if spec.data.tokenizer != BYTES_TOKENIZER:
        arguments += ["--tokenizer", spec.data.tokenizer]
    if spec.model.kind == "custom":
        arguments += ["--builder", spec.model.builder]
    return arguments + _shared_arguments(choices)


def _shared_arguments(choices: LocalChoices) -> list[str]:
    # who starts a run at this machine wants it now
    unasked = ["--no-pause-on-battery", "--no-pause-on-metered"]
    # What happens in the run is told here, and not by each of them as well.
    arguments = ["--host", LOOPBACK, "--quiet", *unasked]
    arguments += arguments_for(choices, LinkOptions) + arguments_for(choices, ComputeOptions)
    if choices.threads:
        arguments += ["--threads", str(choices.threads)]
    return arguments


def _named_paths(spec: RunSpec) -> list[str]:
    """Of `--data`."""
    data = spec.data
    held_out = [f"{HELD_OUT_NAME}={path}" for path in data.held_out_paths]
    prefixes = [f"{s.name}=" if data.source else "" for s in data.sources]
    sources = zip(prefixes, data.sources, strict=True)
    return [f"{prefix}{path}" for prefix, s in sources for path in s.paths] + held_out
