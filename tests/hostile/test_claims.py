"""One that says of itself what is not so: rounds, samples, histories and losses."""

from __future__ import annotations

import asyncio
import random

from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, JOINING, Restorable
from tests.hostile.attacker import Attacker
from tests.hostile.trial import OPEN_PART, Attack, trial
from tests.swarm.harness import SIZES, Swarm

EVERY_S = 0.05
"""Between two records of the liar."""


def says(**of_itself: object) -> Attack:
    """A replica of stage 0 that follows the run's rounds, and says this besides."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        name = attacker.name("a-liar")
        while True:
            heard = await name.hear(attacker.victims[0])
            newest = max((r.round for r in heard.values()), default=0)
            history = max((r.history for r in heard.values()), default=0)
            told = {
                "state": ACTIVE,
                "stage": 0,
                "round": newest,
                "history": history,
                "addresses": ("/memory",),
                "digests": random.Random(newest).randbytes(DIGEST_BYTES * SIZES.num_shards),
            }
            name.tell(attacker.victims, name.record(**(told | of_itself)))
            await asyncio.sleep(EVERY_S)

    return attack


def test_samples_of_its_own_parameters_win_over_nobody() -> None:
    """As many as a round has, and more than it has; its id is the lowest."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert swarm.total("diverged") == swarm.total("stage_restarted") == 0

    for samples in (1 << 61, 32):
        pace = trial(says(samples=samples), during_s=5.0, look=untouched)
        assert pace.after >= OPEN_PART * pace.before, str(pace)


def test_nobody_waits_for_the_checkpoint_that_a_newcomer_says_it_brings() -> None:
    """In each round anew, by its record."""
    offer = Restorable(1, 0, SIZES.num_shards, b"\xff")
    pace = trial(says(state=JOINING, restorable=(offer,)), during_s=5.0)
    assert pace.during >= OPEN_PART * pace.before, str(pace)
