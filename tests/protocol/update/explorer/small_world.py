"""A small world of replicas with one shard, their messages, and what can go wrong with them.

What one peer is (its machine, its optimizer state, what it has under way) does not depend on the
other peers but through messages and news. So it is kept as one number, and what an event does to it
is computed once (`Interned`). A world is one integer, packed of the numbers of its peers, of the
messages under way and of the rest."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.ownership import passing_over
from swarmnet.protocol.update.roster import DEAD, Ballot, MemberStatus, Roster, first_ballot
from swarmnet.protocol.update.shard_state import (
    ABANDONED,
    CANVASSING,
    CLIPPING,
    COPIED,
    DECIDED,
    GATHERING,
    HAS_STEPPED,
    ShardState,
)
from swarmnet.protocol.update.shard_update import ShardUpdate

FIELDS = [
    f.name for f in fields(ShardState) if f.name not in ("me", "roster", "members", "commands")
]
state_of = operator.attrgetter(*(f.name for f in fields(ShardState)))
fields_of = operator.attrgetter(*FIELDS)
in_words = functools.cache(repr)
MAX_COMMANDS = 200
UNTOUCHED = ""
"""The optimizer state before the step."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """A small world before anything has happened."""

    peers: str = "abc"
    """One letter each. The first ones hold the optimizer state."""
    replication: int = 2
    tokens: tuple[int, ...] = (1, 1, 1)
    primaries: str = ""
    """By peer, who is the primary by its records; the first peer where left out."""
    misnamed: str = ""
    """A peer that others may name there, by an old record: it holds the state no more."""
    crashes: int = 0
    drops: int = 0
    suspicions: int = 0
    hangs: str = ""
    """A peer whose device may hang, as each of the others finds by itself. It answers questions."""
    hangs_for_ever: bool = False
    """Nothing that it is at is done then."""
    stops: str = ""
    """A peer whose process may stop, and goes on later. Meanwhile the others find that it is
    dead."""
    owes: str = ""
    """A peer that answers no push with its result. It does all else, and each of the others finds
    that by itself."""
    passed_over_by: str = ""
    """Who has heard from most that it is to lead nothing."""
    patient: str = ""
    """Who never finds it."""
    deadlines: int = 0
    """Deadlines that pass before all has come that will come."""
    failures: int = 0
    """Backups that cannot make the step."""
    strays: int = 0
    """Peers that learn too late that others have a result, and that the stage has moved on."""
    mute: str = ""
    """A peer that lives and never closes its round. Deadlines pass then."""
    liar: str = ""
    """A peer, the last one, that says what it likes: it lives, has no tokens, and takes part in
    nothing."""
    lies: int = 0
    """Calls of it, whatever they say."""
    denies: bool = False
    """It answers that it goes by a ballot of its own. Otherwise it agrees to everything."""
    tells: bool = False
    """It answers with a result of its own making."""
    varies: bool = False
    """It answers with any of these, with the name of another one as the primary, or not at all;
    which, follows from the call."""
    cut: str = ""
    """Two peers that cannot reach each other, ever."""
    quorum: int = 0
    """Contributions with which a primary may go on, at any time after they are there."""
    household: str = ""
    """Neighbours: the contributions of all but the first are in that of the first."""
    unsure: bool = False
    """They have not heard so, and give theirs too."""
    returns: bool = False
    """Who crashes comes back at once, and takes no part: it is no member any more."""
    clips: bool = True
    pulls: bool = False
    """Gossip averaging of a pair."""
    slow_sums: bool = False
    """Other events come while contributions are summed."""
    lazy: bool = True
    """Pauses end, and news of what a peer has done spread, only when nothing else can happen: a
    pause is longer than a call. Without it there are more orders."""
    reduced: bool = True
    """What cannot matter any more is forgotten (`Interned.settle`, `Interned.is_void`)."""

    @property
    def holders(self) -> str:
        return self.peers[: self.replication]

    @property
    def is_split(self) -> bool:
        """Several honest peers may lead, by records that differ, and the liar says to each that it
        follows that one. So each may have as many followers as the others in its own eyes: they
        wait for each other until the deadline, and go on as if they were parted."""
        is_open = not (self.denies or self.tells) or self.varies
        return bool(self.liar) and is_open and len(set(self.primaries[:-1])) > 1

    @property
    def has_late_deadlines(self) -> bool:
        """The time of a deadline passes, where nothing else ends the wait."""
        return bool(self.mute) or self.is_split

    @property
    def loses_nothing(self) -> bool:
        """All that have tokens live, and are waited for."""
        faults = self.crashes + self.suspicions + self.deadlines + self.failures + self.strays
        silent = self.hangs or self.stops or self.mute or self.owes
        others = silent or self.cut or self.pulls or self.is_split
        # Who has led in its own eyes only has pushed to nobody when another one's result comes.
        goes_on = self.quorum and self.primaries
        return not faults and not others and not goes_on


class Message(NamedTuple):
    """A call or its answer. `call`: (caller, kind, target, ...)."""

    is_reply: bool
    call: tuple[Any, ...]
    source: str
    target: str
    event: Any


class Local(NamedTuple):
    """All that one peer is."""

    me: str
    shard: tuple[Any, ...]
    seen: tuple[MemberStatus | None, ...]
    """By peer: what this one takes it for. Of itself: what others can know."""
    applied: Any
    """The step that the optimizer state is after; None where there is none."""
    under_way: tuple[Any, ...]
    """Events that will come of themselves."""
    open_call: Any
    """The push whose answer counts."""
    is_told_spoiled: bool
    result: Any
    group: frozenset[str]
    """With a result: whom it was not parted from when it came to it."""
    carried: tuple[str, ...] = ()
    """Whose late contributions it brings into the next exchange."""


class Outcome(NamedTuple):
    """What an event does to a peer."""

    local: int
    sent: int
    """The number of a tuple of messages."""
    has_result: bool
    """It has come to a result now."""


def step_of(event: on.Stepped) -> Any:
    """(ballot, sum)."""
    return event.result


def made_by(result: Any) -> Ballot:
    """Of the primary that has signed a result, or the sum that it was made with."""
    found: Ballot = result[0]
    return found


def question_of(call: Any) -> tuple[bool, int]:
    """Whether the call, an `Asked`, is an announcement; and its count."""
    return call[4], call[5]


def ballot_of(call: Any) -> Ballot:
    """Under which the call was made."""
    found: Ballot = call[3]
    return found


def denial(sender: str, ballot: Ballot, call: Any) -> on.Denied:
    """The answer of one that goes by this ballot."""
    count = question_of(call)[1] if call[1] == "ask" else None
    return on.Denied(sender, ballot, ballot_of(call), count)


def false_ballot(liar: str) -> Ballot:
    """With which a liar takes over, as it says."""
    return Ballot(9, liar)


FALSE_SUM = ("false",)
"""What a liar has summed, as it says."""


def is_false(result: Any, liar: str) -> bool:
    return bool(liar) and (made_by(result).primary == liar or result[1] == FALSE_SUM)


def attempt_of(call: Any) -> int:
    """With which the call, a `MirrorCame`, was made."""
    return int(call[4])


def copied(machine: ShardUpdate) -> ShardUpdate:
    """Another machine in the same state. It may be broken on purpose, and its state as well."""
    other = object.__new__(type(machine))
    other.shard = type(machine.shard)(*state_of(machine.shard))
    return other


def members_in(scenario: Scenario, peer: str) -> tuple[str, ...]:
    """Whose contributions are in that which a peer gives, beside its own."""
    return tuple(scenario.household[1:]) if scenario.household.startswith(peer) else ()


def given_by(scenario: Scenario, peer: str) -> str:
    """Of those that are in it, who has tokens."""
    tokens = dict(zip(scenario.peers, scenario.tokens, strict=True))
    return "".join(p for p in (peer, *members_in(scenario, peer)) if tokens[p])


def summed_in(parts: Any) -> tuple[str, ...]:
    """Whose contributions are in a sum."""
    return tuple(sorted(p for _, _, given in parts for p in given))


class Actor:
    """A peer while it takes an event in."""

    def __init__(self, scenario: Scenario, local: Local, machine: ShardUpdate) -> None:
        self.scenario = scenario
        self.me = local.me
        self.machine = copied(machine)
        self.seen = list(local.seen)
        self.applied = local.applied
        self.under_way = list(local.under_way)
        self.open_call = local.open_call
        self.is_told_spoiled = local.is_told_spoiled
        self.result = local.result
        self.group = local.group
        self.carried = local.carried
        self.sent: list[Message] = []

    @property
    def own(self) -> MemberStatus:
        status = self.seen[self.scenario.peers.index(self.me)]
        assert status is not None
        return status

    @own.setter
    def own(self, status: MemberStatus) -> None:
        self.seen[self.scenario.peers.index(self.me)] = status

    def local(self) -> Local:
        return Local(
            self.me,
            fields_of(self.machine.shard),
            tuple(self.seen),
            self.applied,
            tuple(sorted(self.under_way, key=in_words)),
            self.open_call,
            self.is_told_spoiled,
            self.result,
            self.group,
            self.carried,
        )

    def see(self, member: str, status: MemberStatus | None) -> None:
        self.seen[self.scenario.peers.index(member)] = status
        self.show()

    def show(self) -> None:
        peers = zip(self.scenario.peers, self.seen)
        self.handle(on.Seen({p: s for p, s in peers if p != self.me and s is not None}))

    def happen(self, event: Any) -> None:
        """What was under way comes."""
        self.under_way.remove(event)
        if isinstance(event, on.Begun):
            own = self.scenario.tokens[self.scenario.peers.index(self.me)]
            self.own = replace(self.own, declared=own)
        if isinstance(event, on.Stepped) and step_of(event)[1]:
            if self.applied not in (UNTOUCHED, None) and not self.is_told_spoiled:
                raise Broken(f"{self.me} makes two steps in one exchange on one state")
            self.applied = event.result
        self.handle(event)

    def fail_step(self, event: on.Stepped) -> None:
        """The step of this backup cannot be made: the state is to be fetched."""
        self.under_way.remove(event)
        self.applied = None
        self.handle(on.StepFailed(event.attempt))

    def receive(self, message: Message) -> None:
        event = message.event
        if message.is_reply and message.call[1] == "push":
            if message.call != self.open_call:
                return  # nothing that a push that was given up still brings counts
            self.open_call = None
        if isinstance(event, on.MirrorCame):
            is_busy = any(isinstance(e, on.Stepped) for e in self.under_way)
            fits = self.applied == UNTOUCHED and not is_busy
            event = replace(event, fits=fits and not self.is_told_spoiled)
        self.handle(event)
        if isinstance(event, on.Denied) and message.call[1] == "mirror":
            self.handle(on.MirrorFailed(message.source, attempt_of(message.call)))

    def handle(self, event: Any) -> None:
        found = self.machine.handle(event)
        if len(found) > MAX_COMMANDS:
            raise Broken(f"{len(found)} commands")
        for command in found:
            self.carry_out(command)

    def call(self, target: str, kind: str, event: Any, *rest: Any) -> tuple[Any, ...]:
        """`event`: made of the name of the call."""
        name = (self.me, kind, target, *rest)
        self.sent.append(Message(False, name, self.me, target, event(name)))
        return name

    def answer(self, call: Any, event: Any) -> None:
        if call is None:
            raise Broken(f"{self.me} answers where nobody has called: {event}")
        self.sent.append(Message(True, call, self.me, call[0], event))

    def later(self, event: Any) -> None:
        if not isinstance(event, on.DeadlinePassed) or event not in self.under_way:
            self.under_way.append(event)

    def carry_out(self, command: Any) -> None:
        me: str = self.me
        call: Any
        match command:
            case do.Push(target, ballot, has_gradient):
                if self.own.declared is None:
                    raise Broken(f"{me} contributes before it has closed the round")
                given = given_by(self.scenario, me) if has_gradient else ""
                members = members_in(self.scenario, me) if given else ()
                self.open_call = self.call(
                    target,
                    "push",
                    lambda name: on.Pushed(name, me, ballot, len(given), given or None, members),
                    ballot,
                    has_gradient,
                )
            case do.GiveUpPush():
                self.open_call = None
            case do.Ask(members, ballot, is_final, count):
                for p in members:
                    self.call(
                        p,
                        "ask",
                        lambda name: on.Asked(name, me, ballot, is_final),
                        ballot,
                        is_final,
                        count,
                    )
            case do.Pull(target):
                self.call(target, "pull", lambda name: None)
            case do.Mirror(total, backups, ballot, attempt):
                for p in backups:
                    self.mirror(p, total, ballot, attempt)
            case do.Give(call, result, is_late):
                if is_late:
                    self.carry(call)
                if me == self.scenario.owes and call[1] == "push":
                    return
                self.answer(call, on.ResultCame(me, result, ballot_of(call), made_by(result)))
            case do.Agree(call, ballot):
                self.answer(call, on.Agreed(me, ballot, *question_of(call)))
            case do.Deny(call, ballot):
                self.answer(call, denial(me, ballot, call))
            case do.Confirm(call, _):
                self.answer(call, on.Confirmed(me, attempt_of(call)))
            case do.Refuse(call):
                self.answer(call, on.Refused(me, attempt_of(call)))
            case _:
                self.carry_out_here(command)

    def carry_out_here(self, command: Any) -> None:
        """What concerns nobody else."""
        match command:
            case do.Sum(parts, senders, absent, attempt, late):
                self.check_sum(parts, senders, (*absent, *late))
                summed = on.Summed(summed_in(parts) or None, attempt)
                if self.scenario.slow_sums:
                    self.later(summed)
                else:
                    self.handle(summed)
            case do.FindNorm(attempt, _, _, _):
                self.later(on.ClipKnown(attempt))
            case do.Step(total, ballot, attempt):
                self.later(on.Stepped((ballot, total), attempt))
            case do.Repeat(step, attempt):
                self.later(on.Stepped(step, attempt))
            case do.Adopt(result, is_own):
                if self.result is not None:
                    raise Broken(f"{self.me} has a second result")
                if is_own != (self.machine.shard.state is DECIDED):
                    raise Broken(f"{self.me} takes another's result for its own, or the reverse")
                self.result = result
                self.own = replace(self.own, is_past=True)
            case do.Spoiled():
                self.is_told_spoiled = True
            case do.SetDeadline():
                if self.scenario.deadlines or self.scenario.has_late_deadlines:
                    self.later(on.DeadlinePassed())
            case do.SetGrace():
                self.later(on.GracePassed())
            case do.Pause():
                self.later(on.Again())

    def carry(self, call: Any) -> None:
        """A late contribution. Who pushes the same again is known."""
        sender, kind = call[:2]
        has_gradient = kind == "push" and call[4]
        n = self.scenario.tokens[self.scenario.peers.index(sender)]
        if has_gradient and n and sender not in self.carried:
            self.carried = tuple(sorted((*self.carried, sender)))

    def mirror(self, target: str, total: Any, ballot: Ballot, attempt: int) -> None:
        if self.scenario.pulls:  # the time that a partner has for its pull
            self.later(on.Refused(target, attempt))
            return
        step = (ballot, total)
        self.call(
            target,
            "mirror",
            lambda name: on.MirrorCame(name, self.me, ballot, step, False),
            ballot,
            attempt,
        )

    def check_sum(self, parts: Any, senders: frozenset[str], absent: tuple[str, ...]) -> None:
        """All are told that they count that do, and no others; who lives is in it or absent."""
        scenario, peers = self.scenario, self.scenario.peers
        summed = list(summed_in(parts))
        due = [p for p in peers if p in senders and scenario.tokens[peers.index(p)]]
        if summed != due:
            raise Broken(f"the sum has {summed}, and {sorted(senders)} are told so")
        if set(absent) & senders:
            raise Broken(f"{absent} are absent, and {sorted(senders)} in the sum")
        if self.me not in senders:
            raise Broken(f"{self.me} forgets its own contribution")


def start(scenario: Scenario) -> list[Actor]:
    """The peers, before anything has happened."""
    peers, holders = scenario.peers, scenario.holders
    actors = []
    for i, me in enumerate(peers):
        primary = scenario.primaries[i] if scenario.primaries else peers[0]
        known = (*holders, primary) if primary == scenario.misnamed else tuple(holders)
        ballot = first_ballot(primary, is_holder=primary in known)
        backups = tuple(holders)
        if scenario.pulls:
            ballot, backups = first_ballot(me, is_holder=True), tuple(peers)
        order = tuple(sorted(peers, key=lambda p: (p != ballot.primary, peers.index(p))))
        roster = Roster(
            ballot,
            order,
            tuple(p for p in order if p in known),
            backups,
            me in holders or scenario.pulls,
            clips=scenario.clips,
            pulls=scenario.pulls,
            quorum=scenario.quorum,
        )
        if me in scenario.passed_over_by:
            roster = passing_over(roster, scenario.owes.__contains__)
        seen = [MemberStatus(life=DEAD if {me, p} == set(scenario.cut) else "alive") for p in peers]
        applied = UNTOUCHED if me in holders or scenario.pulls else None
        local = Local(me, (), tuple(seen), applied, (), None, False, None, frozenset())
        actor = Actor(scenario, local, ShardUpdate(me, roster))
        actor.show()
        if scenario.liar:
            actor.seen[-1] = replace(actor.seen[-1] or MemberStatus(), declared=0)
        if me != scenario.mute:
            given, members = given_by(scenario, me), members_in(scenario, me)
            is_inside = me in scenario.household[1:] and not scenario.unsure
            neighbour = scenario.household[0] if is_inside else ""
            actor.later(on.Begun(len(given), given or None, members, neighbour))
        actors.append(actor)
    return actors


def is_settled(u: ShardState) -> bool:
    """Nothing depends on what it takes others for."""
    others = set(u.roster.backups) - {u.me, u.ballot.primary}
    return u.is_over and not (u.state is COPIED and others)


def settle(actor: Actor) -> None:
    """Forgets what cannot matter any more.

    When there is a result, or will be none, every event is ignored but calls, and they are answered
    by the result and the ballot only. News to such a peer change what invariants excuse, no more:
    so it has all of them at once, and invariants are the stricter. In the other states, each field
    that is reset here is set again before the next rule reads it."""
    u = actor.machine.shard
    if is_settled(u):
        kept = ShardState(u.me, u.roster, u.ballot, u.state, u.result)
        if u.state not in (ABANDONED, COPIED):
            kept.ballot = u.roster.ballot
        held = ("calls", "copied_for", "pushing", *(("senders",) if u.roster.quorum else ()))
        for name in held:
            setattr(kept, name, getattr(u, name))
        actor.machine.shard = kept
        own = actor.own
        actor.seen = [None] * len(actor.seen)
        actor.own = own
        actor.open_call = None
        actor.under_way = [e for e in actor.under_way if isinstance(e, on.Stepped)]
        return
    if u.state is not CANVASSING:
        u.agreed = frozenset()
    if u.state is not GATHERING:
        u.is_expired = u.has_grace = u.is_graced = False
        actor.under_way = [e for e in actor.under_way if not isinstance(e, on.GracePassed)]
    if u.state not in (GATHERING, CLIPPING) and u.state not in HAS_STEPPED:
        u.doubted, u.has_stood_still = frozenset(), False
        if u.state is not CANVASSING:
            u.claims = ()
    if u.state is not CLIPPING and u.state not in HAS_STEPPED:
        u.promised, u.asked, u.senders, u.total = frozenset(), frozenset(), frozenset(), None
        u.lost = frozenset()
