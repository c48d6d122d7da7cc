"""Processes that compute for a peer, as the peer sees them: started, told what to do, and ended.

Calls. The peer tells every process each call (`Children.send`) over a socket of its own; so all
make the same calls in the same order. A process answers every call with one small message, so that
the peer knows when all are through (`join`).

Failure. Without one of them the others are of no use, so any fault ends all (`failure`): a process
that died (its socket closes), one that is silent for `SILENCE_S` (stopped, or stuck with the
interpreter's lock), what a process says itself, and what a subclass sees. Those that outlive the
peer are ended by the kernel. `watch` raises what happened, in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet.errors import SwarmnetError
from swarmnet.training.processes.frames import (
    ANSWER,
    BEAT,
    BEAT_S,
    BROKEN,
    DONE,
    LENGTH,
    REFUSED,
)
from swarmnet.wire import Array

SILENCE_S = 20.0
"""A process that gave no sign of life for so long is lost."""
START_S = 120.0
"""Longest start of the processes: an interpreter and torch for each, side by side."""
END_S = 5.0
"""After this long, a process that was told to end is killed."""
REASON_S = 0.3
"""One fault makes others; so long is looked for a process that died before another's is told."""


class ProcessLost(SwarmnetError):
    """Processes that compute for this one cannot go on."""


@dataclass(slots=True)
class Child:
    """A process, as the peer sees it."""

    index: int
    name: str
    """For people."""
    process: subprocess.Popen[bytes]
    socket: socket.socket
    heard_at: float
    num_answered: int = 0
    beating: int = 0
    """The thread that gives its signs of life, by the system's number."""
    place: str = "its start"
    """Where in its code it is, for people."""
    received: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    """That have come from it and were not taken."""


