"""Layers that a program has as modules, and what is refused of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from swarmnet.api.given import Given, spec_file
from swarmnet.errors import DataError, SpecError, UsageError
from swarmnet.runtime.joining.starting import start_run
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import to_tensor
from swarmnet.training.data.opening import open_data
from swarmnet.training.models.base import build_layer
from swarmnet.training.models.registry import model_plan, split_stages

LENGTH = 8
VALUES: dict[str, Any] = {
    "seed": 3,
    "data": {"sequence_length": LENGTH, "held_out_fraction": 0.25},
    "optimizer": {"learning_rate": 1e-2, "rounds": 4},
    "pipeline": {"num_stages": 2, "global_batch": 8, "microbatch": 4},
}
TEXT = [{"text": "abc " * 40}] * 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(x))


def language_model() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Embedding(256, 16), Block(16), Block(16), nn.Linear(16, 256)]


def started(folder: Path, given: Given, values: dict[str, Any] = VALUES) -> RunSpec:
    return start_run(spec_file(values, given, folder)).spec


def test_layers_of_text_are_a_model_that_begins_as_they_are(tmp_path: Path) -> None:
    layers = language_model()
    spec = started(tmp_path, Given(TEXT, layers))
    assert spec.model.kind == "custom"
    plan = model_plan(spec)
    assert [layer.name for layer in plan.layers] == ["0", "1", "2", "3"]
    assert [layer.is_block for layer in plan.layers] == [False, True, True, False]
    assert plan.layers[-1].output_shape == (LENGTH, 256)
    assert len(split_stages(plan, 2)) == 2
    made = nn.Sequential(*(build_layer(plan, layer, spec.seed) for layer in plan.layers))
    for name, value in nn.Sequential(*layers).state_dict().items():
        assert torch.equal(made.state_dict()[name], value)
    tokens = torch.arange(2 * LENGTH, dtype=torch.int32).view(2, LENGTH)
    logits = made(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten().long(), reduction="sum")
    assert torch.equal(plan.loss(logits, tokens), expected)
    assert plan.count(tokens) == 2 * LENGTH
    inputs, targets = (to_tensor(a) for a in open_data(spec).microbatch(range(4)).arrays)
    assert inputs.shape == targets.shape == (4, LENGTH)


def test_the_same_layers_are_the_same_run_whatever_their_values(tmp_path: Path) -> None:
    ids = []
    for width, seed in ((16, 1), (16, 2), (24, 1)):
        layers = language_model() if width == 16 else [nn.Embedding(256, 24), nn.Linear(24, 256)]
        if seed == 2:
            nn.init.ones_(layers[0].weight)  # type: ignore[arg-type]
        ids.append(started(tmp_path, Given(TEXT, layers)).run_id)
    assert ids[0] == ids[1] != ids[2]


def test_pairs_are_samples_each_once_an_epoch(tmp_path: Path) -> None:
    inputs = torch.arange(40.0).view(20, 2)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    loss = lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum")  # noqa: E731
    spec = started(tmp_path, Given(data, layers, loss))
    plan = model_plan(spec)
    assert plan.count(torch.zeros(3, 1)) == 3
    assert plan.loss(torch.ones(3, 1), torch.zeros(3, 1)) == 3
    samples = open_data(spec)
    assert samples.num_samples == 16
    assert samples.num_held_out == 1  # a quarter
    seen, orders = [], []
    for epoch in range(2):
        rows = [
            to_tensor(samples.microbatch(range(first, first + 4)).inputs)
            for first in range(16 * epoch, 16 * epoch + 16, 4)
        ]
        orders.append(torch.cat(rows)[:, 0].tolist())
        seen.append(sorted(orders[-1]))
    held_out = to_tensor(samples.held_out(0).inputs)[:, 0].tolist()
    assert seen[0] == seen[1]
    assert orders[0] != orders[1]
    assert sorted(seen[0] + held_out) == inputs[:, 0].tolist()
    x, y = (to_tensor(each) for each in samples.microbatch(range(4)).arrays)
    assert torch.equal(y, x.sum(1, keepdim=True))


def test_classes_are_compared_by_their_cross_entropy(tmp_path: Path) -> None:
    data = [(np.ones(2, np.float64), k % 3) for k in range(12)]
    plan = model_plan(started(tmp_path, Given(data, [nn.Linear(2, 4), nn.Linear(4, 3)])))
    assert plan.targets.num_values == 3
    assert plan.inputs.dtype == "float32"
    with pytest.raises(SpecError, match="classes up to 2, and the last layer makes 2"):
        started(tmp_path, Given(data, [nn.Linear(2, 4), nn.Linear(4, 2)]))


def test_a_file_that_was_changed_is_not_read(tmp_path: Path) -> None:
    spec = started(tmp_path, Given(TEXT, language_model()))
    path = tmp_path / "model.pickle"
    path.write_bytes(path.read_bytes() + b".")
    with pytest.raises(SpecError, match="is not the file that was written with its builder"):
        model_plan(spec)
    path.unlink()
    with pytest.raises(SpecError, match="cannot read"):
        model_plan(spec)


class Shares(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x)


class Locks(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.lock = threading.Lock()


class Pairs(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return x, x


EMBEDDING, MIDDLE, HEAD = nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 256)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "there is no layer"),
        (Block(16), "give its layers, as a list or an nn.Sequential"),
        ([EMBEDDING, "x", HEAD], "layer 1 is a str, and no nn.Module"),
        ([EMBEDDING, MIDDLE, Shares(MIDDLE), HEAD], "layers 1 and 2 have a parameter in common"),
        ([EMBEDDING, nn.Linear(16, 16).double(), HEAD], "layer 1.weight must be a float32 param"),
        ([EMBEDDING, nn.Linear(8, 16), HEAD], "layer 1 failed with one sample: RuntimeError"),
        ([EMBEDDING, Pairs(16, 16), HEAD], "layer 1 must give one float32 tensor"),
        ([EMBEDDING, Locks(), HEAD], r"layer 1 cannot be given to another process \(TypeError"),
        ([EMBEDDING, nn.Flatten(), nn.Linear(128, 256)], "the last layer makes"),
        ([EMBEDDING, nn.BatchNorm1d(LENGTH), HEAD], "BatchNorm1d keeps running statistics"),
        ([nn.Embedding(256, 16, device="meta"), HEAD], "layer 0 is on a device"),
    ],
    ids=[
        "none",
        "one",
        "text",
        "shared",
        "double",
        "shape",
        "two",
        "lock",
        "flat",
        "statistics",
        "device",
    ],
)
def test_what_is_refused_is_one_line(layers: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        started(tmp_path, Given(TEXT, layers))
    assert "\n" not in str(raised.value)


def test_what_is_missing_or_wrong_beside_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="loss goes with model"):
        spec_file(VALUES, Given(loss=F.mse_loss), tmp_path)
    with pytest.raises(SpecError, match="sequence_length is missing"):
        spec_file({**VALUES, "data": {}}, Given(TEXT, language_model()), tmp_path)
    numbers = [(torch.ones(2), 0.5)] * 8
    layers = [nn.Linear(2, 4), nn.Linear(4, 1)]
    with pytest.raises(SpecError, match="give loss="):
        started(tmp_path, Given(numbers, layers))
    for data, message in (
        ([(torch.ones(2), 1), (torch.ones(3), 1)], "sample 2 has another shape"),
        ([(torch.ones(2), 1, 1)], "sample 1 is no pair"),
        ([(torch.ones(2), "x")], "sample 1 has a str, and no numbers"),
        ([(torch.ones(2), -1)], "sample 1 has a class below 0"),
        ([(torch.tensor([1.0, torch.inf]), 1)], "sample 1 is not finite"),
    ):
        with pytest.raises(DataError, match=message):
            started(tmp_path, Given(data, layers))
    with pytest.raises(SpecError, match="3 samples, fewer than a microbatch of 4"):
        open_data(started(tmp_path, Given([(torch.ones(2), 0)] * 3, layers)))
