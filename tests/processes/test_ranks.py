"""A peer with several ranks, as real processes: it trains, and a rank that is lost takes the peer
with it, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes.running import Command, Machine, tiny_run

pytestmark = pytest.mark.processes
ROUNDS = 4_000
"""More than are waited for."""
LOST_LIMIT_S = 90.0


def ranks_of(peer: Command) -> list[int]:
    """Pids of its ranks 1 and on, whichever thread of it has started them."""
    children = [
        int(pid)
        for task in Path(f"/proc/{peer.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return [
        pid
        for pid in children
        if b"swarmnet.training.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_ends_with_a_rank_and_the_swarm_goes_on(
    running: Machine, harm: signal.Signals
) -> None:
    path = tiny_run(running.folder, rounds=ROUNDS)
    peers = running.start_swarm(
        path, [("--stage", "1"), ("--stage", "0"), ("--stage", "1", "--tp", "2")], debug=False
    )
    witness, victim = peers[0], peers[3]
    running.until(
        lambda: any(e["peer_id"] == victim.peer_id for e in witness.events("peer_joined"))
    )
    running.until_round(victim, 3)
    ranks = ranks_of(victim)
    assert len(ranks) == 1
    os.kill(ranks[0], harm)
    assert running.wait(victim, LOST_LIMIT_S) == 1
    lines = [line for line in victim.errors() if "this peer ends" in line]
    how = "ended with SIGKILL" if harm is signal.SIGKILL else "gave no sign of life"
    assert len(lines) == 1, victim.describe()
    assert f"rank 1 (pid {ranks[0]}) {how}" in lines[0], victim.describe()
    assert not Path(f"/proc/{ranks[0]}").exists()
    running.until(lambda: any(e["peer_id"] == victim.peer_id for e in witness.events("peer_lost")))
    before = len(witness.events("round"))
    running.until(lambda: len(witness.events("round")) >= before + 5)


def test_ranks_end_with_their_peer(running: Machine) -> None:
    path = tiny_run(running.folder, num_stages=1, rounds=ROUNDS)
    peer = running.start_peer("peer-0", "--spec", str(path), "--tp", "3", "--sequence-parallel")
    assert running.wait(peer) == 1
    assert "possible: 1, 2, 4" in peer.errors()[-1]
    peer = running.start_peer("peer-1", "--spec", str(path), "--tp", "2", "--sequence-parallel")
    running.until_round(peer, 2)
    ranks = ranks_of(peer)
    running.kill(peer)
    running.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
