"""The process that parses files of others, as its parent sees it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from swarmnet.errors import DataError, SpecError, UserError
from swarmnet.parsing.frames import (
    LENGTH_BYTES,
    GivenFiles,
    Kept,
    Refusal,
    most_bytes,
    packed,
    unpacked,
)

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("swarmnet.data")

IDLE_S = 300.0
"""A child that nobody asked anything for so long ends."""
LOOK_S = 0.1
"""Between two looks at the memory of a child at work."""
BESIDES, SLACK_S = 4.0, 5.0
"""The child's own alarm counts the time that it works: that comes first unless it sleeps, or has
less than a fourth of a core. While this process stands still too, nothing is counted."""
LEAST_ANSWER, ANSWER_PER_BYTE = 1 << 20, 32
"""Bytes of an answer, and more for each byte that was given."""
READ_BYTES, STDERR_BYTES = 1 << 20, 1 << 12
REFUSALS = {kind.__name__: kind for kind in (DataError, SpecError)}
MEND = "it is broken, or made to do harm: take another one, or leave a run with it alone"


class _Died(Exception):
    """The child is gone; says why."""


class ParsingProcess:
    """Calls functions in a child, which starts with the first call and after each end. Its methods
    may be called on any thread but that of an event loop, and wait for each other."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._kept = Kept()
        self._used = 0.0
        self._timer: threading.Timer | None = None

    def call(
        self,
        function: Callable[Concatenate[GivenFiles, P], T],
        about: str,
        seconds: float,
        files: GivenFiles,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """What a function of a module makes of files and plain values. `about`: what is parsed, for
        people. Lists come back for tuples.

        Raises:
            DataError: it fails, or takes more memory or time than it may; the child is gone then.
            UserError: what the function raises.
        """
        assert not kwargs
        name = f"{function.__module__}:{function.__qualname__}"
        with self._lock:
            try:
                kind, value = self._ask(name, seconds, files, args)
            except _Died as error:
                raise DataError(f"{about} {error}: {MEND}") from None
            finally:
                self._used = time.monotonic()
                self._end_later()
        if kind == "refused":
            if value[0] == Refusal.__name__:
                raise DataError(f"{about} {value[1]}")
            raise REFUSALS.get(value[0], UserError)(value[1])
        found: T = value
        return found

    def close(self) -> None:
        """Ends the child. Idempotent; a later call starts another one."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the child, where there is one."""
        child = self._child
        return None if child is None else child.pid

    def _ask(self, name: str, seconds: float, files: GivenFiles, args: Any) -> tuple[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._start()
        is_known = files.key in self._kept
        contents = None if is_known else dict(files)
        self._kept.use(files)
        given = packed(args)
        most_answer = LEAST_ANSWER + ANSWER_PER_BYTE * len(given)
        frame = packed([name, seconds, most_answer, files.key, contents, given])
        most = most_bytes(self._kept.num_bytes, len(given), os.cpu_count() or 1)
        is_over = False
        try:
            answer = self._exchange(frame, most_answer, seconds, most)
            kind, value = unpacked(answer)
            if kind == "memory":
                raise _Died(_too_much(most))
            if kind == "failed":
                raise _Died(f"cannot be used ({value})")
            is_over = True
        except (ValueError, TypeError):
            raise _Died("has an answer that cannot be read") from None
        finally:
            if not is_over:
                self._end()
        return kind, value

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), root) if p)
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "swarmnet.parsing.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, "RUST_BACKTRACE": "0"},
                bufsize=0,
            )
        except OSError as error:
            raise _Died(f"needs a process of its own: {error.strerror or error}") from None
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._kept = Kept()

    def _exchange(self, frame: bytes, most_answer: int, seconds: float, most: int) -> bytearray:
        """Sends a call and reads its answer. Raises `_Died`."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        left = memoryview(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
        answer, said = bytearray(), bytearray()
        waited_s, before = 0.0, time.monotonic()
        looked_at = before
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdin, selectors.EVENT_WRITE)
            selector.register(child.stdout, selectors.EVENT_READ)
            selector.register(child.stderr, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is child.stdin:
                        with contextlib.suppress(BrokenPipeError):  # its answer says why
                            left = left[os.write(key.fd, left) :]
                            if left:
                                continue
                        selector.unregister(child.stdin)
                    elif key.fileobj is child.stderr:
                        data = os.read(key.fd, STDERR_BYTES)
                        said = (said + data)[-STDERR_BYTES:]
                        if not data:
                            selector.unregister(child.stderr)
                    else:
                        data = os.read(key.fd, READ_BYTES)
                        answer += data
                        if not data:
                            raise _Died(self._how_it_ended(said, seconds, most))
                if len(answer) >= LENGTH_BYTES:
                    length = int.from_bytes(answer[:LENGTH_BYTES], "little")
                    if length > most_answer + LEAST_ANSWER:
                        raise _Died("makes too much of its input")
                    if len(answer) >= LENGTH_BYTES + length:
                        return answer[LENGTH_BYTES:]
                now = time.monotonic()
                waited_s += min(now - before, LOOK_S)
                before = now
                if waited_s > BESIDES * seconds + SLACK_S:
                    raise _Died(_too_long(seconds))
                if now - looked_at > LOOK_S:
                    looked_at = now
                    if _resident(child.pid) > most:
                        raise _Died(_too_much(most))

    def _how_it_ended(self, said: bytes | bytearray, seconds: float, most: int) -> str:
        child = self._child
        assert child is not None
        code = child.wait()
        if code == -signal.SIGPROF:
            return _too_long(seconds)
        if b"memory allocation" in said or b"MemoryError" in said:
            return _too_much(most)
        log.debug("a parsing process ended: %s", said.decode(errors="replace"))
        if code == -signal.SIGKILL:
            return "needs more memory than there is (its process was killed)"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"ends the process that reads it ({how})"

    def _end(self) -> None:
        child = self._child
        if child is None:
            return
        child.kill()
        child.wait()
        self._child = None  # now: `pid` is read on other threads, and None says that it is gone
        for stream in (child.stdin, child.stdout, child.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _end_later(self) -> None:
        if self._child is None or self._timer is not None:
            return
        self._timer = threading.Timer(self._idle_s, self._end_if_idle)
        self._timer.daemon = True
        self._timer.start()

    def _end_if_idle(self) -> None:
        with self._lock:
            self._timer = None
            if time.monotonic() - self._used >= self._idle_s:
                self._end()
            self._end_later()


def _too_much(most: int) -> str:
    return f"needs more than {most >> 20:,} MiB of memory to be read"


def _too_long(seconds: float) -> str:
    return f"is not read after {seconds:.0f} s"


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 where it is gone."""
    import psutil  # only where something takes its time

    try:
        found: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return found


_shared: ParsingProcess | None = None
_sharing = threading.Lock()


def parsing() -> ParsingProcess:
    """The one of this process."""
    global _shared
    with _sharing:
        if _shared is None:
            _shared = ParsingProcess()
            atexit.register(_shared.close)
        return _shared
