"""The child that parses: `python -m swarmnet.parsing.child`, started by `process`.

It does what it is asked over standard input, one call after the other, and answers on what was its
standard output. A call names a function of swarmnet, whose module is imported then: a child imports
no more than it needs, and never torch. Two limits end it, whatever a library is doing: an alarm of
the system, which needs no interpreter, and the memory that it may take.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
from contextlib import suppress
from typing import BinaryIO

from swarmnet.errors import UserError
from swarmnet.parsing import alarm
from swarmnet.parsing.frames import LENGTH_BYTES, GivenFiles, Kept, most_bytes, packed, unpacked
from swarmnet.system import give_way_for_memory

MAX_TEXT = 400


def main() -> None:
    """Until standard input ends, or a call has left the process in an unknown state."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    give_way_for_memory()
    calls, kept = os.fdopen(0, "rb"), Kept()
    while (frame := _read(calls)) is not None:
        answer, goes_on = _answer(frame, kept)
        answers.write(len(answer).to_bytes(LENGTH_BYTES, "little"))
        answers.write(answer)
        answers.flush()
        if not goes_on:
            return


def _read(calls: BinaryIO) -> bytes | None:
    head = calls.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    frame = calls.read(length)
    return frame if len(frame) == length else None


def _answer(frame: bytes, kept: Kept) -> tuple[bytes, bool]:
    """(`[kind, value]`, whether the process can be asked again)."""
    name, seconds, most_answer, key, contents, given = unpacked(frame)
    files = kept.use(None if contents is None else GivenFiles(contents), key)
    limit_memory(most_bytes(kept.num_bytes, len(given), os.cpu_count() or 1))
    alarm.begin(seconds)
    try:
        module, _, function = name.partition(":")
        value = getattr(importlib.import_module(module), function)(files, *unpacked(given))
        answer = packed(["done", value])
        if len(answer) > most_answer:
            return packed(["failed", "it makes too much of its input"]), False
        return answer, True
    except UserError as error:
        return packed(["refused", [type(error).__name__, str(error)]]), True
    except MemoryError:
        return packed(["memory", ""]), False
    except BaseException as error:  # of a library; a panic of Rust is no Exception
        text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_TEXT]
        return packed(["failed", text]), False
    finally:
        alarm.end()


def limit_memory(num_bytes: int) -> None:
    """Of this process: what it allocates, not what it maps (libraries, and the address space that
    an allocator reserves for each thread). Where the system has no such limit, the parent looks."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


if __name__ == "__main__":
    main()
