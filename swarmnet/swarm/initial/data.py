"""The run's data as tokens: given by a peer whose owner says so, fetched by those that have none.

What is checked of them, and kept, is `ports.ComingData`'s. Here is the way: whom to ask, how
often, and what follows. A peer that has them feeds, and gives them on: the first owner's consent is
that they came at all.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from swarmnet.batch import Batch
from swarmnet.causes import Failures
from swarmnet.errors import Busy, DataError, NotReady, ProtocolViolation, SwarmnetError
from swarmnet.methods.state import DATA_PART, DATA_SIZES, DataPartRequest, DataSizes, DataSource
from swarmnet.ports import (
    ComingData,
    Data,
    GivenData,
    SharableData,
    SourceSize,
    WantedPart,
    Worker,
)
from swarmnet.protocol.backoff import LONGEST_PAUSE_S
from swarmnet.protocol.membership.data_holders import MAX_ASKED_SIZES, Givers, in_order
from swarmnet.protocol.moments import Since
from swarmnet.protocol.timing import ANSWER_S, BULK_S, UPKEEP_S
from swarmnet.swarm.calls import ServingQueue, call, serve
from swarmnet.swarm.downloads import Downloads
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_LESS_S, MAX_TRIES, RETRY_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.data")

BEGIN_WITHIN_S = ANSWER_S
"""Peers that begin to fetch unasked do so at different times, so that the later ones see whether
there are enough already."""
MAX_WAITING = 8
"""Parts that wait to be read from the disk."""


@dataclass
class SharedData:
    """What a machine gives of the run's data, or may get."""

    worker: Worker
    """A thread of its own."""
    given: GivenData | None = None
    """To members that ask; None: the owner has not said so, or nothing is here."""
    coming: ComingData | None = None
    """None where it fetches nothing."""
    at_once: bool = False
    """It fetches however large they are, and however many have them."""


class LateData:
    """Data that come while the peer works; implements `ports.Data`. Until then its record
    does not say that it has any, so nobody asks."""

    def __init__(self) -> None:
        self._data: Data | None = None

    def put(self, data: Data) -> None:
        """They are here."""
        self._data = data

    @property
    def samples_per_microbatch(self) -> int:
        return self._here.samples_per_microbatch

    @property
    def bytes_per_token(self) -> float:
        return self._here.bytes_per_token

    @property
    def num_held_out(self) -> int:
        return 0 if self._data is None else self._data.num_held_out

    @property
    def num_samples(self) -> int | None:
        return self._here.num_samples

    def microbatch(self, indices: Sequence[int]) -> Batch:
        return self._here.microbatch(indices)

    def held_out(self, index: int) -> Batch:
        return self._here.held_out(index)

    @property
    def _here(self) -> Data:
        if self._data is None:
            raise DataError("the run's data are not here yet")
        return self._data


