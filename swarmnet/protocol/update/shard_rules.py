"""The rules that the tables of `shard_update` name: guards, and what is done.

A rule changes the shard's state and adds commands. It is never called by anybody but the table."""

from __future__ import annotations

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.events import Call, Event, Handle
from swarmnet.protocol.update.roster import MAX_LEAD, MAX_TERM, Ballot, first_ballot
from swarmnet.protocol.update.shard_state import (
    ABANDONED,
    ADOPTED,
    CANVASSING,
    CLIPPING,
    COPIED,
    COPYING,
    DECIDED,
    FOLLOWING,
    GATHERING,
    HAS_STEPPED,
    MIRRORING,
    NOTHING,
    STEPPING,
    ShardState,
)

MAX_DOUBTS = 3
"""So often a primary asks all for the word of one: who takes over from it twice in one exchange has
done so honestly, and hardly three times."""

# ---- guards -------------------------------------------------------------------------------------


def is_elsewhere(u: ShardState) -> bool:
    return u.past() is not None


def leads(u: ShardState) -> bool:
    return u.ballot.primary == u.me and u.past() is None


def is_misnamed(u: ShardState) -> bool:
    """The ballot takes this replica for a holder of the state, and it is none."""
    return u.ballot.primary == u.me and u.ballot.term % 2 == 1 and not has_state(u)


def has_state(u: ShardState) -> bool:
    """It holds the optimizer state of the shard as the others have it."""
    return u.roster.is_holder and not u.is_spoiled


def is_overthrown(u: ShardState) -> bool:
    return u.overthrown_by() is not None


def is_next(u: ShardState) -> bool:
    """It takes over: by its own roster, or by that of others, who wait here for a result."""
    is_called = u.successor() == u.me or u.calls_here()
    return u.roster.may_lead and u.is_dead(u.ballot.primary) and is_called


def must_take_over(u: ShardState) -> bool:
    return is_next(u) and u.told() is None and u.past() is None


def must_push(u: ShardState) -> bool:
    return u.begun is not None and u.target() not in (
        u.me,
        u.pushing,
        u.failed,
    )


def needs_no_takeover(u: ShardState) -> bool:
    return not is_next(u) or u.past() is not None


def all_agree(u: ShardState) -> bool:
    """Who tells a result that nothing shows, and that too few others know of, says nothing against
    it."""
    return u.agreed.union(dict(u.claims)) >= set(u.voters())


def is_outvoted(u: ShardState) -> bool:
    """All have answered, and as many have the result of another primary."""
    return all_agree(u) and is_overthrown(u)


def is_complete(u: ShardState) -> bool:
    given = sum(num_tokens for _, (num_tokens, _, _) in u.parts)
    is_whole = not u.waits_for() and given >= u.counted
    is_enough = u.is_graced and u.has_quorum()
    return u.begun is not None and (u.is_expired or is_whole or is_enough)


def may_grace(u: ShardState) -> bool:
    return u.begun is not None and not u.has_grace and u.has_quorum()


def is_mirrored(u: ShardState) -> bool:
    return not u.awaited() and not u.back()


def may_step(u: ShardState) -> bool:
    """A step on a new state takes the moments from those that have them, and lasts where a result
    of theirs does not. So it is for those whose state is lost, and not for who is cut off from it:
    that waits, until it hears from them or of their deaths."""
    return u.has_norm and not u.is_kept


def has_one_back(u: ShardState) -> bool:
    return not u.lost.isdisjoint(u.living())


def must_mirror(u: ShardState) -> bool:
    return not u.is_paused and not u.unmirrored.isdisjoint(u.living())


def must_use_copy(u: ShardState) -> bool:
    return is_decided_by_other(u) or (u.is_dead(u.ballot.primary) and u.past() is None)


