"""Codecs keep to their error bounds, and refuse what none of them has made."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import (
    BF16,
    BLOCK,
    CHUNK,
    INT4,
    INT6,
    INT7,
    INT8,
    KEPT,
    NONE,
    REPEATABLE,
    TILE,
    TOPK,
    TOPK_DENSITIES,
    coded_form,
    kept_by,
    kept_of,
    row_bytes,
    sparse_codec,
)
from swarmnet.training.codecs.base import PIECE, SMALLEST, in_blocks
from swarmnet.training.codecs.registry import CODECS, codec_of
from swarmnet.training.codecs.tiles import Tiles

CODED = (INT8, INT7, INT6, INT4)
SPARSE = tuple(sparse_codec(kept_by(density)) for density in (0.05, *TOPK_DENSITIES))
ALL = (*CODECS, *SPARSE)
TILE_ERRORS = {INT7: 0.0082, INT6: 0.0163, INT4: 0.0675}


@st.composite
def rows_of_numbers(draw: st.DrawFn) -> Tensor:
    """Normal numbers of any size, with some outliers, some small rows and some zeros."""
    rows, n = draw(st.integers(1, 5)), draw(st.integers(1, 200))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(rows, n, generator=rng) * 2.0 ** draw(st.integers(-130, 30))
    outliers = torch.rand(rows, n, generator=rng) < draw(st.sampled_from((0.0, 0.01, 0.1)))
    values = torch.where(outliers, values * draw(st.sampled_from((10.0, 1000.0))), values)
    zeros = torch.rand(rows, n, generator=rng) < draw(st.sampled_from((0.0, 0.5, 1.0)))
    return torch.where(zeros, torch.zeros(()), values)


def there_and_back(name: str, values: Tensor) -> Tensor:
    codec, n = codec_of(name), values.shape[1]
    coded = codec.encode(values)
    assert tuple(coded.shape) == coded_form(name, tuple(values.shape), 1)[1]
    assert coded[:1].nbytes == row_bytes(name, n)
    codec.check("rows", coded, n)
    decoded = codec.decode(coded, n)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    return decoded


def bits(values: Tensor) -> bytes:
    return bytes(values.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("name", ALL)
@given(values=rows_of_numbers())
def test_what_is_done_at_once_gives_the_same_bits(name: str, values: Tensor) -> None:
    """Signs of zeros too: all replicas add the change of their parameters that they read."""
    codec, n = codec_of(name), values.shape[1]
    coded, decoded = codec.round_trip(values)
    assert bits(coded) == bits(codec.encode(values))
    assert bits(decoded) == bits(codec.decode(coded, n))
    assert bits(decoded) == bits(codec.read("rows", coded, n))
    assert bits(decoded) == bits(codec.rounded(values))
    assert bits(decoded) == bits(codec.rounded(values, "rows"))


@pytest.mark.parametrize("name", REPEATABLE)
@given(values=rows_of_numbers())
def test_what_is_repeatable_makes_the_same_codes_of_what_it_has_decoded(
    name: str, values: Tensor
) -> None:
    codec = codec_of(name)
    coded, decoded = codec.round_trip(values)
    assert bits(codec.encode(decoded)) == bits(coded)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_without_codes(name: str, value: float) -> None:
    values = torch.ones(2, 100)
    values[1, 40] = value
    with pytest.raises(ProtocolViolation):
        codec_of(name).rounded(values, "rows")


def errors_and_largest(values: Tensor, decoded: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """By block: what went wrong, and the largest magnitude, in fp64."""
    errors = in_blocks(decoded.double() - values.double(), size)
    largest = in_blocks(values, size).double().abs().amax(-1, keepdim=True)
    return errors, largest.clamp_min(SMALLEST)


@given(rows_of_numbers())
def test_fp32_stays_as_it_is(values: Tensor) -> None:
    assert torch.equal(there_and_back(NONE, values), values)


@given(rows_of_numbers())
def test_bf16_is_within_2_to_the_minus_8(values: Tensor) -> None:
    error = (there_and_back(BF16, values).double() - values.double()).abs()
    assert (error <= values.double().abs() * 2.0**-8 + 2.0**-134).all()


@given(rows_of_numbers())
def test_int8_is_within_half_a_scale(values: Tensor) -> None:
    errors, largest = errors_and_largest(values, there_and_back(INT8, values), BLOCK)
    assert (errors.abs() <= 0.00396 * largest).all()


@pytest.mark.parametrize("name", TILE_ERRORS)
@given(values=rows_of_numbers())
def test_tiles_keep_to_their_mean_square_error(name: str, values: Tensor) -> None:
    errors, largest = errors_and_largest(values, there_and_back(name, values), TILE)
    bound = TILE_ERRORS[name] * largest
    assert (errors.square().mean(-1, keepdim=True).sqrt() <= bound).all()
    assert (errors.abs() <= math.sqrt(TILE) * bound).all()


@pytest.mark.parametrize("name", TILE_ERRORS)
def test_an_outlier_does_not_cost_the_others_of_its_tile_their_digits(name: str) -> None:
    values = torch.randn(100, TILE, generator=torch.Generator().manual_seed(1))
    values[:, 5] = 20.0
    error = (there_and_back(name, values) - values).square().mean().sqrt()
    unrotated = 20.0 / Tiles(name).reach / math.sqrt(12)
    assert error < 0.4 * unrotated


@pytest.mark.parametrize("name", ALL)
def test_equal_numbers_have_equal_bytes_wherever_they_stand(name: str) -> None:
    codec = codec_of(name)
    values = torch.randn(3 * PIECE // 97 + 7, 97, generator=torch.Generator().manual_seed(2))
    coded = codec.encode(values)
    assert torch.equal(coded[-9:], codec.encode(values[-9:].clone()))
    decoded = codec.decode(coded, 97)
    assert torch.equal(decoded[-9:], codec.decode(coded[-9:].clone(), 97))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e15])
def test_what_is_not_finite_is_found_in_the_coded_rows(name: str, value: float) -> None:
    codec = codec_of(name)
    values = torch.ones(2, 96)
    values[1, 70] = value
    with pytest.raises(ProtocolViolation, match="not finite"):
        codec.check("rows", codec.encode(values), 96)


def read_chunk(levels: bytes, codes: bytes) -> list[float]:
    """A chunk of `topk` by the words of docs/protocol.md, a number at a time."""
    two = [struct.unpack("<f", b"\0\0" + levels[i : i + 2])[0] for i in (0, 2)]
    places = [p for p in range(4096) if codes[p // 8] >> p % 8 & 1]
    assert len(places) == 2048
    numbers = [0.0] * 4096
    for i, p in enumerate(places):
        code = codes[512 + i % 512] >> 2 * (i // 512) & 3
        numbers[p] = two[code % 2] * (-1 if code > 1 else 1)
    return numbers


def test_a_row_of_topk_is_what_the_protocol_says() -> None:
    values = torch.randn(2, CHUNK + 904, generator=torch.Generator().manual_seed(4))
    codec = codec_of(TOPK)
    coded = codec.encode(values)
    for row, decoded in zip(coded, codec.decode(coded, CHUNK + 904), strict=True):
        data = bytes(row.tolist())
        numbers = read_chunk(data[:4], data[8:1032]) + read_chunk(data[4:8], data[1032:])
        assert torch.equal(decoded, torch.tensor(numbers[: CHUNK + 904]))


@pytest.mark.parametrize("name", SPARSE)
def test_a_row_of_few_numbers_is_what_the_protocol_says(name: str) -> None:
    values = torch.randn(2, CHUNK + 904, generator=torch.Generator().manual_seed(4))
    codec, k = codec_of(name), kept_of(name)
    coded = codec.encode(values)
    for row, decoded in zip(coded, codec.decode(coded, CHUNK + 904), strict=True):
        data, numbers = bytes(row.tolist()), [0.0] * 8192
        for n in range(2):
            levels = [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in (4 * n, 4 * n + 2)]
            chunk = data[8:][: k * 7 // 4] if n == 0 else data[8 + k * 7 // 4 :]
            half = k // 2
            for i in range(half):
                a, b, c = chunk[i], chunk[half + i], chunk[k + i]
                for place, at in ((a + b % 16 * 256, i), (b // 16 + c * 16, half + i)):
                    code = chunk[k * 3 // 2 + at % (k // 4)] >> 2 * (at // (k // 4)) & 3
                    numbers[4096 * n + place] = levels[code % 2] * (-1 if code > 1 else 1)
        assert torch.equal(decoded, torch.tensor(numbers[: CHUNK + 904]))


@pytest.mark.parametrize(("name", "kept"), [(TOPK, KEPT), *((n, kept_of(n)) for n in SPARSE)])
def test_topk_keeps_the_largest(name: str, kept: int) -> None:
    values = torch.randn(1, CHUNK, generator=torch.Generator().manual_seed(5))
    decoded = there_and_back(name, values)
    least = values.abs().topk(kept).values.min()
    assert torch.equal(decoded != 0, values.abs() >= least)
    assert torch.equal(decoded.sign(), values.sign().where(decoded != 0, 0.0))
    missed = values.where(decoded == 0, 0.0).square().sum()
    assert (decoded - values).square().sum() < missed + 0.14 * values.square().sum()


@st.composite
def chunks_of_numbers(draw: st.DrawFn) -> Tensor:
    """Of any size, from numbers that are all alike to some that are far larger than others."""
    n, spread = draw(st.integers(1, 2 * CHUNK)), draw(st.floats(0.0, 4.0))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sizes = (spread * torch.randn(1, n, generator=rng)).exp() * 2.0 ** draw(st.integers(-90, 30))
    zeros = torch.rand(1, n, generator=rng) < draw(st.sampled_from((0.0, 0.7, 1.0)))
    values = torch.where(zeros, 0.0, sizes * torch.randn(1, n, generator=rng).sign())
    return in_blocks(values, CHUNK).squeeze(0)


@pytest.mark.parametrize(("name", "num"), [(TOPK, KEPT), *((n, kept_of(n)) for n in SPARSE)])
@given(chunks_of_numbers())
def test_topk_is_a_contraction(name: str, num: int, values: Tensor) -> None:
    """Its error keeps to the bound of its docstring."""
    decoded = there_and_back(name, values).double()
    for x, sent in zip(values.double(), decoded, strict=True):
        kept = x.abs().topk(num).values.square().sum()
        explained = sum(
            float(x[sent.abs() == level].abs().mean() ** 2 * (sent.abs() == level).sum())
            for level in sent.abs().unique()
            if level > 0
        )
        error, square = (x - sent).square().sum(), x.square().sum()
        slack = 1e-7 * square  # what fp32 rounds
        assert error <= square - (1 - 2.0**-16) * explained + slack
        if square > 0:
            part = (1 - 2.0**-16) * explained / kept
            assert part > 0
            assert error <= square * (1 - part * num / CHUNK) + slack


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_a_chunk_that_keeps_another_number_is_refused(byte: int) -> None:
    codec = codec_of(TOPK)
    coded = codec.encode(torch.randn(2, CHUNK))
    coded[1, 9:20] = byte
    with pytest.raises(ProtocolViolation, match="does not keep"):
        codec.check("rows", coded, CHUNK)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("place", [0, 4095])
def test_a_chunk_that_names_a_place_twice_is_refused(name: str, place: int) -> None:
    """Or in another order: the same numbers have one form."""
    codec, k = codec_of(name), kept_of(name)
    coded = codec.encode(torch.randn(2, CHUNK, generator=torch.Generator().manual_seed(6)))
    first, second, third = 4, 4 + k // 2, 4 + k
    coded[1, first + 7], coded[1, third + 7] = place & 255, coded[1, third + 7]
    coded[1, second + 7] = (coded[1, second + 7] & 0xF0) | place >> 8
    with pytest.raises(ProtocolViolation, match="do not ascend"):
        codec.check("rows", coded, CHUNK)


def shift_of(first_byte: int, place: int) -> float:
    """Of a number in its tile, by the words of docs/protocol.md."""
    x = (32 * first_byte + place) * 0x7FEB352D % 2**32
    x = (x ^ (x // 2**15)) * 0x2C1B3C6D % 2**32
    return (2 * (x // 2**28) + 1) / 32 - 1 / 2


def read_row(name: str, row: bytes, num_values: int) -> list[float]:
    """A coded row by the words of docs/protocol.md, a number at a time."""
    size = BLOCK if name == INT8 else TILE
    num_scales = -(-num_values // size)
    scales = [struct.unpack("<f", b"\0\0" + row[2 * i : 2 * i + 2])[0] for i in range(num_scales)]
    codes = row[2 * num_scales :]
    if name == INT8:
        signed = struct.unpack(f"{num_values}b", codes)
        return [code * scales[i // BLOCK] for i, code in enumerate(signed)]
    numbers: list[float] = []
    for i, scale in enumerate(scales):
        bits = int(name[3:])
        shifts = [shift_of(row[2 * i], k) for k in range(TILE)]
        tile = codes[i * TILE * bits // 8 : (i + 1) * TILE * bits // 8]
        spare = 8 - bits
        w = TILE * spare // 8
        us = [byte % 2**bits for byte in tile]
        for k in range(w):
            pieces = [byte // 2**bits for byte in tile[k::w]]
            us.append(sum(piece << spare * j for j, piece in enumerate(pieces)))
        q = [u - (1 << (bits - 1)) + 0.5 - d for u, d in zip(us, shifts, strict=True)]
        if scale < 0:
            signs = [[(-1) ** (j & k).bit_count() for k in range(TILE)] for j in range(TILE)]
            q = [sum(s * c for s, c in zip(line, q, strict=True)) for line in signs]
        numbers += [abs(scale) * c for c in q]
    return numbers[:num_values]


@pytest.mark.parametrize("name", CODED)
def test_a_coded_row_is_what_the_protocol_says(name: str) -> None:
    values = torch.randn(2, 100, generator=torch.Generator().manual_seed(3))
    values[0, 40] = 20.0  # an outlier: that tile is rotated
    coded, codec = codec_of(name).encode(values), codec_of(name)
    decoded = codec.decode(coded, 100)
    for row, numbers in zip(coded, decoded, strict=True):
        expected = torch.tensor(read_row(name, bytes(row.tolist()), 100), dtype=torch.float32)
        assert torch.equal(numbers, expected)


def spoilt(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def spoil(coded: Tensor) -> Tensor:
        coded = coded.clone()
        change(coded)
        return coded

    return spoil


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "instead of": lambda coded: coded[:, :-1],
    "rows of": lambda coded: coded.view(torch.int8),
    "not finite": spoilt(lambda coded: coded[1, :2].fill_(0xFF)),  # a NaN
}


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("said", WRONG)
def test_what_none_has_coded_is_refused(name: str, said: str) -> None:
    codec = codec_of(name)
    coded = WRONG[said](codec.encode(torch.randn(3, 96)))
    for refuse in (codec.check, codec.read):
        with pytest.raises(ProtocolViolation, match=said):
            refuse("rows", coded, 96)


def test_a_code_that_no_number_has_is_refused() -> None:
    codec = codec_of(INT8)
    coded = codec.encode(torch.randn(3, 96))
    coded[1, -1] = 0x80  # -128
    for refuse in (codec.check, codec.read):
        with pytest.raises(ProtocolViolation, match="a code outside"):
            refuse("rows", coded, 96)


@pytest.mark.parametrize("name", TILE_ERRORS)
def test_errors_of_tiles_have_mean_zero_over_scales(name: str) -> None:
    """A quarter of a step, which a fixed grid would always round to the same code."""
    largest = 2.0 ** torch.linspace(0, 8, 4000)[:, None]
    step = largest / Tiles(name).reach
    values = 0.25 * step * torch.ones(1, TILE)
    values[:, 1::2] *= -1
    values[:, : TILE // 2] = largest  # so that a rotation would make the largest number larger
    errors = (there_and_back(name, values) - values)[:, TILE // 2 :] / step
    assert errors.abs().max() <= 0.51
    assert errors.mean(0).abs().max() < 0.05


@pytest.mark.parametrize("name", TILE_ERRORS)
def test_a_tile_of_zeros_comes_back(name: str) -> None:
    values = torch.zeros(2, 3 * TILE)
    values[:, TILE : 2 * TILE] = 1.0
    decoded = there_and_back(name, values)
    assert not decoded[:, :TILE].any()
    assert not decoded[:, 2 * TILE :].any()


def noisy_rows(name: str, noise: bytes) -> Tensor:
    """Two rows of 64 numbers. Of `topk` the levels and codes: places at random are none at all."""
    size = row_bytes(name, 64)
    data = torch.frombuffer(bytearray(noise), dtype=torch.uint8)
    if name in CODED:
        return data[: 2 * size].view(2, size)
    rows, coded = data.view(2, -1), codec_of(name).encode(torch.ones(2, 64))
    coded[:, :4] = rows[:, :4]
    coded[:, 4 - rows.shape[1] :] = rows[:, 4:]
    return coded


@settings(max_examples=200)
@given(st.sampled_from((*CODED, TOPK, SPARSE[0])), st.binary(min_size=2 * 78, max_size=2 * 78))
def test_whatever_is_taken_decodes_to_finite_numbers(name: str, noise: bytes) -> None:
    codec, coded = codec_of(name), noisy_rows(name, noise)
    try:
        codec.check("rows", coded, 64)
    except ProtocolViolation:
        return
    assert codec.decode(coded, 64).abs().max() <= 1.08e15  # as many steps as `int4` has
