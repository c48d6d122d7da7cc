"""The model of a round that has passed: peers give it from their checkpoints, so that a slow link
has time for it.

Whoever fetches it says every so often which round that is, and peers keep the checkpoint meanwhile.
Digests come with the offers; what most peers of a stage say holds. A peer that is silent says
nothing about what it has: it is asked again, as long as the run knows of it, and only answers tell
that nothing is saved.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from swarmnet.errors import (
    Busy,
    NotReady,
    Stale,
    SwarmnetError,
    TransportError,
    Unreachable,
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
from swarmnet.protocol.membership.records import DIGEST_BYTES, LEFT, OBSERVING, Record
from swarmnet.protocol.timing import ANSWER_S, LAPSES, PATIENCE_S, UPKEEP_S
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.timing import LOOK_LESS_S, RETRY_S, SHARD_TIMEOUT_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.recovery")

SAY_KEEP_S = UPKEEP_S
"""Between two times that those who fetch a checkpoint say so."""
KEEP_S = LAPSES * SAY_KEEP_S
"""How long it is kept for them, after one has last said so."""
AT_ONCE = 4
"""Shards that are fetched at a time."""
MAX_OFFERED = 64
MAX_KEPT = 4
"""Rounds that are kept for others at a time: each takes the disk space of a checkpoint."""
OVERDUE_S = SAY_KEEP_S + ANSWER_S
"""One of which nobody has spoken for so long gives place to another, where all places are taken:
whoever fetched it has it, or has ended. It protects a round that is wanted from those of earlier
fetches (tests/swarm/recovery/test_saved_models.py)."""

NAMED = 4
"""Silent peers that a line for people names."""
NOTHING = SavedReply((), {})

Key = tuple[int, int]
"""(history, round)."""


class SavedModels:
    """Gives the checkpoints of this peer to those that fetch the model."""

    def __init__(
        self, transport: Transport, gossip: Gossip, checkpoints: Checkpoints, worker: Worker
    ) -> None:
        """`worker`: a thread of the disk."""
        self._gossip = gossip
        self._checkpoints = checkpoints
        self._worker = worker
        self._serving = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._kept: dict[int, float] = {}
        """Rounds, and when somebody has last said that each is to be kept."""
        serve(transport, SAVED, self._on_saved)
        serve(transport, SAVED_SHARD, self._on_shard)

    def kept_now(self) -> frozenset[int]:
        """Rounds that somebody is fetching."""
        now = asyncio.get_running_loop().time()
        self._kept = {r: said for r, said in self._kept.items() if now < said + KEEP_S}
        return frozenset(self._kept)

    async def _on_saved(self, request: Request[SavedRequest]) -> Message[SavedReply]:
        wanted = request.message.body
        if wanted.keep >= 0:
            self._keep(wanted.keep)
        return Message(await self._worker.run(self._offers))

    def _keep(self, round_index: int) -> None:
        now = asyncio.get_running_loop().time()
        if round_index not in self.kept_now() and len(self._kept) >= MAX_KEPT:
            oldest = min(self._kept, key=self._kept.__getitem__)
            if now < self._kept[oldest] + OVERDUE_S:
                return
            del self._kept[oldest]
        self._kept[round_index] = now

    def _offers(self) -> SavedReply:
        found = []
        for saved in list(self._checkpoints.available())[-MAX_OFFERED:]:
            digests = self._checkpoints.digests(saved.round)
            found.append(SavedRound(saved.round, saved.history, saved.stage, digests))
        kept = tuple(sorted(self._kept))
        return SavedReply(tuple(found), dict(self._checkpoints.held_out()), kept)

    async def _on_shard(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        fetch = request.message.body
        if self._waiting >= 4 * AT_ONCE:
            raise Busy("serving others", backlog_s=LOOK_LESS_S)
        self._waiting += 1
        try:
            async with self._serving:
                values = await self._worker.run(
                    lambda: self._checkpoints.shard(fetch.round, fetch.stage, fetch.shard)
                )
        finally:
            self._waiting -= 1
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
class Offer:
    """A round that peers have whole."""

    key: Key
    digests: list[bytes] = field(default_factory=list)
    """Of each stage."""
    holders: list[list[str]] = field(default_factory=list)
    """Peers that have each stage so."""

    @property
    def peers(self) -> list[str]:
        """All holders."""
        return sorted({peer_id for holders in self.holders for peer_id in holders})

    def drop(self, stage: int, peer_id: str) -> None:
        """A peer does not have a stage, as it turns out; other calls may have found so too."""
        self.holders[stage] = [p for p in self.holders[stage] if p != peer_id]


Choose = Callable[[Sequence[Key], Mapping[int, float]], Key | None]
"""Of the rounds to be had, the newest first, and the held-out losses by round."""


@dataclass
class SavedModelFetch:
    """Fetches the model of a saved round."""

    transport: Transport
    gossip: Gossip
    shard_sizes: Sequence[Sequence[int]]
    """Elements of each shard of each stage."""
    limits: Limits
    parts: Parts
    worker: Worker
    """A thread for the disk."""
    say: Callable[[str], None] = log.info

    def __post_init__(self) -> None:
        self._asking: dict[str, asyncio.Task[bool]] = {}
        """By peer, the question that it has not answered yet."""
        self._answers: dict[str, SavedReply] = {}
        """By peer, what it said last."""
        self._refused: set[tuple[str, Key, int]] = set()
        """Stages of a round that a peer offers and does not have, as it turned out."""
        self._was_gone = False
        """A round went while it was fetched: peers had no place to keep it."""
        self._said_at = -math.inf
        self.is_saved = False
        """Some peer keeps checkpoints, if not of a whole round."""

    async def fetch(
        self, choose: Choose
    ) -> tuple[Key, list[list[Array]], Mapping[int, float]] | None:
        """The round, its shards by stage, and the held-out losses; None where all peers have
        answered, and no round is to be had whole. As long as some have not, waits for them. What
        has come stays in `parts` when this ends otherwise. Raises `UserError` where the run has
        ended, and what `choose` raises."""
        try:
            while (found := await self._find(choose)) is not None:
                offer, losses = found
                try:
                    return offer.key, await self._fetch(offer), losses
                except Stale as e:
                    self.say(f"round {offer.key[1]}: {e}; looking again")
                    await asyncio.sleep(RETRY_S)
            return None
        finally:
            await self._ask_nobody()

    # ---- which round ------------------------------------------------------------------------

    async def _find(self, choose: Choose) -> tuple[Offer, Mapping[int, float]] | None:
        """The round that is chosen of those that peers offer now. None where there is none, and
        nobody is left who might have one."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            silent = await self._ask_all()
            offers, losses = self._offers()
            begun = set(await self.worker.run(self.parts.begun))
            is_patient = loop.time() < began + PATIENCE_S
            # Parts that have come are thrown away for another round only where theirs is gone.
            if begun & offers.keys() or not (begun and silent and is_patient):
                key = self._choose(choose, offers, begun, losses, may_wait=bool(silent))
                if key is not None:
                    return offers[await self._keepable(key, offers, choose, losses)], losses
                # Answers of different moments may have no round in common, though peers do.
                if not silent and (offers or not (is_patient and self._is_everywhere())):
                    return None
            self._tell(silent, loop.time())
            await self.gossip.changed.wait(LOOK_LESS_S)

    @staticmethod
    def _choose(
        choose: Choose,
        offers: Mapping[Key, Offer],
        begun: Collection[Key],
        losses: Mapping[int, float],
        *,
        may_wait: bool,
    ) -> Key | None:
        """One of which parts have come, where that will do. Raises what `choose` raises where
        waiting helps no more."""
        whole = sorted(offers, reverse=True)
        try:
            with suppress(UserError):
                if key := choose([key for key in whole if key in begun], losses):
                    return key
            return choose(whole, losses)
        except UserError:
            if may_wait:
                return None
            raise

    async def _keepable(
        self, key: Key, offers: Mapping[Key, Offer], choose: Choose, losses: Mapping[int, float]
    ) -> Key:
        """Says that a round is to be kept. Where one has gone before all of it was here, and some
        stage's holders have no place for this one: one that they do keep, if that suits."""
        await asyncio.gather(*(self._ask(p, key[1]) for p in offers[key].peers))
        if not self._was_gone or self._keeps(offers[key]):
            return key
        kept = [k for k in sorted(offers, reverse=True) if self._keeps(offers[k])]
        with suppress(UserError):
            return choose(kept, losses) or key
        return key

    def _keeps(self, offer: Offer) -> bool:
        """Some holder of each stage keeps the round. Peers of earlier versions do not say."""
        kept = [{p for p in held if offer.key[1] in self._kept_by(p)} for held in offer.holders]
        return all(kept)

    def _kept_by(self, peer_id: str) -> Collection[int]:
        answer = self._answers.get(peer_id)
        return () if answer is None else answer.kept

    # ---- who has what -----------------------------------------------------------------------

    def _holders(self) -> list[Record]:
        """Peers that may have something, those out of reach too: they may come back. Raises
        `UserError` where the run has ended."""
        known = [r for r in self.gossip.view.records() if r.state != OBSERVING]
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
        return [r.peer_id for r in holders if r.peer_id not in self._answers]

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
            self._answers[peer_id] = reply.body
            self.is_saved = True
            return True
        except (TransportError, Busy) as e:
            self._answers.pop(peer_id, None)
            log.debug("what %s has saved: %s", peer_id[-8:], e)
            return False
        except SwarmnetError as e:
            self._answers[peer_id] = NOTHING
            log.debug("%s has saved nothing: %s", peer_id[-8:], e)
            return True

    def _offers(self) -> tuple[dict[Key, Offer], dict[int, float]]:
        """By what peers have said last: rounds of which every stage is to be had, and losses."""
        said: dict[tuple[Key, int], Counter[bytes]] = {}
        holding: dict[tuple[Key, int, bytes], list[str]] = {}
        losses: dict[int, float] = {}
        for peer_id, reply in sorted(self._answers.items()):
            for one in reply.rounds:
                key = (one.history, one.round)
                if not self._fits(one) or (peer_id, key, one.stage) in self._refused:
                    continue
                said.setdefault((key, one.stage), Counter())[one.digests] += 1
                holding.setdefault((key, one.stage, one.digests), []).append(peer_id)
            losses |= reply.held_out
        offers = {}
        stages = range(len(self.shard_sizes))
        for key in {key for key, _ in said}:
            if all((key, k) in said for k in stages):
                digests = [max(sorted(said[key, k]), key=said[key, k].__getitem__) for k in stages]
                holders = [holding[key, k, digests[k]] for k in stages]
                offers[key] = Offer(key, digests, holders)
        return offers, losses

    def _is_everywhere(self) -> bool:
        """Something is saved of each stage."""
        stages = {one.stage for reply in self._answers.values() for one in reply.rounds}
        return stages >= set(range(len(self.shard_sizes)))

    def _fits(self, one: SavedRound) -> bool:
        stages = self.shard_sizes
        return one.stage < len(stages) and len(one.digests) == DIGEST_BYTES * len(stages[one.stage])

    def _tell(self, silent: Sequence[str], now: float) -> None:
        """One line now and then about what is waited for."""
        if not silent or now < self._said_at + PATIENCE_S:
            return
        self._said_at = now
        names = ", ".join(f"...{peer_id[-8:]}" for peer_id in silent[:NAMED])
        more = f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
        self.say(f"waiting for an answer of {names}{more}: the others do not have all stages")

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
        digest = offer.digests[k][DIGEST_BYTES * j : DIGEST_BYTES * (j + 1)]
        async with at_once:
            known = await self.worker.run(lambda: self.parts.get(k, j))
            if known is not None and _is_right(known, self.shard_sizes[k][j], digest):
                return known
            values = await self._from_holders(offer, k, j, digest)
            await self.worker.run(lambda: self.parts.put(k, j, values))
            return values

    async def _from_holders(self, offer: Offer, k: int, j: int, digest: bytes) -> Array:
        """Tries again for a while where a holder cannot give it. Raises `Stale`."""
        loop = asyncio.get_running_loop()
        turn, until = j, math.inf
        while loop.time() < until:
            holders = [p for p in offer.holders[k] if self.gossip.view.get(p) is not None]
            if not holders:
                self._was_gone = True
                raise Stale("it is not to be had any more")
            near = [p for p in holders if self.gossip.view.reaches(p, loop.time())]
            peer_id = (near or holders)[turn % len(near or holders)]
            turn += 1
            try:
                reply = await self._call(peer_id, FetchRequest(offer.key[1], k, j))
            except NotReady:
                self._refuse(offer, k, peer_id)
                continue
            except SwarmnetError as e:
                log.debug("shard %d of stage %d from %s: %s", j, k, peer_id[-8:], e)
                until = min(until, loop.time() + PATIENCE_S)
                backlog_s = e.backlog_s if isinstance(e, Busy) else 0.0
                await asyncio.sleep(min(max(RETRY_S, backlog_s), PATIENCE_S))
                continue
            values = reply.arrays[0] if len(reply.arrays) == 1 else None
            if values is not None and _is_right(values, self.shard_sizes[k][j], digest):
                return values
            log.debug("shard %d of stage %d from %s is wrong", j, k, peer_id[-8:])
            self._refuse(offer, k, peer_id)
        raise Stale("nobody gives it now")

    async def _call(self, peer_id: str, wanted: FetchRequest) -> Message[FetchReply]:
        """Of `saved_shard`. A callee that stands still for some seconds goes on with its answer, so
        the call ends only where it has been gone for longer."""
        loop, view = asyncio.get_running_loop(), self.gossip.view
        calling = asyncio.ensure_future(
            call(self.transport, peer_id, SAVED_SHARD, Message(wanted), timeout_s=SHARD_TIMEOUT_S)
        )
        try:
            while not (await asyncio.wait([calling], timeout=ANSWER_S))[0]:
                self.gossip.probe(peer_id)
                if view.gone_s(peer_id, loop.time()) >= PATIENCE_S:
                    raise Unreachable(f"{peer_id[-8:]} has fallen silent")
            return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    def _refuse(self, offer: Offer, stage: int, peer_id: str) -> None:
        offer.drop(stage, peer_id)
        self._refused.add((peer_id, offer.key, stage))


def _is_right(values: Array, size: int, digest: bytes) -> bool:
    fits = values.dtype == "float32" and values.shape == (size,)
    return fits and xxhash.xxh3_64_digest(values.data) == digest