def is_decided_by_other(u: ShardState) -> bool:
    """Of two replicas: its primary has finished the exchange, and with no other step than the one
    that was copied here. Of more it might have yielded to a third one since. A late contribution
    counts by way of it, or is to be told as lost."""
    primary = u.ballot.primary
    is_past = list(u.members) == [primary] and u.members[primary].is_past
    return u.is_whole and is_past and not u.is_for_primary()


def has_lost_one(u: ShardState) -> bool:
    return not u.dead() <= u.lost


def must_ask_back(u: ShardState) -> bool:
    return bool(u.back() - u.asked)


# ---- after an event -----------------------------------------------------------------------------


def lead(u: ShardState) -> None:
    """It is the primary of the ballot that it goes by."""
    u.state = GATHERING
    u.is_expired = u.has_stood_still = u.has_grace = u.is_graced = False
    u.claims, u.doubted = (), frozenset()
    give_up_push(u)
    if u.begun is not None:
        add_part(u, u.me, *u.begun, u.neighbours)
    if u.roster.pulls:
        u.commands += [do.Pull(p) for p in u.living()]
    if not u.ballot.is_first and u.answering():
        u.commands.append(do.Ask(tuple(u.answering()), u.ballot, is_final=True, count=u.count))
    set_deadline(u)
    pause(u)


def canvass(u: ShardState) -> None:
    u.state, u.agreed, u.claims = CANVASSING, frozenset(), ()
    give_up_push(u)
    ask_again(u)


def ask_again(u: ShardState) -> None:
    """The question before a takeover."""
    if u.voters():
        u.commands.append(do.Ask(tuple(u.voters()), u.next_ballot(), is_final=False, count=u.count))
        pause(u)


def take_over(u: ShardState) -> None:
    """All that live would promise: from now on there is no way back to the old primary."""
    go_by(u, u.next_ballot())


def nominate(u: ShardState) -> None:
    """It follows the first of the holders; where none is known to live, it leads without the
    state."""
    u.disowned |= {u.ballot}
    holder = next((p for p in u.roster.holders if p != u.me and not u.is_dead(p)), None)
    go_by(u, u.next_ballot() if holder is None else first_ballot(holder, is_holder=True))


def yield_to_most(u: ShardState) -> None:
    """The others have another primary. If that is dead here, they have its result."""
    found = u.overthrown_by()
    assert found is not None
    hosts = [p for p, ballot in u.claims if ballot.primary == found.primary]
    go_by(u, found)
    if u.is_dead(found.primary):
        u.host = hosts[0]
        pause(u)


def stand_back(u: ShardState) -> None:
    """It leads nothing any more. Who waits here comes again, to where the result is."""
    u.state, u.parts, u.has_norm = FOLLOWING, (), False
    deny_all(u)


def push(u: ShardState) -> None:
    give_up_push(u)
    u.pushing = u.target()
    has_gradient = u.pushing == u.ballot.primary != u.neighbour
    u.commands.append(do.Push(u.pushing, u.ballot, has_gradient))


def grace(u: ShardState) -> None:
    u.has_grace = True
    u.commands.append(do.SetGrace())


def close(u: ShardState) -> None:
    """Nothing comes into the sum any more."""
    u.state, u.has_norm = CLIPPING, False
    missing = tuple(u.waits_for())
    absent, late = (missing, ()) if u.is_expired else ((), missing)
    u.senders = u.given()
    parts = tuple((p, n, g) for p, (n, g, _) in u.parts if g is not None)
    u.attempt += 1
    u.commands.append(do.Sum(parts, u.senders, absent, u.attempt, late))
    u.promised, u.asked, u.lost = frozenset(p for p, _ in u.parts), frozenset(), u.dead()
    u.parts = ()


def count_again(u: ShardState) -> None:
    """Who is dead may have led others by a higher ballot before: all that live are asked again."""
    u.lost |= u.dead()
    u.count += 1
    u.promised, u.asked, u.claims = frozenset(), frozenset(), ()


