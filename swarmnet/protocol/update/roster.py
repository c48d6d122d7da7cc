"""Who does what in the update of one shard: fixed data of an exchange, with a term.

A roster is made once, from the records that a replica knows when the exchange begins there. It does
not follow the records any more: another primary means another *ballot*, which is proposed to all
and promised by all (Lamport, "Paxos made simple", 2001; the question before it is the pre-vote of
Raft, Ongaro 2014, section 9.6). Records need time to spread, so two replicas may begin with
different rosters. Of two primaries the one that more replicas follow goes on, and of two with as
many the one with the higher ballot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

ALIVE, SUSPECT, HUNG, DEAD = "alive", "suspect", "hung", "dead"
"""What is found of a peer. Its lease runs, it is being looked for, or it is over, as the failure
detector says; or it lives and gets nothing done, as the exchange has found: nobody waits for its
work, and it still has its say."""

MAX_TERM, MAX_LEAD = 1 << 20, 64
"""A takeover raises a term by two. Nothing raises it so often in one exchange, nor so far beyond
what a replica goes by."""


class Ballot(NamedTuple):
    """What a promise is about; ordered. A term is even where its primary does not hold the shard's
    optimizer state, and odd where it does: of two primaries with as many followers, the one with
    the state goes on."""

    term: int
    primary: str

    def next_of(self, peer_id: str, *, is_holder: bool) -> Ballot:
        """The ballot with which `peer_id` takes over from this one's primary."""
        return Ballot(self.term // 2 * 2 + 2 + is_holder, peer_id)

    @property
    def is_first(self) -> bool:
        """The exchange began with it: nobody has taken over."""
        return self.term < 2


def first_ballot(primary: str, *, is_holder: bool) -> Ballot:
    """The ballot with which an exchange begins. `is_holder`: `primary` holds the optimizer state
    of the shard, as its record says."""
    return Ballot(int(is_holder), primary)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What is known of a member of an exchange."""

    life: str = ALIVE
    declared: int | None = None
    """The tokens that it will contribute, as its record says; None before it has closed the
    round."""
    is_past: bool = False
    """It has finished the exchange: the result is there."""

    @property
    def is_waited_for(self) -> bool:
        """For its part of the exchange."""
        return self.life not in (HUNG, DEAD)


def still_known(
    before: Mapping[str, MemberStatus], now: Mapping[str, MemberStatus]
) -> dict[str, MemberStatus]:
    """The status of each member now, by peer id. Who was a member before and is none now is dead,
    and not forgotten: it may come back, and may have led others meanwhile."""
    gone = {p: replace(s, life=DEAD) for p, s in before.items() if p not in now}
    return gone | dict(now)


@dataclass(frozen=True, slots=True)
class Roster:
    """The roles of one shard's update, as one replica begins with them."""

    ballot: Ballot
    order: tuple[str, ...]
    """Who may be the primary, the first choice first; those that hold the state come first."""
    holders: tuple[str, ...] = ()
    """Those of them that hold the state, as their records say."""
    backups: tuple[str, ...] = ()
    """Who makes the step with the primary, if that is this replica."""
    is_holder: bool = False
    """This replica holds the state of the shard."""
    may_lead: bool = True
    """This replica may take over. One that is still joining may not."""
    clips: bool = True
    """The norm of all stages is needed before the step."""
    pulls: bool = False
    """Gossip averaging: the primary asks for the contributions, and each member is the primary of
    its own update. The pair is the roster."""
    quorum: int = 0
    """The least contributions with which the primary goes on after a grace period: what is late
    counts in the shard's next exchange. 0 where all are waited for."""


def pair(me: str, partner: str | None) -> Roster:
    """The roster of a meeting in gossip averaging, as each of the two sees it: it makes the step
    for itself, with what it pulls from the other one; and is done when the other has pulled too.
    Without a partner it steps alone."""
    others = () if partner is None else (partner,)
    ballot = first_ballot(me, is_holder=True)
    return Roster(ballot, (me,), (me,), others, is_holder=True, clips=False, pulls=True)
