"""A few names, too few for a flood, that say of themselves what is not so: how far they are, that
they take part in the exchanges of a stage, what they have launched and committed, and what they
have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnet.methods.contact import PING
from swarmnet.methods.update import REDUCE, ReduceRequest
from swarmnet.protocol.membership.records import ACTIVE, RoundCount
from swarmnet.protocol.slots import SlotSet, all_slots
from swarmnet.swarm.replica.transitions import Transitions
from tests.hostile.attacker import Attacker, Name, NamedSigner
from tests.hostile.attacks import (
    NUM_SLOTS,
    Attack,
    Says,
    ahead,
    claims,
    counts,
    follows,
    lies,
    offers_a_checkpoint,
    turns,
)
from tests.hostile.trial import NUM_STAGES, OPEN_PART, trial
from tests.swarm.harness import SIZES, Swarm, in_virtual_time, tiny_spec


def lie(
    num_names: int, says: Says, *, has_worked: bool = False, found_loss: bool = False
) -> Attack:
    """`has_worked`: all honest peers have seen these names at work before; `found_loss`: have seen
    them find the loss of a microbatch."""

    def know(name: Name, swarm: Swarm) -> None:
        for member in swarm.members.values():
            if has_worked:
                member.peer.view.delivered(name.peer_id)
            if found_loss:
                member.peer.view.found_loss(name.peer_id)

    return lies(num_names, says, know=know)


def untouched(swarm: Swarm, attacker: Attacker) -> None:
    """Rounds were whole, and everybody is in the newest."""
    newest = max(swarm.rounds())
    assert all(r >= newest - 1 for r in swarm.rounds()), swarm.describe()
    for total in ("samples_lost", "slots_doubled", "diverged", "stage_restarted"):
        assert not swarm.total(total), total


@pytest.mark.parametrize("num_names", [1, 3, 8])
@pytest.mark.parametrize("says", [ahead, follows])
def test_a_few_names_end_no_round_and_hold_none_up(says: Says, num_names: int) -> None:
    pace = trial(lie(num_names, says), during_s=8.0, look=untouched)
    assert pace.held(), pace


def declares_nothing(number: int, newest: int) -> dict[str, Any]:
    """It may have something to give in each exchange."""
    return {"round": newest, "stage": number % 2}


def test_no_exchange_waits_for_who_has_found_a_loss_and_done_no_work() -> None:
    attack = lie(2, declares_nothing, found_loss=True)
    pace = trial(attack, during_s=8.0, look=untouched)
    assert pace.held(), pace


def test_one_contribution_ends_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has worked contributes, without a token, to each round that is open."""
    early = list[int]()
    heard_over = Transitions.heard_over

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 3)
        await swarm.until_round(10)
        attacker = Attacker(swarm.hub, swarm.spec.run_id, sorted(swarm.members), random.Random(0))
        name = attacker.name()
        name.answer(PING, lambda body: None)
        for member in swarm.members.values():
            member.peer.view.delivered(name.peer_id)

        def hears(transitions: Transitions, r: int) -> bool:
            replicas = [member.peer.replica for member in swarm.members.values()]
            if not any(replica is not None and replica.is_closed(r) for replica in replicas):
                early.append(r)
            return heard_over(transitions, r)

        monkeypatch.setattr(Transitions, "heard_over", hears)
        calls = set[asyncio.Task[Any]]()
        last = max(swarm.rounds()) + 20
        while max(swarm.rounds()) < last:
            r = max(swarm.rounds())
            says = {"state": ACTIVE, "stage": 0, "addresses": name.where, "round": r}
            name.tell(attacker.victims, name.record(**says))
            await asyncio.sleep(0.02)
            for victim, member in swarm.members.items():
                if member.peer.gossip.own.stage == 0:
                    push = ReduceRequest(r, 0, (0,), (0,), (0,))
                    calls.add(asyncio.create_task(name.call(victim, REDUCE, push, timeout_s=0.1)))
            await asyncio.sleep(0.02)
        attacker.leave()
        await asyncio.gather(*calls, return_exceptions=True)

    spec = tiny_spec(tmp_path, num_stages=2, rounds=100_000)
    in_virtual_time(scenario, spec, is_synthetic=True, signer=NamedSigner)
    assert not early


