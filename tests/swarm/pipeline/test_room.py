"""`admit`: a caller on a slow uplink asks for room before it sends, and a place is kept for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from swarmnet.errors import Busy, Stale, SwarmnetError
from swarmnet.ports import FORWARD, OTHER
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.pipeline.admission import ASK_WORK_S
from swarmnet.protocol.pipeline.ledger import Ledger
from swarmnet.protocol.pipeline.reservations import RESERVED_S
from swarmnet.protocol.pipeline.routing import FIRST_DEADLINE_S
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.wire import Message
from tests.swarm.one_replica import (
    CALLEE,
    SIZES,
    SLOW_BYTES_PER_S,
    WORK_S,
    Caller,
    OneReplica,
    learn,
)


def scenario(play: Callable[[OneReplica], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = OneReplica()
        try:
            await play(pair)
        finally:
            await pair.close()

    run_virtual(main())


async def refused_as_busy(asked: Awaitable[None]) -> None:
    with pytest.raises(Busy):
        await asked


def test_a_full_replica_costs_a_slow_uplink_no_activation() -> None:
    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        work = pair.fill()
        await asyncio.sleep(0.5)
        slow = pair.caller("slow")
        step = loop.create_task(slow.step(1))
        await asyncio.sleep(2 * pair.limits.route_wait_s)
        assert not any(w.done() for w in work)
        assert not step.done(), "it lives, and will have room"
        assert slow.sent("step") == 0
        assert 0 < slow.sent("admit") < SIZES.activation_bytes / 100
        await asyncio.gather(*work)
        assert (await step).peer_id == CALLEE
        assert slow.sent("step") > SIZES.activation_bytes

    scenario(play)


def test_a_slow_uplink_asks_again_where_the_replica_that_had_the_microbatch_is_gone() -> None:
    async def play(pair: OneReplica) -> None:
        slow = pair.caller("slow")
        await slow.step(1, hint=(CALLEE,))
        assert slow.sent("admit") == 0, "it may have it already"
        before = slow.sent("step")
        work = pair.fill()
        await asyncio.sleep(0.5)
        step = asyncio.ensure_future(slow.step(2, hint=("gone",)))
        await asyncio.sleep(2 * pair.limits.route_wait_s)
        assert not step.done()
        assert slow.sent("step") == before
        await asyncio.gather(*work, step)

    scenario(play)


def test_a_fast_uplink_does_not_ask() -> None:
    async def play(pair: OneReplica) -> None:
        fast = pair.caller("fast", 1e9)
        await fast.step(1)
        assert fast.sent("admit") == 0

    scenario(play)


def test_where_the_work_is_long_a_fast_uplink_asks_too() -> None:
    """Many callers that guess who is free send bursts to some and nothing to others."""

    async def play(pair: OneReplica) -> None:
        for work_s, asks in ((4 * ASK_WORK_S, True), (ASK_WORK_S / 4, False)):
            fast = pair.caller(f"fast {work_s}", 1e9)
            rate = SIZES.tokens_per_microbatch / work_s
            fast.knows(replace(pair.announced, version=5, samples_per_s=rate))
            await fast.step(1 + int(asks))
            assert (fast.sent("admit") > 0) == asks

    scenario(play)


def queue_of(pair: OneReplica, work_s: float) -> None:
    """Pieces of work take this long, as everybody knows, and those who ask may stand in a long
    queue."""
    pair.work_s = work_s
    learn(pair.replica, work_s)
    pair.limits = replace(pair.limits, max_waiting_announced=8, route_wait_s=30.0)
    pair.steps.admission.limits = pair.limits


def test_who_is_turned_away_from_a_long_queue_asks_from_then_on() -> None:
    """Others ask before they come, and fill the places behind the few for those who do not."""

    async def play(pair: OneReplica) -> None:
        queue_of(pair, WORK_S)
        work = pair.fill()
        await asyncio.sleep(0.5)
        fast = pair.caller("fast", 1e9)
        assert (await fast.step(1)).peer_id == CALLEE
        assert fast.sent("admit") > 0
        assert fast.sent("step") < 2.1 * SIZES.activation_bytes, "sent twice at most"
        before = fast.sent("step")
        await asyncio.gather(*work, *(fast.step(2 + n) for n in range(4)))
        assert fast.sent("step") - before < 4.1 * SIZES.activation_bytes, "none came for nothing"

    scenario(play)


def test_a_short_queue_is_not_worth_a_question() -> None:
    async def play(pair: OneReplica) -> None:
        queue_of(pair, 0.05)
        fast = pair.caller("fast", 1e9)
        await asyncio.gather(*pair.fill(), *(fast.step(n) for n in range(8)))
        assert fast.sent("step") > 8.1 * SIZES.activation_bytes, "it was turned away"
        assert fast.sent("admit") == 0

    scenario(play)


def test_the_place_of_a_microbatch_on_its_way_is_not_given_to_others() -> None:
    """The activation takes two seconds; who calls meanwhile is told `Busy`, and it finds its place
    when it arrives."""

    async def play(pair: OneReplica) -> None:
        pair.limits = replace(pair.limits, route_wait_s=30.0)
        loop = asyncio.get_running_loop()
        slow = pair.caller("slow", SIZES.activation_bytes / 2.0)
        coming = loop.create_task(slow.step(1))
        await asyncio.sleep(0.5)
        work = pair.fill()  # for one of these there is no room yet
        await asyncio.sleep(0.5)
        assert pair.steps.num_in_flight == pair.limits.max_waiting_forwards - 1
        other = pair.caller("other")
        await refused_as_busy(other.ask(2))
        await slow.ask(1)  # who has the place may ask again, full as it is
        await coming
        await asyncio.gather(*work)
        assert slow.sent("step") < 1.1 * SIZES.activation_bytes, "sent once"

    scenario(play)


def test_a_place_that_nobody_comes_for_lapses() -> None:
    async def play(pair: OneReplica) -> None:
        first, second, third = (pair.caller(name) for name in ("first", "second", "third"))
        await first.ask(1)
        await first.ask(2)
        await second.ask(3)
        await refused_as_busy(third.ask(4))
        await asyncio.sleep(RESERVED_S)
        await third.ask(4)

    scenario(play)


def test_places_of_a_round_that_is_over_are_free() -> None:
    async def play(pair: OneReplica) -> None:
        first, second, third = (pair.caller(name) for name in ("first", "second", "third"))
        for n, caller in enumerate((first, first, second)):
            await caller.ask(n)
        await refused_as_busy(third.ask(4))
        pair.steps.drop_round(0)
        pair.replica.transitions.phase = Phase(State.OPEN, 1)
        await third.ask(4, 1)

    scenario(play)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_flood_of_questions_does_not_keep_others_out(is_known: bool) -> None:
    """Whoever asks for room without end and never comes, in whatever round, takes it from nobody:
    unknown to the replica not for a moment, else never the last place, and that only once."""

    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        honest = pair.caller("honest")
        flood = pair.caller("flood") if is_known else Caller(pair, "flood", 1e9)
        refused = 0

        async def ask(n: int) -> None:
            nonlocal refused
            try:
                await flood.ask(n, n % 50)
            except SwarmnetError:
                refused += 1

        async def flooding() -> None:
            for n in range(0, 100_000, 50):
                await asyncio.gather(*(ask(n + i) for i in range(50)))
                await asyncio.sleep(0.2)

        attack = loop.create_task(flooding())
        await asyncio.sleep(1.0)
        began = loop.time()
        for n in range(3):
            await honest.step(n)
        took_s = loop.time() - began
        alone_s = 3 * (WORK_S + SIZES.activation_bytes / SLOW_BYTES_PER_S)
        assert took_s < 1.2 * alone_s
        await asyncio.sleep(RESERVED_S)
        assert pair.steps.admission.num_reserved() == 0, "and in the end it is not believed"
        attack.cancel()

    scenario(play)


def test_a_callee_that_says_it_is_at_work_is_waited_for() -> None:
    """Its queue is longer than any deadline that callers know of: nothing is sent twice."""

    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        pair.work_s = 20 * FIRST_DEADLINE_S
        caller = pair.caller("caller", 1e9)
        began = loop.time()
        assert (await caller.step(1)).peer_id == CALLEE
        assert loop.time() - began > 20 * FIRST_DEADLINE_S
        assert caller.sent("step") < 1.1 * SIZES.activation_bytes, "sent once"
        assert caller.gossip.own.totals.get("rerouted", 0) == 0

    scenario(play)


def test_a_callee_that_knows_nothing_of_it_is_left_at_its_deadline() -> None:
    """It answers, but the microbatch is not there any more."""

    async def play(pair: OneReplica) -> None:
        pair.work_s = 1e6
        caller = pair.caller("caller", 1e9)
        coming = asyncio.get_running_loop().create_task(caller.step(1))
        await asyncio.sleep(1.0)
        pair.steps.flights.forget((0, 1))
        pair.replica.ledger = Ledger()
        await asyncio.sleep(1.5 * FIRST_DEADLINE_S)
        assert caller.gossip.own.totals["rerouted"] == 1
        coming.cancel()

    scenario(play)


def test_a_slow_device_without_work_gets_it_before_a_fast_one_with_a_queue() -> None:
    """Though it is done later: what all of them do counts, not when this microbatch is
    completed."""

    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        learn(pair.replica, pair.work_s)
        near = pair.caller("near", 1e9)
        slower = pair.second("slower", 3.0)
        work = [loop.create_task(near.step(i)) for i in range(2)]
        await asyncio.sleep(0.5)
        far = pair.caller("far")
        far.knows(slower)
        assert (await far.step(100)).peer_id == "slower"
        await asyncio.gather(*work)

    scenario(play)


def test_a_slow_device_is_not_chosen_before_a_fast_one_that_begins_at_once() -> None:
    async def play(pair: OneReplica) -> None:
        learn(pair.replica, pair.work_s)
        slower = pair.second("slower", 3.0)
        far = pair.caller("far")
        far.knows(slower)
        assert (await far.step(100)).peer_id == CALLEE

    scenario(play)


def test_what_a_replica_has_passed_on_weighs_less_than_what_waits_before_a_device() -> None:
    """It comes back, but not now: of two idle devices the one with less of it is chosen, and before
    one that has work, one that has none."""

    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        near = two_free(pair)
        (other,) = pair.others

        async def with_the_stages_behind() -> Message:
            await asyncio.sleep(600.0)
            return Message()

        for first, steps, num_passed_on, chosen in (
            (10, pair.steps, 8, "free"),
            (20, other, 16, CALLEE),
        ):
            for i in range(num_passed_on):
                flight = steps.flights.enter((0, 100 * first + i), "far")
                steps.flights.start(flight, with_the_stages_behind())
            for n in range(first, first + 3):
                assert (await near.step(n)).peer_id == chosen
        device = pair.replica.device
        work = [loop.create_task(device.run(FORWARD, lambda: None, 0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert (await near.step(30)).peer_id == "free"
        await asyncio.gather(*work)

    scenario(play)


@pytest.mark.parametrize("work_s", [WORK_S, ASK_WORK_S / 4])
def test_what_a_replica_feeds_another_may_begin_where_the_work_is_long(work_s: float) -> None:
    """It has a queue of its own, and the other is free; short work is done by itself."""

    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        pair.work_s = work_s
        two_free(pair)
        other = pair.caller("other", 1e9)
        work = [loop.create_task(other.step(i)) for i in range(2)]
        await asyncio.sleep(0.1)
        passed = await pair.feed(100)
        assert passed.peer_id == ("free" if work_s > ASK_WORK_S else CALLEE)
        await asyncio.gather(*work)
        assert (await pair.feed(101)).peer_id in ("free", CALLEE)

    scenario(play)


def test_one_of_those_asked_for_whom_the_round_is_over_does_not_end_it() -> None:
    """It may err, or lie; where all say so the call ends."""

    async def play(pair: OneReplica) -> None:
        near = two_free(pair)
        pair.others[0].serving.of(0).transitions.phase = Phase(State.OPEN, 5)
        for n in range(3):
            assert (await near.step(n)).peer_id == CALLEE
        pair.replica.transitions.phase = Phase(State.OPEN, 5)
        with pytest.raises(Stale):
            await near.step(10)

    scenario(play)


def two_free(pair: OneReplica) -> Caller:
    """Two equal replicas without work, which know their speed and have room for many; and
    somebody who knows both."""
    pair.limits = replace(pair.limits, max_waiting_announced=32, route_wait_s=60.0)
    pair.steps.admission.limits = pair.limits
    learn(pair.replica, pair.work_s)
    rate = 4 / pair.work_s
    free = replace(pair.second("free"), samples_per_s=rate)
    pair.gossip.view.merge(free, asyncio.get_running_loop().time())
    pair.gossip.update(stage=0, state=ACTIVE, samples_per_s=rate)
    near = pair.caller("near", 1e9)
    near.knows(free)
    return near


def test_many_microbatches_at_once_do_not_all_go_to_one_of_two_free_replicas() -> None:
    """Who asks for all of them at the same time hears the same answer for each."""

    async def play(pair: OneReplica) -> None:
        near = two_free(pair)
        work = [asyncio.create_task(near.step(n)) for n in range(16)]
        await asyncio.sleep(pair.work_s - 0.1)
        numbers = [s.num_in_flight for s in (pair.steps, *pair.others)]
        assert sum(numbers) == 16
        assert min(numbers) >= 4
        await asyncio.gather(*work)

    scenario(play)


def test_many_that_come_at_once_find_no_more_room_than_there_is() -> None:
    """They are counted before they stand in the device's queue."""

    async def play(pair: OneReplica) -> None:
        learn(pair.replica, pair.work_s)
        rate = 4 / pair.work_s
        pair.gossip.update(stage=0, state=ACTIVE, samples_per_s=rate)
        work = [asyncio.create_task(pair.feed(n)) for n in range(8)]
        await asyncio.sleep(0.5)
        assert pair.steps.num_in_flight == pair.limits.max_waiting_announced
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    scenario(play)


