"""How a peer finds its run: the addresses that a person gave, and those it has met before.

A volunteer's machine boots before its router does, and a run's first peer may be away for a night.
So a peer that cannot reach anybody says why, in one line, and tries again, more and more seldom,
until somebody answers. What no waiting can mend (a malformed address, another version) is said at
once. All addresses are tried, those of peers met before too, and the first that answers wins.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.causes import Failures, cause_of
from swarmnet.errors import (
    AddressError,
    NotReady,
    SpecError,
    SwarmnetError,
    UserError,
    WrongAddress,
    WrongRun,
)
from swarmnet.files import lines_of, text_of
from swarmnet.plurals import counted
from swarmnet.protocol.dialing.addresses import by_peer, in_turns, peer_of
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.runtime.joining.racing import LOOK_S, NoneAnswers, nothing_new, race
from swarmnet.runtime.joining.ready import Written, files_in, parse_ready
from swarmnet.runtime.text import listed, shown_run
from swarmnet.spec import RunSpec
from swarmnet.swarm.initial.files import fetch_spec
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")

DIAL_TIMEOUT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0
"""Between two rounds of attempts; it doubles."""
MAX_ADDRESS_FILE_BYTES = 1 << 20
MAX_REASON_CHARS = 300
OTHERS_S = 2.0
"""For so long a joiner looks whether other addresses lead to another run."""
REJOIN_S = 8.0
"""A peer that starts a run looks for so long whether that run is alive already."""
READ_FILES_EVERY_S = 5.0
FILE_MARK = "@"
"""`--join @FILE`: the addresses are in a file, one a line, or in the ready files of a folder."""


class SeveralRuns(UserError):
    """The addresses of `--join` lead to different runs."""


class Named:
    """What `--join` names: addresses, and files and folders that have some."""

    def __init__(self, given: Sequence[str]) -> None:
        self.given = tuple(given)
        self.run_ids: dict[str, str] = {}
        """Of peers by their id, as their ready files say."""
        self._written = Written()

    @property
    def has_files(self) -> bool:
        """What it names may be others tomorrow."""
        return any(text.startswith(FILE_MARK) for text in self.given)

    def read(self) -> tuple[list[str], list[str]]:
        """Addresses, and the files and folders that have none. Raises `UserError`."""
        self._written.since(self._files())  # before they are read: what comes later is news
        lists: list[list[str]] = []
        missing: list[str] = []
        for text in self.given:
            if not text.startswith(FILE_MARK):
                lists.append([text])
                continue
            path = Path(text[len(FILE_MARK) :])
            of_files = [self._lines(file) for file in _files_of(path)]
            if not any(of_files):
                missing.append(str(path))
            lists.append(in_turns(of_files))
        return [a for addresses in lists for a in addresses], missing

    def news(self) -> list[str]:
        """Addresses in files that have been written since the last look. Raises `UserError`."""
        written = self._written.since(self._files())
        return in_turns([self._lines(file) for file in written])

    def _files(self) -> list[Path]:
        paths = [Path(t[len(FILE_MARK) :]) for t in self.given if t.startswith(FILE_MARK)]
        return [file for path in paths for file in _files_of(path)]

    def _lines(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_ADDRESS_FILE_BYTES)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from None
        if data.lstrip().startswith(b"{"):
            try:
                ready = parse_ready(data)
            except (ValueError, KeyError, TypeError):
                return []
            self.run_ids[ready.peer_id] = ready.run_id
            return list(ready.addresses)
        return lines_of(text_of(data, path))


def _files_of(path: Path) -> list[Path]:
    return files_in(path) if path.is_dir() else [path]


async def read_addresses(given: Sequence[str], *, patience_s: float | None = None) -> list[str]:
    """`--join` with the files that it names read; waits for a file that is not there yet. Raises
    `AddressError` after `patience_s`."""
    return await _read_when_there(Named(given), patience_s)


async def _read_when_there(named: Named, patience_s: float | None) -> list[str]:
    backoff = Backoff(patience_s)
    while True:
        found, missing = named.read()
        if found or not missing:
            return found
        await backoff.wait(f"no address in {', '.join(missing)} yet", named.news)


@dataclass
class Backoff:
    """Waits longer each time, and says why."""

    patience_s: float | None
    """None = for ever."""
    rng: random.Random = field(default_factory=random.Random)
    _next_s: float = FIRST_WAIT_S
    _began: float | None = None

    async def wait(self, reason: str, news: Callable[[], Sequence[str]] = nothing_new) -> None:
        """Until its time is over, or there are `news`. Raises `AddressError` with the reason when
        patience is at its end."""
        loop = asyncio.get_running_loop()
        self._began = loop.time() if self._began is None else self._began
        wait_s = self._next_s * self.rng.uniform(0.8, 1.2)
        self._next_s = min(2 * self._next_s, LONGEST_WAIT_S)
        if self.patience_s is not None:
            left_s = self._began + self.patience_s - loop.time()
            if left_s <= 0:
                raise AddressError(reason)
            wait_s = min(wait_s, left_s)
        log.warning("%s; trying again in %.0f s (Ctrl-C stops)", reason, wait_s)
        end = loop.time() + wait_s
        while (left_s := end - loop.time()) > 0 and not news():  # noqa: ASYNC110
            await asyncio.sleep(min(LOOK_S, left_s))


async def dial_any(
    transport: Transport, addresses: Sequence[str], timeout_s: float = DIAL_TIMEOUT_S
) -> str:
    """The peer id behind the first address that answers. Raises `AddressError` with the reason of
    each, and `UserError` for what waiting does not mend."""

    async def dial(address: str) -> str:
        return await transport.dial(address, timeout_s=timeout_s)

    try:
        return await race(dial, addresses)
    except NoneAnswers as e:
        raise _as_error(e) from None


def _as_error(failed: NoneAnswers) -> UserError:
    """In one line, with what to do; what no waiting mends comes before what it may."""
    for e in failed.reasons.values():
        if isinstance(e, UserError) and not isinstance(e, AddressError):
            return e
    causes = {address: cause_of(e) for address, e in failed.reasons.items()}
    for address, cause in causes.items():
        if cause is not None and cause.lasts:
            e = failed.reasons[address]
            return UserError(f"{address}: {cause.says} ({e}); {cause.mend}")
    parts = [
        f"{address}: {e}" if cause is None else f"{address}: {cause.says} ({e})"
        for (address, e), cause in zip(failed.reasons.items(), causes.values(), strict=True)
    ]
    mend = Failures(failed.reasons.values()).mend
    text = listed(parts, "; ", MAX_REASON_CHARS) or "no address was given"
    return AddressError(f"{text}; {mend}" if mend else text)


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises `WrongAddress` for one that no waiting makes right."""
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error as MultiaddrError

    for address in addresses:
        try:
            if "/p2p/" not in address:
                raise ValueError("it has no /p2p/ and peer id at its end")
            Multiaddr(address)
        except (ValueError, LookupError, MultiaddrError) as e:
            raise WrongAddress(
                f"{address[:128]!r} is no address of a peer ({str(e)[:80]}); one looks like "
                "/ip4/203.0.113.7/tcp/4001/p2p/12D3Koo..."
            ) from None


