"""One that takes over from primaries which live: by an announcement, a push, a step to be copied,
or the answer to a question."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from swarmnet.errors import Redirect
from swarmnet.methods.contact import PING
from swarmnet.methods.update import (
    BALLOT,
    MIRROR,
    REDUCE,
    BallotReply,
    BallotRequest,
    MirrorRequest,
    ReduceRequest,
)
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.update import shard_rules
from swarmnet.protocol.update.roster import Ballot
from swarmnet.protocol.update.shard_state import ShardState
from swarmnet.swarm.calls import call
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.hostile.attacker import Attacker, Name
from tests.hostile.drawing import false_gradient
from tests.hostile.trial import Attack, trial
from tests.swarm.handlers import handler_of
from tests.swarm.harness import SIZES, Swarm

EVERY_S, ANSWER_S = 0.1, 1.0
TERMS = (1, 3, 40, 63)
"""The first one of a ballot with which an exchange begins."""
FAR = 61
"""The term of what it answers."""

Calls = Iterator[tuple[Any, Message[Any]]]


def takeovers(r: int, stage: int, own: str, spared: set[int], rng: random.Random) -> Calls:
    """All that may say that `own` takes over in this exchange, or that the victim does; but of
    these shards, of which it is the primary anyway."""
    step = (Array("float32", (SIZES.shard_parameters,), false_gradient(rng)),)
    for j in sorted(set(range(SIZES.num_shards)) - spared):
        for term in TERMS:
            yield BALLOT, Message(BallotRequest(r, stage, (j,), (term,), is_final=True))
            for primary in (own, ""):
                yield REDUCE, Message(ReduceRequest(r, stage, (j,), (0,), (term,), primary))
        yield MIRROR, Message(MirrorRequest(r, stage, j, 1.0, r, 64, 1.0, term=TERMS[-1]), step)


def answers_of(own: str) -> dict[str, Callable[[Any], Any]]:
    """What it tells who asks it: that it has taken over."""

    def redirect(body: Any) -> Any:
        raise Redirect("another ballot holds here", peer_id=own, term=FAR, shard=body.shards[0])

    def goes_by_its_own(body: BallotRequest) -> BallotReply:
        num = len(body.shards)
        return BallotReply((FAR,) * num, (own,) * num, (), ())

    return {REDUCE.name: redirect, BALLOT.name: goes_by_its_own}


def led_by(swarm: Swarm, own: str) -> set[int]:
    """The shards of which one is the primary by the records."""
    if own not in swarm.members:
        return set()
    exchanges = swarm.members[own].peer.exchanges
    assert exchanges is not None
    shards = range(SIZES.num_shards)
    rosters = {j: exchanges.ownership.roster(exchanges.current, j) for j in shards}
    return {j for j, roster in rosters.items() if roster.ballot.primary == own}


async def take_over(transport: Any, swarm: Swarm, stage: int) -> None:
    """Tells all the time all that serve this stage."""
    own, rng, tasks = transport.peer_id, random.Random(0), set[asyncio.Task[Any]]()
    try:
        while True:
            for victim, member in swarm.members.items():
                if victim == own or member.peer.gossip.own.stage != stage:
                    continue
                r = max(0, member.peer.gossip.own.round)
                for method, message in takeovers(r, stage, own, led_by(swarm, own), rng):
                    said = call(transport, victim, method, message, timeout_s=ANSWER_S)
                    tasks.add(asyncio.get_running_loop().create_task(said))
            done = {task for task in tasks if task.done()}
            await asyncio.gather(*done, return_exceptions=True)
            tasks -= done
            await asyncio.sleep(EVERY_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def strangers(num_names: int) -> Attack:
    """Records without any work, half of them in each stage."""

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        names = [attacker.name(f"zz-{i}") for i in range(num_names)]
        for name in names:
            name.answer(PING, lambda body: None)
            for method in (REDUCE, BALLOT):
                name.answer(method, answers_of(name.peer_id)[method.name])
        stages = {name.peer_id: i % 2 for i, name in enumerate(names)}

        async def announce(name: Name) -> None:
            while True:
                stage = stages[name.peer_id]
                says = {"state": ACTIVE, "stage": stage, "round": max(swarm.rounds())}
                name.tell(attacker.victims, name.record(addresses=("/memory",), **says))
                await asyncio.sleep(EVERY_S)

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(announce(name))
                tasks.create_task(take_over(name.transport, swarm, stages[name.peer_id]))

    return attack


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

    transport.handle(BALLOT.name, vote)
    try:
        await take_over(transport, swarm, stage)
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
        pace = trial(strangers(num_names), during_s=8.0, look=same_parameters)
    print(pace, len(taken))
    assert not taken
    assert pace.held(), pace


def test_a_member_takes_over_from_no_primary_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with promises_to((LIAR,), monkeypatch) as taken:
        pace = trial(member, during_s=8.0, look=same_parameters)
    print(pace, len(taken))
    assert not taken
    assert pace.held(), pace
