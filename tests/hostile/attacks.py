"""Attacks by one machine that can be made on any swarm: one in virtual time, and real processes.

Each is made of an `Attacker`, which has the names, and of what anybody can see of the swarm
(`Seen`). It runs until it is cancelled, or ends by itself: what it has left behind stays."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, product
from typing import Any, Protocol

from xxhash import xxh3_64_digest

from swarmnet.errors import Redirect
from swarmnet.methods.contact import BANDWIDTH, PING, BandwidthRequest
from swarmnet.methods.method import MAX_PROBE_BYTES
from swarmnet.methods.microbatch import (
    ADMIT,
    COMMIT,
    EVALUATE,
    INFER,
    STEP,
    AdmitReply,
    Commit,
    InferRequest,
    StepProgress,
    StepRequest,
)
from swarmnet.methods.records import (
    GOSSIP,
    RECORDS,
    GossipRequest,
    Records,
    SignedRecord,
    Suspicion,
)
from swarmnet.methods.state import (
    FETCH_PARAMETERS,
    RUN_FILE,
    SAVED,
    SAVED_SHARD,
    FetchReply,
    FetchRequest,
    FileRequest,
    SavedReply,
    SavedRequest,
    SavedRound,
)
from swarmnet.methods.update import (
    BALLOT,
    MIRROR,
    NORM,
    REDUCE,
    REDUCE_TIED,
    BallotReply,
    BallotRequest,
    MirrorRequest,
    ReduceRequest,
    TiedSum,
)
from swarmnet.protocol.membership.records import (
    ACTIVE,
    DIGEST_BYTES,
    JOINING,
    MAX_VOUCHES,
    OBSERVING,
    Restorable,
    RoundCount,
)
from swarmnet.protocol.membership.reputation import name_of
from swarmnet.protocol.slots import SlotSet, all_slots, flight_id, slot_of
from swarmnet.swarm.calls import call
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.hostile.attacker import Attacker, CanSign, Name, NamedSigner, norm_said

OFTEN_S, EVERY_S, SELDOM_S = 0.05, 0.2, 1.0
"""Between two records of a liar: of one that keeps up with each round, of a few names, of many."""
SPARE = 5
"""Rounds by which one is ahead."""
NO_STAGE, LAST_STAGE = 5, 1
AGREES_ROUNDS = 5
MANY = 200
"""Names."""
NUM_SLOTS = 8
"""Of a round of the swarms that are attacked."""
MICROBATCH = 4
"""Samples."""
CALLS_EVERY_S, ANSWER_S = 0.1, 1.0


class Seen(Protocol):
    """What anybody can see of a swarm."""

    def rounds(self) -> list[int]:
        """Of its peers."""

    def stages(self) -> dict[str, int]:
        """Of its peers that serve one, by peer id."""


Attack = Callable[[Attacker, Any], Awaitable[None]]
"""The second is a `Seen`; attacks of tests may look at more."""
Says = Callable[[int, int], dict[str, Any]]
"""What the liar of a number says while the honest ones are in this round."""


# ---- what records say ------------------------------------------------------------------------


def lies(
    num_names: int, says: Says, *, know: Callable[[Name, Any], None] = lambda name, swarm: None
) -> Attack:
    """Names that say this of themselves, and answer nothing but whether they live. `know(name,
    swarm)`: what happened before."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = [attacker.name() for _ in range(num_names)]
        for name in names:
            name.answer(PING, lambda body: None)
            know(name, swarm)
        while True:
            for number, name in enumerate(names):
                told = {"state": ACTIVE, "stage": 0, "addresses": name.where}
                told |= says(number, max(swarm.rounds()))
                name.tell(attacker.victims, name.record(**told))
            await asyncio.sleep(EVERY_S)

    return attack


def ahead(number: int, newest: int) -> dict[str, Any]:
    """It is in a round to come."""
    return {"round": newest + SPARE, "stage": number % 2}


def nowhere(number: int, newest: int) -> dict[str, Any]:
    """It is in a round to come, of a stage that no run of ours has."""
    return {"round": newest + SPARE, "stage": NO_STAGE}


