"""How a peer finds its run: the addresses that a person gave, and those it has met before.

A volunteer's machine boots before its router does, and a run's first peer may be away for a night.
So a peer that cannot reach anybody says why, in one line, and tries again, more and more seldom,
until somebody answers. What no waiting can mend (a malformed address, another version) is said at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.errors import AddressError, SwarmnetError, UserError, WrongProtocol, WrongVersion
from swarmnet.protocol.addresses import of_all
from swarmnet.protocol.records import MAX_ADDRESSES, OBSERVING
from swarmnet.protocol.seats import machine_of
from swarmnet.protocol.view import View
from swarmnet.spec import RunSpec
from swarmnet.swarm.gossip import Gossip
from swarmnet.swarm.peer import fetch_spec
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")

DIAL_TIMEOUT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0
"""Between two rounds of attempts; it doubles."""
KNOWN_FILE = "peers.json"
RUNNING_FILE = "running.json"
"""Of a peer that is at work: its run, and its address."""
MAX_KNOWN = 64
"""Peers that are remembered."""
MAX_KNOWN_BYTES = 1 << 20
SAVE_EVERY_S = 30.0
MAX_REASON_CHARS = 300
REJOIN_TIMEOUT_S = 5.0
"""A peer that starts a run looks for so long whether that run is alive already."""
FILE_MARK = "@"
"""`--join @FILE`: the addresses are in a file, one a line."""


@dataclass
class KnownPeers:
    """The peers of a run that this one has met, kept in its state folder."""

    path: Path
    run_id: str = ""
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses by peer id, the latest met last."""
    own: Sequence[str] = ()
    """This machine's addresses."""

    @classmethod
    def load(cls, state_dir: Path) -> KnownPeers:
        """What was saved; nothing where the file is missing or damaged."""
        known = cls(state_dir / KNOWN_FILE)
        try:
            with known.path.open("rb") as file:
                data = json.loads(file.read(MAX_KNOWN_BYTES))
            known.run_id = str(data["run_id"])
            for peer_id, addresses in list(data["peers"].items())[:MAX_KNOWN]:
                known.peers[str(peer_id)] = tuple(map(str, addresses[:MAX_ADDRESSES]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            log.warning("%s cannot be read (%s); it is made again", known.path, e)
            known.run_id, known.peers = "", {}
        return known

    def meet(self, run_id: str, view: View) -> None:
        """Takes over who is in a view; forgets other runs."""
        if run_id != self.run_id:
            self.run_id, self.peers = run_id, {}
        for record in view.records():
            if (
                machine_of(record.peer_id) != machine_of(view.own_peer_id)
                and record.state != OBSERVING
                and record.addresses
            ):
                self.peers.pop(machine_of(record.peer_id), None)
                self.peers[machine_of(record.peer_id)] = record.addresses
        while len(self.peers) > MAX_KNOWN:
            del self.peers[next(iter(self.peers))]

    def save(self) -> None:
        """Atomically; a disk that is full is no reason to stop."""
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps({"run_id": self.run_id, "peers": self.peers}))
            beside.replace(self.path)
        except OSError as e:
            log.warning("cannot remember the peers of the run in %s: %s", self.path, e.strerror)

    def addresses(self) -> list[str]:
        """Of all of them, as they are to be tried (`protocol.addresses`), the latest met first."""
        return of_all(dict(reversed(self.peers.items())), self.own)

    def teach(self, transport: Transport) -> None:
        """Makes all addresses of all of them known to a transport, which tries them all when it
        dials one."""
        for peer_id, addresses in self.peers.items():
            transport.learn(peer_id, addresses)

    def also(self, asked: Sequence[str]) -> list[str]:
        """Further addresses of the run that `asked` leads to: none where nobody knows whether
        it is the same one."""
        same = any(address.rpartition("/p2p/")[2] in self.peers for address in asked)
        return [a for a in self.addresses() if a not in asked] if same else []

    async def keep(self, run_id: str, view: View) -> None:
        """Saves now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self.meet(run_id, view)
            if self.peers:
                await asyncio.to_thread(self.save)


async def read_addresses(
    given: Sequence[str], say: Callable[[str], None], *, patience_s: float | None = None
) -> list[str]:
    """`--join` with the files that it names read; waits for a file that is not there yet. Raises
    `AddressError` after `patience_s`."""
    found: list[str] = []
    for address in given:
        if not address.startswith(FILE_MARK):
            found.append(address)
            continue
        path = Path(address[len(FILE_MARK) :])
        backoff = Backoff(patience_s, say)
        while not (lines := _lines(path)):
            await backoff.wait(f"no address in {path} yet")
        found += lines
    return found


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(errors="replace")[:MAX_KNOWN_BYTES]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if text.lstrip().startswith("{"):  # a ready file
        try:
            return [str(json.loads(text)["address"])]
        except (ValueError, KeyError):
            return []
    return [line.strip() for line in text.splitlines() if line.strip()]


@dataclass
class Backoff:
    """Waits longer each time, and says why."""

    patience_s: float | None
    """None = for ever."""
    say: Callable[[str], None]
    rng: random.Random = field(default_factory=random.Random)
    _next_s: float = FIRST_WAIT_S
    _began: float | None = None

    async def wait(self, reason: str) -> None:
        """Raises `AddressError` with the reason when patience is at its end."""
        loop = asyncio.get_running_loop()
        self._began = loop.time() if self._began is None else self._began
        wait_s = self._next_s * self.rng.uniform(0.8, 1.2)
        self._next_s = min(2 * self._next_s, LONGEST_WAIT_S)
        if self.patience_s is not None:
            left_s = self._began + self.patience_s - loop.time()
            if left_s <= 0:
                raise AddressError(reason)
            wait_s = min(wait_s, left_s)
        self.say(f"{reason}; trying again in {wait_s:.0f} s (Ctrl-C stops)")
        await asyncio.sleep(wait_s)


async def dial_any(
    transport: Transport, addresses: Sequence[str], timeout_s: float = DIAL_TIMEOUT_S
) -> str:
    """The peer id behind the first address that answers. Raises `AddressError` with the reason of
    each."""
    reasons = []
    for address in addresses:
        try:
            return await transport.dial(address, timeout_s=timeout_s)
        except (WrongVersion, WrongProtocol) as e:
            raise UserError(f"{address}: {e}") from None
        except SwarmnetError as e:
            reasons.append(f"{address}: {e}")
    raise AddressError("; ".join(reasons) or "no address was given")


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises `AddressError` for one that no waiting makes right."""
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error as MultiaddrError

    for address in addresses:
        try:
            if "/p2p/" not in address:
                raise ValueError("it has no /p2p/ and peer id at its end")
            Multiaddr(address)
        except (ValueError, LookupError, MultiaddrError) as e:
            raise AddressError(
                f"{address[:128]!r} is no address of a peer ({str(e)[:80]}); one looks like "
                "/ip4/203.0.113.7/tcp/4001/p2p/12D3Koo..."
            ) from None


async def find_run(
    transport: Transport,
    given: Sequence[str],
    known: KnownPeers,
    say: Callable[[str], None],
    *,
    patience_s: float | None = None,
) -> tuple[str, RunSpec]:
    """A peer id and the run that it trains: of the addresses asked for, then of those known. Tries
    until one answers. Raises `AddressError` after `patience_s`, and `UserError` for what waiting
    does not mend."""
    backoff = Backoff(patience_s, say)
    while True:
        # Read anew each time: a first peer that comes back may have another address.
        addresses = await read_addresses(given, say, patience_s=patience_s)
        check_addresses(addresses)
        others = known.also(addresses)
        if others:
            known.teach(transport)
        try:
            peer_id = await dial_any(transport, [*addresses, *others])
            return peer_id, await fetch_run(transport, peer_id)
        except AddressError as e:
            text = str(e) if not others else f"none of {1 + len(others)} known peers answers: {e}"
            await backoff.wait(text[:MAX_REASON_CHARS])


def tell_run(state_dir: Path, run_id: str, address: str) -> Callable[[], None]:
    """Says in a peer's state folder what it is part of, for who starts the same run beside it
    (`peers_beside`); returns what takes it back."""
    path = state_dir / RUNNING_FILE
    try:
        path.write_text(json.dumps({"run_id": run_id, "address": address}))
    except OSError as e:
        log.warning("cannot write %s: %s", path, e.strerror)

    def take_back() -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    return take_back


def peers_beside(state_dir: Path, run_id: str) -> list[str]:
    """Addresses of this machine's other peers in a run, whose state folders lie beside this one.
    Who was killed may be among them."""
    found: list[str] = []
    for path in sorted(state_dir.absolute().parent.glob(f"*/{RUNNING_FILE}"))[:MAX_KNOWN]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open("rb") as file:
                said = json.loads(file.read(MAX_KNOWN_BYTES))
            if said["run_id"] == run_id and path.parent != state_dir.absolute():
                found.append(str(said["address"]))
    return found


async def find_living(
    transport: Transport, known: KnownPeers, run_id: str, beside: Sequence[str] = ()
) -> list[str]:
    """Who of a run that is to be started is there already, from another time or `beside` this peer
    (addresses): peer ids."""
    met: list[str] = []
    if known.run_id == run_id:
        known.teach(transport)
        met = known.addresses()
    for address in [*met, *beside]:
        try:
            peer_id = await transport.dial(address, timeout_s=REJOIN_TIMEOUT_S)
            reply = await fetch_spec(transport, peer_id, timeout_s=REJOIN_TIMEOUT_S)
        except SwarmnetError as e:
            log.debug("%s: %s", address, e)
            continue
        if reply.run_id == run_id:
            return [peer_id]
    return []


async def look_for_others(known: KnownPeers, gossip: Gossip) -> None:
    """Until cancelled: while this machine is alone in the run, after a start when nobody answered
    or a long cut of its link, calls those whom it has met before, more and more seldom."""
    own, loop = gossip.own, asyncio.get_running_loop()
    pause_s = FIRST_WAIT_S
    while True:
        await asyncio.sleep(pause_s)
        live = gossip.view.live(loop.time())
        if any(machine_of(r.peer_id) != machine_of(own.peer_id) for r in live):
            pause_s = FIRST_WAIT_S
            continue
        pause_s = min(2 * pause_s, LONGEST_WAIT_S)
        for peer_id in await find_living(gossip.transport, known, own.run_id):
            log.warning("%s answers again; on with the others", peer_id[-8:])
            with contextlib.suppress(SwarmnetError):
                await gossip.exchange(peer_id)


def learn_others(transport: Transport, addresses: Sequence[str], known: str) -> list[str]:
    """Makes the other addresses of a command line known; returns their peer ids."""
    others: list[str] = []
    for address in addresses:
        peer_id = address.rpartition("/p2p/")[2]
        if peer_id not in (known, transport.peer_id, *others):
            transport.learn(peer_id, [address])
            others.append(peer_id)
    return others


async def fetch_run(transport: Transport, peer_id: str) -> RunSpec:
    """The spec of the run that a peer belongs to, its hash checked."""
    try:
        reply = await fetch_spec(transport, peer_id)
    except WrongVersion as e:
        raise UserError(str(e)) from None
    except SwarmnetError as e:
        raise AddressError(f"peer {peer_id[-8:]} does not tell its run: {e}") from None
    spec = RunSpec.from_canonical(reply.spec)
    if spec.run_id != reply.run_id:
        raise UserError(
            f"peer {peer_id[-8:]} gave a spec that does not match its hash; join another"
        )
    return spec
