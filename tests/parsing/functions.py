"""What the tests of a parsing process have it do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

from swarmnet.errors import SpecError
from swarmnet.parsing.frames import GivenFiles, Refusal


def echo(files: GivenFiles, *values: Any) -> list[Any]:
    """What it was given, with the names of the files."""
    return [sorted(files), list(values)]


def pid(files: GivenFiles) -> int:
    """Of the process."""
    return os.getpid()


def heavy(files: GivenFiles) -> list[str]:
    """Modules that a process with limits has no room for."""
    import swarmnet.runtime.writing.chat
    import swarmnet.training.data.in_child  # noqa: F401

    return [name for name in ("torch", "numpy", "pydantic", "hivemind") if name in sys.modules]


def made(files: GivenFiles) -> int:
    """How often something was made of the files."""
    files.made(_count)
    return files.made(_count)


_made: list[int] = []


def _count(files: GivenFiles) -> int:
    _made.append(1)
    return len(_made)


def refuse(files: GivenFiles, kind: str) -> None:
    """Raises what is said."""
    if kind == "spec":
        raise SpecError("a spec that is wrong")
    raise Refusal("is wrong")


def harm(files: GivenFiles, kind: str) -> Any:
    """Does it."""
    if kind == "crash":
        ctypes.string_at(0)
    elif kind == "abort":
        os.abort()
    elif kind == "exit":
        os._exit(3)
    elif kind == "panic":
        raise type("PanicException", (BaseException,), {})("index out of\nbounds")
    elif kind == "allocate":
        kept = []
        while True:
            kept.append(bytearray(1 << 26))
    elif kind == "answer":
        return "x" * (4 << 20)
    elif kind == "print":
        os.write(1, b"x" * 4096)
        os.write(2, b"y" * (1 << 20))
        return "printed"
    elif kind == "object":
        return object()
    elif kind == "sleep":
        time.sleep(60)
    elif kind == "stand still":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "interpreter":
        return sum(1 for _ in iter(int, 1))
    return None
