"""Ranks that are threads of this process, joined by gloo: a `LocalGroup` for tests of what ranks
compute. What only processes do (dying, hanging) is not here."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from swarmnet.errors import SwarmnetError
from swarmnet.spec import RunSpec
from swarmnet.system import LOOPBACK_INTERFACE
from swarmnet.training.ranks.local_group import LocalGroup, RankLost, open_groups
from swarmnet.training.ranks.part_dropout import PartDraws, Place, everything
from swarmnet.training.ranks.rank import following_of
from swarmnet.training.ranks.tensor_parallel_stage import rank_options
from swarmnet.training.stage import TorchStage
from swarmnet.wire import Array

TIMEOUT_S = 30.0
DRAWING = (
    "swarmnet.training.ranks.context_parallel_layers.drawn_in_part",
    "swarmnet.training.ranks.expert_layers.drawn_in_part",
    "swarmnet.training.ranks.parallel_layers.drawn_in_part",
)
"""Where ranks take what their layers draw from."""
BUILDING = threading.Lock()
"""Transformers builds one model at a time in a process."""


@contextmanager
def drawn_by_thread(place: Place, seed: int) -> Iterator[None]:
    """In place of `drawn_in_part`: torch's generator is all threads'."""
    with PartDraws(place, torch.Generator().manual_seed(seed)):
        yield


def draw_by_thread(monkeypatch: pytest.MonkeyPatch, one: TorchStage | None = None) -> None:
    """What layers draw of ranks that are built from now on comes from generators of their own, and
    so does that of one rank."""
    for name in DRAWING:
        monkeypatch.setattr(name, drawn_by_thread)
    if one is not None:
        one.layers.drawing = partial(drawn_by_thread, everything)


class ThreadGroup:
    """Has what stages use of a `LocalGroup`; values travel as JSON, as they do there."""

    def __init__(
        self,
        spec: RunSpec,
        num_ranks: int,
        *,
        sequence_parallel: bool = False,
        mode: str,
        row_size: int = 1,
    ) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        self.num_ranks = num_ranks
        self.devices = [torch.device("cpu")] * num_ranks
        self.options = rank_options(
            spec, sequence_parallel=sequence_parallel, mode=mode, row_size=row_size
        )
        self.failure: RankLost | None = None
        self.calls: list[str] = []
        self._store = dist.HashStore()
        self._num_sent = 0
        self._refused: dict[int, set[bool]] = {}
        """By call, how it ended at the ranks."""
        self._queues: list[queue.Queue[Any]] = [queue.Queue() for _ in range(1, num_ranks)]
        self._threads = [
            threading.Thread(target=self._work, args=(rank,), daemon=True)
            for rank in range(1, num_ranks)
        ]
        for thread in self._threads:
            thread.start()
        self.group = self._open(0)

    def at_call(self) -> AbstractContextManager[None]:
        return nullcontext()  # nobody looks whether threads hang

    def send(
        self,
        call: str,
        values: dict[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        fd: int | None = None,
    ) -> int:
        self._raise_failure()
        self._num_sent += 1
        self.calls.append(call)
        copied = [Array(a.dtype, a.shape, bytearray(memoryview(a.data).cast("B"))) for a in arrays]
        for waiting in self._queues:
            mine = None if fd is None else os.dup(fd)
            waiting.put((self._num_sent, call, json.loads(json.dumps(values or {})), copied, mine))
        return self._num_sent

    def report(self, number: int, is_refused: bool) -> None:
        self._refused.setdefault(number, set()).add(is_refused)

    def join(self) -> None:
        for waiting in self._queues:
            waiting.join()
        self._raise_failure()
        assert all(len(ends) == 1 for ends in self._refused.values()), "the ranks disagree"

    def fail(self, reason: str) -> None:
        self.failure = self.failure or RankLost(reason)

    def close(self) -> None:
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _open(self, rank: int) -> Any:
        wait = timedelta(seconds=TIMEOUT_S)
        open_one = lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, wait)  # noqa: E731
        row_size = self.options["row_size"]
        return open_groups(open_one, self._store, rank, self.num_ranks, row_size)

    def _work(self, rank: int) -> None:
        group, waiting = self._open(rank), self._queues[rank - 1]
        calls: dict[str, Callable[..., None]] = {}
        try:
            follow = following_of(self.options)
            calls = follow(group, rank, self.num_ranks, self.devices[rank], self.options)
        except BaseException as error:
            self.fail(f"rank {rank}: {type(error).__name__}: {error}")
        while (told := waiting.get()) is not None:
            number, call, values, arrays, fd = told
            try:
                if call == "build":
                    with BUILDING:
                        calls[call](values, arrays, fd)
                else:
                    calls[call](values, arrays, fd)
                self._refused.setdefault(number, set()).add(False)
            except (SwarmnetError, ValueError):
                self._refused.setdefault(number, set()).add(True)
            except BaseException as error:
                self.fail(f"rank {rank}: {type(error).__name__}: {error}")
            finally:
                waiting.task_done()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankLost(str(self.failure))


@contextmanager
def rank_threads(
    spec: RunSpec,
    num_ranks: int,
    *,
    sequence_parallel: bool = False,
    mode: str = "tensor",
    row_size: int = 1,
) -> Iterator[LocalGroup]:
    group = ThreadGroup(
        spec, num_ranks, sequence_parallel=sequence_parallel, mode=mode, row_size=row_size
    )
    try:
        yield cast(LocalGroup, group)
    finally:
        group.close()
