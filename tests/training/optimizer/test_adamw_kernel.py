"""AdamW's Triton kernel: on a GPU where there is one, else by Triton's interpreter, which computes
with numpy. Skipped where there is no Triton.

The interpreter must be chosen before Triton is imported, so this file then runs itself again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from swarmnet.training.optimizer import adamw
from swarmnet.training.optimizer.adamw import Step, hard_vectors, kernel_of, written

INTERPRETER = "TRITON_INTERPRET"
IS_INTERPRETED = os.environ.get(INTERPRETER) == "1"
HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETED
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
LIMIT_S = 600.0

has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
runs_here = pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="no GPU")


@has_triton
@pytest.mark.skipif(HAS_GPU or IS_INTERPRETED, reason="the others run here")
def test_the_kernel_by_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        env=os.environ | {INTERPRETER: "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernel_of.cache_clear()
    if IS_INTERPRETED:
        monkeypatch.setitem(adamw.KERNELS, "cpu", adamw.KERNELS["cuda"])
    yield
    kernel_of.cache_clear()


@has_triton
@runs_here
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
@pytest.mark.usefixtures("kernel")
def test_the_kernel_has_the_bits_of_a_cpu() -> None:
    """Of numbers that are hard to round."""
    assert kernel_of(DEVICE) is not None


@has_triton
@runs_here
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("size", [1, 77, 1024, 3000])
def test_vectors_of_any_length(size: int) -> None:
    make, about = kernel_of(DEVICE), Step(3e-4, 0.9, 0.95, 1e-8, 5)
    assert make is not None
    ours = hard_vectors(size)
    parameters, gradient, mean, square = (v.to(DEVICE, copy=True) for v in ours)
    written(*ours, about, 0.1)
    make((parameters, gradient, mean, square), about, 0.1)
    for a, b in zip(ours, (parameters, gradient, mean, square), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("error", [ImportError("No module named 'triton'"), KeyError("mps")])
def test_where_there_is_no_kernel_the_written_step_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def none() -> adamw.Kernel:
        raise error

    kernel_of.cache_clear()
    monkeypatch.setitem(adamw.KERNELS, "cpu", none)
    assert kernel_of(torch.device("cpu")) is None
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith("AdamW's steps are slower on cpu, without a kernel: ")
    kernel_of.cache_clear()