class DataService:
    """Gives the tokens of the run's data, and fetches them."""

    def __init__(
        self,
        transport: Transport,
        gossip: Gossip,
        shared: SharedData,
        late: LateData,
        rng: random.Random,
    ) -> None:
        """`late`: of the feeder here, where the data are to come."""
        self._transport = transport
        self._gossip = gossip
        self._rng = rng
        self._shared = shared
        self._late = late
        self._given = shared.given
        self._queue = ServingQueue(1, MAX_WAITING)
        self._givers = Givers()
        self._failures = Failures()
        """Why those that were asked give nothing."""
        self._downloads = Downloads(rng, self._failures)
        self._told_why = Since()
        self._sizes: dict[str, tuple[SourceSize, ...]] = {}
        """What each of those that may be asked says how much the data are."""
        self._said: set[str] = set()
        serve(transport, DATA_SIZES, self._on_sizes)
        serve(transport, DATA_PART, self._on_part)

    # ---- giving -----------------------------------------------------------------------------

    async def _on_sizes(self, request: Request[None]) -> Message[DataSizes]:
        sizes = self._to_give().sizes()
        return Message(
            DataSizes(
                tuple(
                    DataSource(s.fingerprint, s.num_documents, s.num_tokens, s.num_bytes)
                    for s in sizes
                )
            )
        )

    async def _on_part(self, request: Request[DataPartRequest]) -> Message[None]:
        wanted, given = request.message.body, self._to_give()
        async with self._queue.turn():
            data = await self._shared.worker.run(
                lambda: given.part(wanted.source, wanted.file, wanted.offset, wanted.length)
            )
        if data is None:
            raise NotReady("there is no such source")
        return Message(None, (Array("uint8", (len(data),), data),), is_background=True)

    def _to_give(self) -> GivenData:
        if self._given is None:
            raise NotReady("this peer gives no data")
        return self._given

    # ---- fetching ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Fetches the data, where this peer is to; returns when it has them."""
        coming = self._shared.coming
        if coming is None:
            return
        data = await self._earlier(coming)
        if data is None and not self._shared.at_once:
            await asyncio.sleep(self._rng.uniform(0.0, BEGIN_WITHIN_S))
        self._told_why.begin(asyncio.get_running_loop().time())
        while data is None:
            data = await self._from_others(coming)
            if data is None:
                self._say_why()
        self._late.put(data)
        self._given = data
        log.warning("the run's data are here: this peer feeds too, and gives them to members")
        self._gossip.update(
            has_data=True, serves_data=True, measures=self._late.num_held_out > 0, urgent=True
        )

    async def _from_others(self, coming: ComingData) -> SharableData | None:
        """All that others give; None where something is missing yet."""
        found = self._to_ask(at_once=self._shared.at_once)
        if found:
            await asyncio.gather(*map(self._ask_sizes, found[:MAX_ASKED_SIZES]))
        said = {p: self._sizes[p] for p in found if p in self._sizes}
        if not said:
            await asyncio.sleep(LOOK_LESS_S)
            return None
        totals = {sizes: sum(s.num_bytes + s.num_tokens for s in sizes) for sizes in said.values()}
        sizes = in_order(totals, said)[0]
        pause_s = LONGEST_PAUSE_S
        try:
            if await self._begin(coming, sizes):
                return await self._rest(coming, sizes)
            if (data := await self._earlier(coming)) is not None:
                return data
        except ProtocolViolation as e:
            for giver in said:
                if said[giver] == sizes:
                    self._has_lied(giver, e)
        except DataError as e:
            self._say(f"{e}; this peer serves but does not feed")
        except SwarmnetError as e:
            log.debug("data of the run: %s", e)
            pause_s = LOOK_LESS_S
        for giver in said:
            if said[giver] == sizes:
                self._givers.gave_nothing(giver, asyncio.get_running_loop().time(), pause_s)
        return None

    def _say_why(self) -> None:
        """Now and then, where nobody gives the data: what it was, of whom, and what to do."""
        now = asyncio.get_running_loop().time()
        if self._failures and self._told_why.is_due(now, UPKEEP_S):
            log.warning("the run's data are not here yet: %s", self._failures.told())

    async def _earlier(self, coming: ComingData) -> SharableData | None:
        """What is on the disk already."""
        try:
            return await self._shared.worker.run(coming.open_if_whole)
        except DataError as e:
            self._say(f"{e}; this peer serves but does not feed")
            return None

    def _to_ask(self, *, at_once: bool) -> list[str]:
        """Whom to ask now, in any order."""
        now = asyncio.get_running_loop().time()
        found = self._givers.to_ask(self._gossip.view, now, at_once=at_once)
        self._sizes = {p: sizes for p, sizes in self._sizes.items() if p in found}
        self._rng.shuffle(found)
        return found

    async def _ask_sizes(self, giver: str) -> None:
        """Learns how much the data are, by the word of one peer. What is no size is a lie."""
        if giver in self._sizes:
            return
        try:
            reply = await call(self._transport, giver, DATA_SIZES, Message(), timeout_s=ANSWER_S)
        except SwarmnetError as e:
            self._failures.add(e, giver)
            now = asyncio.get_running_loop().time()
            self._givers.gave_nothing(giver, now, LOOK_LESS_S)
            return
        self._failures.answered(giver)
        self._sizes[giver] = tuple(
            SourceSize(s.fingerprint, s.num_documents, s.num_tokens, s.num_bytes)
            for s in reply.body.sources
        )

    async def _begin(self, coming: ComingData, sizes: tuple[SourceSize, ...]) -> bool:
        unasked = not self._shared.at_once
        return await self._shared.worker.run(lambda: coming.begin(sizes, unasked=unasked))

    async def _rest(self, coming: ComingData, sizes: tuple[SourceSize, ...]) -> SharableData:
        """One piece after the other, from one peer as long as it gives them in time. Between them
        the links are as long for others as they were for a piece. Raises `SwarmnetError`."""
        loop, run = asyncio.get_running_loop(), self._shared.worker.run
        giver = ""
        while (part := await run(partial(coming.wanted, giver))) is not None:
            asked = Since(loop.time())
            giver, data = await self._ask_for(part, giver, sizes)
            try:
                await run(partial(_keep, coming, giver, part, data))
            except ProtocolViolation as e:
                self._has_lied(giver, e)
            await asyncio.sleep(asked.s(loop.time()))
        return await run(coming.finish)

    async def _ask_for(
        self, part: WantedPart, giver: str, sizes: tuple[SourceSize, ...]
    ) -> tuple[str, bytes]:
        """A piece, and who gave it: that giver, if it does so in time, or another one that says the
        same of the data. Raises `SwarmnetError`."""

        async def ask(peer_id: str) -> bytes:
            return await self._ask(peer_id, part, sizes)

        for _ in range(MAX_TRIES):
            others = self._to_ask(at_once=True)
            try:
                return await self._downloads.piece(others, ask, part.length, prefer=giver)
            except Busy as e:
                await asyncio.sleep(max(RETRY_S, min(e.backlog_s, BULK_S)))
            except ProtocolViolation as e:
                raise NotReady(str(e)) from None
        raise NotReady("all that have the data are busy")

    async def _ask(self, giver: str, part: WantedPart, sizes: tuple[SourceSize, ...]) -> bytes:
        """Raises `SwarmnetError`."""
        await self._ask_sizes(giver)
        if self._sizes.get(giver) != sizes:
            raise NotReady("it says other sizes of the data")
        request = DataPartRequest(part.source, part.file, part.offset, part.length)
        reply = await call(self._transport, giver, DATA_PART, Message(request), timeout_s=BULK_S)
        if len(reply.arrays) != 1 or reply.arrays[0].dtype != "uint8":
            raise ProtocolViolation("a part of data that is none")
        if reply.arrays[0].num_bytes != part.length:
            raise ProtocolViolation("a part of data that is too long or too short")
        return bytes(reply.arrays[0].data)

    def _has_lied(self, giver: str, error: ProtocolViolation) -> None:
        self._givers.lied(giver)
        self._say(
            f"peer {giver[-8:]} gives other data than the run's, and is not asked again ({error})"
        )

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)


def _keep(coming: ComingData, giver: str, part: WantedPart, data: bytes) -> None:
    """On the worker, of a giver that may be another one than the piece before came from. Raises
    `DataError` or `ProtocolViolation`."""
    coming.wanted(giver)
    coming.take(giver, part, data)
