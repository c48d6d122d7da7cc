"""Copies between a device's memory and the host's.

On a GPU they run on streams of their own, from and into pinned memory, and whoever needs one waits
for its event, never for the whole device. A device without streams or pinned memory is waited for
(`WaitingCopies`). On a CPU there is one memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import swarmnet.training.accelerators as accelerators


@dataclass(slots=True)
class OnHost:
    """A tensor on its way to the host."""

    tensor: Tensor
    ready: Any = None
    """An event; None where it is there."""

    def wait(self) -> Tensor:
        """The tensor, when it is there."""
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None
        return self.tensor


@dataclass(slots=True)
class Coming:
    """A tensor on its way to the device."""

    tensor: Tensor
    ready: Any = None
    """An event; None where it is there."""
    stream: Callable[[], Any] | None = None
    """Gives the stream that computes."""

    def take(self) -> Tensor:
        """The tensor: what is computed next waits for it, the caller does not."""
        if self.ready is not None and self.stream is not None:
            computing = self.stream()
            computing.wait_event(self.ready)
            self.tensor.record_stream(computing)
            self.ready = None
        return self.tensor


class DeviceCopies(Protocol):
    """Between one device and the host."""

    device: torch.device
    is_apart: bool
    """The device has memory of its own."""

    def to_device(self, tensor: Tensor, after: Any = None) -> Tensor:
        """A host tensor on the device. What the caller's thread computes next waits for it, the
        caller does not. `after`: an event that the copy waits for."""

    def to_device_through(
        self, tensor: Tensor, work: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """What `work` makes of a host tensor's copy on the device: what stays there, and what
        comes back to the host. The caller waits for both, but not for what the device computes."""

    def ahead(self, tensor: Tensor) -> Coming:
        """A host tensor on its way to the device, beside what is computed there. It stays as it
        is until somebody has taken it."""

    def to_host(self, tensor: Tensor) -> OnHost:
        """A device tensor on the host, with the same strides where they have no gaps."""


class OneMemory:
    """Of a CPU: nothing to copy."""

    device = torch.device("cpu")
    is_apart = False

    def to_device(self, tensor: Tensor, after: Any = None) -> Tensor:
        return tensor

    def to_device_through(
        self, tensor: Tensor, work: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        return work(self.to_device(tensor))

    def ahead(self, tensor: Tensor) -> Coming:
        return Coming(self.to_device(tensor))

    def to_host(self, tensor: Tensor) -> OnHost:
        return OnHost(tensor)


class WaitingCopies:
    """Of a device with memory of its own and one order of work: who copies waits for it."""

    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, tensor: Tensor, after: Any = None) -> Tensor:
        return tensor.to(self.device, copy=True)  # the caller may change its own afterwards

    def to_device_through(
        self, tensor: Tensor, work: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        made, told = work(self.to_device(tensor))
        return made, self.to_host(told).tensor

    def ahead(self, tensor: Tensor) -> Coming:
        return Coming(self.to_device(tensor))

    def to_host(self, tensor: Tensor) -> OnHost:
        return OnHost(tensor.to("cpu", copy=True))


class StreamCopies:
    """Of a GPU: one stream for each direction, with pinned memory at the host's end."""

    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = accelerators.module_of(device.type)
        # Kernels there are short, and go before those of passes: someone waits for them.
        self._inward = self._module.Stream(device, priority=-1)
        self._outward = self._module.Stream(device)

    def to_device(self, tensor: Tensor, after: Any = None) -> Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        if after is not None:
            self._inward.wait_event(after)
        with self._module.stream(self._inward):
            moved = pinned.to(self.device, non_blocking=True)
        computing = self._module.current_stream(self.device)
        computing.wait_stream(self._inward)
        moved.record_stream(computing)
        return moved

    def to_device_through(
        self, tensor: Tensor, work: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with self._module.stream(self._inward):
            made, told = work(pinned.to(self.device, non_blocking=True))
            host = torch.empty_like(told, device="cpu", pin_memory=True)
            host.copy_(told, non_blocking=True)
            ready = self._module.Event()
            ready.record(self._inward)
        made.record_stream(self._module.current_stream(self.device))
        ready.synchronize()
        return made, host

    def ahead(self, tensor: Tensor) -> Coming:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with self._module.stream(self._inward):
            moved = pinned.to(self.device, non_blocking=True)
            ready = self._module.Event()
            ready.record(self._inward)
        return Coming(moved, ready, lambda: self._module.current_stream(self.device))

    def to_host(self, tensor: Tensor) -> OnHost:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._outward.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._outward):
            host.copy_(tensor, non_blocking=True)
            ready = self._module.Event()
            ready.record(self._outward)
        tensor.record_stream(self._outward)
        return OnHost(host, ready)


def copies_of(device: torch.device) -> DeviceCopies:
    """Those that suit the device."""
    if device.type == accelerators.CPU:
        return OneMemory()
    can_go_beside = accelerators.has_streams(device) and accelerators.has_pinned_memory(device)
    return StreamCopies(device) if can_go_beside else WaitingCopies(device)
