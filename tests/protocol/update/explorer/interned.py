"""The worlds of a scenario as integers: what may happen in one, and which ones come of it.

A world is packed of the number of what each peer is (`Local`), the number of the multiset of
messages under way, and the number of the rest (`Rest`). What an event does to a peer is computed
once for each number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, MemberStatus
from swarmnet.protocol.update.shard_state import IS_OVER, ShardState
from swarmnet.protocol.update.shard_update import ShardUpdate
from tests.protocol.update.explorer.small_world import (
    FALSE_SUM,
    Actor,
    Local,
    Message,
    Outcome,
    Scenario,
    attempt_of,
    ballot_of,
    denial,
    false_ballot,
    is_settled,
    question_of,
    settle,
    start,
)

K = TypeVar("K", bound=Hashable)
BITS = 24
MASK = (1 << BITS) - 1
GONE = 0
"""The number of every peer that has crashed."""
NOBODY = -1
LIVES_ON = MemberStatus(declared=0)
"""What is known of the liar."""
WAYS_TO_LIE = ("agrees", "denies", "names", "tells")


class Numbers(Generic[K]):
    """Gives things numbers."""

    def __init__(self) -> None:
        self.of: dict[K, int] = {}
        self.all: list[K] = []

    def number(self, thing: K) -> int:
        found = self.of.get(thing)
        if found is None:
            found = self.of[thing] = len(self.all)
            if found > MASK:
                raise OverflowError("more than fits into a world")
            self.all.append(thing)
        return found


class Rest(NamedTuple):
    """Faults that may still come, and what they have led to."""

    crashes: int
    drops: int
    suspicions: int
    deadlines: int
    failures: int
    strays: int
    lies: int
    hangs: bool
    stops: bool
    hung: bool = False
    stopped: int = -1
    """The index of the peer whose process is stopped."""
    is_decided: bool = False
    """A primary has given a result out: all its backups that lived had it."""
    is_parted: bool = False
    """There are two results, of peers that were parted from each other."""


class Interned:
    """The moves of one scenario. Each is given as the world that it leads to."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.peers = scenario.peers
        n = self.size = len(scenario.peers)
        self.shifts = [BITS * i for i in range(n)]
        self.at_messages, self.at_rest = BITS * n, BITS * (n + 1)
        self.all_peers = (1 << self.at_messages) - 1
        self.locals: Numbers[Any] = Numbers()
        self.machines: list[ShardUpdate | None] = []
        self.statuses: Numbers[MemberStatus | None] = Numbers()
        self.messages: Numbers[Message] = Numbers()
        self.bags: Numbers[tuple[int, ...]] = Numbers()
        self.sent: Numbers[tuple[int, ...]] = Numbers()
        self.rests: Numbers[Rest] = Numbers()
        self.classes: Numbers[Any] = Numbers()
        # by number of a peer
        self.own: list[int] = []
        self.seen: list[tuple[int, ...]] = []
        self.is_over: list[bool] = []
        self.is_settled: list[bool] = []
        """Nothing depends on what it takes others for."""
        self.class_of: list[int] = []
        self.under_way: list[tuple[tuple[str, Outcome], ...] | None] = []
        # by number of a message
        self.source: list[int] = []
        self.target: list[int] = []
        self.is_heard: list[bool] = []
        self.is_failure: list[bool] = []
        """Of a call, at its caller."""
        self.loss: list[int] = []
        # by number of a bag
        self.deliveries: list[tuple[tuple[int, int], ...] | None] = []
        self.outcomes: dict[int, Outcome] = {}
        self.news: dict[tuple[int, int, int], Outcome] = {}
        self.known_news: dict[int, tuple[list[Outcome], list[Outcome]]] = {}
        self.results: dict[tuple[int, ...], tuple[int, int]] = {}
        self.mixed: dict[tuple[int, ...], int] = {}
        self.held: dict[int, tuple[int, ...]] = {}
        self.crashed: dict[int, int] = {}
        self.fewer: dict[tuple[Rest, str], int] = {}
        self.first = self.begin()

    # ---- numbers --------------------------------------------------------------------------------

    def begin(self) -> int:
        gone = MemberStatus(life=DEAD)
        self.dead = self.status(None if self.scenario.returns else gone)
        self.locals.number(None)
        self.machines.append(None)
        self.own.append(self.dead)
        self.seen.append(())
        self.is_over.append(False)
        self.is_settled.append(False)
        self.class_of.append(self.classes.number("gone"))
        self.under_way.append(())
        self.nothing = self.sent.number(())
        s = self.scenario
        rest = Rest(
            s.crashes,
            s.drops,
            s.suspicions,
            s.deadlines,
            s.failures,
            s.strays,
            s.lies,
            bool(s.hangs),
            bool(s.stops),
        )
        actors = start(s)
        numbers = [GONE if a.me == s.liar else self.freeze(a) for a in actors]
        sent = tuple(self.message(m) for a in actors for m in a.sent)
        bag = self.mix(self.bag(()), self.sent.number(sent), numbers)
        return self.pack(numbers, bag, self.rests.number(rest))

    def pack(self, numbers: list[int], bag: int, rest: int) -> int:
        world = rest
        for number in (bag, *reversed(numbers)):
            world = world << BITS | number
        return world

    def unpack(self, world: int) -> list[int]:
        return [world >> shift & MASK for shift in self.shifts]

    def status(self, status: MemberStatus | None) -> int:
        return self.statuses.number(status)

    def is_dead(self, status: int) -> bool:
        found = self.statuses.all[status]
        return found is None or found.life == DEAD

    def is_waited_for(self, status: int) -> bool:
        found = self.statuses.all[status]
        return found is not None and found.is_waited_for

    def told_in(self, numbers: list[int], rest: Rest) -> list[int]:
        """What others can know of each peer."""
        told = [self.own[number] for number in numbers]
        if self.scenario.liar:
            told[-1] = self.status(LIVES_ON)
        if rest.stopped >= 0:
            told[rest.stopped] = self.dead
        return told

    def freeze(self, actor: Actor) -> int:
        if self.scenario.reduced and not has_new_result(actor):
            settle(actor)
        local = actor.local()
        number = self.locals.number(local)
        if number == len(self.own):
            u = actor.machine.shard
            self.machines.append(actor.machine)
            self.own.append(self.status(actor.own))
            self.seen.append(tuple([self.status(s) for s in local.seen]))
            self.is_over.append(u.state in IS_OVER)
            self.is_settled.append(self.scenario.reduced and is_settled(u))
            self.class_of.append(self.classes.number(self.class_for(local, u)))
            self.under_way.append(None)
        return number

    def class_for(self, local: Local, u: ShardState) -> Any:
        """All that matters for `is_void`."""
        if not self.scenario.reduced:
            return ("live", None, local.open_call)
        if is_settled(u):
            return "over"
        return ("live", (u.ballot, u.count), local.open_call)

    def actor(self, number: int) -> Actor:
        machine = self.machines[number]
        assert machine is not None
        return Actor(self.scenario, self.locals.all[number], machine)

    def outcome(self, actor: Actor) -> Outcome:
        local = self.freeze(actor)
        sent = self.sent.number(tuple(self.message(m) for m in actor.sent))
        return Outcome(local, sent, has_new_result(actor))

    def message(self, message: Message) -> int:
        number = self.messages.number(message)
        if number == len(self.source):
            peers = self.peers
            self.source.append(peers.index(message.source))
            self.target.append(peers.index(message.target))
            is_failure = isinstance(message.event, on.PushFailed | on.MirrorFailed)
            is_cut = {message.source, message.target} == set(self.scenario.cut)
            self.is_failure.append(is_failure)
            self.is_heard.append(not is_failure and not is_cut)
            self.loss.append(0)
            self.loss[number] = self.nothing if is_failure else self.failure_of(message)
        return number

    def failure_of(self, message: Message) -> int:
        """A call that is lost, or whose answer is, ends with an error at its caller."""
        caller, kind, target = message.call[:3]
        if kind == "ask":
            return self.nothing
        event: on.Event = on.PushFailed(target)
        if kind == "mirror":
            event = on.MirrorFailed(target, attempt_of(message.call))
        return self.sent.number((self.message(Message(True, message.call, target, caller, event)),))

    def bag(self, messages: tuple[int, ...]) -> int:
        number = self.bags.number(messages)
        if number == len(self.deliveries):
            self.deliveries.append(None)
        return number

    def deliveries_of(self, bag: int) -> tuple[tuple[int, int], ...]:
        """Each message of a bag, with the bag that is left without it."""
        found = self.deliveries[bag]
        if found is None:
            messages = self.bags.all[bag]
            found = self.deliveries[bag] = tuple(
                (m, self.bag(messages[:i] + messages[i + 1 :]))
                for i, m in enumerate(messages)
                if not i or messages[i - 1] != m
            )
        return found

    def mix(self, bag: int, sent: int, numbers: list[int]) -> int:
        """The bag with what was sent, without what is void."""
        key = (bag, sent, *[self.class_of[number] for number in numbers])
        found = self.mixed.get(key)
        if found is not None:
            return found
        kept: list[int] = []
        todo = [*self.bags.all[bag], *self.sent.all[sent]]
        while todo:
            m = todo.pop()
            message = self.messages.all[m]
            if message.target == self.scenario.liar:
                todo += () if message.is_reply else (self.lie_to(message),)
                continue
            is_question = not message.is_reply and message.call[1] == "ask"
            if self.is_lost(message, numbers):
                todo += self.sent.all[self.loss[m]]
            elif not self.is_void(message, numbers) and not (is_question and m in kept):
                kept.append(m)
        found = self.mixed[key] = self.bag(tuple(sorted(kept)))
        return found

    def lie_to(self, message: Message) -> int:
        """What the liar answers to a call, at once."""
        caller, kind, liar = message.call[:3]
        answer: Any = on.PushFailed(liar)
        own, how = false_ballot(liar), self.way_to_lie(message)
        if how == "tells" and kind in ("ask", "push"):
            answer = on.ResultCame(liar, (own, FALSE_SUM), ballot_of(message.call), own)
        elif how == "denies":
            answer = denial(liar, own, message.call)
        elif how == "names":
            number = crc32(f"{message.call}".encode()) % (self.size - 1)
            named = own._replace(primary=self.peers[number])
            answer = denial(liar, named, message.call)
        elif kind == "ask":
            is_final, count = question_of(message.call)
            answer = on.Agreed(liar, message.event.ballot, is_final, count)
        elif kind == "mirror":
            answer = on.Confirmed(liar, attempt_of(message.call))
        return self.message(Message(True, message.call, liar, caller, answer))

    def way_to_lie(self, message: Message) -> str:
        scenario = self.scenario
        if scenario.varies:
            return WAYS_TO_LIE[crc32(f"{message}".encode()) % len(WAYS_TO_LIE)]
        return "tells" if scenario.tells else "denies" if scenario.denies else "agrees"

    def is_lost(self, message: Message, numbers: list[int]) -> bool:
        """A call that cannot come. It fails at once: nobody but its caller could see when, and the
        answer may be delivered late."""
        if message.is_reply:
            return False
        is_cut = {message.source, message.target} == set(self.scenario.cut)
        return is_cut or numbers[self.peers.index(message.target)] == GONE

    def is_void(self, message: Message, numbers: list[int]) -> bool:
        """An answer that is ignored whenever it comes: its caller has crashed, has a result, or has
        given the call up; or it is about a lower ballot than that of the caller, who leads by a
        higher one than ever before if it leads again; or promises have been counted anew. That it
        shows its sender to live is what news do at any time too."""
        caller = numbers[self.peers.index(message.call[0])]
        found = self.classes.all[self.class_of[caller]]
        if not message.is_reply:
            return self.is_asked_anew(message, found)
        if found in ("gone", "over"):
            return True
        _, promise, open_call = found
        if message.call[1] == "push":
            return bool(message.call != open_call)
        if promise is None or message.call[1] != "ask" or isinstance(message.event, on.ResultCame):
            return False
        asked, count = ballot_of(message.call), question_of(message.call)[1]
        return bool(asked < promise[0] or count < promise[1])

    def is_asked_anew(self, message: Message, caller: Any) -> bool:
        """An announcement that has been made once more since, since promises are counted anew."""
        if message.call[1] != "ask" or caller in ("gone", "over") or caller[1] is None:
            return False
        ballot, count = caller[1]
        is_same = ballot_of(message.call) == ballot
        return is_same and bool(question_of(message.call)[1] < count)


def has_new_result(actor: Actor) -> bool:
    """Its group is not known yet."""
    return actor.result is not None and not actor.group
