"""Triton kernels of the codecs: on a GPU where there is one, else by Triton's interpreter, which
computes with numpy. Skipped where there is no Triton.

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

from swarmnet.protocol.codecs import INT4, INT6, INT7, INT8, row_bytes
from swarmnet.training.codecs import fused
from swarmnet.training.codecs.fused import fused_codec
from swarmnet.training.codecs.registry import codec_of

CODED = (INT8, INT7, INT6, INT4)
INTERPRETER = "TRITON_INTERPRET"
IS_INTERPRETED = os.environ.get(INTERPRETER) == "1"
HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETED
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
MANY = 1 << 16
"""Numbers of a program: the interpreter takes a second for each."""
LIMIT_S = 1200.0

has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
runs_here = pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="no GPU")


@has_triton
@pytest.mark.skipif(HAS_GPU or IS_INTERPRETED, reason="the others run here")
def test_kernels_by_the_interpreter() -> None:
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
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from swarmnet.training.codecs import kernels

    fused_codec.cache_clear()
    if IS_INTERPRETED:
        monkeypatch.setattr(kernels, "NUMBERS", MANY)
        monkeypatch.setitem(fused.KERNELS, "cpu", kernels.kernels_of)
    yield
    fused_codec.cache_clear()


@has_triton
@runs_here
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is not finite
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", CODED)
def test_kernels_have_the_bits_of_a_cpu(name: str) -> None:
    """Of numbers that are hard to round, and of what must be refused."""
    assert fused_codec(codec_of(name), 30_000, DEVICE, torch.bfloat16) is not None


@has_triton
@runs_here
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("rows_and_n", [(2, 77), (1, 1), (2, 2048 + 31), (1, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_length(name: str, rows_and_n: tuple[int, int], dtype: torch.dtype) -> None:
    from swarmnet.training.codecs.kernels import kernels_of

    (rows, n), codec = rows_and_n, codec_of(name)
    rng = torch.Generator().manual_seed(n)
    values = torch.randn(rows, n, generator=rng) * 2.0 ** torch.randint(
        -20, 20, (rows, 1), generator=rng
    )
    values = torch.where(torch.rand(rows, n, generator=rng) < 0.03, 30 * values, values).to(dtype)
    kernels = kernels_of(name, n)
    assert kernels is not None
    made = fused.FusedCodec(codec, n, kernels)
    coded = made.checked("rows", made.encode(values.to(DEVICE)).cpu())
    assert coded.shape == (rows, row_bytes(name, n))
    assert torch.equal(coded, codec.encode(values.float()))
    decoded, findings = made.decode(coded.to(DEVICE), dtype)
    assert not findings.any()
    wanted = codec.decode(coded, n).to(dtype)
    assert torch.equal(decoded.cpu().view(torch.uint8), wanted.view(torch.uint8))
