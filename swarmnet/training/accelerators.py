"""What torch finds in this machine beside its CPU, and what of that can be relied on: the one place
that asks torch about devices.

An accelerator is whatever `torch.accelerator` says there is: `cuda` (NVIDIA's, and AMD's by ROCm),
`mps`, `xpu` and others. They differ in what they have: pinned memory, streams, events, numbers of
16 or of 64 bits. Each is asked for where it is used, and there is another way without it. Whether
a device makes the same bits as a CPU is for the codecs and the optimizer to try.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

CPU, CUDA, MPS = "cpu", "cuda", "mps"
KINDS = (CUDA, MPS, "xpu")
"""That a person may name; `auto` takes others too."""
TRIED = 8
"""Rows and columns of the product by which a dtype is tried."""


def kind() -> str:
    """The type of this machine's accelerator; `cpu` where torch finds none."""
    if not torch.accelerator.is_available():
        return CPU
    found = torch.accelerator.current_accelerator()
    return CPU if found is None else found.type


def num_devices() -> int:
    """Accelerators that torch can use."""
    here = kind()
    return 0 if here == CPU else int(module_of(here).device_count())


def module_of(kind: str) -> Any:
    """What torch has for a type of device, such as `torch.cuda`."""
    return torch.get_device_module(kind)


def shares_memory(device: torch.device) -> bool:
    """What it computes with lies in the host's memory, beside what lies there for others."""
    return device.type in (CPU, MPS)


_most_bytes: dict[torch.device, int] = {}
"""That this process may take of a device's memory; all of it, where nothing is said."""


def bound_memory(device: torch.device, num_bytes: int) -> None:
    """From now on this process takes no more of the memory of an accelerator, by all that it plans;
    and where torch's allocator takes such a bound, more is out of memory for it. What the driver
    needs comes on top."""
    device = _numbered(device)
    _most_bytes[device] = num_bytes
    module = module_of(device.type)
    whole = total_bytes(device)
    bound = getattr(module, "set_per_process_memory_fraction", None)
    if bound is not None and device.type == MPS:
        bound(min(1.0, num_bytes / int(module.recommended_max_memory())))
    elif bound is not None and whole:
        bound(min(1.0, num_bytes / whole), device)


def free_bytes(device: torch.device) -> int | None:
    """Of what it may take; None for a CPU, and where it does not say."""
    if device.type == CPU:
        return None
    free, most = _free_bytes(device), _most_bytes.get(_numbered(device))
    if most is None:
        return free
    taken = getattr(module_of(device.type), "memory_reserved", None)
    left = max(0, most - (0 if taken is None else int(taken(device))))
    return left if free is None else min(free, left)


def _free_bytes(device: torch.device) -> int | None:
    module = module_of(device.type)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):  # mps
        taken = int(module.driver_allocated_memory())
        return max(0, int(module.recommended_max_memory()) - taken)
    return None


def _numbered(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, 0)


def total_bytes(device: torch.device) -> int | None:
    """Of its memory; None for a CPU, and where it does not say."""
    asked = getattr(module_of(device.type), "get_device_properties", None)
    if device.type == CPU or asked is None:
        return None
    try:
        return int(asked(device).total_memory)
    except (RuntimeError, AssertionError, AttributeError):  # not there, or it has no such number
        return None


def name_of(device: torch.device) -> str:
    """For people: what its maker calls it, and its memory where it says so."""
    module = module_of(device.type)
    if not hasattr(module, "get_device_properties"):
        return str(device)
    about = module.get_device_properties(device)
    return f"{about.name}, {about.total_memory / 2**30:.0f} GiB"


@functools.cache
def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """In the device's own instructions, as far as it says; else whether it does so at all."""
    if dtype == torch.bfloat16 and device.type == CUDA:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    asked = getattr(module_of(device.type), "is_bf16_supported", None)
    if dtype == torch.bfloat16 and asked is not None and not asked():
        return False
    try:
        ones = torch.ones(TRIED, TRIED, dtype=dtype, device=device)
        return bool((ones @ ones == TRIED).all().item())
    except Exception:  # types of devices refuse what they lack in many ways
        return False


@functools.cache
def has_pinned_memory(device: torch.device) -> bool:
    """Copies from and to such memory of the host run beside all else."""
    if device.type == CPU:
        return False
    try:
        return bool(torch.empty(1, pin_memory=True).is_pinned())
    except Exception:  # likewise
        return False


def has_streams(device: torch.device) -> bool:
    """Work on it can be put into several orders, with events between them."""
    module = module_of(device.type)
    wanted = ("Stream", "Event", "stream", "current_stream")
    return device.type != CPU and all(hasattr(module, name) for name in wanted)


def present(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """It is the thread's present device, on which Triton starts kernels."""
    choose = getattr(module_of(device.type), "device", None)
    if device.type == CPU or choose is None:
        return contextlib.nullcontext()
    chosen: contextlib.AbstractContextManager[Any] = choose(device)
    return chosen


def wait_for(device: torch.device) -> None:
    """Until it has done all that it was told."""
    if device.type != CPU:
        module_of(device.type).synchronize(*([] if device.type == MPS else [device]))


def give_memory_back(kind: str) -> None:
    """What torch keeps of an accelerator's memory and does not use."""
    clear = getattr(module_of(kind), "empty_cache", None)
    if kind != CPU and clear is not None:
        clear()


def is_out_of_memory(error: BaseException) -> bool:
    """What torch raises where a device lacks memory: some types have no exception of their own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )
