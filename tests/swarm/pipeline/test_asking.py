"""Which of the replicas that say how long their queues are gets a microbatch."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from swarmnet.protocol.pipeline.routing import Router
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import AdmitReply, StepRequest
from swarmnet.swarm.pipeline.asking import Asking
from swarmnet.transport.base import Transport
from swarmnet.wire import Message

SERVICE_S, ANSWER_S = 0.1, 0.01
SAMPLES = 8


class Stage:
    """Replicas that announce the same speed, and one caller."""

    def __init__(self, **waits_s: float) -> None:
        self.waits_s = waits_s
        self.router = Router(random.Random(5), samples_per_call=SAMPLES)
        self.router.update(dict.fromkeys(waits_s, SAMPLES / SERVICE_S), 0.0)
        transport = SimpleNamespace(notify=lambda peer_id, method, message: None)
        gossip = SimpleNamespace(liveness=self, own=SimpleNamespace(peer_id="caller"))
        self.asking = Asking(cast(Transport, transport), cast(Gossip, gossip), self._own)

    async def call_while_live(self, peer_id: str, *_: Any, **__: Any) -> Message:
        await asyncio.sleep(ANSWER_S)
        return Message(AdmitReply(wait_s=self.waits_s[peer_id]))

    async def _own(self, message: Message) -> Message:
        raise AssertionError("the caller serves another stage")

    async def chosen(self, number: int) -> str:
        request = StepRequest(0, number, 1, "caller", SAMPLES)
        peer_id = await self.asking.around(self.router, request, ())
        assert peer_id is not None
        return peer_id


def test_two_free_replicas_get_about_the_same() -> None:
    """A millisecond less is no reason for one of them to get all."""

    async def play() -> None:
        stage = Stage(a=0.001, b=0.0, c=0.5)
        chosen = Counter([await stage.chosen(i) for i in range(60)])
        assert set(chosen) == {"a", "b"}
        assert min(chosen.values()) >= 15

    run_virtual(play())


def test_what_was_sent_since_a_question_counts() -> None:
    """Questions that a caller has out together all hear of the same free replicas."""

    async def play() -> None:
        for number in range(20):
            stage = Stage(a=0.0, b=0.0)
            both = await asyncio.gather(stage.chosen(2 * number), stage.chosen(2 * number + 1))
            assert sorted(both) == ["a", "b"]

    run_virtual(play())


def test_a_queue_that_is_longer_by_half_a_microbatch_is_left_alone() -> None:
    async def play() -> None:
        stage = Stage(a=SERVICE_S / 2, b=0.0)
        assert {await stage.chosen(i) for i in range(20)} == {"b"}

    run_virtual(play())
