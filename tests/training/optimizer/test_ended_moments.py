"""The moments of one run, found again however another one cuts its parameters."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from swarmnet.spec import OptimizerSpec
from swarmnet.training.checkpoint import OPTIMIZER_FILE, Meta, checksum
from swarmnet.training.ended_moments import EndedMoments, Layout, misfit
from swarmnet.training.models.base import ParameterRange
from tests.training.specs import small_spec

SIZES = {"embed": 12, "a": 7, "b": 1, "c": 20, "head": 12}
TIED = {"head": "embed"}
"""As in many models; where both are in one stage, the owner alone is there."""
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, rounds=1, beta1=0.9, beta2=0.95)


def layout_of(cuts: Sequence[int], shard: int) -> Layout:
    """`cuts`: before which parameters a stage begins."""
    names = list(SIZES)
    edges = [0, *sorted(set(cuts)), len(names)]
    ranges, sizes = [], []
    for first, end in itertools.pairwise(edges):
        of_stage, start = [], 0
        for name in names[first:end]:
            if TIED.get(name) in names[first:end]:
                continue
            of_stage.append(ParameterRange(name, start, (SIZES[name],), SIZES[name]))
            start += SIZES[name]
        ranges.append(of_stage)
        sizes.append([min(shard, start - at) for at in range(0, start, shard)])
    return Layout(ranges, sizes, [[2] * len(of_stage) for of_stage in sizes])


def values_of(name: str) -> torch.Tensor:
    seed = list(SIZES).index(TIED.get(name, name))
    return torch.rand(SIZES[name], generator=torch.Generator().manual_seed(seed))


def flat_of_stage(ranges: Sequence[ParameterRange]) -> torch.Tensor:
    return torch.cat([values_of(r.name) for r in ranges])


def save(folder: Path, layout: Layout, steps: Sequence[Sequence[int]]) -> list[Any]:
    """One checkpoint a stage: the means are the parameters' values, the squares twice those."""
    saved = []
    for stage, (ranges, sizes) in enumerate(zip(layout.ranges, layout.sizes, strict=True)):
        flat, tensors, at = flat_of_stage(ranges), {}, 0
        for j, size in enumerate(sizes):
            mean = flat[at : at + size].clone()
            tensors |= {f"shards.{j}.mean": mean, f"shards.{j}.square": 2 * mean}
            at += size
        of_stage = folder / f"stage-{stage}"
        of_stage.mkdir()
        save_file(tensors, of_stage / OPTIMIZER_FILE)
        digest = {OPTIMIZER_FILE: checksum(of_stage / OPTIMIZER_FILE)}
        made = dict(enumerate(steps[stage]))
        meta = Meta("run", {}, 0, 9, stage, 2, len(sizes), "", made, {}, digest, 0.0)
        saved.append([(of_stage, meta)])
    return saved


CUTS = st.lists(st.integers(1, len(SIZES) - 1), max_size=3)


@given(old=CUTS, new=CUTS, shards=st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=60)
def test_each_parameter_keeps_its_own(
    old: list[int], new: list[int], shards: tuple[int, int]
) -> None:
    there, here = layout_of(old, shards[0]), layout_of(new, shards[1])
    with tempfile.TemporaryDirectory() as folder:
        steps = [[7] * len(sizes) for sizes in there.sizes]
        ended = EndedMoments(save(Path(folder), there, steps), there, here, OPTIMIZER, TIED)
        assert not ended.lacks
        for stage, (ranges, sizes) in enumerate(zip(here.ranges, here.sizes, strict=True)):
            expected, at = flat_of_stage(ranges), 0
            for j, size in enumerate(sizes):
                found = ended.flat(stage, j)
                assert found is not None
                part = expected[at : at + size]
                assert torch.equal(found, torch.cat([part, 2 * part, torch.tensor([7.0])]))
                at += size


def test_shards_of_unlike_steps_keep_their_corrected_means(tmp_path: Path) -> None:
    there, here = layout_of([], 26), layout_of([], 40)
    assert [len(sizes) for sizes in there.sizes] == [2]
    ended = EndedMoments(save(tmp_path, there, [[3, 9]]), there, here, OPTIMIZER, TIED)
    found = ended.flat(0, 0)
    assert found is not None
    assert found[-1] == 9
    before = flat_of_stage(here.ranges[0])
    for decay, scale, moment in ((0.9, 1, found[:40]), (0.95, 2, found[40:80])):
        steps = torch.tensor([3.0] * 26 + [9.0] * 14)
        corrected = scale * before / (1 - decay**steps)
        assert torch.allclose(moment / (1 - decay**9), corrected, rtol=1e-5)


def test_what_one_checkpoint_lacks_is_said(tmp_path: Path) -> None:
    there, here = layout_of([2], 10), layout_of([3], 15)
    saved = save(tmp_path, there, [[5] * len(sizes) for sizes in there.sizes])
    file = saved[1][0][0] / OPTIMIZER_FILE
    file.write_bytes(file.read_bytes()[:-1])
    ended = EndedMoments(saved, there, here, OPTIMIZER, TIED)
    assert ended.lacks == "no checkpoint here has those of stage 1, shard 0"
    assert ended.flat(1, 0) is None
    assert ended.flat(0, 0) is not None


def test_moments_of_matrices_that_were_divided_otherwise_do_not_go_on() -> None:
    """AdamW has two, of what Muon has one now."""
    old, new = (
        small_spec(optimizer={"kind": "muon", "parts": parts})
        for parts in ({}, {"mlp.gate_up_proj": (1, 1)})
    )
    assert misfit(old, old) == misfit(new, new) == ""
    why = r"[optimizer] parts is {} there, {'mlp.gate_up_proj': (1, 1)} here"
    assert misfit(old, new) == why
