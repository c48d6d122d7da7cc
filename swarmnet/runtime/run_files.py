"""The files of a run on this machine's disk: a tokenizer, a chat template, the list of hashes of
its initial weights. They lie in the state folder, under their hashes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.errors import AddressError, SwarmnetError, UserError
from swarmnet.files import write_whole
from swarmnet.spec import FileSpec
from swarmnet.swarm.initial.files import fetch_file
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")

FOLDER = "files"
TOKENIZER, WEIGHTS = "tokenizer.json", "weights.sha256"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Those of one run. `folder`: the state folder. `files`: what the run's spec says of them."""

    folder: Path
    files: Mapping[str, FileSpec]

    def path(self, name: str) -> Path | None:
        """Where a file of the run is; None where the run has none of that name, or it is not
        here."""
        about = self.files.get(name)
        path = None if about is None else self._path(about.sha256)
        return path if path is not None and path.is_file() else None

    def read(self, sha256: str) -> bytes | None:
        """The contents of a file of the run; None where it is not here undamaged."""
        if all(about.sha256 != sha256 for about in self.files.values()):
            return None
        try:
            data = self._path(sha256).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

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
        """Gets what is missing from others. Raises `AddressError`."""
        for name, about in sorted(self.files.items()):
            if self.read(about.sha256) is not None:
                continue
            log.info("fetching the run's %s, %d bytes", name, about.size)
            try:
                data = await fetch_file(transport, peer_ids, about.sha256, about.size)
            except SwarmnetError as e:
                raise AddressError(f"the run's {name} is not to be had: {e}") from None
            self.save({name: data})

    def _path(self, sha256: str) -> Path:
        return self.folder / FOLDER / sha256
