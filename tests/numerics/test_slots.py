"""A run is repeated by its seed, whoever feeds it: a round is a list of slots."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnet.protocol.pipeline import progress
from swarmnet.runtime.compose import run_settings
from swarmnet.spec import RunSpec
from tests.oracles.reference import ReferenceTrainer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec

ROUNDS = 20
NUM_SLOTS = 4
TOLERANCE = 1e-4
SAID = "slots that two feeders counted"


def trained(
    spec: RunSpec, num_feeders: int, seed: int = 0
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of all rounds and the final parameters, of a stage fed by so many and another that
    two serve."""
    losses: list[float] = []
    parameters: dict[str, Tensor] = {}

    async def scenario(swarm: Swarm) -> None:
        for i in range(num_feeders):
            swarm.start(f"feeder-{i}", stage=0)
        for i in range(2):
            swarm.start(f"last-{i}", stage=1, feeds=False)
        for r in range(spec.optimizer.rounds):
            await swarm.until_round(r + 1)
            counts = [m.peer.gossip.own.count(r) for m in swarm.members.values()]
            slots = Counter(slot for c in counts for slot in c.committed)
            num_slots = spec.pipeline.batch_of(r) // spec.pipeline.microbatch
            assert slots == Counter(range(num_slots)), f"round {r} of {num_feeders} feeders"
            losses.append(sum(c.loss_sum for c in counts) / sum(c.tokens for c in counts))
        parameters.update(swarm.parameters())

    in_virtual_time(scenario, spec, seed=seed)
    return losses, parameters


def test_a_seed_gives_one_loss_curve_whoever_feeds(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    trainer = ReferenceTrainer(spec)
    expected = [trainer.step(r, range(NUM_SLOTS)) for r in range(ROUNDS)]
    for num_feeders, seed in ((1, 1), (2, 2), (5, 5), (5, 13)):
        losses, _ = trained(spec, num_feeders, seed=seed)
        assert losses == pytest.approx(expected, rel=TOLERANCE), f"{num_feeders} feeders"


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_a_batch_that_grows_is_the_same_whoever_feeds(tmp_path: Path, mode: str) -> None:
    """Delayed, a larger round is open while the last one of the smaller ones ends."""
    spec = tiny_spec(
        tmp_path,
        num_stages=2,
        rounds=9,
        global_batch=40,
        batch_ramp=[[0, 16], [3, 24], [6, 40]],
        sync={"mode": mode},
    )
    samples = iter(range(3 * 16 + 3 * 24 + 3 * 40))
    settings = run_settings(spec)
    for r, num_slots in enumerate((4, 4, 4, 6, 6, 6, 10, 10, 10)):
        for slot in range(num_slots):
            assert settings.samples_of(r, slot, None) == [next(samples) for _ in range(4)]
    assert not list(samples), "each sample once"
    found = [trained(spec, num_feeders, seed=num_feeders) for num_feeders in (1, 2, 5)]
    if mode == "zero":
        trainer = ReferenceTrainer(spec)
        expected = [trainer.step(r, range(settings.slots.of(r))) for r in range(9)]
        found.append((expected, trainer.state_dict()))
    (losses, parameters), *others = found
    for other_losses, other_parameters in others:
        assert other_losses == pytest.approx(losses, rel=TOLERANCE)
        assert relative_difference(other_parameters, parameters) < TOLERANCE


def test_twice_the_same_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    (losses, one), (again, other) = trained(spec, 1), trained(spec, 1)
    assert losses == again
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", range(4))
def test_with_a_feeder_killed_in_each_round_every_slot_counts_or_is_named(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=12, global_batch=64)
    num_slots, rng = spec.pipeline.global_batch // spec.pipeline.microbatch, random.Random(seed)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("last-0", stage=1, feeds=False)
        swarm.start("last-1", stage=1, feeds=False)
        for i in range(3):
            swarm.start(f"feeder-{i}", stage=0)
        doubled = 0
        for r in range(8):
            await swarm.until_round(r)
            await asyncio.sleep(0.05 * rng.randrange(8))
            oldest = next(name for name in swarm.members if name.startswith("feeder"))
            swarm.kill(oldest)
            swarm.start(f"feeder-{3 + r}", stage=0)
            await swarm.until_round(r + 1)
            view = swarm.members["last-0"].peer.view
            now = asyncio.get_running_loop().time()
            state = progress.round_progress(view, r, now, num_slots)
            assert state.committed == num_slots, f"seed {seed}, round {r}"
            doubled += sum(len(by) - 1 for by in progress.doubled(view, r, now).values())
        await swarm.until_round(12)
        named = sum(
            record.args[1].count(",") + 1 for record in caplog.records if SAID in record.msg
        )
        assert named == doubled, f"seed {seed}"

    in_virtual_time(scenario, spec, seed=seed, is_synthetic=True)