def ask_back(u: ShardState) -> None:
    """Before the result is given out: who was dead a moment ago may have another one, and so may
    one that is waited for no more."""
    asked = u.back() - u.asked
    u.asked |= asked
    u.commands.append(do.Ask(tuple(sorted(asked)), u.ballot, is_final=True, count=u.count))
    pause(u)


def decide(u: ShardState) -> None:
    u.state = DECIDED
    end_with(u, is_own=True)


# ---- events -------------------------------------------------------------------------------------


def ignore(u: ShardState, event: Event) -> None:
    pass


def begin(u: ShardState, event: on.Begun) -> None:
    u.begun = (event.num_tokens, event.gradient)
    u.neighbours, u.neighbour = event.members, event.neighbour
    if u.state is GATHERING:
        add_part(u, u.me, *u.begun, u.neighbours)
        set_deadline(u)


def note(u: ShardState, event: on.Seen) -> None:
    u.members, u.counted, u.is_kept = event.members, event.counted, event.is_kept
    if not u.is_leaderless():
        u.agreed_to = None


def take_push(u: ShardState, event: on.Pushed) -> None:
    hear_of(u, event.sender, event.ballot)
    if event.ballot != u.ballot:
        u.commands.append(do.Deny(event.call, u.ballot))
        return
    if event.call is not None:
        wait(u, event.call, event.sender)
    drop_claim(u, event.sender)
    if u.state is GATHERING:
        add_part(u, event.sender, event.num_tokens, event.gradient, event.members)


def deny(u: ShardState, event: on.Pushed | on.Asked) -> None:
    u.commands.append(do.Deny(event.call, u.ballot))


def give(u: ShardState, event: on.Pushed | on.Asked) -> None:
    u.commands.append(do.Give(event.call, u.result, u.is_late(event.sender)))


def hold(u: ShardState, event: on.Pushed | on.Asked) -> None:
    wait(u, event.call, event.sender if isinstance(event, on.Pushed) else "")


def vote(u: ShardState, event: on.Asked) -> None:
    if event.is_final:
        if event.ballot.primary == event.sender:
            hear_of_leader(u, event)
        if event.ballot == u.ballot and u.agreed_to is not None:
            u.commands.append(do.Deny(event.call, u.agreed_to))
            return
        is_promised = event.ballot == u.ballot
    else:
        is_promised = would_promise(u, event.ballot)
        if is_promised and u.is_leaderless():
            u.agreed_to = event.ballot
    answer = do.Agree if is_promised else do.Deny
    u.commands.append(answer(event.call, event.ballot if is_promised else u.ballot))


def vote_with_copy(u: ShardState, event: on.Asked) -> None:
    """The primary of the copied step has the promise, as long as it lives and says nothing else:
    it is asked. Who has that of all others would make another step."""
    if not event.is_final or event.ballot == u.ballot:
        vote(u, event)
    elif event.sender == u.ballot.primary and event.ballot > u.ballot:
        use_copy(u)
        give(u, event)
    else:
        ask_primary(u)
        deny(u, event)


def hold_for_primary(u: ShardState, event: on.Pushed) -> None:
    """Whoever goes by the same ballot cannot reach the primary, and waits here for its result. By
    another one that may have been overthrown."""
    if event.ballot == u.ballot:
        hold(u, event)
    else:
        ask_primary(u)
        deny(u, event)


def would_promise(u: ShardState, ballot: Ballot) -> bool:
    if u.ballot.primary == u.me or not is_near(u, ballot):
        return False
    if ballot.primary == u.ballot.primary:
        return ballot > u.ballot  # it has not led yet
    if not u.is_leaderless():
        u.commands.append(do.LookInto(u.ballot.primary))
        return False
    successor = u.successor()
    if successor == ballot.primary:
        return True
    if u.is_unled:
        return successor != u.me or u.next_ballot() < ballot
    if successor != u.me:
        u.commands.append(do.LookInto(successor))
    return False