def test_of_those_asked_the_one_with_the_least_before_it_gets_it() -> None:
    """Two replicas of a stage: one has much to do, the other nothing."""

    async def play(pair: OneReplica) -> None:
        loop = asyncio.get_running_loop()
        learn(pair.replica, pair.work_s)
        near = pair.caller("near", 1e9)
        idle = pair.second("idle")
        for turn in range(3):
            work = [loop.create_task(near.step(10 * turn + i)) for i in range(2)]
            await asyncio.sleep(0.5)
            slow = pair.caller(f"slow {turn}")
            slow.knows(idle)
            assert (await slow.step(100 + turn)).peer_id == "idle"
            await asyncio.gather(*work)

    scenario(play)


def test_no_work_is_begun_for_a_feeder_that_is_gone() -> None:
    """What it has launched will never count, and would have to be retracted again."""

    async def play(pair: OneReplica) -> None:
        near, far = pair.caller("near", 1e9), pair.caller("far", 1e9)
        loop = asyncio.get_running_loop()
        work = [loop.create_task(far.step(i)) for i in range(3)]
        await asyncio.sleep(0.5)
        assert len(pair.replica.ledger.running(0)) == 3
        pair.hub.kill("far")
        await asyncio.sleep(WORK_S)
        assert not pair.replica.ledger.running(0)
        assert len(pair.replica.ledger.pending(0)) <= 1, "more than what was at work was done"
        assert (await near.step(5)).peer_id == CALLEE
        await asyncio.gather(*work, return_exceptions=True)

    scenario(play)


