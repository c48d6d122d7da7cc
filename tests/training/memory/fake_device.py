"""An accelerator that torch takes for a real one, in this process for good: a second part of main
memory, under the name `fake`. Without it a device that is no GPU of NVIDIA's is never met in tests.

Needs a C++ compiler (`COMPILER`); building takes seconds, once a folder."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_device.cpp")
COMPILER = shutil.which("c++")
NAME = "fake"


def build(folder: Path) -> Path:
    """The library, in a folder."""
    from torch.utils.cpp_extension import include_paths, library_paths

    assert COMPILER is not None
    made = folder / "fake_device.so"
    if not made.exists():
        includes = [f"-I{path}" for path in include_paths()]
        libraries = [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
        command = [COMPILER, "-shared", "-fPIC", "-std=c++20", "-O0", "-w", *includes]
        beside = made.with_suffix(".new")
        subprocess.run([*command, str(SOURCE), "-o", str(beside), *libraries], check=True)
        beside.rename(made)
    return made


def install(library: Path) -> Any:
    """torch has the accelerator from now on. Returns what the library offers."""
    import torch

    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)  # type: ignore[no-untyped-call]
    offered = ctypes.CDLL(str(library))
    offered.fake_used.restype = offered.fake_peak.restype = ctypes.c_int64

    def nothing(*_: Any) -> None:
        pass

    module: Any = types.SimpleNamespace(
        device_count=lambda: 1,
        is_available=lambda: True,
        current_device=lambda: 0,
        synchronize=nothing,
        empty_cache=nothing,
        manual_seed_all=nothing,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)  # noqa: SLF001  torch's way for it
    offered.fake_limit.argtypes = [ctypes.c_int64]
    return offered
