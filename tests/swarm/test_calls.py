"""Bodies of calls are what the row of the method says, on both sides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmnet.errors import Busy, ProtocolViolation
from swarmnet.methods.contact import PING, RELAY_RESERVE, RelayGrant
from swarmnet.methods.microbatch import STEP, StepProgress, StepReply, StepRequest
from swarmnet.methods.ranges import MAX_STEP_SAMPLES
from swarmnet.methods.update import AdoptedRequest
from swarmnet.simulation.clock import run
from swarmnet.swarm.calls import ServingQueue, call
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub, MemoryTransport
from swarmnet.wire import Message

STEP_BODY = StepRequest(0, 1, 0, "a", 4)


def pair() -> tuple[MemoryTransport, MemoryTransport]:
    hub = MemoryHub()
    return hub.transport("a"), hub.transport("b")


def test_a_reply_comes_decoded() -> None:
    async def answer(request: Request) -> Message:
        return Message({"addresses": ["/ip4/1.2.3.4/tcp/1"], "seconds": 5.0, "later": 1})

    async def scenario() -> None:
        a, b = pair()
        b.handle(RELAY_RESERVE.name, answer)
        reply = await call(a, "b", RELAY_RESERVE, Message(), timeout_s=1.0)
        assert reply.body == RelayGrant(("/ip4/1.2.3.4/tcp/1",), 5.0)

    run(scenario())


@pytest.mark.parametrize("body", [None, {"addresses": []}, {"addresses": [], "seconds": -1.0}])
def test_a_reply_of_another_form_is_a_violation(body: Any) -> None:
    async def answer(request: Request) -> Message:
        return Message(body)

    async def scenario() -> None:
        a, b = pair()
        b.handle(RELAY_RESERVE.name, answer)
        with pytest.raises(ProtocolViolation, match="RelayGrant"):
            await call(a, "b", RELAY_RESERVE, Message(), timeout_s=1.0)

    run(scenario())


def test_what_is_in_a_body_that_has_nothing_is_not_looked_at() -> None:
    async def answer(request: Request) -> Message:
        return Message({"of": "a later version"})

    async def scenario() -> None:
        a, b = pair()
        b.handle(PING.name, answer)
        assert (await call(a, "b", PING, Message(), timeout_s=1.0)).body is None

    run(scenario())


def test_progress_comes_decoded_or_not_at_all() -> None:
    heard: list[Message[StepProgress]] = []

    async def answer(request: Request) -> Message:
        for body in ({"path": ["b"]}, {"path": 3}, None, {"path": ["b", "c"]}):
            request.progress(Message(body))
        return Message(StepReply(1.0, 4, ("b", "c")))

    async def scenario() -> None:
        a, b = pair()
        b.handle(STEP.name, answer)
        message = Message(STEP_BODY)
        reply = await call(a, "b", STEP, message, timeout_s=1.0, on_progress=heard.append)
        assert reply.body == StepReply(1.0, 4, ("b", "c"))

    run(scenario())
    assert [note.body for note in heard] == [StepProgress(("b",)), StepProgress(("b", "c"))]


def test_few_are_served_at_a_time_and_a_bounded_number_waits() -> None:
    async def scenario() -> None:
        queue, served = ServingQueue(at_once=1, most=2), 0

        async def ask() -> None:
            nonlocal served
            async with queue.turn():
                served += 1
                await asyncio.sleep(1.0)

        asking = [asyncio.ensure_future(ask()) for _ in range(2)]
        await asyncio.sleep(0.5)
        assert served == 1
        with pytest.raises(Busy, match="serving others"):
            await ask()
        await asyncio.sleep(1.0)
        assert served == 2
        await asyncio.gather(*asking)
        await ask()

    run(scenario())


def test_a_microbatch_has_no_more_samples_than_a_round_of_them_can_be_handed_over_with() -> None:
    with pytest.raises(ValueError, match="samples"):
        StepRequest(0, 1, 0, "a", MAX_STEP_SAMPLES + 1)
    AdoptedRequest(0, 0, MAX_STEP_SAMPLES * MAX_STEP_SAMPLES, 1)
