"""The model of a round that has passed: peers give it from their checkpoints, so that a slow link
has time for it.

`protocol.saved_rounds` decides which rounds are kept for others, and which one is fetched. A peer
that is silent is asked again, as long as the run knows of it, and only answers tell that nothing is
saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from swarmnet.causes import Failures, is_closed
from swarmnet.errors import (
    Busy,
    Gone,
    NotReady,
    Stale,
    SwarmnetError,
    TransportError,
    UserError,
)
from swarmnet.methods.state import (
    SAVED,
    SAVED_SHARD,
    FetchReply,
    FetchRequest,
    SavedReply,
    SavedRequest,
    SavedRound,
)
from swarmnet.ports import Checkpoints, Worker
from swarmnet.protocol.generation import REFUSED_S
from swarmnet.protocol.membership.records import LEFT, OBSERVING, Record
from swarmnet.protocol.moments import LONG_AGO, NEVER, Deadline
from swarmnet.protocol.saved_rounds import (
    SAY_KEEP_S,
    Choose,
    Fetch,
    KeptRounds,
    Key,
    NothingToHave,
    Offer,
    SavedRounds,
)
from swarmnet.protocol.timing import ANSWER_S, PATIENCE_S
from swarmnet.swarm.calls import ServingQueue, call, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_LESS_S, RETRY_S, SHARD_TIMEOUT_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.recovery")
told = logging.getLogger("swarmnet.export")
"""Of what the person who fetches a model waits for."""

AT_ONCE = 4
"""Shards that are fetched at a time."""
MAX_OFFERED = 64
MAX_ASKING = 64
"""Peers that may wait to hear what is on the disk, which is read for each of them."""
NAMED = 4
"""Silent peers that a line for people names."""
NOTHING = SavedReply((), {})


class SavedModels:
    """Gives the checkpoints of this peer to those that fetch the model."""

    def __init__(
        self, transport: Transport, gossip: Gossip, checkpoints: Checkpoints, worker: Worker
    ) -> None:
        """`worker`: a thread of the disk."""
        self._gossip = gossip
        self._checkpoints = checkpoints
        self._worker = worker
        self._queue = ServingQueue(AT_ONCE, 4 * AT_ONCE)
        self._questions = ServingQueue(1, MAX_ASKING)
        self.kept = KeptRounds()
        serve(transport, SAVED, self._on_saved)
        serve(transport, SAVED_SHARD, self._on_shard)

    async def _on_saved(self, request: Request[SavedRequest]) -> Message[SavedReply]:
        wanted = request.message.body
        async with self._questions.turn():
            if wanted.keep >= 0:  # at once: the next checkpoint may take its place
                saved = await self._worker.run(self._checkpoints.available)
                now, rounds = asyncio.get_running_loop().time(), {s.round for s in saved}
                self.kept.keep(wanted.keep, now, by=request.remote, saved=rounds)
            found, losses = await self._worker.run(self._offers)
        return Message(SavedReply(found, losses, self.kept.rounds))

    def _offers(self) -> tuple[tuple[SavedRound, ...], dict[int, float]]:
        """What is on the disk, and the held-out losses by round."""
        found = []
        for saved in list(self._checkpoints.available())[-MAX_OFFERED:]:
            digests = self._checkpoints.digests(saved.round)
            found.append(SavedRound(saved.round, saved.history, saved.stage, digests))
        return tuple(found), dict(self._checkpoints.held_out())

    async def _on_shard(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        fetch = request.message.body
        async with self._queue.turn():
            values = await self._worker.run(
                lambda: self._checkpoints.shard(fetch.round, fetch.stage, fetch.shard)
            )
        if values is None:
            raise NotReady("that checkpoint is not here any more")
        return Message(FetchReply(fetch.round, {}), (values,))


class Parts(Protocol):
    """What of a model has come, kept until all of it has."""

    def begin(self, key: Key) -> None:
        """Of this round; parts of another one are dropped."""

    def begun(self) -> Sequence[Key]:
        """Rounds of which parts are there."""

    def get(self, stage: int, shard: int) -> Array | None: ...

    def put(self, stage: int, shard: int, values: Array) -> None: ...


@dataclass
class SavedModelFetch:
    """Fetches the model of a saved round."""

    transport: Transport
    gossip: Gossip
    shard_sizes: Sequence[Sequence[int]]
    """Elements of each shard of each stage."""
    parts: Parts
    worker: Worker
    """A thread for the disk."""

    def __post_init__(self) -> None:
        nearest = self.gossip.view.reputation.nearest
        self._saved = SavedRounds([len(sizes) for sizes in self.shard_sizes], nearest)
        self._asking: dict[str, asyncio.Task[bool]] = {}
        """By peer, the question that it has not answered yet."""
        self._say_again = Deadline(LONG_AGO)
        self.failures = Failures()
        """Why peers do not say what they have saved, or do not give it."""
        self.is_saved = False
        """Some peer keeps checkpoints, if not of a whole round."""

    async def fetch(
        self, choose: Choose
    ) -> tuple[Key, list[list[Array]], Mapping[int, float]] | None:
        """The round, its shards by stage, and the held-out losses; None where all peers have
        answered, and no round is to be had whole. As long as some have not, waits for them. What
        has come stays in `parts` when this ends otherwise. Raises `UserError` where the run has
        ended, and what `choose` raises; `InviteError` where
        the run is closed to this peer."""
        try:
            while (found := await self._find(choose)) is not None:
                try:
                    return found.key, await self._fetch(found.offer), found.losses
                except Stale as e:
                    why = self.failures.told() or e
                    told.warning("round %d: %s; looking again", found.key[1], why)
                    await asyncio.sleep(RETRY_S)
            return None
        finally:
            await self._ask_nobody()

    async def _find(self, choose: Choose) -> Fetch | None:
        """The round that is chosen of those that peers offer now. None where there is none, and
        nobody is left who might have one."""
        loop = asyncio.get_running_loop()
        patience = Deadline.after(loop.time(), PATIENCE_S)
        refused = Deadline.after(loop.time(), REFUSED_S)
        while True:
            silent = await self._ask_all()
            self._check_admitted(has_waited=refused.is_over(loop.time()))
            begun = await self.worker.run(self.parts.begun)
            match self._saved.decide(
                choose,
                begun,
                is_silent=bool(silent),
                is_patient=not patience.is_over(loop.time()),
            ):
                case Fetch() as chosen:
                    round_index = chosen.key[1]
                    await asyncio.gather(*(self._ask(p, round_index) for p in chosen.offer.peers))
                    return self._saved.keepable(chosen, choose)
                case NothingToHave():
                    return None
            self._tell(silent, loop.time())
            await asyncio.sleep(LOOK_LESS_S)  # what others say of rounds does not come with news

    # ---- who has what -----------------------------------------------------------------------

    def _holders(self) -> list[Record]:
        """Peers that may have something, those out of reach too: they may come back. One that rests
        by its owner's wish keeps its checkpoints and gives them. Names to which no vouching leads
        are not waited for. Raises `UserError` where the run has ended."""
        view = self.gossip.view
        known = [
            r
            for r in view.records()
            if (r.state != OBSERVING or r.paused) and view.reputation.is_introduced(r.peer_id)
        ]
        staying = [r for r in known if r.state != LEFT]
        if not staying:
            what = "all its peers have left" if known else "no peer answers any more"
            raise UserError(f"the run has ended ({what}); see --state-dir")
        return staying

    async def _ask_all(self) -> list[str]:
        """Asks every peer what it has, once more; returns those that have not answered. Waits for
        those in reach, if not for long."""
        holders = self._holders()
        for record in holders:
            if record.peer_id not in self._asking:
                self._asking[record.peer_id] = asyncio.ensure_future(self._ask(record.peer_id))
        now, view = asyncio.get_running_loop().time(), self.gossip.view
        near = [self._asking[r.peer_id] for r in holders if view.reaches(r.peer_id, now)]
        await asyncio.wait(near or self._asking.values(), timeout=ANSWER_S)
        for peer_id in [p for p, task in self._asking.items() if task.done()]:
            del self._asking[peer_id]
        return self._saved.silent([r.peer_id for r in holders])

    def _check_admitted(self, *, has_waited: bool) -> None:
        """Raises `InviteError` where the run is closed to this peer: an own invite may be on its
        way to those that refuse."""
        closed = [e for e in self.failures if is_closed(e)]
        if closed and has_waited and not self.is_saved:
            raise Failures(closed).as_error("the model is not given")

    async def _ask_nobody(self) -> None:
        asking = list(self._asking.values())
        self._asking.clear()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, peer_id: str, keep: int = -1) -> bool:
        """Whether it answered. Only that says what it has: it may be there again in a moment."""
        try:
            reply = await call(
                self.transport, peer_id, SAVED, Message(SavedRequest(keep)), timeout_s=PATIENCE_S
            )
            self._saved.answered(peer_id, reply.body)
            self.failures.answered(peer_id)
            self.is_saved = True
            return True
        except SwarmnetError as e:
            self.failures.add(e, peer_id)
            if isinstance(e, (TransportError, Busy)) or is_closed(e):
                self._saved.unanswered(peer_id)
                log.debug("what %s has saved: %s", peer_id[-8:], e)
                return False
            self._saved.answered(peer_id, NOTHING)
            log.debug("%s has saved nothing: %s", peer_id[-8:], e)
            return True

    def _tell(self, silent: Sequence[str], now: float) -> None:
        """One line now and then about what is waited for."""
        if not silent or not self._say_again.is_over(now):
            return
        self._say_again = Deadline.after(now, PATIENCE_S)
        names = ", ".join(f"...{peer_id[-8:]}" for peer_id in silent[:NAMED])
        more = f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
        why = self.failures.told()
        told.warning(
            "waiting for an answer of %s%s: the others do not have all stages%s",
            names,
            more,
            f" ({why})" if why else "",
        )

    # ---- its shards -------------------------------------------------------------------------

    async def _fetch(self, offer: Offer) -> list[list[Array]]:
        """Raises `Stale` where the round is not to be had now."""
        await self.worker.run(lambda: self.parts.begin(offer.key))
        keeping = [asyncio.ensure_future(self._keep(p, offer.key[1])) for p in offer.peers]
        at_once = asyncio.Semaphore(AT_ONCE)
        fetching = [
            asyncio.ensure_future(self._shard(offer, k, j, at_once))
            for k, sizes in enumerate(self.shard_sizes)
            for j in range(len(sizes))
        ]
        try:
            shards = iter(await asyncio.gather(*fetching))
            return [[next(shards) for _ in sizes] for sizes in self.shard_sizes]
        finally:
            for task in (*keeping, *fetching):
                task.cancel()
            await asyncio.gather(*keeping, *fetching, return_exceptions=True)

    async def _keep(self, peer_id: str, round_index: int) -> None:
        """Until cancelled. A word that did not arrive is said again at once: the next checkpoint
        may take the place of the round."""
        while True:
            heard = await self._ask(peer_id, round_index)
            await asyncio.sleep(SAY_KEEP_S if heard else LOOK_LESS_S)

    async def _shard(self, offer: Offer, k: int, j: int, at_once: asyncio.Semaphore) -> Array:
        digest = offer.digest(k, j)
        async with at_once:
            known = await self.worker.run(lambda: self.parts.get(k, j))
            if known is not None and _is_right(known, self.shard_sizes[k][j], digest):
                return known
            values = await self._from_holders(offer, k, j)
            await self.worker.run(lambda: self.parts.put(k, j, values))
            return values

    async def _from_holders(self, offer: Offer, k: int, j: int) -> Array:
        """Tries again for a while where a holder cannot give it. Raises `Stale`."""
        loop = asyncio.get_running_loop()
        turn, patience = j, Deadline(NEVER)
        last: SwarmnetError = NotReady("what came was wrong")
        while not patience.is_over(loop.time()):
            holders = [p for p in offer.holders[k] if self.gossip.view.get(p) is not None]
            if not holders:
                self._saved.gone()
                raise Stale("it is not to be had any more")
            near = [p for p in holders if self.gossip.view.reaches(p, loop.time())]
            peer_id = (near or holders)[turn % len(near or holders)]
            turn += 1
            try:
                reply = await self._call(peer_id, FetchRequest(offer.key[1], k, j))
            except NotReady as e:
                self.failures.add(e, peer_id)
                self._saved.refused(offer, k, peer_id)
                continue
            except SwarmnetError as e:
                self.failures.add(e, peer_id)
                last = e
                log.debug("shard %d of stage %d from %s: %s", j, k, peer_id[-8:], e)
                patience = patience.first(Deadline.after(loop.time(), PATIENCE_S))
                backlog_s = e.backlog_s if isinstance(e, Busy) else 0.0
                await asyncio.sleep(min(max(RETRY_S, backlog_s), PATIENCE_S))
                continue
            values = reply.arrays[0] if len(reply.arrays) == 1 else None
            if values is not None and _is_right(values, self.shard_sizes[k][j], offer.digest(k, j)):
                return values
            log.debug("shard %d of stage %d from %s is wrong", j, k, peer_id[-8:])
            self._saved.refused(offer, k, peer_id)
        raise Stale(f"nobody gives it now: {Failures([last]).told()}")

    async def _call(self, peer_id: str, wanted: FetchRequest) -> Message[FetchReply]:
        """Of `saved_shard`. A callee that stands still for some seconds goes on with its answer, so
        the call ends only where it has been gone for longer."""
        loop, view = asyncio.get_running_loop(), self.gossip.view
        calling = asyncio.ensure_future(
            call(self.transport, peer_id, SAVED_SHARD, Message(wanted), timeout_s=SHARD_TIMEOUT_S)
        )
        try:
            while not (await asyncio.wait([calling], timeout=ANSWER_S))[0]:
                self.gossip.liveness.probe(peer_id)
                if view.is_gone(peer_id, PATIENCE_S, loop.time()):
                    raise Gone(f"{peer_id[-8:]} has fallen silent")
            return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)


def _is_right(values: Array, size: int, digest: bytes) -> bool:
    fits = values.dtype == "float32" and values.shape == (size,)
    return fits and xxhash.xxh3_64_digest(values.data) == digest
