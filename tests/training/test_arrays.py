"""Arrays and tensors share memory, and impossible arrays are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import (
    TORCH_DTYPES,
    distance,
    from_numpy,
    from_tensor,
    is_finite,
    sum_of_squares,
    to_tensor,
)
from swarmnet.wire import ITEM_BYTES, Array


def test_every_dtype_of_the_wire_goes_there_and_back() -> None:
    assert set(TORCH_DTYPES) == set(ITEM_BYTES)
    for name, dtype in TORCH_DTYPES.items():
        tensor = torch.arange(6).to(dtype).view(2, 3)
        array = from_tensor(tensor)
        assert (array.dtype, array.shape) == (name, (2, 3))
        assert len(array.data) == array.num_bytes
        assert torch.equal(to_tensor(array), tensor)


def test_no_copy_is_made() -> None:
    tensor = torch.zeros(4, 4)
    array = from_tensor(tensor[1:3])
    tensor[1, 2] = 7.0
    back = to_tensor(array)
    assert back[0, 2] == 7.0
    assert back.data_ptr() == tensor[1:].data_ptr()
    values = np.zeros((2, 2), np.int32)
    view = to_tensor(from_numpy(values))
    values[1, 1] = 3
    assert view[1, 1] == 3


def test_received_bytes_may_be_read_only_unaligned_or_empty() -> None:
    data = np.arange(3, dtype="<f4").tobytes()
    assert to_tensor(Array("float32", (3,), data)).tolist() == [0.0, 1.0, 2.0]
    shifted = memoryview(b"x" + data)[1:]
    assert to_tensor(Array("float32", (3,), shifted)).tolist() == [0.0, 1.0, 2.0]
    assert to_tensor(Array("float32", (0, 5), b"")).shape == (0, 5)
    assert from_tensor(torch.tensor(2.5)).shape == ()
    assert to_tensor(from_tensor(torch.ones(3, 2).T)).tolist() == torch.ones(2, 3).tolist()


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (3,), bytes(11)),
        Array("float32", (3,), bytes(16)),
        Array("complex64", (3,), bytes(24)),
        Array("float32", (-1,), b""),
        Array("float32", (1,), "text"),
    ],
)
def test_impossible_arrays_are_refused(array: Array) -> None:
    with pytest.raises(ProtocolViolation):
        to_tensor(array)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-3, 1.0, 1e10, 1e18, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares_hold_over_the_whole_range(scale: float, dtype: torch.dtype) -> None:
    values = (torch.randn(1000, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    exact = values.double().square().sum().item()
    assert sum_of_squares(values) == pytest.approx(exact, rel=1e-5)
    assert sum_of_squares(values.view(20, 50).T) == pytest.approx(exact, rel=1e-5)
    assert is_finite(values)
    assert is_finite(values, 10 * scale)
    assert not is_finite(values, scale)
    assert sum_of_squares(torch.zeros(3)) == 0.0


@pytest.mark.parametrize("num_values", [1, 100_000])
def test_only_what_is_larger_than_the_largest_is_refused(num_values: int) -> None:
    for largest in (1.0, 1e15, 1e30, torch.finfo(torch.float32).max):
        values = torch.full((num_values,), largest)
        assert is_finite(values, values[0].item())
        assert is_finite(-values / 4, largest)
        above = torch.zeros(num_values)
        above[-1] = -largest
        assert not is_finite(above, largest * 0.999)


def test_sums_of_squares_of_long_tensors_are_as_good_as_those_of_short_ones() -> None:
    rng = torch.Generator().manual_seed(2)
    for values in (torch.full((3_000_001,), 0.1), torch.randn(3_000_001, generator=rng)):
        exact = values.double().square().sum().item()
        assert sum_of_squares(values) == pytest.approx(exact, rel=2e-5)


@pytest.mark.parametrize("num_values", [1, 8191, 131_073, 3_000_001])
@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e18, 1e25])
def test_distances_hold_at_any_length_and_over_the_whole_range(
    num_values: int, scale: float
) -> None:
    rng = torch.Generator().manual_seed(3)
    one, other = (torch.randn(num_values, generator=rng) * scale for _ in range(2))
    before = one.clone(), other.clone()
    exact = (one.double() - other.double()).norm().item()
    assert distance(one, other) == pytest.approx(exact, rel=2e-5)
    assert distance(one, one) == 0.0
    assert torch.equal(one, before[0])
    assert torch.equal(other, before[1])
    other[-1] = math.nan
    assert not math.isfinite(distance(one, other))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(7, 9, dtype=dtype)
    assert is_finite(values)
    assert is_finite(values, 1.0)
    assert is_finite(values[:0])
    values[3, 4] = bad
    assert not is_finite(values)
    assert not math.isfinite(sum_of_squares(values))
