"""A few names, too few for a flood, that say of themselves what is not so: how far they are, and
that they take part in the exchanges of a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmnet.methods.contact import PING
from swarmnet.protocol.membership.records import ACTIVE
from tests.hostile.attacker import Attacker
from tests.hostile.trial import OPEN_PART, Attack, trial
from tests.swarm.harness import Swarm

WHERE = ("/memory",)
EVERY_S = 0.2
"""Between two records of a liar."""
SPARE = 5
"""Rounds by which one is ahead."""

Says = Callable[[int, int], dict[str, Any]]
"""What the liar of a number says while the honest ones are in this round."""


def lies(num_names: int, says: Says, *, has_worked: bool = False) -> Attack:
    """Names that say this of themselves, and answer nothing but whether they live. `has_worked`:
    all honest peers have seen them at work before."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        names = [attacker.name() for _ in range(num_names)]
        for name in names:
            name.answer(PING, lambda body: None)
            if has_worked:
                for member in swarm.members.values():
                    member.peer.view.delivered(name.peer_id)
        while True:
            for number, name in enumerate(names):
                told = {"state": ACTIVE, "stage": 0, "addresses": WHERE}
                told |= says(number, max(swarm.rounds()))
                name.tell(attacker.victims, name.record(**told))
            await asyncio.sleep(EVERY_S)

    return attack


def ahead(number: int, newest: int) -> dict[str, Any]:
    """It is in a round to come."""
    return {"round": newest + SPARE, "stage": number % 2}


def follows(number: int, newest: int) -> dict[str, Any]:
    """It takes part in all exchanges."""
    return {"round": newest, "declared": (newest, 0)}


def untouched(swarm: Swarm, attacker: Attacker) -> None:
    """Rounds were whole, and everybody is in the newest."""
    newest = max(swarm.rounds())
    assert all(r >= newest - 1 for r in swarm.rounds()), swarm.describe()
    for total in ("samples_lost", "slots_doubled", "diverged", "stage_restarted"):
        assert not swarm.total(total), total


@pytest.mark.parametrize("num_names", [1, 3, 8])
@pytest.mark.parametrize("says", [ahead, follows])
def test_a_few_names_end_no_round_and_hold_none_up(says: Says, num_names: int) -> None:
    pace = trial(lies(num_names, says), during_s=8.0, look=untouched)
    assert pace.held(), pace


@pytest.mark.long
def test_one_that_has_worked_and_gives_nothing_is_waited_for_ever_less_often() -> None:
    """Each wait is as long as one for a contribution; it held up all, for as long as it lived."""
    attack = lies(1, follows, has_worked=True)
    pace = trial(attack, during_s=25.0, look=untouched)
    assert pace.during >= 0.15 * pace.before, pace
    assert pace.after >= OPEN_PART * pace.before, pace
