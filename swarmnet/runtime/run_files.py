"""The files of a run on this machine's disk: a tokenizer, a chat template, the list of hashes of
its initial weights. They lie in the state folder, under their hashes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.causes import Failures
from swarmnet.errors import AddressError, SwarmnetError, UserError
from swarmnet.files import write_whole
from swarmnet.methods.records import GOSSIP, GossipRequest
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.spec import FileSpec
from swarmnet.swarm.calls import call
from swarmnet.swarm.initial.files import fetch_file
from swarmnet.transport.base import Transport
from swarmnet.wire import Message, unpack

log = logging.getLogger("swarmnet.peer")

FOLDER = "files"
TOKENIZER, WEIGHTS = "tokenizer.json", "weights.sha256"
MAX_OTHERS = 8
"""Peers that one neighbour names, of those that are asked for the run's files."""
Version = tuple[int, int, int, int]
"""Of a file on the disk: device, inode, size in bytes, and the time of its last change in ns."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Those of one run. `folder`: the state folder. `files`: what the run's spec says of them."""

    folder: Path
    files: Mapping[str, FileSpec]
    _checked: dict[str, tuple[Version, bool]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By SHA-256: which version of the file was compared with it last, and whether it matched."""

    def path(self, name: str) -> Path | None:
        """Where a file of the run is; None where the run has none of that name, or it is not
        here."""
        about = self.files.get(name)
        path = None if about is None else self._path(about.sha256)
        return path if path is not None and path.is_file() else None

    def read(self, sha256: str) -> bytes | None:
        """The contents of a file of the run; None where it is not here undamaged."""
        if not self._names(sha256):
            return None
        try:
            data = self._path(sha256).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def read_part(self, sha256: str, offset: int, num_bytes: int) -> bytes | None:
        """At most so many bytes of a file of the run, from `offset` on; None where it is not here
        undamaged. The whole file is read and compared with its hash once for each version of it:
        who asks for parts again and again costs no more than these parts."""
        if not self._names(sha256):
            return None
        try:
            with self._path(sha256).open("rb") as file:
                about = os.fstat(file.fileno())
                version = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
                checked = self._checked.get(sha256)
                if checked is None or checked[0] != version:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                    checked = self._checked[sha256] = (version, found == sha256)
                if not checked[1]:
                    return None
                file.seek(min(offset, about.st_size))
                return file.read(num_bytes)
        except OSError:
            return None

    def contents(self) -> dict[str, bytes]:
        """Of all that are here, by name."""
        found = {name: self.read(about.sha256) for name, about in self.files.items()}
        return {name: data for name, data in found.items() if data is not None}

    def save(self, contents: Mapping[str, bytes]) -> None:
        """Keeps files of the run. Raises `UserError`."""
        for name, data in contents.items():
            path = self._path(self.files[name].sha256)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, data)
            except OSError as e:
                raise UserError(f"cannot write {path}: {e.strerror or e}") from None

    async def fetch(self, transport: Transport, peer_ids: Sequence[str]) -> None:
        """Gets what is missing from others: those named, and where that takes long those that they
        know. Raises `UserError`."""
        givers, rng = list(peer_ids), random.Random()
        looking = asyncio.ensure_future(_add_others(transport, peer_ids, givers))
        try:
            for name, about in sorted(self.files.items()):
                if self.read(about.sha256) is not None:
                    continue
                log.info("fetching the run's %s, %d bytes", name, about.size)
                failures = Failures()
                try:
                    data = await fetch_file(
                        transport, givers, about.sha256, about.size, rng, failures
                    )
                except SwarmnetError:
                    what = f"the run's {name} is not to be had"
                    raise failures.as_error(what, AddressError) from None
                self.save({name: data})
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    def _names(self, sha256: str) -> bool:
        """Has the run a file of this hash?"""
        return any(about.sha256 == sha256 for about in self.files.values())

    def _path(self, sha256: str) -> Path:
        return self.folder / FOLDER / sha256


async def _add_others(transport: Transport, peer_ids: Sequence[str], givers: list[str]) -> None:
    """Adds to `givers`, after a while, peers that some of them know; in a closed run they tell only
    members. Who they are the connection says, and what they give is checked."""
    await asyncio.sleep(ANSWER_S)
    for peer_id in peer_ids:
        try:
            known = await call(
                transport, peer_id, GOSSIP, Message(GossipRequest({})), timeout_s=ANSWER_S
            )
            records = [unpack(signed.payload, Record) for signed in known.body.records]
        except SwarmnetError as e:
            log.debug("%s names no others: %s", peer_id[-8:], e)
            continue
        serving = [r for r in records if r.is_replica and r.peer_id not in givers]
        for record in serving[:MAX_OTHERS]:
            transport.learn(record.peer_id, record.addresses)
            givers.append(record.peer_id)
