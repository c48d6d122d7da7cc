"""The rules that the tables of `shard_update` name: guards, and what is done.

A rule changes the shard's state and adds commands. It is never called by anybody but the table."""

from __future__ import annotations

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.events import Call, Event, Handle
from swarmnet.protocol.update.roster import MAX_LEAD, MAX_TERM, Ballot
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
    STEPPING,
    ShardState,
)

# ---- guards -------------------------------------------------------------------------------------


def is_elsewhere(u: ShardState) -> bool:
    return u.past() is not None


def leads(u: ShardState) -> bool:
    return u.ballot.primary == u.me and u.past() is None


def is_misnamed(u: ShardState) -> bool:
    """The ballot takes this replica for a holder of the state, and it is none."""
    is_holder = u.roster.is_holder and not u.is_spoiled
    return u.ballot.primary == u.me and u.ballot.term % 2 == 1 and not is_holder


def is_next(u: ShardState) -> bool:
    """It takes over: by its own roster, or by that of others, who wait here for a result."""
    is_called = u.successor() == u.me or bool(u.calls)
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
    return u.agreed >= set(u.voters())


def is_complete(u: ShardState) -> bool:
    given = sum(num_tokens for _, (num_tokens, _) in u.parts)
    is_whole = not u.waits_for() and given >= u.counted
    return u.begun is not None and (u.is_expired or is_whole)


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
    return u.is_dead(u.ballot.primary) and u.past() is None


def has_lost_one(u: ShardState) -> bool:
    return not u.dead() <= u.lost


def must_ask_back(u: ShardState) -> bool:
    return bool(u.back() - u.asked)


# ---- after an event -----------------------------------------------------------------------------


def lead(u: ShardState) -> None:
    """It is the primary of the ballot that it goes by."""
    u.state = GATHERING
    u.is_expired = u.has_stood_still = False
    give_up_push(u)
    if u.begun is not None:
        add_part(u, u.me, *u.begun)
    if u.roster.pulls:
        u.commands += [do.Pull(p) for p in u.living()]
    if not u.ballot.is_first and u.answering():
        u.commands.append(do.Ask(tuple(u.answering()), u.ballot, is_final=True, count=u.count))
    set_deadline(u)
    pause(u)


def canvass(u: ShardState) -> None:
    u.state, u.agreed = CANVASSING, frozenset()
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
    """The next ballot is that of a holder; its own, where none is known to live."""
    holder = next((p for p in u.roster.holders if p != u.me and not u.is_dead(p)), None)
    is_holder = holder is not None
    go_by(u, u.ballot.next_of(u.me if holder is None else holder, is_holder=is_holder))


def stand_back(u: ShardState) -> None:
    """It leads nothing any more. Who waits here comes again, to where the result is."""
    u.state, u.parts, u.has_norm = FOLLOWING, (), False
    deny_all(u)


def push(u: ShardState) -> None:
    give_up_push(u)
    u.pushing = u.target()
    has_gradient = u.pushing == u.ballot.primary
    u.commands.append(do.Push(u.pushing, u.ballot, has_gradient))


def close(u: ShardState) -> None:
    """Nothing comes into the sum any more."""
    u.state, u.has_norm = CLIPPING, False
    u.senders = frozenset(p for p, _ in u.parts)
    parts = tuple((p, n, g) for p, (n, g) in u.parts if g is not None)
    u.attempt += 1
    u.commands.append(do.Sum(parts, u.senders, tuple(u.waits_for()), u.attempt))
    u.promised, u.asked, u.lost = u.senders, frozenset(), u.dead()
    u.parts = ()


def count_again(u: ShardState) -> None:
    """Who is dead may have led others by a higher ballot before: all that live are asked again."""
    u.lost |= u.dead()
    u.count += 1
    u.promised, u.asked = frozenset(), frozenset()


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
    if u.state is GATHERING:
        add_part(u, u.me, *u.begun)
        set_deadline(u)


def note(u: ShardState, event: on.Seen) -> None:
    u.members, u.counted, u.is_kept = event.members, event.counted, event.is_kept


def take_push(u: ShardState, event: on.Pushed) -> None:
    if may_go_by(u, event.ballot):
        go_by(u, event.ballot)
        if is_misnamed(u):
            nominate(u)
        elif leads(u):  # the sender knew it before
            lead(u)
    if event.ballot != u.ballot:
        u.commands.append(do.Deny(event.call, u.ballot))
        return
    if event.call is not None:
        wait(u, event.call, event.sender)
    if u.state is GATHERING:
        add_part(u, event.sender, event.num_tokens, event.gradient)


def deny(u: ShardState, event: on.Pushed | on.Asked) -> None:
    u.commands.append(do.Deny(event.call, u.ballot))


def give(u: ShardState, event: on.Pushed | on.Asked) -> None:
    u.commands.append(do.Give(event.call, u.result))


def hold(u: ShardState, event: on.Pushed | on.Asked) -> None:
    wait(u, event.call, event.sender if isinstance(event, on.Pushed) else "")


def vote(u: ShardState, event: on.Asked) -> None:
    if event.is_final:
        if event.ballot.primary == event.sender and may_go_by(u, event.ballot):
            go_by(u, event.ballot)
        is_promised = event.ballot == u.ballot
    else:
        is_promised = would_promise(u, event.ballot)
    answer = do.Agree if is_promised else do.Deny
    u.commands.append(answer(event.call, event.ballot if is_promised else u.ballot))


