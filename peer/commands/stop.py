"""`swarmnet stop`: the owner of a closed run ends it for everybody."""

from __future__ import annotations

import asyncio
import time

from peer.console import say
from peer.options import StopOptions
from swarmnet.causes import Failures
from swarmnet.errors import FinalError, NotNow, SwarmnetError
from swarmnet.identity import Identity
from swarmnet.methods.contact import STOP, StopRequest
from swarmnet.plurals import counted
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.pipeline.ending import stop_round
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.runtime.observing import JoinRun, RunObserver, join_run
from swarmnet.runtime.text import shown_run
from swarmnet.spec import RunSpec
from swarmnet.stop_order import MS, issue
from swarmnet.swarm.calls import call
from swarmnet.wire import Message

LOOK_S = 3.0
"""How long records are gathered before the last round is chosen."""
LOOK_AGAIN_S = 1.0
AT_ONCE = 32
"""Peers that are told at a time; they tell each other too."""


async def stop_run(options: StopOptions, join: JoinRun = join_run) -> None:
    """Tells all peers, and waits until they have left. Raises `FinalError` where this is not the
    owner's key, `NotNow` where no peer takes the order."""
    observer = await join(options.join, options.transport)
    try:
        spec = observer.spec
        owner = Identity.load_or_create(options.key) if options.key.exists() else None
        check_owner(spec, owner, str(options.key))
        assert owner is not None
        await _gather(observer)
        peers = _live(observer)
        replicas = [r for r in peers if r.is_replica]
        if not replicas:
            raise NotNow("no peer serves the run now; try again when one does")
        last = stop_round(replicas, spec.optimizer.end)
        order = issue(owner, spec.run_id, last, int(MS * time.time()))
        told, failures = await _tell(observer, [r.peer_id for r in peers], order)
        untold = f" ({failures.told()})" if failures else ""
        say(
            f"the run {shown_run(spec.name, spec.run_id)} ends with round {last}: {told} of "
            f"{counted(len(peers), 'peer')} have taken the order, and tell the others{untold}"
        )
        if options.wait:
            await _until_left(observer, last)
    finally:
        await observer.close()


def check_owner(spec: RunSpec, owner: Identity | None, key: str) -> None:
    """Raises `FinalError` where the run is not this key's to end. `owner`: None for no such file,
    which does not matter where nobody has such a key."""
    if spec.security.admission != "invite":
        raise FinalError(
            f"the run {spec.name!r} is open: nobody owns it, and it ends when the people of its "
            "peers stop them, or with its last round"
        )
    if owner is None:
        raise FinalError(f"there is no key {key}; name the one that closed the run")
    if spec.security.owner != owner.peer_id:
        raise FinalError(f"{key} is not the key of the run's owner {spec.security.owner}")


async def _gather(observer: RunObserver) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + LOOK_S
    while (left_s := until - loop.time()) > 0:
        await observer.wait_news(left_s)


def _live(observer: RunObserver) -> list[Record]:
    """Peers, those that rest too; not who looks only."""
    records = observer.view.live(asyncio.get_running_loop().time())
    return [r for r in records if r.state != OBSERVING or r.paused]


async def _tell(
    observer: RunObserver, peer_ids: list[str], order: StopRequest
) -> tuple[int, Failures]:
    """How many have taken the order, and why others have not. Raises `SwarmnetError` where none
    has."""
    failures, at_once = Failures(), asyncio.Semaphore(AT_ONCE)

    async def tell(peer_id: str) -> bool:
        async with at_once:
            try:
                await call(observer.transport, peer_id, STOP, Message(order), timeout_s=ANSWER_S)
                return True
            except SwarmnetError as e:
                failures.add(e, peer_id)
                return False

    told = sum(await asyncio.gather(*map(tell, peer_ids)))
    if not told:
        raise failures.as_error("no peer takes the order")
    return told, failures


async def _until_left(observer: RunObserver, last: int) -> None:
    """Says now and then how far it is."""
    said = ""
    while replicas := [r for r in _live(observer) if r.is_replica]:
        line = (
            f"round {max(r.round for r in replicas)} of {last}, {counted(len(replicas), 'peer')} "
            "still there"
        )
        if line != said:
            say(line)
            said = line
        await observer.wait_news(LOOK_AGAIN_S)
        await asyncio.sleep(LOOK_AGAIN_S)
    say("all peers have left: the run is over")
