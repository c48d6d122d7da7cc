"""Real peers leave and move to another stage, and no sample is lost by it."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.runtime.joining.starting import start_run
from tests.processes.faults import may_begin
from tests.processes.running import (
    SPARING,
    Command,
    Machine,
    counted_by,
    has_state,
    parameters_of,
    tiny_run,
)
from tests.swarm.harness import relative_difference, replay

pytestmark = pytest.mark.processes
ROUNDS, GLOBAL_BATCH = 12, 128
LEAVING = 5
"""The round that does not begin before one has moved."""

IMPATIENT = """
from dataclasses import fields
from swarmnet.swarm.settings import WaitLimits
sooner = {"balance_every_s": 0.5, "move_cooldown_s": 1.0}
WaitLimits.__init__.__defaults__ = tuple(sooner.get(f.name, f.default) for f in fields(WaitLimits))
"""
"""A peer that looks twice a second, not every minute, whether it should move."""


def test_when_peers_leave_a_stage_another_moves_there_and_nothing_is_lost(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=ROUNDS)
    text = path.read_text().replace("num_hidden_layers = 3", "num_hidden_layers = 4")
    path.write_text(text.replace("global_batch = 32", f"global_batch = {GLOBAL_BATCH}"))
    spec = start_run(path).spec

    def start(name: str, *arguments: str) -> Command:
        before = IMPATIENT + running.hold(0, LEAVING)
        return running.start_peer(name, *arguments, "--debug", *SPARING, before=before)

    first = start("first", "--spec", str(path), "--stage", "0")
    running.until_ready(first)
    join = ("--join", first.address, "--data", str(running.folder / "text.txt"))
    placed = [start(f"placed-{i}", *join, "--stage", stage) for i, stage in enumerate("0001")]
    running.until(lambda: len(first.events("peer_joined")) >= 4)
    free = [start(f"free-{i}", *join) for i in range(2)]
    running.until_ready(*free)
    for peer in free:  # four replicas of stage 0 and one of stage 1 were there
        running.until(lambda p=peer: any("stage 1: serving" in line for line in p.errors()))

    for peer in (first, *placed, *free):
        running.until(lambda p=peer: has_state(p))
    may_begin(running.folder, 0)
    running.until_round(first, 2)

    leavers, stays = placed[:3], placed[3]
    for leaver in leavers:
        running.interrupt(leaver)
    assert [running.wait(leaver) for leaver in leavers] == [0, 0, 0], running.describe()
    running.until(
        lambda: any((m["from_stage"], m["to_stage"]) == (1, 0) for m in first.events("migrated"))
    )
    moved = first.events("migrated")
    assert {event["peer_id"] for event in moved} <= {peer.peer_id for peer in free}
    may_begin(running.folder, LEAVING)

    running.until_round(first, ROUNDS)
    peers, alive = [first, *placed, *free], [first, stays, *free]

    def is_all_on_record() -> bool:
        counted = counted_by(peers)
        return all(
            len(counted.get(r, ())) * spec.pipeline.microbatch >= GLOBAL_BATCH
            for r in range(ROUNDS)
        )

    running.until(is_all_on_record)
    model = asyncio.run(parameters_of(spec, [peer.address for peer in alive]))
    trainer = replay(spec, counted_by(peers), ROUNDS)
    lost = [event for peer in peers for event in peer.events("samples_lost")]
    assert relative_difference(model, trainer.state_dict()) < 1e-4, lost or running.describe()
    assert not lost
    assert not [event for peer in peers for event in peer.events("shard_reset")], running.describe()
