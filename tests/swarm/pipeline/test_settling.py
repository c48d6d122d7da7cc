"""The end of a round: microbatches of which nobody told this replica whether they count."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarmnet.errors import Busy, NotReady
from swarmnet.methods.microbatch import Commit, CommittedReply
from swarmnet.protocol.pipeline.ledger import COMMITTED, PENDING
from swarmnet.protocol.slots import SlotPlan
from swarmnet.protocol.update.lost_samples import LostSamples
from swarmnet.simulation.clock import VirtualLoop
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.update.rounds import Rounds, ZeroUpdates
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.one_replica import CALLEE, RUN, SIZES, WORK_S, OneReplica


def rounds_of(pair: OneReplica) -> Rounds:
    return Rounds(
        pair.gossip,
        RunSettings(RUN, 1, 8, 4, 9),
        pair.limits,
        pair.replica,
        pair.steps,
        ZeroUpdates(pair.replica, None, None),  # type: ignore[arg-type]
        None,
        LostSamples(pair.gossip.view, 0, SlotPlan(((0, 8),)), 4),
    )


@pytest.mark.parametrize("commit_at_s", [0.5, 2.0, None])
def test_the_gradient_is_that_of_the_tokens_that_are_counted(commit_at_s: float | None) -> None:
    """A commit that comes while the feeder is asked, or while what it is about is being retracted:
    it counts and stays, or it does not and is gone."""

    async def main() -> None:
        pair = OneReplica()
        feeder = pair.caller("feeder", 1e9)

        async def answer(request: Request) -> Message:
            await asyncio.sleep(1.0)
            return Message(CommittedReply(()))

        feeder.transport.handle("committed", answer)
        replica = pair.replica
        await feeder.step(1)
        await feeder.step(2)
        feeder.transport.notify(CALLEE, "commit", Message(Commit(0, (1,))))
        await asyncio.sleep(0.1)
        rounds = rounds_of(pair)
        await replica.transitions.close_round()
        if commit_at_s is not None:
            late = Message(Commit(0, (2,)))
            loop = asyncio.get_running_loop()
            loop.call_later(commit_at_s, feeder.transport.notify, CALLEE, "commit", late)
        await rounds.settle(0)
        ids = replica.stage.gradient_shard(0).data.ids  # type: ignore[attr-defined]
        assert sorted(key[1] for key in ids) == ([1, 2] if commit_at_s == 0.5 else [1])
        assert replica.ledger.num_tokens(0) == len(ids) * SIZES.tokens_per_microbatch
        assert len(replica.ledger.committed(0)) == len(ids)
        assert all(e.state == COMMITTED for e in replica.ledger.committed(0))
        await pair.steps.close()

    run_virtual(main())


def test_a_feeder_whose_channel_breaks_is_asked_again() -> None:
    """What it has counted is not retracted because one question was lost."""

    async def main() -> None:
        pair = OneReplica()
        feeder = pair.caller("feeder", 1e9)
        asked = 0

        async def answer(request: Request) -> Message:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise Busy("one moment", backlog_s=0.1)
            return Message(CommittedReply((1,)))

        feeder.transport.handle("committed", answer)
        await feeder.step(1)
        rounds = rounds_of(pair)
        await pair.replica.transitions.close_round()
        await rounds.settle(0)
        ids = pair.replica.stage.gradient_shard(0).data.ids  # type: ignore[attr-defined]
        assert asked == 2
        assert [key[1] for key in ids] == [1]
        assert [e.key[1] for e in pair.replica.ledger.committed(0)] == [1]
        await pair.steps.close()

    run_virtual(main())


@pytest.mark.parametrize("is_alive", [True, False])
def test_in_a_round_that_goes_on_only_what_will_never_count_is_taken_out(is_alive: bool) -> None:
    """One counts, one may yet, one never will; of the last the feeder does not answer."""

    async def main() -> None:
        pair = OneReplica()
        feeder, silent = pair.caller("feeder", 1e9), pair.caller("silent", 1e9)

        async def answer(request: Request) -> Message:
            question = request.message.body
            assert not question.is_over
            return Message(CommittedReply((1,), (2,)))

        async def fail(request: Request) -> Message:
            raise NotReady("not now")

        feeder.transport.handle("committed", answer)
        silent.transport.handle("committed", fail)
        for microbatch_id in (1, 2, 3):
            await feeder.step(microbatch_id)
        await silent.step(4)
        if not is_alive:
            pair.hub.freeze("silent")
            pair.gossip.liveness.unanswered("silent", (1, 9))
        replica = pair.replica
        rounds, ledger = rounds_of(pair), replica.ledger
        await rounds.settle(0, is_over=False)
        assert ledger.pending(0)[-1].key[1] == 4, "its commit may be on its way"
        await rounds.settle(0, is_over=False)
        states = {e.key[1]: e.state for e in (*ledger.pending(0), *ledger.committed(0))}
        assert states == {1: COMMITTED, 2: PENDING} | ({4: PENDING} if is_alive else {})
        ids = replica.stage.gradient_shard(0).data.ids  # type: ignore[attr-defined]
        assert {key[1] for key in ids} == set(states)
        assert replica.is_open(0)
        # It may come back by another way: nothing of the first time is in the way.
        await feeder.step(3)
        assert 3 in {e.key[1] for e in replica.ledger.pending(0)}
        await pair.steps.close()

    run_virtual(main())


@pytest.mark.parametrize("thaw_at_s", [2.8, 4.0, 6.0, 8.0])
@pytest.mark.parametrize("news_at_s", [None, 1.0])
def test_what_a_feeder_that_comes_back_has_counted_stays(
    thaw_at_s: float, news_at_s: float | None
) -> None:
    """Also where news of it that was on its way when it stopped keeps it from being suspected."""

    async def main() -> None:
        pair = OneReplica()
        feeder = pair.caller("feeder", 1e9)
        loop = asyncio.get_running_loop()

        async def answer(request: Request) -> Message:
            return Message(CommittedReply((1,)))

        feeder.transport.handle("committed", answer)
        await feeder.step(1)
        rounds = rounds_of(pair)
        await pair.replica.transitions.close_round()
        pair.hub.freeze("feeder")
        loop.call_later(thaw_at_s, pair.hub.thaw, "feeder")
        if news_at_s is not None:
            newer = replace(feeder.gossip.own, version=2)
            loop.call_later(news_at_s, pair.gossip.view.merge, newer, loop.time())
        await rounds.settle(0)
        assert [e.key[1] for e in pair.replica.ledger.committed(0)] == [1]
        assert loop.time() < thaw_at_s + WORK_S + 4.0
        await pair.steps.close()

    run_virtual(main())


def test_a_feeder_that_lives_and_does_not_answer_costs_seconds() -> None:
    async def main() -> None:
        pair = OneReplica()
        feeder = pair.caller("feeder", 1e9)
        loop = asyncio.get_running_loop()

        async def never(request: Request) -> Message:
            await asyncio.sleep(1e6)
            raise AssertionError

        feeder.transport.handle("committed", never)
        await feeder.step(1)
        rounds = rounds_of(pair)
        await pair.replica.transitions.close_round()
        began = loop.time()
        await rounds.settle(0)
        assert not pair.replica.ledger.committed(0)
        assert loop.time() - began < pair.limits.commit_question_s + 1.5 + WORK_S
        await pair.steps.close()

    run_virtual(main())


def test_an_answer_that_came_while_this_process_stood_still_is_asked_for_again() -> None:
    async def main() -> None:
        pair = OneReplica()
        feeder = pair.caller("feeder", 1e9)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def answer(request: Request) -> Message:
            await asyncio.sleep(4.0 if loop.time() < stop_at else 0.1)
            return Message(CommittedReply((1,)))

        feeder.transport.handle("committed", answer)
        await feeder.step(1)
        rounds = rounds_of(pair)
        await pair.replica.transitions.close_round()
        gossip = asyncio.create_task(pair.gossip.run())
        stop_at = loop.time() + 1.5
        loop.call_at(stop_at, loop.stand_still, 2.5)
        await rounds.settle(0)
        assert [e.key[1] for e in pair.replica.ledger.committed(0)] == [1]
        gossip.cancel()
        await pair.steps.close()

    run_virtual(main())
