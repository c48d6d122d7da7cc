"""The loss on held-out data is measured beside the training, and never holds it up; virtual time,
memory transport."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import NotReady, Refused, Stale
from swarmnet.methods.microbatch import EVALUATE, InferReply, InferRequest
from swarmnet.ports import Data
from swarmnet.protocol.membership.records import HeldOut
from swarmnet.protocol.pipeline import progress
from swarmnet.runtime.run import stop_when_done
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.pipeline import held_out
from swarmnet.swarm.pipeline.dispatcher import Dispatcher
from swarmnet.swarm.pipeline.fed_rounds import FedRound
from swarmnet.swarm.pipeline.held_out import HeldOutLoss
from swarmnet.swarm.pipeline.infer import infer_through
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec


def test_a_measurement_of_a_round_that_is_over_ends_at_once(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=6)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        dispatcher = swarm.members["peer-0"].peer.dispatcher
        with pytest.raises(Stale):
            await infer_through(
                dispatcher, InferRequest(0, EVALUATE, 1), swarm.data.held_out(0).arrays
            )
        assert loop.time() - began < 1.0

    in_virtual_time(scenario, spec)


def test_one_feeder_measures_for_all_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    rounds = 6
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds)

    async def scenario(swarm: Swarm) -> None:
        def measured() -> dict[str, int]:
            records = {name: m.peer.gossip.own.held_out for name, m in swarm.members.items()}
            return {name: r.round for name, r in records.items() if r is not None}

        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(2)
        assert set(measured().values()) == {0}
        await swarm.until(lambda: rounds in measured().values())
        assert list(measured().values()).count(rounds) == 1

    in_virtual_time(scenario, spec)


def test_a_first_feeder_without_a_slot_of_its_own_leaves_it_to_one_that_holds_the_round(
    tmp_path: Path,
) -> None:
    """It came when the others had launched all slots, so the round ends without it."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4, global_batch=8)

    async def scenario(swarm: Swarm) -> None:
        def measured() -> dict[str, int]:
            records = {name: m.peer.gossip.own.held_out for name, m in swarm.members.items()}
            return {name: r.round for name, r in records.items() if r is not None}

        swarm.start("peer-9", stage=0)
        await asyncio.sleep(1.0)
        early_peer = swarm.members["peer-9"].peer
        assert len(early_peer.gossip.own.count(0).launched) == early_peer.settings.slots.of(0)
        swarm.start("peer-0", stage=0)
        await asyncio.sleep(2.0)
        swarm.start("peer-5", stage=1)
        await swarm.until_round(1)
        assert measured() == {"peer-9": 0}

    in_virtual_time(scenario, spec)


class NothingHeldOut:
    """Data with nothing to measure on."""

    num_held_out = 0

    def __init__(self, data: Data) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def test_a_first_feeder_with_nothing_to_measure_on_leaves_it_to_another(tmp_path: Path) -> None:
    rounds = 4
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds)

    async def scenario(swarm: Swarm) -> None:
        def measured() -> set[tuple[str, int]]:
            records = {name: m.peer.gossip.own.held_out for name, m in swarm.members.items()}
            return {(name, r.round) for name, r in records.items() if r is not None}

        data: Any = NothingHeldOut(swarm.data)
        swarm.start("peer-0", stage=0, data=data)
        swarm.start("peer-2", stage=0)
        for i in (1, 3):
            swarm.start(f"peer-{i}", stage=1, data=data)
        await swarm.until(lambda: measured() == {("peer-2", rounds)})

    in_virtual_time(scenario, spec)


def test_nobody_waits_for_a_measurement_that_nobody_can_make(tmp_path: Path) -> None:
    rounds = 2
    spec = tiny_spec(tmp_path, num_stages=1, rounds=rounds)
    stopped_at: list[float] = []

    async def scenario(swarm: Swarm) -> None:
        data: Any = NothingHeldOut(swarm.data)
        loop, began_to_wait = asyncio.get_running_loop(), asyncio.Event()
        disk = Disk(CheckpointStore(tmp_path / "disk", spec), InlineWorker())
        peer = swarm.start("peer-0", data=data, disk=disk)
        await swarm.until_round(rounds)
        done_at = loop.time()
        await stop_when_done(peer, rounds, began_to_wait.set)
        assert began_to_wait.is_set()
        stopped_at.append(loop.time() - done_at)
        assert peer.checkpointing is not None
        assert [s.round for s in CheckpointStore(tmp_path / "disk", spec).available()][-1] == rounds

    in_virtual_time(scenario, spec)
    assert stopped_at[0] < 5.0


