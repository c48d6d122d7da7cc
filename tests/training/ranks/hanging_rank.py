"""A rank that does what ranks should not (call `harm`) before a sum over all ranks."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch

import swarmnet.training.ranks.rank as rank_module
from swarmnet.training.processes.frames import live

BUSY_S = 11.0
"""So long some compute before they come to the sum."""
EVER_S = 10**6
HARMS = ("killed", "stopped", "interpreter", "library", "lock", "order")
"""Those that never come to it."""
WORK = ("computes", "helper")
"""Those that come late."""


def harm(how: str, group: Any) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "interpreter":  # C code that keeps the interpreter's lock
        ctypes.PyDLL(None).sleep(EVER_S)
    elif how == "library":  # C code that does not
        ctypes.CDLL(None).sleep(EVER_S)
    elif how == "lock":
        threading.Semaphore(0).acquire()
    elif how == "order":
        group.recv([torch.zeros(4)], 0, 7).wait()
    elif how == "computes":
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            torch.ones(256, 256) @ torch.ones(256, 256)
    elif how == "helper":
        code = f"import time\nend = time.monotonic() + {BUSY_S}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", code], check=True)


def add_up(group: Any) -> float:
    total = torch.ones(4)
    group.allreduce([total]).wait()
    return float(total[0])


def start(rank: int, **told: Any) -> dict[str, Any]:
    calls = plain_start(rank, **told)

    def run(values: dict[str, Any], _: list[Any], __: int | None) -> None:
        harm(values["how"], groups[0])
        add_up(groups[0])

    return {**calls, "harm": run}


if __name__ == "__main__":
    from swarmnet.training.ranks import local_group

    groups: list[Any] = []
    plain_start = rank_module._start  # noqa: SLF001  what its `start` does
    open_group = local_group.open_process_group

    def kept(*arguments: Any) -> Any:
        groups.append(open_group(*arguments))
        return groups[-1]

    local_group.open_process_group = kept  # type: ignore[assignment]
    rank_module._start = start  # noqa: SLF001  likewise
    FD, RANK, PARENT = (int(word) for word in sys.argv[1:4])
    live(FD, PARENT, functools.partial(rank_module.serve, rank=RANK))
