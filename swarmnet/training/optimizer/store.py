"""Where the moments of a shard lie: in the device's memory, in the host's, or in memory-mapped
files.

In the host's memory, the step is made there, whatever device the stage is on (ZeRO-Offload, Ren et
al., 2021); in files, the operating system keeps in memory what it has room for (ZeRO-Infinity,
Rajbhandari et al., 2021). The numbers are the same, bit for bit: all are fp32 tensors to the step.

A file has no name from the moment it is mapped: its space is free again when the shard is dropped
or the process ends, however it ends. It is written in full before it is mapped, since a full disk
would otherwise be a bus error in the middle of a step.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import torch
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.errors import UserError
from swarmnet.system import claim_space

log = logging.getLogger("swarmnet.optimizer")

FP32_BYTES = 4
_numbers = itertools.count()


class MemoryStore:
    """Zeros in the host's memory."""

    def zeros(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements)


class DiskStore:
    """Zeros in files under a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` where the folder cannot be written to."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise _unusable(folder, e) from None
        self.zeros(1)

    def zeros(self, num_elements: int) -> Tensor:
        """Raises `UserError` where the disk is full."""
        path = self._folder / f"shard-{os.getpid()}-{next(_numbers)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with path.open("xb") as file:
                claim_space(file.fileno(), num_elements * FP32_BYTES)
            return torch.from_file(str(path), shared=True, size=num_elements)
        except (OSError, RuntimeError) as e:  # torch maps errors of mmap to the latter
            raise _unusable(self._folder, e) from None
        finally:
            path.unlink(missing_ok=True)


HostStore = MemoryStore | DiskStore


class DeviceStore:
    """Zeros in a device's memory, and where that is full in another place."""

    def __init__(self, device: torch.device, beyond: HostStore) -> None:
        self._device = device
        self._beyond = beyond
        self._is_full = False

    def zeros(self, num_elements: int) -> Tensor:
        """Raises as `DiskStore`, of what lies beyond."""
        try:
            return torch.zeros(num_elements, device=self._device)
        except RuntimeError as error:
            if not accelerators.is_out_of_memory(error):
                raise
            if not self._is_full:
                where = "files" if isinstance(self._beyond, DiskStore) else "the host's memory"
                log.warning("%s has no room for more optimizer state: %s", self._device, where)
            self._is_full = True
            return self._beyond.zeros(num_elements)


Store = HostStore | DeviceStore


def open_store(kind: str, folder: Path) -> HostStore:
    """`kind`: "disk"; anything else for the host's memory."""
    return DiskStore(folder) if kind == "disk" else MemoryStore()


def _unusable(folder: Path, error: Exception) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0]
    return UserError(
        f"cannot keep optimizer state in {folder} ({reason}): make room or choose another "
        "--state-dir, or add --optimizer-memory host"
    )
