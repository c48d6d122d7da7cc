"""One machine with many names, which are free: what they say changes nothing, and honest newcomers
are found among them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from swarmnet.simulation.stage import SyntheticData
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import (
    CALLS_EVERY_S,
    MICROBATCH,
    Attack,
    ahead,
    asks_much,
    feed,
    has_all_kept,
    infers,
    lies,
    nowhere,
    observe,
    past_the_end,
    pushes_tied,
    sign_falsely,
    suspect_all,
    swallows,
    tell_much,
    usurpers,
)
from tests.hostile.test_takeovers import FALSE_STEP
from tests.hostile.trial import CLOSED_PART, NUM_REPLICAS, NUM_STAGES, OPEN_PART, trial
from tests.swarm.harness import SIZES, Swarm


@pytest.mark.parametrize("attack", [observe, feed])
def test_many_names_are_worth_nothing(attack: Attack) -> None:
    async def attack_and_join(attacker: Attacker, swarm: Swarm) -> None:
        work = asyncio.get_running_loop().create_task(attack(attacker, swarm))
        try:
            await asyncio.sleep(1.0)
            swarm.start("newcomer")
            await asyncio.get_running_loop().create_future()
        finally:
            work.cancel()

    def look(swarm: Swarm, attacker: Attacker) -> None:
        newest = max(swarm.rounds())
        assert all(r >= newest - 2 for r in swarm.rounds()), swarm.describe()
        now = asyncio.get_running_loop().time()
        for member in swarm.members.values():
            counted = {r.peer_id for r in member.peer.view.counted(now)}
            assert counted >= set(swarm.members), member.peer_id
        assert len(swarm.members) == NUM_STAGES * NUM_REPLICAS + 1
        assert not swarm.total("samples_lost")

    pace = trial(attack_and_join, look=look)
    assert pace.held(), pace


STRANGERS = {
    "a round to come": lies(20, ahead),
    "microbatches swallowed": swallows(4, has=None, tells=0),
    "takeovers": usurpers(4, SIZES.num_shards, FALSE_STEP),
}


@pytest.mark.parametrize("said", STRANGERS)
def test_a_closed_run_does_not_even_slow_down(said: str) -> None:
    """Nobody knows of those that have no invite, whatever they say."""

    def nobody_knows_them(swarm: Swarm, attacker: Attacker) -> None:
        names = {name.peer_id for name in attacker.names}
        assert names
        assert not swarm.total("samples_lost")
        for member in swarm.members.values():
            known = {r.peer_id for r in member.peer.view.records()}
            assert known == set(swarm.members), member.peer_id

    pace = trial(STRANGERS[said], is_closed=True, during_s=8.0, look=nobody_knows_them)
    print(pace)
    assert pace.held(CLOSED_PART), pace


def infers_much(attacker: Attacker, swarm: Swarm) -> Awaitable[None]:
    batch = SyntheticData(MICROBATCH).microbatch([0])
    return infers((batch.inputs, batch.targets), CALLS_EVERY_S)(attacker, swarm)


MUCH: dict[str, Attack] = {
    "rounds of no stage": lies(3, nowhere),
    "files past their end": past_the_end("0" * 64, 1, CALLS_EVERY_S),
    "what is saved": has_all_kept(CALLS_EVERY_S),
    "passes": infers_much,
    "false sums of tied shards": pushes_tied(SIZES.num_shards, FALSE_STEP, CALLS_EVERY_S),
    "suspicions": suspect_all,
    "all records": asks_much(CALLS_EVERY_S),
    "large records": tell_much,
    "false signatures": sign_falsely,
}
"""What costs peers work to answer; `attacks.reads_nothing` would make virtual time stand still."""


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("said", MUCH)
def test_much_of_something_holds_nobody_up(said: str, is_closed: bool) -> None:
    def look(swarm: Swarm, attacker: Attacker) -> None:
        assert not swarm.total("samples_lost")
        assert not swarm.total("slots_doubled")

    pace = trial(
        MUCH[said],
        num_replicas=2,
        is_closed=is_closed,
        before_s=4.0,
        during_s=4.0,
        after_s=3.0,
        look=look,
    )
    assert pace.held(CLOSED_PART if is_closed else OPEN_PART), pace
