"""The update of one shard at one replica, as a table. Pure: no clock, no task, no tensor.

Why there is one result
-----------------------
One replica, the *primary*, sums the contributions of all members and makes the step. Which one it
is follows from the *ballot* (`roster`) that a replica has promised. What each state promises, and
who may be in which together:

==========  =======================================================================================
FOLLOWING   Promised its ballot, and contributes to no other. It has no result and makes none.
CANVASSING  As FOLLOWING. Its primary is dead to it, and it is next, or others wait here for a
            result: it asks whether the primary is dead to all others too. One to which it lives
            says no, so that a single lost link or false suspicion overthrows nobody.
GATHERING   Primary. It has no sum: any number may be here under different ballots, and the sum
            needs every member that lives, each of which has promised one ballot only.
CLIPPING    Its sum is made: what comes now is too late. It may still yield without harm.
            Without the optimizer state it stays here while a replica that lives may have that.
STEPPING    It makes the step, and so do its backups. If it yields now, its state has seen another
            gradient than that of the others (`Spoiled`), and is fetched again.
MIRRORING   Its step is made; a backup that lives has not answered, or a member that lives has not
            promised. No result has been given out.
COPYING     Backup that makes the primary's step. It answers no question before that has ended.
COPIED      The step made as a backup. The result is the primary's, as long as that lives: all
            have the same bits then, whatever machine they run on. The copy stands in for it when
            the primary is dead, and is given out no earlier: until then another backup may not
            have it. Of two replicas it does too when the primary is past the exchange.
DECIDED     The step survives the death of all but one of the backups that lived. It is given out.
ADOPTED     The result of another replica. It is given out too.
ABANDONED   The stage has moved on by more than one exchange. The parameters must be fetched.
==========  =======================================================================================

A primary gives its result out when every backup that lives has it; one that was dead when the step
began, and is back, gets it first. So whoever overthrows the primary reaches a replica with the
result (a backup, or one to which the result was given), and that answers with it; or none of those
that live has it, all of them promise the new ballot, and none takes the old primary's step or
result any more: its backups deny it.

Nobody is believed who says that it has taken over from a primary that lives. A follower leaves its
primary for two reasons: that one is dead to it, and the next in order announces itself
(`may_join`); or that one says that it goes by another ballot (`leave`). A primary leads by no
ballot again that it has left, so what it says of itself sets its followers free, to a lower ballot
too. Where records differ, some are led in this way from one that has never led to one that does;
who is led round in a circle leads itself. After a death nobody may lead then, for each waits for
another one: so after a while anybody may (`Unled`).

A primary yields where others are followed by more (`ShardState.overthrown_by`): it asks all, and
each says by which ballot it goes. Who is named does not count, so one that has taken over in its
own eyes only is not waited for, and yields when it has asked the others itself. The same count
decides between two that have begun as primaries. One that hears of another primary has all promise
anew, since they may have left it (`doubt_all`). Who has no primary that lives and agrees to a
takeover promises nothing to the one that it had, so that nobody is counted on twice.

A contribution is a promise, and so is the answer to an announcement. The answer to a question binds
nobody. Who has not contributed may follow another primary, though it lives and had no tokens or not
enough time: it is asked before the result is given out. Who was dead to a primary may have led
others by a higher ballot before it died: so a primary that has lost a member has all that live
promise once more before it gives its result out; what they promised before that count does not
count. Who has promised takes no result any more that an older call still brings: only that of a
call under the present ballot. Two results can only come from two replicas that were dead to each
other, with all those that could have told; or to one of which all others were, and some of them are
when it hears of one again. That is a partition; `divergence` ends it.

The moments survive the deaths of all owners but one. Of three and more there is an exception: where
the primary dies before it gives its result out, a backup that has copied the step gives it out, and
does not mirror it on; with that backup its moments die, and older ones are left. Where records
differ, an exchange may begin with two primaries: the one that is overthrown while it steps has a
spoiled state, and counts as a death.

A contribution counts once. It goes to the primary of the present ballot only; who promises another
ballot gives up its push under the one before, and the sum that it was in does not hold.

Everybody waits for somebody who is not waiting for it: rosters differ, so two replicas may each
take the other for the primary's successor. So one that is waited for takes over.

No wait is for ever. Every one ends with an answer, by the death of the peer that is waited for, or,
for contributions of peers that live, by the deadline. What is lost on the way is asked for again.
A peer that lives and gets nothing done, a primary above all, is not waited for, by the word of the
caller (`HUNG` in `Seen`). It may have a result all the same, and more so with one owner, where no
backup denies it. So it is asked before a takeover, if it is not the one that is overthrown, and for
its promise before a result is given out. A process that stood still was dead to the others
meanwhile: what it was promised before does not count (`StoodStill`).

Who has the result answers with it, and a member may lie. So a result is taken of those who may have
one (`is_shown`). Of any other counts what it says of its teller: whom that goes by.

Others may take a replica for the primary that does not lead, by old records: nobody leads because
another one says so. It says by which ballot it goes, and they go there.

In gossip averaging (`pulls`) each of a pair is the primary of its own update, which nobody else
takes a result from: it promises nothing, and follows nobody.

The tables
----------
`EVENTS` names the rule for each event in each state; there is no other way in. `STATES` holds what
is checked after every event, in order, until nothing fires. The shape is that of h11's `_state.py`,
with its event-triggered and state-triggered transitions, and of dask's worker state machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmnet.protocol.update import events as on
from swarmnet.protocol.update import shard_rules as rules
from swarmnet.protocol.update.commands import Command
from swarmnet.protocol.update.events import Event
from swarmnet.protocol.update.roster import Roster
from swarmnet.protocol.update.shard_state import (
    ABANDONED,
    ADOPTED,
    CANVASSING,
    CLIPPING,
    COPIED,
    FOLLOWING,
    GATHERING,
    IS_OVER,
    MIRRORING,
    STEPPING,
    ShardState,
    State,
)

Rule = Callable[[ShardState, Any], None]
Guard = Callable[[ShardState], bool]


def _row(default: Rule, **others: Rule) -> dict[State, Rule]:
    """The rule of an event in each state: `default` where none is named."""
    return {state: others.get(state.value, default) for state in State}


no = rules.ignore

EVENTS: dict[type[Event], dict[State, Rule]] = {
    on.Begun: _row(
        no,
        following=rules.begin,
        canvassing=rules.begin,
        gathering=rules.begin,
        copying=rules.begin,
        copied=rules.begin,
    ),
    on.Seen: _row(rules.note, decided=no, adopted=no, abandoned=no),
    on.Pushed: _row(
        rules.take_push,
        copying=rules.hold,
        copied=rules.hold_for_primary,
        decided=rules.give,
        adopted=rules.give,
        abandoned=rules.deny,
    ),
    on.Asked: _row(
        rules.vote,
        copying=rules.hold,
        copied=rules.vote_with_copy,
        decided=rules.give,
        adopted=rules.give,
        abandoned=rules.deny,
    ),
    on.Agreed: _row(
        no,
        canvassing=rules.count_agreed,
        gathering=rules.no_promise,
        clipping=rules.no_promise,
        stepping=rules.count_promise,
        mirroring=rules.count_promise,
    ),
    on.Denied: _row(
        no,
        following=rules.denied,
        canvassing=rules.denied,
        copying=rules.copy_failed,
        copied=rules.copy_denied,
        gathering=rules.note_claim,
        clipping=rules.note_claim,
        stepping=rules.note_claim,
        mirroring=rules.note_claim,
    ),
    on.MirrorCame: _row(
        rules.copy,
        copying=rules.copy_for,
        copied=rules.refuse,
        decided=rules.refuse,
        adopted=rules.refuse,
        abandoned=rules.refuse,
    ),
    on.ResultCame: _row(
        no,
        following=rules.adopt,
        canvassing=rules.adopt_if_shown,
        gathering=rules.adopt_if_shown,
        clipping=rules.adopt_if_shown,
        copying=rules.ask_later,
        copied=rules.adopt,
        stepping=rules.adopt_instead,
        mirroring=rules.adopt_instead,
    ),
    on.PushFailed: _row(
        no,
        following=rules.push_failed,
        copying=rules.push_failed,
        copied=rules.push_failed,
        gathering=rules.go_without,
    ),
    on.Summed: _row(no, clipping=rules.summed),
    on.ClipKnown: _row(no, clipping=rules.clip_known),
    on.Stepped: _row(no, stepping=rules.stepped, copying=rules.copied),
    on.StepFailed: _row(
        no, copying=rules.not_copied, clipping=rules.fell_through, stepping=rules.fell_through
    ),
    on.Confirmed: _row(
        no,
        gathering=rules.confirmed,
        clipping=rules.confirmed,
        stepping=rules.confirmed,
        mirroring=rules.confirmed,
    ),
    on.Refused: _row(no, stepping=rules.confirmed, mirroring=rules.confirmed),
    on.MirrorFailed: _row(no, stepping=rules.mirror_failed, mirroring=rules.mirror_failed),
    on.DeadlinePassed: _row(
        no, gathering=rules.expire, stepping=rules.expire_pair, mirroring=rules.expire_pair
    ),
    on.GracePassed: _row(no, gathering=rules.end_grace),
    on.Again: _row(rules.again, decided=no, adopted=no, abandoned=no),
    on.Unled: _row(no, following=rules.wait_no_longer, canvassing=rules.wait_no_longer),
    on.StoodStill: _row(
        no,
        gathering=rules.doubt,
        clipping=rules.doubt,
        stepping=rules.doubt_promises,
        mirroring=rules.doubt_promises,
    ),
    on.MovedOn: _row(
        no,
        following=rules.abandon,
        canvassing=rules.abandon,
        gathering=rules.abandon,
        clipping=rules.abandon,
        stepping=rules.abandon,
        mirroring=rules.abandon,
        copied=rules.abandon,
    ),
}
"""The rule for each event in each state; the first one is for the states that are not named."""

STATES: dict[State, tuple[tuple[Guard, Callable[[ShardState], None]], ...]] = {
    FOLLOWING: (
        (rules.is_misnamed, rules.nominate),
        (rules.leads, rules.lead),
        (rules.must_take_over, rules.canvass),
        (rules.must_push, rules.push),
    ),
    CANVASSING: (
        (rules.needs_no_takeover, rules.stand_back),
        (rules.is_outvoted, rules.yield_to_most),
        (rules.all_agree, rules.take_over),
    ),
    GATHERING: (
        (rules.is_elsewhere, rules.stand_back),
        (rules.is_overthrown, rules.yield_to_most),
        (rules.is_complete, rules.close),
        (rules.may_grace, rules.grace),
    ),
    CLIPPING: (
        (rules.is_elsewhere, rules.stand_back),
        (rules.is_overthrown, rules.yield_to_most),
        (rules.has_one_back, rules.stand_back),
        (rules.may_step, rules.step),
    ),
    COPIED: (
        (rules.must_use_copy, rules.use_copy),
        (rules.must_push, rules.push),
    ),
    STEPPING: (
        (rules.is_overthrown, rules.yield_to_most),
        (rules.must_mirror, rules.mirror),
        (rules.must_ask_back, rules.ask_back),
    ),
    MIRRORING: (
        (rules.is_overthrown, rules.yield_to_most),
        (rules.must_mirror, rules.mirror),
        (rules.has_lost_one, rules.count_again),
        (rules.must_ask_back, rules.ask_back),
        (rules.is_mirrored, rules.decide),
    ),
}
"""What is checked after every event: the first guard that holds fires its rule."""


class ShardUpdate:
    """The update of one shard in one exchange, at one replica. `handle` is the only way in."""

    __slots__ = ("shard",)

    def __init__(self, me: str, roster: Roster) -> None:
        self.shard = ShardState(me, roster, roster.ballot)

    def handle(self, event: Event) -> list[Command]:
        """Takes an event in. Returns what is to be done now, in this order."""
        shard = self.shard
        shard.commands = []
        EVENTS[type(event)][shard.state](shard, event)
        while True:
            for guard, rule in STATES.get(shard.state, ()):
                if guard(shard):
                    rule(shard)
                    break
            else:
                return shard.commands

    @property
    def is_over(self) -> bool:
        """There is a result, or there will be none."""
        return self.shard.state in IS_OVER

    @property
    def may_step(self) -> bool:
        """The optimizer state of the shard is being changed here, or may be."""
        return self.shard.state not in (FOLLOWING, ADOPTED, ABANDONED)
