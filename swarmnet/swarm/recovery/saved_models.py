"""The model of a round that has passed: peers give it from their checkpoints, so that a slow link
has time for it.

Whoever fetches it says every so often which round that is, and peers keep the checkpoint meanwhile.
Digests come with the offers; what most peers of a stage say holds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from swarmnet.errors import Busy, NotReady, Stale, SwarmnetError
from swarmnet.protocol.membership.records import DIGEST_BYTES
from swarmnet.protocol.timing import LAPSES, PATIENCE_S, UPKEEP_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import (
    FetchReply,
    FetchRequest,
    SavedReply,
    SavedRequest,
    SavedRound,
)
from swarmnet.swarm.ports import Checkpoints, Worker
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.timing import LOOK_LESS_S, MAX_TRIES, RETRY_S, SHARD_TIMEOUT_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message, convert

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

Key = tuple[int, int]
"""(history, round)."""


class SavedModels:
    """Gives the checkpoints of this peer to those that fetch the model."""

    def __init__(
        self, transport: Transport, gossip: Gossip, checkpoints: Checkpoints, worker: Worker
    ) -> None:
        """`worker`: a thread of the disk."""
        self._gossip, self._checkpoints, self._worker = gossip, checkpoints, worker
        self._serving = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._kept: dict[int, float] = {}
        """Rounds, and until when each is kept."""
        transport.handle("saved", self._on_saved)
        transport.handle("saved_shard", self._on_shard)

    def kept_now(self) -> frozenset[int]:
        """Rounds that somebody is fetching."""
        now = asyncio.get_running_loop().time()
        self._kept = {r: until for r, until in self._kept.items() if now < until}
        return frozenset(self._kept)

    async def _on_saved(self, request: Request) -> Message:
        wanted = convert(request.message.body, SavedRequest)
        if wanted.keep >= 0 and (wanted.keep in self.kept_now() or len(self._kept) < MAX_KEPT):
            self._kept[wanted.keep] = asyncio.get_running_loop().time() + KEEP_S
        return Message(await self._worker.run(self._offers))

    def _offers(self) -> SavedReply:
        found = []
        for saved in list(self._checkpoints.available())[-MAX_OFFERED:]:
            digests = self._checkpoints.digests(saved.round)
            found.append(SavedRound(saved.round, saved.history, saved.stage, digests))
        return SavedReply(tuple(found), dict(self._checkpoints.held_out()))

    async def _on_shard(self, request: Request) -> Message:
        fetch = convert(request.message.body, FetchRequest)
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

    def has(self, key: Key) -> bool:
        """Whether parts of this round are there."""

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

    async def fetch(
        self, choose: Choose
    ) -> tuple[Key, list[list[Array]], Mapping[int, float]] | None:
        """The round, its shards by stage, and the held-out losses; None where no round is to be had
        whole. What has come stays in `parts` when this ends otherwise."""
        for _ in range(MAX_TRIES):
            offers, losses = await self._offers()
            whole = sorted(offers, reverse=True)
            begun = [key for key in whole if self.parts.has(key)]
            key = choose(begun, losses) if begun else None
            key = key or choose(whole, losses)
            if key is None:
                return None
            try:
                return key, await self._fetch(offers[key]), losses
            except Stale:
                self.say(f"round {key[1]} is not to be had any more; taking another one")
        return None

    async def _offers(self) -> tuple[dict[Key, Offer], dict[int, float]]:
        now = asyncio.get_running_loop().time()
        peers = [r.peer_id for r in self.gossip.view.live(now) if r.is_replica]
        replies = await asyncio.gather(*(self._ask(peer_id) for peer_id in peers))
        said: dict[tuple[Key, int], Counter[bytes]] = {}
        holding: dict[tuple[Key, int, bytes], list[str]] = {}
        losses: dict[int, float] = {}
        for peer_id, reply in zip(peers, replies, strict=True):
            for one in reply.rounds if reply is not None else ():
                if not self._fits(one):
                    continue
                key = (one.history, one.round)
                said.setdefault((key, one.stage), Counter())[one.digests] += 1
                holding.setdefault((key, one.stage, one.digests), []).append(peer_id)
            losses |= reply.held_out if reply is not None else {}
        offers = {}
        stages = range(len(self.shard_sizes))
        for key in {key for key, _ in said}:
            if all((key, k) in said for k in stages):
                digests = [max(sorted(said[key, k]), key=said[key, k].__getitem__) for k in stages]
                holders = [holding[key, k, digests[k]] for k in stages]
                offers[key] = Offer(key, digests, holders)
        return offers, losses

    def _fits(self, one: SavedRound) -> bool:
        stages = self.shard_sizes
        return one.stage < len(stages) and len(one.digests) == DIGEST_BYTES * len(stages[one.stage])

    async def _ask(self, peer_id: str, keep: int = -1) -> SavedReply | None:
        try:
            reply = await self.transport.call(
                peer_id, "saved", Message(SavedRequest(keep)), timeout_s=PATIENCE_S
            )
            return convert(reply.body, SavedReply)
        except SwarmnetError as e:
            log.debug("what %s has saved: %s", peer_id[-8:], e)
            return None

    async def _fetch(self, offer: Offer) -> list[list[Array]]:
        """Raises `Stale` where the round is not to be had any more."""
        self.parts.begin(offer.key)
        keeping = asyncio.get_running_loop().create_task(self._keep(offer))
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
            for task in (keeping, *fetching):
                task.cancel()
            await asyncio.gather(keeping, *fetching, return_exceptions=True)

    async def _keep(self, offer: Offer) -> None:
        peers = sorted({peer_id for holders in offer.holders for peer_id in holders})
        while True:
            await asyncio.gather(*(self._ask(peer_id, offer.key[1]) for peer_id in peers))
            await asyncio.sleep(SAY_KEEP_S)

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
            live = [p for p in offer.holders[k] if self.gossip.view.get(p) is not None]
            if not live:
                raise Stale("nobody has it")
            peer_id = live[turn % len(live)]
            turn += 1
            try:
                reply = await self.transport.call(
                    peer_id,
                    "saved_shard",
                    Message(FetchRequest(offer.key[1], k, j)),
                    timeout_s=SHARD_TIMEOUT_S,
                )
            except NotReady:
                offer.drop(k, peer_id)
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
            offer.drop(k, peer_id)
        raise Stale("nobody gives it")


def _is_right(values: Array, size: int, digest: bytes) -> bool:
    fits = values.dtype == "float32" and values.shape == (size,)
    return fits and xxhash.xxh3_64_digest(values.data) == digest
