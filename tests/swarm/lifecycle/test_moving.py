"""Moving to the stage that needs a peer more, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnet.methods.method import Method
from swarmnet.methods.update import MIRROR, REDUCE
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.assignment import Move, propose_move
from swarmnet.protocol.membership.departure import MOVE_PATIENCE_S
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, LEFT
from swarmnet.protocol.pipeline import progress
from swarmnet.swarm.lifecycle.departure import DRAIN_S, Departure
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.swarm.update.rounds import ZeroUpdates
from swarmnet.wire import Array, Message
from tests.oracles.reference_modes import DelayedReference
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

SLOW_S = 60.0


@pytest.mark.parametrize("speed", [pytest.param(1.0, marks=pytest.mark.long), 3.5])
def test_replicas_move_to_the_stage_that_needs_them_and_stay(speed: float, tmp_path: Path) -> None:
    """A stage whose only peer is as fast as the three others needs one for its copies."""
    rounds = 80
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds, global_batch=32)
    limits = WaitLimits(balance_every_s=2.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, speed=1.0 if i < 3 else speed)
        await swarm.until_round(2)
        for member in swarm.members.values():
            member.peer.mover.wanted = None  # started unevenly; from now on they choose
        await swarm.until_round(rounds)
        stages = sorted(m.peer.gossip.own.stage for m in swarm.members.values())
        assert stages == [0, 0, 1, 1]
        assert swarm.total("moved") == 1
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0
        trainer = replay(spec, swarm.counted, rounds)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-3

    in_virtual_time(scenario, spec, limits=limits)


def test_who_moves_has_the_memory_of_one_stage_at_a_time(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=60, global_batch=32)
    limits = WaitLimits(balance_every_s=2.0, move_cooldown_s=10.0)
    before: dict[str, weakref.ref[object]] = {}
    kept: list[bool] = []

    async def scenario(swarm: Swarm) -> None:
        def noted(name: str) -> Callable[[int], tuple[Any, Any]]:
            def build(stage_index: int) -> tuple[Any, Any]:
                if name in before:
                    gc.collect()  # as `Machine.free` of a real machine does
                    kept.append(before[name]() is not None)
                built = swarm.build(stage_index)
                before[name] = weakref.ref(built[0])
                return built

            return build

        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, build=noted(f"peer-{i}"))
        await swarm.until_round(2)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        await swarm.until(lambda: swarm.total("moved") == 1)
        await swarm.until_round(max(swarm.rounds()) + 3)
        assert kept == [False]

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


def test_who_moves_looks_after_the_shards_of_one_stage_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where owners of what it holds are slow to say so it waits for them, but no more when it
    serves another stage: it would say that it holds shards of the wrong one."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=60)
    limits = WaitLimits(balance_every_s=2.0, move_cooldown_s=10.0)
    follow_owners = Exchanges.follow_owners
    looking: dict[str, list[int]] = {}
    """The stages whose shards a peer looks after now."""

    async def slowly(self: Exchanges) -> None:
        mine = looking.setdefault(self.gossip.own.peer_id, [])
        mine.append(self.replica.index)
        try:
            await follow_owners(self)
            await asyncio.sleep(SLOW_S)
        finally:
            mine.remove(self.replica.index)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0)
        await swarm.until_round(2)
        monkeypatch.setattr(Exchanges, "follow_owners", slowly)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        await swarm.until(lambda: swarm.total("moved") == 1)
        (mover,) = (m.peer for m in swarm.members.values() if m.peer.gossip.own.totals.get("moved"))
        await swarm.until(lambda: mover.gossip.own.state == ACTIVE)
        assert set(looking[mover.gossip.own.peer_id]) <= {mover.gossip.own.stage}
        assert all(
            1 in looking[f"peer-{i}"] for i in range(3) if f"peer-{i}" != mover.gossip.own.peer_id
        )

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


def test_who_moves_stays_where_the_last_other_replica_dies(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=30, global_batch=32)
    limits = WaitLimits(balance_every_s=2.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("slow", stage=0, speed=0.5)
        swarm.start("other", stage=1, speed=4.0)
        mover = swarm.start("mover", stage=1)
        await swarm.until_round(10)
        say = mover.gossip.update

        def says(**changes: Any) -> None:
            say(**changes)
            if changes.get("state") == LEAVING:  # for some milliseconds
                swarm.kill("other")

        mover.gossip.update = says  # type: ignore[method-assign]
        mover.mover.wanted = None
        await swarm.until(lambda: "other" not in swarm.members)
        mover.gossip.update = say  # type: ignore[method-assign]
        await swarm.until(lambda: mover.gossip.own.state == ACTIVE, 10.0)
        await swarm.until_round(30, 120.0)
        assert mover.gossip.own.stage == 1
        assert swarm.total("moved") == swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec, limits=limits, seed=1, is_synthetic=True)


def test_who_is_stopped_while_it_moves_leaves(tmp_path: Path, caplog: Any) -> None:
    """At the worst moment: it has handed over its stage, and not let go of it yet."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=30)
    limits = WaitLimits(balance_every_s=2.0, move_cooldown_s=10.0)
    stopped: list[Peer] = []

    async def scenario(swarm: Swarm) -> None:
        def stop_when_ready(peer: Peer) -> None:
            prepare = peer.mover.prepare

            async def prepare_and_stop(departure: Departure, move: Move) -> bool:
                is_ready = await prepare(departure, move)
                if is_ready and not stopped:
                    stopped.append(peer)
                    peer.stop()
                return is_ready

            peer.mover.prepare = prepare_and_stop  # type: ignore[method-assign]

        for i in range(4):
            stop_when_ready(swarm.start(f"peer-{i}", stage=1 if i < 3 else 0))
        await swarm.until_round(2)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        await swarm.until(lambda: bool(stopped))
        mover = swarm.members.pop(stopped[0].transport.peer_id)
        await mover.life
        assert mover.peer.gossip.own.state == LEFT
        assert mover.peer.gossip.own.totals.get("moved", 0) == 0
        await swarm.until_round(30)
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0
        assert "before others had taken over" not in caplog.text

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


