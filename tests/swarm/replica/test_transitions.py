"""A replica goes from phase to phase beside a device that has other work (the rules:
`tests/protocol/update/test_replica_phase.py`)."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.errors import NotReady, Stale
from swarmnet.ports import BACKWARD, FORWARD
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.sync_modes import AUTO, DELAYED, ZERO, Switch, SyncPlan
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.simulation.clock import run
from swarmnet.simulation.stage import SyntheticData, activation
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.delayed_updates import AutoSync, DelayedUpdates
from swarmnet.swarm.update.exchange.calls import Contribution
from swarmnet.swarm.update.exchanges import Behind
from swarmnet.swarm.update.rounds import Updates, ZeroUpdates
from swarmnet.wire import Array
from tests.swarm.one_replica import SIZES, WORK_S, OneReplica


def play(scenario: Callable[[Replica], Awaitable[None]]) -> None:
    async def played() -> None:
        pair = OneReplica()
        await scenario(pair.replica)
        await pair.close()

    run(played())


async def work(replica: Replica, r: int, microbatch_id: int = 1) -> None:
    """Forward and backward of one microbatch."""
    key = (r, microbatch_id)
    inputs, targets = activation(key, SIZES), SyntheticData(4).microbatch([microbatch_id]).targets
    stage = replica.stage
    replica.ledger.begin(key, caller="caller", feeder="feeder", num_samples=4)
    await replica.run(FORWARD, key, 1.0, stage.loss_pass(key, inputs, targets), lambda: None)
    replica.ledger.done(key, num_tokens=4, next_peer=None)


def put_aside(replica: Replica) -> bytes:
    """Other parameters for the coming round."""
    coming = replica.stage.parameter_shard(0)
    numbers = [x + 1.0 for x in struct.unpack(f"<{len(coming.data) // 4}f", coming.data)]
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    replica.stage.stage_parameters(0, replace(coming, data=data))
    return data


@pytest.mark.parametrize("is_late", [False, True])
def test_who_begins_to_give_while_the_next_round_is_made_ready_does_not_open_it(
    is_late: bool,
) -> None:
    """The worker has a thread of its own: the loop may begin to give at any moment."""

    async def scenario(replica: Replica) -> None:
        open_ahead = replica.stage.open_ahead

        def opening(round_index: int) -> None:
            if not is_late:
                replica.transitions.give()
            open_ahead(round_index)
            if is_late:
                replica.transitions.give()

        coming = put_aside(replica)
        replica.stage.open_ahead = opening  # type: ignore[method-assign]
        await replica.transitions.open_ahead()
        assert not replica.ahead
        assert not replica.takes(1)
        replica.transitions.gave(is_refused=True)
        replica.stage.open_ahead = open_ahead  # type: ignore[method-assign]
        if is_late:
            assert put_aside(replica) == coming, "there is no other round in the way"
        await work(replica, 0)
        await replica.transitions.close_round()
        await replica.transitions.open_round(1, is_whole=True)
        assert bytes(replica.stage.parameter_shard(0).data) == coming, "put aside as before"

    play(scenario)


def test_the_next_round_opens_beside_the_work_of_this_one() -> None:
    async def scenario(replica: Replica) -> None:
        coming = put_aside(replica)
        last = asyncio.create_task(work(replica, 0, 1))
        await asyncio.sleep(0.5 * WORK_S)
        began = asyncio.get_running_loop().time()
        await replica.transitions.open_ahead()
        assert asyncio.get_running_loop().time() == began
        assert replica.takes(1)
        assert replica.takes(0), "both rounds are open"
        await last
        await work(replica, 1, 2)
        assert bytes(replica.stage.parameter_shard(0).data) != coming
        assert replica.ledger.num_samples(0) == 4

    play(scenario)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_round_that_was_opened_ahead_begins_beside_its_own_work(is_ahead: bool) -> None:
    """Its parameters are those that it has; any other round waits for the device."""

    async def scenario(replica: Replica) -> None:
        coming = put_aside(replica)
        if is_ahead:
            await replica.transitions.open_ahead()
            busy = asyncio.create_task(work(replica, 1))
        else:
            busy = asyncio.create_task(replica.device.run(BACKWARD, lambda: None, 0))
        await asyncio.sleep(0.5 * WORK_S)
        await replica.transitions.close_round()
        began = asyncio.get_running_loop().time()
        await replica.transitions.open_round(1, is_whole=True)
        took_s = asyncio.get_running_loop().time() - began
        assert (took_s == 0.0) == is_ahead
        assert replica.is_open(1)
        assert bytes(replica.stage.parameter_shard(0).data) == coming
        await busy
        if is_ahead:
            assert replica.ledger.num_samples(1) == 4
            assert replica.stage.gradient_shard(0).data.ids == {(1, 1): 1}  # type: ignore[union-attr]

    play(scenario)


def test_work_that_the_device_comes_to_after_the_round_is_closed_is_refused() -> None:
    async def scenario(replica: Replica) -> None:
        first = asyncio.create_task(work(replica, 0, 1))
        await asyncio.sleep(0.5 * WORK_S)
        second = asyncio.create_task(work(replica, 0, 2))
        await asyncio.sleep(0)
        await replica.transitions.close_round()
        before = replica.stage.gradient_shard(0)
        with pytest.raises(Stale):
            await second
        await asyncio.gather(first, return_exceptions=True)
        assert replica.stage.gradient_shard(0).data == before.data
        with pytest.raises(Stale, match="closed"):
            await replica.enter(0, 1.0)

    play(scenario)


@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_round_closes_beside_the_work_of_the_next_one(is_at_work: bool) -> None:
    """Only what is under way of the round itself is waited for."""

    async def scenario(replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        await work(replica, 0, 1)
        await replica.transitions.open_ahead()
        ahead = asyncio.create_task(work(replica, 1, 2))
        await asyncio.sleep(0.5 * WORK_S)
        began = loop.time()
        last = asyncio.create_task(work(replica, 0, 3)) if is_at_work else None
        await asyncio.sleep(0)
        await replica.transitions.close_round()
        took_s = loop.time() - began
        before = replica.stage.gradient_shard(0).data
        await asyncio.gather(ahead, *([last] if last else []), return_exceptions=True)
        assert (took_s > 0.0) == is_at_work
        assert replica.stage.gradient_shard(0).data == before

    play(scenario)


def test_what_was_done_ahead_goes_with_parameters_that_do_not_hold() -> None:
    async def scenario(replica: Replica) -> None:
        await replica.transitions.open_ahead()
        await work(replica, 1)
        losing = asyncio.create_task(replica.transitions.lose())
        await asyncio.sleep(0)
        assert not replica.synced
        assert not replica.takes(1), "at once, whatever the device does"
        await losing
        assert replica.ledger.num_samples(1) == 0
        with pytest.raises(NotReady):
            replica.check_shard(0, 0)
        replica.transitions.aim(3)
        await replica.transitions.open_round(3, is_whole=True)
        with pytest.raises(NotReady):
            await replica.enter(3, 1.0)  # the others do not know of it yet
        replica.transitions.declared()
        await replica.enter(3, 1.0)
        await work(replica, 3)
        assert replica.ledger.num_samples(3) == 4

    play(scenario)


def test_parameters_that_do_not_hold_are_let_go_when_no_pass_runs_any_more() -> None:
    """What is fetched may be put aside in the memory of the gradient."""

    async def scenario(replica: Replica) -> None:
        last = asyncio.create_task(work(replica, 0))
        await asyncio.sleep(0.5 * WORK_S)
        losing = asyncio.create_task(replica.transitions.lose())
        await asyncio.sleep(0)
        assert not replica.takes(0), "at once, whatever the device does"
        assert not losing.done()
        await losing
        gradient = replica.stage.gradient_shard(0).data
        await asyncio.gather(last, return_exceptions=True)
        assert replica.stage.gradient_shard(0).data == gradient

    play(scenario)


@pytest.mark.parametrize("is_refused", [True, False])
def test_neither_the_end_of_a_round_nor_its_loss_comes_before_the_answer(is_refused: bool) -> None:
    async def scenario(replica: Replica) -> None:
        for change in (replica.transitions.close_round, replica.transitions.lose):
            replica.transitions.phase = Phase(State.OPEN, 0)
            replica.transitions.give()
            changing = asyncio.create_task(change())
            await asyncio.sleep(5.0)
            assert replica.is_open(0)
            replica.transitions.gave(is_refused=is_refused)
            await changing
            assert not replica.is_open(0)
            assert not replica.phase.is_given(0)

    play(scenario)


def at(peer_id: str, r: int, *switches: Switch) -> Record:
    """A replica's record."""
    fields: dict[str, Any] = {"round": r, "switches": switches, "digests": 8 * peer_id.encode()}
    return Record(peer_id, "run", 1, 0, state=ACTIVE, stage=0, samples=64, **fields)


