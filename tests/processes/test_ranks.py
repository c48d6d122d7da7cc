"""Peers with several ranks, as real processes: they train, a rank that is lost takes its peer with
it and nothing else, and ranks end with their peer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes.running import SPARING, Command, Machine, tiny_run

pytestmark = pytest.mark.processes
ROUNDS = 100_000
"""More than are waited for."""
LOST_LIMIT_S = 90.0
LESS_PATIENT = """
from swarmnet.training.ranks.local_group import LocalGroup
LocalGroup.__init__.__kwdefaults__["silence_s"] = 6.0
"""
"""A peer that waits so long, not 20 s, for a sign of life of its ranks."""
HANGS = """
import threading, swarmnet.training.ranks.tensor_parallel as module
plain, calls = module.Region.all_reduce, []
def hangs(*arguments, **options):
    calls.append(1)
    if len(calls) > 300:
        threading.Semaphore(0).acquire()
    return plain(*arguments, **options)
module.Region.all_reduce = hangs
"""
"""A peer whose rank 0 hangs after some rounds, while its rank 1 waits for it and the peer talks."""


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
        if b"swarmnet.training.ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_a_peer_and_its_ranks_end_together_and_the_swarm_goes_on(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=ROUNDS)
    refused = running.start_peer("refused", "--spec", str(path), "--tp", "3", "--sequence-parallel")
    assert running.wait(refused) == 2
    assert "possible: 1, 2, 4" in refused.errors()[-1]

    witness = running.start_peer("witness", "--spec", str(path), "--stage", "0", *SPARING)
    running.until_ready(witness)
    join = ("--join", witness.address, "--data", str(running.folder / "text.txt"))
    plain = running.start_peer("plain", *join, "--stage", "1", *SPARING)
    ranked = [
        running.start_peer(
            f"ranked-{i}",
            *join,
            "--stage",
            stage,
            "--tp",
            "2",
            "--device",
            "cpu",
            *more,
            before=LESS_PATIENT,
        )
        for i, (stage, *more) in enumerate((("1",), ("1",), ("0", "--sequence-parallel")))
    ]
    running.until_ready(plain, *ranked)
    for victim in ranked:
        running.until(lambda v=victim: is_told(witness, "peer_joined", v))
        running.until_round(victim, 3)

    loses_a_rank, rank_hangs, is_killed = ranked
    for victim, harm in ((loses_a_rank, signal.SIGKILL), (rank_hangs, signal.SIGSTOP)):
        ranks = ranks_of(victim)
        assert len(ranks) == 1
        os.kill(ranks[0], harm)
        assert running.wait(victim, LOST_LIMIT_S) == 1
        lines = [line for line in victim.errors() if "this peer ends" in line]
        how = "ended with SIGKILL" if harm is signal.SIGKILL else "gave no sign of life"
        assert len(lines) == 1, victim.describe()
        assert f"rank 1 (pid {ranks[0]}) {how}" in lines[0], victim.describe()
        assert not Path(f"/proc/{ranks[0]}").exists()
        running.until(lambda v=victim: is_told(witness, "peer_lost", v))
        five_more_rounds(running, witness)

    ranks = ranks_of(is_killed)
    assert len(ranks) == 1
    running.kill(is_killed)
    running.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    five_more_rounds(running, witness)


def test_a_pass_that_hangs_ends_its_peer(running: Machine) -> None:
    """Long before the collective that the other rank is in does, which is after 120 s."""
    path = tiny_run(running.folder, num_stages=1, rounds=ROUNDS)
    begin = ("--spec", str(path), "--data", str(running.folder / "text.txt"))
    ranked = ("--tp", "2", "--device", "cpu")
    peer = running.start_peer("one", *begin, *ranked, before=LESS_PATIENT + HANGS)
    running.until_round(peer, 1)
    ranks = ranks_of(peer)
    assert running.wait(peer, LOST_LIMIT_S) == 1
    lines = [line for line in peer.errors() if "this peer ends" in line]
    assert len(lines) == 1, peer.describe()
    assert "the ranks hang: none has worked for 6 s; rank 0 at hangs" in lines[0]
    assert "at all_reduce (tensor_parallel.py:" in lines[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def is_told(witness: Command, name: str, peer: Command) -> bool:
    """The witness has told this event of a peer."""
    return any(event["peer_id"] == peer.peer_id for event in witness.events(name))


def five_more_rounds(running: Machine, witness: Command) -> None:
    before = len(witness.events("round"))
    running.until(lambda: len(witness.events("round")) >= before + 5)
