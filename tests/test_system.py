"""What stands in for Linux elsewhere does what Linux does."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

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
