"""How many calls one forward pass may cause, and which ones are refused before any."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmnet.errors import Busy, ProtocolViolation, Refused
from swarmnet.methods.microbatch import EVALUATE, INFER, LOGITS, InferReply, InferRequest
from swarmnet.protocol.pipeline.dispatching import MAX_REFUSALS
from swarmnet.protocol.timing import BULK_S, LAPSES
from swarmnet.simulation.clock import run
from swarmnet.simulation.stage import SyntheticData
from swarmnet.swarm.pipeline.infer import InferService, infer_through
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.swarm.one_replica import CALLEE, OneReplica

PASS_S = 0.3
"""Of the device, for a forward pass."""
REPLICAS = (CALLEE, "second", "third", "fourth", "fifth")


@pytest.mark.parametrize("error", [Refused("wrong"), Busy("full", backlog_s=0.01)])
def test_a_pass_that_is_passed_on_is_tried_at_few_replicas_once(error: Exception) -> None:
    async def scenario() -> None:
        pair, asked = OneReplica(), list[str]()
        caller = pair.caller("caller", 1e9)
        for name in REPLICAS[1:]:
            caller.knows(pair.second(name))

        def refuse(name: str) -> Any:
            async def handler(request: Request[Any]) -> Message[Any]:
                asked.append(name)
                raise error

            return handler

        for steps in (pair.steps, *pair.others):
            name = steps.transport.peer_id
            steps.transport.handle(INFER.name, refuse(name))
        arrays = SyntheticData(4).microbatch([0]).arrays
        with pytest.raises(type(error)):
            await infer_through(
                caller.dispatcher, InferRequest(0, EVALUATE), arrays, passes_on=True
            )
        assert len(asked) == len(set(asked))
        assert len(asked) == (1 if isinstance(error, Refused) else LAPSES)
        asked.clear()
        with pytest.raises(type(error)):
            await infer_through(caller.dispatcher, InferRequest(0, EVALUATE), arrays)
        assert len(asked) >= MAX_REFUSALS, "who asks for it goes on"
        await pair.close()

    run(scenario())


def test_one_that_is_silent_is_waited_for_as_long_as_is_usual_and_not_asked_again_soon() -> None:
    async def scenario() -> None:
        pair, loop = OneReplica(), asyncio.get_running_loop()
        pair.work_s = PASS_S
        caller = pair.caller("caller", 1e9)
        arrays = SyntheticData(4).microbatch([0]).arrays
        service = InferService(pair.steps.dispatcher, pair.limits, pair.steps.serving)
        assert service

        async def infer_s() -> float:
            began_at = loop.time()
            await infer_through(caller.dispatcher, InferRequest(0, EVALUATE), arrays)
            return loop.time() - began_at

        for _ in range(10):
            await infer_s()
        caller.knows(pair.second("silent"))
        asked = list[float]()

        async def swallow(request: Request[Any]) -> Message[Any]:
            asked.append(loop.time())
            await loop.create_future()
            raise AssertionError

        pair.others[0].transport.handle(INFER.name, swallow, ends_with_caller=True)
        took = [await infer_s() for _ in range(20)]
        assert 0 < len(asked) <= 4, "ever less often"
        assert max(took) < BULK_S / 10
        assert sum(took) < 20 * PASS_S * 2 + len(asked) * BULK_S / 10
        await pair.close()

    run(scenario())


FLOATS = Array("float32", (1, 4), bytes(16))
NO_ANSWERS = {
    "tokens of another number": (EVALUATE, Message(InferReply(1.0, 10**9))),
    "a loss of nothing": (EVALUATE, Message(InferReply(1.0, 0))),
    "a loss with arrays": (EVALUATE, Message(InferReply(4.0, 4), (FLOATS,))),
    "a loss that cannot be": (EVALUATE, Message(InferReply(-1e14, 4))),
    "no outputs": (LOGITS, Message(InferReply())),
    "too many": (LOGITS, Message(InferReply(), (FLOATS, FLOATS))),
    "of other inputs": (LOGITS, Message(InferReply(), (Array("float32", (3, 4), bytes(48)),))),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_another_replica_is_asked_where_one_gives_what_cannot_be(name: str) -> None:
    mode, wrong = NO_ANSWERS[name]
    batch = SyntheticData(4).microbatch([0])
    num = batch.inputs.shape[0]
    outputs = Array("float32", (num, 1), bytes(4 * num))
    right = Message(InferReply(4.0, 4)) if mode == EVALUATE else Message(InferReply(), (outputs,))

    def check(reply: Message[InferReply]) -> None:
        if reply.body.loss_sum < 0:
            raise ProtocolViolation("a loss that cannot be")

    async def scenario() -> None:
        pair, asked = OneReplica(), list[str]()
        caller = pair.caller("caller", 1e9)
        for name in REPLICAS[1:3]:
            caller.knows(pair.second(name))

        def answers(name: str) -> Any:
            async def handler(request: Request[Any]) -> Message[Any]:
                asked.append(name)
                return right if len(asked) > 2 else wrong

            return handler

        for steps in (pair.steps, *pair.others):
            steps.transport.handle(INFER.name, answers(steps.transport.peer_id))
        arrays = batch.arrays if mode == EVALUATE else (batch.inputs,)
        reply = await infer_through(caller.dispatcher, InferRequest(0, mode), arrays, check)
        assert reply.body == right.body
        assert len(set(asked)) == len(asked) == 3
        await pair.close()

    run(scenario())


@pytest.mark.parametrize("mode", [EVALUATE, LOGITS])
def test_arrays_of_another_form_are_refused_at_the_first_stage(mode: str) -> None:
    async def scenario() -> None:
        pair = OneReplica()
        caller = pair.caller("caller", 1e9)
        InferService(pair.steps.dispatcher, pair.limits, pair.steps.serving)
        batch = SyntheticData(4).microbatch([0])
        targets = Array("int32", (3, 1), bytes(12))
        for arrays in ((), (batch.inputs, targets), (batch.inputs,) * 3):
            with pytest.raises(Refused, match="infer"):
                await infer_through(caller.dispatcher, InferRequest(0, mode), arrays)
        await pair.close()

    run(scenario())
