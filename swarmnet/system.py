"""What only Linux has, and what stands in for it elsewhere: one module for both ways.

`PORTABLE` chooses: true on all other systems, and where the environment has `SWARMNET_PORTABLE`,
for sandboxes that say they are Linux and lack a part of it. All else in swarmnet is the same
everywhere."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio

PORTABLE = sys.platform != "linux" or bool(os.environ.get("SWARMNET_PORTABLE"))
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
WINDOWS = (
    "Windows' own Python is not supported: install WSL (`wsl --install`), and swarmnet in a Linux "
    "there"
)

PR_SET_PDEATHSIG = 1
PARENT_LOOK_S = 0.5
CGROUP = Path("/sys/fs/cgroup")
FILE_CACHE = ("inactive_file", "active_file")
"""In `memory.stat`."""
TCP_INFO_BYTES, MIN_RTT_AT = 152, 148
"""Of `struct tcp_info` (Linux, include/uapi/linux/tcp.h), up to `tcpi_min_rtt`, in microseconds."""
UNMEASURED = (1 << 32) - 1
WITHOUT_LIMIT = 1 << 62
STATE_AT, USER_TICKS_AT = 0, 11
"""Of what `/proc/PID/task/TID/stat` says after the name; the system's ticks are the next ones."""
WANTING = "RD"
"""Thread states of Linux: it computes or is about to, it waits for a disk."""
SECRET_BYTES = 32
CLAIM_BYTES = 1 << 20
TCP_RXT_CONNDROPTIME = 0x80
"""Of macOS, which Python has no name for: seconds without an answer after which a connection
ends."""
RUN_WITH_PARENT = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL, 0, 0, 0)
os.setpgid(0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Python that becomes a program (arguments: the parent's pid, the program, its arguments) which the
kernel ends with the parent, in a process group of its own: Ctrl-C is for the parent. For Linux
only, as hivemind's daemon is."""


# ---- processes ------------------------------------------------------------------------------


def end_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """From now on this process gets a signal when its parent ends, however that does. On Linux that
    is when the *thread* of the parent ends that has started it."""
    if PORTABLE:
        threading.Thread(target=_watch, args=(parent_pid, number), daemon=True).start()
    else:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _watch(parent_pid: int, number: signal.Signals) -> None:
    while os.getppid() == parent_pid:
        time.sleep(PARENT_LOOK_S)
    os.kill(os.getpid(), number)


class ThreadUse(NamedTuple):
    """Of one thread, since it began."""

    used_s: float
    """Of processor time."""
    sleeps: int
    """How often it has given its processor up by itself."""
    is_ready: bool
    """It computes, or could if there were a processor for it."""


class ProcessorUse(NamedTuple):
    """Of a process, all its threads together."""

    used_s: float
    """Of processor time, since it began."""
    wants_more: bool
    """A thread computes, or could if there were a processor for it, or waits for a disk."""
    waits_for_disk: bool = False
    threads: Mapping[int, ThreadUse] = {}
    """By the system's numbers."""


def processor_use(
    pid: int, *, without: Collection[int] = (), with_helpers: bool = False
) -> ProcessorUse | None:
    """Of a process, now; None where the system does not say, or the process is gone. `without`:
    threads that do not count, by the system's numbers. `with_helpers`: with the processes that the
    others have started, and theirs."""
    if PORTABLE:
        return None
    wants_more, waits_for_disk, helpers = False, False, list[str]()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    threads = dict[int, ThreadUse]()
    try:
        for name in os.listdir(f"/proc/{pid}/task"):
            if int(name) in without:
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                said = Path(f"/proc/{pid}/task/{name}/stat").read_text()
                words = said.rpartition(")")[2].split()
                wants_more |= words[STATE_AT] in WANTING
                waits_for_disk |= words[STATE_AT] == "D"
                ticks = int(words[USER_TICKS_AT]) + int(words[USER_TICKS_AT + 1])
                sleeps = _sleeps(f"/proc/{pid}/task/{name}/status")
                threads[int(name)] = ThreadUse(ticks * tick_s, sleeps, words[STATE_AT] == "R")
                if with_helpers:
                    helpers += Path(f"/proc/{pid}/task/{name}/children").read_text().split()
    except (OSError, ValueError, IndexError):
        return None
    used_s = sum(thread.used_s for thread in threads.values())
    for helper in helpers:
        use = processor_use(int(helper), with_helpers=True)
        if use is not None:
            used_s += use.used_s
            wants_more |= use.wants_more
            waits_for_disk |= use.waits_for_disk
            threads |= use.threads
    return ProcessorUse(used_s, wants_more, waits_for_disk, threads)


def _sleeps(path: str) -> int:
    """How often a thread has given its processor up; 0 where the system does not say."""
    said = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", Path(path).read_text(), re.MULTILINE)
    return 0 if said is None else int(said[1])


def give_way_for_memory() -> None:
    """When the system lacks memory, it ends this process first."""
    if not PORTABLE:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those with which people and systems end a command."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # ignored under nohup
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


# ---- memory and files -----------------------------------------------------------------------


def anonymous_file(name: str) -> int:
    """The descriptor of an empty file without a path, for memory that several processes map."""
    if sys.platform == "linux" and not PORTABLE:
        return os.memfd_create(name)
    handle, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return handle


@contextlib.contextmanager
def secret_file(contents: bytes) -> Iterator[str]:
    """A path under which a library reads what no other user may; in memory where that can be. It
    ends with the block."""
    is_in_memory = False
    if sys.platform == "linux" and not PORTABLE:
        handle = os.memfd_create("secret", os.MFD_CLOEXEC)
        path, is_in_memory = f"/proc/self/fd/{handle}", True
    else:
        handle, path = tempfile.mkstemp()  # mode 0600
    try:
        os.write(handle, contents)
        yield path
    finally:
        os.close(handle)
        if not is_in_memory:
            os.unlink(path)


def claim_space(descriptor: int, num_bytes: int) -> None:
    """Of an empty open file, which reads as zeros then. Raises `OSError` where the disk is full."""
    if sys.platform == "linux" and not PORTABLE:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    piece = bytes(min(num_bytes, CLAIM_BYTES))
    left = num_bytes
    while left > 0:
        left -= os.write(descriptor, piece[:left])


def give_memory_back() -> None:
    """What the process has freed and keeps. Only glibc keeps much."""
    if not PORTABLE:
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def try_lock(handle: int) -> bool:
    """Locks an open file until it is closed, however its process ends; False where another process
    has it. Raises `OSError` on a file system without locks."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share_lock(handle: int) -> None:
    """Locks an open file together with others, until it is closed: nobody has it alone meanwhile.
    Where somebody has, or the file system has no locks, it is not locked."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def wait_for_lock(handle: int) -> None:
    """Locks an open file, when whoever has it is through."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX)


def is_locked(handle: int) -> bool:
    """Another process has locked that file; True too where nobody can tell."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


# ---- the network ----------------------------------------------------------------------------


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where that is installed; None: Python's own."""
    if PORTABLE:
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def end_when_silent(
    sock: socket.socket, idle_s: int, every_s: int, probes: int, silent_s: int
) -> None:
    """A TCP connection ends when its other side is gone: it is asked when nothing has come for
    `idle_s`, each `every_s`, so many times; and what was sent is answered within `silent_s`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": probes}
    if PORTABLE:
        wanted["TCP_KEEPALIVE"] = idle_s
    else:
        wanted |= {"TCP_KEEPIDLE": idle_s, "TCP_USER_TIMEOUT": silent_s * 1000}
    options = {getattr(socket, name, None): value for name, value in wanted.items()}
    if sys.platform == "darwin":
        options[TCP_RXT_CONNDROPTIME] = silent_s
    for option, value in options.items():
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


# ---- the machine ----------------------------------------------------------------------------


def machine_secret() -> bytes:
    """What all processes of this machine know, and nobody elsewhere; empty where there is nothing
    of that kind. On Linux the boot's id, else a file of this user's."""
    try:
        if not PORTABLE:
            return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        return _kept_secret(Path(tempfile.gettempdir()) / f"swarmnet-machine-{os.getuid()}")
    except OSError:
        return b""


def _kept_secret(path: Path) -> bytes:
    """Raises `OSError`, also where another user made the file."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    if not path.exists():
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):  # of several that begin, the first one's holds
            os.link(beside, path)
        os.unlink(beside)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        return file.read(SECRET_BYTES)


def round_trip_s(connection: Any) -> float | None:
    """The shortest of late on a TCP connection (`socket.socket`, or what an event loop gives for
    one), as the kernel has measured it; None where it does not say."""
    if PORTABLE:
        return None
    import socket

    try:
        asked: int = getattr(socket, "TCP_INFO")  # noqa: B009  which other systems do not have
        said = connection.getsockopt(socket.IPPROTO_TCP, asked, TCP_INFO_BYTES)
    except (AttributeError, OSError):  # no socket, or not of TCP
        return None
    if len(said) < TCP_INFO_BYTES:
        return None
    micros = int.from_bytes(said[MIN_RTT_AT : MIN_RTT_AT + 4], sys.byteorder)
    return micros / 1e6 if micros < UNMEASURED else None


def default_gateway() -> str:
    """The IPv4 address of the router of the default route; empty where there is none, or where the
    system does not say."""
    import socket

    try:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return ""
    routes = [line.split() for line in lines]
    found = [r for r in routes if len(r) > 7 and r[1] == r[7] == "00000000" and r[2] != r[1]]
    if not found:
        return ""
    best = min(found, key=lambda r: int(r[6]))
    return socket.inet_ntoa(int(best[2], 16).to_bytes(4, sys.byteorder))


def free_bytes_in_container() -> int:
    """Of memory, to the limit of the container that this runs in; `WITHOUT_LIMIT` for none."""
    try:
        limit, used = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):
        return WITHOUT_LIMIT
    return max(0, min(limit, limit - used + _file_cache_bytes()))


def _file_cache_bytes() -> int:
    """What the kernel keeps of files counts as used, and is given up when memory is wanted."""
    try:
        words = (CGROUP / "memory.stat").read_text().split()
    except OSError:
        return 0
    sizes = dict(zip(words[::2], words[1::2], strict=False))
    return sum(int(sizes.get(name, 0)) for name in FILE_CACHE)


def has_nvidia_driver() -> bool:
    """The machine has NVIDIA's driver, whatever torch makes of it."""
    if PORTABLE:
        return shutil.which("nvidia-smi") is not None
    return os.path.exists("/proc/driver/nvidia")
