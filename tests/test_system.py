"""What stands in for Linux elsewhere does what Linux does."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarmnet import system

ORPHAN = """
import subprocess, sys
child = '''
import os, signal, sys, time
sys.path[:0] = {path!r}
from swarmnet.system import end_with_parent
end_with_parent(int(sys.argv[1]), signal.SIGTERM)
print(os.getpid(), flush=True)
time.sleep(120)
'''
import os
subprocess.run([sys.executable, "-c", child, str(os.getpid())])
"""

ROOT = Path(__file__).parents[1]
WAYS = pytest.mark.parametrize("portable", [False, True])


@pytest.fixture
def way(portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PORTABLE", portable)


@WAYS
def test_an_anonymous_file_is_memory_for_several_processes(
    way: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handle = system.anonymous_file("shared")
    os.write(handle, b"seen by all")
    os.set_inheritable(handle, True)
    code = f"import os; os.lseek({handle}, 0, 0); print(os.read({handle}, 99).decode())"
    seen = subprocess.run([sys.executable, "-c", code], pass_fds=[handle], capture_output=True)
    assert seen.stdout == b"seen by all\n"
    os.close(handle)
    assert not list(tmp_path.iterdir()), "no path leads to it"


@WAYS
def test_a_secret_is_this_users_alone_and_ends_with_its_block(
    way: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with system.secret_file(b"-----") as path:
        assert Path(path).read_bytes() == b"-----"
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with pytest.raises(ssl.SSLError):  # it is read, and is no certificate
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)
    assert not list(tmp_path.iterdir())


@WAYS
def test_all_processes_of_a_machine_know_its_secret(
    way: None, portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = system.machine_secret()
    assert len(first) >= 32
    assert system.machine_secret() == first
    for file in tmp_path.iterdir():
        file.chmod(0o644)
        assert system.machine_secret() == b"", "others may have read it, or made it"
        file.unlink()
        assert system.machine_secret() != first


@WAYS
def test_who_ends_with_its_parent_does_so_when_that_is_killed(portable: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN.format(path=[p for p in sys.path if p])],
        stdout=subprocess.PIPE,
        env=os.environ | ({"SWARMNET_PORTABLE": "1"} if portable else {}),
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b"", "the pipe's other end is the child's"


WAITS = "import sys; sys.stdin.read()"
SPINS = "import sys\nfor _ in iter(int, 1): pass"
A_THREAD_SPINS = f"import threading; threading.Thread(target=lambda: exec({SPINS!r})).start()"


@pytest.mark.parametrize(
    ("program", "wants_more"), [(WAITS, False), (SPINS, True), (f"{A_THREAD_SPINS}; {WAITS}", True)]
)
def test_what_a_process_wants_of_a_processor_is_seen(program: str, wants_more: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        deadline, found = time.monotonic() + 30, None
        while time.monotonic() < deadline:  # it starts, which takes a processor too
            found, before = system.processor_use(child.pid), found
            if found and before and found.wants_more is wants_more:
                break
            time.sleep(0.1)
        assert found is not None
        assert found.wants_more is wants_more
        assert found.used_s < 30
        child.send_signal(signal.SIGSTOP)
        while (found := system.processor_use(child.pid)) and found.wants_more:
            time.sleep(0.01)
        assert found is not None, "one that was stopped wants none"
    finally:
        child.kill()
        child.wait()
    assert system.processor_use(child.pid) is None


HAS_HELPER = f"import subprocess; subprocess.Popen([sys.executable, '-c', {SPINS!r}])"
SAYS_THREAD = (
    f"import threading; t = threading.Thread(target=lambda: exec({SPINS!r}), daemon=True); "
    "t.start(); print(t.native_id, flush=True)"
)


def until_it_wants(wanted: bool, pid: int, **how: Any) -> None:
    """Several times in a row, and in time."""
    deadline, in_a_row = time.monotonic() + 30, 0
    while in_a_row < 5:
        assert time.monotonic() < deadline
        found = system.processor_use(pid, **how)
        assert found is not None
        in_a_row = in_a_row + 1 if found.wants_more is wanted else 0
        time.sleep(0.02)


def test_helpers_of_a_process_count_and_some_of_its_threads_do_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; {HAS_HELPER}; {WAITS}"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            until_it_wants(False, child.pid)
            until_it_wants(True, child.pid, with_helpers=True)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    with subprocess.Popen(
        [sys.executable, "-c", f"{SAYS_THREAD}; {WAITS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            assert child.stdout is not None
            thread = int(child.stdout.readline())
            until_it_wants(True, child.pid)
            until_it_wants(False, child.pid, without={thread})
        finally:
            child.kill()


def test_nobody_says_elsewhere_what_a_process_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PORTABLE", True)
    assert system.processor_use(os.getpid()) is None


def test_a_lock_is_its_process_s_until_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, os; from swarmnet.system import try_lock;"
        f"print(try_lock(os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)), flush=True);"
        "sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
    assert other.stdout is not None
    assert other.stdout.readline() == b"True\n"
    handle = os.open(path, os.O_RDWR)
    assert not system.try_lock(handle)
    assert system.is_locked(handle)
    other.kill()
    other.wait()
    assert not system.is_locked(handle)
    assert system.try_lock(handle)
    os.close(handle)


@WAYS
def test_space_is_claimed_before_it_is_written(way: None, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        system.claim_space(file.fileno(), 3_000_001)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 3_000_001
        file.seek(0)
        assert file.read() == bytes(3_000_001)


@WAYS
def test_a_silent_connection_is_asked_and_ends(way: None, portable: bool) -> None:
    with socket.socket() as sock:
        system.end_when_silent(sock, 11, 6, 4, silent_s=9)
        options = {
            name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT")
        }
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert (options["TCP_KEEPINTVL"], options["TCP_KEEPCNT"]) == (6, 4)
    if not portable:
        assert (options["TCP_KEEPIDLE"], options["TCP_USER_TIMEOUT"]) == (11, 9000)


@WAYS
def test_memory_is_given_back_and_a_loop_is_there(way: None, portable: bool) -> None:
    system.give_memory_back()
    loop = (system.fastest_loop() or asyncio.new_event_loop)()
    assert type(loop).__module__.startswith("asyncio" if portable else "uvloop")
    loop.close()


# ---- nobody else ----------------------------------------------------------------------------

LINUX_MODULES = {"ctypes", "fcntl", "uvloop"}
LINUX_NAMES = {
    *("MFD_CLOEXEC", "SIGHUP", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT"),
    *("epoll", "malloc_trim", "memfd_create", "pidfd_open", "pipe2", "posix_fadvise"),
    *("posix_fallocate", "prctl", "sched_getaffinity", "sched_setaffinity", "splice"),
}
LINUX_TEXTS = re.compile(r"/(proc|sys|dev/shm)(/|$)|lo0?$")


def of_linux(text: str) -> list[str]:
    """What a module uses that only Linux has, or has so; its docstrings may speak of it."""
    tree = ast.parse(text)
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in LINUX_MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0], *(a.name for a in node.names)]
            found += [n for n in names if n in LINUX_MODULES | LINUX_NAMES]
        elif isinstance(node, ast.Attribute) and node.attr in LINUX_NAMES:
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = node.value
            if id(node) not in said and (value in LINUX_NAMES or LINUX_TEXTS.match(value)):
                found.append(value)
    return found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("import fcntl", 1),
        ("def f():\n    import ctypes.util, uvloop", 2),
        ("from os import memfd_create as m", 1),
        ("import os, signal\nos.posix_fallocate(1, 0, 9)\nsignal.SIGHUP", 2),
        ("import os\ngetattr(os, 'sched_getaffinity')", 1),
        ("open('/proc/self/status'); x = '/sys/fs/cgroup'; interface = 'lo'", 3),
        ("'''What `/proc` says.'''\nlog = 'low'; a = '/process'", 0),
    ],
)
def test_what_only_linux_has_is_seen(text: str, number: int) -> None:
    assert len(of_linux(text)) == number


def test_nobody_else_uses_what_only_linux_has() -> None:
    """What macOS's Python has no name for, `mypy --platform darwin` finds too."""
    paths = [p for package in ("swarmnet", "peer") for p in (ROOT / package).rglob("*.py")]
    own = Path(system.__file__)
    used = {
        str(p.relative_to(ROOT)): f for p in paths if p != own and (f := of_linux(p.read_text()))
    }
    assert len(paths) > 300
    assert used == {}
    assert len(of_linux(own.read_text())) > 10


WINDOWS_START = """
import asyncio, signal, socket, subprocess, sys, sysconfig, psutil, rich.console, typer
sysconfig.get_config_vars()
for name in ("fcntl", "resource", "pwd", "grp", "termios", "uvloop", "hivemind"):
    sys.modules[name] = None
del signal.SIGHUP
sys.platform = "win32"
from peer.cli import run_command
raise SystemExit(run_command(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [[], ["local"], ["peer", "--join", "x"], ["nonsense"]])
def test_windows_own_python_is_told_of_wsl_in_one_line(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS_START, *command], capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "wsl --install" in line
    assert not done.stdout