def test_who_is_stopped_while_it_waits_to_move_hands_over_all_the_same(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move is off: nothing of it takes back that this peer leaves."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=30)
    limits = WaitLimits(balance_every_s=2.0, move_cooldown_s=10.0)
    stopped: list[Peer] = []
    states: list[str] = []

    def stop(peer: Peer) -> None:
        peer.stop()
        later = asyncio.get_running_loop().call_later
        later(3.0, monkeypatch.setattr, ZeroUpdates, "is_owing", False)

    async def scenario(swarm: Swarm) -> None:
        def stop_when_it_waits(peer: Peer) -> None:
            prepare, update = peer.mover.prepare, peer.gossip.update

            def recording(**changes: Any) -> None:
                if "state" in changes:
                    states.append(changes["state"])
                update(**changes)

            async def stop_and_prepare(departure: Departure, move: Move) -> bool:
                if not stopped:
                    stopped.append(peer)
                    monkeypatch.setattr(ZeroUpdates, "is_owing", True)  # so it waits
                    peer.gossip.update = recording  # type: ignore[method-assign]
                    asyncio.get_running_loop().call_later(0.01, stop, peer)
                return await prepare(departure, move)

            peer.mover.prepare = stop_and_prepare  # type: ignore[method-assign]

        for i in range(4):
            stop_when_it_waits(swarm.start(f"peer-{i}", stage=1 if i < 3 else 0))
        await swarm.until_round(2)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        await swarm.until(lambda: bool(stopped))
        mover = swarm.members.pop(stopped[0].transport.peer_id)
        await mover.life
        assert states == [LEAVING, LEFT]
        await swarm.until_round(30)
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0
        assert "before others had taken over" not in caplog.text

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


def test_a_move_where_microbatches_take_long_is_made_at_the_end_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes minutes, and so does the way of a microbatch: who moves serves it as long as it
    is fed, says meanwhile where it goes, so that nobody follows it there, and loses nothing.
    (Here all of that is a tenth as long, and what counts as long.)"""
    monkeypatch.setattr(assignment, "LONG_PASSAGE_S", assignment.LONG_PASSAGE_S / 10)
    spec = tiny_spec(tmp_path, num_stages=2, rounds=3, global_batch=96)
    limits = WaitLimits(balance_every_s=5.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, speed=0.004)
        await swarm.until_round(1, 10_000.0)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        own = [m.peer.gossip for m in swarm.members.values()]
        await swarm.until(lambda: any(g.own.is_moving for g in own), 10_000.0)
        began = asyncio.get_running_loop().time()
        mover = next(g for g in own if g.own.is_moving)
        round_index = mover.own.round
        await swarm.until(lambda: swarm.total("moved") == 1, 10_000.0)
        now = asyncio.get_running_loop().time()
        num_slots = spec.pipeline.global_batch // spec.pipeline.microbatch
        assert now - began > DRAIN_S
        assert progress.is_launched(mover.view, round_index, now, num_slots), (
            "its round is still fed"
        )
        assert not any(g.own.is_moving for g in own)
        await swarm.until_round(3, 40_000.0)
        assert sorted(g.own.stage for g in own) == [0, 0, 1, 1]
        assert swarm.total("moved") == 1
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0
        trainer = replay(spec, swarm.counted, 3)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec, limits=limits)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_a_move_in_a_long_round_leaves_the_gradient_to_another_replica(
    tmp_path: Path, mode: str
) -> None:
    """A round takes many minutes, a microbatch seconds: nobody waits for the round's end."""
    batch = 240
    spec = tiny_spec(tmp_path, num_stages=2, rounds=3, global_batch=batch, sync={"mode": mode})
    limits = WaitLimits(balance_every_s=5.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, speed=0.024)
        await swarm.until_round(1)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        own = [m.peer.gossip for m in swarm.members.values()]
        await swarm.until(lambda: any(g.own.is_moving for g in own))
        decided = asyncio.get_running_loop().time()
        name = next(n for n, m in swarm.members.items() if m.peer.gossip.own.is_moving)
        mover = swarm.members[name].peer
        assert mover.replica is not None
        left, round_index = mover.replica, mover.replica.round
        await swarm.until(lambda: mover.gossip.own.totals.get("moved", 0) == 1)
        took = asyncio.get_running_loop().time() - decided
        assert MOVE_PATIENCE_S <= took < MOVE_PATIENCE_S + 30.0
        assert mover.gossip.own.round == round_index
        assert left.phase.is_given(round_index), "it had learned nothing that it could leave"
        await swarm.until_round(3, 20_000.0)
        assert sorted(g.own.stage for g in own) == [0, 0, 1, 1]
        assert swarm.total("moved") == 1
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0
        if mode == "zero":
            trainer = replay(spec, swarm.counted, 3)
        else:
            oracle = DelayedReference(spec)
            for r in range(3):
                oracle.step(r, sorted(swarm.counted[r]))
            oracle.finish()
            trainer = oracle.trainer
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec, limits=limits)


