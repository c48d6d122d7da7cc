"""The ready file: how a peer tells others of its machine, or of its group of containers, where it
can be reached.

`--ready-file FOLDER` has one file a peer in it, so that any of them is a way in (`--join @FOLDER`).
Peers end without a word: a file may be of one that is gone. Who reads tries all of them at once, so
that costs nothing; and a living peer renews its own, and removes what nobody has renewed for a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmnet.errors import UserError
from swarmnet.files import write_whole
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")

MAX_READY_BYTES = 1 << 16
MAX_READY_FILES = 64
"""Read of a folder, the newest."""
LOOK_EVERY_S = 2.0
"""Between two looks at whether the own addresses have changed."""
RENEW_EVERY_S = 60.0
STALE_AFTER_S = 86_400.0
JOIN_WORDS = "swarmnet peer --join "
"""What somebody types before an address to join by it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that listens."""

    address: str
    """A multiaddr with `/p2p/<peer id>` that others can join."""
    peer_id: str
    pid: int
    addresses: tuple[str, ...] = ()
    """All of them, the one to use first."""
    run_id: str = ""
    name: str = ""
    """Of its run."""
    began_unix_s: float = 0.0
    """When it began to listen."""


def ready_target(text: str) -> Path:
    """The file or folder that `--ready-file` means; a folder that does not exist is made where the
    name ends in a slash. Raises `UserError`."""
    path = Path(text)
    if text.endswith(os.sep):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"cannot make the folder {path}: {e.strerror}") from None
    return path


def ready_file_of(path: Path, peer_id: str) -> Path:
    """The file of one peer: `path`, or one in that folder."""
    return path / f"{peer_id}.json" if path.is_dir() else path


def write_ready_file(
    path: Path,
    addresses: Sequence[str],
    peer_id: str,
    run_id: str = "",
    name: str = "",
    began_unix_s: float = 0.0,
) -> None:
    """Says that this process listens. A reader sees the whole file or none. Raises `UserError`
    where it cannot be written."""
    path = ready_file_of(path, peer_id)
    ready = Ready(addresses[0], peer_id, os.getpid(), tuple(addresses), run_id, name, began_unix_s)
    try:
        write_whole(path, json.dumps(asdict(ready)) + "\n")
    except OSError as e:
        raise UserError(f"cannot write the ready file {path}: {e.strerror}") from None


def read_ready_file(path: Path) -> Ready | None:
    """What the peer wrote, None as long as there is nothing."""
    try:
        with path.open("rb") as file:
            return parse_ready(file.read(MAX_READY_BYTES))
    except FileNotFoundError:
        return None


def parse_ready(data: bytes) -> Ready:
    """Raises `ValueError`, `KeyError` or `TypeError`."""
    values = json.loads(data)
    address = str(values["address"])
    addresses = tuple(map(str, values.get("addresses") or (address,)))
    run_id, name = str(values.get("run_id", "")), str(values.get("name", ""))
    began_unix_s = float(values.get("began_unix_s", 0.0))
    pid = int(values["pid"])
    return Ready(address, str(values["peer_id"]), pid, addresses, run_id, name, began_unix_s)


def files_in(folder: Path) -> list[Path]:
    """The ready files of a folder, those renewed last first."""
    found: list[tuple[float, str, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob("[!.]*"):
            with contextlib.suppress(OSError):
                found.append((-path.stat().st_mtime, path.name, path))
    return [path for _, _, path in sorted(found)[:MAX_READY_FILES]]


def ready_in(path: Path) -> list[Ready]:
    """Who says in a folder (or file) that it listens; what cannot be read is left out."""
    return read_ready(files_in(path) if path.is_dir() else [path])


def read_ready(files: Sequence[Path]) -> list[Ready]:
    """What peers say in these files; what cannot be read is left out."""
    found = []
    for file in files:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if (ready := read_ready_file(file)) is not None:
                found.append(ready)
    return found


class Written:
    """Which of some files say something new since the last look. A peer that begins to listen
    writes another ready file than the one before it, also where that one was killed at the same
    address; one that renews its file writes the same again."""

    def __init__(self) -> None:
        self._seen: dict[Path, bytes] = {}

    def since(self, files: Sequence[Path]) -> list[Path]:
        """Those among these that are new, or say something else."""
        found: dict[Path, bytes] = {}
        for path in files:
            with contextlib.suppress(OSError), path.open("rb") as file:
                found[path] = file.read(MAX_READY_BYTES)
        before, self._seen = self._seen, found
        return [path for path, data in found.items() if before.get(path) != data]


def remove_stale(folder: Path, now_unix_s: float) -> None:
    """Ready files that nobody has renewed for a day; nothing else that lies there."""
    for path in folder.glob("[!.]*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            ready = read_ready_file(path)
            is_ours = ready is not None and path.name == f"{ready.peer_id}.json"
            if is_ours and now_unix_s - path.stat().st_mtime > STALE_AFTER_S:
                path.unlink()


@dataclass
class ReadyFile:
    """The own one, kept true for as long as the peer lives."""

    path: Path
    """A file or a folder."""
    transport: Transport
    run_id: str
    name: str
    began_unix_s: float

    def write(self) -> None:
        """Raises `UserError`."""
        write_ready_file(
            self.path,
            self.transport.addresses(),
            self.transport.peer_id,
            self.run_id,
            self.name,
            self.began_unix_s,
        )

    def remove(self) -> None:
        """In a folder it is one of many, and says no more than that there was a peer."""
        if self.path.is_dir():
            with contextlib.suppress(OSError):
                ready_file_of(self.path, self.transport.peer_id).unlink(missing_ok=True)

    async def keep(self) -> None:
        """Writes it again when the addresses have changed, and now and then. Until cancelled."""
        loop = asyncio.get_running_loop()
        told, written_at = self.transport.addresses(), loop.time()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = self.transport.addresses()
            if now == told and loop.time() - written_at < RENEW_EVERY_S:
                continue
            told, written_at = now, loop.time()
            try:
                await asyncio.to_thread(self.write)
                if self.path.is_dir():
                    await asyncio.to_thread(remove_stale, self.path, time.time())
            except UserError as e:
                log.warning("%s", e)
