"""Arrays whose bytes are made when somebody reads them.

An update hands arrays on that nobody may ever send: codes of a replica that is alone in its stage.
What such an array stands for is there as a tensor, and whoever works with tensors takes that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.wire import Array


class Late(Array):
    """An array of which only `numbers` is there at first."""

    __slots__ = ("_lock", "_made", "_make", "codec", "numbers")

    numbers: Tensor
    """fp32: what the array stands for."""
    codec: str
    """That gives these numbers again where they are coded with it."""
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


def numbers_of(array: Array) -> Tensor:
    """An fp32 array as a tensor, as `to_tensor`; that of a late one without its bytes."""
    if isinstance(array, Late) and array.dtype == "float32":
        return array.numbers
    return to_tensor(array)
