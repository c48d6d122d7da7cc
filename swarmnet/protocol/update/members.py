"""Members of an exchange: who takes part in it, as the records of the stage's replicas say.

What is called round here is the number of an exchange, as `SyncPlan.parameter_version` gives it for
the round of a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.protocol.membership.records import (
    ACTIVE,
    DIGEST_BYTES,
    LEAVING,
    MAX_OWING,
    Owing,
    Record,
)
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update.roster import DEAD, HUNG, MemberStatus

BEHIND_ROUNDS = 2
"""A record that is older than so many rounds is not just late: its peer was cut off."""

AHEAD = 2
"""Exchanges after which all have heard what records said in one."""
LEAST_WORDS = 2
"""One alone passes nobody over."""
RESTS = 8
"""Exchanges in which one is not waited for that was waited for in vain, and was so before."""
MAX_DOUBLINGS = 16
MAX_TIMES = 3
"""That one is found so, for which it is in `RESTS` times as many each time. In some hundred
exchanges a wait costs little, and whoever was slow for an hour is to be waited for again one
day."""


def may_contribute(record: Record | None, stage: int) -> bool:
    """Whether a peer may have a gradient of a stage. One that joins has none: it asks for the
    result alone."""
    return record is not None and record.stage == stage and record.state in (ACTIVE, LEAVING)


def shows_round(record: Record | None, stage: int, round_index: int) -> bool:
    """Whether a peer's calls may show that its stage has ended a round: it works on that stage, and
    its record says that it is in that round. Of one that joins, or is elsewhere, it means
    nothing."""
    return record is not None and may_contribute(record, stage) and record.round == round_index


def candidates(members: Iterable[Record], plan: SyncPlan, round_index: int) -> list[Record]:
    """Live replicas of a stage that count as possible owners in a round. One that was cut off and
    is rounds behind does not: it holds nothing of this round, and will fetch it again. Those that
    joined in this round count where all before them are gone."""
    there = [
        r
        for r in members
        if r.state == ACTIVE and plan.parameter_version(r.round) >= round_index - BEHIND_ROUNDS
    ]
    return [r for r in there if plan.parameter_version(r.active_from) <= round_index] or there


def with_gradient(records: Iterable[Record], plan: SyncPlan, round_index: int) -> list[Record]:
    """Replicas that may have a gradient of the round: not past it, nor too far behind for that
    (after a partition, say), nor newcomers of a later one."""
    newest = plan.next_owner_round(round_index)
    # Where replicas make steps of their own, the slowest may have several of them left to do.
    steps = plan.steps_until_due(round_index) if plan.is_local else 1
    oldest = round_index - max(BEHIND_ROUNDS, steps)
    return [
        r
        for r in records
        if r.state in (ACTIVE, LEAVING)
        and oldest <= plan.parameter_version(r.round) <= round_index
        and r.active_from <= newest
    ]


def past(records: Iterable[Record], plan: SyncPlan, round_index: int) -> list[Record]:
    """Replicas that have finished a round."""
    return [
        r
        for r in records
        if r.state in (ACTIVE, LEAVING) and plan.parameter_version(r.round) > round_index
    ]


def shown_past(known: Sequence[Record], plan: SyncPlan, round_index: int) -> list[Record]:
    """Those that have finished a round, of the known replicas of a stage; none where fewer than
    half of them say so. As many are not the word of one, unless they are two."""
    found = past(known, plan, round_index)
    return found if 2 * len(found) >= len(known) else []


def passed_over(records: Sequence[Record], round_index: int) -> frozenset[str]:
    """Who is to lead nothing in an exchange, by the word of at least half of the others that may
    lead (`records`), and of two."""
    said = Counter(
        one.peer_id
        for r in records
        for one in {o.peer_id: o for o in r.owing}.values()
        if one.since <= round_index <= one.until and one.peer_id != r.peer_id
    )
    least = max(LEAST_WORDS, (len(records) - 1) / 2)
    return frozenset(p for p, n in said.items() if n >= least)


def has_begun(record: Record | None, round_index: int) -> bool:
    """A peer has closed a round, by its record."""
    return record is not None and record.declared[0] >= round_index


def behind(records: Mapping[str, Record | None], plan: SyncPlan, round_index: int) -> list[str]:
    """Which of these are in the exchange before yet: with its result they would be in a later
    round, or, where the next exchange is not beside one, have begun that."""
    if not plan.is_delayed(round_index - 1):
        return []
    return [
        p
        for p, r in records.items()
        if r is not None
        and plan.parameter_version(r.round) < round_index
        and not has_begun(r, round_index)
    ]


def before_round(members: Iterable[Record], round_index: int) -> list[Record]:
    """Replicas that have yet to begin a round (of the run, not an exchange)."""
    return [m for m in members if m.round < round_index and m.state in (ACTIVE, LEAVING)]


def num_shards(members: Iterable[Record]) -> int:
    """Shards of a stage, as the most of its replicas say; 0 where none is known."""
    said = Counter(len(r.digests) // DIGEST_BYTES for r in members)
    del said[0]  # one that joins
    return max(said, key=lambda n: (said[n], n), default=0)


def status(record: Record, plan: SyncPlan, round_index: int, life: str) -> MemberStatus:
    """The status of a member of an exchange, by its record."""
    is_past = plan.parameter_version(record.round) > round_index
    exchange, tokens = record.declared
    return MemberStatus(life, tokens if exchange == round_index else None, is_past)


@dataclass
class Hung:
    """Members that live and get nothing done in an exchange: nobody waits for their work in it, nor
    in those after it, until their records say that they have finished that one. That is their word
    alone: so one that is found so again rests for the next `RESTS` exchanges too, and each time for
    twice as many."""

    _found: dict[str, int] = field(default_factory=dict)
    """Exchanges, by peer."""
    _times: dict[str, int] = field(default_factory=dict)
    """How often each was found so."""
    _mute: set[str] = field(default_factory=set)
    """Those of them that do not even answer a question."""

    def found(self, peer_id: str, round_index: int) -> None:
        """A peer lives and does nothing in an exchange."""
        if peer_id not in self._found:
            self._times[peer_id] = self._times.get(peer_id, 0) + 1
        self._found[peer_id] = round_index

    def found_mute(self, peer_id: str) -> None:
        """One that was found to hang does not answer a question either: it is as good as dead."""
        if peer_id in self._found:
            self._mute.add(peer_id)

    def works(self, peer_id: str) -> None:
        """A peer that was found to hang leads an exchange now, or has finished that one."""
        self._found.pop(peer_id, None)
        self._mute.discard(peer_id)

    def mark(
        self,
        members: dict[str, MemberStatus],
        record_of: Callable[[str], Record | None],
        plan: SyncPlan,
        round_index: int,
    ) -> None:
        """Says of these members of an exchange which hang. Peers without a record are gone, and
        forgotten."""
        for gone in [p for p in self._times if record_of(p) is None]:
            self.works(gone)
            del self._times[gone]
        for peer_id in self._found.keys() & members.keys():
            record, found_at = record_of(peer_id), self._found[peer_id]
            version = -1 if record is None else plan.parameter_version(record.round)
            again = min(self._times[peer_id] - 1, MAX_DOUBLINGS)
            rests_until = found_at + (RESTS << again - 1 if again else 0)
            has_rested = version > found_at and round_index > rests_until
            if has_rested or (members[peer_id].is_past and not again):
                self.works(peer_id)
            else:
                life = DEAD if peer_id in self._mute else HUNG
                members[peer_id] = replace(members[peer_id], life=life)


@dataclass
class Rests:
    """Members of which this replica does not expect one part of an exchange, which it has waited
    for in vain: until they have done it again. That part is one that it may do without alone.

    Nobody knows how long that lasts, so one that is found so again is not waited for in the next
    `RESTS` exchanges either, and each time in `RESTS` times as many; unless it was waited for, and
    not in vain, in about as many since."""

    _found: dict[str, int] = field(default_factory=dict)
    """Exchanges, by peer."""
    _times: dict[str, int] = field(default_factory=dict)
    """How often each was found so, less what was made good."""
    _until: dict[str, int] = field(default_factory=dict)
    """The last exchange in which each rests."""
    _did: set[str] = field(default_factory=set)
    """Those that have done it since."""

    def found(self, peer_id: str, round_index: int) -> None:
        """A peer lives and does not do it in an exchange."""
        if peer_id not in self._found:
            self._times[peer_id] = self._left(peer_id, round_index) + 1
        self._found[peer_id] = round_index
        self._until[peer_id] = round_index + self._rest(peer_id)
        self._did.discard(peer_id)

    def did(self, peer_id: str, round_index: int) -> None:
        """It does it in an exchange. In the one in which it was found so it is slow, and no
        more."""
        if self._found.get(peer_id) == round_index:
            self.works(peer_id)
            self._times[peer_id] -= 1
        elif peer_id in self._found:
            self._did.add(peer_id)

    def works(self, peer_id: str) -> None:
        """It is waited for again."""
        self._found.pop(peer_id, None)
        self._did.discard(peer_id)

    def rests(self, peer_id: str, round_index: int) -> bool:
        """Whether it is not waited for in an exchange."""
        if peer_id not in self._found:
            return False
        is_over = peer_id in self._did and round_index > self._until[peer_id]
        if is_over:
            self.works(peer_id)
        return not is_over

    def _rest(self, peer_id: str) -> int:
        """For how many exchanges."""
        return _many(self._times[peer_id] - 1)

    def _left(self, peer_id: str, round_index: int) -> int:
        """How often it was found so, less what it has made good since it rested."""
        times = self._times.get(peer_id, 0)
        well = round_index - self._until.get(peer_id, round_index)
        while times and well > (costs := _many(max(times, 2))):
            times, well = times - 1, well - costs
        return times

    def forget(self, record_of: Callable[[str], Record | None]) -> None:
        """Peers without a record are gone."""
        for gone in [p for p in self._times if record_of(p) is None]:
            self.works(gone)
            del self._times[gone], self._until[gone]


def _many(times: int) -> int:
    """Exchanges."""
    return RESTS ** min(times, MAX_TIMES) if times else 0


@dataclass
class Replaced(Rests):
    """Members whose part another one does in their place. As long as it does, nobody can see
    whether such a one would, so time alone counts, and from the first time on. It is no loss."""

    def rests(self, peer_id: str, round_index: int) -> bool:
        """Whether another one is to do it."""
        self._did.update(self._found.keys() & {peer_id})
        return super().rests(peer_id, round_index)

    def _rest(self, peer_id: str) -> int:
        return _many(self._times[peer_id] + 1)


@dataclass
class Owed(Replaced):
    """Primaries whose result this replica has waited for in vain. Who leads is what all have to
    compute alike: so it says so in its record, and what most say counts (`passed_over`)."""

    def owed_last(self, peer_id: str, round_index: int) -> bool:
        """Whether it has owed a result in the exchange before this one, and others have yet to be
        told."""
        return 0 < round_index - self._found.get(peer_id, round_index) < AHEAD

    def words(self, round_index: int) -> tuple[Owing, ...]:
        """What the own record says, from an exchange on. All have the records of those with whom
        they have ended one, so what is found in one is so from the one after the next on."""
        resting = [p for p in sorted(self._found) if self.rests(p, round_index)]
        resting.sort(key=self._found.__getitem__, reverse=True)
        return tuple(
            Owing(p, self._found[p] + AHEAD, self._until[p]) for p in sorted(resting[:MAX_OWING])
        )

    def found(self, peer_id: str, round_index: int) -> None:
        """Until the others have heard of it, it owes its results again: once is enough."""
        if not self.rests(peer_id, round_index):
            super().found(peer_id, round_index)


@dataclass
class Absent(Rests):
    """Members that live, and of which no contribution has come to this primary by the deadline.
    They have their say and may lead: only nothing is expected of them, and what comes all the same
    counts. One that comes late is slow, and no more: the next deadline has room for it
    (`exchange_waits.ExchangeDurations`)."""

    def mark(
        self,
        members: dict[str, MemberStatus],
        record_of: Callable[[str], Record | None],
        round_index: int,
    ) -> None:
        """Says of these members of an exchange which have nothing to contribute, as far as anybody
        waits for it."""
        self.forget(record_of)
        for peer_id, status in members.items():
            if self.rests(peer_id, round_index):
                members[peer_id] = replace(status, declared=0)
