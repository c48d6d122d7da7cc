"""A process that has imported everything once, and forks a `swarmnet` for each that a test starts.

Importing torch and hivemind is two thirds of what it takes to start a peer, and no test with a
swarm is about it. What is forked is a process like any other: a pid, a session, files and an
environment of its own; its interpreter begins and ends as that of `python -m peer` does. Only
`/proc/PID/environ` and `cmdline` show those of the process that forked it.

This file is both sides: `Prefork` here, and `main` there, which has one thread and no event loop,
so that a fork copies nothing half done.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEFT_TO_FEW = (
    "peer.__main__",
    "swarmnet.transport.libp2p.py_libp2p",
    "swarmnet.transport.libp2p.imports",
    "swarmnet.training.ranks.rank",
    "swarmnet.training.codecs.kernels",
    "swarmnet.training.optimizer.adamw_kernel",
)
"""Not imported in advance: what only some peers do."""
OTHERS = ("hivemind.dht.node", "hivemind.p2p", "uvloop", "torch.fx.experimental.symbolic_shapes")
"""What peers import late, beside the project's own modules."""
NO_ANSWER_S = 120.0
"""Longest wait for a fork, the import before the first one included."""
MAX_LINE = 1 << 20


class Forked:
    """A forked process; the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, prefork: Prefork) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._prefork = prefork

    def poll(self) -> int | None:
        self._prefork.read(0.0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._prefork.read(NO_ANSWER_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the word of it is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Prefork:
    """This side: asks for forks and hears of their ends."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.processes.prefork", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C of whoever runs the tests is not for it
            )
        self._buffer = b""
        self._pids: list[int] = []
        self._living: dict[int, Forked] = {}
        self._folders: dict[int, str] = {}

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        before: str = "",
    ) -> Forked:
        """`swarmnet ARGUMENTS` in a process that first runs the code `before`."""
        wanted = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "out": str(out),
            "err": str(err),
            "before": before,
        }
        self._socket.sendall(json.dumps(wanted).encode() + b"\n")
        while not self._pids:
            self.read(NO_ANSWER_S)
        pid = self._pids.pop()
        self._living[pid] = Forked(pid, self)
        self._folders[pid] = environment.get("TMPDIR", "")
        return self._living[pid]

    def living_in(self, folder: Path) -> dict[int, str]:
        """Forked processes with this `TMPDIR`, by pid."""
        self.read(0.0)
        return {pid: "forked" for pid in self._living if self._folders[pid] == str(folder)}

    def read(self, patience_s: float) -> None:
        """Takes in what the other side has told; waits for something to be told where there is
        `patience_s`."""
        while select.select([self._socket], [], [], patience_s)[0]:
            data = self._socket.recv(MAX_LINE)
            assert data, "the process that forks peers has ended"
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take_in(json.loads(line))
            if lines:
                return
        assert not patience_s, f"no word within {patience_s:.0f} s of the process that forks peers"

    def _take_in(self, told: dict[str, int]) -> None:
        if "forked" in told:
            self._pids.append(told["forked"])
        else:
            self._living.pop(told["ended"]).returncode = told["code"]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


# ---- the other side ---------------------------------------------------------------------------


@dataclass
class Server:
    """Forks what it is asked for until its socket closes."""

    socket: socket.socket
    wakeup: socket.socket
    """Readable when a child has ended."""

    def serve(self) -> dict[str, Any] | None:
        """Returns in each child with what it is to do, and in this process with None when nobody
        asks any more."""
        asked = b""
        while True:
            ready, _, _ = select.select([self.socket, self.wakeup], [], [])
            if self.wakeup in ready:
                self.wakeup.recv(4096)
                self._tell_ends()
            if self.socket in ready:
                data = self.socket.recv(MAX_LINE)
                if not data:
                    return None
                *lines, asked = (asked + data).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if pid == 0:
                        return dict(json.loads(line))
                    self._tell(forked=pid)

    def _tell_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **what: int) -> None:
        self.socket.sendall(json.dumps(what).encode() + b"\n")


def import_all() -> None:
    """What a peer may need."""
    import peer
    import swarmnet
    from swarmnet.transport.libp2p.hollow import hollow

    for package in (peer, swarmnet):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in LEFT_TO_FEW:
                importlib.import_module(found.name)
    hollow("hivemind")
    for name in OTHERS:
        importlib.import_module(name)


def become(wanted: dict[str, Any]) -> None:
    """This forked process is now as one that was just started."""
    os.setsid()
    os.chdir(wanted["cwd"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, path in ((1, wanted["out"]), (2, wanted["err"])):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    tempfile.tempdir = None  # read anew from the environment
    sys.argv = ["swarmnet", *wanted["arguments"]]
    exec(wanted["before"], {})


def main(number: int) -> None:
    import gc

    import_all()
    gc.collect()
    gc.freeze()  # so that a child's collector writes to none of the pages that all share
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(theirs.fileno())
    asked = socket.socket(fileno=number)
    wanted = Server(asked, ours).serve()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in (asked, ours, theirs):
        one.close()
    if wanted is None:
        return
    become(wanted)
    from peer.cli import main as swarmnet

    swarmnet()


if __name__ == "__main__":
    main(int(sys.argv[1]))
