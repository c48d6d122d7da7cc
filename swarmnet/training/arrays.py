"""Arrays as they travel, as torch tensors, and back; without a copy wherever that can be.

A tensor made of a received array shares its bytes and must not be written to. Bytes are
little endian, and so must the machine be.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.training.cores import over, scratch
from swarmnet.wire import Array, array_bytes

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "uint16": torch.uint16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
LARGEST_FLOAT = torch.finfo(torch.float32).max
LARGEST_VALUE = 1e15
"""Of parameters, activations and their gradients: larger ones are refused."""
SMALLEST_DOT = 1e-24
"""Below it squares of fp32 numbers may have become zero."""
DOT_PIECE = 1 << 13
"""Elements: in a longer sum in fp32 small squares get lost beside what has added up."""
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

with warnings.catch_warnings():
    # What arrives lies in read-only bytes, and nobody writes to it here. Torch warns of such
    # bytes once in a program: let that be now.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


def to_tensor(array: Array) -> Tensor:
    """The array as a tensor, which shares the array's memory (a copy only where that is not
    aligned).

    Raises:
        ProtocolViolation: unknown dtype, impossible shape, or a buffer of another length.
    """
    num_bytes = array_bytes(array.dtype, array.shape)
    dtype = TORCH_DTYPES[array.dtype]
    data = _as_bytes(array.data)
    if data.nbytes != num_bytes:
        raise ProtocolViolation(
            f"{data.nbytes} bytes for {array.dtype} of shape {array.shape}, which takes {num_bytes}"
        )
    if num_bytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    # As few torch calls as can be: each lets go of the interpreter's lock, and where the event
    # loop is busy, gets it back late.
    tensor = torch.frombuffer(data, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        tensor = torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype)
    if len(array.shape) != 1:
        tensor = tensor.view(array.shape)
    return tensor


def from_tensor(tensor: Tensor) -> Array:
    """The tensor as an array; a view of its memory where it is contiguous and on the CPU."""
    value = tensor.detach() if tensor.requires_grad else tensor
    value = value if value.is_cpu else value.cpu()
    value = value if value.is_contiguous() else value.contiguous()
    return Array(NAMES[value.dtype], tuple(value.shape), _bytes_of(value))


def from_numpy(values: np.ndarray) -> Array:
    """The numpy array as an array; a view of its memory where it is contiguous."""
    values = np.ascontiguousarray(values)
    return Array(str(values.dtype), values.shape, values.reshape(-1).view(np.uint8).data)


def sum_of_squares(values: Tensor) -> float:
    """Of any float tensor; not finite where a value is not."""
    quick = _dot(values)
    if SMALLEST_DOT < quick < math.inf:
        return quick
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64).item())
    return norm * norm


def distance(first: Tensor, second: Tensor) -> float:
    """Between two float tensors of one shape; not finite where a value is not."""
    if _is_plain(first) and _is_plain(second):
        a, b = first.detach().reshape(-1), second.detach().reshape(-1)

        def difference(part: slice) -> Tensor:
            # It stays in the cache until it is squared.
            return torch.sub(a[part], b[part], out=scratch("difference", a[part]))

        quick = _dot_by_parts(a, difference)
        if SMALLEST_DOT < quick < math.inf:
            return math.sqrt(quick)
    return math.sqrt(sum_of_squares(first - second))


def is_finite(values: Tensor, largest: float = LARGEST_FLOAT) -> bool:
    """No value is NaN, infinite, or larger than `largest` either way."""
    if values.numel() == 0:
        return True
    # No value is above the norm, which takes half the time of both ends. Squares of small values
    # may become zero.
    if largest >= 1 and torch.linalg.vector_norm(values).item() < largest / 2:
        return True
    # `aminmax` hands a NaN on, and no comparison with it is true.
    low, high = torch.aminmax(values)
    return bool(low.item() >= -largest and high.item() <= largest)


def check_shape(what: str, array: Array, dtype: str, shape: Iterable[int]) -> None:
    """Raises `ProtocolViolation` unless the array has this dtype and shape. `what`: its name in the
    error's text."""
    if array.dtype != dtype or array.shape != shape:
        raise ProtocolViolation(
            f"{what}: {str(array.dtype)[:16]} of shape {str(array.shape)[:64]} "
            f"instead of {dtype} of shape {shape}"
        )


def check_finite(what: str, tensor: Tensor) -> None:
    """Raises `ProtocolViolation` where a value is not finite or beyond `LARGEST_VALUE`. `what`: the
    tensor's name in the error's text."""
    if not is_finite(tensor, LARGEST_VALUE):
        raise ProtocolViolation(f"{what}: a value is not finite (or beyond {LARGEST_VALUE:g})")


def _dot(values: Tensor) -> float:
    """Sum of squares, one quick pass, to about 1e-5; NaN where there is no such pass."""
    if not _is_plain(values):
        return math.nan
    flat = values.detach().reshape(-1)
    return _dot_by_parts(flat, lambda part: flat[part])


def _is_plain(values: Tensor) -> bool:
    return values.dtype == torch.float32 and values.is_contiguous()


def _dot_by_parts(like: Tensor, numbers: Callable[[slice], Tensor]) -> float:
    """Sum of squares of fp32 numbers that are made part by part; `like`: of as many, where they
    are."""
    norms = dict[int, Tensor]()

    def work(part: slice) -> None:
        here = numbers(part)
        end = here.numel() // DOT_PIECE * DOT_PIECE
        rows = (here[:end].view(-1, DOT_PIECE), here[end:].unsqueeze(0))
        parts = [torch.linalg.vector_norm(r, dim=1) for r in rows if r.numel()]
        norms[part.start] = torch.cat(parts) if len(parts) > 1 else parts[0]

    over(like, work)
    if not norms:
        return 0.0
    # In one order, whoever was first.
    return float(torch.cat([norms[a] for a in sorted(norms)]).double().square().sum().item())


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.dtype is torch.float32 and tensor.ndim:
        return tensor.numpy().reshape(-1).view(np.uint8).data
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _as_bytes(data: Any) -> memoryview:
    try:
        view = memoryview(data)
        return view if view.ndim == 1 and view.format == "B" else view.cast("B")
    except TypeError:
        raise ProtocolViolation("an array whose data is not a contiguous buffer") from None