@pytest.mark.long
def test_one_that_has_worked_and_gives_nothing_is_waited_for_ever_less_often() -> None:
    """Each wait is as long as one for a contribution; it held up all, for as long as it lived."""
    attack = lie(1, follows, has_worked=True)
    pace = trial(attack, during_s=25.0, look=untouched)
    assert pace.during >= 0.15 * pace.before, pace
    assert pace.after >= OPEN_PART * pace.before, pace


# ---- what they have launched and committed -------------------------------------------------------

ALL = SlotSet.of(all_slots(NUM_SLOTS))
TOKENS = 64
"""About so many are in a slot."""
BATCH = 32
"""Samples of a round."""


def holds_one(r: int) -> RoundCount:
    """One slot, never committed."""
    return RoundCount(r, SlotSet.of(1))


def holds_all(r: int) -> RoundCount:
    """Nothing is left to launch."""
    return RoundCount(r, ALL)


def commits_nothing(r: int) -> RoundCount:
    """All is done, and there was nothing in it."""
    return RoundCount(r, ALL, committed=ALL, sealed=True)


def commits_all(r: int) -> RoundCount:
    """All is done, with as many tokens as there are."""
    return RoundCount(r, ALL, committed=ALL, sealed=True, tokens=TOKENS * NUM_SLOTS, loss_sum=1.0)


@pytest.mark.parametrize(
    ("count", "most_lost"),
    [(holds_one, 0), (holds_all, 0), (commits_nothing, 3), (commits_all, 3)],
)
def test_one_name_that_feeds_by_its_own_word_holds_up_little(
    count: Callable[[int], RoundCount], most_lost: int
) -> None:
    """A round that it says is done, and is not, has no samples: few have none. (When it goes it is
    a feeder that has died, as any.)"""
    computed: list[int] = []

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        try:
            await counts(count)(attacker, swarm)
        finally:
            computed.extend((swarm.total("samples_computed"), min(swarm.rounds())))

    def look(swarm: Swarm, attacker: Attacker) -> None:
        assert not swarm.total("slots_doubled")
        assert not swarm.total("diverged")
        samples, rounds = computed
        assert samples >= NUM_STAGES * BATCH * (rounds - 1 - most_lost), (samples, rounds)

    pace = trial(attack, during_s=30.0, look=look)
    assert pace.during >= OPEN_PART * pace.before, pace


def test_a_feeder_whose_microbatches_never_come_back_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes, exchanges and answers as all others do."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        first = min(name for name, stage in swarm.stages().items() if not stage)

        async def never(*of: Any) -> None:
            await loop.create_future()

        monkeypatch.setattr(swarm.members[first].peer.feeder, "_fly", never)

    pace = trial(attack, during_s=20.0)
    assert pace.during >= OPEN_PART * pace.before, pace


# ---- samples, histories and checkpoints ---------------------------------------------------------


def test_samples_of_its_own_parameters_win_over_nobody() -> None:
    """As many as a round has, and more than it has; its id is the lowest."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert swarm.total("diverged") == swarm.total("stage_restarted") == 0

    for samples in (1 << 61, 32):
        pace = trial(claims(SIZES.num_shards, samples=samples), during_s=5.0, look=untouched)
        assert pace.after >= OPEN_PART * pace.before, str(pace)


def test_many_names_with_the_same_parameters_win_over_nobody() -> None:
    """They are twice the replicas of the stage, as many as count without work, and were one with it
    before."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert swarm.total("diverged") == swarm.total("stage_restarted") == 0

    pace = trial(turns(8, SIZES.num_shards), during_s=6.0, look=untouched)
    print(pace)
    assert pace.held(), pace


def test_nobody_waits_for_the_checkpoint_that_a_newcomer_says_it_brings() -> None:
    pace = trial(offers_a_checkpoint(SIZES.num_shards), during_s=5.0)
    assert pace.during >= OPEN_PART * pace.before, str(pace)
