"""What the own record says when a round opens."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarmnet.ports import RouterReport
from swarmnet.protocol.membership.records import ACTIVE, JOINING
from swarmnet.protocol.pipeline.experts import told_experts
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.simulation.clock import run
from swarmnet.swarm.lifecycle.opening import Openings, Renamed, Speed
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.tasks import Tasks
from tests.protocol.making import counted
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.swarm.lifecycle.test_speed import machine_of
from tests.swarm.one_replica import OneReplica


class Opened:
    """Openings of a replica whose exchanges are of no interest."""

    def __init__(self, holds: bytes) -> None:
        self.pair = OneReplica()
        self.happened: list[object] = []
        self.tasks = Tasks("test")
        self.exchanges: Any = SimpleNamespace(
            current=-1,
            ownership=SimpleNamespace(owns_from_now=False),
            states=SimpleNamespace(holds=lambda: holds),
            lost=SimpleNamespace(opened=lambda *books, **facts: []),
            pace=SimpleNamespace(last_s=0.0),
        )
        gossip = self.gossip = self.pair.gossip
        recovery = Recovery(gossip, 1, None, False, Reconnecting(gossip, random.Random(0)))
        speed = Speed(machine_of(self.pair), gossip.transport, 1)
        self.openings = Openings(gossip, recovery, None, speed, self.tasks)

    async def open(self, round_index: int) -> None:
        is_joining = self.gossip.own.state == JOINING
        state = State.DECLARING if is_joining else State.OPEN
        self.pair.replica.transitions.phase = Phase(state, round_index)
        self.happened += await self.openings.opened(self.pair.replica, self.exchanges)

    async def close(self) -> None:
        await self.tasks.close()
        await self.pair.close()


def test_a_newcomer_becomes_active_and_owns_shards_from_the_next_exchange_on() -> None:
    async def scenario() -> None:
        for holds, first in ((b"\0", 4), (b"\1", 3)):
            opened = Opened(holds)
            opened.gossip.update(state=JOINING)
            await opened.open(3)
            own = opened.gossip.own
            assert (own.state, own.round, own.active_from) == (ACTIVE, 3, first)
            await opened.open(4)
            assert opened.gossip.own.active_from == first, "it stays"
            assert opened.gossip.own.digests == opened.pair.replica.digests
            await opened.close()

    run(scenario())


def test_the_record_has_what_routers_did_in_the_last_round() -> None:
    async def scenario() -> None:
        opened = Opened(b"\1")
        await opened.open(3)
        assert told_experts(opened.gossip.own.totals) == (0, 0)
        for round_index, most in ((4, 0.5), (5, 0.25)):
            shares = (most, *((1 - most) / 3,) * 3)
            opened.pair.replica.stage.routed = (RouterReport("layer", shares, most / 2, 1.0),)
            await opened.open(round_index)
            assert told_experts(opened.gossip.own.totals) == (4 * most, most / 2)
        await opened.close()

    run(scenario())


def test_counters_of_another_history_are_dropped_by_a_newcomer() -> None:
    async def scenario() -> None:
        opened = Opened(b"\0")
        opened.gossip.update(state=JOINING, history=7)
        opened.gossip.update_count(counted(2, launched=4))
        opened.gossip.update_count(counted(5, launched=4))
        await opened.open(3)
        assert [c.round for c in opened.gossip.own.counts if c.launched] == [2]
        await opened.close()

    run(scenario())


def test_a_history_that_is_named_otherwise_is_told() -> None:
    async def scenario() -> None:
        opened = Opened(b"\0")
        await opened.open(3)
        other = opened.pair.caller("other", 1e9, feeds=False)
        other.gossip.update(history=7)
        opened.gossip.records.take(other.gossip.own_record.seal())
        await opened.open(4)
        assert opened.happened == [Renamed(0, 7)]
        assert opened.gossip.own.history == 7
        await opened.close()

    run(scenario())


def test_replicas_say_how_much_they_computed_that_counts(tmp_path: Path) -> None:
    """All of a stage together: every sample of the rounds that are over, once."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(4)
        computed = [0, 0]
        for member in swarm.members.values():
            own = member.peer.gossip.own
            computed[own.stage] += own.totals.get("samples_computed", 0)
        assert computed == [4 * spec.pipeline.global_batch] * 2

    in_virtual_time(scenario, spec)
