"""Kernels are used where their bits are those of a CPU, and nowhere else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import (
    BF16,
    BLOCK,
    INT4,
    INT6,
    INT7,
    INT8,
    NONE,
    TILE,
    TILE_BITS,
    row_bytes,
)
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.codecs import fused
from swarmnet.training.codecs.base import SMALLEST, as_bytes, in_blocks, largest_of
from swarmnet.training.codecs.fused import fused_codec, hard_numbers
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.codecs.tiles import GRID, REACH, hadamard, shifts
from swarmnet.training.memory.device_copies import DeviceCopies, OneMemory, OnHost
from swarmnet.training.passes.crossing import Crossing

CPU = torch.device("cpu")
CODED = (INT8, INT7, INT6, INT4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (6, 100)


class Plain:
    """Kernels that are a CPU's code."""

    num_findings = 1

    def __init__(self, name: str, num_values: int) -> None:
        self.codec, self.num_values = codec_of(name), num_values
        self.num_calls = 0

    def encode(self, values: Tensor, coded: Tensor, findings: Tensor) -> None:
        self.num_calls += 1
        rows = self.coded(values.float())
        coded.copy_(rows.flatten())
        findings.copy_(self.findings(rows))

    def decode(self, coded: Tensor, values: Tensor, findings: Tensor) -> None:
        self.num_calls += 1
        rows = coded.view(len(values), -1)
        values.copy_(self.codec.decode(rows, self.num_values))
        findings.copy_(self.findings(rows))

    def coded(self, values: Tensor) -> Tensor:
        return self.codec.encode(values)

    def findings(self, rows: Tensor) -> Tensor:
        if self.is_taken(rows):
            return torch.zeros(len(rows), dtype=torch.uint8)
        return torch.tensor([not self.is_taken(row[None]) for row in rows], dtype=torch.uint8)

    def is_taken(self, rows: Tensor) -> bool:
        try:
            self.codec.check("rows", rows, self.num_values)
        except ProtocolViolation:
            return False
        return True


Make = Callable[[str, int], fused.Kernels | None]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Make], None]]:
    """Has the CPU offer kernels."""

    def change(make: Make) -> None:
        fused_codec.cache_clear()
        monkeypatch.setitem(fused.KERNELS, "cpu", make)

    yield change
    fused_codec.cache_clear()


class Apart(OneMemory):
    """The copies of a GPU."""

    is_apart = True

    def to_device(self, tensor: Tensor, after: object = None) -> Tensor:
        return tensor.clone()

    def to_host(self, tensor: Tensor) -> OnHost:
        return OnHost(tensor.clone())


def crossing(name: str, dtype: torch.dtype, copies: DeviceCopies | None = None) -> Crossing:
    return Crossing(name, SHAPE, 2, copies or Apart(), dtype)


def activation() -> Tensor:
    values = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    values[..., ::30] *= 20
    return values


@pytest.mark.parametrize("copies", [Apart(), OneMemory()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODED)
def test_what_crosses_has_the_same_bits_with_kernels(
    name: str, dtype: torch.dtype, copies: DeviceCopies, offer: Callable[[Make], None]
) -> None:
    made: list[Plain] = []

    def make(name: str, num_values: int) -> Plain:
        made.append(Plain(name, num_values))
        return made[-1]

    without = crossing(name, dtype, copies)
    offer(make)
    through = crossing(name, dtype, copies)
    (kernels,) = made
    before = kernels.num_calls
    values = activation().to(dtype)
    expected, sent = without.send("activation", values)(), through.send("activation", values)()
    assert (sent.dtype, sent.shape) == (expected.dtype, expected.shape) == through.form(2)
    assert bytes(sent.data) == bytes(expected.data)
    assert kernels.num_calls == before + 1
    for wanted in (torch.float32, dtype):
        got = through.receive("activation", sent, wanted)
        assert got.dtype == wanted
        assert torch.equal(got, without.receive("activation", sent, wanted))
    assert kernels.num_calls == before + 3


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -2e15])
def test_what_kernels_find_is_refused(
    name: str, value: float, offer: Callable[[Make], None]
) -> None:
    offer(Plain)
    through, values = crossing(name, torch.float32), activation()
    good = through.send("activation", values)()
    values[1, 3, 70] = value
    with pytest.raises(ProtocolViolation, match="activation: a scale that is not finite"):
        through.send("activation", values)()
    bad, said = to_tensor(good).clone(), "a scale that is not finite"
    if name == INT8:
        bad[1, 2, -1], said = 0x80, "a code outside"
    else:
        bad[1, 2, :2] = 0xFF
    with pytest.raises(ProtocolViolation, match=f"gradient: {said}"):
        through.receive("gradient", from_tensor(bad))


def test_codecs_without_kernels_do_without(offer: Callable[[Make], None]) -> None:
    offer(lambda name, num_values: None)
    assert all(fused_codec(codec_of(name), 8, CPU, torch.float32) is None for name in (NONE, BF16))


# ---- faults -------------------------------------------------------------------------------------


class OtherCodes(Plain):
    def coded(self, values: Tensor) -> Tensor:
        rows = super().coded(values)
        rows[-1, -1] ^= 1
        return rows