def auto(replica: Replica, known: tuple[Switch, ...], *records: Record) -> AutoSync:
    replica.plan = SyncPlan(AUTO, rounds=100, switches=known)
    view = SimpleNamespace(live=lambda now: records, known=lambda stage, now: records)
    gossip: Any = SimpleNamespace(view=view, update=lambda **changes: None)
    exchanges: Any = None
    return AutoSync(gossip, replica, exchanges)


DELAYED_AT_3 = Switch(3, DELAYED, 1.0, 1.0)


def test_a_change_of_mode_is_too_late_for_a_round_that_has_begun_ahead() -> None:
    """It began with the parameters of the exchange before, by the mode that was known."""

    async def scenario(replica: Replica) -> None:
        known, change = (DELAYED_AT_3,), Switch(5, ZERO, 1.0, 0.01)
        other = at("b", 6, DELAYED_AT_3, change)
        replica.transitions.phase = Phase(State.OPEN, 5)
        auto(replica, known, at("a", 5, *known), at("b", 5, DELAYED_AT_3, change)).learn()
        assert replica.plan.switches == known, "its own parameters hold"
        await replica.transitions.open_ahead()
        late = Switch(7, ZERO, 1.0, 0.01)
        auto(replica, known, at("a", 5, *known), at("b", 6, DELAYED_AT_3, late)).learn()
        assert replica.plan.switches == (DELAYED_AT_3, late)
        assert replica.plan.parameter_version(6) == 5
        with pytest.raises(Behind):
            auto(replica, known, at("a", 5, *known), other).learn()
        assert replica.plan.switches == other.switches

    play(scenario)