def vote_with_copy(u: ShardState, event: on.Asked) -> None:
    """The primary of the copied step has the promise. Who has that of all others instead would
    make another step."""
    if event.is_final and event.ballot != u.ballot:
        use_copy(u)
        give(u, event)
    else:
        vote(u, event)


def hold_for_primary(u: ShardState, event: on.Pushed) -> None:
    """Whoever goes by the same ballot cannot reach the primary, and waits here for its result. By a
    higher one the primary has been overthrown."""
    if event.ballot == u.ballot:
        hold(u, event)
    elif event.ballot > u.ballot:
        use_copy(u)
        give(u, event)
    else:
        deny(u, event)


def would_promise(u: ShardState, ballot: Ballot) -> bool:
    if ballot <= u.ballot or u.ballot.primary == u.me:
        return False
    if not u.is_dead(u.ballot.primary):
        u.commands.append(do.LookInto(u.ballot.primary))
        return False
    return u.successor() != u.me or u.next_ballot() < ballot


def count_agreed(u: ShardState, event: on.Agreed) -> None:
    if event.ballot == u.next_ballot():
        u.agreed |= {event.sender}


def denied(u: ShardState, event: on.Denied) -> None:
    if u.state not in (COPYING, COPIED) and may_go_by(u, event.ballot):
        return go_by(u, event.ballot)
    if u.state is CANVASSING:
        u.state, u.host = FOLLOWING, event.sender
        pause(u)
    else:
        push_failed(u, on.PushFailed(event.sender))
    return None


def copy(u: ShardState, event: on.MirrorCame) -> None:
    if event.ballot < u.ballot or event.ballot.primary != event.sender:
        u.commands.append(do.Deny(event.call, u.ballot))
        return
    fits = event.fits and u.state not in HAS_STEPPED
    if event.ballot > u.ballot:
        go_by(u, event.ballot)
    if not fits:
        u.commands.append(do.Refuse(event.call))
        return
    u.state, u.copied_for = COPYING, event.call
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
    """Who has promised a higher ballot since may be counted on for that one: nothing that an older
    call still brings may part it from the others."""
    if event.ballot < u.ballot:
        return
    u.state, u.result = ADOPTED, event.result
    end_with(u, is_own=False)


def ask_later(u: ShardState, event: on.ResultCame) -> None:
    """A step is being copied: the result is asked for once more when that has ended."""
    u.pushing = None


def count_promise(u: ShardState, event: on.Agreed) -> None:
    if event.ballot == u.ballot and event.is_final and event.count == u.count:
        u.promised |= {event.sender}


def adopt_instead(u: ShardState, event: on.ResultCame) -> None:
    """The step that was made here is not the one that holds."""
    if event.ballot >= u.ballot:
        spoil(u)
        adopt(u, event)


def push_failed(u: ShardState, event: on.PushFailed) -> None:
    if event.target == u.pushing:
        u.pushing, u.failed, u.host = None, event.target, None
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
    else:
        u.asked = frozenset()


def remind(u: ShardState) -> None:
    """Members that have closed the round and go by another ballot, or whose promise was
    lost."""
    late = [p for p in u.waits_for() if u.members[p].declared is not None]
    if late and not u.roster.pulls:
        u.commands.append(do.Ask(tuple(late), u.ballot, is_final=True, count=u.count))
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
    u.commands.append(do.Confirm(u.copied_for, u.result))
    u.copied_for = None
    if not must_use_copy(u):
        deny_all(u)


def use_copy(u: ShardState) -> None:
    """There is no primary to have its result from: the copied step makes the same."""
    u.state = ADOPTED
    end_with(u, is_own=False)


def not_copied(u: ShardState, event: on.StepFailed) -> None:
    if event.attempt != u.attempt:
        return
    u.commands.append(do.Refuse(u.copied_for))
    u.state, u.copied_for = FOLLOWING, None
    deny_all(u)


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


def may_go_by(u: ShardState, ballot: Ballot) -> bool:
    """It is higher, and not so far that only a liar can have raised it."""
    return u.ballot < ballot and ballot.term <= min(MAX_TERM, u.ballot.term + MAX_LEAD)


def go_by(u: ShardState, ballot: Ballot) -> None:
    """Promises a higher ballot: what was done under the one before does not hold."""
    if u.state in HAS_STEPPED:
        spoil(u)
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


def give_up_push(u: ShardState) -> None:
    if u.pushing is not None:
        u.commands.append(do.GiveUpPush())
    u.pushing = None


def pause(u: ShardState) -> None:
    if not u.is_paused:
        u.is_paused = True
        u.commands.append(do.Pause())


def add_part(u: ShardState, peer_id: str, num_tokens: int, gradient: Handle | None) -> None:
    parts = dict(u.parts)
    if num_tokens or peer_id not in parts:
        parts[peer_id] = (num_tokens, gradient)
    u.parts = tuple(sorted(parts.items(), key=lambda item: item[0]))


def end_with(u: ShardState, *, is_own: bool) -> None:
    assert u.result is not None
    u.parts, u.total = (), None
    u.begun = None if u.begun is None else (u.begun[0], None)  # its gradient is not needed any more
    give_up_push(u)
    u.commands.append(do.Adopt(u.result, is_own))
    u.commands += [do.Give(call, u.result) for _, call in u.calls]
    u.calls = ()