class OtherNumbers(Plain):
    def decode(self, coded: Tensor, values: Tensor, findings: Tensor) -> None:
        super().decode(coded, values, findings)
        values[values == 0] = -0.0


class Blind(Plain):
    def findings(self, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.uint8)


class BlindToCodes(Plain):
    def is_taken(self, rows: Tensor) -> bool:
        end = row_bytes(self.codec.name, self.num_values) - self.num_values // 4
        return super().is_taken(torch.cat([rows[:, :end], torch.full_like(rows[:, end:], 0x91)], 1))


class Fearful(Plain):
    def findings(self, rows: Tensor) -> Tensor:
        return torch.ones(len(rows), dtype=torch.uint8)


class Broken(Plain):
    def encode(self, values: Tensor, coded: Tensor, findings: Tensor) -> None:
        raise RuntimeError("no compiler\nand a long trace")


def missing(name: str, num_values: int) -> Plain:
    raise ModuleNotFoundError("No module named 'triton'")


FAULTS: dict[str, tuple[Make, str]] = {
    "other codes": (OtherCodes, "other codes"),
    "other numbers": (OtherNumbers, "other numbers"),
    "blind": (Blind, "not finite are not found"),
    "blind to codes": (BlindToCodes, "codes that are refused are not found"),
    "fearful": (Fearful, "good numbers are found wrong"),
    "broken": (Broken, "RuntimeError: no compiler"),
    "missing": (missing, "no Triton"),
}


@pytest.mark.parametrize(
    ("fault", "name"),
    # A tile's codes are all taken.
    [(fault, name) for fault in FAULTS for name in CODED if fault != "blind to codes"]
    + [("blind to codes", INT8)],
)
def test_kernels_with_a_fault_are_not_used(
    name: str,
    fault: str,
    offer: Callable[[Make], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make, said = FAULTS[fault]
    offer(make)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert fused_codec(codec_of(name), 96, CPU, torch.bfloat16) is None
    (line,) = caplog.messages
    assert line.startswith(f"{name} on cpu is slower")
    assert said in line
    assert "\n" not in line


def divided(a: Tensor, b: float) -> Tensor:
    return a / b


def times_reciprocal(a: Tensor, b: float) -> Tensor:
    return a * torch.tensor(1.0 / b)


def in_steps(a: Tensor, b: Tensor, shifts: Tensor) -> Tensor:
    return (a * b + shifts).floor()


def in_steps_at_once(a: Tensor, b: Tensor, shifts: Tensor) -> Tensor:
    """As a fused multiply-add has it."""
    return (a.double() * b.double() + shifts.double()).floor().float()


class Tiled(Plain):
    """Tiles, with other operations."""

    divide = staticmethod(divided)
    in_steps = staticmethod(in_steps)

    def coded(self, values: Tensor) -> Tensor:
        name = self.codec.name
        tiles = in_blocks(values, TILE)
        largest = largest_of(tiles)
        step = self.divide(largest.clamp_min(SMALLEST), GRID)
        whole = (tiles / step).round()
        rotated = whole @ hadamard(CPU)
        most = largest_of(rotated)
        is_rotated = most < math.sqrt(TILE) * GRID
        steps = torch.where(is_rotated, most.clamp_min(1.0) / TILE, float(GRID))
        scales = self.divide(step * steps, REACH[name]).to(torch.bfloat16)
        factors = torch.where(is_rotated, step / TILE, step) / scales.float()
        shift = shifts(CPU)[scales.view(torch.uint8)[..., 0].long()]
        codes = self.in_steps(torch.where(is_rotated, rotated, whole), factors, shift)
        us = (codes + (1 << (TILE_BITS[name] - 1))).to(torch.uint8)
        signed = torch.where(is_rotated, -scales, scales).masked_fill(largest == 0, 0.0)
        start = as_bytes(signed.squeeze(-1))
        if name == INT4:
            low, high = us.chunk(2, dim=-1)
            return torch.cat([start, (low | (high << 4)).flatten(1)], 1)
        rows = self.codec.encode(values)
        rows[:, : start.shape[1]] = start
        return rows


class Reciprocals(Tiled):
    divide = staticmethod(times_reciprocal)


class FusedProducts(Tiled):
    in_steps = staticmethod(in_steps_at_once)


@pytest.mark.parametrize("num_values", [2048, 77])
def test_hard_numbers_tell_what_is_nearly_exact(
    num_values: int, offer: Callable[[Make], None]
) -> None:
    found = {}
    for make in (Tiled, Reciprocals, FusedProducts):
        offer(make)
        found[make] = fused_codec(codec_of(INT4), num_values, CPU, torch.float32) is not None
    assert found == {Tiled: True, Reciprocals: False, FusedProducts: False}


@pytest.mark.parametrize("num_values", [1, 63, 64, 1000, 40_000])
def test_hard_numbers_are_rows_that_codecs_take(num_values: int) -> None:
    values = hard_numbers(num_values)
    assert values.shape[1] == num_values
    assert len(values) * max(num_values, BLOCK) >= 10_000
    assert values.isfinite().all()
    for name in CODED:
        codec = codec_of(name)
        codec.check("rows", codec.encode(values), num_values)
