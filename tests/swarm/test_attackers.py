"""Replicas that lie about their gradients, among honest ones: what each rule makes of it.

Everything is real but the network and the clock: the attackers are peers of the swarm that take
microbatches, feed and aggregate as all do, and put something else into their contributions."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnet.spec import RunSpec
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

NUM_HONEST, NUM_FALSE = 6, 2
ROUNDS = 32
TOLERANCE = 0.05
"""Part of the honest loss by which attackers may raise it under a defence."""
BROKEN = 0.25
"""And by which they at least raise it without one."""

Attack = Callable[[int, np.ndarray, np.random.Generator], np.ndarray]
"""(round, true gradient, rng) -> what is sent instead."""


def flipped(_: int, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return -8 * x


def scaled(r: int, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """In some rounds: a second moment that has seen such a gradient is slow to forget it."""
    return x * (1e5 if r % 5 == 0 else 1.0)


def noisy(_: int, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=x.shape) * (50 * np.linalg.norm(x) / math.sqrt(x.size))


ATTACKS: dict[str, Attack] = {"flipped": flipped, "scaled": scaled, "noisy": noisy}


class Attacker:
    """A stage whose gradient is not what it says."""

    def __init__(self, stage: Any, attack: str, seed: int) -> None:
        self._stage = stage
        self._attack = attack
        self._rng = np.random.default_rng(seed)
        self._round = 0
        self._old: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def finish_round(self) -> None:
        self._round += 1
        self._stage.finish_round()

    def gradient_shard(self, j: int) -> Array:
        array = self._stage.gradient_shard(j)
        x = np.frombuffer(bytes(array.data), dtype=np.float32)
        if self._attack == "stale":  # for eight rounds the same
            if self._round % 8 == 0 or j not in self._old:
                self._old[j] = x
            sent = 20 * self._old[j]
        else:
            sent = ATTACKS[self._attack](self._round, x, self._rng)
        return Array("float32", array.shape, sent.astype(np.float32).tobytes())


def chain(num_bytes: int) -> bytes:
    """Text that is worth learning: a letter is mostly followed by the next one."""
    rng = random.Random(0)
    letters = [0]
    while len(letters) < num_bytes:
        letters.append((letters[-1] + 1) % 8 if rng.random() < 0.9 else rng.randrange(8))
    return bytes(ord("a") + x for x in letters)


def small(folder: Path, rule: str) -> RunSpec:
    spec = tiny_spec(folder, num_stages=1, rounds=ROUNDS)
    (folder / "text.txt").write_bytes(chain(20_000))
    values = spec.model_dump()
    values["sync"] |= {"aggregation": rule, "shard_parameters": 8192}
    values["model"]["num_hidden_layers"] = 1
    values["pipeline"]["global_batch"] = 64
    values["optimizer"] |= {"grad_clip_norm": 0.0, "learning_rate": 5e-3}
    return RunSpec.model_validate(values)


def final_loss(folder: Path, rule: str, attack: str) -> tuple[float, int]:
    """On held-out data; and how many contributions were clipped."""
    spec = small(folder, rule)
    found: list[float] = []
    clipped: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            return Attacker(stage, attack, len(swarm.members)), optimizer

        for i in range(NUM_HONEST):
            swarm.start(f"honest-{i}")
        for i in range(NUM_FALSE):
            swarm.start(f"false-{i}", build=build if attack else None)
        await swarm.until_round(ROUNDS)

        def measured() -> list[float]:
            records = [m.peer.gossip.own.held_out for m in swarm.members.values()]
            return [h.loss for h in records if h is not None and h.round == ROUNDS]

        await swarm.until(lambda: bool(measured()))
        found.append(measured()[0])
        clipped.append(swarm.total("contributions_clipped"))

    in_virtual_time(scenario, spec)
    return found[0], clipped[0]


@functools.cache
def honest_loss(folder: Path) -> float:
    return final_loss(folder, "mean", "")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attackers")


@pytest.mark.parametrize("attack", [*ATTACKS, "stale"])
def test_the_mean_breaks_and_the_default_does_not(folder: Path, attack: str) -> None:
    honest = honest_loss(folder)
    defended, clipped = final_loss(folder, "median_clip", attack)
    broken, _ = final_loss(folder, "mean", attack)
    print(f"{attack}: honest {honest:.3f}, mean {broken:.3f}, median_clip {defended:.3f}")
    assert clipped > 0
    assert defended < honest * (1 + TOLERANCE)
    assert broken > honest * (1 + BROKEN)


@pytest.mark.parametrize("rule", ["trimmed_mean", "centered_clip"])
@pytest.mark.parametrize("attack", [*ATTACKS, "stale"])
def test_the_other_rules_hold_too(folder: Path, rule: str, attack: str) -> None:
    honest = honest_loss(folder)
    defended, _ = final_loss(folder, rule, attack)
    print(f"{attack}: honest {honest:.3f}, {rule} {defended:.3f}")
    assert defended < honest * (1 + TOLERANCE)


def test_among_honest_replicas_the_default_changes_nothing(tmp_path: Path) -> None:
    """Five contributors, most of one microbatch a round, some of two: the swarm still makes the
    update of one machine."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=12)
    assert spec.sync.aggregation == "median_clip"

    async def scenario(swarm: Swarm) -> None:
        for i in range(5):
            swarm.start(f"peer-{i}")
        await swarm.until_round(12)
        assert swarm.total("contributions_clipped") == 0
        trainer = replay(spec, swarm.counted, 12)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)
