"""Any model that keeps the protocol trains; a faulty builder is one clear line."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from swarmnet.errors import DataError, SpecError
from swarmnet.spec import RunSpec, load_spec
from swarmnet.training.data import open_data
from swarmnet.training.models.registry import model_plan, stage_costs
from swarmnet.training.stage import build_stage
from tests.oracles.reference import ReferenceTrainer
from tests.training.flights import batch, batch_of_slot, fly, optimizers_of, stages_of, update
from tests.training.specs import small_spec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.chdir(ROOT)
    return load_spec(Path("examples/custom_model.toml"))


def test_the_example_learns_in_stages_as_in_one_piece(example: RunSpec) -> None:
    data = open_data(example)
    reference = ReferenceTrainer(example)
    stages = stages_of(example)
    optimizers = optimizers_of(example, stages)
    per_round = example.pipeline.global_batch // example.pipeline.microbatch
    losses = []
    for r in range(60):
        results = [
            fly(stages, (r, slot), *batch_of_slot(example, data, r, slot))
            for slot in range(per_round)
        ]
        count = sum(result.num_tokens for result in results)
        assert count == example.pipeline.global_batch
        losses.append(sum(result.loss_sum for result in results) / count)
        update(stages, optimizers, count, example.optimizer.grad_clip_norm, r)
        if r < 10:
            assert math.isclose(losses[-1], reference.step(r, range(per_round)), rel_tol=1e-4)
    assert abs(losses[0] - math.log(3)) < 0.3
    assert losses[-1] < 0.6


def test_the_example_has_data_of_its_own(example: RunSpec) -> None:
    data = open_data(example)
    assert data.bytes_per_token == 0
    assert data.num_samples is None
    points, arms = batch(data, 2**50)
    assert (points.shape, arms.shape) == ((64, 2), (64,))
    held_out = {bytes(data.held_out(i).inputs.data) for i in range(data.num_held_out)}
    assert len(held_out) == data.num_held_out == 4


def test_stages_are_cut_by_cost(example: RunSpec) -> None:
    costs = stage_costs(model_plan(example), 2)
    assert max(costs) < 0.6 * sum(costs)


def custom(path: Path, source: str, **options: object) -> RunSpec:
    path.write_text(source)
    model = {"kind": "custom", "builder": f"{path}:build", "options": options}
    spec = small_spec().model_dump()
    return RunSpec.model_validate({**spec, "model": model})


LAYER = """
from torch import nn
from swarmnet.training.models.base import *
def build(dtype="int32", num_values=8, names=("a", "b"), frozen=False, shape=(4,)):
    def layer():
        return nn.Embedding(8, 4).requires_grad_(not frozen)
    return ModelPlan(
        layers=tuple(LayerBuilder(n, layer, 1.0, (4, 4)) for n in names),
        inputs=TensorSpec(dtype, tuple(shape), num_values),
        targets=TensorSpec("float32", ()),
        loss=lambda a, b: a.sum(), count=lambda t: t.numel(),
    )
"""


NORMED = LAYER.replace("return nn.Emb", "return nn.Sequential(nn.Emb").replace(
    "not frozen)", "not frozen), nn.BatchNorm1d(4))"
)


@pytest.mark.parametrize(
    ("source", "options", "wanted"),
    [
        ("def other(): pass", {}, "has no function build"),
        ("def build(): return 3", {}, "must return a swarmnet ModelPlan"),
        ("def build(): raise KeyError('x')", {}, "failed: KeyError"),
        ("def build(): pass", {"width": 3}, "failed: TypeError"),
        ("def build(:", {}, "cannot be loaded: SyntaxError"),
        ("import not_a_module_at_all", {}, "cannot be loaded: ModuleNotFoundError"),
        (LAYER, {"names": []}, "need names"),
        (LAYER, {"names": ["a", "a"]}, "each its own"),
        (LAYER, {"num_values": 0}, "needs num_values"),
        (LAYER, {"dtype": "int64"}, "float32 or int32"),
        (LAYER, {"names": ["a"]}, "cannot be cut into 2 stages"),
        (LAYER, {"frozen": True}, "requires a gradient"),
        (NORMED, {}, r"a\.1: BatchNorm1d keeps running statistics, which replicas do not share"),
    ],
)
def test_a_faulty_builder_is_one_clear_line(
    tmp_path: Path, source: str, options: dict, wanted: str
) -> None:
    spec = custom(tmp_path / "model.py", source, **options)
    with pytest.raises(SpecError, match=wanted) as raised:
        build_stage(spec, 0)
    assert "\n" not in str(raised.value)


def test_a_builder_is_what_its_file_says_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though Python has compiled one of the same size and second before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("a", "c"):
        spec = custom(tmp_path / "model.py", LAYER.replace('"a"', f'"{name}"'))
        os.utime(tmp_path / "model.py", (1e9, 1e9))
        assert model_plan(spec).layers[0].name == name


def test_a_missing_builder_file_is_one_clear_line(tmp_path: Path) -> None:
    spec = custom(tmp_path / "model.py", LAYER)
    (tmp_path / "model.py").unlink()
    with pytest.raises(SpecError, match="no file"):
        build_stage(spec, 0)


def test_a_model_that_takes_no_text_must_bring_data(tmp_path: Path) -> None:
    spec = custom(tmp_path / "model.py", LAYER, shape=[])
    with pytest.raises(DataError, match="must give data"):
        open_data(spec)