@pytest.mark.parametrize(("num_failures", "speed"), [(1, 1.0), (4, 0.05)])
def test_a_measurement_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int, speed: float
) -> None:
    """Once more in a short round, and in a long one for as long as microbatches are out."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=2)
    failures: list[Exception] = [NotReady("busy")] * num_failures

    async def scenario(swarm: Swarm) -> None:
        async def failing(*args: Any, **options: Any) -> Message:
            if failures:
                raise failures.pop()
            return await infer_through(*args, **options)

        monkeypatch.setattr(held_out, "infer_through", failing)
        for i in range(2):
            swarm.start(f"peer-{i}", stage=i, speed=speed)
        await swarm.until_round(1)
        assert [m.peer.gossip.own.held_out for m in swarm.members.values()].count(None) == 1
        assert not failures

    in_virtual_time(scenario, spec)


def test_a_measurement_that_always_fails_holds_a_round_for_one_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=20)
    num_slots = spec.pipeline.global_batch // spec.pipeline.microbatch
    were_all_in: list[bool] = []

    async def scenario(swarm: Swarm) -> None:
        async def failing(*args: Any, **options: Any) -> Message:
            now, view = asyncio.get_running_loop().time(), swarm.members["peer-0"].peer.view
            committed = progress.round_progress(view, 0, now, num_slots).committed
            were_all_in.append(committed == num_slots)
            raise NotReady("busy")

        monkeypatch.setattr(held_out, "infer_through", failing)
        for i in range(2):
            swarm.start(f"peer-{i}", stage=i)
        await swarm.until_round(5)
        assert were_all_in.count(True) == 1
        assert were_all_in[-1]

    in_virtual_time(scenario, spec)


def test_held_out_microbatches_are_under_way_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for every replica of every stage, as far as the thinnest goes: a round that is measured
    must not be longer by the latency of each microbatch. And never all of many: they would keep the
    places of training."""
    tiny = tiny_spec(tmp_path, num_stages=2, rounds=4)
    data = tiny.data.model_copy(update={"held_out_microbatches": 10})
    spec = tiny.model_copy(update={"data": data})
    under_way, seen = 0, []

    async def scenario(swarm: Swarm) -> None:
        async def counting(*args: Any, **options: Any) -> Message:
            nonlocal under_way
            under_way += 1
            seen.append(under_way)
            try:
                await asyncio.sleep(0.1)
                return await infer_through(*args, **options)
            finally:
                under_way -= 1

        monkeypatch.setattr(held_out, "infer_through", counting)
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2, feeds=i == 0)
        await swarm.until_round(1)
        assert len(seen) == swarm.data.num_held_out > 4
        assert max(seen) == 4

    in_virtual_time(scenario, spec)