def follows(number: int, newest: int) -> dict[str, Any]:
    """It takes part in all exchanges."""
    return {"round": newest, "declared": (newest, 0)}


def claims(num_shards: int, **of_itself: object) -> Attack:
    """A replica of stage 0 that follows the run's rounds, and says this besides. Its shards are
    nobody's."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
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
                "addresses": name.where,
                "digests": random.Random(newest).randbytes(DIGEST_BYTES * num_shards),
            }
            name.tell(attacker.victims, name.record(**(told | of_itself)))
            await asyncio.sleep(OFTEN_S)

    return attack


def turns(num_names: int, num_shards: int) -> Attack:
    """Names that have what the replicas of stage 0 have, as they say, and after some rounds
    something else, all the same."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = [attacker.name() for _ in range(num_names)]
        for name in names:
            name.answer(PING, lambda body: None)
        turns_at = max(swarm.rounds()) + AGREES_ROUNDS
        while True:
            heard = await names[0].hear(attacker.victims[0])
            theirs = [heard[p] for p in attacker.victims if p in heard and heard[p].stage == 0]
            newest = max(theirs, key=lambda r: r.round)
            digests = newest.digests
            if newest.round > turns_at:
                digests = random.Random(newest.round).randbytes(DIGEST_BYTES * num_shards)
            says = {"state": ACTIVE, "stage": 0, "round": newest.round, "digests": digests}
            for name in names:
                told = name.record(history=newest.history, addresses=name.where, **says)
                name.tell(attacker.victims, told)
            await asyncio.sleep(OFTEN_S)

    return attack


def offers_a_checkpoint(num_shards: int) -> Attack:
    """In each round anew, by its record."""
    offer = Restorable(1, 0, num_shards, b"\xff")
    return claims(num_shards, state=JOINING, restorable=(offer,))


def have_others(num_names: int, shards: Sequence[Sequence[Array]], rounds_ahead: int) -> Attack:
    """Names that serve all stages with the same parameters, which are nobody else's (`shards`: of
    each stage), vouch for each other, and give those parameters, and checkpoints, to whoever asks.
    `rounds_ahead`: of the others; their checkpoints are of later rounds still."""
    digests = [b"".join(xxh3_64_digest(shard.data) for shard in of_stage) for of_stage in shards]

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = [attacker.name(f"liar-{i}") for i in range(num_names)]
        heard = await names[0].hear(attacker.victims[0])
        history = max(record.history for record in heard.values())
        told: list[SignedRecord] = []

        def begun() -> int:
            return max(swarm.rounds()) + rounds_ahead

        def saved(body: SavedRequest) -> SavedReply:
            rounds = range(begun(), begun() + SPARE)
            found = [SavedRound(r, history, k, d) for r in rounds for k, d in enumerate(digests)]
            return SavedReply(tuple(found), dict.fromkeys(rounds, 1e-6), tuple(rounds))

        async def give(request: Request[FetchRequest]) -> Message[FetchReply]:
            fetch = request.message.body
            return Message(FetchReply(fetch.round, {}), (shards[fetch.stage][fetch.shard],))

        for name in names:
            name.answer(PING, lambda body: None)
            name.answer(GOSSIP, lambda body: Records(records=tuple(told)))
            name.answer(SAVED, saved)
            for method in (FETCH_PARAMETERS, SAVED_SHARD):
                name.transport.handle(method.name, give)
        while True:
            told.clear()
            for number, name in enumerate(names):
                friends = [names[(number + i) % num_names] for i in range(1, MAX_VOUCHES + 1)]
                vouches = {name_of(friend.peer_id) for friend in friends}
                said = name.record(
                    state=ACTIVE,
                    stage=number % len(shards),
                    round=begun(),
                    history=history,
                    digests=digests[number % len(shards)],
                    vouches=b"".join(sorted(vouches)),
                    addresses=name.where,
                )
                told.append(said)
            for name, said in zip(names, told, strict=True):
                name.tell(attacker.victims, said)
            await asyncio.sleep(EVERY_S if num_names < MANY else SELDOM_S)

    return attack