def count_agreed(u: ShardState, event: on.Agreed) -> None:
    if event.ballot == u.next_ballot():
        u.agreed |= {event.sender}


def denied(u: ShardState, event: on.Denied) -> None:
    """To a follower: by its own primary, that leads nothing any more, or never has; or by another
    one that knows who leads."""
    if event.count is not None and event.asked != u.next_ballot():
        return  # it answers what was asked before
    if is_disowned(u, event):
        leave(u, event)
    elif may_join(u, event.sender, event.ballot):
        go_by(u, event.ballot)
    elif u.state is CANVASSING and event.ballot.primary not in (u.me, u.ballot.primary):
        claim(u, event.sender, event.ballot)
    elif u.state is CANVASSING:
        u.state, u.host = FOLLOWING, event.sender
        pause(u)
    else:
        push_failed(u, on.PushFailed(event.sender))


def copy_denied(u: ShardState, event: on.Denied) -> None:
    """The primary of the copied step has given it up. The copy holds: whoever leads now asks for
    it."""
    is_answer = event.asked in (u.ballot, u.next_ballot())
    if is_answer and event.sender == u.ballot.primary != event.ballot.primary:
        use_copy(u)
    else:
        push_failed(u, on.PushFailed(event.sender))


def copy_failed(u: ShardState, event: on.Denied) -> None:
    """While the step is copied."""
    push_failed(u, on.PushFailed(event.sender))


def note_claim(u: ShardState, event: on.Denied) -> None:
    """To a primary: by one that goes by another ballot. It is not waited for any more, but for its
    contribution: either primary yields to the other (`ShardState.overthrown_by`). A backup that
    takes no step may have said so before it went on to a higher ballot: it is asked."""
    is_now = event.asked == u.ballot and event.count in (None, u.count)
    if is_now and event.ballot.primary != u.me and event.sender in u.members:
        doubt_all(u, event.sender, event.ballot)
        if event.count is not None:
            claim(u, event.sender, event.ballot)


def no_promise(u: ShardState, event: on.Agreed) -> None:
    """While the sum is not made promises are not counted, but who has made one is with this
    primary."""
    if event.is_final and event.ballot == u.ballot and event.count == u.count:
        drop_claim(u, event.sender)


def copy(u: ShardState, event: on.MirrorCame) -> None:
    """Of the primary that has the promise. Another one is to announce itself first."""
    if event.ballot != u.ballot or event.ballot.primary != event.sender:
        if leads_now(u) and event.ballot.primary == event.sender:
            hear_of_leader(u, event)
        u.commands.append(do.Deny(event.call, u.ballot))
        return
    if not event.fits:
        u.commands.append(do.Refuse(event.call))
        return
    u.state, u.copied_for = COPYING, event.call
    u.is_whole = u.begun is not None
    u.attempt += 1
    u.commands.append(do.Repeat(event.step, u.attempt))


def copy_for(u: ShardState, event: on.MirrorCame) -> None:
    """Of the step that is being made, after the first call broke; or of another's."""
    if event.ballot == u.ballot and event.ballot.primary == event.sender:
        u.copied_for = event.call
    else:
        refuse(u, event)


def refuse(u: ShardState, event: on.MirrorCame) -> None:
    u.commands.append(do.Refuse(event.call))


def adopt(u: ShardState, event: on.ResultCame) -> None:
    """Who has promised another ballot since may be counted on for that one: nothing that an older
    call still brings may part it from the others."""
    if not is_of_now(u, event):
        return
    if not is_shown(u, event):
        u.unshown |= {event.sender}
        push_failed(u, on.PushFailed(event.sender))
        return
    u.state, u.result = ADOPTED, event.result
    end_with(u, is_own=False)