async def find_run(
    transport: Transport,
    given: Sequence[str],
    known: KnownPeers,
    *,
    patience_s: float | None = None,
) -> tuple[str, RunSpec]:
    """A peer id and the run that it trains: of the addresses asked for, and of those known. Tries
    until one answers. Where the addresses lead to several runs it is the one that this peer was in
    before; else none, for a choice among them is a person's. Raises `AddressError` after
    `patience_s`, and `UserError` for what waiting does not mend."""
    backoff, named = Backoff(patience_s), Named(given)

    async def ask(address: str) -> tuple[str, RunSpec]:
        peer_id = await transport.dial(address, timeout_s=DIAL_TIMEOUT_S)
        return peer_id, await fetch_run(transport, peer_id)

    def others_of(addresses: Sequence[str]) -> list[str]:
        """The own file may be among those of a folder."""
        return [a for a in addresses if peer_of(a) != transport.peer_id]

    while True:
        # Read anew each time: a first peer that comes back may have another address.
        addresses = await _read_when_there(named, patience_s)
        check_addresses([a for a in given if not a.startswith(FILE_MARK)])
        others = known.also(addresses)
        asked = others_of([*addresses, *others])
        try:
            found = await race(ask, asked, lambda: others_of(named.news()))
            found_too = await _of_other_runs(transport, found, others_of(addresses), named.run_ids)
            return _the_one([found, *found_too], known)
        except NoneAnswers as e:
            error = _as_error(e)
            number = len(by_peer(asked))
            text = (
                f"none of {counted(number, 'known peer')} answers: {error}"
                if others
                else str(error)
            )
            if not isinstance(error, AddressError):
                raise error from None
        except SeveralRuns as e:
            if not named.has_files:  # what is written there may be of one run later
                raise
            text = str(e)
        await backoff.wait(text, named.news)


