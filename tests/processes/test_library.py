"""A peer in somebody's own program, without the command line."""

from __future__ import annotations

import sys

import pytest

import swarmnet
from swarmnet.runtime.counted import COUNTED_FILE, read_counted
from tests.processes.running import Machine, tiny_run

pytestmark = pytest.mark.processes

ROUNDS = 5
PROGRAM = """
import asyncio, pathlib, sys
import swarmnet

stages = []

async def watch(running):
    async def look():
        stages.append(running.spec.pipeline.num_stages)
    return look()

state, spec = map(pathlib.Path, sys.argv[1:])
options = swarmnet.PeerOptions(state, spec=spec, host="127.0.0.1", exit_when_done=True)
asyncio.run(swarmnet.run_peer(options, [watch]))
assert not any(name.split(".")[0] in ("peer", "typer") for name in sys.modules)
print(stages, swarmnet.__version__)
"""


def test_a_program_of_its_own_runs_a_peer(running: Machine) -> None:
    state = running.folder / "state"
    state.mkdir()
    spec = tiny_run(running.folder, num_stages=1, rounds=ROUNDS)
    program = running.start(
        "program", str(state), str(spec), command=(sys.executable, "-c", PROGRAM)
    )
    assert running.wait(program) == 0, running.describe()
    assert program.output() == f"[1] {swarmnet.__version__}\n"
    assert sorted(read_counted([state / COUNTED_FILE])) == list(range(ROUNDS))
