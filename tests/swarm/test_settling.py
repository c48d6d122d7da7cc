"""The end of a round: microbatches of which nobody told this replica whether they count."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.protocol.ledger import COMMITTED
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.messages import Commit, CommittedReply
from swarmnet.swarm.rounds import Rounds, ZeroUpdates
from swarmnet.swarm.settings import RunSettings
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.one_replica import CALLEE, RUN, SIZES, OneReplica


@pytest.mark.parametrize("commit_at_s", [0.5, 2.0, None])
def test_the_gradient_is_that_of_the_tokens_that_are_counted(commit_at_s: float | None) -> None:
    """A commit that comes while the feeder is asked, or while what it is about is being taken out:
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
        updates = ZeroUpdates(replica, None, None)  # type: ignore[arg-type]
        rounds = Rounds(
            pair.gossip.transport,
            pair.gossip,
            RunSettings(RUN, 1, 8, 4, 9),
            pair.limits,
            replica,
            pair.steps,
            updates,
            None,
            lambda: asyncio.sleep(0),
        )
        await replica.close_round()
        if commit_at_s is not None:
            late = Message(Commit(0, (2,)))
            loop = asyncio.get_running_loop()
            loop.call_later(commit_at_s, feeder.transport.notify, CALLEE, "commit", late)
        await rounds._settle(0)
        ids = replica.stage.gradient_shard(0).data.ids  # type: ignore[attr-defined]
        assert sorted(key[1] for key in ids) == ([1, 2] if commit_at_s == 0.5 else [1])
        assert replica.ledger.num_tokens(0) == len(ids) * SIZES.tokens_per_microbatch
        assert len(replica.ledger.committed(0)) == len(ids)
        assert all(e.state == COMMITTED for e in replica.ledger.committed(0))
        await pair.steps.close()

    run_virtual(main())
