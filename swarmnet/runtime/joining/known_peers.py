"""The peers of a run that this one has met, kept in its state folder."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.files import write_whole
from swarmnet.protocol.dialing.addresses import of_all, peer_of
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import MAX_ADDRESSES, OBSERVING
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.trouble import Trouble

log = logging.getLogger("swarmnet.peer")

KNOWN_FILE = "peers.json"
MAX_KNOWN = 64
"""Peers that are remembered."""
MAX_KNOWN_BYTES = 1 << 20
LOOK_EVERY_S = 2.0
"""What has changed is saved within this time: a peer may be killed at any moment."""


@dataclass
class KnownPeers:
    """Of one run."""

    path: Path
    run_id: str = ""
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses by peer id, the latest met last."""
    own: Callable[[], Sequence[str]] = tuple
    """This machine's addresses."""
    _trouble: Trouble = field(default_factory=Trouble)

    @classmethod
    def load(cls, state_dir: Path, own: Callable[[], Sequence[str]] = tuple) -> KnownPeers:
        """What was saved; nothing where the file is missing or damaged."""
        path = state_dir / KNOWN_FILE
        try:
            with path.open("rb") as file:
                data = json.loads(file.read(MAX_KNOWN_BYTES))
            peers = {
                str(peer_id): tuple(map(str, addresses[:MAX_ADDRESSES]))
                for peer_id, addresses in list(data["peers"].items())[:MAX_KNOWN]
            }
            return cls(path, str(data["run_id"]), peers, own)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            log.warning("%s cannot be read (%s); it is made again", path, e)
        return cls(path, own=own)

    def begin(self, run_id: str) -> None:
        """Forgets the peers of other runs."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.peers = {}

    def meet(self, run_id: str, view: View, now: float) -> bool:
        """Takes over who is in a view; forgets other runs. True where there is something to
        save."""
        before = dict(self.peers)
        self.begin(run_id)
        own = machine_of(view.own_peer_id)
        met = [r for r in view.records() if r.state != OBSERVING and r.addresses]
        for record in met:
            machine = machine_of(record.peer_id)
            if machine == own:
                continue
            if view.is_live(record.peer_id, now):
                self.peers.pop(machine, None)  # so that it is the last
                self.peers[machine] = record.addresses
            elif machine in self.peers:
                self.peers[machine] = record.addresses
            else:
                self.peers = {machine: record.addresses, **self.peers}
        while len(self.peers) > MAX_KNOWN:
            del self.peers[next(iter(self.peers))]
        return self.peers != before

    def save(self) -> None:
        """Atomically; a disk that is full is no reason to stop."""
        try:
            write_whole(self.path, json.dumps({"run_id": self.run_id, "peers": self.peers}))
        except OSError as e:
            more = self._trouble.failed(time.monotonic())
            if more is not None:
                log.warning(
                    "cannot remember the peers of the run in %s: %s%s", self.path, e.strerror, more
                )
            return
        if self._trouble.is_over():
            log.warning("the peers of the run are remembered again")

    def latest_first(self) -> dict[str, tuple[str, ...]]:
        return dict(reversed(self.peers.items()))

    def addresses(self) -> list[str]:
        """Of all of them, as they are to be tried (`protocol.dialing.addresses`), the latest met
        first."""
        return of_all(self.latest_first(), self.own())

    def also(self, asked: Sequence[str]) -> list[str]:
        """Further addresses of the run that `asked` leads to: none where nobody knows whether
        it is the same one."""
        same = any(peer_of(address) in self.peers for address in asked)
        return [a for a in self.addresses() if a not in asked] if same else []

    async def keep(self, run_id: str, view: View) -> None:
        """Saves what changes, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.meet(run_id, view, loop.time()):
                await asyncio.to_thread(self.save)