class Children:
    """The peer's end of some processes. Subclasses say what they are for."""

    def __init__(
        self, names: dict[int, str], program: str, *, silence_s: float = SILENCE_S
    ) -> None:
        """Starts the processes. `names`: by index, for people; `program`: the module that each
        runs, whose arguments are the descriptor of its socket, its index and the peer's pid.
        Nothing is raised here: `failure` has what went wrong."""
        self.failure: SwarmnetError | None = None
        self._names = names
        self._program = program
        self._silence_s = silence_s
        self._children: list[Child] = []
        self._num_sent = 0
        self._is_closed = False
        self._condition = threading.Condition()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        started = threading.Event()
        # The kernel ends a child when the *thread* that started it ends, so it is this one.
        self._supervisor = threading.Thread(
            target=self._supervise, args=(started,), name="children", daemon=True
        )
        self._supervisor.start()
        started.wait()

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [child.process.pid for child in self._children]

    # ---- calls ------------------------------------------------------------------------------

    def send(
        self,
        call: str,
        values: dict[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        fd: int | None = None,
    ) -> int:
        """Tells a call to all processes; returns its number. One thread at a time. Raises
        `failure`."""
        bodies = [memoryview(a.data).cast("B") for a in arrays]
        header = {
            "call": call,
            "values": values or {},
            "arrays": [[a.dtype, list(a.shape), b.nbytes] for a, b in zip(arrays, bodies)],
            "has_fd": fd is not None,
        }
        packed = json.dumps(header).encode()
        with self._condition:
            self._raise_failure()
            self._num_sent += 1
            number = self._num_sent
        try:
            for child in self._children:
                child.socket.sendall(LENGTH.pack(len(packed)) + packed)
                if fd is not None:
                    socket.send_fds(child.socket, [b"\0"], [fd])
                for body in bodies:
                    child.socket.sendall(body)
        except OSError as error:
            self.fail(f"{child.name} does not listen: {error}")
            self._raise_failure()
        return number

    def join(self) -> None:
        """Returns when all processes are through with all calls. Raises `failure`."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self.failure is not None
                    or self._is_closed
                    or all(c.num_answered >= self._num_sent for c in self._children)
                )
            )
            self._raise_failure()

    # ---- life -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Returns when they were closed; raises `failure`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._condition:
            self._watchers.append((loop, future))
            is_over = self._is_closed or self.failure is not None
        if not is_over:
            await future
        self._raise_failure()

    def fail(self, reason: str) -> None:
        """Ends them. `reason` is told unless a process has died, which then explains it."""
        end = time.monotonic() + REASON_S
        while self.failure is None and not self._is_closed and time.monotonic() < end:
            if any(c.process.poll() is not None for c in self._children):
                break
            time.sleep(BEAT_S / 50)
        with self._condition:
            self._fail(reason)

    def close(self) -> None:
        """Ends them. Idempotent; does not wait for calls under way."""
        with self._condition:
            was_closed, self._is_closed = self._is_closed, True
            self._condition.notify_all()
            self._wake_watchers()
        if was_closed:
            return
        for child in self._children:
            with contextlib.suppress(OSError):
                child.socket.shutdown(socket.SHUT_WR)
        self._supervisor.join(END_S)
        end = time.monotonic() + END_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, end - time.monotonic()))
            child.process.kill()
            child.process.wait()
            child.socket.close()
            for descriptor in child.descriptors:
                os.close(descriptor)

    # ---- for subclasses ---------------------------------------------------------------------

    def _lost(self, reason: str) -> SwarmnetError:
        """What is raised where they failed."""
        raise NotImplementedError

    def _has_ended(self, child: Child, number: int, is_refused: bool, text: str) -> None:
        """A process has answered a call. With the condition held."""

    def _hangs(self, now: float) -> str:
        """Why they do not go on though they give signs of life; "" where they do. Asked again and
        again, by a thread of its own."""
        return ""

    # ---- inside -----------------------------------------------------------------------------

    def _supervise(self, started: threading.Event) -> None:
        try:
            for index, name in self._names.items():
                self._children.append(self._start(index, name))
        except OSError as error:
            with self._condition:
                self._fail(f"{name} cannot be started: {error}")
            return
        finally:
            started.set()
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.socket, selectors.EVENT_READ, child)
            looked_at = time.monotonic()
            while not self._is_closed and self.failure is None:
                for key, _ in selector.select(BEAT_S):
                    self._read(key.data)
                now = time.monotonic()
                if now - looked_at > self._silence_s / 4:  # it was this process that stood still
                    for child in self._children:
                        child.heard_at = now
                looked_at = now
                for child in self._children:
                    if now - child.heard_at > self._silence_s:
                        self.fail(
                            f"{child.name} (pid {child.process.pid}) gave no sign of life "
                            f"for {self._silence_s:.0f} s"
                        )
                if reason := self._hangs(now):
                    self.fail(reason)
        # The thread that started the children must outlive them.
        for child in self._children:
            child.process.wait()

    def _start(self, index: int, name: str) -> Child:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        about = (theirs.fileno(), index, os.getpid())
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", self._program, *map(str, about)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
            )
        return Child(index, name, process, ours, time.monotonic() + START_S)

    def _read(self, child: Child) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(child.socket, 1 << 16, 1)
        except OSError:
            data, descriptors = b"", []
        child.descriptors += descriptors
        if not data:
            if not self._is_closed:
                self.fail(f"{child.name} (pid {child.process.pid}) hung up")
            return
        child.heard_at = max(child.heard_at, time.monotonic())
        child.received += data
        while len(child.received) >= ANSWER.size:
            kind, number, length = ANSWER.unpack_from(child.received)
            if len(child.received) < ANSWER.size + length:
                return
            text = child.received[ANSWER.size : ANSWER.size + length].decode(errors="replace")
            del child.received[: ANSWER.size + length]
            self._answered(child, kind, number, text)

    def _answered(self, child: Child, kind: int, number: int, text: str) -> None:
        if kind == BEAT:
            child.beating, child.place = number, text
        elif kind == BROKEN:
            self.fail(f"{child.name}: {text}")
        elif kind in (DONE, REFUSED):
            with self._condition:
                child.heard_at = time.monotonic()
                child.num_answered = number
                self._has_ended(child, number, kind == REFUSED, text)
                self._condition.notify_all()

    def _fail(self, reason: str) -> None:
        """With the condition held."""
        if self.failure is not None or self._is_closed:
            return
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                reason = f"{child.name} (pid {child.process.pid}) ended with {how}"
                break
        self.failure = self._lost(reason)
        for child in self._children:
            child.process.kill()
        self._condition.notify_all()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for loop, future in self._watchers:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_resolve, future)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