async def observe(attacker: Attacker, swarm: Seen) -> None:
    """Names that only exist."""
    for _ in range(MANY):
        name = attacker.name()
        name.tell(attacker.victims, name.record(state=OBSERVING, addresses=name.where))


async def feed(attacker: Attacker, swarm: Seen) -> None:
    """Names that launch everything and commit nothing."""
    names = [attacker.name() for _ in range(MANY)]
    for name in names:
        name.answer(PING, lambda body: None)
    while True:
        r = max(swarm.rounds())
        launched = RoundCount(r, SlotSet.of(all_slots(NUM_SLOTS)))
        for name in names:
            says = {"state": ACTIVE, "stage": 0, "round": r, "has_data": True}
            said = name.record(**says, addresses=name.where, counts=(launched,))
            name.tell(attacker.victims, said)
        await asyncio.sleep(SELDOM_S)


def counts(count: Callable[[int], RoundCount], num_names: int = 1) -> Attack:
    """Names that feed, by their own word: `count(round)` is what each says of the round that the
    honest ones are in, and of the next one."""

    def says(number: int, newest: int) -> dict[str, Any]:
        told = tuple(count(r) for r in (newest, newest + 1))
        return {"round": newest, "has_data": True, "counts": told}

    return lies(num_names, says)


# ---- microbatches ----------------------------------------------------------------------------


def takes_slots(arrays: Callable[[int, int, int], tuple[Array, ...]]) -> Attack:
    """It sends data of its own into all slots of each round, at both stages, and commits them.
    `arrays(stage, round, id)`: what it sends."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        name = attacker.name()

        async def take(target: str, stage: int, r: int, the_id: int) -> None:
            body = StepRequest(r, the_id, stage, name.peer_id, MICROBATCH)
            await name.call(target, STEP, body, arrays(stage, r, the_id), timeout_s=ANSWER_S)
            await name.call(target, COMMIT, Commit(r, (the_id,)), timeout_s=ANSWER_S)

        async with asyncio.TaskGroup() as calls:
            while True:
                r = max(swarm.rounds())
                for slot in range(NUM_SLOTS):
                    the_id = flight_id(name.run_id, name.peer_id, 1, r, slot, slot)
                    assert slot_of(the_id) == slot
                    for target, stage in swarm.stages().items():
                        calls.create_task(take(target, stage, r, the_id))
                await asyncio.sleep(CALLS_EVERY_S)

    return attack


def _answering(attacker: Attacker, num_names: int) -> list[Name]:
    """Names that answer whether they live."""
    names = [attacker.name() for _ in range(num_names)]
    for name in names:
        name.answer(PING, lambda body: None)
    return names


async def _announce(attacker: Attacker, swarm: Seen, names: list[Name], stage: int) -> None:
    """They say, for as long as this runs, that they serve a stage and are where all are."""
    while True:
        for name in names:
            says = {"state": ACTIVE, "stage": stage, "round": max(swarm.rounds())}
            name.tell(attacker.victims, name.record(addresses=name.where, **says))
        await asyncio.sleep(EVERY_S)


def feeds_as_others(num_names: int, arrays: Callable[[int, int, int], tuple[Array, ...]]) -> Attack:
    """Names that say they serve stage 0 bring microbatches of their own making into the next one,
    as those of honest feeders, and commit none. `arrays`: as of `takes_slots`."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = _answering(attacker, num_names)

        async def bring(name: Name, target: str, r: int, the_id: int, feeder: str) -> None:
            body = StepRequest(r, the_id, 1, feeder, MICROBATCH)
            await name.call(target, STEP, body, arrays(1, r, the_id), timeout_s=ANSWER_S)

        async with asyncio.TaskGroup() as calls:
            calls.create_task(_announce(attacker, swarm, names, 0))
            for n in count():
                r, slot = max(swarm.rounds()), n % NUM_SLOTS
                stages = swarm.stages()
                feeders = sorted(p for p, stage in stages.items() if stage == 0)
                for name, target in product(names, [p for p, k in stages.items() if k == 1]):
                    the_id = flight_id(name.run_id, name.peer_id, 1, r, n, slot)
                    feeder = feeders[n % len(feeders)]
                    calls.create_task(bring(name, target, r, the_id, feeder))
                await asyncio.sleep(CALLS_EVERY_S)

    return attack


