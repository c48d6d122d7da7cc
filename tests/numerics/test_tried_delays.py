"""What was tried for late gradients in `benchmarks/optimizers.py` is what it is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.learning.plain import AGAIN, LATE, MATRICES_LATE, MOMENTUM, TWO_STEPS, Tried
from swarmnet.spec import RunSpec
from swarmnet.training.optimizer.rates import learning_rate
from tests.oracles.reference import ReferenceTrainer
from tests.oracles.reference_modes import DelayedReference
from tests.swarm.harness import relative_difference, tiny_spec

ROUNDS, WARMUP = 7, 2
SLOTS = (0, 1)


def spec_of(folder: Path, kind: str) -> RunSpec:
    sync = {"mode": "delayed", "warmup_rounds": WARMUP}
    values = tiny_spec(folder, num_stages=1, rounds=ROUNDS, sync=sync).model_dump()
    values["optimizer"] |= {"kind": kind, "weight_decay": 0.0}
    return RunSpec.model_validate(values)


def test_ahead_by_the_last_update_is_error_feedback_of_the_delay(tmp_path: Path) -> None:
    """Parameters that gradients are taken at move by 2 u - v: the newest update, and what the one
    before it lacked. The updates are made here by AdamW on parameters of zeros."""
    spec = spec_of(tmp_path, "adamw")
    tried = Tried(spec, AGAIN)
    for r in range(ROUNDS):
        tried.step(r, SLOTS)
    tried.finish()

    trainer, options = ReferenceTrainer(spec), spec.optimizer
    at = {n: p.clone() for n, p in trainer.state_dict().items()}
    steps = {n: nn.Parameter(torch.zeros_like(p)) for n, p in at.items()}
    betas = options.beta1, options.beta2
    adam = torch.optim.AdamW(steps.values(), betas=betas, eps=options.eps, weight_decay=0.0)

    def update_of(r: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for n, p in steps.items():
            p.grad, p.data = gradients[n], torch.zeros_like(p)
        nn.utils.clip_grad_norm_(steps.values(), options.grad_clip_norm)
        adam.param_groups[0]["lr"] = learning_rate(options, r)
        adam.step()
        return {n: p.detach().clone() for n, p in steps.items()}

    waiting: tuple[int, dict[str, torch.Tensor]] | None = None
    before = {n: torch.zeros_like(p) for n, p in at.items()}
    for r in range(ROUNDS):
        trainer.load_state_dict(at)
        _, tokens = trainer.accumulate(r, SLOTS)
        found = {n: g / tokens for n, g in trainer.gradients().items()}
        if r < WARMUP:
            update = update_of(r, found)
            at = {n: p + update[n] for n, p in at.items()}
            continue
        if waiting is not None:
            update = update_of(*waiting)
            at = {n: p + 2 * update[n] - before[n] for n, p in at.items()}
            before = update
        waiting = r, found
    assert waiting is not None
    update = update_of(*waiting)
    at = {n: p + update[n] - before[n] for n, p in at.items()}  # nothing comes after it
    assert relative_difference(tried.trainer.state_dict(), at) < 1e-5


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_part_of_zero_leaves_gradients_late(tmp_path: Path, kind: str) -> None:
    """Nothing is ahead, so the built way ends elsewhere."""
    spec = spec_of(tmp_path, kind)
    runs = Tried(spec, LATE), Tried(spec, AGAIN), DelayedReference(spec)
    for one in runs:
        for r in range(ROUNDS):
            one.step(r, SLOTS)
            if one is runs[0]:
                assert not one.foretold(r)
        one.finish()
    late, ahead, built = (one.trainer.state_dict() for one in runs)
    assert relative_difference(late, ahead) > 1e-4
    assert relative_difference(late, built) > 1e-4


def test_what_is_built_for_muon_is_its_last_update_once_more(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "muon")
    runs = DelayedReference(spec), Tried(spec, AGAIN), Tried(spec, MATRICES_LATE)
    for one in runs:
        for r in range(ROUNDS):
            one.step(r, SLOTS)
        one.finish()
    built, again, late = (one.trainer.state_dict() for one in runs)
    assert relative_difference(built, again) < 1e-5
    assert relative_difference(built, late) > 1e-4


def test_muons_matrices_may_be_ahead_along_another_direction(tmp_path: Path) -> None:
    """Along that of the last step it is the last step; along others the runs end elsewhere."""
    spec = spec_of(tmp_path, "muon")
    trainer, beta = ReferenceTrainer(spec), spec.optimizer.momentum
    for r in range(3):
        trainer.step(r, SLOTS)
    last = trainer.last_muon_step()
    assert relative_difference(trainer.muon_step(2, beta, 1 - beta), last) < 1e-6
    ends = []
    for one in (DelayedReference(spec), Tried(spec, MOMENTUM), Tried(spec, TWO_STEPS)):
        for r in range(ROUNDS):
            one.step(r, SLOTS)
        one.finish()
        ends.append(one.trainer.state_dict())
    for k in range(3):
        assert relative_difference(ends[k], ends[k - 1]) > 1e-4
