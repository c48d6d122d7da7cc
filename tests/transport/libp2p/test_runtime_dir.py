"""Folders for sockets: those of the living stay, those of the dead go, others are left alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet.transport.libp2p import runtime_dir
from swarmnet.transport.libp2p.runtime_dir import RuntimeDir, clean_up


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for runtime folders; short, for the names of unix sockets are."""
    path = Path(tempfile.mkdtemp(prefix="sn-test-", dir="/tmp"))
    yield path
    left = list(path.iterdir())
    shutil.rmtree(path)
    assert left == []


def test_folders_of_the_living_are_left_alone(base: Path) -> None:
    living = RuntimeDir(base)
    dead = base / f"{runtime_dir.RUNTIME_PREFIX}99999-dead_000"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "p2pd-1.sock").touch()
    half_made = base / f"{runtime_dir.RUNTIME_PREFIX}99998-half_000"
    half_made.mkdir()
    never_finished = base / f"{runtime_dir.RUNTIME_PREFIX}99997-old_0000"
    never_finished.mkdir()
    long_ago = time.time() - runtime_dir.MAX_UNLOCKED_S - 60
    os.utime(never_finished, (long_ago, long_ago))
    foreign = base / "p2pd-of-another-program.sock"
    foreign.touch()
    others = [base / name for name in ("swarmnet-my-run", "swarmnet-local-99-abcdefgh")]
    others.append(base / f"{runtime_dir.RUNTIME_PREFIX}of-my-own")
    for other in others:  # a state folder has a lock too, which nobody holds between two runs
        other.mkdir()
        (other / "identity.key").touch()
        os.utime(other, (long_ago, long_ago))
    (others[0] / "lock").touch()
    assert clean_up(base) == [never_finished, dead]
    assert all((other / "identity.key").exists() for other in others)
    for other in others:
        shutil.rmtree(other)
    assert living.path.exists()
    assert half_made.exists()
    half_made.rmdir()
    foreign.unlink()
    living.close()
    living.close()


def test_a_lock_is_not_inherited_by_the_daemon(base: Path) -> None:
    """Else a daemon that outlived us would keep our folder alive."""
    folder = RuntimeDir(base)
    assert not os.get_inheritable(folder.lock)
    other = os.open(folder.path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    folder.close()


def test_a_base_too_long_for_a_socket_is_replaced(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    folder = RuntimeDir(long)
    assert len(str(folder.path)) < runtime_dir.MAX_SOCKET_PATH
    folder.close()
