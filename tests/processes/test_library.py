"""A peer in somebody's own program, without the command line."""

from __future__ import annotations

import sys

import pytest

from tests.processes.running import Machine, tiny_run

pytestmark = pytest.mark.processes

ROUNDS = 3
PROGRAM = """
import asyncio, pathlib, sys
import swarmnet

rounds = []

async def watch(running):
    async def look():
        while True:
            rounds.append(running.peer.replica.round if running.peer.replica else 0)
            await asyncio.sleep(0.05)
    return look()

state, spec = map(pathlib.Path, sys.argv[1:])
options = swarmnet.PeerOptions(state, spec=spec, host="127.0.0.1", exit_when_done=True)
asyncio.run(swarmnet.run_peer(options, [watch]))
assert not any(name.split(".")[0] in ("peer", "typer") for name in sys.modules)
print(max(rounds), pathlib.Path(state, "identity.key").exists(), swarmnet.__version__)
"""


def test_a_program_of_its_own_runs_a_peer(running: Machine) -> None:
    state = running.folder / "state"
    state.mkdir()
    spec = tiny_run(running.folder, num_stages=1, rounds=ROUNDS)
    program = running.start(
        "program", str(state), str(spec), command=(sys.executable, "-c", PROGRAM)
    )
    assert running.wait(program) == 0, running.describe()
    num_rounds, has_key, version = program.output().split()
    assert (int(num_rounds), has_key) == (ROUNDS, "True")
    assert version.count(".") == 2
