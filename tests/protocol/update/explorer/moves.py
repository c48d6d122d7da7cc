"""What may happen in a world, as the worlds that come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, HUNG, Ballot
from swarmnet.protocol.update.shard_state import CANVASSING, FOLLOWING, HAS_STEPPED
from tests.protocol.update.explorer.interned import (
    BITS,
    GONE,
    LIVES_ON,
    MASK,
    NOBODY,
    Interned,
    Rest,
)
from tests.protocol.update.explorer.invariants import take_result
from tests.protocol.update.explorer.small_world import (
    FALSE_SUM,
    Actor,
    Broken,
    Message,
    Outcome,
    false_ballot,
)


class Moves(Interned):
    """The moves of one scenario."""

    def after(
        self, world: int, numbers: list[int], bag: int, i: int, outcome: Outcome, rest: int = -1
    ) -> int:
        """The world in which peer `i` has changed so; `bag` is what is left of the messages."""
        local, sent, has_result = outcome
        before = numbers[i]
        if rest < 0:
            rest = world >> self.at_rest
        if has_result:
            local, rest = self.result_of(numbers, i, local, rest)
        class_of = self.class_of
        if sent != self.nothing or class_of[before] != class_of[local]:
            numbers[i] = local
            key = (bag, sent, *[class_of[number] for number in numbers])
            mixed = self.mixed.get(key)
            bag = self.mix(bag, sent, numbers) if mixed is None else mixed
            numbers[i] = before
        peers = (world & self.all_peers) + (local - before << self.shifts[i])
        return (rest << BITS | bag) << self.at_messages | peers

    def result_of(self, numbers: list[int], i: int, local: int, rest: int) -> tuple[int, int]:
        """Peer `i` becomes `local`, which has come to a result: what it is then, and the rest."""
        before, numbers[i] = numbers[i], local
        key = (*numbers, i, rest)
        found = self.results.get(key)
        if found is None:
            local, told = take_result(self, numbers, i, self.rests.all[rest])
            found = self.results[key] = (local, self.rests.number(told))
        numbers[i] = before
        return found

    def calm_moves(self, world: int) -> list[int]:
        """What happens without a fault."""
        numbers = self.unpack(world)
        bag = world >> self.at_messages & MASK
        rest = self.rests.all[world >> self.at_rest]
        told = self.told_in(numbers, rest)
        found: list[int] = []
        outcomes, target, source, after = self.outcomes, self.target, self.source, self.after
        for m, left in self.deliveries[bag] or self.deliveries_of(bag):
            i = target[m]
            if i == rest.stopped:
                continue
            local, heard = numbers[i], told[source[m]]
            outcome = outcomes.get((local << BITS | m) << 8 | heard)
            if outcome is None:
                outcome = self.deliver(local, m, heard)
            if outcome.local != NOBODY:
                found.append(after(world, numbers, left, i, outcome))
        late: list[tuple[int, Outcome]] = []
        lazy, is_hung = self.scenario.lazy, rest.hung and self.scenario.hangs_for_ever
        under_way = self.under_way
        for i, local in enumerate(numbers):
            if i == rest.stopped:
                continue
            events = under_way[local]
            for name, outcome in self.events_of(local) if events is None else events:
                is_stuck = is_hung and self.peers[i] == self.scenario.hangs
                if name == "happen" or (name == "work" and not is_stuck):
                    found.append(after(world, numbers, bag, i, outcome))
                elif name == "late":
                    late.append((i, outcome))
        statuses = 0
        for status in told:
            statuses = statuses << 8 | status
        for i, local in enumerate(numbers):
            if local == GONE or i == rest.stopped or self.is_settled[local]:
                continue
            key = statuses << BITS | local
            urgent, others = self.known_news.get(key) or self.news_of(key, i, local, told)
            for outcome in urgent:
                found.append(after(world, numbers, bag, i, outcome))
            for outcome in others:
                late.append((i, outcome))
        if not (lazy and found):
            found += [after(world, numbers, bag, i, outcome) for i, outcome in late]
        if rest.hung or rest.stopped >= 0 or self.scenario.owes:
            found += self.ends_of_faults(world, numbers, bag, rest)
        return found

    def news_of(
        self, key: int, i: int, local: int, told: list[int]
    ) -> tuple[list[Outcome], list[Outcome]]:
        """What peer `i` may hear of the others: who has died or is back, and what else is new."""
        urgent: list[Outcome] = []
        others: list[Outcome] = []
        for k, (known, status) in enumerate(zip(self.seen[local], told)):
            if k == i or known == status:
                continue
            of_one = (local, k, status)
            outcome = self.news.get(of_one) or self.hear(of_one)
            if outcome.local != NOBODY:
                is_urgent = self.is_dead(known) != self.is_dead(status)
                (urgent if is_urgent else others).append(outcome)
        found = self.known_news[key] = (urgent, others)
        return found

    def deliver(self, local: int, m: int, heard: int) -> Outcome:
        """`heard`: what the sender is; who is heard lives."""
        actor, message = self.actor(local), self.messages.all[m]
        index = self.source[m]
        is_back = self.is_dead(self.seen[local][index]) and not self.is_dead(heard)
        try:
            if is_back and self.is_heard[m]:
                actor.see(message.source, self.statuses.all[heard])
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
            n = self.scenario.tokens[self.scenario.peers.index(actor.me)]
            ballot = actor.machine.shard.roster.ballot._replace(primary=message.source)
            actor.answer(
                message.call, on.Pushed(None, actor.me, ballot, n, actor.me if n else None)
            )
            actor.under_way = [e for e in actor.under_way if not isinstance(e, on.Refused)]
            actor.handle(on.Confirmed(message.source, actor.machine.shard.attempt))
        return self.outcome(actor)

    def hear(self, key: tuple[int, int, int]) -> Outcome:
        local, k, told = key
        status, before = self.statuses.all[told], self.locals.all[local].seen[k]
        is_cut = {self.peers[k], self.locals.all[local].me} == set(self.scenario.cut)
        if is_cut and status is not None:
            status = replace(status, life=DEAD)
        is_hung = before is not None and before.life == HUNG
        owes = self.peers[k] == self.scenario.owes
        if is_hung and status is not None and status.life != DEAD and (owes or not status.is_past):
            status = replace(status, life=HUNG)
        outcome = Outcome(NOBODY, self.nothing, False)
        if before != status:
            actor = self.actor(local)
            actor.see(self.peers[k], status)
            outcome = self.outcome(actor)
        self.news[key] = outcome
        return outcome

    def ends_of_faults(self, world: int, numbers: list[int], bag: int, rest: Rest) -> list[int]:
        """A stopped process goes on; another one finds that a device hangs, or that a result is
        owed. When, is open."""
        found: list[int] = []
        i = rest.stopped
        if i >= 0 and numbers[i] != GONE:
            actor = self.actor(numbers[i])
            actor.handle(on.StoodStill())
            ended = self.rests.number(rest._replace(stopped=-1))
            found.append(self.after(world, numbers, bag, i, self.outcome(actor), ended))
        silent = self.scenario.hangs if rest.hung else self.scenario.owes
        k = self.peers.find(silent) if silent else -1
        for i, local in enumerate(numbers):
            is_blind = k < 0 or i in (k, rest.stopped) or local == GONE or self.is_settled[local]
            if is_blind or numbers[k] == GONE:
                continue
            status = self.locals.all[local].seen[k]
            if status is None or not status.is_waited_for:
                continue
            if not self.is_owed(local, numbers[k]) if self.scenario.owes else status.is_past:
                continue
            actor = self.actor(local)
            actor.see(self.peers[k], replace(status, life=HUNG))
            found.append(self.after(world, numbers, bag, i, self.outcome(actor)))
        return found

    def is_owed(self, local: int, silent: int) -> bool:
        """A peer waits for a result of the one that gives none, which has sum and norm."""
        if self.locals.all[local].me in self.scenario.patient:
            return False
        machine, its_machine = self.machines[local], self.machines[silent]
        assert machine is not None
        assert its_machine is not None
        has_both = its_machine.shard.state in HAS_STEPPED or its_machine.is_over
        return has_both and machine.shard.pushing == self.scenario.owes

    def events_of(self, local: int) -> tuple[tuple[str, Outcome], ...]:
        """What is under way at a peer, and when it may come."""
        found = self.under_way[local]
        if found is None:
            events = list(dict.fromkeys(self.locals.all[local].under_way))
            found = tuple(pair for event in events for pair in self.happenings(local, event))
            found += self.waits_of(local)
            self.under_way[local] = found
        return found

    def waits_of(self, local: int) -> tuple[tuple[str, Outcome], ...]:
        """Without a primary, time passes. Where one lies it passes too soon for that."""
        machine = self.machines[local]
        if machine is None or self.scenario.liar:
            return ()
        u = machine.shard
        if u.state not in (FOLLOWING, CANVASSING) or u.is_unled or not u.is_leaderless():
            return ()
        actor = self.actor(local)
        actor.handle(on.Unled())
        return (("late", self.outcome(actor)),)

    def happenings(self, local: int, event: Any) -> list[tuple[str, Outcome]]:
        def happen(take: Callable[[Actor, Any], None] = Actor.happen) -> Outcome:
            actor = self.actor(local)
            try:
                take(actor, event)
            except Broken as e:
                raise Broken(f"{e}\nhappens at {actor.me}: {event}") from None
            return self.outcome(actor)

        if isinstance(event, on.DeadlinePassed):
            is_late = self.scenario.has_late_deadlines
            return [("late" if is_late else "deadlines", happen())]
        if isinstance(event, on.Again | on.Refused):
            return [("late", happen())]
        is_work = isinstance(event, on.Summed | on.ClipKnown | on.Stepped)
        found = [("work" if is_work else "happen", happen())]
        machine = self.machines[local]
        assert machine is not None
        if isinstance(event, on.Stepped) and machine.shard.copied_for is not None:
            found.append(("failures", happen(Actor.fail_step)))
        return found


class Faults(Moves):
    """And what may go wrong."""

    def faults(self, world: int) -> list[int]:
        rest = self.rests.all[world >> self.at_rest]
        if not any(rest[:9]):
            return []
        numbers = self.unpack(world)
        bag = world >> self.at_messages & MASK
        found: list[int] = []
        if rest.drops:
            self.add_drops(world, numbers, bag, rest, found)
        if rest.crashes:
            less = self.less(rest, "crashes")
            for i, local in enumerate(numbers):
                if local != GONE:
                    found.append(self.crash(world, numbers, bag, i, less))
        if rest.suspicions:
            self.add_suspicions(world, numbers, bag, rest, found)
        if rest.hangs:
            less = rest._replace(hangs=False, hung=True)
            found.append(self.pack(numbers, bag, self.rests.number(less)))
        if rest.stops:
            i = self.peers.index(self.scenario.stops)
            if numbers[i] != GONE and not self.is_over[numbers[i]]:
                less = rest._replace(stops=False, stopped=i)
                found.append(self.pack(numbers, bag, self.rests.number(less)))
        if rest.deadlines or rest.failures:
            for i, local in enumerate(numbers):
                if i == rest.stopped:
                    continue
                for name, outcome in self.events_of(local):
                    if name in ("deadlines", "failures") and getattr(rest, name):
                        less = self.less(rest, name)
                        found.append(self.after(world, numbers, bag, i, outcome, less))
        if rest.strays:
            self.add_strays(world, numbers, bag, rest, found)
        if rest.lies:
            less = self.less(rest, "lies")
            for i, local in enumerate(numbers):
                if local != GONE and i != rest.stopped:
                    found += [
                        self.after(
                            world,
                            numbers,
                            bag,
                            i,
                            self.deliver(local, m, self.status(LIVES_ON)),
                            less,
                        )
                        for m in self.lies_to(self.peers[i])
                    ]
        return found

    def lies_to(self, target: str) -> list[int]:
        """Calls of the liar: it has taken over, or began as the primary, or another one has."""
        liar = self.scenario.liar
        own, first = false_ballot(liar), Ballot(1, liar)
        found: list[Message] = []
        call: Any
        for ballot in (own, first):
            for is_final in (True, False):
                call = (liar, "ask", target, ballot, is_final, 0)
                found.append(self.call(call, on.Asked(call, liar, ballot, is_final)))
            call = (liar, "mirror", target, ballot, 1)
            step = (ballot, FALSE_SUM)
            found.append(self.call(call, on.MirrorCame(call, liar, ballot, step, False)))
        named = own._replace(primary=target)
        for ballot in (own, first, named, first._replace(primary=target)):
            call = (liar, "push", target, ballot, False)
            found.append(self.call(call, on.Pushed(call, liar, ballot, 0, None)))
        return [self.message(message) for message in found]

    def call(self, call: Any, event: Any) -> Message:
        return Message(False, call, call[0], call[2], event)

    def less(self, rest: Rest, name: str) -> int:
        found = self.fewer.get((rest, name))
        if found is None:
            fewer = rest._replace(**{name: getattr(rest, name) - 1})
            found = self.fewer[rest, name] = self.rests.number(fewer)
        return found

    def add_drops(
        self, world: int, numbers: list[int], bag: int, rest: Rest, found: list[int]
    ) -> None:
        less = self.less(rest, "drops")
        for m, left in self.deliveries_of(bag):
            if not self.is_failure[m]:
                unchanged = Outcome(numbers[0], self.loss[m], False)
                found.append(self.after(world, numbers, left, 0, unchanged, less))
        for i, local in enumerate(numbers):
            for sent in self.held_by(local):
                unchanged = Outcome(local, sent, False)
                found.append(self.after(world, numbers, bag, i, unchanged, less))

    def add_suspicions(
        self, world: int, numbers: list[int], bag: int, rest: Rest, found: list[int]
    ) -> None:
        less = self.less(rest, "suspicions")
        for i, local in enumerate(numbers):
            if local == GONE or i == rest.stopped or self.is_settled[local]:
                continue
            for k, seen in enumerate(self.seen[local]):
                if k == i or numbers[k] == GONE or self.is_dead(seen):
                    continue
                key = (local, k, -1)
                outcome = self.news.get(key)
                if outcome is None:
                    actor = self.actor(local)
                    status = actor.seen[k]
                    assert status is not None
                    actor.see(self.peers[k], replace(status, life=DEAD))
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

    def held_by(self, local: int) -> tuple[int, ...]:
        """Of each call that waits for an answer at a peer: its failure. Its connection may break
        too."""
        found = self.held.get(local)
        if found is None:
            calls: list[Any] = []
            machine = self.machines[local]
            if machine is not None:
                calls += [call for _, call in machine.shard.calls]
                calls += [machine.shard.copied_for] if machine.shard.copied_for else []
            lost = [Message(True, call, self.locals.all[local].me, call[0], None) for call in calls]
            found = self.held[local] = tuple([self.failure_of(message) for message in lost])
        return found

    def crash(self, world: int, numbers: list[int], bag: int, i: int, less: int) -> int:
        local = numbers[i]
        sent = self.crashed.get(local)
        if sent is None:
            lost = tuple([m for failure in self.held_by(local) for m in self.sent.all[failure]])
            sent = self.crashed[local] = self.sent.number(lost)
        numbers[i] = GONE
        bag = self.mix(bag, sent, numbers)
        numbers[i] = local
        peers = (world & self.all_peers) + (GONE - local << self.shifts[i])
        return (less << BITS | bag) << self.at_messages | peers