def test_other_work_of_the_device_does_not_make_its_microbatches_slow() -> None:
    """Work for an exchange, and microbatches that nobody wants any more when they are done."""

    async def play(pair: OneReplica) -> None:
        near = pair.caller("near", 1e9)
        for n in range(6):
            gone = pair.caller(f"gone-{n}", 1e9)
            wanted = asyncio.create_task(near.step(n))
            await asyncio.sleep(0.1)
            unwanted = asyncio.create_task(gone.step(100 + n))
            other = asyncio.create_task(pair.replica.device.run(OTHER, int, 0))
            await wanted
            await asyncio.sleep(WORK_S / 2)
            pair.gossip.liveness.unanswered(
                f"gone-{n}", gone.gossip.own.stamp
            )  # in the middle of its microbatch
            unwanted.cancel()
            await asyncio.gather(unwanted, other, return_exceptions=True)
        assert pair.replica.device.busy_s >= 3 * 6 * WORK_S
        assert pair.replica.service_s == WORK_S

    scenario(play)


def test_work_of_the_next_round_keeps_no_microbatch_of_this_one_out() -> None:
    """It goes after it: who has opened the next round already is not too busy for the last
    microbatches of this one, which would all go to the one replica that has not."""

    async def play(pair: OneReplica) -> None:
        loop, device = asyncio.get_running_loop(), pair.replica.device
        later = [loop.create_task(device.run(FORWARD, lambda: None, 1)) for _ in range(20)]
        await asyncio.sleep(0.1)
        near = pair.caller("near", 1e9)
        await near.ask(1)
        began = loop.time()
        assert (await near.step(1)).peer_id == CALLEE
        assert loop.time() - began < 2.5 * pair.work_s, "it waited for more than what runs"
        assert sum(task.done() for task in later) <= 2
        for task in later:
            task.cancel()
        await asyncio.gather(*later, return_exceptions=True)

    scenario(play)


def test_behind_a_slow_device_few_may_wait_whoever_asks() -> None:
    """Else they would wait there while other replicas run out of work."""

    async def play(pair: OneReplica) -> None:
        pair.limits = replace(pair.limits, max_waiting_announced=32, max_waiting_s=240.0)
        pair.steps.admission.limits = pair.limits
        for work_s, room in ((1.0, 32), (48.0, 10), (400.0, 3)):
            for _ in range(40):
                pair.replica.measured.service.add(work_s, 1.0)
            loop, device = asyncio.get_running_loop(), pair.replica.device
            callers = [pair.caller(f"{work_s}-{n}") for n in range(2)]
            waiting = [
                loop.create_task(device.run(FORWARD, lambda: None, 0)) for _ in range(room - 1)
            ]
            await asyncio.sleep(0.01)
            await callers[0].ask(1)
            waiting.append(loop.create_task(device.run(FORWARD, lambda: None, 0)))
            await asyncio.sleep(0.01)
            await refused_as_busy(callers[1].ask(2))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.sleep(RESERVED_S + pair.work_s)

    scenario(play)
