"""One cell of the tables: a run, and what it has learned.

What a boundary codec does is a function of the tensors alone, so a cell of `boundary` is one
process (`tests/oracles/reference.py`) that codes at the cuts between its stages. It makes the
updates of a swarm (`tests/numerics/test_same_update.py`). What an update's codec does depends on
the peer that computed what. So a cell of a mode is a swarm: the production peers over a memory
transport in virtual time.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.learning.tasks import (
    AS_FEW_BYTES,
    BOTH,
    EVALUATE_EVERY,
    FEWEST,
    NARROW,
    ONE_PROCESS_PLACES,
    ROTATED,
    WIDE,
    AnswersData,
    share_of_right_answers,
    spec_text,
    write_text,
)
from swarmnet.ports import Data
from swarmnet.protocol.codecs import NONE
from swarmnet.spec import RunSpec, parse_spec
from swarmnet.training.data import open_data
from swarmnet.training.models import subspace
from tests.oracles.reference import ReferenceTrainer

if TYPE_CHECKING:
    from tests.swarm.harness import Swarm

MODES: dict[str, dict[str, Any]] = {
    "zero": {"mode": "zero"},
    "delayed": {"mode": "delayed"},
    "local-10": {"mode": "local", "local_steps": 10},
    "local-50": {"mode": "local", "local_steps": 50},
    "gossip-10": {"mode": "gossip", "local_steps": 10},
    "gossip-50": {"mode": "gossip", "local_steps": 50},
}
FEW = "topk 0.05"
"""`topk` with a `topk_density`: a twentieth of the numbers, and of results as few."""
UPDATES: dict[str, dict[str, Any]] = {FEW: {"codec": "topk", "topk_density": 0.05}}
"""Of `[sync]`, for codecs of updates that have more than a name."""
REPLICAS = 4
ANSWERS_EVERY = 100
LIMIT_S = 1e6
"""Virtual seconds."""


@dataclass(frozen=True)
class Cell:
    """A run."""

    where: str
    """One of `ONE_PROCESS_PLACES`, `BOTH`, or a mode."""
    task: str
    codec: str
    """Of the boundaries, of the mode's updates, or of both."""
    seed: int
    order: int = 0
    """Another one: sums in another order."""
    replaced: int = 0
    """Per cent of the peers."""

    @property
    def key(self) -> str:
        parts = [self.where, self.task, self.codec, f"seed-{self.seed}"]
        parts += [f"order-{self.order}"] * bool(self.order)
        parts += [f"replaced-{self.replaced}"] * bool(self.replaced)
        return "/".join(parts)


def this_platform() -> str:
    """Results of different ones are not compared: rounding differs, and the text of `python`."""
    return f"Python {platform.python_version()}, torch {torch.__version__}"


def settings_of(cell: Cell, rounds: int) -> str:
    """A hash of all that the spec says of a cell."""
    text = _spec_text(cell, rounds, Path("text"))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _spec_text(cell: Cell, rounds: int, text: Path) -> str:
    is_one_process = cell.where in ONE_PROCESS_PLACES
    mode = "zero" if cell.where == BOTH else cell.where
    codec = cell.codec if is_one_process or cell.where == BOTH else NONE
    return spec_text(
        cell.task,
        seed=cell.seed,
        rounds=rounds,
        text=text,
        codec=FEWEST if cell.where in AS_FEW_BYTES else codec,
        sync=None
        if is_one_process
        else MODES[mode] | UPDATES.get(cell.codec, {"codec": cell.codec}),
        subspace=(NARROW | ROTATED | WIDE).get(cell.where, 0),
        is_wide=cell.where in WIDE,
    )


def run(cell: Cell, rounds: int) -> dict[str, Any]:
    """What a cell has learned, by the number of rounds: `losses` on held-out data, nats a token,
    and of the task `answers` the shares of `right` ones."""
    began = time.monotonic(), time.process_time()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        least = write_text(text) if cell.task == "letters" else None
        if cell.where in ROTATED:
            subspace.lifted = _rotated(cell)  # type: ignore[assignment]
        if cell.where in ONE_PROCESS_PLACES:
            result = _run_one_process(cell, rounds, text)
        else:
            result = _run_swarm(cell, rounds, text)
    result |= {"rounds": rounds, "platform": this_platform()}
    result["settings"] = settings_of(cell, rounds)
    if least is not None:
        result["least_loss"] = least
    result["seconds"] = round(time.monotonic() - began[0], 1)
    result["cpu_seconds"] = round(time.process_time() - began[1], 1)
    return result


def _data_of(cell: Cell, spec: RunSpec) -> Data:
    return AnswersData(spec) if cell.task == "answers" else open_data(spec)


