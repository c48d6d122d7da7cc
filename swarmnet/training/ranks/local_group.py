"""The ranks of one peer: this process is rank 0, the others are its children.

Rank 0 tells every other rank each call, and makes it itself; so all ranks run the same collectives,
and rank 0 hears whether they agree on the outcome. The stage's canonical vectors lie in memory that
all ranks map (`SharedFloats`), whose descriptor travels with a call.

A group with a rank missing is of no use, so any fault ends all of it: what `Children` finds, a call
at which no rank works (`Standstill`), and a collective that takes `COLLECTIVE_TIMEOUT_S`. The last
is for what looks like work: a rank that runs in circles, and a GPU that hangs, since its rank looks
at it all the time.
"""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from swarmnet.errors import SwarmnetError, one_line
from swarmnet.system import LOOPBACK_INTERFACE, ProcessorUse, processor_use
from swarmnet.training.processes.children import SILENCE_S, Child, Children, ProcessLost
from swarmnet.training.processes.standstill import Standstill, place_of
from swarmnet.wire import Array

COLLECTIVE_TIMEOUT_S = 120.0
"""Longest wait of a rank for the others within one collective."""
PROGRAM = "swarmnet.training.ranks.rank"


class RankLost(ProcessLost):
    """The ranks of this peer cannot go on together."""


class Groups(NamedTuple):
    """Process groups of ranks that are counted row by row, as one of them has them."""

    whole: Any
    row: Any
    column: Any


def open_process_group(
    device: torch.device,
    store_path: str,
    rank: int,
    num_ranks: int,
    timeout_s: float,
    row_size: int = 1,
) -> Any:
    """NCCL on GPUs, gloo over loopback on CPUs. Not global to the process: of torch's meshes of
    devices each is. With `row_size` above 1: `Groups`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    timeout = datetime.timedelta(seconds=timeout_s)

    def open_one(store: dist.Store, rank: int, num_ranks: int) -> Any:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # noqa: SLF001  torch's own wrapper sets it so too
            return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)

    return open_groups(open_one, dist.FileStore(store_path, num_ranks), rank, num_ranks, row_size)


def open_groups(
    open_one: Callable[[dist.Store, int, int], Any],
    store: dist.Store,
    rank: int,
    num_ranks: int,
    row_size: int,
) -> Any:
    """`open_one(store, rank, num_ranks)`, or with `row_size` above 1 the `Groups` that it makes."""
    if row_size == 1:
        return open_one(store, rank, num_ranks)
    row, column = divmod(rank, row_size)
    return Groups(
        open_one(dist.PrefixStore("all", store), rank, num_ranks),
        open_one(dist.PrefixStore(f"row {row}", store), column, row_size),
        open_one(dist.PrefixStore(f"column {column}", store), row, num_ranks // row_size),
    )


class LocalGroup(Children):
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
        self.group: Any = None
        self._threads = threads
        self._open = open_group
        self._timeout_s = timeout_s
        self._outcomes: dict[int, bool] = {}
        self._caller, self._caller_id = threading.current_thread(), threading.get_native_id()
        self._is_at_call = False
        self._standstill = Standstill(silence_s)
        self._is_seen = all(device.type == "cpu" for device in self.devices)
        self._folder = Path(tempfile.mkdtemp(prefix="swarmnet-ranks-"))
        names = {index: f"rank {index}" for index in range(1, num_ranks)}
        super().__init__(names, PROGRAM, silence_s=silence_s)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def send(
        self,
        call: str,
        values: dict[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        fd: int | None = None,
    ) -> int:
        self._caller, self._caller_id = threading.current_thread(), threading.get_native_id()
        return super().send(call, values, arrays, fd)

    @contextmanager
    def at_call(self) -> Iterator[None]:
        """In this context rank 0 does what it has told the others."""
        self._is_at_call = True
        try:
            yield
        finally:
            self._is_at_call = False

    def report(self, number: int, is_refused: bool) -> None:
        """How a call ended here; another end at another rank is a fault."""
        with self._condition:
            if self._outcomes.pop(number, is_refused) != is_refused:
                self._fail("the ranks disagree about a call")
            for rank in self._children:
                if rank.num_answered < number:
                    self._outcomes[number] = is_refused
                    break

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- inside -----------------------------------------------------------------------------

    def _lost(self, reason: str) -> SwarmnetError:
        return RankLost(reason)

    def _has_ended(self, child: Child, number: int, is_refused: bool, text: str) -> None:
        if self._outcomes.setdefault(number, is_refused) != is_refused:
            self._fail("the ranks disagree about a call")
        done = min(r.num_answered for r in self._children)
        for old in [n for n in self._outcomes if n < done]:
            del self._outcomes[old]

    def _hangs(self, now: float) -> str:
        if not self._is_seen:
            return ""
        answered = tuple(child.num_answered for child in self._children)
        at = self._num_sent, answered, self._is_at_call
        is_idle = not self._is_at_call and min(answered) == self._num_sent
        callers = {self._caller_id, *(child.process.pid for child in self._children)}
        if not self._standstill.see(now, None if is_idle else at, self._uses, callers):
            return ""
        places = [f"rank 0 at {place_of(self._caller)}"] + [
            f"{child.name} (pid {child.process.pid}) at {child.place}" for child in self._children
        ]
        return f"the ranks hang: none has worked for {self._silence_s:.0f} s; {', '.join(places)}"

    def _uses(self) -> list[ProcessorUse | None]:
        """Of the ranks. In this process, of the thread that does the calls, and of those that
        libraries have for it."""
        others = {t.native_id or 0 for t in threading.enumerate()}
        others.add(os.getpid())  # the first thread, whose number Python has wrong after a fork
        others.discard(self._caller_id)
        return [
            processor_use(os.getpid(), without=others, with_helpers=True),
            *(
                processor_use(child.process.pid, without={child.beating}, with_helpers=True)
                for child in self._children
            ),
        ]

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
