"""The way into a run: of a peer that joins one, starts one, or comes back to the one it knows."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from swarmnet.identity import Identity as Key
from swarmnet.protocol.membership.addresses import in_turns, peer_of
from swarmnet.runtime.joining.beside import Beside, peers_beside, tell_run
from swarmnet.runtime.joining.find import FILE_MARK, WaysIn, find_living, find_run
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.runtime.joining.starting import StartedRun, start_run
from swarmnet.runtime.net import Net, open_net
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.run_files import RunFiles
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

KEY_FILE = "identity.key"
"""In the state folder."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A run, and how a peer comes into it."""

    key: Key
    net: Net
    spec: RunSpec
    known: KnownPeers
    ways: WaysIn
    neighbours: list[str]
    """Ids of peers of the run that have answered; empty where this one begins it."""
    beside: list[Beside]
    """Peers on this machine; looked for where this one starts a run."""
    files: RunFiles
    """Of the run; all are here."""
    model_folder: str = ""
    """With the weights that the run begins from, where this peer starts it."""
    adapter_folder: str = ""
    """Of the adapter that the run begins from, likewise."""
    continues: str = ""
    """`[model] continues` as it is written, likewise."""


async def enter(options: PeerOptions, stack: AsyncExitStack) -> Entry:
    """Opens the transport and finds the run, or its spec. `stack` closes what is opened. Raises
    `UserError`, `AddressError` or `SpecError`."""
    key = Key.load_or_create(options.state_dir / KEY_FILE)
    started = await asyncio.to_thread(_start, options)
    net = await open_net(
        options.transport,
        key,
        host=options.host,
        port=options.port,
        announce=options.announce,
        direct_port=options.direct_port if options.direct else None,
    )
    stack.push_async_callback(net.transport.close)
    known = KnownPeers.load(options.state_dir)
    known.own = net.transport.addresses()
    given = list(options.join)
    if options.ready_file is not None and options.ready_file.is_dir():
        given.append(f"{FILE_MARK}{options.ready_file}")
    ways = WaysIn(known, given)
    beside: list[Beside] = []
    if started is None:
        found, spec = await find_run(
            net.transport, options.join, known, _say, patience_s=options.patience_s
        )
        neighbours = [found]
    else:  # it may be there already: this peer started it once, and starts again
        spec = started.spec
        beside = await asyncio.to_thread(peers_beside, options.state_dir, options.ready_file)
        neighbours = await _find_again(started, key, net, known, beside)
    if known.run_id != spec.run_id:
        known.run_id, known.peers = spec.run_id, {}
    own = net.transport.addresses()
    stack.callback(tell_run(options.state_dir, spec.run_id, spec.name, own))
    files = RunFiles(options.state_dir, spec.files)
    if started is not None:
        await asyncio.to_thread(files.save, started.contents)
    await files.fetch(net.transport, neighbours)
    of_own = started or StartedRun(spec)
    return Entry(
        key,
        net,
        spec,
        known,
        ways,
        neighbours,
        beside,
        files,
        of_own.model,
        of_own.adapter,
        of_own.continues,
    )


def _start(options: PeerOptions) -> StartedRun | None:
    if options.spec is None:
        return None
    return start_run(
        options.spec,
        rounds=options.rounds,
        seed=options.seed,
        builder=options.builder,
        data=options.data,
        tokenizer=options.tokenizer,
        reads_data=options.feed,
        state_dir=options.state_dir,
    )


async def _find_again(
    started: StartedRun, key: Key, net: Net, known: KnownPeers, beside: list[Beside]
) -> list[str]:
    """Peers of a run that this peer starts, where it is alive already."""
    spec = started.spec
    ours = in_turns(b.addresses for b in beside if b.run_id == spec.run_id)
    ours = [a for a in ours if peer_of(a) != key.peer_id]
    neighbours = await find_living(net.transport, known, spec.run_id, ours)
    if neighbours and known.run_id != spec.run_id:
        _say("this run is alive beside this peer already: joining it")
    if not neighbours and known.run_id == spec.run_id and known.peers:
        _say(f"none of the {len(known.peers)} peers met before answers; it goes on looking")
    return neighbours


def _say(line: str) -> None:
    log.warning("%s", line)
