"""One that takes over: by an announcement, a push, a step to be copied, the answer to a question,
or a false result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from swarmnet.methods.update import BALLOT, BallotReply, BallotRequest, ShardReply
from swarmnet.protocol.update import shard_rules
from swarmnet.protocol.update.roster import Ballot
from swarmnet.protocol.update.shard_state import ShardState
from swarmnet.swarm.calls import call
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import ANSWER_S, answers_of, take_over, usurpers
from tests.hostile.drawing import false_gradient
from tests.hostile.trial import OPEN_PART, trial
from tests.swarm.handlers import handler_of
from tests.swarm.harness import SIZES, Swarm

FALSE_STEP = Array("float32", (SIZES.shard_parameters,), false_gradient(random.Random(0)))


def led_by(swarm: Swarm, own: str) -> set[int]:
    """The shards of which one is the primary by the records."""
    exchanges = swarm.members[own].peer.exchanges
    assert exchanges is not None
    shards = range(SIZES.num_shards)
    rosters = {j: exchanges.ownership.roster(exchanges.current, j) for j in shards}
    return {j for j, roster in rosters.items() if roster.ballot.primary == own}


LIAR = "peer-7"


async def member(attacker: Attacker, swarm: Swarm) -> None:
    """One that does all its work, and is proven everywhere, and would lead besides."""
    transport: Any = swarm.members[LIAR].peer.transport
    stage = swarm.members[LIAR].peer.gossip.own.stage
    honest, false = handler_of(transport, BALLOT.name), answers_of(LIAR)[BALLOT.name]

    async def vote(request: Request) -> Message[Any]:
        if not request.message.body.is_final:
            return await honest(request)
        return Message(false(request.message.body))

    def not_led() -> list[int]:
        """It is the primary of others anyway."""
        return sorted(set(range(SIZES.num_shards)) - led_by(swarm, LIAR))

    transport.handle(BALLOT.name, vote)
    try:
        await take_over(transport, swarm, stage, not_led, FALSE_STEP)
    finally:
        transport.handle(BALLOT.name, honest)


def is_barred(swarm: Swarm, peer_id: str) -> bool:
    """Anybody has barred it."""
    of = swarm.members.values()
    return any(member.peer.dispatcher.conclusions.is_barred(peer_id) for member in of)


@contextmanager
def promises_to(liars: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ballot]]:
    """The ballots of these that an honest replica went by, and left another primary for."""
    found: list[Ballot] = []
    go_by = shard_rules.go_by

    def noted(u: ShardState, ballot: Ballot) -> None:
        if u.me not in liars and ballot.primary in liars and u.ballot.primary not in liars:
            found.append(ballot)
        go_by(u, ballot)

    monkeypatch.setattr(shard_rules, "go_by", noted)
    yield found


def same_parameters(swarm: Swarm, attacker: Attacker) -> None:
    """One that is barred for what it never shows contributes no more: its samples are lost."""
    totals = ("samples_lost",) * (not is_barred(swarm, LIAR))
    for total in (*totals, "slots_doubled", "diverged", "stage_restarted", "shard_reset"):
        assert not swarm.total(total), total
    known: dict[tuple[int, int], bytes] = {}
    for name, of in swarm.members.items():
        own = of.peer.gossip.own
        assert known.setdefault((own.stage, own.round), own.digests) == own.digests, name


@pytest.mark.parametrize("num_names", [1, 4])
def test_strangers_take_over_from_no_primary_that_lives(
    num_names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    liars = tuple(f"zz-{i}" for i in range(num_names))
    with promises_to(liars, monkeypatch) as taken:
        pace = trial(
            usurpers(num_names, SIZES.num_shards, FALSE_STEP), during_s=8.0, look=same_parameters
        )
    print(pace, len(taken))
    assert not taken
    assert pace.held(), pace


def test_a_member_takes_over_from_no_primary_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with promises_to((LIAR,), monkeypatch) as taken:
        pace = trial(member, during_s=8.0, look=same_parameters)
    print(pace, len(taken))
    assert not taken
    assert pace.held(), pace


def denies(swarm: Swarm, dead: str) -> None:
    """The liar says whenever it is asked that this one leads, as if it lived."""
    peer = swarm.members[LIAR].peer

    async def vote(request: Request) -> Message[Any]:
        num = len(request.message.body.shards)
        return Message(BallotReply((1,) * num, (dead,) * num))

    transport: Any = peer.transport
    transport.handle(BALLOT.name, vote)


async def until_one_dies(
    attacker: Attacker, swarm: Swarm, before: Callable[[Swarm, str], None] = lambda swarm, who: None
) -> str:
    """Of the other members of the liar's stage the one that leads most, in an exchange. `before`:
    what is done as soon as it is known which."""
    stages = swarm.stages()
    mates = [name for name in stages if stages[name] == stages[LIAR] and name != LIAR]
    victim = max(mates, key=lambda name: len(led_by(swarm, name)))
    assert led_by(swarm, victim)
    before(swarm, victim)
    own = swarm.members[victim].peer.gossip.own
    while own.declared[0] < own.round:  # it has not closed the round
        await asyncio.sleep(0.001)
        own = swarm.members[victim].peer.gossip.own
    attacker.victims.remove(victim)
    swarm.kill(victim)
    return victim


def test_whoever_says_that_a_dead_primary_lives_holds_up_one_round() -> None:
    """It dies in an exchange; the liar is one of the three others of its stage. All wait for as
    long as a primary that lives may take, once."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        await until_one_dies(attacker, swarm, denies)

    pace = trial(attack, during_s=70.0)
    print(pace)
    assert pace.after >= OPEN_PART * pace.before, pace