def test_a_round_is_measured_where_no_record_shows_that_it_is(tmp_path: Path) -> None:
    """A record names the newest measured round, which may be the one ahead. What fails ahead is
    tried again when the round is the present one."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=20, evaluate_every=1)

    async def scenario(swarm: Swarm) -> None:
        peer = swarm.start("peer-0")
        await swarm.until_round(2)
        measure = HeldOutLoss(peer.gossip, peer.dispatcher, swarm.data, peer.settings)

        async def is_begun(mine: FedRound, *, is_ahead: bool) -> bool:
            measure.measure_if_due(mine, is_ahead=is_ahead)
            found = measure.measuring is mine
            await mine.flights.close()
            await asyncio.sleep(0)
            assert measure.measuring is None
            return found

        peer.gossip.update(held_out=HeldOut(15, 1.0, 0.0))
        begun = [r for r in range(12, 19) if await is_begun(FedRound(r), is_ahead=r > 15)]
        assert begun == [12, 13, 16, 17, 18]
        assert not await is_begun(FedRound(16, is_measured=True), is_ahead=True)
        missed = FedRound(16, is_missed_ahead=True)
        assert not await is_begun(missed, is_ahead=True)
        assert await is_begun(missed, is_ahead=False)

    in_virtual_time(scenario, spec)


def test_what_fails_ahead_is_tried_once_before_the_round_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some stage cannot open it ahead: the passes through the others would be for nothing."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=6, sync={"mode": "delayed"}, evaluate_every=1)
    tried = Counter[int]()

    async def scenario(swarm: Swarm) -> None:
        async def failing(dispatcher: Dispatcher, infer: InferRequest, *args: Any) -> Message:
            if infer.round == 4:
                replica = swarm.members["peer-0"].peer.replica
                assert replica is not None
                tried[replica.round] += 1
                raise NotReady("not yet")
            return await infer_through(dispatcher, infer, *args)

        monkeypatch.setattr(held_out, "infer_through", failing)
        swarm.start("peer-0", speed=0.02)
        swarm.start("peer-1", feeds=False, speed=0.02)
        await swarm.until_round(6)

    in_virtual_time(scenario, spec)
    assert tried[3] == 1
    assert tried[4] > 0


def test_arrays_that_every_replica_finds_wrong_are_refused_at_once(tmp_path: Path) -> None:
    """As with a loss that is not finite: asked again and again, it would hold the round for
    minutes."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=20)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        _, targets = swarm.data.held_out(0).arrays
        wrong = Array("int32", (1, 1), b"\xff\xff\xff\x7f")
        dispatcher = swarm.members["peer-0"].peer.dispatcher
        with pytest.raises(Refused):
            await infer_through(dispatcher, InferRequest(0, EVALUATE, -1), (wrong, targets))
        assert loop.time() - began < 1.0

    in_virtual_time(scenario, spec)


def test_a_loss_that_is_refused_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4)
    asked: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        async def refusing(dispatcher: Any, infer: InferRequest, *args: Any) -> Message:
            asked.append(infer.round)
            raise Refused("the loss is not finite")

        monkeypatch.setattr(held_out, "infer_through", refusing)
        for i in range(2):
            swarm.start(f"peer-{i}", stage=i)
        await swarm.until_round(2)
        assert asked == [0]

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("error", [KeyError("held out"), OSError("the disk is gone")])
def test_data_that_fail_hold_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As a builder of one's own may."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4)

    async def scenario(swarm: Swarm) -> None:
        def failing(index: int) -> Any:
            raise error

        monkeypatch.setattr(swarm.data, "held_out", failing)
        for i in range(2):
            swarm.start(f"peer-{i}", stage=i)
        await swarm.until_round(4, limit_s=60.0)

    in_virtual_time(scenario, spec)


def test_a_loss_that_cannot_be_is_no_reply() -> None:
    assert InferReply(3.5, 16).loss_sum == 3.5
    for loss_sum, num_tokens in ((1.7e308, 1), (float("nan"), 1), (1.0, 1 << 62), (1.0, -1)):
        with pytest.raises(ValueError, match=r"loss|number"):
            InferReply(loss_sum, num_tokens)


def test_a_replica_that_falls_silent_holds_a_measurement_for_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=10_000)
    fell_silent_at: list[float] = []

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        loop = asyncio.get_running_loop()
        transport = swarm.members["peer-3"].peer.transport
        answer = handler_of(transport, "infer")

        async def silent(request: Request) -> Message:
            if not fell_silent_at and request.message.body.round:
                fell_silent_at.append(loop.time())
                for i in range(3):
                    swarm.hub.partition(f"peer-{i}", "peer-3")
            return await answer(request)

        transport.handle("infer", silent)
        await swarm.until(lambda: bool(fell_silent_at))
        r = max(swarm.rounds())
        await swarm.until(lambda: max(swarm.rounds()) > r)
        assert loop.time() - fell_silent_at[0] < 12.0
        losses = [m.peer.gossip.own.held_out for m in swarm.members.values()]
        assert any(h is not None and h.round == r for h in losses)

    in_virtual_time(scenario, spec)