def swallows(num_names: int, *, has: bool | None, tells: int) -> Attack:
    """Names that are the fastest by their own word take microbatches, and give nothing back. `has`:
    what they answer who asks whether they have it; None: nothing. `tells`: so often they say that
    it has come further."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        async def never(request: Request[StepRequest]) -> Message[None]:
            for n in range(tells):
                request.progress(Message(StepProgress(("beyond",) * min(n, 1))))
                await asyncio.sleep(0.5)
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        for _ in range(num_names):
            name = attacker.name()
            name.answer(PING, lambda body: None)
            if has is None:
                name.is_silent_to(ADMIT, INFER)
            else:
                name.answer(ADMIT, lambda body: AdmitReply(0.0, known=has))
            name.transport.handle(STEP.name, never)
        says: dict[str, Any] = {"state": ACTIVE, "samples_per_s": 1e6}
        while True:
            says["round"] = max(swarm.rounds())
            for number, name in enumerate(attacker.names):
                told = name.record(stage=number % 2, addresses=name.where, **says)
                name.tell(attacker.victims, told)
            await asyncio.sleep(EVERY_S)

    return attack


# ---- takeovers -------------------------------------------------------------------------------

TERMS = (1, 3, 40, 63)
"""The first one of a ballot with which an exchange begins."""
FAR = 61
"""The term of what it answers."""

Calls = Iterator[tuple[Any, Message[Any]]]


def takeovers(r: int, stage: int, own: str, shards: Sequence[int], step: Array) -> Calls:
    """All that may say that `own` takes over these shards in this exchange, or that the victim
    does. `step`: what is to be made."""
    for j in shards:
        for term in TERMS:
            yield BALLOT, Message(BallotRequest(r, stage, (j,), (term,), is_final=True))
            for primary in (own, ""):
                yield REDUCE, Message(ReduceRequest(r, stage, (j,), (0,), (term,), primary))
        yield MIRROR, Message(MirrorRequest(r, stage, j, 1.0, r, 64, 1.0, term=TERMS[-1]), (step,))


def answers_of(own: str) -> dict[str, Callable[[Any], Any]]:
    """What it tells who asks it: that it has taken over."""

    def redirect(body: Any) -> Any:
        raise Redirect("another ballot holds here", peer_id=own, term=FAR, shard=body.shards[0])

    def goes_by_its_own(body: BallotRequest) -> BallotReply:
        num = len(body.shards)
        return BallotReply((FAR,) * num, (own,) * num, (), ())

    return {REDUCE.name: redirect, BALLOT.name: goes_by_its_own}


async def take_over(
    transport: Any, swarm: Seen, stage: int, shards: Callable[[], Sequence[int]], step: Array
) -> None:
    """Tells all the time all that serve this stage."""
    own, tasks = transport.peer_id, set[asyncio.Task[Any]]()
    try:
        while True:
            r = max(0, *swarm.rounds())
            for victim, its_stage in swarm.stages().items():
                if victim == own or its_stage != stage:
                    continue
                for method, message in takeovers(r, stage, own, shards(), step):
                    said = call(transport, victim, method, message, timeout_s=ANSWER_S)
                    tasks.add(asyncio.get_running_loop().create_task(said))
            done = {task for task in tasks if task.done()}
            await asyncio.gather(*done, return_exceptions=True)
            tasks -= done
            await asyncio.sleep(CALLS_EVERY_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usurpers(num_names: int, num_shards: int, step: Array) -> Attack:
    """Records without any work, half of them in each stage, that take over all shards."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = [attacker.name(f"zz-{i}") for i in range(num_names)]
        for name in names:
            name.answer(PING, lambda body: None)
            for method in (REDUCE, BALLOT):
                name.answer(method, answers_of(name.peer_id)[method.name])

        async def announce(name: Name, stage: int) -> None:
            while True:
                says = {"state": ACTIVE, "stage": stage, "round": max(swarm.rounds())}
                name.tell(attacker.victims, name.record(addresses=name.where, **says))
                await asyncio.sleep(CALLS_EVERY_S)

        async with asyncio.TaskGroup() as tasks:
            for i, name in enumerate(names):
                tasks.create_task(announce(name, i % 2))
                work = take_over(name.transport, swarm, i % 2, lambda: range(num_shards), step)
                tasks.create_task(work)

    return attack