def _rotated(cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    """As `subspace.lifted`, in another subspace: its basis is the first columns of a random
    orthonormal matrix."""
    generator = torch.Generator().manual_seed(cell.seed)
    bases: dict[int, Tensor] = {}

    def lifted(z_BSK: Tensor, fixed_BSD: Tensor) -> Tensor:
        width, k = fixed_BSD.shape[-1], z_BSK.shape[-1]
        if width not in bases:
            numbers = torch.randn(width, width, generator=generator)
            bases[width] = torch.linalg.qr(numbers)[0]
        return fixed_BSD + z_BSK @ bases[width][:, :k].T

    return lifted


# ---- one process ---------------------------------------------------------------------------------


def _run_one_process(cell: Cell, rounds: int, text: Path) -> dict[str, Any]:
    spec = parse_spec(_spec_text(cell, rounds, text))
    trainer = ReferenceTrainer(spec, _data_of(cell, spec))
    slots = list(range(spec.pipeline.global_batch // spec.pipeline.microbatch))
    losses = {"0": trainer.held_out_loss()}
    right: dict[str, float] = {}
    for r in range(rounds):
        if cell.order:
            random.Random(f"{cell.order}|{r}").shuffle(slots)
        trainer.step(r, slots)
        done = r + 1
        if done % EVALUATE_EVERY == 0 or done == rounds:
            losses[str(done)] = trainer.held_out_loss()
        if cell.task == "answers" and (done % ANSWERS_EVERY == 0 or done == rounds):
            right[str(done)] = share_of_right_answers(trainer.model)
    return {"losses": losses, **({"right": right} if right else {})}


# ---- a swarm -------------------------------------------------------------------------------------


def _run_swarm(cell: Cell, rounds: int, text: Path) -> dict[str, Any]:
    from tests.swarm.harness import in_virtual_time

    spec = parse_spec(_spec_text(cell, rounds, text))
    data = _data_of(cell, spec)
    result: dict[str, Any] = {}

    async def scenario(swarm: Swarm) -> None:
        losses: dict[int, float] = {}
        watching = asyncio.get_running_loop().create_task(_watch(swarm, losses))
        await _start(swarm, data, has_churn=cell.replaced > 0)
        await _replace_peers(swarm, data, cell.replaced, rounds)
        await swarm.until_round(rounds, LIMIT_S)
        await swarm.until(lambda: rounds in losses, LIMIT_S)
        watching.cancel()
        result["losses"] = {str(r): losses[r] for r in sorted(losses)}
        result["spread"] = max(m.peer.gossip.own.spread for m in swarm.members.values())
        result["samples_lost"] = swarm.total("samples_lost")
        if cell.task == "answers":
            result["right"] = {str(rounds): _right_answers(swarm, spec, data)}

    in_virtual_time(scenario, spec, seed=cell.order)
    return result


async def _watch(swarm: Swarm, losses: dict[int, float]) -> None:
    """Notes the losses that peers measure, by round."""
    while True:
        for member in swarm.members.values():
            held_out = member.peer.gossip.own.held_out
            if held_out is not None:
                losses[held_out.round] = held_out.loss
        await asyncio.sleep(0.2)


async def _start(swarm: Swarm, data: Data, *, has_churn: bool) -> None:
    """All replicas. Without churn there is one feeder, which starts last: every replica is there
    from the first microbatch on, and runs of one seed have the same paths."""
    num_stages = swarm.spec.pipeline.num_stages
    names = [(f"peer-{i}", i % num_stages) for i in range(num_stages * REPLICAS)]
    *others, (feeder, its_stage) = names[::-1]
    for name, stage in others:
        swarm.start(name, stage=stage, data=data, feeds=has_churn)
    if not has_churn:
        await swarm.until(lambda: swarm.rounds() == [0] * len(others))
    swarm.start(feeder, stage=its_stage, data=data)


async def _replace_peers(swarm: Swarm, data: Data, percent: int, rounds: int) -> None:
    """Kills so many peers (rounded up) at even distances, and starts a newcomer for each."""
    num = math.ceil(len(swarm.members) * percent / 100)
    rng = random.Random(percent)
    for n in range(num):
        at = rounds * (n + 1) // (num + 1)
        await swarm.until(lambda at=at: max(swarm.rounds()) >= at, LIMIT_S)  # type: ignore[misc]
        victim = rng.choice(sorted(swarm.members))
        stage = swarm.members[victim].peer.gossip.own.stage
        swarm.kill(victim)
        swarm.start(f"newcomer-{n}", stage=stage, data=data)


def _right_answers(swarm: Swarm, spec: RunSpec, data: Data) -> float:
    """Of the model that the first replica of each stage has together."""
    firsts = {m.peer.gossip.own.stage: name for name, m in sorted(swarm.members.items())[::-1]}
    trainer = ReferenceTrainer(spec, data)
    trainer.load_state_dict(
        {k: p for name in firsts.values() for k, p in swarm.named(name).items()}
    )
    return share_of_right_answers(trainer.model)