def test_who_moves_is_at_work_as_long_as_its_last_gradient_is_on_its_way(tmp_path: Path) -> None:
    """Beside a round, contributions travel for minutes too; then nobody leaves before they are
    there, for there would be nothing else to do."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=3, global_batch=240, sync={"mode": "delayed"})
    limits = WaitLimits(balance_every_s=5.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, speed=0.024)
        await swarm.until_round(0)
        for member in swarm.members.values():
            slow(member.peer.exchanges, results=False)
        await swarm.until_round(1)
        opened = asyncio.get_running_loop().time()
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        peers = [m.peer for m in swarm.members.values()]
        await swarm.until(lambda: any(p.gossip.own.is_moving for p in peers))
        mover = next(p for p in peers if p.gossip.own.is_moving)
        assert mover.updates.is_owing
        await swarm.until(lambda: mover.gossip.own.state == LEAVING)
        assert not mover.updates.is_owing
        assert asyncio.get_running_loop().time() - opened > SLOW_S
        await swarm.until_round(3, 20_000.0)
        assert swarm.total("moved") == 1
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


def test_a_move_is_not_made_when_a_newcomer_came_first(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=2, global_batch=400)
    limits = WaitLimits(balance_every_s=5.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, speed=0.024)
        await swarm.until_round(1)
        own = [m.peer.gossip for m in swarm.members.values()]
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        await swarm.until(lambda: any(g.own.is_moving for g in own))
        newcomer = swarm.start("newcomer", speed=0.024)
        await swarm.until(lambda: newcomer.gossip.own.state == ACTIVE)
        assert newcomer.gossip.own.stage == 0
        await swarm.until(lambda: not any(g.own.is_moving for g in own))
        await asyncio.sleep(60.0)
        assert swarm.total("moved") == 0
        assert {g.own.state for g in own} == {ACTIVE}

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


def test_who_moves_does_not_wait_for_results_that_it_does_not_need(tmp_path: Path) -> None:
    """Beside a round, results travel for minutes. A mover's gradient is in them when the owners
    have made the step, and it goes."""
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=5, global_batch=32, num_layers=3, sync={"mode": "delayed"}
    )
    limits = WaitLimits(balance_every_s=5.0, move_cooldown_s=10.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(5):
            swarm.start(f"peer-{i}", stage=1 if i < 4 else 0, speed=0.002)
        await swarm.until_round(1)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
            slow(member.peer.exchanges, results=True)
        own = [m.peer.gossip for m in swarm.members.values()]
        await swarm.until(lambda: any(g.own.is_moving for g in own))
        name = next(n for n, m in swarm.members.items() if m.peer.gossip.own.is_moving)
        mover = swarm.members[name].peer
        round_index = mover.gossip.own.round
        replica = mover.replica
        assert replica is not None
        await replica.changed.until(lambda: replica.round > round_index, 600.0)
        began = asyncio.get_running_loop().time()
        await swarm.until(lambda: mover.gossip.own.totals.get("moved", 0) == 1)
        assert asyncio.get_running_loop().time() - began < MOVE_PATIENCE_S + 5.0 < SLOW_S
        await swarm.until_round(5, 6000.0)
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0
        oracle = DelayedReference(spec)
        for r in range(5):
            oracle.step(r, sorted(swarm.counted[r]))
        oracle.finish()
        assert relative_difference(swarm.parameters(), oracle.trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec, limits=limits)


def slow(exchanges: Exchanges, *, results: bool) -> None:
    """Every result that this replica gives, or all that it contributes, waits for long."""
    work, liveness = exchanges.work, exchanges.gossip.liveness
    copy_of, call = work.copy_of, liveness.call_while_live

    async def wait() -> None:
        if exchanges.plan.is_delayed(exchanges.current):
            await asyncio.sleep(SLOW_S)

    async def late_copy(*arguments: Any, **options: Any) -> Array:
        await wait()
        return await copy_of(*arguments, **options)

    async def late_call(
        peer_id: str, method: Method[Any, Any], message: Message, **options: Any
    ) -> Message:
        if method in (REDUCE, MIRROR) and message.arrays:
            await wait()
        return await call(peer_id, method, message, **options)

    if results:
        work.copy_of = late_copy  # type: ignore[method-assign]
    else:
        liveness.call_while_live = late_call  # type: ignore[method-assign]


def test_an_uncovered_stage_is_filled_without_a_rest(tmp_path: Path) -> None:
    """Its only replica dies when the others have just joined theirs, in the middle of a round."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4, global_batch=240)
    limits = WaitLimits(balance_every_s=5.0, move_cooldown_s=10_000.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=1 if i < 3 else 0, speed=0.024)
        await swarm.until_round(1)
        for member in swarm.members.values():
            member.peer.mover.wanted = None
        swarm.kill("peer-3")
        peers = [m.peer for m in swarm.members.values()]
        await swarm.until(lambda: any(p.gossip.own.stage == 0 for p in peers), 120.0)
        await swarm.until_round(2, 2000.0)

    in_virtual_time(scenario, spec, limits=limits, is_synthetic=True)


