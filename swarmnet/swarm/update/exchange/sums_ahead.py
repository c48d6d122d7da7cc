"""Sums that go to the backups while their primary waits for the norm of all stages.

For an exchange its uplink has little to send meanwhile, and a home link takes as long for the sums
as all stages do for the norm. The step that is mirrored then names its sum by a digest, in place of
carrying it. That is tried once: where the sum does not come, or the call breaks, the step carries
it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import xxhash

from swarmnet.errors import NotReady, SwarmnetError
from swarmnet.methods.method import Method
from swarmnet.methods.update import SUMS, MirrorRequest, SumsReply, SumsRequest
from swarmnet.protocol.update.roster import Ballot
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import TOGETHER_S
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.wire import MAX_ARRAYS, Array, Message

log = logging.getLogger("swarmnet.averaging")

Call = Callable[
    [str, Method[SumsRequest, SumsReply], Message[SumsRequest]], Awaitable[Message[SumsReply]]
]
"""Of a peer, by method."""
KEPT_SUMS = 2
"""Of a shard, at a backup: where it was summed again, the first may come last."""


def digest_of(total: Array) -> bytes:
    """By which a mirrored step names a sum."""
    return xxhash.xxh3_64_digest(total.data)


@dataclass(eq=False)
class Group:
    """Sums that go to one backup in one message."""

    sums: dict[int, tuple[Array, Ballot]] = field(default_factory=dict)
    """By shard."""
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    """It is being sent, or was."""
    there: set[int] = field(default_factory=set)
    """Shards whose sum the backup has."""

    @property
    def num_bytes(self) -> int:
        return sum(total.num_bytes for total, _ in self.sums.values())


@dataclass(frozen=True, slots=True, eq=False)
class OnItsWay:
    """The sum of a shard that goes to one backup."""

    shard: int
    total: Array
    digest: bytes
    group: Group
    sent: asyncio.Task[None]
    """The call that brings it."""

    async def began(self) -> None:
        """Waits until it is being sent."""
        await self.group.has_turn.wait()

    @property
    def has_come(self) -> bool:
        """The backup has it."""
        return self.shard in self.group.there


class SumsAhead:
    """Of one exchange at one replica, as primary."""

    def __init__(
        self,
        exchange: int,
        stage_index: int,
        pace: ExchangePace,
        room: Callable[[], int],
        call: Call,
        tasks: Tasks,
    ) -> None:
        """`room()`: bytes that share a message."""
        self._exchange = exchange
        self._stage_index = stage_index
        self._pace = pace
        self._room = room
        self._call = call
        self._tasks = tasks
        self._open: dict[str, tuple[Group, asyncio.Task[None]]] = {}
        """By backup, what waits for other sums that are ready in a moment."""
        self._going: dict[tuple[str, int], OnItsWay] = {}

    def give(self, shard: int, total: Array, ballot: Ballot, backups: Iterable[str]) -> None:
        """Sends the sum of a shard to these, each in its turn on the uplink."""
        digest = digest_of(total)
        for backup in backups:
            group, sent = self._open.get(backup, (None, None))
            if group is None or sent is None or not self._has_room(group, total):
                group = Group()
                sent = self._tasks.start(self._give(backup, group))
                self._open[backup] = group, sent
            group.sums[shard] = total, ballot
            self._going[backup, shard] = OnItsWay(shard, total, digest, group, sent)

    def _has_room(self, group: Group, total: Array) -> bool:
        return len(group.sums) < MAX_ARRAYS and group.num_bytes + total.num_bytes <= self._room()

    async def _give(self, backup: str, group: Group) -> None:
        try:
            await asyncio.sleep(TOGETHER_S)
            if self._open.get(backup, (None, None))[0] is group:
                del self._open[backup]
            await self._pace.turn(group.num_bytes)
            group.has_turn.set()
            await self._send(backup, group)
        except SwarmnetError as e:
            log.debug("round %d: no sums ahead at %s: %s", self._exchange, backup[-8:], e)
        finally:
            group.has_turn.set()  # whoever waits for it looks whether it has come
            group.sums = {}

    async def _send(self, backup: str, group: Group) -> None:
        shards = tuple(group.sums)
        terms = tuple(ballot.term for _, ballot in group.sums.values())
        totals = tuple(total for total, _ in group.sums.values())
        request = SumsRequest(self._exchange, self._stage_index, shards, terms)
        reply = await self._call(backup, SUMS, Message(request, totals))
        group.there = set(shards).difference(reply.body.refused)

    def take(self, backup: str, shard: int, total: Array) -> OnItsWay | None:
        """The sum of a shard, where it was given for a backup; once."""
        going = self._going.pop((backup, shard), None)
        return going if going is not None and going.total is total else None

    def forget(self, shard: int) -> None:
        """The shard has its result."""
        for backup, j in list(self._going):
            if j == shard:
                del self._going[backup, j]


class SumsHere:
    """At one replica, as backup: of each shard the newest sums that its primary has sent ahead."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[int, str, bytes], Array]] = {}
        """By shard; of which exchange, from whom, and the digest."""
        self._num_ended = 0
        self._ended: dict[int, int] = {}
        """By shard, how often it was said that none is waited for any more."""
        self._changed = Condition()

    def put(self, exchange: int, shard: int, sender: str, total: Array) -> None:
        """It has come."""
        known = self._sums.setdefault(shard, {})
        known[exchange, sender, digest_of(total)] = total
        if len(known) > KEPT_SUMS:
            del known[next(iter(known))]
        self._changed.notify_all()

    async def of(self, mirror: MirrorRequest, sender: str, wait_s: float) -> Array:
        """The sum that a mirrored step names; it may be on its way yet. Raises `NotReady` where it
        does not come in `wait_s`, or is waited for no more."""
        j, name = mirror.shard, (mirror.round, sender, mirror.sum_digest)
        ended = self._num_ended, self._ended.get(j)

        def is_decided() -> bool:
            is_over = (self._num_ended, self._ended.get(j)) != ended
            return is_over or name in self._sums.get(j, {})

        await self._changed.until(is_decided, wait_s)
        total = self._sums.get(j, {}).pop(name, None)
        if total is None:
            raise NotReady("the sum that the step is made with has not come", lacks_sum=True)
        return total

    def end(self, shard: int) -> None:
        """None is waited for: a step has come that carries its sum."""
        self._ended[shard] = self._ended.get(shard, 0) + 1
        self._sums.pop(shard, None)
        self._changed.notify_all()

    def finish(self) -> None:
        """The exchange is over here."""
        self._num_ended += 1
        self._sums = {}
        self._ended = {}
        self._changed.notify_all()
