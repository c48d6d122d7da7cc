"""One that does all its work, is proven everywhere, and tells false results and norms of the shards
that it leads, or does not do one thing in exchanges."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from swarmnet.errors import NotReady
from swarmnet.methods.update import (
    MIRROR,
    NORM,
    REDUCE,
    SUMS,
    ReduceReply,
    ShardReply,
)
from swarmnet.methods.update_proof import SIGNED_AS, Proof, Stepped
from swarmnet.protocol.update import shard_rules
from swarmnet.protocol.update.shard_state import ShardState
from swarmnet.swarm.pipeline.receipts import hash_of
from swarmnet.swarm.update.ownership import ExchangeMembers
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message, pack
from tests.hostile.attacker import Attacker, NamedSigner, norm_said
from tests.hostile.attacks import HUGE
from tests.hostile.drawing import false_gradient
from tests.hostile.test_takeovers import LIAR, led_by
from tests.hostile.trial import OPEN_PART, trial
from tests.swarm.handlers import Go, handler_of, intercept_calls
from tests.swarm.harness import SIZES, Swarm

FALSE_RESULT = Array("float32", (SIZES.shard_parameters,), false_gradient(random.Random(2)))
DURING_S = 16.0
UPDATES = 50


@dataclass
class Seen:
    """What came of it."""

    begun: int = 0
    """The round in which the lies began."""
    taken: int = 0
    """Times that an honest replica took the false result."""
    barred_in: dict[str, int] | None = None
    """By honest peer that has barred the liar, in which round."""

    def look(self, swarm: Swarm) -> None:
        """At who has barred whom by now."""
        self.barred_in = self.barred_in or {}
        for name, member in swarm.members.items():
            is_barred = member.peer.dispatcher.conclusions.is_barred
            assert name == LIAR or not any(is_barred(p) for p in swarm.members if p != LIAR)
            if name != LIAR and is_barred(LIAR):
                self.barred_in.setdefault(name, member.peer.gossip.own.round)


Lie = Callable[[Any, Swarm], None]
"""Makes a liar of the peer."""


def signs(own: Any, asked: Any, shard: int, total: bytes) -> Proof:
    where = own.run_id, own.peer_id, own.incarnation, asked.round, asked.stage, shard, 1
    statement = pack(Stepped(*where, total, hash_of(FALSE_RESULT)))
    return Proof(statement, NamedSigner(own.peer_id).sign(SIGNED_AS + statement))


def tells_at_once(total: bytes | None, *, has_norm: bool = False) -> Lie:
    """A result of its own, before there is any sum; collectors hear nothing, unless `has_norm`.
    `total`: of which sum it is, as it signs; None: it signs nothing."""

    def lie(peer: Any, swarm: Swarm) -> None:
        reduce = handler_of(peer.transport, REDUCE.name)

        async def tell(request: Request[Any]) -> Message[Any]:
            asked, own = request.message.body, peer.gossip.own
            if not led_by(swarm, LIAR).issuperset(asked.shards):
                return await reduce(request)
            proofs = [None if total is None else signs(own, asked, j, total) for j in asked.shards]
            told = tuple(ShardReply(asked.round + 1, True, 64, proof=proof) for proof in proofs)
            return Message(ReduceReply(told), (FALSE_RESULT,) * len(told))

        async def keep(peer_id: str, message: Message[Any], go: Go) -> Message[Any]:
            if message.body.shards and not has_norm:
                await asyncio.get_running_loop().create_future()
            return await go(message)

        peer.transport.handle(REDUCE.name, tell)
        intercept_calls(peer.transport, NORM.name, keep)

    return lie


def tells_huge_norms(peer: Any, swarm: Swarm) -> None:
    """Of what it leads, to all collectors; else it is honest."""

    async def huge(peer_id: str, message: Message[Any], go: Go) -> Message[Any]:
        said = message.body
        if said.shards:
            sums = dict.fromkeys(said.shards, HUGE)
            signer, run_id = NamedSigner(LIAR), peer.gossip.own.run_id
            message = Message(norm_said(signer, run_id, LIAR, said.round, said.stage, sums))
        return await go(message)

    intercept_calls(peer.transport, NORM.name, huge)


def sums_to_huge_norms(peer: Any, swarm: Swarm) -> None:
    """Of what it leads, to all collectors and in what it signs of its sums."""
    work = peer.exchanges.work
    total = work.total

    async def false(*arguments: Any, **options: Any) -> Any:
        found = await total(*arguments, **options)
        return None if found is None else replace(found, squares=HUGE)

    work.total = false


LIES: dict[str, Lie] = {
    "a result with no sum": tells_at_once(b""),
    "a result of a sum that is not shown": tells_at_once(bytes(range(32))),
    "a result that nothing is signed of": tells_at_once(None),
    "a false result, and a true norm": tells_at_once(b"", has_norm=True),
    "another norm than that of its sums": tells_huge_norms,
    "a false norm of its sums": sums_to_huge_norms,
}
LONG = ("a result of a sum that is not shown", "a false result, and a true norm")


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=pytest.mark.long if lie in LONG else ()) for lie in LIES]
)
def test_a_member_that_tells_what_cannot_be_is_found(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those that share its stage, and nobody else is. Rounds go on with honest numbers."""
    seen, end_with = Seen(), shard_rules.end_with

    def noted(u: ShardState, *, is_own: bool) -> None:
        values = None if u.result is None else u.result.values
        is_false = values is not None and values.data == FALSE_RESULT.data
        seen.taken += u.me != LIAR and is_false
        end_with(u, is_own=is_own)

    monkeypatch.setattr(shard_rules, "end_with", noted)

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        attacker.victims.remove(LIAR)
        seen.begun = max(swarm.rounds())
        LIES[lie](swarm.members[LIAR].peer, swarm)
        while True:
            seen.look(swarm)
            await asyncio.sleep(0.1)

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        mates = [p for p, s in swarm.stages().items() if s == swarm.stages()[LIAR] and p != LIAR]
        assert seen.barred_in is not None
        assert seen.barred_in.keys() >= set(mates), seen
        assert max(seen.barred_in.values()) <= seen.begun + UPDATES, seen
        for total in ("norm_missed", "stage_restarted", "slots_doubled"):
            assert not swarm.total(total), total

    pace = trial(attack, during_s=DURING_S, look=untouched)
    print(pace, seen)
    assert not seen.taken
    assert pace.held(), pace