# ---- words for others ------------------------------------------------------------------------

HUGE = 1e60
SPEAKS_EVERY_S = 0.02


@asynccontextmanager
async def calling() -> AsyncIterator[Callable[..., None]]:
    """Starts calls that nobody waits for: `start(transport, target, method, message)`."""
    tasks = set[asyncio.Task[Any]]()

    def start(transport: Any, target: str, method: Any, message: Message[Any]) -> None:
        said = call(transport, target, method, message, timeout_s=ANSWER_S)
        tasks.add(asyncio.get_running_loop().create_task(said))

    try:
        yield start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def says_huge_norms(
    num_names: int, num_shards: int, member: Callable[[Any], tuple[Any, int]] | None = None
) -> Attack:
    """Of all shards of its stage, at all peers, before anybody else knows. `member(swarm)`: a
    transport that says so too, with its stage."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = [attacker.name() for _ in range(num_names)]
        for name in names:
            name.answer(PING, lambda body: None)
        speakers: list[tuple[Any, int, CanSign]] = [
            (name.transport, n % 2, name) for n, name in enumerate(names)
        ]
        if member is not None:
            transport, stage = member(swarm)
            speakers.append((transport, stage, NamedSigner(transport.peer_id)))
        shards, last = tuple(range(num_shards)), -1
        async with calling() as start:
            while True:
                r = max(swarm.rounds())
                for n, name in enumerate(names) if r > last else ():
                    says = {"state": ACTIVE, "round": r, "stage": n % 2}
                    name.tell(attacker.victims, name.record(addresses=name.where, **says))
                for transport, stage, signer in speakers if r > last else ():
                    who, huge = transport.peer_id, dict.fromkeys(shards, HUGE)
                    body = norm_said(signer, attacker.run_id, who, r, stage, huge)
                    for victim in attacker.victims:
                        if victim != transport.peer_id:
                            start(transport, victim, NORM, Message(body))
                last = r
                await asyncio.sleep(SPEAKS_EVERY_S)

    return attack


# ---- much of something -----------------------------------------------------------------------

LARGE_BYTES, NUM_LARGE = 48_896, 90
"""Of digests in a record, and how many such records make more than one message."""
AT_A_TIME = 100
"""Records of one message."""
AT_ONCE = 8
"""Calls."""


async def tell_much(attacker: Attacker, swarm: Seen) -> None:
    """Names that only exist, with records of 49 kB."""
    for n in range(NUM_LARGE):
        name = attacker.name()
        digests = random.Random(n).randbytes(LARGE_BYTES)
        said = name.record(state=OBSERVING, addresses=name.where, digests=digests)
        name.tell(attacker.victims, said)
        await asyncio.sleep(OFTEN_S)


async def sign_falsely(attacker: Attacker, swarm: Seen) -> None:
    """Records of all peers, under signatures that are none; a name that is banned rests while
    others speak."""
    names = [attacker.name() for _ in range(4)]
    while True:
        for name in names:
            records = [name.record(state=OBSERVING, version=n) for n in range(AT_A_TIME)]
            false = [replace(signed, signature=bytes(64)) for signed in records]
            name.tell(attacker.victims, *false)
            await asyncio.sleep(OFTEN_S)


Ask = Callable[[Name, str, int], tuple[Any, Message[Any]]]
"""A call of a name at this victim, while the honest ones are in this round."""


def asks(of: Ask, *, stage: int | None = None, num_names: int = 4, every_s: float = 0.0) -> Attack:
    """Names with a record, which answer whether they live, ask all peers for this as fast as they
    get answers. `stage`: their own, and those of another one are asked; None: all are. `every_s`:
    after an answer; in virtual time one takes none."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        names = _answering(attacker, num_names)

        async def ask(name: Name, target: str) -> None:
            while True:
                if stage is not None and swarm.stages().get(target, stage) == stage:
                    await asyncio.sleep(EVERY_S)
                    continue
                method, message = of(name, target, max(swarm.rounds()))
                await name.call(target, method, message.body, message.arrays, ANSWER_S)
                await asyncio.sleep(every_s)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_announce(attacker, swarm, names, stage or 0))
            for name, target in product(names, attacker.victims):
                tasks.create_task(ask(name, target))

    return attack


