"""What autograd keeps of a pass, moved elsewhere until the backward pass wants it.

From a GPU it goes to pinned main memory, on streams beside the computation. From main memory it
goes to a file without a name, one for each pass, which ends with the pass or with the process.
The bytes that come back are those that went.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from swarmnet.errors import UserError
from swarmnet.training.memory.device_copies import DeviceCopies, OnHost

MIN_BYTES = 4096
"""Smaller tensors stay where they are."""


class Place(Protocol):
    """Where the tensors of one pass go. They have no gaps between their elements."""

    def put(self, tensor: Tensor) -> Any: ...

    def get(self, token: Any) -> Tensor:
        """An equal tensor, of the same strides. May be called several times."""


class HostPlace:
    """Main memory, for tensors of a GPU."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies

    def put(self, tensor: Tensor) -> OnHost:
        return self._copies.to_host(tensor)

    def get(self, token: OnHost) -> Tensor:
        return self._copies.to_device(token.tensor, token.ready)


class FilePlace:
    """A file that only this object knows."""

    def __init__(self, folder: str) -> None:
        """`folder`: on a disk; empty for the system's folder of temporary files. Raises
        `UserError`."""
        try:
            if folder:
                os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder or None, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"activations cannot go to {folder}: {error.strerror}") from None
        self._end = 0

    def put(self, tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
        start, data = self._end, _bytes_of(tensor)
        while data.nbytes:
            try:
                data = data[os.pwrite(self._file.fileno(), data, self._end) :]
            except OSError as error:
                raise UserError(
                    f"activations cannot be written to the disk: {error.strerror}; make room, or "
                    "use --activations recompute"
                ) from None
            self._end = start + tensor.nbytes - data.nbytes
        return start, tensor.shape, tensor.stride(), tensor.dtype

    def get(self, token: tuple[int, torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
        start, shape, stride, dtype = token
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        data = _bytes_of(tensor)
        while data.nbytes:
            count = os.preadv(self._file.fileno(), [data], start)
            if count == 0:
                raise RuntimeError("the file of activations is shorter than what was written")
            data, start = data[count:], start + count
        return tensor


class OffloadedPass:
    """The hooks of one forward pass."""

    def __init__(self, place: Place, spared: Collection[int]) -> None:
        """`spared`: addresses of storages that stay anyway, those of parameters."""
        self._place = place
        self._spared = spared
        self._moved: dict[tuple[Any, ...], tuple[StorageWeakRef, Any]] = {}
        self.num_bytes = 0

    def hooks(self) -> Any:
        """A context: what autograd keeps of what runs in it is moved."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        storage = tensor.untyped_storage()
        if tensor.nbytes < MIN_BYTES or storage.data_ptr() in self._spared:
            return tensor
        # Several operations keep the same tensor; an address may be used again by another.
        key = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,  # noqa: SLF001  torch has no public name for the counter of changes in place
        )
        found = self._moved.get(key)
        if found is None or found[0].expired():
            dense = torch.empty_like(tensor)
            if dense.stride() == tensor.stride():
                dense = tensor.detach()
            else:
                dense.copy_(tensor)
            token = self._place.put(dense)
            self.num_bytes += tensor.nbytes
            found = self._moved[key] = (StorageWeakRef(storage), token)
        return partial(self._place.get, found[1])


def _unpack(packed: Any) -> Tensor:
    return packed() if isinstance(packed, partial) else packed


def _bytes_of(tensor: Tensor) -> memoryview:
    """Of a tensor without gaps, in the order of its memory."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy().data
