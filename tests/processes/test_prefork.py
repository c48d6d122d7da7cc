"""A forked `swarmnet` is like one that was started."""

from __future__ import annotations

import os
import signal

import pytest

from tests.processes.running import SWARMNET, Machine, processes_of, sockets_in, tiny_run

pytestmark = pytest.mark.processes


def test_it_says_and_ends_as_one_that_was_started(running: Machine) -> None:
    for arguments, code in (("limits", "--help"), 0), (("peer", "--nonsense"), 2):
        forked = running.start("forked", *arguments)
        started = running.start("started", *arguments, command=SWARMNET)
        assert running.wait(forked) == running.wait(started) == code, running.describe()
        assert forked.output() == started.output()
        assert forked.errors() == started.errors()


def test_it_has_a_session_and_an_environment_of_its_own_and_is_found_by_its_folder(
    running: Machine,
) -> None:
    before = "import os, tempfile; print(tempfile.gettempdir(), os.getsid(0), flush=True)"
    spec = tiny_run(running.folder, num_stages=1, rounds=100_000)
    peers = [running.start_peer(f"peer-{i}", "--spec", str(spec), before=before) for i in range(2)]
    running.until_ready(*peers)
    for peer in peers:
        assert peer.output().splitlines()[0] == f"{running.folder} {peer.pid}"
        assert peer.pid in processes_of(running.folder)
    killed, interrupted = peers
    running.kill(killed)
    assert killed.process.returncode == -signal.SIGKILL
    running.interrupt(interrupted)
    assert running.wait(interrupted) == 0
    assert not processes_of(running.folder)
    assert all(f"-{killed.pid}-" in str(path) for path in sockets_in(running.folder))
    with pytest.raises(ProcessLookupError):
        os.kill(killed.pid, 0)  # no zombie is left