def past_the_end(sha256: str, size: int, every_s: float = 0.0) -> Attack:
    """Asks for what is behind the end of a file of the run, as anybody may."""
    wanted = Message(FileRequest(sha256, size))
    return asks(lambda name, target, r: (RUN_FILE, wanted), every_s=every_s)


def has_all_kept(every_s: float = 0.0) -> Attack:
    """Says that it fetches one round after the other, and asks what is saved."""
    return asks(lambda name, target, r: (SAVED, Message(SavedRequest(r))), every_s=every_s)


def infers(arrays: tuple[Array, ...], every_s: float = 0.0) -> Attack:
    """Has the stages compute for it, inputs with these targets."""
    wanted = Message(InferRequest(0, EVALUATE), arrays)
    return asks(lambda name, target, r: (INFER, wanted), every_s=every_s)


def pushes_tied(num_shards: int, step: Array, every_s: float = 0.0) -> Attack:
    """Says that it is the last stage's primary, and what the sum of the shards is that the first
    and the last stage both hold."""

    def push(name: Name, target: str, r: int) -> tuple[Any, Message[Any]]:
        shard, term = name.version % num_shards, TERMS[-1]
        body = TiedSum(r, LAST_STAGE, shard, 64, term, bytes(DIGEST_BYTES))
        return REDUCE_TIED, Message(body, (step,))

    return asks(push, stage=LAST_STAGE, every_s=every_s)


async def suspect_all(attacker: Attacker, swarm: Seen) -> None:
    """Says of each peer, to all, that it cannot be reached."""
    names = [attacker.name() for _ in range(4)]
    while True:
        for name in names:
            heard = await name.hear(attacker.victims[0])
            found = [Suspicion(p, heard[p].incarnation, heard[p].version) for p in sorted(heard)]
            for target in attacker.victims:
                told = Message(Records(suspicions=tuple(found)))
                name.transport.notify(target, RECORDS.name, told)
        await asyncio.sleep(OFTEN_S)


READS_EVERY_S = 0.5


async def reads_nothing(attacker: Attacker, swarm: Seen) -> None:
    """Asks all peers for as much as one answer may have, and hardly ever reads: its process sleeps.
    In virtual time that would stop everybody."""
    names = [attacker.name() for _ in range(4)]
    async with calling() as start:
        while True:
            for name, target in product(names, attacker.victims):
                wanted = Message(BandwidthRequest(MAX_PROBE_BYTES))
                start(name.transport, target, BANDWIDTH, wanted)
            await asyncio.sleep(OFTEN_S)
            stand_still()


def stand_still() -> None:
    """Nothing is read meanwhile."""
    time.sleep(READS_EVERY_S)


def asks_much(every_s: float = 0.0) -> Attack:
    """Asks all peers for all records, all the time, without a record of its own. `every_s`: as of
    `asks`."""

    async def attack(attacker: Attacker, swarm: Seen) -> None:
        name = attacker.name()

        async def ask(target: str) -> None:
            while True:
                await name.call(target, GOSSIP, GossipRequest({}))
                await asyncio.sleep(every_s)

        async with asyncio.TaskGroup() as tasks:
            for target in attacker.victims * AT_ONCE:
                tasks.create_task(ask(target))

    return attack