def test_one_that_lies_to_one_of_two_others_holds_their_stage_up_twice() -> None:
    """The other sees nothing of it, nor does a signature show it. The liar says that it never got
    what it was given, so all wait: each time rarer."""
    ends = list[float]()

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        liar, loop, stages = "peer-5", asyncio.get_running_loop(), swarm.stages()
        victim = min(p for p in stages if stages[p] == stages[liar] and p != liar)
        transport = swarm.members[liar].peer.transport
        reduce = handler_of(transport, REDUCE.name)

        async def tell(request: Request[Any]) -> Message[Any]:
            asked = request.message.body
            if request.remote != victim or not led_by(swarm, liar).issuperset(asked.shards):
                return await reduce(request)
            told = tuple(ShardReply(asked.round + 1, True, 64) for _ in asked.shards)
            return Message(ReduceReply(told), (FALSE_RESULT,) * len(told))

        transport.handle(REDUCE.name, tell)
        begun = min(swarm.rounds())
        while True:
            ends.extend([loop.time()] * (min(swarm.rounds()) - begun - len(ends)))
            await asyncio.sleep(0.02)

    pace = trial(attack, num_replicas=3, during_s=15.0)
    assert len(ends) > 8, ends
    rate = 6 / (ends[8] - ends[2])
    print(pace, rate)
    assert rate >= OPEN_PART * pace.before


# ---- what is not done ---------------------------------------------------------------------------


@dataclass
class Silence:
    """As long as it lasts, what is to be kept is kept; and done after it."""

    over: asyncio.Event

    def gives_nothing(self, transport: Any) -> None:
        """Its contributions do not leave it."""

        async def keep(peer_id: str, message: Message[Any], go: Go) -> Message[Any]:
            if message.arrays:
                await self.over.wait()
            return await go(message)

        intercept_calls(transport, REDUCE.name, keep)

    def tells_no_result(self, transport: Any) -> None:
        """It has it, and makes the step with its backup."""
        reduce = handler_of(transport, REDUCE.name)

        async def keep(request: Request[Any]) -> Message[Any]:
            reply = await reduce(request)
            await self.over.wait()
            return reply

        transport.handle(REDUCE.name, keep)

    def copies_nothing(self, transport: Any) -> None:
        """As backup: neither sums nor steps are answered."""
        self._answers_none(transport, MIRROR.name)
        self._answers_none(transport, SUMS.name)

    def tells_no_norm(self, transport: Any) -> None:
        """Of its own shards, and as collector."""

        async def keep(peer_id: str, message: Message[Any], go: Go) -> Message[Any]:
            if message.body.shards and not self.over.is_set():
                raise NotReady("it is not told")
            return await go(message)

        intercept_calls(transport, NORM.name, keep)
        self._answers_none(transport, NORM.name)

    def _answers_none(self, transport: Any, name: str) -> None:
        answer = handler_of(transport, name)

        async def keep(request: Request[Any]) -> Message[Any]:
            await self.over.wait()
            return await answer(request)

        transport.handle(name, keep)


