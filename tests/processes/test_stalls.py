"""Real peers are stopped for seconds and go on: what they have done is in the update."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from swarmnet.runtime.joining.starting import start_run
from tests.every.stalled import send
from tests.processes.running import (
    SPARING,
    Command,
    Machine,
    children_of,
    counted_by,
    parameters_of,
    tiny_run,
)
from tests.swarm.harness import relative_difference, replay

pytestmark = pytest.mark.processes
ROUNDS, NUM_MICROBATCHES = 60, 8
STALLED = (1, 0)
"""In this order: of stage 1, which the others call, and of stage 0, which calls. Many more, in
other orders and at other moments: `tests/swarm/pipeline/test_stalls.py`."""
MAX_STALL_S, LONGER_S = 6.0, 1.5
"""Who is stopped goes on so much later than it was suspected, or after this time."""
SEED = 5
SLEEP_S = 40.0
"""Of a machine that sleeps: the others count it for gone long before it wakes, and go on."""


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("sleepers", "rounds"),
    [((1,), 250), ((0, 1, 2, 3), ROUNDS)],
    ids=["one machine", "all machines"],
)
def test_a_machine_that_sleeps_comes_back(
    running: Machine, sleepers: tuple[int, ...], rounds: int
) -> None:
    """With all of its processes. Nobody starts it again, and replicas of a stage have the same
    bits at the end."""
    path = tiny_run(running.folder, rounds=rounds)
    joiners = [("--stage", stage) for stage in "101"]
    peers = running.start_swarm(path, joiners, everywhere=SPARING, together=True)
    running.until_all_are_in(peers, 3)
    asleep = [peers[i] for i in sleepers]
    pids = [pid for peer in asleep for pid in (peer.pid, *children_of(peer.pid))]
    lost_before = [len(peer.events("peer_lost")) for peer in peers]
    send(pids, signal.SIGSTOP)
    time.sleep(SLEEP_S)
    send(pids, signal.SIGCONT)
    for peer in peers:
        running.until_round(peer, rounds)
    said = [[x for x in peer.errors() if "this machine stood still" in x] for peer in asleep]
    assert [len(lines) for lines in said] == [1] * len(asleep), said
    addresses = [peer.address for peer in peers]
    asyncio.run(parameters_of(start_run(path).spec, addresses))  # it compares replicas
    assert not [event for peer in peers for event in peer.events("diverged")]
    lost = sum(event["count"] for event in peers[0].events("samples_lost"))
    assert lost <= start_run(path).spec.pipeline.global_batch, "more than the open round"
    if len(asleep) == len(peers):
        assert lost_before == [len(peer.events("peer_lost")) for peer in peers], "nobody was away"
