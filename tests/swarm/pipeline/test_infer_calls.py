"""How many calls one forward pass may cause, and which ones are refused before any."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnet.errors import Busy, Refused
from swarmnet.methods.microbatch import EVALUATE, INFER, LOGITS, InferRequest
from swarmnet.protocol.pipeline.dispatching import MAX_REFUSALS
from swarmnet.protocol.timing import LAPSES
from swarmnet.simulation.clock import run
from swarmnet.simulation.stage import SyntheticData
from swarmnet.swarm.pipeline.infer import InferService, infer_through
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.swarm.one_replica import CALLEE, OneReplica

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
