"""The ranks of one peer: this process is rank 0, the others are its children.

Calls. Rank 0 tells every other rank each call (`LocalGroup.send`) over a socket of its own, and
makes it itself; so all ranks make the same calls in the same order, and run the same collectives.
A rank answers every call with one small message, so that rank 0 knows when all are through
(`join`) and that they agree on the outcome.

Memory. The stage's canonical vectors lie in memory that all ranks map (`SharedFloats`), whose
descriptor travels over the socket. It has no name and ends with the processes.

Failure. A group with a rank missing is of no use, so any fault ends all of it (`failure`): a rank
that died (its socket closes), one that is silent for `SILENCE_S` (stopped, or its machine hangs), a
collective that takes `COLLECTIVE_TIMEOUT_S`. Children that outlive their parent are ended by the
kernel. `watch` raises what happened, in one line, for the peer to end with.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import mmap
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swarmnet.errors import SwarmnetError, one_line
from swarmnet.system import LOOPBACK_INTERFACE, anonymous_file
from swarmnet.wire import Array

BEAT_S = 0.5
"""Between two signs of life of a rank."""
SILENCE_S = 20.0
"""A rank that gave no sign of life for so long is lost."""
COLLECTIVE_TIMEOUT_S = 120.0
"""Longest wait of a rank for the others within one collective."""
START_S = 120.0
"""Longest start of the ranks: an interpreter and torch for each, side by side."""
END_S = 5.0
"""After this long, a rank that was told to end is killed."""
REASON_S = 0.3
"""One fault makes others; so long is looked for a rank that died before the group's is told."""
MAX_HEADER_BYTES = 1 << 20

BEAT, DONE, REFUSED, BROKEN = range(4)
ANSWER = struct.Struct("<BQI")
"""Kind, number of the call, bytes of text that follow (for BROKEN)."""
LENGTH = struct.Struct("<I")


class RankLost(SwarmnetError):
    """The ranks of this peer cannot go on together."""


class SharedFloats:
    """fp32 zeros that several processes see."""

    def __init__(self, num_elements: int, fd: int | None = None) -> None:
        """`fd`: of the same memory in another process; it is closed here."""
        num_bytes = max(4 * num_elements, mmap.PAGESIZE)
        self.fd = anonymous_file("swarmnet") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, num_bytes)
        self._map = mmap.mmap(self.fd, num_bytes)
        self.values = torch.frombuffer(self._map, dtype=torch.float32, count=num_elements)
        if fd is not None:
            self.close_fd()

    def close_fd(self) -> None:
        """The memory stays as long as it is mapped anywhere."""
        os.close(self.fd)