def adopt_if_shown(u: ShardState, event: on.ResultCame) -> None:
    """The answer to the question before a takeover, or to an announcement. A result that nothing
    shows is what its teller says of whom it goes by, no more."""
    if event.made is None or is_shown(u, event):
        adopt(u, event)
    elif is_of_now(u, event) and event.sender in u.members:
        claim(u, event.sender, event.made)


def ask_later(u: ShardState, event: on.ResultCame) -> None:
    """A step is being copied: the result is asked for once more when that has ended."""
    u.pushing = None


def count_promise(u: ShardState, event: on.Agreed) -> None:
    if event.ballot == u.ballot and event.is_final and event.count == u.count:
        u.promised |= {event.sender}
        drop_claim(u, event.sender)


def adopt_instead(u: ShardState, event: on.ResultCame) -> None:
    """The step that was made here is not the one that holds."""
    if is_of_now(u, event) and is_shown(u, event):
        spoil(u)
    adopt_if_shown(u, event)


def push_failed(u: ShardState, event: on.PushFailed) -> None:
    if event.target == u.pushing:
        u.pushing, u.failed, u.host, u.neighbour = None, event.target, None, ""
        pause(u)


def go_without(u: ShardState, event: on.PushFailed) -> None:
    """Gossip averaging: the partner has no offer. Of another exchange, what was asked before
    this replica became the primary."""
    if u.roster.pulls:
        u.lacking |= {event.target}


def again(u: ShardState, event: on.Again) -> None:
    u.is_paused, u.failed, u.host = False, None, None
    if u.state is CANVASSING:
        ask_again(u)
    elif u.state is GATHERING:
        remind(u)
    elif u.state is CLIPPING and u.has_stood_still:
        ask_all(u)
    else:
        u.asked = frozenset()


def wait_no_longer(u: ShardState, event: on.Unled) -> None:
    u.is_unled = u.is_leaderless()
    if u.state is CANVASSING:
        ask_again(u)


def remind(u: ShardState) -> None:
    """Members that have closed the round and go by another ballot, or whose promise was lost; all,
    where one goes by another ballot, or this replica has stood still."""
    late = {p for p in u.waits_for() if u.members[p].declared is not None}
    if u.has_stood_still:
        late.update(u.answering())
        late -= dict(u.parts).keys()
    if late and not u.roster.pulls:
        u.commands.append(do.Ask(tuple(sorted(late)), u.ballot, is_final=True, count=u.count))
    pause(u)


def ask_all(u: ShardState) -> None:
    """Whether they go by this primary's ballot."""
    if u.answering():
        u.commands.append(do.Ask(tuple(u.answering()), u.ballot, is_final=True, count=u.count))
        pause(u)


def summed(u: ShardState, event: on.Summed) -> None:
    if event.attempt != u.attempt:
        return
    u.total = event.total
    if u.roster.clips:
        backups = tuple(sorted(_backups(u).intersection(u.living())))
        u.commands.append(do.FindNorm(u.attempt, u.total, backups, u.ballot))
    else:
        u.has_norm = True


def clip_known(u: ShardState, event: on.ClipKnown) -> None:
    if event.attempt == u.attempt:
        u.has_norm = True


def step(u: ShardState) -> None:
    u.state, u.has_norm = STEPPING, False
    if u.lost or u.has_stood_still:
        count_again(u)
    u.commands.append(do.Step(u.total, u.ballot, u.attempt))
    u.pending = _backups(u) if u.total is not None else frozenset()
    u.unmirrored = u.pending
    mirror(u)
    if u.roster.pulls:
        u.commands.append(do.SetDeadline())  # for the partner to pull what is given here


def mirror(u: ShardState) -> None:
    """To the backups that live and have not been sent it; to the others when they are back."""
    backups = u.unmirrored & frozenset(u.living())
    u.unmirrored -= backups
    if backups:
        u.commands.append(do.Mirror(u.total, tuple(sorted(backups)), u.ballot, u.attempt))


