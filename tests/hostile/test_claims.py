"""One that says of itself what is not so: rounds, samples, histories and losses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, Record
from tests.hostile.attacker import Attacker, Name
from tests.hostile.trial import OPEN_PART, Attack, trial
from tests.swarm.harness import SIZES, Swarm

EVERY_S = 0.05
"""Between two records of the liar."""
DURING_S = 5.0

Says = Callable[[int, int], dict[str, object]]
"""What a liar says besides, by the round and the history of the run."""


async def follow(name: Name, victims: list[str], says: Says, stage: int = 0) -> None:
    """As a replica that is in the run's round, with parameters of its own."""
    while True:
        heard = [r for r in (await name.hear(victims[0])).values() if r.peer_id in victims]
        newest = max((r.round for r in heard), default=0)
        history = max((r.history for r in heard), default=0)
        digests = random.Random(newest).randbytes(DIGEST_BYTES * SIZES.num_shards)
        told: dict[str, object] = {
            "state": ACTIVE,
            "stage": stage,
            "round": newest,
            "history": history,
            "addresses": ("/memory",),
            "digests": digests,
        }
        name.tell(victims, name.record(**(told | says(newest, history))))
        await asyncio.sleep(EVERY_S)


def liar(says: Says) -> Attack:
    """One name, with the lowest id."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        await follow(attacker.name("a-liar"), attacker.victims, says)

    return attack


def own_records(swarm: Swarm) -> list[Record]:
    return [m.peer.gossip.own for m in swarm.members.values()]


@pytest.mark.parametrize("samples", [1 << 61, 32])
def test_samples_of_its_own_parameters_win_over_nobody(samples: int) -> None:
    """As many as a round has, and more than it has."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert swarm.total("diverged") == swarm.total("stage_restarted") == 0

    pace = trial(
        liar(lambda newest, history: {"samples": samples}), during_s=DURING_S, look=untouched
    )
    assert pace.after >= OPEN_PART * pace.before, str(pace)


@pytest.mark.parametrize("ahead", [1 << 61, 1])
def test_a_history_of_its_own_is_nobody_else_s(ahead: int) -> None:
    """It serves no stage, so that rounds go on meanwhile."""

    def says(newest: int, history: int) -> dict[str, object]:
        return {"history": history + ahead, "stage": -1, "digests": b""}

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        histories = {r.history for r in own_records(swarm)}
        assert len(histories) == 1
        assert histories <= {r.incarnation for r in own_records(swarm)}, "of a peer that began it"

    assert trial(liar(says), during_s=DURING_S, look=untouched).held()
