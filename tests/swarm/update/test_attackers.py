"""Replicas that lie about their gradients, among honest ones: what each rule makes of it.

Everything is real but the network and the clock: the attackers are peers of the swarm that take
microbatches, feed and aggregate as all do, and put something else into their contributions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnet.spec import RunSpec
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

NUM_HONEST, NUM_FALSE = 6, 2
ROUNDS = 32
TOLERANCE = 0.05
"""Part of the honest loss by which attackers may raise it under a defence."""
BROKEN = 0.25
"""And by which they at least raise it without one."""
WITHOUT_LOSS_S = 60.0
"""After the last round nobody has a loss to tell."""

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
Push = Callable[[int, np.ndarray], tuple[int, np.ndarray]]
"""(tokens, what is true) -> what is pushed instead."""


def greedy(num_tokens: int, x: np.ndarray) -> tuple[int, np.ndarray]:
    """Claims a thousand times the tokens, for as much of the opposite."""
    return 1000 * num_tokens, -1000 * x


PUSHES: dict[str, Push] = {
    "greedy": greedy,
    "opposite": lambda n, x: (n, -8 * x),
    "huge": lambda n, x: (n, 1e5 * x),
    "turned": lambda n, x: (n, -x),
}


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


def small(folder: Path, rule: str, mode: str = "zero", codec: str = "none") -> RunSpec:
    spec = tiny_spec(folder, num_stages=1, rounds=ROUNDS)
    (folder / "text.txt").write_bytes(chain(20_000))
    values = spec.model_dump()
    values["sync"] |= {"aggregation": rule, "shard_parameters": 8192, "mode": mode}
    values["sync"] |= {"local_steps": 4, "codec": codec}
    values["data"] |= {"paths": ["text.txt"], "held_out_microbatches": 16}
    values["model"]["num_hidden_layers"] = 1
    values["pipeline"]["global_batch"] = 32
    values["optimizer"] |= {"grad_clip_norm": 0.0, "learning_rate": 5e-3}
    return RunSpec.model_validate(values)


def final_loss(
    folder: Path, rule: str, attack: str, mode: str = "zero", codec: str = "none"
) -> tuple[float, int]:
    """On held-out data, infinite where it is no number, which nobody tells; and how many
    contributions were clipped."""
    spec = small(folder, rule, mode, codec)
    found: list[float] = []
    clipped: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            return Attacker(stage, attack, len(swarm.members)), optimizer

        for i in range(NUM_HONEST):
            swarm.start(f"honest-{i}")
        is_gradient = attack in ATTACKS or attack == "stale"
        for i in range(NUM_FALSE):
            swarm.start(f"false-{i}", build=build if is_gradient else None)
        await swarm.until_round(ROUNDS)

        def measured() -> list[float]:
            records = [m.peer.gossip.own.held_out for m in swarm.members.values()]
            return [h.loss for h in records if h is not None and h.round == ROUNDS]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHOUT_LOSS_S):
                await swarm.until(lambda: bool(measured()))
        found.append(measured()[0] if measured() else math.inf)
        clipped.append(swarm.total("contributions_clipped"))

    with pytest.MonkeyPatch.context() as patch:
        if attack in PUSHES:
            patch.setattr(Exchanges, "make", pushing(PUSHES[attack]))
        in_virtual_time(scenario, spec)
    return found[0], clipped[0]


def pushing(push: Push) -> Callable[..., Any]:
    """`Exchanges.make`, where false peers push something else."""
    update = Exchanges.make

    async def false_update(self: Exchanges, part: Any, *arguments: Any) -> None:
        async def other(j: int) -> Any:
            num_tokens, array = await part(j)
            if array is None:
                return num_tokens, array
            x = np.frombuffer(bytes(array.data), dtype=np.float32)
            num_tokens, sent = push(num_tokens, x)
            return num_tokens, Array("float32", array.shape, sent.astype(np.float32).tobytes())

        is_false = self.gossip.own.peer_id.startswith("false")
        await update(self, other if is_false else part, *arguments)

    return false_update


@functools.cache
def honest_loss(folder: Path, mode: str = "zero", codec: str = "none") -> float:
    return final_loss(folder, "mean", "", mode, codec)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which these tests run: a run's name, and so its samples, follow from the path
    of its text, and losses that are compared must not depend on where that lies."""
    folder = tmp_path_factory.mktemp("attackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize(
    ("attack", "codec"),
    [
        ("stale", "none"),
        *(pytest.param(a, "none", marks=pytest.mark.long) for a in ("scaled", "flipped", "noisy")),
        pytest.param("flipped", "int8", marks=pytest.mark.long),
    ],
)
def test_the_mean_breaks_and_the_default_does_not(folder: Path, attack: str, codec: str) -> None:
    """With a codec too: norms are of what contributions decode to."""
    honest = honest_loss(folder, codec=codec)
    defended, clipped = final_loss(folder, "median_clip", attack, codec=codec)
    broken, _ = final_loss(folder, "mean", attack, codec=codec)
    print(f"{attack}, {codec}: honest {honest:.3f}, mean {broken:.3f}, median_clip {defended:.3f}")
    assert clipped > 0
    assert defended < honest * (1 + TOLERANCE)
    assert broken > honest * (1 + BROKEN)


@pytest.mark.parametrize(
    ("attack", "rule"),
    [
        pytest.param(attack, rule, marks=[] if attack == "scaled" else [pytest.mark.long])
        for attack in (*ATTACKS, "stale")
        for rule in ("trimmed_mean", "centered_clip")
    ],
)
def test_the_other_rules_hold_too(folder: Path, rule: str, attack: str) -> None:
    honest = honest_loss(folder)
    defended, _ = final_loss(folder, rule, attack)
    print(f"{attack}: honest {honest:.3f}, {rule} {defended:.3f}")
    assert defended < honest * (1 + TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "attack"),
    [
        ("zero", "greedy"),
        *(
            pytest.param("local", attack, marks=pytest.mark.long)
            for attack in PUSHES
            if attack != "turned"
        ),
    ],
)
def test_false_pushes_break_the_mean_and_not_the_default(
    folder: Path, mode: str, attack: str
) -> None:
    """In mode `local` what is pushed is how far a replica came in four steps of its own."""
    honest = honest_loss(folder, mode)
    defended, clipped = final_loss(folder, "median_clip", attack, mode)
    broken, _ = final_loss(folder, "mean", attack, mode)
    print(f"{mode}, {attack}: honest {honest:.3f}, mean {broken:.3f}, median_clip {defended:.3f}")
    assert clipped > 0
    assert defended < honest * (1 + TOLERANCE)
    assert broken > honest * (1 + BROKEN)


def test_the_trimmed_mean_bears_changes_that_are_only_turned(folder: Path) -> None:
    """Which no norm tells: in mode `local` changes are as long whatever the gradients were."""
    honest = honest_loss(folder, "local")
    losses = {
        rule: final_loss(folder, rule, "turned", "local")[0]
        for rule in ("mean", "median_clip", "trimmed_mean", "centered_clip")
    }
    print(f"turned: honest {honest:.3f}", *(f"{rule} {x:.3f}" for rule, x in losses.items()))
    assert losses["trimmed_mean"] < honest * (1 + TOLERANCE)
    assert losses["mean"] > honest * (1 + BROKEN)


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