def mirror_failed(u: ShardState, event: on.MirrorFailed) -> None:
    """A backup that lives has to have the step before anybody gets the result."""
    if event.attempt == u.attempt:
        u.unmirrored |= {event.sender} & u.pending
        pause(u)


def stepped(u: ShardState, event: on.Stepped) -> None:
    if event.attempt != u.attempt:
        return
    u.state, u.result = MIRRORING, event.result


def copied(u: ShardState, event: on.Stepped) -> None:
    if event.attempt != u.attempt:
        return
    u.state, u.result = COPIED, event.result
    u.is_whole &= event.is_whole
    u.commands.append(do.Confirm(u.copied_for, u.result))
    u.copied_for = None
    if not must_use_copy(u):
        deny_others(u)


def use_copy(u: ShardState) -> None:
    """There is no primary to have its result from: the copied step makes the same."""
    u.state = ADOPTED
    end_with(u, is_own=False)


def not_copied(u: ShardState, event: on.StepFailed) -> None:
    if event.attempt != u.attempt:
        return
    u.commands.append(do.Refuse(u.copied_for))
    u.state, u.copied_for = FOLLOWING, None
    deny_others(u)


def fell_through(u: ShardState, event: on.StepFailed) -> None:
    """The sum or the step could not be made here: it is tried again, wherever the primary is by
    then."""
    if event.attempt == u.attempt:
        u.pending, u.unmirrored, u.served = frozenset(), frozenset(), frozenset()
        stand_back(u)


def confirmed(u: ShardState, event: on.Confirmed | on.Refused) -> None:
    if event.attempt != u.attempt:
        return
    u.pending -= {event.sender}
    u.unmirrored -= {event.sender}
    u.served |= {event.sender}


def expire_pair(u: ShardState, event: on.DeadlinePassed) -> None:
    """Gossip averaging: the partner does not come for what is given here."""
    if u.roster.pulls:
        u.pending = frozenset()


def expire(u: ShardState, event: on.DeadlinePassed) -> None:
    u.is_expired = u.begun is not None


def end_grace(u: ShardState, event: on.GracePassed) -> None:
    u.is_graced = u.has_grace


def doubt(u: ShardState, event: on.StoodStill) -> None:
    """Whoever has contributed may follow another primary by now. It is asked before the result is
    given out."""
    u.has_stood_still = True


def doubt_promises(u: ShardState, event: on.StoodStill) -> None:
    count_again(u)


def abandon(u: ShardState, event: on.MovedOn) -> None:
    if u.state in HAS_STEPPED:
        spoil(u)
    u.state = ABANDONED
    deny_all(u)
    u.commands.append(do.Abandon())


# ---- parts of rules -----------------------------------------------------------------------------


def is_near(u: ShardState, ballot: Ballot) -> bool:
    """It is not so far that only a liar can have raised it, and somebody may lead by it."""
    is_high = ballot.term > min(MAX_TERM, u.highest().term + MAX_LEAD)
    return not is_high and ballot not in u.disowned


def leads_now(u: ShardState) -> bool:
    return u.state in (GATHERING, CLIPPING) or u.state in HAS_STEPPED


def may_join(u: ShardState, sender: str, ballot: Ballot) -> bool:
    """A follower that is told of another ballot takes nothing from a primary that lives and leads,
    unless that one itself says so: by a higher ballot than its own, so after it led. From a dead
    one the next in order takes over, which may also say who has; or the one to which this replica
    has agreed, which was that then. Where records differ, it may be that nobody leads then: after
    a while whoever would."""
    if ballot.primary == u.me or sender not in u.members or not is_near(u, ballot):
        return False
    if sender == u.ballot.primary:
        return ballot > u.ballot
    if not u.is_leaderless() or (ballot <= u.ballot and u.is_dead(ballot.primary)):
        return False
    is_next = u.successor() in (ballot.primary, sender)
    return is_next or ballot == u.agreed_to or u.is_unled


