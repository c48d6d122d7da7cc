"""The ready file: how a peer tells the program that started it where it can be reached."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmnet.errors import UserError

MAX_READY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that listens."""

    address: str
    """A multiaddr with `/p2p/<peer id>` that others can join."""
    peer_id: str
    pid: int


def write_ready_file(path: Path, address: str, peer_id: str) -> None:
    """Says that this process listens. A reader sees the whole file or none. Raises `UserError`
    where it cannot be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(asdict(Ready(address, peer_id, os.getpid()))) + "\n")
        beside.replace(path)
    except OSError as e:
        raise UserError(f"cannot write the ready file {path}: {e.strerror}") from None


def read_ready_file(path: Path) -> Ready | None:
    """What the peer wrote, None as long as there is nothing."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(MAX_READY_BYTES))
        return Ready(str(values["address"]), str(values["peer_id"]), int(values["pid"]))
    except FileNotFoundError:
        return None
