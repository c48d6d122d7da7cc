"""Arrays whose bytes are made when somebody reads them.

An update hands arrays on that nobody may ever send: codes of a replica that is alone in its stage,
and vectors in a device's memory. What such an array stands for is there as a tensor, and whoever
works with tensors takes that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.wire import Array


class Late(Array):
    """An array of which only `numbers` is there at first."""

    __slots__ = ("_lock", "_made", "_make", "codec", "numbers")

    numbers: Tensor
    """fp32: what the array stands for."""
    codec: str
    """That gives these numbers again where they are coded with it; empty where none is known, and
    the numbers may be somebody's who changes them."""
    _make: Callable[[], Tensor] | None
    _made: Any
    _lock: threading.Lock

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        numbers: Tensor,
        codec: str,
        make: Callable[[], Tensor] | None = None,
    ) -> None:
        """`make`: gives the array, a tensor of this dtype and shape; called once at most, on any
        thread. Where it is left out, `numbers` are the array."""
        values: dict[str, Any] = {
            "dtype": dtype,
            "shape": shape,
            "numbers": numbers,
            "codec": codec,
            "_make": make,
            "_made": None,
            "_lock": threading.Lock(),
        }
        for name, value in values.items():  # arrays are frozen
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Any:
        """The bytes."""
        with self._lock:
            if self._made is None:
                made = self.numbers if self._make is None else self._make()
                object.__setattr__(self, "_made", from_tensor(made).data)
            return self._made


def numbers_of(array: Array, copies: DeviceCopies | None = None) -> Tensor:
    """An fp32 array as a tensor, as `to_tensor`; that of a late one without its bytes. `copies`: to
    the device on which it is needed."""
    if isinstance(array, Late) and array.dtype == "float32":
        return array.numbers
    return tensor_on(array, copies)


def tensor_on(array: Array, copies: DeviceCopies | None) -> Tensor:
    """Any array as a tensor on a device, or where there is none as `to_tensor`."""
    tensor = to_tensor(array)
    return tensor if copies is None else copies.to_device(tensor)


def array_of(numbers: Tensor, copies: DeviceCopies | None = None, codec: str = "") -> Array:
    """The reverse of `numbers_of`. `codec`: as of `Late`."""
    if copies is None and not codec:
        return from_tensor(numbers)
    make = None if copies is None else lambda: copies.to_host(numbers).wait()
    return Late("float32", tuple(numbers.shape), numbers, codec, make)


def sent(coded: Tensor, copies: DeviceCopies | None) -> Array:
    """Codes, on their way to others: on the host."""
    return from_tensor(coded if copies is None else copies.to_host(coded).wait())
