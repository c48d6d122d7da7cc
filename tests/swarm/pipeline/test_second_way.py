"""A microbatch whose replica is late is sent a second way: whoever answers first counts."""

from __future__ import annotations

import asyncio

from swarmnet.simulation.clock import run as run_virtual
from tests.swarm.one_replica import CALLEE, WORK_S, OneReplica

SLOWER = 10.0


def test_who_is_late_on_trial_holds_nobody_up_and_has_its_share_when_it_answers() -> None:
    async def main() -> None:
        pair, loop = OneReplica(), asyncio.get_running_loop()
        try:
            caller = pair.caller("caller", 1e9)
            for n in range(6):
                await caller.step(n)
            caller.knows(pair.second("slow", SLOWER))
            began_at = loop.time()
            passed = await caller.step(10)
            assert passed.peer_id == CALLEE
            assert 2 * WORK_S < loop.time() - began_at < SLOWER * WORK_S / 2
            assert caller.gossip.own.totals.get("rerouted") == 1
            router = caller.dispatcher.router(0)
            assert router.is_on_its_word("slow")
            began_at = loop.time()
            assert (await caller.step(11)).peer_id == CALLEE, "it rests"
            assert loop.time() - began_at < 2 * WORK_S
            await asyncio.sleep(SLOWER * WORK_S)
            assert not router.is_on_its_word("slow")
            assert router.is_ready("slow", loop.time())
        finally:
            await caller.dispatcher.close()
            await pair.close()

    run_virtual(main())


def test_where_all_of_a_stage_are_late_nothing_is_done_twice() -> None:
    async def main() -> None:
        pair, loop = OneReplica(), asyncio.get_running_loop()
        try:
            caller = pair.caller("caller", 1e9)
            caller.knows(pair.second("other"))
            for n in range(12):
                await caller.step(n)
            pair.work_s = 8 * WORK_S
            steps = [loop.create_task(caller.step(20 + n)) for n in range(2)]
            done = await asyncio.gather(*steps)
            assert {passed.peer_id for passed in done} == {CALLEE, "other"}
            assert not caller.gossip.own.totals.get("rerouted")
        finally:
            await caller.dispatcher.close()
            await pair.close()

    run_virtual(main())
