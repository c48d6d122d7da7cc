"""What a feeder may launch by what its view says (the numbers: `tests/protocol/pipeline`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from swarmnet.protocol.membership.records import ACTIVE, LEAVING
from swarmnet.simulation.clock import run
from swarmnet.swarm.pipeline.fed_rounds import FedRound
from swarmnet.swarm.pipeline.launch_rules import LaunchRules
from swarmnet.swarm.settings import RunSettings
from tests.protocol.making import counted
from tests.swarm.one_replica import RUN, OneReplica

BATCH = 8


def rules_of(pair: OneReplica, **changes: Any) -> LaunchRules:
    settings = RunSettings(
        RUN, num_stages=1, global_batch=BATCH, samples_per_microbatch=1, rounds=10, **changes
    )
    pair.gossip.update(state=ACTIVE, stage=0, has_data=True)
    return LaunchRules(pair.gossip, pair.steps.wiring, settings, pair.limits)


def test_the_only_feeder_launches_the_whole_round_and_no_more() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        rules, mine = rules_of(pair), FedRound(0)
        assert rules.is_feeder()
        for slot in range(BATCH):
            assert rules.next_slot(mine) == slot
            pair.gossip.update_count(counted(0, launched=slot + 1))
        assert rules.next_slot(mine) is None
        await pair.close()

    run(scenario())


def test_of_two_feeders_each_launches_its_part_at_once() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        rules, mine = rules_of(pair), FedRound(0)
        other = replace(pair.caller("other", 1e9).gossip.own, version=5, stage=0, has_data=True)
        pair.gossip.view.merge(other, asyncio.get_running_loop().time())
        own = pair.gossip.own.peer_id
        first = BATCH // 2 * sorted([own, "other"]).index(own)
        for slot in range(BATCH // 2):
            assert rules.next_slot(mine) == first + slot
            pair.gossip.update_count(counted(0, launched=slot + 1, first=first))
        assert rules.next_slot(mine) is None, "the rest is the other's"
        await asyncio.sleep(pair.limits.patience_s)
        rest = rules.next_slot(mine)
        assert rest is not None
        assert rest // (BATCH // 2) != first // (BATCH // 2), "nothing is heard of the other"
        await pair.close()

    run(scenario())


def test_who_is_leaving_feeds_no_more() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        rules = rules_of(pair)
        pair.gossip.update(state=LEAVING)
        assert not rules.is_feeder()
        await pair.close()

    run(scenario())


def test_the_window_of_the_settings_holds() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        assert rules_of(pair, max_in_flight=5).window(0) == 5
        slow = rules_of(pair)
        assert slow.window(0) <= slow.window(100)
        assert slow.room(pair.replica, 0) == slow.window(0), "in a small swarm nobody holds back"
        assert not slow.serves_itself()
        await pair.close()

    run(scenario())
