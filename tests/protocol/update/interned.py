"""The worlds of a scenario as integers: what may happen in one, and which ones come of it.

A world is packed of the number of what each peer is (`Local`), the number of the multiset of
messages under way, and the number of the rest (`Rest`). What an event does to a peer is computed
once for each number."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, Standing
from swarmnet.protocol.update.shard_facts import DECIDED, IS_OVER, Facts
from swarmnet.protocol.update.shard_update import ShardUpdate
from tests.protocol.update.small_world import (
    FACTS,
    UNTOUCHED,
    Actor,
    Broken,
    Local,
    Message,
    Outcome,
    Scenario,
    is_settled,
    settle,
    start,
)

K = TypeVar("K", bound=Hashable)
BITS = 24
MASK = (1 << BITS) - 1
GONE = 0
"""The number of every peer that has crashed."""
NOBODY = -1


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
        self.locals: Numbers[Any] = Numbers()
        self.machines: list[ShardUpdate | None] = []
        self.standings: Numbers[Standing | None] = Numbers()
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
        self.loss: list[int] = []
        # by number of a bag
        self.deliveries: list[tuple[tuple[int, int], ...]] = []
        self.outcomes: dict[int, Outcome] = {}
        self.news: dict[tuple[int, int, int], Outcome] = {}
        self.mixed: dict[tuple[int, ...], int] = {}
        self.crashed: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.first = self.begin()

    # ---- numbers --------------------------------------------------------------------------------

    def begin(self) -> int:
        gone = Standing(life=DEAD)
        self.dead = self.standing(None if self.scenario.returns else gone)
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
        rest = Rest(s.crashes, s.drops, s.suspicions, s.deadlines, s.failures, s.strays)
        actors = start(s)
        numbers = [self.freeze(a) for a in actors]
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

    def standing(self, standing: Standing | None) -> int:
        return self.standings.number(standing)

    def freeze(self, actor: Actor) -> int:
        if self.scenario.reduced and not has_new_result(actor):
            settle(actor)
        local = actor.local()
        number = self.locals.number(local)
        if number == len(self.own):
            u = actor.machine.facts
            self.machines.append(actor.machine)
            self.own.append(self.standing(actor.own))
            self.seen.append(tuple([self.standing(s) for s in local.seen]))
            self.is_over.append(u.state in IS_OVER)
            self.is_settled.append(self.scenario.reduced and is_settled(u))
            self.class_of.append(self.classes.number(self.class_for(local, u)))
            self.under_way.append(None)
        return number

    def class_for(self, local: Local, u: Facts) -> Any:
        """All that matters for `is_void`."""
        if not self.scenario.reduced:
            return ("live", None, local.open_call)
        if is_settled(u):
            return "over"
        return ("live", u.ballot, local.open_call)

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
            self.is_heard.append(not is_failure and not is_cut)
            self.loss.append(0)
            self.loss[number] = self.nothing if is_failure else self.failure_of(message)
        return number

    def failure_of(self, message: Message) -> int:
        """A call that is lost, or whose answer is, ends with an error at its caller."""
        caller, kind, target = message.call[:3]
        if kind == "ask":
            return self.nothing
        event = on.MirrorFailed(target) if kind == "mirror" else on.PushFailed(target)
        return self.sent.number((self.message(Message(True, message.call, target, caller, event)),))

    def bag(self, messages: tuple[int, ...]) -> int:
        number = self.bags.number(messages)
        if number == len(self.deliveries):
            self.deliveries.append(())
            found = []
            for i, m in enumerate(messages):
                if not i or messages[i - 1] != m:
                    found.append((m, self.bag(messages[:i] + messages[i + 1 :])))
            self.deliveries[number] = tuple(found)
        return number

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
            is_question = not message.is_reply and message.call[1] == "ask"
            if self.is_lost(message, numbers):
                todo += self.sent.all[self.loss[m]]
            elif not self.is_void(message, numbers) and not (is_question and m in kept):
                kept.append(m)
        found = self.mixed[key] = self.bag(tuple(sorted(kept)))
        return found

    def is_lost(self, message: Message, numbers: list[int]) -> bool:
        """A call that cannot come. It fails at once: nobody but its caller could see when, and the
        answer may be delivered late."""
        if message.is_reply:
            return False
        is_cut = {message.source, message.target} == set(self.scenario.cut)
        return is_cut or numbers[self.peers.index(message.target)] == GONE

    def is_void(self, message: Message, numbers: list[int]) -> bool:
        """An answer that is ignored whenever it comes: its caller has crashed, has a result, or has
        given the call up; or it is a promise of a lower ballot than that of the caller, whose
        ballot never falls. That it shows its sender to live is what news do at any time too."""
        if not message.is_reply:
            return False
        found = self.classes.all[self.class_of[numbers[self.peers.index(message.target)]]]
        if found in ("gone", "over"):
            return True
        _, ballot, open_call = found
        if message.call[1] == "push":
            return bool(message.call != open_call)
        event = message.event
        return ballot is not None and isinstance(event, on.Agreed) and event.ballot < ballot

    # ---- moves ----------------------------------------------------------------------------------

    def after(
        self, world: int, numbers: list[int], bag: int, i: int, outcome: Outcome, rest: int = -1
    ) -> int:
        """The world in which peer `i` has changed so; `bag` is what is left of the messages."""
        local, sent, has_result = outcome
        before = numbers[i]
        if rest < 0:
            rest = world >> self.at_rest
        numbers[i] = local
        if has_result:
            told = self.rests.all[rest]
            local, told = self.take_result(numbers, i, told)
            numbers[i], rest = local, self.rests.number(told)
        if sent != self.nothing or self.class_of[before] != self.class_of[local]:
            key = (bag, sent, *[self.class_of[number] for number in numbers])
            mixed = self.mixed.get(key)
            bag = self.mix(bag, sent, numbers) if mixed is None else mixed
        found = rest
        found = found << BITS | bag
        for number in reversed(numbers):
            found = found << BITS | number
        numbers[i] = before
        return found

    def calm_moves(self, world: int) -> list[int]:
        """What happens without a fault."""
        numbers = self.unpack(world)
        bag = world >> self.at_messages & MASK
        found = []
        outcomes, own, target, source = self.outcomes, self.own, self.target, self.source
        for m, left in self.deliveries[bag]:
            i = target[m]
            local, heard = numbers[i], own[numbers[source[m]]]
            outcome = outcomes.get((local << BITS | m) << 8 | heard)
            if outcome is None:
                outcome = self.deliver(local, m, heard)
            if outcome.local != NOBODY:
                found.append(self.after(world, numbers, left, i, outcome))
        late: list[int] = []
        lazy = self.scenario.lazy
        for i, local in enumerate(numbers):
            for name, outcome in self.events_of(local):
                if name == "happen":
                    found.append(self.after(world, numbers, bag, i, outcome))
                elif name == "late" and not (lazy and found):
                    late.append(self.after(world, numbers, bag, i, outcome))
        self.add_news(world, numbers, bag, found, late)
        return found if found and lazy else found + late

    def add_news(
        self, world: int, numbers: list[int], bag: int, found: list[int], late: list[int]
    ) -> None:
        own = self.own
        for i, local in enumerate(numbers):
            if local == GONE or self.is_settled[local]:
                continue
            seen = self.seen[local]
            for k in range(self.size):
                told = own[numbers[k]]
                if k == i or seen[k] == told:
                    continue
                key = (local, k, told)
                outcome = self.news.get(key) or self.hear(key)
                if outcome.local == NOBODY:
                    continue
                is_urgent = self.is_dead(seen[k]) != self.is_dead(told)
                (found if is_urgent else late).append(self.after(world, numbers, bag, i, outcome))

    def is_dead(self, standing: int) -> bool:
        found = self.standings.all[standing]
        return found is None or found.life == DEAD

    def deliver(self, local: int, m: int, heard: int) -> Outcome:
        """`heard`: what the sender is; who is heard lives."""
        actor, message = self.actor(local), self.messages.all[m]
        index = self.source[m]
        is_back = self.is_dead(self.seen[local][index]) and not self.is_dead(heard)
        try:
            if is_back and self.is_heard[m]:
                actor.see(message.source, self.standings.all[heard])
            if message.call[1] == "pull":
                outcome = self.pull(actor, message)
            else:
                actor.receive(message)
                outcome = self.outcome(actor)
        except Broken as e:
            raise Broken(f"{e}\ndeliver {message}") from None
        self.outcomes[(local << BITS | m) << 8 | heard] = outcome
        return outcome

    def pull(self, actor: Actor, message: Message) -> Outcome:
        """Gossip averaging: the offer waits until this peer has closed the round, and is not to be
        had any more when it has left the meeting."""
        event = message.event
        if message.is_reply:
            actor.handle(event)
        elif actor.result is not None:
            actor.answer(message.call, on.PushFailed(actor.me))
        elif actor.own.declared is None:
            return Outcome(NOBODY, self.nothing, False)
        else:
            n = actor.tokens()
            ballot = replace_primary(actor, message.source)
            actor.answer(
                message.call, on.Pushed(None, actor.me, ballot, n, actor.me if n else None)
            )
            actor.under_way = [e for e in actor.under_way if e != on.Refused(message.source)]
            actor.handle(on.Confirmed(message.source))
        return self.outcome(actor)

    def hear(self, key: tuple[int, int, int]) -> Outcome:
        local, k, told = key
        standing = self.standings.all[told]
        is_cut = {self.peers[k], self.locals.all[local].me} == set(self.scenario.cut)
        if is_cut and standing is not None:
            standing = replace(standing, life=DEAD)
        outcome = Outcome(NOBODY, self.nothing, False)
        if self.locals.all[local].seen[k] != standing:
            actor = self.actor(local)
            actor.see(self.peers[k], standing)
            outcome = self.outcome(actor)
        self.news[key] = outcome
        return outcome

    def events_of(self, local: int) -> tuple[tuple[str, Outcome], ...]:
        """What is under way at a peer, and when it may come."""
        found = self.under_way[local]
        if found is None:
            events = list(dict.fromkeys(self.locals.all[local].under_way))
            found = tuple(pair for event in events for pair in self.happenings(local, event))
            self.under_way[local] = found
        return found

    def happenings(self, local: int, event: Any) -> list[tuple[str, Outcome]]:
        def happen(take: Callable[[Actor, Any], None] = Actor.happen) -> Outcome:
            actor = self.actor(local)
            try:
                take(actor, event)
            except Broken as e:
                raise Broken(f"{e}\nhappens at {actor.me}: {event}") from None
            return self.outcome(actor)

        if isinstance(event, on.DeadlinePassed):
            return [("late" if self.scenario.mute else "deadlines", happen())]
        if isinstance(event, on.Again | on.Refused):
            return [("late", happen())]
        found = [("happen", happen())]
        machine = self.machines[local]
        assert machine is not None
        if isinstance(event, on.Stepped) and machine.facts.copied_for is not None:
            found.append(("failures", happen(Actor.fail_step)))
        return found

    # ---- faults ---------------------------------------------------------------------------------

    def faults(self, world: int) -> list[int]:
        rest = self.rests.all[world >> self.at_rest]
        if not any(rest[:6]):
            return []
        numbers = self.unpack(world)
        bag = world >> self.at_messages & MASK
        found: list[int] = []
        if rest.drops:
            self.add_drops(world, numbers, bag, rest, found)
        if rest.crashes:
            for i, local in enumerate(numbers):
                if local != GONE:
                    found.append(self.crash(numbers, bag, i, rest))
        if rest.suspicions:
            self.add_suspicions(world, numbers, bag, rest, found)
        if rest.deadlines or rest.failures:
            for i, local in enumerate(numbers):
                for name, outcome in self.events_of(local):
                    if name in ("deadlines", "failures") and getattr(rest, name):
                        less = self.less(rest, name)
                        found.append(self.after(world, numbers, bag, i, outcome, less))
        if rest.strays:
            self.add_strays(world, numbers, bag, rest, found)
        return found

    def less(self, rest: Rest, name: str) -> int:
        return self.rests.number(rest._replace(**{name: getattr(rest, name) - 1}))

    def add_drops(
        self, world: int, numbers: list[int], bag: int, rest: Rest, found: list[int]
    ) -> None:
        less = self.less(rest, "drops")
        for m, left in self.deliveries[bag]:
            message = self.messages.all[m]
            if not isinstance(message.event, on.PushFailed | on.MirrorFailed):
                unchanged = Outcome(numbers[0], self.loss[m], False)
                found.append(self.after(world, numbers, left, 0, unchanged, less))
        for i, local in enumerate(numbers):
            for call in self.held_by(local):
                sent = self.failure_of(Message(True, call, self.peers[i], call[0], None))
                unchanged = Outcome(local, sent, False)
                found.append(self.after(world, numbers, bag, i, unchanged, less))

    def add_suspicions(
        self, world: int, numbers: list[int], bag: int, rest: Rest, found: list[int]
    ) -> None:
        less = self.less(rest, "suspicions")
        for i, local in enumerate(numbers):
            if local == GONE or self.is_settled[local]:
                continue
            for k, seen in enumerate(self.seen[local]):
                if k == i or numbers[k] == GONE or self.is_dead(seen):
                    continue
                key = (local, k, -1)
                outcome = self.news.get(key)
                if outcome is None:
                    actor = self.actor(local)
                    standing = actor.seen[k]
                    assert standing is not None
                    actor.see(self.peers[k], replace(standing, life=DEAD))
                    outcome = self.news[key] = self.outcome(actor)
                found.append(self.after(world, numbers, bag, i, outcome, less))

    def add_strays(
        self, world: int, numbers: list[int], bag: int, rest: Rest, found: list[int]
    ) -> None:
        """All others go on to the exchange after the next one."""
        if sum(local != GONE and not self.is_over[local] for local in numbers) != 1:
            return
        less = self.less(rest, "strays")
        for i, local in enumerate(numbers):
            if local != GONE and not self.is_over[local]:
                actor = self.actor(local)
                actor.handle(on.MovedOn())
                found.append(self.after(world, numbers, bag, i, self.outcome(actor), less))

    def held_by(self, local: int) -> list[tuple[Any, ...]]:
        """Calls that wait for an answer here. Their connections may break too."""
        machine = self.machines[local]
        if machine is None:
            return []
        calls: list[Any] = [call for _, call in machine.facts.calls]
        return [*calls, machine.facts.copied_for] if machine.facts.copied_for else calls

    def crash(self, numbers: list[int], bag: int, i: int, rest: Rest) -> int:
        less = self.less(rest, "crashes")
        local = numbers[i]
        sent: list[int] = []
        for call in self.held_by(local):
            lost = Message(True, call, self.peers[i], call[0], None)
            sent += self.sent.all[self.failure_of(lost)]
        numbers[i] = GONE
        bag = self.mix(bag, self.sent.number(tuple(sent)), numbers)
        found = self.pack(numbers, bag, less)
        numbers[i] = local
        return found

    # ---- invariants -----------------------------------------------------------------------------

    def has_result(self, local: int) -> bool:
        return local != GONE and self.locals.all[local].result is not None

    def reaches(self, numbers: list[int], i: int) -> frozenset[str]:
        """Live replicas that are not parted from this one: each takes the next one for living."""
        found, queue = {i}, [i]
        while queue:
            a = queue.pop()
            for b in range(self.size):
                if b in found or numbers[b] == GONE:
                    continue
                if self.takes_for_living(numbers, a, b) and self.takes_for_living(numbers, b, a):
                    found.add(b)
                    queue.append(b)
        return frozenset(self.peers[k] for k in found)

    def takes_for_living(self, numbers: list[int], a: int, b: int) -> bool:
        if {self.peers[a], self.peers[b]} == set(self.scenario.cut):
            return False
        has_group = self.is_settled[numbers[a]] and bool(self.locals.all[numbers[a]].group)
        return has_group or not self.is_dead(self.seen[numbers[a]][b])

    def take_result(self, numbers: list[int], i: int, rest: Rest) -> tuple[int, Rest]:
        """Peer `i` has come to a result. Returns what the peer and the rest become."""
        actor = self.actor(numbers[i])
        actor.group = self.reaches(numbers, i)
        for k, local in enumerate(numbers):
            if k == i or not self.has_result(local):
                continue
            other = self.locals.all[local]
            if other.result != actor.result and not self.scenario.pulls:
                rest = rest._replace(is_parted=True)
                if other.me in actor.group and actor.me in other.group:
                    raise Broken(f"{actor.me} has {actor.result}, {other.me} has {other.result}")
        if actor.machine.facts.state is DECIDED:
            self.check_backups(numbers, i)
            rest = rest._replace(is_decided=True)
        return self.freeze(actor), rest

    def check_backups(self, numbers: list[int], i: int) -> None:
        """The result is given out when every backup that lives to the primary has it."""
        own = self.locals.all[numbers[i]]
        if self.scenario.pulls or own.result[1] is None:
            return
        for k, local in enumerate(numbers):
            if k == i or local == GONE or self.is_dead(self.seen[numbers[i]][k]):
                continue
            other = self.locals.all[local]
            if other.applied == UNTOUCHED and not other.is_told_spoiled:
                raise Broken(f"{own.me} gives out what its backup {other.me} has not")

    def is_good_end(self, world: int) -> bool:
        """All that live and take part have a result, or know that they have missed it."""
        for i, shift in enumerate(self.shifts):
            local = world >> shift & MASK
            if local != GONE and not self.is_over[local] and self.peers[i] != self.scenario.mute:
                return False
        return True

    def is_parted(self, world: int) -> bool:
        return self.rests.all[world >> self.at_rest].is_parted

    def check_end(self, world: int) -> None:
        """There is one result, nobody is left waiting, and the moments survive."""
        numbers = [n for n in self.unpack(world) if n != GONE]
        found = [self.locals.all[n] for n in numbers]
        for number in numbers:
            machine = self.machines[number]
            assert machine is not None
            u = machine.facts
            if u.is_over and (u.calls or u.copied_for is not None):
                raise Broken(f"{u.me} never answers {u.calls or u.copied_for}")
        results = {local.result for local in found if local.result is not None}
        if self.scenario.pulls:
            return
        if len(results) > 1 and not self.is_parted(world):
            raise Broken(f"two results: {results}")
        if results and not self.is_parted(world):
            self.check_moments(world, found, results.pop())

    def check_moments(self, world: int, found: list[Local], result: Any) -> None:
        """With fewer faults than owners there is a state that has seen the result's gradient, and
        each state that has seen another one is known to be spoiled."""
        for local in found:
            is_other = local.applied not in (None, UNTOUCHED, result)
            if is_other and not local.is_told_spoiled:
                raise Broken(f"{local.me} goes on with a state after {local.applied}")
        s, rest = self.scenario, self.rests.all[world >> self.at_rest]
        gone = s.crashes + s.suspicions + s.failures + bool(s.cut)
        gone -= rest.crashes + rest.suspicions + rest.failures
        # A backup gives out what it copied when its primary dies, and does not mirror it on.
        most = s.replication if rest.is_decided else max(2, s.replication - 1)
        if gone >= most or result[1] is None:
            return  # whoever is taken for dead is not waited for
        if not any(local.applied == result for local in found):
            raise Broken(f"no state has seen {result}: {[local.applied for local in found]}")

    # ---- words ----------------------------------------------------------------------------------

    def end_in_words(self, world: int) -> str:
        numbers = self.unpack(world)
        told = []
        for p, n in zip(self.peers, numbers):
            local = self.locals.all[n]
            told.append(f"{p}: " + ("gone" if local is None else f"{local.result} {local.applied}"))
        return "; ".join(told)

    def label(self, before: int, after: int) -> str:
        """What has happened between two worlds, in words: by what differs."""
        lines = []
        a, b = self.unpack(before), self.unpack(after)
        bag_a = self.bags.all[before >> self.at_messages & MASK]
        bag_b = self.bags.all[after >> self.at_messages & MASK]
        rest_a, rest_b = (
            self.rests.all[before >> self.at_rest],
            self.rests.all[after >> self.at_rest],
        )
        lines += [
            f"{x} {getattr(rest_a, x)}->{getattr(rest_b, x)}"
            for x in Rest._fields
            if getattr(rest_a, x) != getattr(rest_b, x)
        ]
        for m in sorted({*bag_a, *bag_b}):
            delta = bag_b.count(m) - bag_a.count(m)
            if delta:
                x = self.messages.all[m]
                lines.append(f"{'+' if delta > 0 else '-'} {x.source}>{x.target} {x.event}")
        for p, x, y in zip(self.peers, a, b):
            if x != y:
                lines.append(f"{p}: {self.change(x, y)}")
        return " | ".join(lines)

    def change(self, x: int, y: int) -> str:
        a, b = self.locals.all[x], self.locals.all[y]
        if b is None:
            return "crashes"
        parts = [f"{n}={v!r}" for n, u, v in zip(FACTS, a.facts, b.facts) if u != v]
        parts += [
            f"{n}={getattr(b, n)!r}" for n in Local._fields[2:] if getattr(a, n) != getattr(b, n)
        ]
        return ", ".join(parts)


def has_new_result(actor: Actor) -> bool:
    """Its group is not known yet."""
    return actor.result is not None and not actor.group


def replace_primary(actor: Actor, primary: str) -> Any:
    return actor.machine.facts.roster.ballot._replace(primary=primary)
