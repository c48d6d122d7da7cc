"""Who else is at work on this machine, or in this group of containers: peers whose state folders
lie beside this one's, and those of the folder of ready files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.dialing.addresses import peer_of
from swarmnet.runtime.joining.racing import NoneAnswers, race
from swarmnet.runtime.joining.ready import Ready, Written, files_in, read_ready, ready_in
from swarmnet.runtime.text import shown_run
from swarmnet.swarm.initial.files import fetch_spec
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")

RUNNING_FILE = "running.json"
"""Of a peer that is at work: its run, and its addresses."""
MAX_BESIDE = 64
MAX_RUNNING_BYTES = 1 << 16
MAX_TOLD = 8
"""Other runs of which a line is said."""
ASK_TIMEOUT_S = 5.0
LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Beside:
    """Another peer, as it said itself; it may have been killed since."""

    run_id: str
    name: str
    """Of its run."""
    addresses: tuple[str, ...]
    continues: str = ""
    """As `[model] continues` of its run."""


def tell_run(
    state_dir: Path, run_id: str, name: str, addresses: Sequence[str], continues: str = ""
) -> Callable[[], None]:
    """Says in a peer's state folder what it is part of, for who starts a run beside it
    (`peers_beside`) or makes room on the disk; returns what takes it back. `continues`: as
    `[model] continues` of the run, whose checkpoints it needs too."""
    path = state_dir / RUNNING_FILE
    said = {"run_id": run_id, "name": name, "addresses": list(addresses), "continues": continues}
    try:
        path.write_text(json.dumps(said))
    except OSError as e:
        log.warning("cannot write %s: %s", path, e.strerror)

    def take_back() -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    return take_back


def peers_beside(state_dir: Path) -> list[Beside]:
    """This machine's other peers, whose state folders lie beside this one."""
    own = state_dir.absolute()
    paths = sorted(own.parent.glob(f"*/{RUNNING_FILE}"))[:MAX_BESIDE]
    said = [_said_in(path) for path in paths if path.parent != own]
    return [peer for peer in said if peer is not None]


def run_in(state_dir: Path) -> str:
    """The run that the peer at work in a state folder says it is part of; empty where it does not
    say."""
    said = _said_in(state_dir / RUNNING_FILE)
    return "" if said is None else said.run_id


def needs_of(state_dir: Path) -> tuple[str, ...]:
    """The beginnings of the ids of the runs whose checkpoints the peer at work in a state folder
    may need: its own, and the one that this continues; none while it does not say."""
    said = _said_in(state_dir / RUNNING_FILE)
    if said is None:
        return ()
    return tuple(run for run in (said.run_id, said.continues.partition("@")[0]) if run)


def _said_in(path: Path) -> Beside | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with path.open("rb") as file:
            said = json.loads(file.read(MAX_RUNNING_BYTES))
        addresses = tuple(map(str, said["addresses"]))
        continues = str(said.get("continues", ""))
        return Beside(str(said["run_id"]), str(said["name"]), addresses, continues)
    return None


def peers_at(ready: Path | None) -> list[Beside]:
    """The peers that say in a ready file, or in a folder of them, that they listen."""
    return [] if ready is None else _of_ready(ready_in(ready))


def _of_ready(found: Sequence[Ready]) -> list[Beside]:
    return [Beside(r.run_id, r.name, r.addresses) for r in found if r.run_id]


async def find_other_run(
    transport: Transport, beside: Sequence[Beside], run_id: str
) -> tuple[Beside, str] | None:
    """One of these peers that is alive and of another run than `run_id`, and the address at which
    it answers; None where there is none."""
    by_address = {a: b for b in beside if b.run_id != run_id for a in b.addresses}
    own = transport.peer_id
    others = [a for a in by_address if peer_of(a) != own]
    if not others:
        return None

    async def ask(address: str) -> tuple[Beside, str]:
        peer_id = await transport.dial(address, timeout_s=ASK_TIMEOUT_S)
        reply = await fetch_spec(transport, peer_id, timeout_s=ASK_TIMEOUT_S)
        if reply.run_id == run_id:
            raise SwarmnetError("it is of the same run by now")
        return by_address[address], address

    try:
        return await race(ask, others)
    except NoneAnswers as e:
        log.debug("no other run is alive here: %s", e)
        return None


def refusal(ready: Path, other: Beside) -> str:
    """Why a run is not started where the ready files lead into another one that is alive: it would
    get a part of the peers that look for the first."""
    shown = shown_run(other.name, other.run_id)
    return (
        f"{ready} leads into another run, which is alive: {shown}; this one begins only "
        "where that one has ended (docker compose down), or elsewhere (docker compose -p NAME up, "
        f"or another --ready-file); to join that one: swarmnet peer --join @{ready}"
    )


async def say_run_beside(
    transport: Transport, beside: Sequence[Beside], run_id: str, name: str
) -> None:
    """One line, where a run was just started beside another of the same name: a changed line in its
    spec makes it another run."""
    found = await find_other_run(transport, [b for b in beside if b.name == name], run_id)
    if found is not None:
        log.warning(
            "another run named %r is alive beside this one, with another spec; to join that one: "
            "swarmnet peer --join %s",
            name,
            found[1],
        )


async def watch_rendezvous(transport: Transport, ready: Path, run_id: str) -> None:
    """Says once of each other run that it is alive behind the same ready files: two may have begun
    there at the same moment, or on two sides of a cut. Until cancelled."""
    written, told = Written(), set[str]()
    while len(told) < MAX_TOLD:
        new = await asyncio.to_thread(_read_new, ready, written)
        others = [b for b in _of_ready(new) if b.run_id not in told]
        found = await find_other_run(transport, others, run_id)
        if found is not None:
            told.add(found[0].run_id)
            log.warning(
                "%s leads into another run too, %s: no new peer joins either while both are alive; "
                "stop one of them",
                ready,
                shown_run(found[0].name, found[0].run_id),
            )
        await asyncio.sleep(LOOK_EVERY_S)


def _read_new(ready: Path, written: Written) -> list[Ready]:
    return read_ready(written.since(files_in(ready) if ready.is_dir() else [ready]))
