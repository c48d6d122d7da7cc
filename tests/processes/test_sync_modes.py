"""Sync modes in separate processes over libp2p."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.runtime.joining.starting import start_run
from tests.oracles.reference_modes import DelayedReference
from tests.processes.running import Machine, counted_by, parameters_of, tiny_run
from tests.swarm.harness import relative_difference

pytestmark = pytest.mark.processes
ROUNDS, NUM_MICROBATCHES = 12, 8


def test_processes_make_the_updates_of_one_process_that_is_one_update_late(
    running: Machine,
) -> None:
    path = tiny_run(running.folder, rounds=ROUNDS, sync_mode="delayed")
    spec = start_run(path).spec
    peers = running.start_swarm(path, [("--stage", stage) for stage in "101"], together=True)
    running.until_round(peers[0], ROUNDS)
    running.until(
        lambda: all(len(counted_by(peers).get(r, ())) >= NUM_MICROBATCHES for r in range(ROUNDS))
    )
    model = asyncio.run(parameters_of(spec, [peer.address for peer in peers]))
    oracle = DelayedReference(spec)
    counted = counted_by(peers)
    for r in range(ROUNDS):
        oracle.step(r, sorted(counted[r]))
    oracle.finish()
    kinds = ("samples_lost", "retracted", "diverged", "shard_reset")
    told = [(peer.name, event) for kind in kinds for peer in peers for event in peer.events(kind)]
    said = [(peer.name, line) for peer in peers for line in peer.errors()]
    assert relative_difference(model, oracle.trainer.state_dict()) < 1e-4, (told, said)
    for peer in peers:
        running.interrupt(peer)
    assert [running.wait(peer) for peer in peers] == [0, 0, 0, 0], running.describe()


def test_gossip_between_processes_keeps_replicas_close_and_says_how_close(
    running: Machine,
) -> None:
    """No group: replicas of a stage are never equal, and the distance is told and shown."""
    path = tiny_run(running.folder, rounds=4 * ROUNDS, sync_mode="gossip")
    peers = running.start_swarm(path, [("--stage", stage) for stage in "101"], together=True)
    running.until(lambda: any(e.get("spread", 0.0) > 0 for e in peers[0].events("round")))
    running.until_round(peers[0], 4 * ROUNDS)
    rounds = peers[0].events("round")
    spreads = [e["spread"] for e in rounds if e.get("spread")]
    assert 0 < max(spreads) < 0.2, spreads
    first, last = rounds[0]["loss"], rounds[-1]["loss"]
    assert last < first - 0.2, (first, last)
    for peer in peers:
        running.interrupt(peer)
    assert [running.wait(peer) for peer in peers] == [0, 0, 0, 0], running.describe()
