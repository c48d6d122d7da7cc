"""What a peer and a process that computes for it say to each other, over a socket that no other
program has. Without torch: a process beats before it has imported that."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from swarmnet.errors import SwarmnetError, one_line
from swarmnet.system import end_with_parent
from swarmnet.training.processes.standstill import place_of
from swarmnet.wire import Array

BEAT_S = 0.5
"""Between two signs of life of a process."""
MAX_HEADER_BYTES = 1 << 20

BEAT, DONE, REFUSED, BROKEN = range(4)
ANSWER = struct.Struct("<BQI")
"""Kind, number of the call, bytes of text that follow. Of a beat: the system's number of the thread
that beats, and where in the code the thread is that does the calls."""
LENGTH = struct.Struct("<I")


class Link:
    """The process's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        calls = threading.current_thread()

        def beats() -> None:
            pause, own = threading.Event(), threading.get_native_id()
            try:
                while not pause.wait(BEAT_S):
                    self._send(self._packed(BEAT, own, place_of(calls).encode()))
            except OSError:
                return

        threading.Thread(target=beats, name="beat", daemon=True).start()

    def receive(self) -> tuple[str, dict[str, Any], list[Any], int | None]:
        """The next call: name, values, arrays, descriptor. Raises `EOFError` at the end."""
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

    def answer(self, number: int, is_refused: bool, text: str = "", fd: int | None = None) -> None:
        """How a call has ended, with what is to be said of it, and a descriptor to be kept."""
        data = text.encode()
        self._send(self._packed(REFUSED if is_refused else DONE, number, data), fd)

    def broken(self, text: str) -> None:
        self._send(self._packed(BROKEN, 0, text.encode()))

    def wait_for_end(self) -> None:
        """The peer ends this process, or itself."""
        while self._socket.recv(1 << 16):
            pass

    def _packed(self, kind: int, number: int, data: bytes) -> bytes:
        return ANSWER.pack(kind, number, len(data)) + data

    def _send(self, data: bytes, fd: int | None = None) -> None:
        with self._lock:
            if fd is not None:
                sent = socket.send_fds(self._socket, [data], [fd])
                data = data[sent:]
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


def live(fd: int, parent_pid: int, serve: Callable[[Link], None]) -> None:
    """The life of a process: `serve` does the peer's calls until the link closes, which it raises
    as `EOFError`. `fd`: of the socket. Does not return."""
    end_with_parent(parent_pid, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the peer, which ends the others
    link = Link(socket.socket(fileno=fd))
    code = 0
    try:
        serve(link)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the peer is through
    except BaseException as error:
        code = 1
        known = isinstance(error, SwarmnetError)
        text = one_line(error if known else f"{type(error).__name__}: {error}", 300)
        try:
            link.broken(text)
            link.wait_for_end()
        except OSError:
            pass
    os._exit(code)  # process groups may wait for others when they are torn down
