"""The way into a run: of a peer that joins one, starts one, or comes back to the one it knows."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from swarmnet.errors import UserError
from swarmnet.identity import Identity as Key
from swarmnet.plurals import counted
from swarmnet.protocol.dialing.addresses import in_turns, peer_of
from swarmnet.runtime.joining.beside import (
    Beside,
    find_other_run,
    peers_at,
    peers_beside,
    refusal,
    tell_run,
)
from swarmnet.runtime.joining.find import FILE_MARK, WaysIn, find_living, find_run
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.runtime.joining.starting import Run, start_run
from swarmnet.runtime.net import Net, once_free, open_net, port_mapping
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.run_files import RunFiles
from swarmnet.runtime.state_dir import KEY_FILE
from swarmnet.spec import RunSpec
from swarmnet.transport.direct import DirectListener, port_after

log = logging.getLogger("swarmnet.peer")


@dataclass(frozen=True, slots=True)
class Entry:
    """A run, and how a peer comes into it."""

    key: Key
    net: Net
    run: Run
    known: KnownPeers
    ways: WaysIn
    neighbours: asyncio.Future[list[str]]
    """Ids of peers of the run that have answered; empty where this one begins it. Where this one
    starts the run it is alive perhaps, and looked for while the machine is made ready."""
    beside: list[Beside]
    """Peers on this machine; looked for where this one starts a run."""
    files: RunFiles
    """Of the run; all are here."""

    @property
    def spec(self) -> RunSpec:
        return self.run.spec


async def enter(options: PeerOptions, stack: AsyncExitStack) -> Entry:
    """Opens the transport and finds the run, or its spec. `stack` closes what is opened. Raises
    `UserError`, `AddressError` or `SpecError`."""
    key = Key.load_or_create(options.state_dir / KEY_FILE)
    started = await asyncio.to_thread(_start, options)
    net = await once_free(
        partial(
            open_net,
            options.transport,
            key,
            host=options.host,
            port=options.port,
            announce=options.announce,
            direct=_direct(options),
        )
    )
    stack.push_async_callback(net.transport.close)
    if options.port_map and (mapping := port_mapping(net.transport, options.host)) is not None:
        stack.push_async_callback(mapping.close)
        mapping.start()
    known = KnownPeers.load(options.state_dir, net.transport.addresses)
    given = list(options.join)
    if options.ready_file is not None and options.ready_file.is_dir():
        given.append(f"{FILE_MARK}{options.ready_file}")
    ways = WaysIn(known, given)
    beside: list[Beside] = []
    if started is None:
        found, spec = await find_run(
            net.transport, options.join, known, patience_s=options.patience_s
        )
        neighbours = asyncio.get_running_loop().create_future()
        neighbours.set_result([found])
    else:  # it may be there already: this peer started it once, and starts again
        spec = started.spec
        net.transport.set_run(spec.run_id)  # those that are asked hear which one is started
        beside = await asyncio.to_thread(peers_beside, options.state_dir)
        there = await asyncio.to_thread(peers_at, options.ready_file)
        other = await find_other_run(net.transport, there, spec.run_id)
        looking = _find_again(started, key, net, replace(known), [*beside, *there])
        neighbours = asyncio.ensure_future(looking)
        stack.push_async_callback(_end, neighbours)
        if other is not None and options.ready_file is not None and not await neighbours:
            raise UserError(refusal(options.ready_file, other[0]))
    known.begin(spec.run_id)
    own = net.transport.addresses()
    continues = spec.model.continues
    stack.callback(tell_run(options.state_dir, spec.run_id, spec.name, own, continues))
    files = RunFiles(options.state_dir, spec.files)
    if started is not None:
        await asyncio.to_thread(files.save, started.contents)
    else:
        await files.fetch(net.transport, await neighbours)
    return Entry(key, net, started or Run(spec), known, ways, neighbours, beside, files)


def _direct(options: PeerOptions) -> DirectListener | None:
    """Beside the carrier's port, so that two neighbours are forwarded, unless a person wants
    another."""
    if not options.direct:
        return None
    if options.direct_port is not None:
        return DirectListener(options.host, options.direct_port)
    return DirectListener(options.host, port_after(options.port), is_wish=True)


async def _end(looking: asyncio.Future[list[str]]) -> None:
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


def _start(options: PeerOptions) -> Run | None:
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
    started: Run, key: Key, net: Net, known: KnownPeers, beside: list[Beside]
) -> list[str]:
    """Peers of a run that this peer starts, where it is alive already."""
    spec = started.spec
    ours = in_turns(b.addresses for b in beside if b.run_id == spec.run_id)
    ours = [a for a in ours if peer_of(a) != key.peer_id]
    neighbours = await find_living(net.transport, known, spec.run_id, ours)
    if neighbours and known.run_id != spec.run_id:
        log.warning("this run is alive beside this peer already: joining it")
    if not neighbours and known.run_id == spec.run_id and known.peers:
        num = len(known.peers)
        met = "the one peer" if num == 1 else f"none of the {counted(num, 'peer')}"
        answers = "does not answer" if num == 1 else "answers"
        log.warning("%s met before %s; it goes on looking", met, answers)
    return neighbours
