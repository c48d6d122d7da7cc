"""Who else is at work on this machine, or in this group of containers: peers whose state folders
lie beside this one's, and those of the folder of ready files."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.membership.addresses import peer_of
from swarmnet.runtime.joining.racing import NoneAnswers, race
from swarmnet.runtime.joining.ready import ready_in
from swarmnet.swarm.peer import fetch_spec
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")

RUNNING_FILE = "running.json"
"""Of a peer that is at work: its run, and its addresses."""
MAX_BESIDE = 64
MAX_RUNNING_BYTES = 1 << 16
ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Beside:
    """Another peer, as it said itself; it may have been killed since."""

    run_id: str
    name: str
    """Of its run."""
    addresses: tuple[str, ...]


def tell_run(
    state_dir: Path, run_id: str, name: str, addresses: Sequence[str]
) -> Callable[[], None]:
    """Says in a peer's state folder what it is part of, for who starts a run beside it
    (`peers_beside`); returns what takes it back."""
    path = state_dir / RUNNING_FILE
    said = {"run_id": run_id, "name": name, "addresses": list(addresses)}
    try:
        path.write_text(json.dumps(said))
    except OSError as e:
        log.warning("cannot write %s: %s", path, e.strerror)

    def take_back() -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    return take_back


def peers_beside(state_dir: Path, ready: Path | None = None) -> list[Beside]:
    """This machine's other peers, whose state folders lie beside this one, and those in the folder
    of ready files."""
    found: list[Beside] = []
    for path in sorted(state_dir.absolute().parent.glob(f"*/{RUNNING_FILE}"))[:MAX_BESIDE]:
        if path.parent == state_dir.absolute():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open("rb") as file:
                said = json.loads(file.read(MAX_RUNNING_BYTES))
            addresses = tuple(map(str, said["addresses"]))
            found.append(Beside(str(said["run_id"]), str(said["name"]), addresses))
    if ready is not None and ready.is_dir():
        found += [Beside(r.run_id, r.name, r.addresses) for r in ready_in(ready) if r.run_id]
    return found


async def find_run_beside(
    transport: Transport, beside: Sequence[Beside], run_id: str, name: str
) -> str:
    """An address of another run of this name that is alive; empty where there is none."""
    theirs = [a for b in beside if b.run_id != run_id and b.name == name for a in b.addresses]
    own = transport.peer_id

    async def ask(address: str) -> str:
        peer_id = await transport.dial(address, timeout_s=ASK_TIMEOUT_S)
        reply = await fetch_spec(transport, peer_id, timeout_s=ASK_TIMEOUT_S)
        if reply.run_id == run_id:
            raise SwarmnetError("it is of the same run by now")
        return address

    try:
        return await race(ask, [a for a in theirs if peer_of(a) != own])
    except NoneAnswers as e:
        log.debug("no other run of this name is alive here: %s", e)
        return ""


async def say_run_beside(
    transport: Transport, beside: Sequence[Beside], run_id: str, name: str
) -> None:
    """One line, where a run was just started beside another of the same name: a changed line in its
    spec makes it another run."""
    address = await find_run_beside(transport, beside, run_id, name)
    if address:
        log.warning(
            "another run named %r is alive beside this one, with another spec; to join that one: "
            "swarmnet peer --join %s",
            name,
            address,
        )
