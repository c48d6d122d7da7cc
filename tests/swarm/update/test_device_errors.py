"""A device that fails in a backward pass, as one does that has no memory left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import Busy
from swarmnet.swarm.update.exchange.shard_work import ShardWork
from swarmnet.training.passes.boundary import Boundary
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 6
FAILS_AT = 6
"""The backward pass that fails."""


def failing_once(swarm: Swarm, rounds: list[int]) -> Callable[[int], tuple[Any, Any]]:
    """A stage whose gradient reaches some layers once, and not its first one. `rounds`: takes the
    round in which that was."""

    def build(stage_index: int) -> tuple[Any, Any]:
        stage, optimizer = swarm.build(stage_index)
        passes = 0

        def fail(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            if passes == FAILS_AT:
                replica = swarm.members["bad"].peer.replica
                assert replica is not None
                rounds.append(replica.round)
                raise torch.OutOfMemoryError("no memory left")
            return gradient

        stage.layers.parameters()[0].register_hook(fail)
        return stage, optimizer

    return build


@pytest.mark.parametrize("mode", ["delayed", "local", "gossip"])
def test_a_failed_pass_ends_no_peer(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where replicas make steps of their own, the one makes none in that round."""
    sync = {"mode": mode, "local_steps": 2, "warmup_rounds": 1}
    # So many microbatches a round that the one has others in the round in which it fails.
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync, global_batch=64)
    failed_in: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0)
        swarm.start("peer-1", stage=1)
        swarm.start("bad", stage=1, feeds=False, build=failing_once(swarm, failed_in))
        await swarm.until_round(ROUNDS, 120.0)
        assert failed_in
        assert "failed half way" in caplog.text
        assert swarm.total("contributions_dropped") > 0
        for name in swarm.members:
            assert all(bool(p.isfinite().all()) for p in swarm.named(name).values())

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_no_memory_for_the_state_of_a_shard_ends_no_peer(tmp_path: Path, mode: str) -> None:
    """A newcomer tries again in the next round; until then the shard's other owners have it."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=14, sync={"mode": mode})
    failed: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            load = optimizer.load

            def loaded(j: int, *state: Any) -> None:
                if len(failed) < 3:
                    failed.append(j)
                    raise RuntimeError("can't allocate memory")
                load(j, *state)

            optimizer.load = loaded
            return stage, optimizer

        swarm.start("peer-0")
        swarm.start("peer-1")
        await swarm.until_round(3)
        newcomer = swarm.start("late", build=build)
        await swarm.until_round(14, 120.0)
        assert len(failed) == 3
        replica: Any = newcomer.replica
        owned = newcomer.exchanges.ownership.placement(13).owned_by("late")
        assert set(owned) <= set(replica.optimizer.owned())
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec)


def test_a_full_queue_at_the_end_of_a_round_is_waited_for(tmp_path: Path) -> None:
    """Microbatches of a feeder that died are to be retracted, and the device has no room for that
    until the round is closed, and a while longer."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    refused: list[bool] = []
    """By whether the round was open."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0)
        swarm.start("peer-1", stage=0)
        swarm.start("last", stage=1, feeds=False)
        await swarm.until_round(2)
        replica: Any = swarm.members["last"].peer.replica
        run = replica.device.run

        async def full(kind: str, work: Any, *more: Any) -> Any:
            if "_retract" in work.__qualname__ and refused.count(False) < 3:
                refused.append(replica.is_open(replica.round))
                raise Busy("the queue is full")
            return await run(kind, work, *more)

        replica.device.run = full
        pending = replica.ledger.pending
        await swarm.until(lambda: any(e.feeder == "peer-1" for e in pending(replica.round)))
        swarm.kill("peer-1")
        await swarm.until_round(ROUNDS, 120.0)
        assert refused.count(False) == 3
        assert swarm.total("retracted") > 0

    in_virtual_time(scenario, spec)


def test_a_pass_that_fails_while_it_takes_a_microbatch_out_ends_no_peer(tmp_path: Path) -> None:
    """A feeder dies, and what it had in flight is retracted. What this replica has added up
    in the round is lost: something is in it that must not count."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    failed: list[Any] = []

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)

            def run(key: Any, inputs: Any, *more: Any) -> Any:
                if is_retracting and not failed:
                    failed.append(key)
                    raise torch.OutOfMemoryError("no memory left")
                return passed(key, inputs, *more)

            def retract(key: Any) -> None:
                is_retracting.append(True)
                try:
                    retracted(key)
                finally:
                    is_retracting.clear()

            is_retracting: list[bool] = []
            passed, retracted = stage.layers.run, stage.retract
            stage.layers.run, stage.retract = run, retract
            return stage, optimizer

        swarm.start("peer-0", stage=0)
        swarm.start("peer-1", stage=0)
        swarm.start("last", stage=1, feeds=False, build=build)
        await swarm.until_round(2)
        replica: Any = swarm.members["last"].peer.replica

        def is_added() -> bool:
            pending = replica.ledger.pending(replica.round)
            return any(replica.stage.kept.is_added(e.key) for e in pending if e.feeder == "peer-1")

        await swarm.until(is_added)
        swarm.kill("peer-1")
        await swarm.until_round(ROUNDS, 120.0)
        assert failed
        assert swarm.total("contributions_dropped") > 0, "something is in it that must not count"
        assert swarm.total("samples_lost") > 0
        assert all(bool(p.isfinite().all()) for p in swarm.parameters().values())

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("stage", "feeds"), [(0, True), (1, False)])
def test_a_failed_pass_costs_what_its_peer_had_added_up(
    tmp_path: Path, stage: int, feeds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it is the feeder's own: the round ends. A part of a gradient counts nowhere."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    failed_in: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0)
        swarm.start("peer-1", stage=1)
        swarm.start("bad", stage=stage, feeds=feeds, build=failing_once(swarm, failed_in))
        await swarm.until_round(ROUNDS, 120.0)
        paths = swarm.paths[failed_in[0]].values()
        num_lost = sum("bad" in path for path in paths)
        assert num_lost > 0
        assert swarm.total("samples_lost") == num_lost * spec.pipeline.microbatch
        assert swarm.total("rerouted") == 1
        assert swarm.total("shard_reset") == 0
        assert "failed half way" in caplog.text
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 0.2

    in_virtual_time(scenario, spec)


def test_a_replica_whose_memory_is_short_for_a_result_fetches_its_stage_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw is no reason to wait for ever."""
    put = ShardWork.put
    failures = [MemoryError()]

    async def failing(self: ShardWork, *args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        await put(self, *args, **options)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(3)
        monkeypatch.setattr(ShardWork, "put", failing)
        await swarm.until(lambda: not failures)
        now = max(swarm.rounds())
        await swarm.until(lambda: min(swarm.rounds()) > now + 2, 20.0)

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=2, rounds=40))


@pytest.mark.parametrize("fails_in", ["compute", "depart"])
def test_a_pass_that_fails_after_its_backward_leaves_nothing_in_the_gradient(
    tmp_path: Path, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would send has no memory, say. The microbatch goes another way, and must not be in
    the update twice."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    send, calls = Boundary.send_input_gradient, 0

    def sending(self: Boundary, grad: torch.Tensor) -> Callable[[], Array]:
        nonlocal calls
        calls += 1
        if calls == FAILS_AT and fails_in == "compute":
            raise MemoryError
        return fail if calls == FAILS_AT else send(self, grad)

    def fail() -> Array:
        raise MemoryError

    monkeypatch.setattr(Boundary, "send_input_gradient", sending)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0)
        swarm.start("peer-1", stage=1, feeds=False)
        swarm.start("peer-2", stage=1, feeds=False)
        await swarm.until_round(ROUNDS, 120.0)
        assert swarm.total("retracted") == 1
        assert swarm.total("contributions_dropped") == swarm.total("samples_lost") == 0
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)
