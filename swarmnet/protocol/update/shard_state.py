"""What one replica knows of the update of one shard: the data behind the tables of
`shard_update`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from zlib import crc32

from swarmnet.protocol.update.commands import Command
from swarmnet.protocol.update.events import Call, Handle
from swarmnet.protocol.update.roster import ALIVE, DEAD, Ballot, MemberStatus, Roster


class State(Enum):
    """See the head of `shard_update`."""

    __hash__ = object.__hash__  # that of `Enum` is a call, for each event and guard

    FOLLOWING = "following"
    CANVASSING = "canvassing"
    GATHERING = "gathering"
    CLIPPING = "clipping"
    STEPPING = "stepping"
    MIRRORING = "mirroring"
    COPYING = "copying"
    COPIED = "copied"
    DECIDED = "decided"
    ADOPTED = "adopted"
    ABANDONED = "abandoned"


FOLLOWING, CANVASSING, GATHERING, CLIPPING, STEPPING, MIRRORING = list(State)[:6]
COPYING, COPIED, DECIDED, ADOPTED, ABANDONED = list(State)[6:]
HAS_RESULT = frozenset({DECIDED, ADOPTED})
HAS_STEPPED = frozenset({STEPPING, MIRRORING})
IS_OVER = HAS_RESULT | {ABANDONED}

NO_BALLOT = Ballot(-1, "")
"""Lower than all others."""

Contribution = tuple[int, Handle | None, tuple[str, ...]]
"""The tokens behind it; the gradient, none for no tokens; and whose contributions are in it beside
that of who gives it."""
NOTHING: Contribution = (0, None, ())


@dataclass(slots=True)
class ShardState:
    """The state of one shard's update. Only the rules of `shard_rules` change it. Every field but
    `commands` is immutable, so that a shallow copy is a copy."""

    me: str
    roster: Roster
    ballot: Ballot
    """That which was promised."""
    state: State = FOLLOWING
    result: Handle | None = None
    senders: frozenset[str] = frozenset()
    """Whose contributions are in the sum that was made here."""
    begun: tuple[int, Handle | None] | None = None
    """The tokens and the gradient of the own contribution."""
    neighbours: tuple[str, ...] = ()
    """Whose contributions are in it too."""
    neighbour: str = ""
    """Who has the own contribution in its own, and gives the result on: it is waited for there,
    until that fails once."""
    members: Mapping[str, MemberStatus] = field(default_factory=dict)
    counted: int = 0
    """Tokens that contributions have to come up to."""
    top: Ballot = NO_BALLOT
    """The highest by which this replica has gone before, or that has named it: it leads by a higher
    one, so never twice by the same."""
    disowned: frozenset[Ballot] = frozenset()
    """Ballots whose primary has said that it goes by another one: nobody leads by them."""
    claims: tuple[tuple[str, Ballot], ...] = ()
    """Of a primary: who goes by another ballot, as it has answered; by peer. Of one that asks
    before a takeover: who goes by one of a third, or tells a result that nothing shows."""
    unshown: frozenset[str] = frozenset()
    """Who has told a result that nothing shows: it is not asked any more."""
    doubted: frozenset[tuple[str, Ballot]] = frozenset()
    """Of a primary: who goes by which other ballot, for whose word it has asked all others."""
    agreed_to: Ballot | None = None
    """What it would promise, as it has said since it has had no primary: the one that it had, if
    that answers yet, cannot count on it."""
    is_unled: bool = False
    """It has had no primary for long: whoever would lead may."""
    is_kept: bool = False
    """The state that is not here is with a replica that lives: nobody else may begin a new one."""
    has_norm: bool = False
    """Of a primary that has a sum: nothing else keeps it from the step."""
    parts: tuple[tuple[str, Contribution], ...] = ()
    """Contributions under the present ballot, ascending by peer."""
    calls: tuple[tuple[str, Call], ...] = ()
    """Calls that wait for the result; each with who pushes, or with "" for a question."""
    agreed: frozenset[str] = frozenset()
    host: str | None = None
    """To whom the primary lives that is dead here: the result is waited for there."""
    pushing: str | None = None
    """Whose answer to a push is waited for."""
    failed: str | None = None
    """Who did not answer, and is not asked again before the pause is over."""
    is_paused: bool = False
    """There will be an `Again`."""
    is_expired: bool = False
    """Members that live are not waited for any longer."""
    has_grace: bool = False
    """Of a primary that gathers: there has been a quorum, so there will be a `GracePassed`."""
    is_graced: bool = False
    """It has come: a quorum is enough."""
    lacking: frozenset[str] = frozenset()
    """Who has nothing to contribute after all."""
    served: frozenset[str] = frozenset()
    """Who has what this replica gives as backup of the step, or will not take it."""
    total: Handle | None = None
    pending: frozenset[str] = frozenset()
    """Backups whose answer is waited for."""
    unmirrored: frozenset[str] = frozenset()
    """Those of them that the step did not reach: it is sent again."""
    promised: frozenset[str] = frozenset()
    """Of a primary that has closed its sum: who promised its ballot, by a contribution or by an
    answer. Who was not waited for may follow another primary."""
    has_stood_still: bool = False
    """This replica has, since it leads: others may have promised another ballot since theirs."""
    count: int = 0
    """How often promises were counted anew."""
    lost: frozenset[str] = frozenset()
    """Members that were dead when the sum was closed, or when promises were counted again."""
    asked: frozenset[str] = frozenset()
    """Who of the others was asked for a promise or a result."""
    attempt: int = 0
    """Sums and steps that were begun here: what an earlier one brings does not count."""
    is_spoiled: bool = False
    """A step was made here that does not hold."""
    is_whole: bool = False
    """So is the step that was copied here (`Stepped`), and it came when this replica had closed the
    round: nothing is missing but the primary's word."""
    copied_for: Call | None = None
    """The primary's call, while this backup makes its step."""
    commands: list[Command] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """There is a result, or there will be none."""
        return self.state in IS_OVER

    def given(self) -> frozenset[str]:
        """Of a primary that gathers: whose contributions are there, each by itself or in that of a
        neighbour."""
        return frozenset(q for p, (_, _, members) in self.parts for q in (p, *members))

    def calls_here(self) -> bool:
        """Others wait here for a result, and not because they are neighbours."""
        return any(sender not in self.neighbours for sender, _ in self.calls)

    def waits_for(self) -> list[str]:
        """Members that live and have not contributed, ascending: of a primary that gathers."""
        given = self.given()
        return [
            peer_id
            for peer_id, status in sorted(self.members.items())
            if status.is_waited_for
            and peer_id not in given
            and peer_id not in self.lacking
            and status.declared != 0
        ]

    def has_quorum(self) -> bool:
        """Of a primary that gathers: enough has come for what is late to count in the next
        exchange. That is more than half of the tokens, as far as they are known. Who has declared
        none yet may have as many as the largest contribution."""
        came = [num_tokens for _, (num_tokens, _, _) in self.parts if num_tokens]
        if not self.roster.quorum or len(came) < self.roster.quorum:
            return False
        declared = [self.members[p].declared for p in self.waits_for()]
        return sum(came) > sum(max(came) if n is None else n for n in declared)

    def is_late(self, sender: str) -> bool:
        """Of a contribution that comes: it is not in the result that was made here. Only who made
        it can tell: so nobody else brings it into the next exchange, and it counts once."""
        is_taken = self.state is DECIDED and self.roster.quorum > 0
        return is_taken and sender not in self.senders

    def awaited(self) -> list[str]:
        """Backups that live and have not confirmed their copy; in gossip averaging the partner,
        as long as it has not pulled everything."""
        elsewhere = self.elsewhere()
        return [p for p in self.pending if not self.is_dead(p) and p not in elsewhere]

    def back(self) -> frozenset[str]:
        """Members that live, if only for a question, and have promised nothing."""
        if self.roster.pulls:
            return frozenset()
        return frozenset(self.answering()).difference(self.promised, self.elsewhere())

    def is_leaderless(self) -> bool:
        """Its primary is another one, and dead to it."""
        return self.is_dead(self.ballot.primary)

    def rivals(self) -> tuple[int, int, list[tuple[int, Ballot]]]:
        """Of a primary: how many members that answer go by its ballot, as far as is known; how many
        go by that of one that does not lead; and other primaries' ballots, each with how many go by
        it besides the one that it names. That one has to say the same, if it answers."""
        claims, answering = dict(self.claims), self.answering()
        mine = [p for p in answering if p not in claims]
        named = Counter(ballot.primary for p, ballot in claims.items() if p != ballot.primary)
        found, undecided = [], 0
        for primary in sorted({ballot.primary for ballot in claims.values()}):
            said = [b for b in claims.values() if b.primary == primary]
            if primary not in answering:
                found.append((named[primary], max(said)))
            elif claims.get(primary) in said:
                found.append((named[primary], claims[primary]))
            else:
                undecided += named[primary]
        return len(mine), undecided, found

    def overthrown_by(self) -> Ballot | None:
        """Of a primary: the ballot of another one that more go by than may go by this one's, or as
        many, and it is the higher one."""
        mine, undecided, others = self.rivals()
        best = max(others, default=(0, self.ballot))
        return best[1] if best > (mine + undecided, self.ballot) else None

    def has_most(self) -> bool:
        """No other primary can come to overthrow this one: it need not wait for those that do not
        go by its ballot."""
        mine, undecided, others = self.rivals()
        return all((n + undecided, ballot) < (mine, self.ballot) for n, ballot in others)

    def elsewhere(self) -> frozenset[str]:
        """Who goes by another ballot, and is not waited for."""
        return frozenset(dict(self.claims)) if self.has_most() else frozenset()

    def is_dead(self, peer_id: str) -> bool:
        """To this replica; a stranger to the exchange is as good as dead."""
        status = self.members.get(peer_id)
        return peer_id != self.me and (status is None or not status.is_waited_for)

    def dead(self) -> frozenset[str]:
        """Members that are dead to this replica, and cannot be asked."""
        return frozenset(self.members).difference(self.answering())

    def answering(self) -> list[str]:
        """Those that live, and those that live and get nothing done."""
        return sorted(p for p, s in self.members.items() if s.life != DEAD)

    def voters(self) -> list[str]:
        """Who is asked before the primary is overthrown: all that answer, but the primary."""
        kept = {self.ballot.primary, *self.unshown}
        return [p for p in self.answering() if p not in kept]

    def living(self) -> list[str]:
        return sorted(p for p, s in self.members.items() if s.is_waited_for)

    def past(self) -> str | None:
        """A member that has finished the exchange and lives: the result is there, and from whom it
        is coming already it goes on to come. In gossip averaging each has its own."""
        if self.roster.pulls:
            return None
        past = [p for p in self.living() if self.members[p].is_past and p not in self.unshown]
        alive = [p for p in past if self.members[p].life == ALIVE]
        found = alive or past
        if self.pushing in found:
            return self.pushing
        return min(found, key=self._distance, default=None)

    def _distance(self, peer_id: str) -> int:
        """So that replicas ask different ones, and none changes to another one for each that is
        past the exchange too."""
        return crc32(f"{self.me}|{peer_id}".encode())

    def told(self) -> str | None:
        """Who lives and has said that the primary does."""
        is_there = self.host in self.answering() and self.host not in self.unshown
        return self.host if is_there else None

    def successor(self) -> str:
        """Who takes over from a dead primary: the first in the order that lives."""
        others = sorted({*self.members, self.me})
        for peer_id in (*self.roster.order, *others):
            may_lead = peer_id != self.me or self.roster.may_lead
            if may_lead and not self.is_dead(peer_id):
                return peer_id
        return self.me

    def next_ballot(self) -> Ballot:
        is_holder = self.roster.is_holder and not self.is_spoiled
        return self.highest().next_of(self.me, is_holder=is_holder)

    def highest(self) -> Ballot:
        return max(self.top, self.ballot)

    def is_for_primary(self) -> bool:
        """The own contribution goes to the primary of the present ballot, though others may have
        the result: late, it counts by way of that one."""
        has_gradient = self.begun is not None and self.begun[1] is not None
        is_another = self.ballot.primary != self.me and not self.is_leaderless()
        return has_gradient and is_another and self.roster.quorum > 0

    def target(self) -> str:
        """Whose answer to a push is the result."""
        if not self.is_dead(self.neighbour):
            return self.neighbour
        past = self.past()
        if past is not None and not self.is_for_primary():
            return past
        if not self.is_dead(self.ballot.primary):
            return self.ballot.primary
        return self.told() or self.successor()
