"""What a machine does with microbatches that are not its own, or with its place on their way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swarmnet.errors import SwarmnetError
from swarmnet.methods.contact import PING
from swarmnet.methods.microbatch import STEP, StepRequest
from swarmnet.protocol.slots import flight_id, slot_of
from swarmnet.simulation.stage import SyntheticData, activation
from swarmnet.swarm.calls import call
from swarmnet.swarm.pipeline.feeder import Journal
from swarmnet.wire import Array, Message
from tests.hostile.attacker import Attacker, NamedSigner
from tests.hostile.attacks import (
    ANSWER_S,
    MICROBATCH,
    NUM_SLOTS,
    feeds_as_others,
    swallows,
    takes_slots,
)
from tests.hostile.trial import trial
from tests.swarm.harness import SIZES, Swarm, in_virtual_time, tiny_spec


def only_honest(swarm: Swarm, attacker: Attacker) -> None:
    """All slots that count were counted by honest feeders, each once."""
    names = {name.peer_id for name in attacker.names}
    assert swarm.total("slots_doubled") == 0
    done = min(swarm.rounds())
    for r in range(done - 20, done - 2):
        slots = swarm.counted[r]
        assert sorted(slots) == list(range(NUM_SLOTS)), (r, slots)
        assert not names & {p for path in swarm.paths[r].values() for p in path}


def microbatch(stage: int, r: int, the_id: int) -> tuple[Array, Array]:
    """Inputs and targets, as a stage takes them."""
    batch = SyntheticData(MICROBATCH).microbatch([the_id])
    return (activation((r, the_id), SIZES) if stage else batch.inputs), batch.targets


def test_no_stranger_has_a_slot() -> None:
    """It sends its own data into all slots of each round, at both stages, and commits them."""

    def arrays(stage: int, r: int, the_id: int) -> tuple[Array, ...]:
        inputs = microbatch(stage, r, the_id)[0]
        return inputs, inputs

    pace = trial(takes_slots(arrays), look=only_honest)
    assert pace.held(), pace


def test_nobody_feeds_in_the_name_of_another(tmp_path: Path) -> None:
    """Neither a name with the record of a replica of the stage before, nor one that is proven."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=100_000)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(2)
        rng, members = random.Random(0), sorted(swarm.members)
        attacker = Attacker(swarm.hub, spec.run_id, members, rng)
        stranger = await attacker.joined(stage=0)
        stranger.answer(PING, lambda body: None)
        stages = swarm.stages()
        feeder, member = (p for p in members if stages[p] == 0)
        num_tried = 0
        transports = [stranger.transport, swarm.members[member].peer.transport]
        for transport, target in itertools.product(transports, members):
            if stages[target] == 0:
                continue
            r = max(swarm.rounds())
            the_id = flight_id(spec.run_id, feeder, 1, r, num_tried, num_tried % 2)
            body = StepRequest(r, the_id, 1, feeder, MICROBATCH, launch=stranger.sign(b"mine"))
            step = Message(body, microbatch(1, r, the_id))
            with pytest.raises(SwarmnetError):
                await call(transport, target, STEP, step, timeout_s=ANSWER_S)
            victim = swarm.members[target].peer
            assert swarm.hub.transports[target].has_banned(transport.peer_id)
            assert victim.steps.serving.of(1).ledger.get((r, the_id)) is None
            num_tried += 1
        assert num_tried == 4
        await swarm.until_round(max(swarm.rounds()) + 2)

    in_virtual_time(scenario, spec, is_synthetic=True, signer=NamedSigner)


def test_microbatches_in_the_names_of_others_hold_nobody_up() -> None:
    pace = trial(feeds_as_others(2, microbatch), before_s=4, during_s=4, after_s=3)
    assert pace.held(), pace


@pytest.mark.parametrize(("num_names", "has", "tells"), [(2, True, 100), (6, None, 0)])
def test_who_swallows_microbatches_gets_few(num_names: int, has: bool | None, tells: int) -> None:
    pace = trial(swallows(num_names, has=has, tells=tells), look=only_honest)
    assert pace.held(), pace


@dataclass
class Ids(Journal):
    """Of the microbatches that a feeder has counted, with their rounds."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def round_counted(self, round_index: int, paths: Mapping[int, tuple[str, ...]]) -> None:
        self.found += [(round_index, the_id) for the_id in paths]


def test_nobody_knows_the_id_of_a_microbatch_before_it_comes(tmp_path: Path) -> None:
    """Otherwise a member could bring something else under that id, and be joined by its feeder."""
    ids = Ids()
    spec = tiny_spec(tmp_path, num_stages=1, rounds=4)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", journal=ids)
        await swarm.until_round(4)

    in_virtual_time(scenario, spec, is_synthetic=True, signer=NamedSigner)
    assert len(ids.found) > 8
    for r, the_id in ids.found:
        numbers = range(len(ids.found))
        known = (flight_id(spec.run_id, "peer-0", 1, r, n, slot_of(the_id)) for n in numbers)
        assert the_id not in set(known)
