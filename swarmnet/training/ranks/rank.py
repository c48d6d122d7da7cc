"""The process of a rank other than 0: does what rank 0 says, and ends with it.

Started by `local_group`; nobody else runs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from swarmnet.errors import SwarmnetError, one_line
from swarmnet.system import end_with_parent

PR_SET_PDEATHSIG = 1


def main(fd: int, rank: int, parent_pid: int) -> None:
    """The life of a rank."""
    end_with_parent(parent_pid, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends the others
    link = Link(socket.socket(fileno=fd))
    code = 0
    try:
        serve(link, rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 is through
    except BaseException as error:
        code = 1
        text = one_line(f"{type(error).__name__}: {error}", 300)
        with contextlib.suppress(OSError):
            link.broken(text)
            link.wait_for_end()
    os._exit(code)  # process groups may wait for others when they are torn down


class Link:
    """This rank's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        from swarmnet.training.ranks.local_group import ANSWER, BEAT, BEAT_S

        self._socket = connection
        self._pack = ANSWER.pack
        self._lock = threading.Lock()
        beat = self._pack(BEAT, 0, 0)

        def beats() -> None:
            pause = threading.Event()
            try:
                while not pause.wait(BEAT_S):
                    self._send(beat)
            except OSError:
                return

        threading.Thread(target=beats, name="beat", daemon=True).start()

    def receive(self) -> tuple[str, dict[str, Any], list[Any], int | None]:
        """The next call: name, values, arrays, descriptor. Raises `EOFError` at the end."""
        import json

        from swarmnet.training.ranks.local_group import LENGTH, MAX_HEADER_BYTES
        from swarmnet.wire import Array

        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > MAX_HEADER_BYTES:
            raise ValueError("a call with an impossible length")
        header = json.loads(self._exactly(length))
        fd = None
        if header["has_fd"]:
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
            fd = fds[0]
        arrays = [
            Array(dtype, tuple(shape), self._exactly(num_bytes))
            for dtype, shape, num_bytes in header["arrays"]
        ]
        return header["call"], header["values"], arrays, fd

    def answer(self, number: int, is_refused: bool) -> None:
        from swarmnet.training.ranks.local_group import DONE, REFUSED

        self._send(self._pack(REFUSED if is_refused else DONE, number, 0))

    def broken(self, text: str) -> None:
        from swarmnet.training.ranks.local_group import BROKEN

        data = text.encode()
        self._send(self._pack(BROKEN, 0, len(data)) + data)

    def wait_for_end(self) -> None:
        """Rank 0 ends this process, or itself."""
        while self._socket.recv(1 << 16):
            pass

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def _exactly(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view.nbytes:
            received = self._socket.recv_into(view)
            if received == 0:
                raise EOFError
            view = view[received:]
        return data


def serve(link: Link, rank: int) -> None:
    """Does the calls of rank 0 until it closes the link."""
    number = 0
    calls: dict[str, Callable[..., None]] = {}
    while True:
        call, values, arrays, fd = link.receive()
        number += 1
        is_refused = False
        if call == "start":
            calls = _start(rank, **values)
        else:
            try:
                calls[call](values, arrays, fd)
            except (SwarmnetError, ValueError):  # rank 0 raises the same to whoever asked
                is_refused = True
        link.answer(number, is_refused)


def _start(
    rank: int,
    *,
    num_ranks: int,
    devices: list[str],
    threads: int,
    timeout_s: float,
    store: str,
    options: dict[str, Any],
) -> dict[str, Callable[..., None]]:
    import torch

    from swarmnet.training.ranks.local_group import open_process_group

    if threads:
        torch.set_num_threads(threads)
    device = torch.device(devices[rank])
    if options.get("mode") == "fsdp":
        from swarmnet.training.ranks.fsdp import follow as follow_fsdp

        return follow_fsdp(rank, num_ranks, device, store, timeout_s, options)
    group = open_process_group(device, store, rank, num_ranks, timeout_s)
    return following_of(options.get("mode", ""))(group, rank, num_ranks, device, options)


def following_of(mode: str) -> Callable[..., dict[str, Callable[..., None]]]:
    """What makes the calls of a rank, by what the ranks divide: `mode` of `rank_options`."""
    from swarmnet.training.ranks import (
        context_parallel_stage,
        expert_stage,
        tensor_parallel_stage,
    )

    known = {"context": context_parallel_stage, "experts": expert_stage}
    return known.get(mode, tensor_parallel_stage).follow


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))
