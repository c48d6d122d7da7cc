"""Real peers are stopped for seconds and go on: what they have done is in the update."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from swarmnet.runtime.joining.starting import start_run
from tests.processes.running import Command, Machine, counted_by, parameters_of, tiny_run
from tests.swarm.harness import relative_difference, replay

pytestmark = pytest.mark.processes
ROUNDS, NUM_MICROBATCHES = 60, 8
STALLED = (1, 0)
"""In this order: of stage 1, which the others call, and of stage 0, which calls. Many more, in
other orders and at other moments: `tests/swarm/pipeline/test_stalls.py`."""
MAX_STALL_S, LONGER_S = 6.0, 1.5
"""Who is stopped goes on so much later than it was suspected, or after this time."""
SEED = 5


@pytest.mark.long  # in virtual time: tests/swarm/pipeline/test_stalls.py
def test_who_stalls_for_seconds_loses_no_sample(running: Machine) -> None:
    rng = random.Random(SEED)
    path = tiny_run(running.folder, rounds=ROUNDS)
    spec = start_run(path).spec
    peers = running.start_swarm(path, [("--stage", stage) for stage in "101"], together=True)
    running.until_all_are_in(peers, 2)
    for i in STALLED:
        time.sleep(rng.uniform(0.0, 0.5))  # so that it happens anywhere in a round
        _stall(peers[i], peers)
    running.until_round(peers[0], ROUNDS)
    running.until(
        lambda: all(len(counted_by(peers).get(r, ())) >= NUM_MICROBATCHES for r in range(ROUNDS))
    )
    model = asyncio.run(parameters_of(spec, [peer.address for peer in peers]))
    lost = [event for peer in peers for event in peer.events("samples_lost")]
    trainer = replay(spec, counted_by(peers), ROUNDS)
    assert relative_difference(model, trainer.state_dict()) < 1e-4, (lost, running.describe())
    assert not lost


def _stall(peer: Command, peers: list[Command]) -> None:
    def taken_for_dead() -> int:
        return sum(e["peer_id"] == peer.peer_id for p in peers for e in p.events("peer_lost"))

    before, end = taken_for_dead(), time.monotonic() + MAX_STALL_S
    peer.process.send_signal(signal.SIGSTOP)
    while taken_for_dead() == before and time.monotonic() < end - LONGER_S:
        time.sleep(0.05)
    time.sleep(LONGER_S)
    peer.process.send_signal(signal.SIGCONT)
