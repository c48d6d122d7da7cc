"""Measuring the loss on held-out data, by one feeder for the whole swarm."""

from __future__ import annotations

import asyncio
import logging

from swarmnet.errors import ProtocolViolation, Refused, SwarmnetError
from swarmnet.methods.microbatch import EVALUATE, InferReply, InferRequest
from swarmnet.ports import Data
from swarmnet.protocol.membership.records import HeldOut
from swarmnet.protocol.pipeline import held_out as measuring
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.dispatcher import Dispatcher
from swarmnet.swarm.pipeline.fed_rounds import FedRound
from swarmnet.swarm.pipeline.infer import infer_through
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.feeder")


class HeldOutLoss:
    """Measures in the rounds where that is due, and puts the loss into the own record."""

    def __init__(
        self, gossip: Gossip, dispatcher: Dispatcher, data: Data, settings: RunSettings
    ) -> None:
        self.measuring: FedRound | None = None
        """The round that is measured now: it is not sealed meanwhile."""
        self._gossip = gossip
        self._dispatcher = dispatcher
        self._data = data
        self._settings = settings

    def measure_if_due(self, mine: FedRound, *, is_ahead: bool) -> None:
        """Every so often the feeder whose turn it is measures. A round that is open ahead is
        measured as one that is present, for its parameters are there; but once, since where some
        stage cannot open it ahead that fails. The measurement ends with the round."""
        r, settings = mine.round, self._settings
        if not measuring.is_due(r, every=settings.evaluate_every, rounds=settings.rounds):
            return
        if self.measuring is not None or not self._data.num_held_out:
            return
        if mine.is_measured or (is_ahead and mine.is_missed_ahead):
            return
        first = measuring.measurer(
            self._gossip.view,
            r,
            num_stages=settings.num_stages,
            num_slots=settings.slots.of(r),
            now=asyncio.get_running_loop().time(),
        )
        if first == self._gossip.own.peer_id:
            self.measuring = mine
            mine.flights.start(self._measure(mine, is_ahead)).add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self.measuring = None
        self._gossip.changed.notify_all()

    async def _measure(self, mine: FedRound, is_ahead: bool) -> None:
        r = mine.round
        is_last_try = measuring.is_held(
            self._gossip.view,
            r,
            rounds=self._settings.rounds,
            num_slots=self._settings.slots.of(r),
            now=asyncio.get_running_loop().time(),
        )
        try:
            replies = await self._ask_for_all(r)
            num_tokens = sum(reply.num_tokens for reply in replies)
            if num_tokens:
                loss = sum(reply.loss_sum for reply in replies) / num_tokens
                self._publish(r, loss)
            mine.measured()
        except Refused as e:
            log.warning("round %d: the held-out loss was not measured: %s", r, e)
            mine.measured()
        except SwarmnetError as e:
            log.info("round %d: the held-out loss was not measured: %s", r, e)
            mine.missed(is_ahead=is_ahead, is_last_try=is_last_try)
            if not is_last_try:
                await asyncio.sleep(LOOK_LESS_S)
        except Exception:  # of a builder's data, say: it holds no round
            log.exception("round %d: the held-out loss was not measured", r)
            mine.measured()

    def _publish(self, r: int, loss: float) -> None:
        """Where others can believe it, who would drop the whole record else."""
        found = HeldOut(r, loss, bits_per_byte(loss, self._data.bytes_per_token))
        if self._settings.bounds.allows_loss(found):
            self._gossip.update(held_out=found, urgent=True)
        else:
            log.warning("round %d: the held-out loss is not told: it cannot be %.3g", r, loss)

    def _check(self, reply: Message[InferReply]) -> None:
        """Of one microbatch. Raises `ProtocolViolation` where it cannot have that loss."""
        num_tokens = reply.body.num_tokens
        loss = reply.body.loss_sum / num_tokens if num_tokens else 0.0
        if not self._settings.bounds.allows_loss(HeldOut(0, loss, 0.0)):
            raise ProtocolViolation(f"a loss of {loss:.3g} a token, which cannot be")

    async def _ask_for_all(self, r: int) -> list[InferReply]:
        """The replies for all held-out microbatches, in order. At a time so many are under way that
        each stage has one for every replica, as far as the thinnest stage goes: the round waits for
        them, and fewer would leave devices and links without work. More would keep the places of
        training."""
        now, view = asyncio.get_running_loop().time(), self._gossip.view
        stages = range(self._settings.num_stages)
        width = max(1, min(len(view.replicas(s, now)) for s in stages))
        places = asyncio.Semaphore(len(stages) * width)
        asking = Tasks("held-out loss")
        try:
            return await asyncio.gather(
                *(asking.start(self._ask(r, i, places)) for i in range(self._data.num_held_out))
            )
        finally:
            await asking.close()

    async def _ask(self, r: int, index: int, places: asyncio.Semaphore) -> InferReply:
        async with places:
            batch = self._data.held_out(index)
            infer = InferRequest(0, EVALUATE, r, batch.documents)
            reply = await infer_through(self._dispatcher, infer, batch.arrays, self._check)
        return reply.body


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Loss in nats per token as bits per byte of text; 0 where the data is not text."""
    return loss / 0.6931471805599453 / bytes_per_token if bytes_per_token else 0.0