@pytest.mark.parametrize("lonely", [0, 1])
def test_a_stage_is_filled_though_the_first_in_line_is_bound_to_its_own(
    tmp_path: Path, lonely: int
) -> None:
    """And the run goes on: what the others had in flight when their only callee died, or when
    they moved, is launched again."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=12)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("victim", stage=lonely)
        peers = [swarm.start(name, stage=1 - lonely) for name in ("one", "other")]
        await swarm.until_round(3)
        swarm.kill("victim")
        now = asyncio.get_running_loop().time
        view = peers[0].view
        await swarm.until(lambda: propose_move(view, 2, now(), margin=0.15) is not None)
        named = propose_move(view, 2, now(), margin=0.15)
        assert named is not None
        (free,) = (p for p in peers if p.gossip.own.peer_id != named.peer_id)
        free.mover.wanted = None
        await swarm.until_round(12, 900.0)
        assert free.gossip.own.stage == lonely
        assert swarm.total("moved") == 1

    in_virtual_time(scenario, spec, limits=WaitLimits(), is_synthetic=True)


def test_an_even_swarm_does_not_move(tmp_path: Path) -> None:
    limits = WaitLimits(balance_every_s=1.0, move_cooldown_s=2.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", speed=1.0 + 0.1 * i)
        await swarm.until_round(30)
        assert swarm.total("moved") == 0

    in_virtual_time(
        scenario, tiny_spec(tmp_path, num_stages=2, rounds=30), limits=limits, is_synthetic=True
    )