ANNOUNCES_S = 1.0


def test_no_member_takes_over_from_a_dead_primary_out_of_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of its stage wait for the next in order."""
    out_of_turn: list[Ballot] = []
    go_by = shard_rules.go_by

    def noted(u: ShardState, ballot: Ballot) -> None:
        is_turn = LIAR in (u.successor(), u.ballot.primary)
        if u.me != LIAR == ballot.primary and not is_turn:
            out_of_turn.append(ballot)
        go_by(u, ballot)

    monkeypatch.setattr(shard_rules, "go_by", noted)

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        transport: Any = swarm.members[LIAR].peer.transport
        stage, tasks = swarm.stages()[LIAR], set[asyncio.Task[Any]]()
        await until_one_dies(attacker, swarm)
        try:
            end = asyncio.get_running_loop().time() + ANNOUNCES_S
            while asyncio.get_running_loop().time() < end:
                r = max(swarm.rounds())
                mine = led_by(swarm, LIAR)
                for j in set(range(SIZES.num_shards)) - mine:
                    said = Message(BallotRequest(r, stage, (j,), (5,), is_final=True))
                    for mate in [p for p, s in swarm.stages().items() if s == stage and p != LIAR]:
                        asked = call(transport, mate, BALLOT, said, timeout_s=ANSWER_S)
                        tasks.add(asyncio.get_running_loop().create_task(asked))
                await asyncio.sleep(0.005)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            attacker.victims.remove(LIAR)
            swarm.kill(LIAR)

    pace = trial(attack, during_s=20.0)
    print(pace, len(out_of_turn))
    assert not out_of_turn
    assert pace.after >= OPEN_PART * pace.before, pace


# ---- results that are told ----------------------------------------------------------------------

FALSE_RESULT = Array("float32", (SIZES.shard_parameters,), false_gradient(random.Random(1)))


@contextmanager
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The honest replicas that took a false result."""
    found: list[str] = []
    end_with = shard_rules.end_with

    def noted(u: ShardState, *, is_own: bool) -> None:
        values = None if u.result is None else u.result.values
        if u.me != LIAR and values is not None and values.data == FALSE_RESULT.data:
            found.append(u.me)
        end_with(u, is_own=is_own)

    monkeypatch.setattr(shard_rules, "end_with", noted)
    yield found


async def tells(request: Request[Any]) -> Message[Any]:
    """To every question."""
    asked = request.message.body
    num, r = len(asked.shards), asked.round + 1
    body = BallotReply(
        asked.terms, (request.remote,) * num, tuple(range(num)), (ShardReply(r, True),) * num
    )
    return Message(body, (FALSE_RESULT,) * num)


def test_no_result_is_what_one_says_that_is_asked_for_its_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does all its work besides, and announces takeovers: so all are asked again and again."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        transport: Any = swarm.members[LIAR].peer.transport
        stage = swarm.members[LIAR].peer.gossip.own.stage
        honest = handler_of(transport, BALLOT.name)
        transport.handle(BALLOT.name, tells)

        def not_led() -> list[int]:
            return sorted(set(range(SIZES.num_shards)) - led_by(swarm, LIAR))

        try:
            await take_over(transport, swarm, stage, not_led, FALSE_STEP)
        finally:
            transport.handle(BALLOT.name, honest)

    with taken(monkeypatch) as found:
        pace = trial(attack, during_s=8.0)
    print(pace, len(found))
    assert not found
    assert pace.held(), pace
