"""Peers in processes of their own: start, watch, stop, and leave nothing behind.

Every child is a real `swarmnet peer` in a session of its own, so that Ctrl-C reaches the parent
only, which then ends the children in order. If the parent is killed the kernel ends them
(`swarmnet.system.end_with_parent`), and the folder is removed by whoever makes the next one. On
Linux they end with the *thread* that has started them: it has to live for as long as they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.errors import UserError
from swarmnet.files import older
from swarmnet.protocol.moments import Since
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.runtime.joining.ready import JOIN_WORDS, Ready, read_ready_file
from swarmnet.runtime.options import NOTIFY_VARIABLE
from swarmnet.system import try_lock

PEER_COMMAND = (sys.executable, "-m", "peer", "peer")
READY_SAY_S = UPKEEP_S
"""Between two lines about a peer that is still starting."""
READY_LOOK_S = 0.05
STOP_STEPS: tuple[tuple[signal.Signals, float], ...] = (
    (signal.SIGINT, 15.0),
    (signal.SIGTERM, 5.0),
    (signal.SIGKILL, 5.0),
)
"""How children are asked to end, and the seconds that they get for it."""
MAX_LOG_BYTES = 64 << 20
"""Of a peer's log; what is older is kept once more."""
LOCK_FILE = "local.lock"
KILLED_S = 5.0
"""For the kernel to end what it was told to end."""
LOG_TAIL_BYTES = 1 << 14
LOG_TAIL_LINES = 12
OWN_ERROR = "swarmnet: "
FOLDER_PATTERN = re.compile(r"swarmnet-local-(\d+)-.+")
"""Short, since sockets in it have paths of at most 107 bytes."""


@dataclass(slots=True)
class ChildPeer:
    """One peer process."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ready_file: Path
    reported: bool = False

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def log_tail(self) -> list[str]:
        """The last lines that it wrote, without the address to join it by."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        said = [line.rstrip() for line in lines if not line.startswith(JOIN_WORDS)]
        return [line for line in said if line][-LOG_TAIL_LINES:]

    def own_error(self) -> str:
        """The one line with which it ended where something was wrong; else empty, also where others
        have ended it: what it said before was then of something else."""
        tail = self.log_tail()
        if (self.process.returncode or 0) > 0 and tail and tail[-1].startswith(OWN_ERROR):
            return tail[-1].removeprefix(OWN_ERROR)
        return ""

    def how_it_ended(self) -> str:
        """In a few words."""
        code = self.process.returncode
        if code is None:
            return "is alive"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


@dataclass(slots=True)
class PeerProcesses:
    """The children, with their logs and state in `folder`."""

    folder: Path
    command: Sequence[str] = PEER_COMMAND
    stop_steps: Sequence[tuple[signal.Signals, float]] = STOP_STEPS
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the children, beside that of this process."""
    children: list[ChildPeer] = field(default_factory=list)

    async def start(
        self, name: str, arguments: Sequence[str], *, keeps_state: bool = False
    ) -> ChildPeer:
        """Starts a peer. `arguments` come after those that tie it to this process. `keeps_state`:
        its state folder is its own choice; else it is in `folder`, and ends with that."""
        log, ready_file = self.folder / f"{name}.log", self.folder / f"{name}.json"
        ties = ("--ready-file", str(ready_file), "--parent-pid", str(os.getpid()))
        state = () if keeps_state else ("--state-dir", str(self.state_dir(name)))
        log.unlink(missing_ok=True)
        ready_file.unlink(missing_ok=True)  # of the time before
        with log.open("ab") as output:  # where it is cut, what comes later goes on from there
            process = await asyncio.create_subprocess_exec(
                *self.command,
                *ties,
                *state,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=_environment(self.environment),
            )
        child = ChildPeer(name, process, log, ready_file)
        self.children.append(child)
        return child

    def state_dir(self, name: str) -> Path:
        """Of a child that has it in `folder`."""
        return self.folder / name

    async def wait_ready(self, child: ChildPeer, say: Callable[[str], None]) -> Ready:
        """Waits until a child listens, for as long as it lives: a machine may be busy. Says now and
        then that it waits. Raises `UserError` with what the child said where it ends before."""
        loop = asyncio.get_running_loop()
        told = Since(loop.time())
        while True:
            ready = read_ready_file(child.ready_file)
            if ready is not None:
                return ready
            if not child.alive:
                child.reported = True
                raise UserError(_last_words(child))
            if told.is_due(loop.time(), READY_SAY_S):
                say(f"{child.name} is still starting; what it says is in {child.log}")
            await asyncio.sleep(READY_LOOK_S)

    def newly_dead(self) -> list[ChildPeer]:
        """Children that have ended since the last question."""
        dead = [c for c in self.children if not c.alive and not c.reported]
        for child in dead:
            child.reported = True
        return dead

    @property
    def num_alive(self) -> int:
        return sum(child.alive for child in self.children)

    def trim_logs(self) -> None:
        """Sets aside what is older of logs that became long, in place of what was before. What a
        peer writes in the moment between is lost."""
        for child in self.children:
            with contextlib.suppress(OSError):  # a full disk, say: the next look tries again
                if child.log.stat().st_size > MAX_LOG_BYTES:
                    shutil.copyfile(child.log, older(child.log))
                    os.truncate(child.log, 0)

    async def stop(self) -> None:
        """Ends every child: politely first, in bounded time. Cancelled, it ends them at once."""
        try:
            for number, grace_s in self.stop_steps:
                if not self.num_alive:
                    return
                self._signal(number)
                await self._wait_all(grace_s)
        finally:
            self._signal(signal.SIGKILL)
            await self._wait_all(KILLED_S)

    def _signal(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.alive:
                with contextlib.suppress(ProcessLookupError):
                    if number == signal.SIGKILL:  # with whatever the peer has started
                        os.killpg(child.process.pid, number)
                    else:
                        child.process.send_signal(number)

    async def _wait_all(self, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(c.process.wait()) for c in self.children if c.alive]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=timeout_s)
            for wait in pending:
                wait.cancel()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of a peer: it writes as `log_tail` reads, and sends no messages that its parent sends.
    `more`: in place of what this process has."""
    own = {key: value for key, value in os.environ.items() if key != NOTIFY_VARIABLE}
    return _with_own_place({**own, "PYTHONIOENCODING": "utf-8", **more})


