"""Downloading a stage's parameters by digest, to join, to repair, and to recover.

Shards come from several donors at once, and from another one where a donor takes far longer than
others (`swarm.downloads`). Each donor serves a few at a time and never on its device thread. Each
shard is checked against the digest in the donor's signed record. What has arrived stays when a
donor vanishes, when the download is begun again, or when the round moves on under the same
digest."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import xxhash

from swarmnet.causes import Failures
from swarmnet.errors import Busy, ProtocolViolation, Stale, SwarmnetError
from swarmnet.methods.state import FETCH_PARAMETERS, FetchReply, FetchRequest
from swarmnet.plurals import counted
from swarmnet.protocol.membership.records import JOINING, Record
from swarmnet.protocol.moments import Since
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.protocol.update import divergence
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.downloads import Downloads
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.state_sync")

FP32_BYTES = 4


@dataclass
class StateSync:
    """Gives the own parameters to others, and fetches those that the own replica lacks."""

    gossip: Gossip
    limits: WaitLimits
    replica: Replica
    rng: random.Random

    def __post_init__(self) -> None:
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        self._waiting = 0
        self._downloads = Downloads(self.rng)
        self._failures = Failures()
        """Why donors did not give what they were asked for, the last time."""
        self._told_why = Since()
        serve(self.gossip.transport, FETCH_PARAMETERS, self._on_fetch)

    # ---- donor ------------------------------------------------------------------------------

    async def _on_fetch(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        fetch = request.message.body
        replica = self.replica
        if self._waiting >= 2 * self.limits.max_serving:
            raise Busy("serving others", backlog_s=LOOK_AGAIN_S)
        self._waiting += 1
        try:
            async with self._serving:
                if not replica.synced or not self._is_same(fetch):
                    raise Stale(f"this replica is in round {replica.round}", round=replica.round)
                shard = replica.common_shard(fetch.shard)
                copied = await replica.worker.run(lambda: bytes(shard.data))
                if not self._is_same(fetch):  # the copy may be of two rounds
                    raise Stale(f"this replica is in round {replica.round}", round=replica.round)
                return Message(
                    FetchReply(replica.round, {}), (Array(shard.dtype, shard.shape, copied),)
                )
        finally:
            self._waiting -= 1

    def _is_same(self, fetch: FetchRequest) -> bool:
        """The shard is that of the round asked for. Rounds without an exchange do not change it."""
        replica = self.replica
        if not replica.plan.is_local:
            return replica.round == fetch.round
        last = replica.plan.last_exchange
        return last(fetch.shard, replica.round) == last(fetch.shard, fetch.round)

    # ---- joiner -----------------------------------------------------------------------------

    def donors(self, round_index: int | None = None) -> list[Record]:
        """As `divergence.donors`, of those that are known: what most of any names have is nobody's
        parameters. Who is joining takes the word of those that are nearest to it."""
        now, replica, own = asyncio.get_running_loop().time(), self.replica, self.gossip.own
        view = self.gossip.view
        members, num_shards = view.known(replica.index, now), replica.num_shards
        if own.state != JOINING:
            return divergence.donors(members, own.peer_id, num_shards, round_index)
        return divergence.donors(members, own.peer_id, num_shards, round_index, view.nearest)

    async def fetch(self, round_index: int) -> bool:
        """Puts the shards of `round_index` that differ from the own ones aside, ready for
        `Transitions.open_round`; False where that round is not to be had any more."""
        donors = self.donors(round_index)
        if not donors:
            return False
        self.replica.counted(donors[0].samples)
        digests = self.replica.digests or await self.replica.measure_digests()
        wanted = []
        for j in range(self.replica.num_shards):
            # Of what an earlier try has put aside.
            coming = await self.replica.worker.run(
                lambda j=j: self.replica.stage.coming_digest(j)  # type: ignore[misc]
            )
            if (coming or digests[8 * j : 8 * j + 8]) != donors[0].digest(j):
                wanted.append(j)
        at_once = asyncio.Semaphore(self.limits.max_fetching)
        log.info("stage %d: %s to fetch", self.replica.index, counted(len(wanted), "shard"))
        results = await asyncio.gather(
            *(self._fetch(round_index, j, at_once) for j in wanted), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SwarmnetError):
                raise result
        return all(result is True for result in results)

    async def _fetch(self, round_index: int, j: int, at_once: asyncio.Semaphore) -> bool:
        donors: dict[str, Record] = {}

        async def ask(peer_id: str) -> Array:
            return await self.ask(donors[peer_id], round_index, j)

        num_bytes = FP32_BYTES * self.replica.stage.shard_sizes[j]
        async with at_once:
            for _ in range(MAX_TRIES):
                donors = {r.peer_id: r for r in self.donors(round_index)}
                if not donors:
                    return False
                try:
                    _, values = await self._downloads.piece(list(donors), ask, num_bytes)
                    await self.replica.worker.run(
                        lambda v=values: self.replica.stage.stage_parameters(j, v)  # type: ignore[misc]
                    )
                    return True
                except Stale:
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
                except SwarmnetError as e:
                    log.debug("shard %d: %s", j, e)
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
            return False

    def begins(self) -> None:
        """Somebody begins to fetch the stage."""
        self._failures = Failures()
        self._told_why.begin(asyncio.get_running_loop().time())

    def say_why(self) -> None:
        """Now and then, where it takes long: what it was, of whom, and what to do."""
        donors = {d.peer_id for d in self.donors()}
        failures = Failures([e for e in self._failures if e.peer_id in donors])
        now = asyncio.get_running_loop().time()
        if failures and self._told_why.is_due(now, UPKEEP_S):
            line = "stage %d: its parameters are not here yet: %s"
            log.warning(line, self.replica.index, failures.told())

    async def ask(self, donor: Record, round_index: int, j: int) -> Array:
        """A shard from one donor, checked against the digest in its record. Raises
        `SwarmnetError`."""
        try:
            values = await self._ask(donor, round_index, j)
        except SwarmnetError as e:
            self._failures.add(e.of(donor.peer_id))
            raise
        self._failures.answered(donor.peer_id)
        return values

    async def _ask(self, donor: Record, round_index: int, j: int) -> Array:
        reply = await call(
            self.gossip.transport,
            donor.peer_id,
            FETCH_PARAMETERS,
            Message(FetchRequest(round_index, self.replica.index, j)),
            timeout_s=self.limits.fetch_timeout_s,
        )
        size = self.replica.stage.shard_sizes[j]
        if len(reply.arrays) != 1 or reply.arrays[0].shape != (size,):
            raise ProtocolViolation(f"shard {j} has {size} parameters")
        values = reply.arrays[0]
        digest = await self.replica.worker.run(lambda: xxhash.xxh3_64_digest(values.data))
        if digest != donor.digest(j):
            raise ProtocolViolation(f"shard {j} does not match the digest in the donor's record")
        return values
