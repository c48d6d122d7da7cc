"""Child processes: their start, their end, and what they leave."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import swarmnet
from swarmnet.errors import UserError
from swarmnet.files import older
from swarmnet.runtime.local.processes import PeerProcesses, remove_stale_folders, run_folder
from tests.peer.fakes import fake_command, until

QUICK_STEPS = ((signal.SIGINT, 0.2), (signal.SIGTERM, 0.2), (signal.SIGKILL, 5.0))


def test_a_child_that_listens_to_nothing_is_killed_in_bounded_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        command = fake_command(tmp_path, "stubborn")
        processes = PeerProcesses(tmp_path, command, stop_steps=QUICK_STEPS)
        child = await processes.start("peer-1", ["--spec", "x"])
        await processes.wait_ready(child, print)
        await processes.stop()
        assert child.how_it_ended() == "was ended by SIGKILL"

    asyncio.run(scenario())


def test_stopping_that_is_cut_short_still_ends_the_children(tmp_path: Path) -> None:
    async def scenario() -> None:
        processes = PeerProcesses(tmp_path, fake_command(tmp_path, "stubborn"))
        child = await processes.start("peer-1", ["--spec", "x"])
        await processes.wait_ready(child, print)
        stopping = asyncio.ensure_future(processes.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await until(lambda: not child.alive)

    asyncio.run(scenario())


def test_a_child_is_waited_for_as_long_as_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.runtime.local.processes.READY_SAY_S", 0.1)
    said: list[str] = []

    async def scenario() -> None:
        command = (sys.executable, "-c", "import time; time.sleep(60)")
        processes = PeerProcesses(tmp_path, command, stop_steps=[(signal.SIGTERM, 60.0)])
        child = await processes.start("peer-1", [])
        waiting = asyncio.ensure_future(processes.wait_ready(child, said.append))
        await until(lambda: len(said) > 1)
        assert not waiting.done()
        await processes.stop()
        with pytest.raises(UserError, match=r"peer-1 was ended by SIGTERM before it listened"):
            await waiting

    asyncio.run(scenario())
    assert set(said) == {f"peer-1 is still starting; what it says is in {tmp_path}/peer-1.log"}


@pytest.mark.parametrize(("free", "said"), [(0, ": the disk of .* is full"), (1, "$")])
def test_a_full_disk_that_took_the_log_is_named(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    async def scenario() -> None:
        processes = PeerProcesses(tmp_path, (sys.executable, "-c", "raise SystemExit(1)"))
        child = await processes.start("peer-1", [])
        with pytest.raises(
            UserError, match=f"peer-1 ended with exit code 1 before it listened{said}"
        ):
            await processes.wait_ready(child, print)

    asyncio.run(scenario())


def test_the_last_lines_of_a_child_are_without_the_address_to_join_it_by(tmp_path: Path) -> None:
    program = "print('swarmnet peer --join /ip4/127.0.0.1/tcp/1'); print('swarmnet: an end')"

    async def scenario() -> None:
        processes = PeerProcesses(tmp_path, (sys.executable, "-c", program))
        child = await processes.start("peer-1", [])
        await until(lambda: not child.alive)
        assert child.log_tail() == ["swarmnet: an end"]

    asyncio.run(scenario())


def test_a_death_is_told_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        processes = PeerProcesses(tmp_path, fake_command(tmp_path, "one-dies"))
        child = await processes.start("peer-2", [])
        await until(lambda: not child.alive)
        assert processes.newly_dead() == [child]
        assert processes.newly_dead() == []
        assert child.log_tail() == ["the last thing that I saw"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("end", "own"), [("sys.exit(1)", "the disk hangs"), ("os.kill(os.getpid(), 9)", "")]
)
def test_the_last_line_of_a_child_is_an_error_where_it_ended_by_itself(
    end: str, own: str, tmp_path: Path
) -> None:
    program = f"import os, sys; print('swarmnet: the disk hangs', flush=True); {end}"

    async def scenario() -> None:
        processes = PeerProcesses(tmp_path, (sys.executable, "-c", program))
        child = await processes.start("peer-1", [])
        await until(lambda: not child.alive)
        assert child.own_error() == own

    asyncio.run(scenario())


def test_a_child_finds_the_packages_where_this_process_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    program = "import swarmnet, sys; sys.exit(f'swarmnet: {swarmnet.__file__}')"

    async def scenario() -> None:
        processes = PeerProcesses(tmp_path, (sys.executable, "-S", "-c", program))
        child = await processes.start("peer-1", [])
        with pytest.raises(UserError, match=str(swarmnet.__file__)):
            await processes.wait_ready(child, print)

    asyncio.run(scenario())


def test_a_child_gets_its_environment_and_a_state_folder_only_where_it_has_none(
    tmp_path: Path,
) -> None:
    program = "import os, sys; sys.exit(f'swarmnet: {os.environ[\"WORD\"]} {sys.argv[1:]}')"

    async def said(keeps_state: bool) -> str:
        command = (sys.executable, "-c", program)
        processes = PeerProcesses(tmp_path, command, environment={"WORD": "secret"})
        child = await processes.start("peer-1", [], keeps_state=keeps_state)
        with pytest.raises(UserError) as error:
            await processes.wait_ready(child, print)
        return str(error.value)

    own = asyncio.run(said(keeps_state=False))
    assert own.startswith("secret")
    assert f"'--state-dir', '{tmp_path / 'peer-1'}'" in own
    assert "--state-dir" not in asyncio.run(said(keeps_state=True))


def test_folders_of_dead_predecessors_are_removed_and_others_are_not(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = tmp_path / f"swarmnet-local-{gone.pid}-abc"
    alive = tmp_path / f"swarmnet-local-{os.getppid()}-abc"
    foreign = tmp_path / "swarmnet-local-notes"
    for folder in (stale, alive, foreign):
        (folder / "peer-1").mkdir(parents=True)
    link = tmp_path / f"swarmnet-local-{gone.pid}-link"
    link.symlink_to(foreign)
    assert remove_stale_folders(tmp_path) == [stale]
    assert alive.exists()
    assert (foreign / "peer-1").exists()


def test_the_folder_is_removed_after_success(tmp_path: Path) -> None:
    with run_folder(tmp_path) as folder:
        (folder / "x.log").write_text("x")
    assert not folder.exists()


def test_where_there_is_no_place_for_a_folder_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "No such file or directory; set TMPDIR"
    with pytest.raises(UserError, match=line), run_folder(tmp_path / "gone"):
        pytest.fail("there is none")

    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none_usable)
    line = "No usable temporary directory found in .*; set TMPDIR"
    with pytest.raises(UserError, match=line), run_folder():
        pytest.fail("there is none")


def test_a_log_is_bounded_while_its_peer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.runtime.local.processes.MAX_LOG_BYTES", 1000)
    program = "import time\nwhile True: print('a line ' * 9, flush=True); time.sleep(0.01)"

    async def scenario() -> None:
        command = (sys.executable, "-c", program)
        processes = PeerProcesses(tmp_path, command, stop_steps=QUICK_STEPS)
        child = await processes.start("peer-1", [])
        for _ in range(3):
            await until(lambda: child.log.stat().st_size > 1000)
            processes.trim_logs()
            assert child.log.stat().st_size < 1000
        await until(lambda: child.log.stat().st_size > 100)
        await processes.stop()
        written = older(child.log).read_bytes(), child.log.read_bytes()
        assert all(text.startswith(b"a line ") and b"\0" not in text for text in written)

    asyncio.run(scenario())
