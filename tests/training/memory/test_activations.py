"""Whatever is kept between the passes, the numbers are the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import UserError
from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.data import open_data
from swarmnet.training.memory import offload
from swarmnet.training.memory.device_copies import OnHost
from swarmnet.training.memory.offload import FilePlace, HostPlace, OffloadedPass
from swarmnet.training.stage import TorchStage, build_stage
from tests.training.flights import batch, fly, gradient
from tests.training.specs import small_spec, write_text


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return small_spec(write_text(tmp_path), pipeline={"num_stages": 3, "microbatch": 4})


@pytest.fixture(autouse=True)
def _everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)


def stages(spec: RunSpec, computing: Computing) -> list[TorchStage]:
    return [build_stage(spec, i, computing=computing) for i in range(spec.pipeline.num_stages)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activations", ["blocks", "recompute", "offload"])
def test_every_policy_gives_the_same_bits(
    spec: RunSpec, tmp_path: Path, activations: Any, precision: Any
) -> None:
    data = open_data(spec)
    keep = stages(spec, Computing(precision))
    other = stages(spec, Computing(precision, activations, folder=str(tmp_path / "a")))
    for i in range(3):
        a, b = (fly(row, (0, i), *batch(data, i)) for row in (keep, other))
        assert a.loss_sum == b.loss_sum
    for index in (1, 0):
        for ours, theirs in zip(other, keep, strict=True):
            assert torch.equal(gradient(ours), gradient(theirs))
            ours.retract((0, index))
            theirs.retract((0, index))


class Full:
    """In place of the layers' passes: no memory for one with this policy."""

    def __init__(self, stage: TorchStage, *policies: str) -> None:
        self._layers: Any = stage.layers
        self._run = stage.layers.run
        self._policies = policies
        self.num_failed = 0

    def __call__(self, *args: Any) -> torch.Tensor:
        if self._layers.activations in self._policies:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._run(*args)


def test_a_pass_without_memory_is_made_again_in_less(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same bits, and fewer microbatches are let in."""
    data = open_data(spec)
    keep, other = stages(spec, Computing()), stages(spec, Computing())
    assert fly(keep, (0, 0), *batch(data, 0)) == fly(other, (0, 0), *batch(data, 0))
    full = [Full(stage, "keep") for stage in other]
    for stage, run in zip(other, full, strict=True):
        monkeypatch.setattr(stage.layers, "run", run)
    for i in (1, 2):
        a, b = (fly(row, (0, i), *batch(data, i)) for row in (keep, other))
        assert a.loss_sum == b.loss_sum
    for ours, theirs in zip(other, keep, strict=True):
        assert torch.equal(gradient(ours), gradient(theirs))
        assert (ours.layers.activations, ours.max_in_flight) == ("blocks", 1)
    assert [run.num_failed for run in full] == [1, 1, 1]
    lines = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    said = "out of memory in a pass: activations blocks from now on, at most 1 microbatch inside"
    assert lines == [said] * 3


def test_a_pass_that_has_no_memory_in_less_either_is_an_error(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data(spec)
    first, *_ = stages(spec, Computing())
    full = Full(first, "keep", "blocks", "recompute")
    monkeypatch.setattr(first.layers, "run", full)
    for num_failed in (2, 4, 5):
        with pytest.raises(torch.OutOfMemoryError):
            first.forward((0, 0), batch(data, 0)[0])
        assert full.num_failed == num_failed
        assert len(first.kept) == 0
    assert first.layers.activations == "recompute"


def test_a_gradient_of_which_a_part_was_added_for_want_of_memory_is_spoilt(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data(spec)
    first, *_ = stages(spec, Computing())
    sent = first.forward((0, 0), batch(data, 0)[0])

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "backward", full)
    with pytest.raises(torch.OutOfMemoryError):
        first.backward((0, 0), sent)
    assert gradient(first).isnan().all()
    assert first.layers.activations == "blocks"


def held_bytes(stage: TorchStage, pass_: Callable[[], Any]) -> int:
    """What the graph of a pass keeps in memory, beside parameters; each storage once."""
    found: dict[int, int] = {}
    spared = {p.untyped_storage().data_ptr() for p in stage.layers.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in spared:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        pass_()
    return sum(found.values())


def test_blocks_keep_one_tensor_a_layer(spec: RunSpec) -> None:
    inputs = batch(open_data(spec), 0)[0]
    for activations, keeps_graph in (("keep", True), ("blocks", False)):
        stage = build_stage(spec, 0, computing=Computing("fp32", activations))  # type: ignore[arg-type]
        held = held_bytes(stage, lambda stage=stage: stage.forward((0, 0), inputs))  # type: ignore[misc]
        border = 4 * 4 * 16 * 32
        num_layers = len(stage.layers.modules)
        assert (held > 4 * num_layers * border) == keeps_graph


def test_offloaded_tensors_leave_memory_and_their_file_ends_with_the_pass(
    spec: RunSpec, tmp_path: Path
) -> None:
    stage = build_stage(
        spec, 0, computing=Computing("fp32", "offload", folder=str(tmp_path / "deep" / "a"))
    )
    folder = tmp_path / "deep" / "a"
    for i in range(3):
        stage.forward((0, i), batch(open_data(spec), i)[0])
    assert open_files(folder) == 3
    assert os.listdir(folder) == []
    for i in range(3):
        stage.forget((0, i))
    assert open_files(folder) == 0


def open_files(folder: Path) -> int:
    """Files of a folder that this process holds open, deleted ones included. (All descriptors
    cannot be counted: garbage of earlier tests closes its own at any time.)"""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/")
    return count


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="activations cannot go to"):
        FilePlace(str(tmp_path / "file"))


class Cloned:
    """As a GPU's copies, within one memory."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def to_device(self, tensor: torch.Tensor, after: Any = None) -> torch.Tensor:
        self.log.append("in")
        return tensor.clone()

    def to_host(self, tensor: torch.Tensor) -> OnHost:
        self.log.append("out")
        return OnHost(tensor.clone())


@pytest.mark.parametrize("place", ["host", "file"])
def test_a_tensor_kept_by_several_operations_moves_once(place: str, tmp_path: Path) -> None:
    copies = Cloned()
    moved = OffloadedPass(
        HostPlace(copies) if place == "host" else FilePlace(str(tmp_path)), frozenset()
    )
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).t().requires_grad_()

    def loss() -> torch.Tensor:
        y = x * 2
        return (y.sin() * y.cos() + y[1:4, ::2].exp().sum()).sum()

    with moved.hooks():
        out = loss()
    out.backward()
    grad, x.grad = x.grad, None
    loss().backward()
    assert x.grad is not None
    assert torch.equal(grad, x.grad)
    assert grad is not None
    assert grad.stride() == x.grad.stride()
    # y is kept by two, its sine, its cosine, and the part's exponential by one each
    assert moved.num_bytes == 4 * (3 * 48 + 3 * 4)
    if place == "host":
        assert copies.log.count("out") == 4
        assert copies.log.count("in") >= 4


def test_a_changed_tensor_is_another_one(tmp_path: Path) -> None:
    moved = OffloadedPass(FilePlace(str(tmp_path)), frozenset())
    x = torch.ones(4, requires_grad=True)
    scratch = torch.zeros(4)
    with moved.hooks():
        a = x * scratch.add_(1)
        b = x * scratch.add_(1)
    (a + b).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4
