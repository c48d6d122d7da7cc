"""Handing over a gradient: a replica that leaves in the middle of a round gives it to another one.

Rounds may be long, and a leaving peer need not wait for the end of one. So it sends the sum over
its samples, shard by shard (`adopt`), and then, in one small message, that these samples are the
heir's from now on (`adopted`). The heir keeps the sum beside its own gradient and brings both into
the exchange as one contribution.

A gradient counts at most once. It is given only when feeders count all of it: no microbatch is in
flight, none waits for its commit. Before the last message the leaver retracts the samples from its
own books. Where the heir refuses (its round is over, say), they come back; where no answer comes,
they may be lost, and are in no update twice.

An heir vouches for what it brings. An adopted gradient that is not finite is left out; under a
robust rule, so is one that is far larger than its own, token by token: the heir would be taken for
an attacker itself."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from swarmnet.errors import Busy, NotReady, ProtocolViolation, RemoteError, Stale, SwarmnetError
from swarmnet.methods.ranges import MAX_STEP_TOKENS
from swarmnet.methods.update import ADOPT, ADOPTED, AdoptedRequest, AdoptRequest
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.membership import departure
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.pipeline.ledger import Entry
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.protocol.update import robust
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.update.exchange.coded import check_contribution
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.handover")

MAX_ADOPTED = 2
"""Gradients a round that a replica keeps beside its own: each takes as much memory."""
MAX_AT_ONCE = 4
"""Shards on their way to an heir."""
MAX_HEIRS = 3
"""That are asked one after the other."""


@dataclass
class Adopted:
    """A gradient sum that another replica left here, or is about to."""

    round: int
    shards: dict[int, Array] = field(default_factory=dict)
    num_samples: int = 0
    num_tokens: int = 0


@dataclass
class Handover:
    """Gives the gradients of one replica away, and takes those of others."""

    gossip: Gossip
    settings: RunSettings
    replica: Replica
    exchanges: Exchanges
    rng: Random

    def __post_init__(self) -> None:
        self._coming: dict[str, Adopted] = {}
        """By leaver, what is not whole yet."""
        self._adopted: list[Adopted] = []
        serve(self.gossip.transport, ADOPT, self._on_adopt)
        serve(self.gossip.transport, ADOPTED, self._on_adopted)

    # ---- the leaver -------------------------------------------------------------------------

    def may_give(self) -> bool:
        """There is a gradient of the present round here, and nothing will change it any more."""
        replica, r = self.replica, self.replica.round
        ledger = replica.ledger
        return (
            replica.local is None
            and replica.phase.may_give(r)
            and not ledger.running(r)
            and not ledger.pending(r)
            and 0 < self._num_tokens(r) <= MAX_STEP_TOKENS
        )

    def has_any(self, round_index: int) -> bool:
        """Whether gradients of others of a round are here."""
        return bool(self._of(round_index))

    def num_samples(self, round_index: int) -> int:
        """Samples behind the gradients of others of a round that are here."""
        return sum(a.num_samples for a in self._of(round_index))

    async def give(self) -> bool:
        """Gives the gradient of the present round away; False where no replica took it."""
        r = self.replica.round
        heirs = self._heirs(r)
        if not heirs or not self.may_give():
            return False
        num_tokens = self._num_tokens(r)
        shards = await self._shards(r)
        for heir in heirs:
            if not self.may_give() or self._num_tokens(r) != num_tokens:
                return False
            if await self._give_to(heir, r, shards):
                return True
        return False

    def _heirs(self, r: int) -> list[str]:
        now, own = asyncio.get_running_loop().time(), self.gossip.own.peer_id
        heirs = departure.heirs(self.gossip.view.members(self.replica.index, now), own, r)
        return self.rng.sample(heirs, min(MAX_HEIRS, len(heirs)))

    def _num_tokens(self, r: int) -> int:
        """Own ones, and those that others have left here."""
        adopted = sum(a.num_tokens for a in self._adopted if a.round == r)
        return self.replica.ledger.num_tokens(r) + adopted

    async def _shards(self, r: int) -> list[Array]:
        """Copies of the whole gradient, coded."""
        replica = self.replica
        await replica.settle()
        shards = []
        for j in range(replica.num_shards):
            own = await replica.worker.run(lambda j=j: replica.stage.copy_gradient(j))  # type: ignore[misc]
            whole = await self._sum(j, own, self._of(r))
            shards.append(await replica.worker.run(lambda j=j, w=whole: self._coded(j, w)))  # type: ignore[misc]
        return shards

    def _coded(self, j: int, gradient: Array) -> Array:
        """On the worker. With what coding has lost before: there will be no next contribution,
        unless the heir refuses."""
        return self.replica.optimizer.codec.contribution(j, gradient, keeps_error=False)

    async def _give_to(self, heir: str, r: int, shards: Sequence[Array]) -> bool:
        at_once = asyncio.Semaphore(MAX_AT_ONCE)
        stage = self.replica.index

        async def send(j: int) -> None:
            async with at_once:
                message = Message(AdoptRequest(r, stage, j), (shards[j],))
                await self.exchanges.calls.call(heir, ADOPT, message)

        refusals: list[Exception] = []
        try:
            async with asyncio.TaskGroup() as group:
                for j in range(len(shards)):
                    group.create_task(send(j))
        except* SwarmnetError as several:
            refusals = list(several.exceptions)
        if refusals:
            log.debug("%s does not take the gradient: %s", heir[-8:], refusals[0])
            return False
        if not self.may_give() or not await self._pass_on(heir, r):
            return False
        # What coding had lost went with it. This replica may yet stay, and contribute again.
        await self.exchanges.work.contribution_given(r)
        return True

    async def _pass_on(self, heir: str, r: int) -> bool:
        """The last message. No round ends here before its answer."""
        replica, ledger = self.replica, self.replica.ledger
        num_samples = ledger.num_samples(r) + sum(a.num_samples for a in self._of(r))
        request = AdoptedRequest(r, replica.index, num_samples, self._num_tokens(r))
        entries: dict[int, Entry] = ledger.take(r)
        adopted, self._adopted = self._adopted, []
        is_refused = False
        replica.transitions.give()
        try:
            await call(self.gossip.transport, heir, ADOPTED, Message(request), timeout_s=ANSWER_S)
            samples = counted(num_samples, "sample")
            log.info("%s has taken over %s of round %d", heir[-8:], samples, r)
            return True
        except RemoteError as e:
            log.debug("%s does not take the gradient: %s", heir[-8:], e)
            ledger.put_back(r, entries)
            self._adopted, is_refused = adopted, True
            return False
        except SwarmnetError as e:
            log.warning(
                "round %d: %s did not say whether it took over %s: %s",
                r,
                heir[-8:],
                counted(num_samples, "sample"),
                e,
            )
            return True
        finally:
            replica.transitions.gave(is_refused=is_refused)

    # ---- the heir ---------------------------------------------------------------------------

    async def _on_adopt(self, request: Request[AdoptRequest]) -> Message[None]:
        body = request.message.body
        self._check(body.round)
        arrays, codec, j = request.message.arrays, self.replica.optimizer.codec, body.shard
        if len(arrays) != 1:
            raise ProtocolViolation("the gradient of one shard is one array")
        check_contribution(self.replica, j, arrays[0])
        gradient = arrays[0]
        if codec.names.contributions != NONE:
            gradient = await self.replica.worker.run(
                lambda: codec.decoded_contribution(j, arrays[0])
            )
            self._check(body.round)
        coming = self._coming.get(request.remote)
        if coming is None or coming.round != body.round:
            self._forget_dead()
            here = [*self._coming.values(), *self._adopted]
            if sum(a.round == body.round for a in here) >= MAX_ADOPTED:
                raise Busy("no room for another gradient")
            coming = self._coming[request.remote] = Adopted(body.round)
        coming.shards[j] = gradient
        return Message()

    async def _on_adopted(self, request: Request[AdoptedRequest]) -> Message[None]:
        """Nothing is awaited here: the round cannot end in between."""
        body = request.message.body
        self._check(body.round)
        coming = self._coming.pop(request.remote, None)
        whole = coming is not None and len(coming.shards) == self.replica.num_shards
        if coming is None or coming.round != body.round or not whole:
            raise NotReady("the gradient is not whole")
        self._adopted.append(
            replace(coming, num_samples=body.num_samples, num_tokens=body.num_tokens)
        )
        return Message()

    def _check(self, r: int) -> None:
        own, replica = self.gossip.own, self.replica
        is_given = replica.phase.is_given(r)  # what came now would stay here
        if own.state != ACTIVE or own.is_moving or replica.local is not None or is_given:
            raise NotReady("this peer takes over no gradient")
        if not replica.is_open(r):
            raise Stale(f"round {r} is not open here", round=replica.round)

    def _forget_dead(self) -> None:
        now = asyncio.get_running_loop().time()
        view = self.gossip.view
        self._coming = {p: a for p, a in self._coming.items() if view.is_live(p, now)}

    # ---- the end of the round ---------------------------------------------------------------

    def _of(self, r: int) -> list[Adopted]:
        return [a for a in self._adopted if a.round == r]

    async def contribution(
        self, r: int, num_tokens: int, shards: Sequence[Array]
    ) -> tuple[int, Sequence[Array]]:
        """The replica's contribution to the exchange: its own gradient (no shards for no tokens)
        and what it has adopted. To be asked once, when the round is closed here."""
        adopted = self._of(r)
        self.finish_round(r)
        if adopted:
            adopted = await self._sound(num_tokens, shards, adopted)
        if not adopted:
            return num_tokens, shards
        own: Sequence[Array | None] = shards or [None] * self.replica.num_shards
        summed = [await self._sum(j, shard, adopted) for j, shard in enumerate(own)]
        return num_tokens + sum(a.num_tokens for a in adopted), summed

    def forget(self) -> None:
        """What is here belongs to parameters that do not hold."""
        self._adopted.clear()
        self._coming.clear()

    def finish_round(self, r: int) -> None:
        """Forgets the gradients of a round."""
        self._adopted = [a for a in self._adopted if a.round > r]
        self._coming = {p: a for p, a in self._coming.items() if a.round > r}

    async def _sum(self, j: int, own: Array | None, adopted: Sequence[Adopted]) -> Array:
        if not adopted and own is not None:
            return own
        parts = [a.shards[j] for a in adopted]
        if own is not None:
            parts.insert(0, own)
        return await self.replica.worker.run(lambda: self.replica.optimizer.sum(parts))

    async def _sound(
        self, num_tokens: int, shards: Sequence[Array], adopted: Sequence[Adopted]
    ) -> list[Adopted]:
        """Those that do not spoil the own contribution."""
        is_mean = self.settings.aggregation == robust.MEAN
        own = 0.0 if is_mean else await self._squares(shards)
        found = []
        for a in adopted:
            squares = await self._squares([a.shards[j] for j in sorted(a.shards)])
            is_alike = is_mean or robust.is_alike(own, num_tokens, squares, a.num_tokens)
            if is_alike and math.isfinite(squares):
                found.append(a)
            else:
                self.gossip.add_total("contributions_dropped")
                log.warning(
                    "round %d: a gradient that was left here is %s and does not count",
                    a.round,
                    "far too large" if math.isfinite(squares) else "not finite",
                )
        return found

    async def _squares(self, shards: Sequence[Array]) -> float:
        worker, optimizer = self.replica.worker, self.replica.optimizer
        return math.fsum(
            [await worker.run(lambda s=s: optimizer.sum_of_squares(s)) for s in shards]  # type: ignore[misc]
        )
