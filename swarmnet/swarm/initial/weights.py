"""The weights that a run begins from: given shard by shard by whoever has the model's folder, and
fetched by the first replica of a stage. All later ones fetch the stage from it, as in any round
(`swarm.update.state_sync`).

Where only adapters are trained, every replica of a stage fetches the base, once, and gives it to
others from then on.

Where the moments of another run go on, the first replica of a stage fetches those too, of all
shards. The others get them from it, as new owners do in any round
(`swarm.update.optimizer_states`)."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import NotReady, ProtocolViolation, SwarmnetError, UserError
from swarmnet.methods.state import INITIAL_SHARD, FetchReply, FetchRequest
from swarmnet.plurals import counted
from swarmnet.ports import InitialWeights, Worker
from swarmnet.protocol.moments import Since
from swarmnet.swarm.calls import ServingQueue, call, serve
from swarmnet.swarm.downloads import Downloads
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.waiting_notice import SAY_EVERY_S
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.state_sync")

FP32_BYTES = 4
State = tuple[dict[str, Any], tuple[Array, ...]]
"""Of a shard's optimizer, as `ports.Optimizer.export` gives it."""


@dataclass
class WeightService:
    """Gives initial shards, where this machine has them, and fetches those of a stage."""

    transport: Transport
    gossip: Gossip
    limits: WaitLimits
    worker: Worker
    weights: InitialWeights
    rng: random.Random

    def __post_init__(self) -> None:
        self._queue = ServingQueue(self.limits.max_serving, 2 * self.limits.max_serving)
        self._downloads = Downloads(self.rng)
        self._moments: dict[tuple[int, int], Array] = {}
        """By stage and shard, of the stage that is being filled."""
        self._said = Since()
        self._has_said_disk = False
        serve(self.transport, INITIAL_SHARD, self._on_fetch)

    async def _on_fetch(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        fetch = request.message.body
        if not self.weights.is_here:
            raise NotReady("this peer has not the weights that the run began from")
        async with self._queue.turn():
            values = await self.worker.run(lambda: self.weights.shard(fetch.stage, fetch.shard))
        if values is None:
            raise NotReady("there is no such shard")
        return Message(FetchReply(0, {}), (values,))

    async def fill(self, replica: Replica) -> bool:
        """Puts the initial parameters of a stage aside, ready for `Replica.open_round`, and its
        moments, for `put_moments`. False where some of them are not to be had now, which is said;
        what has come stays."""
        if not self.weights.has_trained:
            return True
        first, shards = len(replica.stage.base.shard_sizes), range(replica.num_shards)
        moments = first + replica.num_shards
        missing = [first + j for j in shards if not await self._is_there(replica, j, first + j)]
        if self.weights.has_moments:
            missing += [moments + j for j in shards if (replica.index, j) not in self._moments]

        def put(number: int, values: Array) -> None:
            if number < moments:
                replica.put_common(number - first, values)
            else:
                self._moments[replica.index, number - moments] = values

        return await self._take_all(replica, missing, put)

    async def put_moments(self, replica: Replica) -> list[int]:
        """Puts the moments of a stage that was filled into its optimizer, where there are any;
        returns their shards. Raises `ProtocolViolation` where one does not fit."""
        taken, self._moments = self._moments, {}
        shards = sorted(j for stage, j in taken if stage == replica.index)
        for j in shards:
            state = as_state(taken.pop((replica.index, j)), replica.stage.shard_sizes[j])
            await replica.worker.run(lambda j=j, s=state: replica.optimizer.load(j, *s))  # type: ignore[misc]
        return shards

    def forget_moments(self) -> None:
        """The stage needs them no more."""
        self._moments.clear()

    async def fill_base(self, replica: Replica) -> bool:
        """Puts the base of a stage in its place, where it has one. False as `fill`."""
        base = replica.stage.base

        def put(number: int, values: Array) -> None:
            base.put(number, values)
            try:
                self.weights.keep(replica.index, number, values)
            except UserError as e:
                self._say_once(e)

        return await self._take_all(replica, base.missing, put)

    async def _take_all(
        self, replica: Replica, numbers: Sequence[int], put: Callable[[int, Array], None]
    ) -> bool:
        if numbers:
            shards = counted(len(numbers), "initial shard")
            log.info("stage %d: %s to fetch", replica.index, shards)
        at_once = asyncio.Semaphore(self.limits.max_fetching)
        found = await asyncio.gather(*(self._take(replica, n, put, at_once) for n in numbers))
        if all(found):
            return True
        self._say(f"stage {replica.index} waits for {found.count(False)} of its initial shards")
        await self.gossip.changed.wait(LOOK_LESS_S)
        return False

    async def _is_there(self, replica: Replica, j: int, number: int) -> bool:
        """Whether an earlier try has put a shard of the trained parameters aside. `number`: its own
        among the initial shards."""
        coming = replica.stage.coming_shard(j)
        if coming is None:
            return False
        return await self.worker.run(lambda: self.weights.is_right(replica.index, number, coming))

    async def _take(
        self,
        replica: Replica,
        number: int,
        put: Callable[[int, Array], None],
        at_once: asyncio.Semaphore,
    ) -> bool:
        async with at_once:
            own = await self._own(replica.index, number)
            values = own or await self._from_others(replica, number)
            if values is None:
                return False
            await self.worker.run(lambda: put(number, values))
            return True

    async def _own(self, stage: int, j: int) -> Array | None:
        if not self.weights.is_here:
            return None
        return await self.worker.run(lambda: self.weights.shard(stage, j))

    async def _from_others(self, replica: Replica, number: int) -> Array | None:
        now = asyncio.get_running_loop().time()
        own = self.gossip.own.peer_id
        others = [r.peer_id for r in self.gossip.view.live(now) if r.peer_id != own]

        async def ask(peer_id: str) -> Array:
            return await self._ask(peer_id, replica, number)

        num_bytes = FP32_BYTES * _sizes(replica)[number]
        try:
            return (await self._downloads.piece(others, ask, num_bytes))[1]
        except SwarmnetError as e:
            log.debug("initial shard %d: %s", number, e)
            return None

    async def _ask(self, peer_id: str, replica: Replica, number: int) -> Array:
        """Raises `SwarmnetError`."""
        return await fetch_initial(
            self.transport,
            peer_id,
            self.weights,
            self.worker,
            replica.index,
            number,
            _sizes(replica)[number],
            self.limits.fetch_timeout_s,
        )

    def _say(self, reason: str) -> None:
        if self._said.is_due(asyncio.get_running_loop().time(), SAY_EVERY_S):
            why = self._downloads.failures.told()
            log.warning(
                "waiting: %s; a peer that has the model's folder gives them (--weights FOLDER), or "
                "the one that began the run%s",
                reason,
                f" ({why})" if why else "",
            )

    def _say_once(self, error: UserError) -> None:
        if not self._has_said_disk:
            self._has_said_disk = True
            log.warning("%s; the base is fetched again when this peer starts again", error)


def _sizes(replica: Replica) -> tuple[int, ...]:
    """Elements of the initial shards of a stage: those of the base, the trained, the moments."""
    trained, num_moments = replica.stage.shard_sizes, replica.optimizer.num_moments
    moments = (num_moments(j) * size + 1 for j, size in enumerate(trained))
    return (*replica.stage.base.shard_sizes, *trained, *moments)


def as_state(values: Array, size: int) -> State:
    """The moments of a shard of `size` parameters, and their number of steps, in an initial shard.
    Raises `ProtocolViolation`."""
    data = memoryview(values.data).cast("B")
    num_moments, each = (len(data) // FP32_BYTES - 1) // size, FP32_BYTES * size
    moments = tuple(
        Array("float32", (size,), data[each * k : each * (k + 1)]) for k in range(num_moments)
    )
    [steps] = struct.unpack("<f", data[each * num_moments :])
    if not (math.isfinite(steps) and steps == int(steps)):
        raise ProtocolViolation("initial moments with an impossible step count")
    return {"steps": int(steps)}, moments


async def fetch_initial(
    transport: Transport,
    peer_id: str,
    weights: InitialWeights,
    worker: Worker,
    stage: int,
    number: int,
    size: int,
    timeout_s: float,
) -> Array:
    """An initial shard from a peer, checked. `number`: as in `InitialWeights.shard`. `size`: its
    elements. Raises `SwarmnetError`."""
    reply = await call(
        transport,
        peer_id,
        INITIAL_SHARD,
        Message(FetchRequest(0, stage, number)),
        timeout_s=timeout_s,
    )
    if len(reply.arrays) != 1 or (reply.arrays[0].dtype, reply.arrays[0].shape) != (
        "float32",
        (size,),
    ):
        raise ProtocolViolation(f"initial shard {number} has {size} parameters")
    values = reply.arrays[0]
    if not await worker.run(lambda: weights.is_right(stage, number, values)):
        raise ProtocolViolation(f"initial shard {number} does not match its hash")
    return values
