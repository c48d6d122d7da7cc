"""Machines that stop for seconds and go on: what they have done is in the update."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet.protocol.pipeline.launching import FeederView, Launches
from swarmnet.simulation.clock import VirtualLoop
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 30
LONGEST_STALL_S = 4.5
"""After about 5 s a peer that says nothing in an exchange is taken for one that hangs."""


def _stalls(seed: int) -> Iterator[tuple[float, str, float]]:
    """Pauses before a stall, who stalls, and for how long, seconds."""
    rng = random.Random(seed)
    while True:
        yield rng.uniform(0.2, 2.0), f"peer-{rng.randrange(6)}", rng.uniform(0.5, LONGEST_STALL_S)


@pytest.mark.parametrize("mode", [pytest.param("zero", marks=pytest.mark.long), "delayed", "local"])
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 10, 17))],
)
def test_who_stalls_for_seconds_loses_no_sample(tmp_path: Path, mode: str, seed: int) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync={"mode": mode})

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 3)
        await swarm.until_round(1)
        for pause_s, name, stall_s in _stalls(seed):
            if min(swarm.rounds()) >= ROUNDS - 10:
                break
            await asyncio.sleep(pause_s)
            swarm.hub.freeze(name)
            await asyncio.sleep(stall_s)
            swarm.hub.thaw(name)
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0
        if mode == "zero":
            trainer = replay(spec, swarm.counted, ROUNDS)
            assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_who_is_back_just_before_the_deadline_has_the_time_again(tmp_path: Path) -> None:
    """It took the others for dead, and so leads all shards itself: until it has heard of them all
    it cannot give them what it has, and one of them stalls then."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def stall(swarm: Swarm, name: str, stall_s: float) -> None:
        swarm.hub.freeze(name)
        await asyncio.sleep(stall_s)
        swarm.hub.thaw(name)

    async def scenario(swarm: Swarm) -> None:
        feeder, *_ = [swarm.start(f"peer-{i}", stage=i % 2) for i in range(6)]
        await swarm.until_round(8)
        struck, rounds, is_over = max(swarm.rounds()) + 1, feeder.rounds, asyncio.Event()
        is_drained = rounds.is_drained

        def noted(r: int) -> bool:
            if is_drained(r) and r == struck:
                is_over.set()
            return is_drained(r)

        rounds.is_drained = noted  # type: ignore[method-assign]
        await is_over.wait()  # and has not begun the update
        await stall(swarm, "peer-1", 4.2)
        await asyncio.sleep(0.5)
        await stall(swarm, "peer-3", 2.2)
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec, is_synthetic=True)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_machine_that_is_suspended_takes_nobody_for_dead(tmp_path: Path, seed: int) -> None:
    """With all that run on it: their clocks jump, in the middle of everything."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        swarm.start_grid(2, 3)
        await swarm.until_round(1)
        while min(swarm.rounds()) < ROUNDS - 10:
            await asyncio.sleep(rng.uniform(1.0, 4.0))
            loop.stand_still(rng.uniform(2.0, 20.0))
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_a_microbatch_that_finds_its_round_closed_everywhere_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that suspects all feeders for a moment feeds itself, and may do so when the first
    stage has all that it needs, and waits for the norm of the second."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        for i, stage in enumerate((0, 1, 0, 1)):
            swarm.start(f"peer-{i}", stage=stage)
        await swarm.until_round(10)
        struck = max(swarm.rounds()) + 1
        loop = asyncio.get_running_loop()
        launched: list[float] = []

        def is_heard() -> bool:
            return bool(launched) and loop.time() > launched[0] + 0.5

        first = [swarm.members[name].peer.replica for name in ("peer-0", "peer-2")]
        for name in ("peer-1", "peer-3"):  # they hear late that the round is over
            rounds = swarm.members[name].peer.rounds
            is_drained = rounds.is_drained
            rounds.is_drained = (  # type: ignore[method-assign]
                lambda r, ask=is_drained: (r != struck or is_heard()) and ask(r)  # type: ignore[misc]
            )
        is_feeder, next_slot = FeederView.is_feeder, FeederView.next_slot

        def launches_one(known: FeederView, launches: Launches, patience_s: float) -> int | None:
            is_late = known.own.peer_id == "peer-1" and launches.round == struck
            if not is_late or launched:
                return next_slot(known, launches, patience_s)
            launched.append(loop.time())
            return 0

        def feeds(known: FeederView) -> bool:
            is_late = known.own.peer_id == "peer-1" and not launched
            if is_late and all(r is not None and r.is_closed(struck) for r in first):
                return True
            return is_feeder(known)

        monkeypatch.setattr(FeederView, "next_slot", launches_one)
        monkeypatch.setattr(FeederView, "is_feeder", feeds)
        await swarm.until(lambda: bool(launched))
        await swarm.until_round(struck + 2)
        assert loop.time() - launched[0] < 3.0
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0
        assert swarm.total("norm_missed") == 0

    in_virtual_time(scenario, spec, is_synthetic=True)
