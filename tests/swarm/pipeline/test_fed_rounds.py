"""The books of a feeder: what counts, what may yet, and who is told."""

from __future__ import annotations

import asyncio

from swarmnet.methods.microbatch import CommittedReply, CommittedRequest
from swarmnet.simulation.clock import run
from swarmnet.swarm.pipeline.fed_rounds import KEPT_COMMITS, FedRounds

NUM_STAGES = 2


def test_only_those_on_the_path_are_told_that_a_microbatch_counts() -> None:
    async def scenario() -> None:
        rounds = FedRounds(NUM_STAGES)
        mine = rounds.begin(3)
        mine.committed[1] = ("a", "b")
        mine.in_flight.add(2)
        may_yet = CommittedRequest(3, 1, (1, 2, 9), is_over=False)
        assert rounds.committed(may_yet, "b") == CommittedReply((1,), (2,))
        assert rounds.committed(may_yet, "a") == CommittedReply((), (2,)), "of another stage"
        assert rounds.committed(CommittedRequest(8, 1, (1,)), "b") == CommittedReply(())

    run(scenario())


def test_a_replica_whose_round_is_over_refuses_what_passed_through_it() -> None:
    async def scenario() -> None:
        rounds = FedRounds(NUM_STAGES)
        mine = rounds.begin(3)
        mine.in_flight |= {1, 2}
        for the_id in (1, 2):
            over = CommittedRequest(3, 1, (the_id,), is_over=True)
            assert rounds.committed(over, "b") == CommittedReply(())
        assert mine.is_refused(1, ("a", "b"))
        assert not mine.is_refused(2, ("b", "c")), "it went another way"

    run(scenario())


def test_each_committed_microbatch_is_told_once_when_its_round_is_over() -> None:
    async def scenario() -> None:
        rounds = FedRounds(NUM_STAGES)
        first, second = rounds.begin(3), rounds.begin(4)
        first.committed[5] = first.committed[2] = second.committed[7] = ("a", "b")
        assert list(rounds) == [first, second]
        assert await rounds.end_others(4) == [first]
        assert list(first.news()) == [2, 5]
        assert not first.news()
        assert rounds.get_open(3) is None
        assert rounds.get(3) is first
        assert [list(mine.news()) for mine in rounds.kept()] == [[], [7]]

    run(scenario())


def test_a_round_that_begins_once_more_is_measured_once_more() -> None:
    """After a rewind, or where its beginning was taken back, it has other parameters."""

    async def scenario() -> None:
        rounds = FedRounds(NUM_STAGES)
        mine = rounds.begin(4)
        mine.missed(is_ahead=True, is_last_try=True)
        assert rounds.begin(4).is_measured, "it goes on"
        await rounds.end_others(2)
        assert rounds.begin(4) is mine
        assert not mine.is_measured
        assert not mine.is_missed_ahead

    run(scenario())


def test_what_is_in_flight_ends_with_its_round_and_old_books_go() -> None:
    async def scenario() -> None:
        rounds = FedRounds(NUM_STAGES)
        task = rounds.begin(3).flights.start(asyncio.sleep(60.0))
        await rounds.end_others(4)
        assert task.cancelled()
        for r in range(4, 4 + KEPT_COMMITS):
            rounds.begin(r)
        assert rounds.get(3) is None
        assert sorted(rounds.committed_by_id()) == list(range(4, 4 + KEPT_COMMITS))
        await rounds.end_all()
        assert not list(rounds)

    run(scenario())