def open_process_group(
    device: torch.device, store_path: str, rank: int, num_ranks: int, timeout_s: float
) -> Any:
    """NCCL on GPUs, gloo over loopback on CPUs. Not global to the process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    store = dist.FileStore(store_path, num_ranks)
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001  torch's own wrapper sets it so too
        return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
    return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)


@dataclass(slots=True)
class _Rank:
    """A child, as rank 0 sees it."""

    index: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    heard_at: float
    num_answered: int = 0
    received: bytearray = field(default_factory=bytearray)


class LocalGroup:
    """Rank 0's end of a peer's ranks."""

    def __init__(
        self,
        num_ranks: int,
        *,
        devices: Sequence[str] | None = None,
        threads: int = 0,
        silence_s: float = SILENCE_S,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        options: dict[str, Any] | None = None,
        open_group: Callable[..., Any] = open_process_group,
    ) -> None:
        """Starts the ranks and waits for them; blocks for seconds. `options`: for the ranks' work,
        plain values; `open_group`: makes rank 0's side of what joins them.

        Raises `RankLost` where one does not start."""
        self.num_ranks = num_ranks
        self.devices = [torch.device(d) for d in devices or ["cpu"] * num_ranks]
        self.options = options or {}
        self.failure: RankLost | None = None
        self.group: Any = None
        self._threads = threads
        self._open = open_group
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._ranks: list[_Rank] = []
        self._num_sent = 0
        self._is_closed = False
        self._outcomes: dict[int, bool] = {}
        self._condition = threading.Condition()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="swarmnet-ranks-"))
        started = threading.Event()
        # The kernel ends a child when the *thread* that started it ends, so it is this one.
        self._supervisor = threading.Thread(
            target=self._supervise, args=(started,), name="ranks", daemon=True
        )
        self._supervisor.start()
        started.wait()
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and on."""
        return [rank.process.pid for rank in self._ranks]

    # ---- calls ------------------------------------------------------------------------------

    def send(
        self,
        call: str,
        values: dict[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        fd: int | None = None,
    ) -> int:
        """Tells a call to all other ranks; returns its number. One thread at a time. Raises
        `RankLost`."""
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
            for rank in self._ranks:
                rank.socket.sendall(LENGTH.pack(len(packed)) + packed)
                if fd is not None:
                    socket.send_fds(rank.socket, [b"\0"], [fd])
                for body in bodies:
                    rank.socket.sendall(body)
        except OSError as error:
            self.fail(f"rank {rank.index} does not listen: {error}")
            self._raise_failure()
        return number

    def report(self, number: int, is_refused: bool) -> None:
        """How a call ended here; another end at another rank is a fault."""
        with self._condition:
            if self._outcomes.pop(number, is_refused) != is_refused:
                self._fail("the ranks disagree about a call")
            for rank in self._ranks:
                if rank.num_answered < number:
                    self._outcomes[number] = is_refused
                    break

    def join(self) -> None:
        """Returns when all ranks are through with all calls. Raises `RankLost`."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self.failure is not None
                    or self._is_closed
                    or all(r.num_answered >= self._num_sent for r in self._ranks)
                )
            )
            self._raise_failure()

    # ---- life -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Returns when the group was closed; raises `RankLost` when it failed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._condition:
            self._watchers.append((loop, future))
            is_over = self._is_closed or self.failure is not None
        if not is_over:
            await future
        self._raise_failure()

    def fail(self, reason: str) -> None:
        """Ends the group. `reason` is told unless a rank has died, which then explains it."""
        end = time.monotonic() + REASON_S
        while self.failure is None and not self._is_closed and time.monotonic() < end:
            if any(r.process.poll() is not None for r in self._ranks):
                break
            time.sleep(BEAT_S / 50)
        with self._condition:
            self._fail(reason)

    def close(self) -> None:
        """Ends the ranks. Idempotent; does not wait for calls under way."""
        with self._condition:
            was_closed, self._is_closed = self._is_closed, True
            self._condition.notify_all()
            self._wake_watchers()
        if was_closed:
            return
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.socket.shutdown(socket.SHUT_WR)
        self._supervisor.join(END_S)
        end = time.monotonic() + END_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, end - time.monotonic()))
            rank.process.kill()
            rank.process.wait()
            rank.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- inside -----------------------------------------------------------------------------

    def _connect(self) -> None:
        with self._condition:
            self._raise_failure()
        self.send(
            "start",
            {
                "num_ranks": self.num_ranks,
                "devices": [str(d) for d in self.devices],
                "threads": self._threads,
                "timeout_s": self._timeout_s,
                "store": str(self._folder / "store"),
                "options": self.options,
            },
        )
        try:
            self.group = self._open(
                self.devices[0], str(self._folder / "store"), 0, self.num_ranks, self._timeout_s
            )
        except RuntimeError as error:
            self.fail(
                f"the ranks do not find each other: {one_line(error) or type(error).__name__}"
            )
        self.join()

    def _supervise(self, started: threading.Event) -> None:
        try:
            for index in range(1, self.num_ranks):
                self._ranks.append(self._start_rank(index))
        except OSError as error:
            with self._condition:
                self._fail(f"a rank cannot be started: {error}")
            return
        finally:
            started.set()
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank)
            looked_at = time.monotonic()
            while not self._is_closed and self.failure is None:
                for key, _ in selector.select(BEAT_S):
                    self._read(key.data)
                now = time.monotonic()
                if now - looked_at > self._silence_s / 4:  # it was this process that stood still
                    for rank in self._ranks:
                        rank.heard_at = now
                looked_at = now
                for rank in self._ranks:
                    if now - rank.heard_at > self._silence_s:
                        self.fail(
                            f"rank {rank.index} (pid {rank.process.pid}) gave no sign of life "
                            f"for {self._silence_s:.0f} s"
                        )
        # The thread that started the children must outlive them.
        for rank in self._ranks:
            rank.process.wait()

    def _start_rank(self, index: int) -> _Rank:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        about = (theirs.fileno(), index, os.getpid())
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "swarmnet.training.ranks.rank", *map(str, about)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
            )
        return _Rank(index, process, ours, time.monotonic() + START_S)

    def _read(self, rank: _Rank) -> None:
        try:
            data = rank.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if not self._is_closed:
                self.fail(f"rank {rank.index} (pid {rank.process.pid}) hung up")
            return
        rank.heard_at = max(rank.heard_at, time.monotonic())
        rank.received += data
        while len(rank.received) >= ANSWER.size:
            kind, number, length = ANSWER.unpack_from(rank.received)
            if len(rank.received) < ANSWER.size + length:
                return
            text = rank.received[ANSWER.size : ANSWER.size + length].decode(errors="replace")
            del rank.received[: ANSWER.size + length]
            self._answered(rank, kind, number, text)

    def _answered(self, rank: _Rank, kind: int, number: int, text: str) -> None:
        if kind == BROKEN:
            self.fail(f"rank {rank.index}: {text}")
        elif kind in (DONE, REFUSED):
            with self._condition:
                rank.heard_at = time.monotonic()
                rank.num_answered = number
                if self._outcomes.setdefault(number, kind == REFUSED) != (kind == REFUSED):
                    self._fail("the ranks disagree about a call")
                done = min(r.num_answered for r in self._ranks)
                for old in [n for n in self._outcomes if n < done]:
                    del self._outcomes[old]
                self._condition.notify_all()

    def _fail(self, reason: str) -> None:
        """With the condition held."""
        if self.failure is not None or self._is_closed:
            return
        for rank in self._ranks:
            code = rank.process.poll()
            if code is not None:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                reason = f"rank {rank.index} (pid {rank.process.pid}) ended with {how}"
                break
        self.failure = RankLost(f"this peer ends: {reason}")
        for rank in self._ranks:
            rank.process.kill()
        self._condition.notify_all()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for loop, future in self._watchers:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_resolve, future)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankLost(str(self.failure))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