def hear_of(u: ShardState, sender: str, ballot: Ballot) -> None:
    """`sender` goes by a ballot, as it says."""
    if ballot.primary == u.me:
        if is_near(u, ballot) and ballot > u.highest():
            u.top = ballot
    elif not leads_now(u) and ballot != u.ballot:
        if may_join(u, sender, ballot):
            go_by(u, ballot)
        else:
            u.commands.append(do.LookInto(u.ballot.primary))


def hear_of_leader(u: ShardState, event: on.Asked | on.MirrorCame) -> None:
    """The sender leads, as it says."""
    if not leads_now(u):
        hear_of(u, event.sender, event.ballot)
    elif event.sender in u.members:
        doubt_all(u, event.sender, event.ballot)


def doubt_all(u: ShardState, sender: str, ballot: Ballot) -> None:
    """One goes by another ballot, so those on whom this primary counts may have left it: they are
    asked before the result is given out. Not often for one, lest that keeps it at asking."""
    times = [p for p, _ in u.doubted if p == sender]
    if u.state not in HAS_STEPPED:
        u.has_stood_still = True
        pause(u)
    elif (sender, ballot) not in u.doubted and len(times) < MAX_DOUBTS:
        u.doubted |= {(sender, ballot)}
        count_again(u)


def is_disowned(u: ShardState, event: on.Denied) -> bool:
    """Its own primary, to which it has pushed under the present ballot, goes by another one."""
    return (
        event.asked == u.ballot
        and event.sender == u.ballot.primary
        and event.ballot != u.ballot
        and event.sender in u.members
    )


def leave(u: ShardState, event: on.Denied) -> None:
    """Goes to where its primary goes, which makes nothing of the present ballot any more, or never
    has. Where that leads round in a circle, nobody leads: it does."""
    u.disowned |= {u.ballot}
    if event.ballot.primary != u.me and is_near(u, event.ballot):
        go_by(u, event.ballot)
    elif may_begin(u):
        go_by(u, u.next_ballot())
    else:
        push_failed(u, on.PushFailed(event.sender))


def may_begin(u: ShardState) -> bool:
    """Without the optimizer state only where no holder leads that lives."""
    named = {ballot.primary for ballot in u.disowned}
    others = [p for p in u.roster.holders if p != u.me and not u.is_dead(p)]
    return u.roster.may_lead and (has_state(u) or named.issuperset(others))


def claim(u: ShardState, peer_id: str, ballot: Ballot) -> None:
    """It goes by another ballot, or has the result of another primary."""
    u.claims = tuple(sorted({**dict(u.claims), peer_id: ballot}.items()))
    u.promised -= {peer_id}


def drop_claim(u: ShardState, peer_id: str) -> None:
    u.claims = tuple(item for item in u.claims if item[0] != peer_id)


def is_of_now(u: ShardState, event: on.ResultCame) -> bool:
    """It answers a call under the present ballot, or the question before a takeover."""
    return event.ballot in (u.ballot, u.next_ballot())


def is_shown(u: ShardState, event: on.ResultCame) -> bool:
    """A result is of who may have one: nobody bears witness to itself. It bears the signature of
    the primary that this replica goes by, or has begun with, or its own; or it is told by that
    primary, or by the one that comes after a dead one. Who is past the exchange, as others are too,
    may tell that of a third. And a replica that hears of nobody else has nobody to ask."""
    made, sender = event.made, event.sender
    if made is None or made.primary in (u.me, u.ballot.primary, u.roster.ballot.primary):
        return True
    if sender == u.ballot.primary or (u.is_leaderless() and sender == u.successor()):
        return True
    is_past = sender in u.members and u.members[sender].is_past
    return (is_past and made.primary != sender) or u.answering() == [sender]