async def _of_other_runs(
    transport: Transport,
    found: tuple[str, RunSpec],
    addresses: Sequence[str],
    run_ids: Mapping[str, str],
) -> list[tuple[str, RunSpec]]:
    """A peer of each other run that is alive behind `addresses`, within `OTHERS_S`. Those whose
    ready files say that they are of the run that was found (`run_ids`) are not asked."""
    peer_id, spec = found
    asked = [
        a for a in addresses if peer_of(a) != peer_id and run_ids.get(peer_of(a)) != spec.run_id
    ]

    async def ask(address: str) -> tuple[str, RunSpec]:
        other = await transport.dial(address, timeout_s=OTHERS_S)
        return other, await fetch_run(transport, other)

    tasks = [asyncio.ensure_future(ask(address)) for address in asked]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=OTHERS_S)
        answered = [t.result() for t in tasks if t.done() and t.exception() is None]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    by_run = {other.run_id: (p, other) for p, other in answered if other.run_id != spec.run_id}
    return list(by_run.values())


def _the_one(found: Sequence[tuple[str, RunSpec]], known: KnownPeers) -> tuple[str, RunSpec]:
    """The run to join, of those found. Raises `SeveralRuns`."""
    if len(found) == 1:
        return found[0]
    runs = [shown_run(spec.name, spec.run_id) for _, spec in found]
    what = f"the addresses given lead to {counted(len(found), 'run')}, {' and '.join(runs)}"
    for one, text in zip(found, runs, strict=True):
        if one[1].run_id == known.run_id:
            log.warning("%s; this peer was in %s before and goes on with it", what, text)
            return one
    raise SeveralRuns(f"{what}: stop all but one of them, or give the addresses of one")


async def find_living(
    transport: Transport,
    known: KnownPeers,
    run_id: str,
    beside: Sequence[str] = (),
) -> list[str]:
    """Who of a run that is to be started is there already, from another time or `beside` this peer
    (addresses): a peer id, or nobody."""

    async def ask(address: str) -> str:
        peer_id = await transport.dial(address, timeout_s=REJOIN_S)
        reply = await fetch_spec(transport, peer_id, timeout_s=REJOIN_S)
        if reply.run_id != run_id:
            raise WrongRun("it trains another run")
        return peer_id

    met = known.addresses() if known.run_id == run_id else []
    try:
        async with asyncio.timeout(REJOIN_S):
            return [await race(ask, in_turns([met, list(beside)]))]
    except (NoneAnswers, TimeoutError) as e:
        log.debug("nobody of this run is alive: %s", e)
        return []


@dataclass
class WaysIn:
    """Where members of the run may be that this peer does not see, for as long as it lives: whom it
    has met, and what the files of `--join` and the folder of ready files say now."""

    known: KnownPeers
    given: Sequence[str]
    _found: dict[str, list[str]] = field(default_factory=dict)

    def remembered(self) -> dict[str, Sequence[str]]:
        """Addresses by peer id; those of the files, which their peers keep true, first."""
        found: dict[str, Sequence[str]] = dict(self._found)
        for peer_id, addresses in self.known.latest_first().items():
            found[peer_id] = in_turns([[*found.get(peer_id, ()), *addresses]])
        return found

    async def read(self) -> None:
        """Reads the files as they are now."""
        try:
            found, _ = await asyncio.to_thread(Named(self.given).read)
            self._found = by_peer(found)
        except UserError as e:
            log.debug("%s", e)

    async def keep(self) -> None:
        """Reads them now and then, until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(READ_FILES_EVERY_S)


async def fetch_run(transport: Transport, peer_id: str) -> RunSpec:
    """The spec of the run that a peer belongs to, its hash checked."""
    try:
        reply = await fetch_spec(transport, peer_id)
    except NotReady as e:  # of a peer that is in no run yet
        raise AddressError(f"the run is not known yet: {Failures([e]).told()}") from None
    except SwarmnetError as e:
        raise Failures([e]).as_error("the peer does not tell its run", AddressError) from None
    try:
        spec = RunSpec.from_canonical(reply.spec)
    except SpecError as e:
        raise UserError(
            f"peer {peer_id[-8:]} gave a spec that is wrong: {e}; join another"
        ) from None
    if spec.run_id != reply.run_id:
        raise UserError(
            f"peer {peer_id[-8:]} gave a spec that does not match its hash; join another"
        )
    if spec.open_keys:  # each version of the program might fill them in otherwise
        raise UserError(
            f"peer {peer_id[-8:]} gave a spec that leaves {spec.open_keys[0]} open; join another"
        )
    return spec