SLOW_S = 2.0
"""So long no round takes that is not held up."""
SILENCE_S = 30.0
SILENT: dict[str, tuple[Callable[[Silence, Any], None], int, int, int]] = {
    "contributions": (Silence.gives_nothing, 4, 2, 2),
    "contributions, of two": (Silence.gives_nothing, 2, 2, 1),
    "copies": (Silence.copies_nothing, 4, 2, 1),
    "copies, of three": (Silence.copies_nothing, 3, 2, 1),
    "results": (Silence.tells_no_result, 4, 2, 2),
    "results, of three": (Silence.tells_no_result, 3, 2, 2),
    "results, of two": (Silence.tells_no_result, 2, 2, 0),
    "results, of one owner": (Silence.tells_no_result, 4, 1, 2),
    "norms": (Silence.tells_no_norm, 4, 2, 1),
}
"""What is done, by one of how many of a stage, with how many owners of a shard, and how many rounds
that holds up."""
SILENT_LONG = ("contributions", "copies, of three", "results, of three")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind in SILENT_LONG else ()) for kind in SILENT],
)
def test_one_that_does_not_do_its_part_holds_few_rounds_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds it by what it waits for itself. No honest one is found, and nobody is barred. (Who
    speaks for another one beside it, where a norm is late, takes nothing from it.)"""
    begin, num_replicas, replication, most_slow = SILENT[kind]
    liar = f"peer-{2 * num_replicas - 1}"
    found, ends = set[tuple[str, str]](), [0.0]
    for name in ("hung", "absent", "owing", "uncopied"):
        find = getattr(ExchangeMembers, f"found_{name}")

        def noted(members: ExchangeMembers, peer_id: str, number: int, find: Any = find) -> None:
            found.add((members.gossip.own.peer_id, peer_id))
            find(members, peer_id, number)

        monkeypatch.setattr(ExchangeMembers, f"found_{name}", noted)

    def rounds(swarm: Swarm) -> int:
        return min(m.peer.gossip.own.round for name, m in swarm.members.items() if name != liar)

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        attacker.victims.remove(liar)
        silence = Silence(asyncio.Event())
        begin(silence, swarm.members[liar].peer.transport)
        began, begun = loop.time(), rounds(swarm)
        try:
            while True:
                ends.extend([loop.time() - began] * (rounds(swarm) - begun + 1 - len(ends)))
                await asyncio.sleep(0.02)
        finally:
            silence.over.set()

    def expects(exchanges: Any, r: int) -> None:
        """All that it does again, it is expected to do."""
        assert exchanges.members.copies(liar, r)
        assert exchanges.members.statuses(r)[liar].declared != 0
        passed_over = exchanges.members.are_passed_over(exchanges.replica.index, r)
        assert not passed_over

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        known: dict[tuple[int, int], bytes] = {}
        for name, member in swarm.members.items():
            own = member.peer.gossip.own
            assert known.setdefault((own.stage, own.round), own.digests) == own.digests, name
            is_barred = member.peer.dispatcher.conclusions.is_barred
            assert not any(map(is_barred, swarm.members)), name
            if own.stage == swarm.stages()[liar] and name != liar:
                expects(member.peer.exchanges, own.round)
        for total in ("norm_missed", "stage_restarted", "diverged"):
            assert not swarm.total(total), total
        # The state that nobody else has begins anew.
        assert bool(swarm.total("shard_reset")) == (replication == 1)

    pace = trial(
        attack,
        num_replicas=num_replicas,
        during_s=SILENCE_S,
        sync={"replication": replication},
        look=untouched,
    )
    took = [b - a for a, b in itertools.pairwise(ends)]
    slow = [s for s in took if s > SLOW_S]
    rate = (len(took) - len(slow)) / (SILENCE_S - sum(slow))
    print(pace, len(took), slow, rate)
    assert len(slow) <= most_slow
    assert min(rate, pace.after) >= OPEN_PART * pace.before
    assert {theirs for own, theirs in found if own != liar} <= {liar}
