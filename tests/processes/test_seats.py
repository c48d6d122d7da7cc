"""One process that serves several stages, over libp2p."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from swarmnet.runtime.apart.stage_program import PROGRAM
from swarmnet.runtime.exporting.models import export_checkpoints
from swarmnet.runtime.joining.starting import start_run
from tests.processes.running import SPARING, Machine, counted_by, parameters_of, tiny_run
from tests.processes.test_ranks import five_more_rounds
from tests.swarm.harness import relative_difference, replay

pytestmark = pytest.mark.processes
ROUNDS = 25
BACK_LIMIT_S = 120.0
LESS_PATIENT = """
from swarmnet.swarm.lifecycle import stand_by
stand_by.UPKEEP_S = 10.0
"""
"""A peer that waits so long, not a minute, before it tries again to serve a stage that it has lost
(of that minute is `tests/swarm/lifecycle/test_stage_lost.py`)."""


def test_one_machine_trains_alone_and_another_shares_the_work(
    running: Machine, tmp_path: Path
) -> None:
    path = tiny_run(running.folder, rounds=ROUNDS)
    spec = start_run(path).spec
    alone = running.start_peer(
        "alone", "--spec", str(path), "--stages", "auto", "--checkpoint-every", "5"
    )
    running.until_round(alone, 3)
    assert any("serves 2 of 2 stages: room for 2" in line for line in alone.errors())
    data = str(running.folder / "text.txt")
    both = running.start_peer(
        "both", "--join", alone.address, "--data", data, "--stages", "2", "--stage", "1"
    )
    one = running.start_peer("one", "--join", alone.address, "--data", data, "--stage", "0")
    peers = [alone, both, one]
    running.until_round(one, ROUNDS)
    running.until_round(both, ROUNDS)
    running.until(lambda: sum(map(len, counted_by(peers).values())) >= ROUNDS * 8)

    addresses = [alone.address, alone.address, both.address, both.address, one.address]
    model = asyncio.run(parameters_of(spec, addresses, seats={1: 1, 3: 1}))
    trainer = replay(spec, counted_by(peers), ROUNDS)
    assert relative_difference(model, trainer.state_dict()) < 1e-4

    look = running.start("status", "status", one.address, "--json")
    assert running.wait(look) == 0, look.describe()
    seen = json.loads(look.output())
    assert len(seen["peers"]) == 5
    assert [stage["num_replicas"] for stage in seen["stages"]] == [3, 2]

    for peer in peers:
        running.interrupt(peer)
    assert [running.wait(peer) for peer in peers] == [0, 0, 0], running.describe()
    told = export_checkpoints([running.folder / "alone"], tmp_path / "model")
    assert f"round {ROUNDS}" in told, "both stages are in the folder of one machine"


def test_more_seats_than_stages_are_refused(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=ROUNDS)
    peer = running.start_peer("greedy", "--spec", str(path), "--stages", "5")
    assert running.wait(peer) == 2
    assert "--stages 2 is the most" in peer.errors()[-1]


def below(pid: int, program: str) -> list[int]:
    """Children of a process that run a module, whichever thread has started them; the oldest
    first."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for path in paths for child in path.read_text().split()]
    name = program.encode()
    return sorted(p for p in found if name in Path(f"/proc/{p}/cmdline").read_bytes())


def test_a_rank_that_dies_ends_its_seat_and_no_other(running: Machine) -> None:
    """Two seats of two ranks each; the first seat's lose one, and begin again."""
    path = tiny_run(running.folder, rounds=100_000)
    ranked = ("--stages", "2", "--tp", "2", "--device", "cpu", "--stage", "0", *SPARING)
    both = running.start_peer("both", "--spec", str(path), *ranked, before=LESS_PATIENT)
    running.until_ready(both)
    data = ("--data", str(running.folder / "text.txt"))
    one = running.start_peer("one", "--join", both.address, *data, "--stage", "0", *SPARING)
    running.until_round(one, 3)
    running.until(lambda: len(below(both.pid, PROGRAM)) == 2)
    hosts = below(both.pid, PROGRAM)
    ranks = [below(host, "swarmnet.training.ranks.rank") for host in hosts]
    assert [len(pids) for pids in ranks] == [1, 1]
    os.kill(ranks[0][0], signal.SIGKILL)
    running.until(lambda: any(" is lost here: " in line for line in both.errors()))
    five_more_rounds(running, one)
    running.until(lambda: len(below(both.pid, PROGRAM)) == 2, BACK_LIMIT_S)
    lines = [line for line in both.errors() if " is lost here: " in line]
    reason = f"its process: rank 1 (pid {ranks[0][0]}) ended with SIGKILL"
    assert len(lines) == 1, both.describe()
    assert f"stage 0 is lost here: {reason}" in lines[0]
    assert below(both.pid, PROGRAM)[0] == hosts[1], "the other seat's process went on"
    five_more_rounds(running, one)
    running.interrupt(both)
    assert running.wait(both) == 0, running.describe()
    pids = (*hosts, *ranks[0], *ranks[1])  # a seat that ends leaves its rank to init
    running.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
