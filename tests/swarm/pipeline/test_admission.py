"""Who is let into a replica, and what is said of the wait (the whole of it: `test_room`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmnet.errors import Busy, NotReady, Stale
from swarmnet.methods.microbatch import AdmitReply, AdmitRequest
from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.simulation.clock import run
from swarmnet.wire import Message, convert
from tests.swarm.one_replica import CALLEE, WORK_S, Caller, OneReplica, learn


def scenario(play: Callable[[OneReplica], Awaitable[None]]) -> None:
    async def whole() -> None:
        pair = OneReplica()
        await play(pair)
        await pair.close()

    run(whole())


async def asked(caller: Caller, microbatch_id: int, round_index: int = 0) -> AdmitReply:
    body = AdmitRequest(round_index, microbatch_id, 0)
    reply = await caller.transport.call(CALLEE, "admit", Message(body), timeout_s=5.0)
    return convert(reply.body, AdmitReply)


def test_the_wait_grows_with_what_is_in_the_queue() -> None:
    async def play(pair: OneReplica) -> None:
        learn(pair.replica, WORK_S)
        near, loop = pair.caller("near", 1e9), asyncio.get_running_loop()
        waits = [(await asked(near, 0)).wait_s]
        for n in (1, 2):
            loop.create_task(near.step(n))
            await asyncio.sleep(0.1)
            waits.append((await asked(near, 0)).wait_s)
        assert waits == sorted(waits)
        assert waits[-1] > waits[0] + WORK_S / 2
        assert (await asked(near, 1)).known

    scenario(play)


def test_a_place_that_is_kept_is_free_when_the_microbatch_comes() -> None:
    async def play(pair: OneReplica) -> None:
        near = pair.caller("near", 1e9)
        await near.ask(1)
        assert pair.steps.admission.num_reserved() == 1
        await near.step(1)
        assert pair.steps.admission.num_reserved() == 0

    scenario(play)


def test_a_full_queue_a_past_round_and_a_leaving_peer_say_so() -> None:
    async def play(pair: OneReplica) -> None:
        near = pair.caller("near", 1e9)
        pair.fill()
        await asyncio.sleep(0.1)
        with pytest.raises(Busy):
            pair.steps.admission.check_room(pair.replica, 0, announced=False)
        pair.replica.transitions.phase = Phase(State.OPEN, 2)
        with pytest.raises(Stale):
            await asked(near, 7, round_index=1)
        pair.gossip.update(state=LEAVING)
        with pytest.raises(NotReady):
            pair.steps.admission.check_room(pair.replica, 2, announced=False)

    scenario(play)