def ask_primary(u: ShardState) -> None:
    """Whether it leads yet: it is asked for what it would promise to nobody."""
    u.commands.append(do.Ask((u.ballot.primary,), u.next_ballot(), is_final=False, count=u.count))


def go_by(u: ShardState, ballot: Ballot) -> None:
    """Promises another ballot: what was done under the one before does not hold."""
    if u.state in HAS_STEPPED:
        spoil(u)
    u.top = max(u.highest(), ballot)
    u.claims, u.doubted, u.agreed_to, u.is_unled = (), frozenset(), None, False
    u.state, u.ballot, u.has_norm = FOLLOWING, ballot, False
    u.parts, u.agreed, u.host, u.failed = (), frozenset(), None, None
    u.total, u.result, u.pending, u.unmirrored = None, None, frozenset(), frozenset()
    u.promised, u.asked = frozenset(), frozenset()
    u.senders, u.served = frozenset(), frozenset()
    give_up_push(u)
    deny_all(u)


def _backups(u: ShardState) -> frozenset[str]:
    """Who makes the step too."""
    return frozenset(u.roster.backups) - u.served - {u.me}


def set_deadline(u: ShardState) -> None:
    if not u.roster.pulls:  # the calls that pull end of themselves
        u.commands.append(do.SetDeadline())


def spoil(u: ShardState) -> None:
    if u.total is not None:
        u.commands.append(do.Spoiled())
        u.is_spoiled = True
    u.pending, u.unmirrored = frozenset(), frozenset()


def wait(u: ShardState, call: Call, sender: str) -> None:
    """The call is answered later. Who pushes again has given its earlier push up."""
    earlier = [item for item in u.calls if sender and item[0] == sender]
    u.commands += [do.Deny(given_up, u.ballot) for _, given_up in earlier if given_up != call]
    u.calls = (*(item for item in u.calls if item not in earlier), (sender, call))


def deny_all(u: ShardState) -> None:
    """Who waits here has to go elsewhere, or to come again under the present ballot."""
    u.commands += [do.Deny(call, u.ballot) for _, call in u.calls]
    u.calls = ()


def deny_others(u: ShardState) -> None:
    """But not neighbours, which wait here for the primary's result as this replica does."""
    kept = tuple(item for item in u.calls if item[0] in u.neighbours)
    u.calls = tuple(item for item in u.calls if item not in kept)
    deny_all(u)
    u.calls = kept


def give_up_push(u: ShardState) -> None:
    if u.pushing is not None:
        u.commands.append(do.GiveUpPush())
    u.pushing = None


def pause(u: ShardState) -> None:
    if not u.is_paused:
        u.is_paused = True
        u.commands.append(do.Pause())


def add_part(
    u: ShardState,
    peer_id: str,
    num_tokens: int,
    gradient: Handle | None,
    members: tuple[str, ...],
) -> None:
    """Neighbours may have summed theirs first, and one of them may not have heard whether its own
    is in that, and give it too. Of two contributions with one in both, that counts which has all
    of the other's."""
    parts, whole = dict(u.parts), {peer_id, *members}
    alike = [p for p, (_, _, others) in u.parts if not whole.isdisjoint((p, *others))]
    if num_tokens and all(whole.issuperset((p, *parts[p][2])) for p in alike):
        parts |= dict.fromkeys(alike, NOTHING)
        parts[peer_id] = (num_tokens, gradient, members)
    parts.setdefault(peer_id, NOTHING)
    u.parts = tuple(sorted(parts.items(), key=lambda item: item[0]))


def end_with(u: ShardState, *, is_own: bool) -> None:
    assert u.result is not None
    u.parts, u.total = (), None
    u.begun = None if u.begun is None else (u.begun[0], None)  # its gradient is not needed any more
    give_up_push(u)
    u.commands.append(do.Adopt(u.result, is_own))
    u.commands += [do.Give(call, u.result, u.is_late(sender)) for sender, call in u.calls]
    u.calls = ()
