"""Machines that serve several stages, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.membership.view import View
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec


@pytest.mark.parametrize("num_machines", [1, 2])
def test_machines_with_all_stages_make_the_updates_of_one_process(
    tmp_path: Path, num_machines: int
) -> None:
    rounds = 8
    spec = tiny_spec(tmp_path, num_stages=3, rounds=rounds)

    async def scenario(swarm: Swarm) -> None:
        for m in range(num_machines):
            await start_machine(swarm, f"m{m}", 3)
        await swarm.until_round(rounds)
        served: dict[str, set[int]] = {}
        for name, member in swarm.members.items():
            assert member.peer.replica is not None
            served.setdefault(name.partition("/")[0], set()).add(member.peer.replica.index)
        assert set(map(frozenset, served.values())) == {frozenset((0, 1, 2))}, served
        trainer = replay(spec, swarm.counted, rounds)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_seats_share_the_speed_of_their_device(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=30)

    async def scenario(swarm: Swarm) -> None:
        await start_machine(swarm, "m", 2)
        swarm.start("alone-0", stage=0)
        swarm.start("alone-1", stage=1)
        await swarm.until_round(20)
        rates = {n: m.peer.gossip.own.samples_per_s for n, m in swarm.members.items()}
        assert rates["m"] < 0.75 * rates["alone-0"], rates
        assert rates["m/1"] < 0.75 * rates["alone-1"], rates
        seats = [swarm.members[name].peer for name in ("m", "m/1")]
        clocks = [seat.machine.device.busy_s for seat in seats]
        assert all(clocks)
        both_s = sum(seat.replica.service_s for seat in seats if seat.replica)
        assert rates["m"] == pytest.approx(4 / both_s, rel=0.2), "a seat counts its own work only"

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_machine_with_two_stages_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    rounds = 12
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds)

    async def scenario(swarm: Swarm) -> None:
        await start_machine(swarm, "m", 2)
        await start_machine(swarm, "n", 2)
        await swarm.until_round(4)
        for name in ("m", "m/1"):
            swarm.kill(name)
        await swarm.until_round(rounds)
        trainer = replay(spec, swarm.counted, rounds)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_a_seat_that_cannot_be_built_says_goodbye(tmp_path: Path) -> None:
    """Its machine's channels stay open: it would be taken for one that is joining."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=30)

    def build(stage_index: int) -> Any:
        raise UserError(f"stage {stage_index} does not fit")

    async def scenario(swarm: Swarm) -> None:
        await start_machine(swarm, "m", 2)
        beside = swarm.start("m/2", feeds=False, beside=swarm.members["m"].peer, build=build)
        ended = swarm.members.pop("m/2").life
        await asyncio.wait([ended])
        with pytest.raises(UserError, match="does not fit"):
            ended.result()
        view = swarm.members["m"].peer.view
        await swarm.until(lambda: state_of(view, beside.gossip.own.peer_id) == LEFT, 2.0)

    in_virtual_time(scenario, spec)


def test_a_peer_that_has_left_keeps_no_stage(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=60)

    async def scenario(swarm: Swarm) -> None:
        await start_machine(swarm, "m", 2)
        await start_machine(swarm, "n", 2)
        await swarm.until_round(4)
        seat = swarm.members.pop("m/1")
        replica = weakref.ref(seat.peer.replica)  # type: ignore[arg-type]
        assert replica() is not None
        seat.peer.stop()
        await seat.life
        gc.collect()
        assert replica() is None

    in_virtual_time(scenario, spec)


def state_of(view: View, peer_id: str) -> str:
    record = view.get(peer_id)
    return record.state if record is not None else ""


async def start_machine(swarm: Swarm, name: str, num_seats: int) -> None:
    """One seat after the other, as `swarmnet.runtime.seats` does."""
    first = swarm.start(name)
    await swarm.until(lambda: first.replica is not None)
    for seat in range(1, num_seats):
        beside = swarm.start(f"{name}/{seat}", feeds=False, beside=first)
        await swarm.until(lambda peer=beside: peer.replica is not None)  # type: ignore[misc]