@pytest.mark.parametrize("own_round", [8, 9, 10])
def test_of_two_sides_that_decided_each_for_itself_one_gives_in(own_round: int) -> None:
    """What was known to the one with the newest parameters holds, of equal ones of the lower id."""

    async def scenario(replica: Replica) -> None:
        own, others = (DELAYED_AT_3,), (Switch(4, ZERO, 1.0, 0.01), Switch(12, DELAYED, 1.0, 1.0))
        records = at("a", own_round, *own), at("b", 9, *others)
        replica.transitions.phase = Phase(State.OPEN, own_round)
        side = auto(replica, own, *records)
        if own_round < 9:
            with pytest.raises(Behind):
                side.learn()
            assert replica.plan.switches == others
        else:
            side.learn()
            assert replica.plan.switches == (DELAYED_AT_3, others[1]), "what is to come is heard"
        replica.transitions.phase = Phase(State.OPEN, 9)
        auto(replica, others, *records).learn()  # if its parameters do not hold, digests tell
        assert replica.plan.mode_at(9) == ZERO

    play(scenario)


def test_changes_of_mode_that_change_nothing_are_late_for_nobody() -> None:
    async def scenario(replica: Replica) -> None:
        known, late = (Switch(7, ZERO, 1.0, 0.01),), Switch(8, ZERO, 1.0, 0.01)
        replica.transitions.phase = Phase(State.OPEN, 16)
        auto(replica, known, at("a", 16, *known), at("b", 17, late)).learn()
        assert replica.plan.switches == (*known, late)

    play(scenario)


def test_who_fetches_its_stage_takes_the_modes_of_those_who_have_it() -> None:
    async def scenario(replica: Replica) -> None:
        known, others = (Switch(9, ZERO, 1.0, 0.01),), (Switch(7, DELAYED, 1.0, 1.0),)
        replica.transitions.phase = Phase(State.FETCHING, 18)
        auto(replica, known, at("b", 18, *others)).learn()
        assert replica.plan.switches == others
        auto(replica, known).learn()
        assert replica.plan.switches == known, "nobody has it"

    play(scenario)


def test_the_end_of_an_exchange_is_news_to_who_may_open_the_next_round() -> None:
    async def scenario(replica: Replica) -> None:
        async def make(part: object) -> None:
            await asyncio.sleep(1.0)

        async def nothing(number: int) -> None:
            pass

        replica.transitions.phase = Phase(State.OPEN, 5)
        replica.plan = SyncPlan(DELAYED, rounds=100)
        nobody = SimpleNamespace(live=lambda now: [], members=lambda stage, now: [])
        gossip: Any = SimpleNamespace(changed=Condition(), view=nobody)
        ownership = SimpleNamespace(fetch_owned=nothing, tasks=Tasks("test"))
        exchanges: Any = SimpleNamespace(
            current=4,
            make=make,
            ownership=ownership,
            drop_spare=nothing,
            repair_beside=lambda: None,
        )
        handover: Any = None
        updates = DelayedUpdates(gossip, replica, exchanges, handover)
        updates.attend()
        assert await gossip.changed.until(lambda: updates.is_ready_ahead(5), 60.0)
        assert asyncio.get_running_loop().time() < 1.1

    play(scenario)


@pytest.mark.parametrize("mode", [ZERO, DELAYED])
def test_the_gradient_of_a_round_is_read_beside_the_loop(mode: str) -> None:
    """It may have to come from the device, or from other ranks."""

    async def scenario(replica: Replica) -> None:
        given: list[Array] = []
        read = replica.stage.gradient_shard

        async def contribution(r: int, num_tokens: int, shards: Sequence[Array]) -> Any:
            return num_tokens, shards

        async def make(part: Callable[[int], Awaitable[Contribution]]) -> None:
            num_tokens, gradient = await part(0)
            assert num_tokens == 4
            assert gradient is not None
            given.append(gradient)

        def reading(j: int) -> Array:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            return read(j)

        replica.plan = SyncPlan(mode, rounds=1)
        replica.stage.gradient_shard = reading  # type: ignore[method-assign]
        handover: Any = SimpleNamespace(contribution=contribution)
        exchanges: Any = SimpleNamespace(current=0, make=make)
        gossip: Any = SimpleNamespace(changed=Condition())
        updates: Updates = ZeroUpdates(replica, exchanges, handover)
        if mode == DELAYED:  # after the last round both exchanges that are left are made
            updates = DelayedUpdates(gossip, replica, exchanges, handover)
        await work(replica, 0)
        await replica.transitions.close_round()
        assert await updates.make(0, 4)
        assert [g.data for g in given] == [read(0).data]

    play(scenario)