def _last_words(child: ChildPeer) -> str:
    """A child's own one-line error where it gave one, else how it ended."""
    if own := child.own_error():
        return own
    said = f": {tail[-1]}" if (tail := child.log_tail()) else _why_silent(child.log.parent)
    return f"{child.name} {child.how_it_ended()} before it listened{said}"


def _why_silent(folder: Path) -> str:
    """What a child has said is lost where its log has no room."""
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(folder).free:
            return f": the disk of {folder} is full"
    return ""


def _with_own_place(environment: dict[str, str]) -> dict[str, str]:
    """A child finds the packages where this process has found them, however it did."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [path for path in (environment.get("PYTHONPATH"), root) if path]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def run_folder(base: Path | None = None) -> Iterator[Path]:
    """A temporary folder for the peers of one run. Removed at the end, except after a failure, when
    its logs stay; folders of dead predecessors are removed first. Raises `UserError` where there is
    no place for one."""
    folder = _temporary_folder(base)
    try:
        yield folder
    except (UserError, asyncio.CancelledError, KeyboardInterrupt):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        for child in folder.glob("*"):  # none where it was kept under another name
            if child.is_dir():
                shutil.rmtree(child, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder(base: Path | None) -> Path:
    try:
        base = base or Path(tempfile.gettempdir())
        remove_stale_folders(base)
        return Path(tempfile.mkdtemp(prefix=f"swarmnet-local-{os.getpid()}-", dir=base))
    except OSError as e:
        raise UserError(
            f"no temporary folder for the peers can be made: {e.strerror or e}; set TMPDIR to a "
            "folder with room"
        ) from None


@contextlib.contextmanager
def kept_folder(folder: Path, run_id: str) -> Iterator[Path]:
    """A person's own folder for a `swarmnet local`, with what the one before has left there. Raises
    `UserError` where another one uses it, or it has another run."""
    with used_folder(folder):
        check_kept(folder, run_id)
        yield folder


def check_kept(folder: Path, run_id: str) -> None:
    """Raises `UserError` where the one before has left another run there."""
    saved = {path.name for path in folder.glob("*/checkpoints/*")}
    if saved and not any(run_id.startswith(name) for name in saved):
        raise UserError(
            f"{folder} has checkpoints of another run ({', '.join(sorted(saved))[:80]}): take "
            "its --spec, --rounds and --seed, or name another --state-dir"
        )


@contextlib.contextmanager
def used_folder(folder: Path) -> Iterator[Path]:
    """A person's own folder, which is made where it is not there. Raises `UserError` where another
    `swarmnet local` uses it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise UserError(f"cannot use --state-dir {folder}: {e.strerror}") from None
    try:
        if not try_lock(lock):
            raise UserError(f"{folder} is in use by another swarmnet local; name another folder")
        yield folder
    finally:
        os.close(lock)


def keep_folder(folder: Path) -> Path:
    """Of `run_folder`: it stays, under a name that nobody removes; returns that."""
    return folder.rename(folder.with_name(folder.name.replace("-local-", "-kept-", 1)))


def remove_stale_folders(base: Path) -> list[Path]:
    """Removes this user's folders whose process is gone; returns them."""
    removed = []
    for path in sorted(base.glob("swarmnet-local-*")):
        if FOLDER_PATTERN.fullmatch(path.name) is None or is_of_living(path):
            continue
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def is_of_living(folder: Path) -> bool:
    """Whether the `swarmnet local` that made a folder of `run_folder` goes on."""
    match = FOLDER_PATTERN.fullmatch(folder.name)
    return match is not None and _is_alive(int(match[1]))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
