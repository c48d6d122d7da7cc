"""Races in the update of a shard, each as a few events at one replica. Replicas: a (primary) and b
hold the optimizer state, c does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import (
    DEAD,
    HUNG,
    MAX_LEAD,
    SUSPECT,
    Ballot,
    MemberStatus,
    Roster,
    first_ballot,
    still_known,
)
from swarmnet.protocol.update.roster import pair as pair_of
from swarmnet.protocol.update.shard_rules import MAX_DOUBTS
from swarmnet.protocol.update.shard_state import (
    ABANDONED,
    ADOPTED,
    CANVASSING,
    CLIPPING,
    COPIED,
    DECIDED,
    FOLLOWING,
    GATHERING,
    MIRRORING,
    STEPPING,
)
from swarmnet.protocol.update.shard_update import ShardUpdate

A = first_ballot("a", is_holder=True)
B = A.next_of("b", is_holder=True)
C = A.next_of("c", is_holder=False)
LIVES, GONE, PAST = MemberStatus(), MemberStatus(life=DEAD), MemberStatus(is_past=True)
HANGS = MemberStatus(life=HUNG)


def replica(me: str, peers: str = "abc", holders: str = "ab", **options: Any) -> ShardUpdate:
    """It has closed the round, and all others live."""
    roster = Roster(A, tuple(peers), tuple(holders), tuple(holders), me in holders, **options)
    u = ShardUpdate(me, roster)
    sees(u)
    u.handle(on.Begun(1, f"gradient of {me}"))
    return u


def sees(u: ShardUpdate, **statuses: MemberStatus) -> list[do.Command]:
    """What is known of the others now; those that are not named live."""
    members = {p: statuses.get(p, LIVES) for p in u.shard.roster.order if p != u.shard.me}
    return u.handle(on.Seen(members))


def pushed(sender: str, ballot: Ballot = A, num_tokens: int = 1) -> on.Pushed:
    gradient = f"gradient of {sender}" if num_tokens else None
    return on.Pushed(f"push of {sender}", sender, ballot, num_tokens, gradient)


def clipping(**options: Any) -> ShardUpdate:
    """The primary, with the contributions of all."""
    u = replica("a", **options)
    u.handle(pushed("b"))
    (made,) = [c for c in u.handle(pushed("c")) if isinstance(c, do.Sum)]
    assert [p for p, _, _ in made.parts] == ["a", "b", "c"]
    u.handle(on.Summed("sum", made.attempt))
    assert u.shard.state is CLIPPING
    return u


def test_backups_may_have_the_sum_while_the_norm_is_on_its_way() -> None:
    """Those that will be asked to make the step, as long as nothing happens."""
    for status, backups in ((LIVES, ("b",)), (HANGS, ()), (GONE, ())):
        u = replica("a")
        u.handle(pushed("b"))
        (made,) = [c for c in u.handle(pushed("c")) if isinstance(c, do.Sum)]
        sees(u, b=status)
        found = u.handle(on.Summed("sum", made.attempt))
        assert found == [do.FindNorm(made.attempt, "sum", backups, A)]
        mirrored = [c for c in u.handle(on.ClipKnown(made.attempt)) if isinstance(c, do.Mirror)]
        assert [c.backups for c in mirrored] == [backups] * bool(backups)


def stepping() -> ShardUpdate:
    """It has the step made, and b is to make it too."""
    u = clipping()
    assert do.Mirror("sum", ("b",), A, 1) in u.handle(on.ClipKnown(1))
    assert u.shard.state is STEPPING
    return u


def mirroring() -> ShardUpdate:
    u = stepping()
    assert not u.handle(on.Stepped("result", 1))
    assert u.shard.state is MIRRORING
    return u


def copying(me: str = "b", **options: Any) -> ShardUpdate:
    u = replica(me, **options)
    found = u.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    assert do.Repeat("step", 1) in found
    return u


def ask(members: tuple[str, ...], ballot: Ballot, *, is_final: bool, count: int = 0) -> do.Ask:
    return do.Ask(members, ballot, is_final, count)


def agreed(sender: str, ballot: Ballot, *, is_final: bool, count: int = 0) -> on.Agreed:
    return on.Agreed(sender, ballot, is_final, count)


def result_of(sender: str, result: str = "result", ballot: Ballot = B) -> on.ResultCame:
    return on.ResultCame(sender, result, ballot)


def denied_by(u: ShardUpdate, sender: str, ballot: Ballot) -> list[do.Command]:
    """An answer to the newest announcement of a primary."""
    asked, count = u.shard.ballot, u.shard.count
    return u.handle(on.Denied(sender, ballot, asked, count))


def sees_with_x(u: ShardUpdate) -> None:
    """One more member, without tokens."""
    u.handle(on.Seen({p: LIVES for p in "abcx" if p != u.shard.me}))


def overthrown(u: ShardUpdate, ballot: Ballot = B) -> list[do.Command]:
    """All others go by another ballot, and say so whenever they are asked."""
    found: list[do.Command] = []
    for sender in ("b", "c", "b"):
        if u.shard.ballot.primary == u.shard.me:
            found += denied_by(u, sender, ballot)
    return found


def kinds(commands: list[do.Command]) -> list[str]:
    return [type(c).__name__ for c in commands]


def test_a_primary_that_hears_of_another_one_asks_all_before_its_step() -> None:
    """Again and again, as long as it waits for the step. Who follows asks for nothing, and where
    nobody answers nobody is asked."""
    u = clipping()
    sees_with_x(u)
    assert u.handle(on.Asked("ask", "x", FALSE, is_final=True)) == [do.Deny("ask", A)]
    for _ in range(2):
        assert u.handle(on.Again()) == [ask(("b", "c", "x"), A, is_final=True), do.Pause()]
    overthrown(u)
    assert u.shard.state is FOLLOWING
    assert not u.handle(on.Again())
    u = without_state(is_kept=True)
    u.handle(on.StoodStill())
    assert u.shard.state is CLIPPING
    assert not u.handle(on.Again())


def test_a_backup_that_goes_by_another_ballot_is_not_waited_for() -> None:
    """It leads in its own eyes only, and makes no step of this primary's."""
    u = mirroring()
    assert ask(("c",), A, is_final=True, count=1) in denied_by(u, "b", B)
    assert u.shard.state is MIRRORING
    found = u.handle(agreed("c", A, is_final=True, count=1))
    assert do.Adopt("result", is_own=True) in found


def test_who_goes_by_another_ballot_is_waited_for_where_that_may_overthrow() -> None:
    """d leads too, and c, which takes b for the primary, may yet go there: as many as b are."""
    u = mirroring()
    u.handle(on.Seen(dict.fromkeys("bcd", LIVES)))
    u.handle(on.Confirmed("b", 1))
    denied_by(u, "c", B)
    denied_by(u, "d", Ballot(3, "d"))
    denied_by(u, "c", B)
    u.handle(agreed("b", A, is_final=True, count=u.shard.count))
    assert u.shard.state is MIRRORING
    assert dict(u.shard.claims) == {"c": B, "d": Ballot(3, "d")}
    found = u.handle(agreed("c", A, is_final=True, count=u.shard.count))
    assert do.Adopt("result", is_own=True) in found


def test_a_mirrored_step_tells_a_primary_of_another_one_by_its_own_word_only() -> None:
    u = mirroring()
    sees_with_x(u)
    u.handle(on.MirrorCame("mirror", "x", Ballot(9, "b"), "step", fits=True))
    assert u.shard.count == 0
    u.handle(on.MirrorCame("mirror", "x", FALSE, "step", fits=True))
    assert u.shard.count == 1, "all are asked anew"


def test_a_stranger_makes_no_primary_doubt() -> None:
    u = mirroring()
    assert u.handle(on.Asked("ask", "x", FALSE, is_final=True)) == [do.Deny("ask", A)]
    assert u.shard.count == 0


def test_one_that_is_believed_no_more_does_not_make_others_so() -> None:
    u = mirroring()
    u.handle(on.Seen(dict.fromkeys("bcxy", LIVES)))
    for term in range(9, 9 + 2 * MAX_DOUBTS):
        u.handle(on.Asked("ask", "x", Ballot(term, "x"), is_final=True))
    u.handle(on.Asked("ask", "y", Ballot(9, "y"), is_final=True))
    assert u.shard.count == MAX_DOUBTS + 1


def test_a_denied_question_ends_the_canvass() -> None:
    """With one that knows the primary alive it waits there. To another primary it goes where all
    have answered, and as many follow that one."""
    b = replica("b", "abcd")
    sees(b, a=GONE)
    assert do.Push("c", A, has_gradient=False) in b.handle(on.Denied("c", A, B, 0))
    b = replica("b", "abcd")
    sees(b, a=GONE)
    assert not b.handle(on.Denied("c", Ballot(3, "d"), B, 0))
    assert do.Push("d", Ballot(3, "d"), True) in b.handle(on.Denied("d", Ballot(3, "d"), B, 0))
    assert b.shard.ballot == Ballot(3, "d")
    b = replica("b", "abcd")
    sees(b, a=GONE)
    b.handle(on.Denied("d", Ballot(3, "d"), B, 0))
    b.handle(agreed("c", B, is_final=False))
    assert b.shard.ballot == B, "nobody else says so"


def test_one_whose_state_is_spoiled_leaves_it_to_a_holder_to_begin() -> None:
    u = clipping(holders="abc")
    u.handle(on.ClipKnown(1))
    overthrown(u)
    assert u.shard.is_spoiled
    u.handle(on.Denied("b", Ballot(3, "a"), B))
    assert u.shard.ballot == B, "c may lead"


def test_who_is_taken_for_the_primary_leads_by_a_higher_ballot_than_any_of_those() -> None:
    """Nobody is told that by one that only a liar can have raised."""
    b = replica("b", "abcd")
    for named in (Ballot(5, "b"), Ballot(3, "b"), Ballot(5 + MAX_LEAD + 1, "b")):
        b.handle(pushed("c", named))
        assert b.shard.next_ballot() == Ballot(7, "b")


def test_a_primary_does_not_look_into_itself() -> None:
    assert replica("a").handle(pushed("c", C)) == [do.Deny("push of c", A)]


def test_the_result_is_given_out_when_the_backup_has_it() -> None:
    u = mirroring()
    assert u.handle(on.Confirmed("b", 1)) == [
        do.Adopt("result", is_own=True),
        do.Give("push of b", "result"),
        do.Give("push of c", "result"),
    ]
    assert u.shard.state is DECIDED
    assert u.is_over


def test_the_primary_dies_before_the_mirror() -> None:
    """The backup asks whether it is dead to all, has all promise, and sums anew."""
    b = replica("b")
    assert sees(b, a=GONE) == [
        do.GiveUpPush(),
        ask(("c",), B, is_final=False),
        do.Pause(),
    ]
    found = b.handle(agreed("c", B, is_final=False))
    assert ask(("c",), B, is_final=True) in found
    found = b.handle(pushed("c", B))
    assert [c.senders for c in found if isinstance(c, do.Sum)] == [frozenset("bc")]


def test_the_primary_dies_after_the_mirror() -> None:
    """The backup has the result, and gives it to those that come."""
    b = copying()
    assert b.handle(on.Stepped("result", 1)) == [do.Confirm("mirror", "result")]
    assert do.Adopt("result", is_own=False) in sees(b, a=GONE)
    assert b.handle(pushed("c")) == [do.Give("push of c", "result")]
    assert b.handle(on.Asked("ask", "c", C, is_final=True)) == [do.Give("ask", "result")]


def test_a_mirrored_step_that_comes_after_a_promise_is_denied() -> None:
    b = replica("b", "acb")
    sees(b, a=GONE)
    b.handle(on.Asked("ask", "c", C, is_final=True))
    assert b.shard.ballot == C
    sees(b)
    found = b.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    assert found[-1] == do.Deny("mirror", C)


def test_a_false_suspicion_is_denied_by_a_third() -> None:
    """To c the primary lives: b overthrows nobody, and waits for the result at c."""
    b, c = replica("b"), replica("c")
    sees(b, a=GONE)
    assert c.handle(on.Asked("ask", "b", B, is_final=False)) == [
        do.LookInto("a"),
        do.Deny("ask", A),
    ]
    found = b.handle(on.Denied("c", A))
    assert do.Push("c", A, has_gradient=False) in found
    assert b.shard.state is FOLLOWING
    assert b.shard.ballot == A


def test_the_suspected_primary_is_heard_again() -> None:
    b = replica("b")
    sees(b, a=GONE)
    assert b.shard.state is CANVASSING
    assert do.Push("a", A, has_gradient=True) in sees(b)
    assert not b.handle(agreed("c", B, is_final=False))
    assert b.shard.ballot == A


def test_overthrown_while_clipping() -> None:
    u = clipping()
    assert overthrown(u)[-3:] == [
        do.Deny("push of b", B),
        do.Deny("push of c", B),
        do.Push("b", B, has_gradient=True),
    ]
    assert not u.handle(on.ClipKnown(1))
    assert u.shard.state is FOLLOWING


def test_overthrown_while_stepping() -> None:
    """Its state has seen a gradient that the others' has not, and it leads as no holder now."""
    u = stepping()
    assert do.Spoiled() in overthrown(u)
    assert not u.handle(on.Stepped("result", 1))
    assert u.shard.next_ballot().term % 2 == 0


def test_what_an_earlier_attempt_brings_does_not_count() -> None:
    assert not clipping().handle(on.Summed("other", 0))
    assert not clipping().handle(on.ClipKnown(0))
    u = stepping()
    u.handle(on.Stepped("other", 0))
    assert u.shard.state is STEPPING
    assert not copying().handle(on.Stepped("other", 0))
    assert not copying().handle(on.StepFailed(0))
    for event in (on.Confirmed("b", 0), on.Refused("b", 0), on.MirrorFailed("b", 0)):
        u = mirroring()
        u.handle(on.Again())
        assert not u.handle(event)
        assert u.shard.pending
        assert not u.shard.unmirrored


def test_a_member_back_after_the_sum_is_waited_for() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    sees(u, c=GONE)
    assert u.shard.state is CLIPPING
    found = sees(u)
    assert do.Deny("push of b", A) in found
    assert u.shard.state is GATHERING


def test_a_result_that_is_on_its_way_is_not_asked_for_again_of_another() -> None:
    """Both who are past the exchange have it; half a download is lost with each that is left."""
    for first, second in ("bd", "db"):
        u = replica("c", peers="abcd")
        found = sees(u, **{first: PAST})
        assert do.Push(first, A, False) in found
        assert sees(u, b=PAST, d=PAST) == []
        assert u.shard.pushing == first
        assert do.Push(second, A, False) in sees(u, **{first: GONE, second: PAST})


def test_who_was_a_member_and_is_known_no_more_is_dead_and_may_come_back() -> None:
    """Records name those that live; whoever is named no more was a member all the same."""
    u = replica("a")
    u.handle(pushed("b"))
    everybody = {"b": LIVES, "c": LIVES}
    without = still_known(everybody, {"b": PAST})
    assert without == {"b": PAST, "c": GONE}
    assert still_known(without, {}) == {"b": replace(PAST, life=DEAD), "c": GONE}
    u.handle(on.Seen(still_known(everybody, {"b": LIVES})))
    assert u.shard.state is CLIPPING
    u.handle(on.Seen(still_known(without, everybody)))
    assert u.shard.state is GATHERING


def test_a_member_back_after_the_step_is_asked_for_its_promise() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    sees(u, c=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    u.handle(on.Again())
    assert ask(("c",), A, is_final=True, count=1) in sees(u)
    u.handle(on.Confirmed("b", 1))
    u.handle(agreed("b", A, is_final=True, count=1))
    assert u.shard.state is MIRRORING
    assert do.Adopt("result", is_own=True) in u.handle(agreed("c", A, is_final=True, count=1))


def test_the_answer_to_a_question_is_no_promise() -> None:
    """A member that agreed before the takeover may have got the old primary's step since."""
    u = replica("b")
    sees(u, a=GONE)
    u.handle(agreed("c", B, is_final=False))
    sees(u, a=GONE, c=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    assert u.shard.state is DECIDED  # nobody else lives
    u = replica("b")
    sees(u, a=GONE)
    u.handle(agreed("c", B, is_final=False))
    sees(u, a=GONE, c=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    sees(u, a=GONE)
    u.handle(on.Stepped("result", 1))
    u.handle(agreed("c", B, is_final=False))
    assert u.shard.state is MIRRORING


def test_the_answer_to_a_question_is_no_promise_with_the_old_primary_back() -> None:
    u = replica("b")
    sees(u, a=GONE)
    u.handle(agreed("c", B, is_final=False))
    sees(u)
    u.handle(pushed("a", B))
    u.handle(on.DeadlinePassed())
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    u.handle(on.Confirmed("a", 1))
    u.handle(agreed("c", B, is_final=False))
    assert u.shard.state is MIRRORING
    assert do.Adopt("result", is_own=True) in u.handle(agreed("c", B, is_final=True))


def test_a_backup_back_after_the_step_gets_it_before_anybody_else_the_result() -> None:
    u = clipping()
    sees(u, b=GONE)
    assert not any(isinstance(c, do.Mirror) for c in u.handle(on.ClipKnown(1)))
    u.handle(on.Again())
    assert do.Mirror("sum", ("b",), A, 1) in sees(u)
    u.handle(on.Stepped("result", 1))
    u.handle(agreed("b", A, is_final=True))
    assert u.shard.state is MIRRORING


def test_promises_are_asked_for_again_after_a_death() -> None:
    """The dead one may have led others by a higher ballot, and given out another result."""
    u = replica("a")
    u.handle(pushed("c"))
    sees(u, b=GONE)
    u.handle(on.Summed("sum", 1))
    assert ask(("c",), A, is_final=True, count=1) in u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    found = u.handle(result_of("c", "another result", A))
    assert found == [
        do.Spoiled(),
        do.Adopt("another result", is_own=False),
        do.Give("push of c", "another result"),
    ]


def test_the_result_is_elsewhere() -> None:
    c = replica("c")
    assert sees(c, b=PAST) == [do.GiveUpPush(), do.Push("b", A, has_gradient=False)]
    assert do.Adopt("result", is_own=False) in c.handle(result_of("b", "result", A))
    assert c.shard.state is ADOPTED
    a = clipping()
    assert do.Push("b", A, has_gradient=False) in sees(a, b=PAST)


def test_the_deadline_ends_the_wait_for_a_mute_member() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    (made,) = [c for c in u.handle(on.DeadlinePassed()) if isinstance(c, do.Sum)]
    assert made.absent == ("c",)
    assert made.senders == frozenset("ab")


def test_a_late_push_waits_for_the_result_and_does_not_count() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    u.handle(on.DeadlinePassed())
    assert not u.handle(pushed("c"))
    assert not u.shard.parts
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    u.handle(on.Confirmed("b", 1))
    assert do.Give("push of c", "result") in u.handle(agreed("c", A, is_final=True))
    assert "c" not in u.shard.senders


def test_who_was_not_waited_for_may_follow_another_primary() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    u.handle(on.DeadlinePassed())
    u.handle(on.Summed("sum", 1))
    assert ask(("c",), A, is_final=True) in u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    u.handle(on.Confirmed("b", 1))
    assert u.shard.state is MIRRORING
    for sender in "cbc":
        found = denied_by(u, sender, C)
    assert do.Spoiled() in found


def test_zero_tokens_are_counted_and_not_summed() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    (made,) = [c for c in u.handle(pushed("c", num_tokens=0)) if isinstance(c, do.Sum)]
    assert [p for p, _, _ in made.parts] == ["a", "b"]
    assert made.senders == frozenset("abc")


def test_who_declares_no_tokens_is_not_waited_for() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    assert "Sum" in kinds(sees(u, c=MemberStatus(declared=0)))


def test_with_nothing_to_sum_no_backup_makes_a_step() -> None:
    a = ShardUpdate("a", Roster(A, ("a", "b"), ("a", "b"), ("a", "b"), is_holder=True))
    a.handle(on.Seen({"b": LIVES}))
    a.handle(on.Begun(0, None))
    a.handle(pushed("b", num_tokens=0))
    a.handle(on.Summed(None, 1))
    assert a.handle(on.ClipKnown(1)) == [do.Step(None, A, 1)]
    assert do.Adopt("result", is_own=True) in a.handle(on.Stepped("result", 1))


def test_two_of_which_each_waits_for_the_other() -> None:
    """By the rosters of both the other one succeeds the dead primary."""
    b = ShardUpdate("b", Roster(A, ("a", "c", "b"), ("a", "b"), ("a", "b"), is_holder=True))
    sees(b)
    b.handle(on.Begun(1, "gradient of b"))
    assert do.Push("c", A, has_gradient=False) in sees(b, a=GONE)
    assert ask(("c",), B, is_final=False) in b.handle(pushed("c", num_tokens=0))


def test_of_several_backups_none_gives_out_before_the_primary_has() -> None:
    b = copying(holders="abc")
    assert b.handle(on.Stepped("result", 1)) == [do.Confirm("mirror", "result")]
    assert b.shard.state is COPIED
    assert not b.handle(pushed("c"))
    found = b.handle(result_of("a", "the primary's"))
    assert do.Adopt("the primary's", is_own=False) in found
    assert do.Give("push of c", "the primary's") in found


def test_a_broken_call_for_the_mirrored_step_comes_again() -> None:
    """The primary waits for the step, not for the first call."""
    b = copying()
    assert not b.handle(on.MirrorCame("mirror 2", "a", A, "step", fits=False))
    assert do.Confirm("mirror 2", "result") in b.handle(on.Stepped("result", 1))


def test_a_backup_that_cannot_make_the_step_waits_for_the_result() -> None:
    b = copying()
    b.handle(on.PushFailed("a"))
    assert b.handle(on.StepFailed(1)) == [do.Refuse("mirror")]
    assert b.handle(on.Again()) == [do.Push("a", A, has_gradient=True)]


def test_a_lost_mirror_is_sent_again_after_a_pause() -> None:
    u = mirroring()
    u.handle(on.Again())
    assert u.handle(on.MirrorFailed("b", 1)) == [do.Pause()]
    assert u.handle(on.Again()) == [do.Mirror("sum", ("b",), A, 1)]


def test_a_stage_that_has_moved_on_is_followed_by_a_download() -> None:
    c = replica("c")
    assert c.handle(on.MovedOn()) == [do.Abandon()]
    assert c.shard.state is ABANDONED
    assert c.handle(pushed("b")) == [do.Deny("push of b", A)]


def test_a_ballot_beyond_all_terms_is_not_followed() -> None:
    c = replica("c")
    sees(c, a=GONE)
    c.handle(pushed("b", Ballot((1 << 20) + 1, "b")))
    assert c.shard.ballot == A


# ---- a backup that has copied the step ----------------------------------------------------------


def copied(me: str = "b", **options: Any) -> ShardUpdate:
    u = copying(me, **options)
    assert u.handle(on.Stepped("result", 1)) == [do.Confirm("mirror", "result")]
    assert u.shard.state is COPIED
    return u


def test_a_backup_whose_push_is_denied_pushes_again() -> None:
    while_copying = copying()
    while_copying.handle(on.Denied("a", B))
    while_copying.handle(on.Stepped("result", 1))
    while_copied = copied()
    while_copied.handle(on.Denied("a", B))
    for b in (while_copying, while_copied):
        assert b.shard.ballot == A
        assert b.handle(on.Again()) == [do.Push("a", A, has_gradient=True)]


def test_a_result_that_comes_while_a_backup_steps_is_asked_for_again() -> None:
    b = copying()
    assert not b.handle(result_of("a"))
    assert do.Push("a", A, has_gradient=True) in b.handle(on.Stepped("result", 1))


def test_a_backup_that_copied_early_pushes_when_it_has_closed_the_round() -> None:
    b = ShardUpdate("b", Roster(A, tuple("abc"), tuple("ab"), tuple("ab"), is_holder=True))
    sees(b)
    b.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    assert b.handle(on.Stepped("result", 1)) == [do.Confirm("mirror", "result")]
    found = b.handle(on.Begun(1, "gradient of b"))
    assert found == [do.Push("a", A, has_gradient=True)]


def test_a_failed_push_of_a_copied_step_is_made_again_after_a_pause() -> None:
    b = copied()
    assert b.handle(on.PushFailed("a")) == [do.Pause()]
    assert b.handle(on.Again()) == [do.Push("a", A, has_gradient=True)]


def test_the_copy_does_not_stand_in_for_a_result_that_is_elsewhere() -> None:
    b = copied()
    assert do.Push("c", A, has_gradient=False) in sees(b, a=GONE, c=PAST)
    assert b.shard.state is COPIED


def test_a_stage_that_has_moved_on_leaves_a_copy_behind() -> None:
    b = copied()
    assert do.Abandon() in b.handle(on.MovedOn())


def copied_of(
    peers: str, *, has_begun: bool = True, is_whole: bool = True, quorum: int = 0
) -> ShardUpdate:
    """A backup after its copy; all replicas hold the state."""
    all_ = tuple(peers)
    b = ShardUpdate("b", Roster(A, all_, all_, all_, is_holder=True, quorum=quorum))
    sees(b)
    if has_begun:
        b.handle(on.Begun(1, "gradient of b"))
    b.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    b.handle(on.Stepped("result", 1, is_whole))
    assert b.shard.state is COPIED
    return b


def test_of_two_the_copy_is_the_result_of_a_primary_that_is_past_the_exchange() -> None:
    b = copied_of("ab")
    assert do.Adopt("result", is_own=False) in sees(b, a=PAST)
    assert b.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Give("ask", "result", False)]


def test_a_copy_waits_for_a_primary_that_may_have_yielded_to_a_third_replica() -> None:
    for third in (LIVES, GONE):
        b = copied_of("abc")
        sees(b, a=PAST, c=third)
        assert b.shard.state is COPIED


def test_a_copy_waits_for_the_rest_that_its_primary_makes() -> None:
    b = copied_of("ab", is_whole=False)
    sees(b, a=PAST)
    assert b.shard.state is COPIED
    sees(b, a=GONE)
    assert b.shard.state is ADOPTED


def test_a_copy_waits_for_word_of_a_contribution_that_came_too_late() -> None:
    b = copied_of("ab", has_begun=False)
    sees(b, a=PAST)
    assert do.Push("a", A, has_gradient=True) in b.handle(on.Begun(1, "gradient of b"))
    assert b.shard.state is COPIED


def test_beside_a_quorum_the_primary_may_bring_a_late_contribution_into_the_next_sum() -> None:
    b = copied_of("ab", quorum=2)
    sees(b, a=PAST)
    assert b.shard.state is COPIED


def test_who_pushes_to_a_copied_step_under_another_ballot() -> None:
    """The primary is asked whether it leads yet. If not, the copy holds."""
    b = copied()
    question = ask(("a",), B, is_final=False)
    assert b.handle(pushed("c", C)) == [question, do.Deny("push of c", A)]
    assert b.handle(on.Asked("ask", "c", C, is_final=True)) == [question, do.Deny("ask", A)]
    b.handle(on.Denied("c", C, B, 0))
    b.handle(on.Denied("a", A, B, 0))
    b.handle(on.Denied("a", C, Ballot(0, "b"), 0))
    assert b.shard.state is COPIED
    assert do.Adopt("result", is_own=False) in b.handle(on.Denied("a", C, B, 0))
    assert do.Give("push of c", "result") in b.handle(pushed("c", C))
    assert b.shard.state is ADOPTED


def test_the_primary_of_a_copied_step_goes_by_a_higher_ballot() -> None:
    """It has given the step up, and leads anew."""
    b = copied()
    higher = A.next_of("a", is_holder=False)
    assert do.Give("ask", "result") in b.handle(on.Asked("ask", "a", higher, is_final=True))


def test_a_question_finds_a_copied_step() -> None:
    b = copied()
    found = b.handle(on.Asked("ask", "c", C, is_final=False))
    assert found == [do.LookInto("a"), do.Deny("ask", A)]


def test_the_primary_dies_while_its_backup_makes_the_step() -> None:
    """Who waits at the backup has the result at once."""
    b = copying()
    b.handle(pushed("c", num_tokens=0))
    sees(b, a=GONE)
    found = b.handle(on.Stepped("result", 1))
    assert do.Give("push of c", "result") in found
    b = copying()
    b.handle(pushed("c", num_tokens=0))
    assert do.Deny("push of c", A) in b.handle(on.Stepped("result", 1))


# ---- sums and steps that fail -------------------------------------------------------------------


def test_a_sum_or_a_step_that_fails_is_tried_again() -> None:
    for u in (clipping(), stepping()):
        found = u.handle(on.StepFailed(1))
        assert do.Deny("push of b", A) in found
        assert do.Deny("push of c", A) in found
        assert u.shard.state is GATHERING
        assert not u.shard.pending
    for u in (clipping(), stepping()):
        u.handle(on.StepFailed(0))
        assert u.shard.state in (CLIPPING, STEPPING)


def test_a_result_that_holds_comes_while_the_step_is_made() -> None:
    u = stepping()
    found = u.handle(result_of("c", "another result", A))
    assert found[:2] == [do.Spoiled(), do.Adopt("another result", is_own=False)]


# ---- ballots that name the wrong replica --------------------------------------------------------


def test_a_replica_that_takes_itself_for_a_holder_wrongly_follows_one() -> None:
    a = ShardUpdate("a", Roster(A, tuple("abc"), ("a", "b"), ("b",)))
    named = first_ballot("b", is_holder=True)
    assert do.Push("b", named, has_gradient=True) in [*sees(a), *a.handle(on.Begun(1, "ga"))]
    assert a.shard.ballot == named


def test_where_no_holder_lives_it_leads_as_none() -> None:
    c = ShardUpdate("c", Roster(first_ballot("c", is_holder=True), tuple("cab"), tuple("cab")))
    c.handle(on.Seen({"a": GONE, "b": GONE}))
    assert c.shard.ballot == Ballot(2, "c")
    assert c.shard.state is GATHERING


def test_nobody_leads_because_another_one_says_so() -> None:
    """It says by whom it goes, and leads by a higher ballot if it ever does."""
    b = replica("b")
    assert b.handle(pushed("c", B))[-1] == do.Deny("push of c", A)
    assert b.shard.ballot == A
    assert b.shard.next_ballot() > B


def test_who_was_taken_for_the_primary_says_who_leads() -> None:
    """It is followed to there, also by a lower ballot."""
    c = ShardUpdate("c", Roster(Ballot(1, "b"), tuple("bac"), tuple("ba")))
    sees(c)
    c.handle(on.Begun(1, "gradient of c"))
    assert not c.handle(on.Denied("b", A, Ballot(1, "a"), 0))
    found = c.handle(on.Denied("b", A, Ballot(1, "b")))
    assert do.Push("a", A, has_gradient=True) in found
    assert c.shard.ballot == A


def test_of_two_that_take_each_other_for_the_primary_each_leads() -> None:
    """And then the one with the higher ballot: as many go by the other."""
    b = ShardUpdate("b", Roster(A, tuple("ab"), tuple("ab"), tuple("ab"), is_holder=True))
    b.handle(on.Seen({"a": LIVES}))
    b.handle(on.Begun(1, "gradient of b"))
    b.handle(on.Denied("a", Ballot(1, "b"), A))
    assert b.shard.ballot == B
    assert b.shard.state is GATHERING
    denied_by(b, "a", A.next_of("a", is_holder=True))
    assert b.shard.ballot == B


# ---- who says that it takes over -----------------------------------------------------------------

FALSE = Ballot(9, "x")


def test_a_primary_that_lives_is_not_left_for_the_word_of_one() -> None:
    for state, u in (
        (FOLLOWING, replica("b", "abcx")),
        (GATHERING, replica("a", "abcx")),
        (CLIPPING, clipping()),
        (STEPPING, stepping()),
        (MIRRORING, mirroring()),
        (COPIED, copied()),
    ):
        u.handle(on.Seen({p: LIVES for p in "abcx" if p != u.shard.me}))
        for is_final in (False, True):
            assert do.Deny("ask", A) in u.handle(on.Asked("ask", "x", FALSE, is_final=is_final))
        u.handle(on.MirrorCame("mirror", "x", FALSE, "step", fits=True))
        u.handle(pushed("x", FALSE))
        u.handle(on.Denied("x", FALSE, u.shard.ballot, u.shard.count))
        assert (u.shard.ballot, u.shard.state) == (A, state)


def test_one_that_goes_by_another_ballot_is_not_waited_for() -> None:
    """All others are asked once more before the result is given out."""
    u = mirroring()
    sees_with_x(u)
    denied_by(u, "x", FALSE)
    for member in "bc":
        u.handle(agreed(member, A, is_final=True, count=u.shard.count))
    assert u.shard.state is MIRRORING
    denied_by(u, "x", FALSE)
    assert do.Adopt("result", is_own=True) in u.handle(on.Confirmed("b", 1))


def test_who_promises_again_is_counted_again() -> None:
    for u in (replica("a"), clipping()):
        denied_by(u, "c", B)
        u.handle(agreed("c", A, is_final=True))
        denied_by(u, "b", B)
        assert u.shard.ballot == A


def test_who_yields_to_one_that_is_dead_to_it_waits_with_those_that_follow_that_one() -> None:
    u = replica("a", "abcd")
    sees(u, b=GONE)
    assert do.Push("c", B, has_gradient=False) in denied_by(u, "c", B)
    u = replica("a")
    denied_by(u, "b", B)
    assert do.Push("b", B, has_gradient=True) in denied_by(u, "c", B)
    assert u.shard.host is None


def test_who_joins_leads_nothing() -> None:
    c = replica("c", may_lead=False)
    sees(c, a=GONE)
    c.handle(pushed("b", num_tokens=0))
    assert c.shard.state is FOLLOWING


def test_it_follows_no_holder_that_is_dead() -> None:
    d = ShardUpdate("d", Roster(first_ballot("d", is_holder=True), tuple("dabc"), tuple("dab")))
    d.shard.members = {"a": GONE, "b": LIVES, "c": LIVES}
    d.handle(on.Begun(1, "gradient of d"))
    assert d.shard.ballot == first_ballot("b", is_holder=True)


def test_one_whose_state_is_spoiled_begins_nothing_where_a_holder_may_lead() -> None:
    u = stepping()
    overthrown(u)
    assert u.shard.is_spoiled
    u.handle(on.Denied("b", Ballot(3, "a"), B))
    assert u.shard.ballot == Ballot(4, "a"), "the only other holder leads nothing"
    u = replica("c")
    u.handle(on.Denied("a", Ballot(1, "c"), A))
    assert u.shard.ballot == A, "b may lead"


def test_who_has_agreed_to_nobody_promises_to_one_that_hangs() -> None:
    b = replica("b")
    sees(b, a=HANGS)
    assert b.handle(on.Asked("ask", "c", C, is_final=False)) == [do.Deny("ask", A)]
    assert b.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Agree("ask", A)]


def test_nobody_keeps_a_primary_at_counting_promises() -> None:
    u = mirroring()
    sees_with_x(u)
    for term in range(9, 30):
        u.handle(on.Asked("ask", "x", Ballot(term, "x"), is_final=True))
    assert u.shard.count == MAX_DOUBTS


def test_who_has_agreed_to_another_one_promises_nothing_to_one_that_hangs() -> None:
    c = replica("c")
    sees(c, a=HANGS)
    assert c.handle(on.Asked("ask", "b", B, is_final=False)) == [do.Agree("ask", B)]
    assert c.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Deny("ask", B)]
    sees(c)
    assert c.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Agree("ask", A)]


def test_no_ballot_is_raised_far_at_once() -> None:
    """Neither by a push, nor by an announcement, nor by a denial."""
    far = Ballot(A.term + MAX_LEAD + 1, "b")
    c = replica("c")
    sees(c, a=GONE)
    assert do.Deny("push of b", A) in c.handle(pushed("b", far))
    assert do.Deny("ask", A) in c.handle(on.Asked("ask", "b", far, is_final=True))
    c.handle(on.Denied("a", far, A))
    assert c.shard.ballot == A
    near = Ballot(A.term + MAX_LEAD, "b")
    assert do.Agree("ask", near) in c.handle(on.Asked("ask", "b", near, is_final=True))


def test_a_gradient_is_kept_no_longer_than_it_is_needed() -> None:
    u = mirroring()
    assert u.shard.begun == (1, "gradient of a")
    u.handle(on.Confirmed("b", 1))
    assert u.shard.begun == (1, None)
    early = ShardUpdate("b", Roster(A, tuple("abc"), tuple("ab"), tuple("ab"), is_holder=True))
    early.handle(result_of("c"))
    assert early.shard.begun is None


# ---- gossip averaging ---------------------------------------------------------------------------


def pair() -> ShardUpdate:
    """Replica a of the pair a, b, which has asked for the offer of b."""
    roster = pair_of("a", "b")
    u = ShardUpdate("a", roster)
    assert do.Pull("b") in u.handle(on.Seen({"b": LIVES}))
    u.handle(on.Begun(1, "offer of a"))
    return u


def offer(u: ShardUpdate) -> list[do.Command]:
    return u.handle(on.Pushed(None, "b", A, 1, "offer of b"))


def test_each_of_a_pair_makes_its_own_step() -> None:
    u = pair()
    (made,) = [c for c in offer(u) if isinstance(c, do.Sum)]
    assert [p for p, _, _ in made.parts] == ["a", "b"]
    u.handle(on.Confirmed("b", 1))
    assert do.Step("sum", A, 1) in u.handle(on.Summed("sum", 1))
    assert u.handle(on.Stepped("result", 1)) == [do.Adopt("result", is_own=True)]


def test_a_meeting_lasts_until_the_partner_has_the_offer_too() -> None:
    u = pair()
    offer(u)
    assert do.Mirror("sum", ("b",), A, 1) in u.handle(on.Summed("sum", 1))
    assert not u.handle(on.Stepped("result", 1))
    assert do.Adopt("result", is_own=True) in u.handle(on.Confirmed("b", 1))


def test_a_meeting_ends_with_a_partner_that_dies_before_it_has_all() -> None:
    u = pair()
    offer(u)
    u.handle(on.Summed("sum", 1))
    assert u.shard.awaited() == ["b"]
    u.handle(on.Seen({"b": GONE}))
    assert not u.shard.awaited()
    assert do.Adopt("result", is_own=True) in u.handle(on.Stepped("result", 1))


def test_a_partner_that_has_left_the_meeting_leads_to_no_result_elsewhere() -> None:
    u = pair()
    assert not u.handle(on.Seen({"b": PAST}))
    assert "Sum" in kinds(u.handle(on.PushFailed("b")))


def test_without_its_partner_a_replica_steps_alone() -> None:
    u = pair()
    (made,) = [c for c in u.handle(on.Seen({"b": GONE})) if isinstance(c, do.Sum)]
    assert [p for p, _, _ in made.parts] == ["a"]
    u.handle(on.Summed("sum", 1))
    assert do.Adopt("result", is_own=True) in u.handle(on.Stepped("result", 1))


def without_state(*, is_kept: bool) -> ShardUpdate:
    """A primary that has a sum, of all others dead, and no optimizer state."""
    u = ShardUpdate("a", Roster(Ballot(0, "a"), ("a", "b"), (), ("a",)))
    u.handle(on.Seen({"b": GONE}, is_kept=is_kept))
    assert "Sum" in kinds(u.handle(on.Begun(1, "gradient of a")))
    assert "FindNorm" in kinds(u.handle(on.Summed("sum", 1)))
    return u


def test_who_lacks_the_state_makes_no_step_while_somebody_that_lives_has_it() -> None:
    u = without_state(is_kept=True)
    assert not u.handle(on.ClipKnown(1))
    assert not u.handle(on.Seen({"b": GONE}, is_kept=True))
    assert "Step" in kinds(u.handle(on.Seen({"b": GONE}, is_kept=False)))


def test_a_state_that_is_lost_is_begun_anew_with_the_norm() -> None:
    u = without_state(is_kept=True)
    assert not u.handle(on.Seen({"b": GONE}, is_kept=False))
    assert "Step" in kinds(u.handle(on.ClipKnown(1)))


def test_who_waits_for_the_state_takes_the_result_of_who_has_it() -> None:
    u = without_state(is_kept=True)
    u.handle(on.ClipKnown(1))
    assert [c.target for c in u.handle(on.Seen({"b": PAST})) if isinstance(c, do.Push)] == ["b"]


def test_a_new_sum_waits_for_a_norm_of_its_own() -> None:
    """After a takeover that came while the step was waited for."""
    u = without_state(is_kept=True)
    u.handle(on.ClipKnown(1))
    denied_by(u, "b", Ballot(2, "b"))
    u.handle(on.Seen({"b": GONE}))
    assert u.shard.ballot == Ballot(4, "a")
    assert u.shard.state.value == "clipping"
    assert not u.handle(on.ClipKnown(1))
    u.handle(on.Summed("sum", 2))
    assert "Step" in kinds(u.handle(on.ClipKnown(2)))


def test_a_primary_waits_for_tokens_that_were_counted_and_nobody_known_has() -> None:
    """In a run's first round, when all join at once: two replicas that do not know each other yet
    would each make a step of its own."""
    a = ShardUpdate("a", Roster(A, ("a",), ("a",), ("a",), is_holder=True))
    a.handle(on.Seen({}, counted=3))
    assert not [c for c in a.handle(on.Begun(1, "ga")) if isinstance(c, do.Sum)]
    a.handle(on.Seen({"b": MemberStatus()}, counted=3))
    (total,) = (c for c in a.handle(on.Pushed(1, "b", A, 2, "gb")) if isinstance(c, do.Sum))
    assert total.senders == {"a", "b"}


def test_tokens_that_nobody_brings_are_waited_for_no_longer_than_their_holder_could_live() -> None:
    a = ShardUpdate("a", Roster(A, ("a",), ("a",), ("a",), is_holder=True))
    a.handle(on.Seen({}, counted=3))
    a.handle(on.Begun(1, "ga"))
    assert [c for c in a.handle(on.Seen({}, counted=0)) if isinstance(c, do.Sum)]


# ---- what comes at another time -----------------------------------------------------------------


def test_overthrown_while_mirroring() -> None:
    u = mirroring()
    assert do.Spoiled() in overthrown(u)
    assert u.shard.ballot == B


def test_a_primary_follows_another_one_that_all_others_follow() -> None:
    gathering = replica("a")
    assert gathering.shard.state is GATHERING
    for u in (gathering, clipping(), stepping(), mirroring()):
        is_late = u.shard.state in (STEPPING, MIRRORING)
        found = overthrown(u)
        assert do.Push("b", B, has_gradient=True) in found
        assert (do.Spoiled() in found) == is_late


def test_a_mirrored_step_finds_a_replica_that_would_lead() -> None:
    """It makes none of another one that has not announced itself."""
    b = replica("b")
    sees(b, a=GONE)
    assert b.shard.state is CANVASSING
    assert b.handle(on.MirrorCame("mirror", "c", C, "step", fits=True)) == [do.Deny("mirror", A)]
    for u in (replica("a"), clipping(), stepping(), mirroring()):
        found = u.handle(on.MirrorCame("mirror", "b", B, "step", fits=True))
        assert do.Deny("mirror", A) in found


def test_a_mirrored_step_that_comes_too_late_is_refused() -> None:
    decided, adopted, abandoned = mirroring(), replica("b"), replica("b")
    decided.handle(on.Confirmed("b", 1))
    adopted.handle(result_of("a", "result"))
    abandoned.handle(on.MovedOn())
    copied = copying()
    copied.handle(on.Stepped("result", 1))
    for u in (decided, adopted, abandoned, copied):
        found = u.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
        assert found == [do.Refuse("mirror")]


def test_a_question_or_an_announcement_finds_a_result() -> None:
    decided, adopted = mirroring(), replica("b")
    decided.handle(on.Confirmed("b", 1))
    adopted.handle(result_of("a", "result"))
    for u in (decided, adopted):
        for is_final in (False, True):
            found = u.handle(on.Asked("ask", "c", C, is_final=is_final))
            assert found == [do.Give("ask", "result")]
    abandoned = replica("b")
    abandoned.handle(on.MovedOn())
    assert abandoned.handle(on.Asked("ask", "c", C, is_final=True)) == [do.Deny("ask", A)]


def test_who_asks_while_a_backup_makes_the_step_is_answered_after_it() -> None:
    b = copying()
    assert not b.handle(on.Asked("ask", "c", C, is_final=True))
    assert do.Deny("ask", A) in b.handle(on.Stepped("result", 1))
    assert do.Deny("ask", A) in b.handle(on.Asked("ask", "c", C, is_final=True))


def test_the_primary_of_a_copied_step_has_the_promise() -> None:
    b = copying()
    b.handle(on.Stepped("result", 1))
    assert b.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Agree("ask", A)]


def test_the_primary_dies_while_its_backup_steps_in_vain() -> None:
    b = copying()
    assert not sees(b, a=GONE)
    assert ask(("c",), B, is_final=False) in b.handle(on.StepFailed(1))


def test_a_result_comes_to_one_that_would_lead() -> None:
    b = replica("b")
    sees(b, a=GONE)
    for u in (b, replica("a"), clipping()):
        found = u.handle(result_of("c", "result", B if u is b else A))
        assert do.Adopt("result", is_own=False) in found


def test_a_result_elsewhere_ends_the_gathering() -> None:
    a = replica("a")
    a.handle(pushed("c"))
    found = sees(a, b=PAST)
    assert do.Deny("push of c", A) in found
    assert do.Push("b", A, has_gradient=False) in found


def test_a_stage_that_has_moved_on_leaves_nobody_leading() -> None:
    b = replica("b")
    sees(b, a=GONE)
    for u in (b, replica("a"), clipping(), stepping(), mirroring()):
        is_late = u.shard.state in (STEPPING, MIRRORING)
        found = u.handle(on.MovedOn())
        assert found[-1] == do.Abandon()
        assert (do.Spoiled() in found) == is_late


def test_a_pause_that_ends_at_another_time_may_come_again() -> None:
    u = clipping()
    u.handle(on.Again())
    u.handle(on.ClipKnown(1))
    assert u.handle(on.MirrorFailed("b", 1)) == [do.Pause()]
    b = replica("b")
    b.handle(on.PushFailed("a"))
    b.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    b.handle(on.Again())
    b.handle(on.StepFailed(1))
    assert b.handle(on.PushFailed("a")) == [do.Pause()]


def test_a_push_tells_of_a_higher_ballot() -> None:
    c = replica("c", "abcd")
    assert do.Deny("push of d", A) in c.handle(pushed("d", B))
    sees(c, a=GONE)
    assert do.Push("b", B, has_gradient=True) in c.handle(pushed("d", B))
    assert c.shard.ballot == B
    assert do.Give("push of d", "result") in c.handle(result_of("b", "result"))


def test_of_two_that_would_lead_the_higher_ballot_has_the_agreement_of_the_other() -> None:
    """After a while: at first it is the next in order."""
    b = replica("b")
    sees(b, a=GONE)
    higher = A.next_of("c", is_holder=True)
    assert b.handle(on.Asked("ask", "c", higher, is_final=False)) == [do.Deny("ask", A)]
    b.handle(on.Unled())
    assert b.handle(on.Asked("ask", "c", C, is_final=False)) == [do.Deny("ask", A)]
    assert b.handle(on.Asked("ask", "c", higher, is_final=False)) == [do.Agree("ask", higher)]


def test_from_a_dead_primary_the_next_in_order_takes_over() -> None:
    """Nobody else that lives, until it has had the time for that. It may say itself who has."""
    d_leads = A.next_of("d", is_holder=False)
    for told in (on.Asked("ask", "d", d_leads, is_final=True), pushed("e", d_leads)):
        c = replica("c", "abcde")
        sees(c, a=GONE)
        assert do.LookInto("b") in c.handle(on.Asked("ask", "d", d_leads, is_final=False))
        c.handle(told)
        assert c.shard.ballot == A
        c.handle(on.Unled())
        c.handle(told)
        assert c.shard.ballot == d_leads
    c = replica("c", "abcde", "abc")
    sees(c, a=GONE)
    c.handle(on.Unled())
    agrees = do.Agree("ask", d_leads)
    assert c.handle(on.Asked("ask", "d", d_leads, is_final=False)) == [agrees], "c is not next"
    for said in (pushed("b", d_leads), on.Denied("b", d_leads, A)):
        for d in (LIVES, GONE):
            c = replica("c", "abcde")
            sees(c, a=GONE, d=d)
            c.handle(said)
            assert c.shard.ballot == d_leads
    c = replica("c", "abcde")
    sees(c, a=GONE, b=GONE)
    c.handle(on.Again())
    e = replica("e", "abcde")
    sees(e, a=GONE, b=GONE)
    assert do.Agree("ask", C) in e.handle(on.Asked("ask", "c", C, is_final=False))
    sees(e, a=GONE)
    e.handle(on.Asked("ask", "c", C, is_final=True))
    assert e.shard.ballot == C, "b was dead when c asked"


def test_from_one_that_has_taken_over_and_lives_nobody_takes_over() -> None:
    """Not the first in order either, which is back."""
    c = replica("c")
    sees(c, a=GONE)
    c.handle(on.Asked("ask", "b", B, is_final=True))
    sees(c)
    higher = B.next_of("a", is_holder=True)
    found = c.handle(on.Asked("ask", "a", higher, is_final=False))
    assert found == [do.LookInto("b"), do.Deny("ask", B)]
    for said in (on.Asked("ask", "a", higher, is_final=True), pushed("a", higher)):
        c.handle(said)
        assert c.shard.ballot == B


def test_who_knows_of_no_primary_but_the_dead_one_is_asked_after_a_pause() -> None:
    c = replica("c")
    sees(c, a=GONE)
    assert c.handle(on.Denied("b", A, A)) == [do.Pause()]


def test_who_waits_long_without_a_primary_is_asked_anew() -> None:
    b = replica("b")
    assert not b.handle(on.Unled())
    assert not b.shard.is_unled, "the primary lives"
    sees(b, a=GONE)
    assert ask(("c",), B, is_final=False) in b.handle(on.Unled())
    assert ask(("c",), B, is_final=False) in b.handle(on.Again()), "an answer may be lost"
    c = replica("c")
    sees(c, a=GONE)
    assert not c.handle(on.Unled()), "it asks nobody, for it is not next"


FALSE = Ballot(3, "x")


def false_result(sender: str, ballot: Ballot, made: Ballot = FALSE) -> on.ResultCame:
    return on.ResultCame(sender, "false", ballot, made)


def test_a_result_is_not_what_one_says_that_is_asked_for_its_promise() -> None:
    """It is what that one says of whom it goes by. Shown is what the primary itself has signed."""
    u = replica("a", "abcx")
    u.handle(pushed("b"))
    u.handle(pushed("c"))
    u.handle(on.DeadlinePassed())
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    assert u.shard.state is STEPPING
    u.handle(on.Stepped("result", 1))
    u.handle(false_result("x", A))
    assert u.shard.state is MIRRORING
    u.handle(on.Confirmed("b", 1))
    assert u.shard.state is DECIDED
    assert u.shard.result == "result"
    u = mirroring()
    u.handle(false_result("c", A, made=A))
    assert u.shard.state is ADOPTED, "it has signed that itself"


def test_a_result_of_another_primary_is_taken_where_as_many_have_it() -> None:
    u = mirroring()
    u.handle(on.StoodStill())
    u.handle(false_result("c", Ballot(7, "a"), made=B))
    u.handle(false_result("stranger", A, made=B))
    assert not u.shard.claims, "of another question, and of no member"
    u.handle(false_result("b", A, made=B))
    assert u.shard.state is MIRRORING
    u.handle(false_result("c", A, made=B))
    assert (u.shard.state, u.shard.ballot) == (FOLLOWING, B)


def test_the_result_of_a_primary_that_hung_and_went_on_is_taken() -> None:
    """By who has taken over from it, though nobody else tells of that yet."""
    b = replica("b")
    sees(b, a=HANGS)
    b.handle(agreed("c", B, is_final=False))
    b.handle(pushed("c", B))
    b.handle(on.Summed("sum", 1))
    b.handle(on.ClipKnown(1))
    assert b.shard.state is STEPPING
    b.handle(false_result("a", B, made=A))
    assert b.shard.state is ADOPTED


def test_before_a_takeover_a_result_is_that_of_the_dead_primary_or_of_most() -> None:
    for made, holds in ((A, True), (FALSE, False)):
        b = replica("b", "abcx")
        sees(b, a=GONE)
        b.handle(false_result("x", B, made))
        assert (b.shard.state is ADOPTED) == holds
    b.handle(agreed("c", B, is_final=False))
    assert b.shard.ballot == B
    b = replica("b", "abcx")
    sees(b, a=GONE)
    b.handle(false_result("x", B))
    b.handle(false_result("c", B))
    assert b.shard.ballot == FALSE, "c says so too"
    b = replica("b", "abcdx")
    sees(b, a=GONE, d=GONE)
    b.handle(false_result("x", B, made=Ballot(3, "d")))
    assert b.shard.state is CANVASSING, "c has not answered"
    b = replica("b", "abx")
    sees(b, a=GONE)
    b.handle(false_result("x", B))
    assert b.shard.state is ADOPTED, "there is nobody else to ask"


def test_where_a_follower_waits_it_takes_what_the_primary_has_signed() -> None:
    """Whoever says that a dead primary lives is asked once. The next in order is believed, and who
    is past the exchange about a third."""
    for made, holds in ((A, True), (FALSE, False)):
        b = replica("b", "abcx")
        sees(b, a=GONE)
        b.handle(on.Denied("x", A, B, 0))
        b.handle(false_result("x", A, made))
        assert (b.shard.state is ADOPTED) == holds
    b = replica("b", "abcdx")
    sees(b, a=GONE)
    b.handle(on.Denied("x", A, B, 0))
    assert ask(("c", "d", "x"), B, is_final=False) in b.handle(on.Denied("x", Ballot(3, "d"), A))
    b = replica("b", "abcx")
    sees(b, a=GONE)
    b.handle(on.Denied("x", A, B, 0))
    b.handle(false_result("x", A))
    b.handle(on.Denied("x", A, B, 0))  # asked before
    assert b.shard.told() is None
    assert "x" not in b.shard.voters()
    c = replica("c")
    c.handle(false_result("a", A, made=B))
    assert c.shard.state is ADOPTED, "its primary has it of another one"
    c = replica("c")
    sees(c, a=GONE)
    c.handle(on.Asked("ask", "b", B, is_final=True))
    sees(c)
    c.handle(false_result("a", B))
    assert c.shard.state is FOLLOWING, "the next in order is nobody while the primary lives"
    c = replica("c", "abcx")
    sees(c, a=GONE)
    c.handle(false_result("b", A, made=B))
    assert c.shard.state is ADOPTED
    for made, holds in ((B, True), (FALSE, False)):
        c = replica("c", "abcxd")
        sees(c, a=GONE, b=GONE, x=PAST)
        c.handle(false_result("x", A, made))
        assert (c.shard.state is ADOPTED) == holds
    assert c.shard.past() is None


def test_only_the_primary_of_a_ballot_mirrors_a_step() -> None:
    b = replica("b")
    found = b.handle(on.MirrorCame("mirror", "c", A, "step", fits=True))
    assert found == [do.Deny("mirror", A)]


def test_one_pause_at_a_time() -> None:
    c = replica("c")
    assert c.handle(on.PushFailed("a")) == [do.Pause()]
    sees(c, b=PAST)
    assert do.Pause() not in c.handle(on.PushFailed("b"))


def test_a_call_is_held_once() -> None:
    u = replica("a")
    assert not u.handle(pushed("b"))
    assert not u.handle(pushed("b"))
    again = on.Pushed("new push", "b", A, 1, "gradient of b")
    assert u.handle(again) == [do.Deny("push of b", A)]


def test_of_those_that_have_the_result_one_that_surely_lives_is_asked() -> None:
    unsure = MemberStatus(life=SUSPECT, is_past=True)
    for b, d, target in ((unsure, PAST, "d"), (PAST, unsure, "b")):
        assert do.Push(target, A, has_gradient=False) in sees(replica("c", "abcd"), b=b, d=d)
    assert do.Push("b", A, has_gradient=False) in sees(replica("c"), b=unsure)


def test_the_last_one_leads_alone() -> None:
    c = replica("c")
    (made,) = [x for x in sees(c, a=GONE, b=GONE) if isinstance(x, do.Sum)]
    assert [p for p, _, _ in made.parts] == ["c"]
    assert c.shard.ballot == C


def test_of_several_backups_one_answers_as_the_others_live() -> None:
    b = copying(holders="abc")
    assert not b.handle(pushed("c"))
    assert do.Deny("push of c", A) in b.handle(on.Stepped("result", 1))
    found = b.handle(on.Asked("ask", "c", C, is_final=False))
    assert found == [do.LookInto("a"), do.Deny("ask", A)]
    assert do.Deny("ask", A) in b.handle(on.Asked("ask", "c", C, is_final=True))


def test_a_pair_makes_no_announcements() -> None:
    u = pair()
    u.handle(on.Seen({"b": MemberStatus(declared=1)}))
    assert u.handle(on.Again()) == [do.Pause()]


def test_a_promise_may_come_while_the_step_is_made() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    u.handle(on.DeadlinePassed())
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(agreed("c", A, is_final=True))
    u.handle(on.Confirmed("b", 1))
    assert do.Adopt("result", is_own=True) in u.handle(on.Stepped("result", 1))


def test_after_a_death_all_promise_again_before_the_result_is_given_out() -> None:
    u = mirroring()
    u.handle(on.Again())
    assert ask(("b",), A, is_final=True, count=1) in sees(u, c=GONE)
    u.handle(on.Confirmed("b", 1))
    assert u.shard.state is MIRRORING
    assert do.Adopt("result", is_own=True) in u.handle(agreed("b", A, is_final=True, count=1))


def test_a_result_elsewhere_ends_a_canvass() -> None:
    b = replica("b", "abc")
    sees(b, a=GONE)
    assert do.Push("c", A, has_gradient=False) in sees(b, a=GONE, c=PAST)
    assert b.shard.state is FOLLOWING


def test_who_has_not_closed_the_round_pushes_nothing() -> None:
    c = ShardUpdate("c", Roster(A, tuple("abc"), tuple("ab")))
    assert not sees(c)
    assert not sees(c, a=PAST)


def test_nobody_is_asked_where_nobody_lives() -> None:
    c = replica("c")
    assert "Ask" not in kinds(sees(c, a=GONE, b=GONE))


def test_who_follows_sets_no_deadline() -> None:
    c = ShardUpdate("c", Roster(A, tuple("abc"), tuple("ab")))
    sees(c)
    assert kinds(c.handle(on.Begun(1, "gradient of c"))) == ["Push"]


def test_a_promise_of_before_the_last_count_is_none() -> None:
    u = mirroring()
    sees(u, c=GONE)
    u.handle(on.Confirmed("b", 1))
    assert not u.handle(agreed("b", A, is_final=True))
    assert do.Adopt("result", is_own=True) in u.handle(agreed("b", A, is_final=True, count=1))


def test_what_a_call_of_a_lower_ballot_brings_does_not_count() -> None:
    c = replica("c")
    sees(c, a=GONE)
    c.handle(on.Asked("ask", "b", B, is_final=True))
    assert not c.handle(result_of("a", "old result", A))
    u = mirroring()
    assert not u.handle(result_of("c", "old result", Ballot(0, "c")))
    assert u.shard.state is MIRRORING


def test_of_two_pushes_to_a_copying_backup_the_second_is_held() -> None:
    b = copying()
    b.handle(pushed("c"))
    again = on.Pushed("new push", "c", A, 0, None)
    assert b.handle(again) == [do.Deny("push of c", A)]
    assert not b.handle(on.Asked("ask", "c", C, is_final=True))


def test_only_a_ballots_primary_announces_it() -> None:
    c = replica("c", "abcd")
    assert c.handle(on.Asked("ask", "d", B, is_final=True)) == [do.Deny("ask", A)]


def test_who_leads_agrees_to_no_takeover() -> None:
    a = replica("a")
    assert a.handle(on.Asked("ask", "b", B, is_final=False)) == [do.Deny("ask", A)]


def test_no_agreement_to_a_ballot_that_is_no_higher() -> None:
    c = replica("c")
    sees(c, a=GONE)
    assert c.handle(on.Asked("ask", "b", A, is_final=False)) == [do.Deny("ask", A)]


def test_who_is_not_next_agrees_to_the_ballot_of_whoever_is() -> None:
    b = ShardUpdate("b", Roster(A, ("a", "c", "b"), ("a", "b"), ("a", "b"), is_holder=True))
    sees(b, a=GONE)
    assert b.handle(on.Asked("ask", "c", C, is_final=False)) == [do.Agree("ask", C)]


def test_a_backup_with_another_state_refuses_the_step() -> None:
    b = replica("b")
    found = b.handle(on.MirrorCame("mirror", "a", A, "step", fits=False))
    assert found == [do.Refuse("mirror")]


def test_a_promise_of_a_lower_ballot_does_not_count() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    u.handle(on.DeadlinePassed())
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    u.handle(on.Confirmed("b", 1))
    assert not u.handle(agreed("c", Ballot(0, "a"), is_final=True))
    assert u.shard.state is MIRRORING


def test_an_agreement_to_another_ballot_does_not_count() -> None:
    b = replica("b")
    sees(b, a=GONE)
    assert not b.handle(agreed("c", Ballot(2, "b"), is_final=False))


def test_a_failed_push_of_before_excuses_nobody() -> None:
    u = replica("a")
    u.handle(on.PushFailed("c"))
    assert "Sum" not in kinds(u.handle(pushed("b")))
    c = replica("c")
    sees(c, b=PAST)
    assert not c.handle(on.PushFailed("a"))


def test_a_contribution_is_not_replaced_by_none() -> None:
    for first, second in ((1, 0), (0, 1)):
        u = replica("a")
        u.handle(pushed("c", num_tokens=first))
        u.handle(pushed("c", num_tokens=second))
        (made,) = [x for x in u.handle(pushed("b")) if isinstance(x, do.Sum)]
        assert [p for p, _, _ in made.parts] == ["a", "b", "c"]


def test_who_is_no_member_any_more_is_dead() -> None:
    """It has come back as a newcomer."""
    b = replica("b")
    assert ask(("c",), B, is_final=False) in b.handle(on.Seen({"c": LIVES}))


def test_while_it_steps_a_backup_takes_no_other_step() -> None:
    b = copying()
    found = b.handle(on.MirrorCame("mirror 2", "c", A, "step", fits=True))
    assert found == [do.Refuse("mirror 2")]


def test_a_backup_keeps_who_waits_while_it_steps() -> None:
    b = replica("b")
    b.handle(pushed("c", num_tokens=0))
    found = b.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    assert found == [do.Repeat("step", 1)]
    b.handle(on.Asked("ask of c", "c", C, is_final=True))
    b.handle(on.Asked("ask of d", "d", C, is_final=True))
    sees(b, a=GONE)
    given = [c.call for c in b.handle(on.Stepped("result", 1)) if isinstance(c, do.Give)]
    assert given == ["push of c", "ask of c", "ask of d"]


def test_no_state_is_spoiled_where_there_was_no_step() -> None:
    a = ShardUpdate("a", Roster(A, ("a", "b"), ("a", "b"), ("a", "b"), is_holder=True))
    a.handle(on.Seen({"b": LIVES}))
    a.handle(on.Begun(0, None))
    a.handle(pushed("b", num_tokens=0))
    a.handle(on.Summed(None, 1))
    a.handle(on.ClipKnown(1))
    assert do.Spoiled() not in [*denied_by(a, "b", B), *denied_by(a, "b", B)]
    assert a.shard.ballot == B


def test_the_host_of_the_result_dies_too() -> None:
    b = replica("b")
    sees(b, a=GONE)
    b.handle(on.Denied("c", A))
    assert "Sum" in kinds(sees(b, a=GONE, c=GONE))


def test_members_that_have_not_closed_the_round_are_not_reminded() -> None:
    assert replica("a").handle(on.Again()) == [do.Pause()]


def test_a_partner_that_has_the_offer_early_is_not_waited_for() -> None:
    u = pair()
    u.handle(on.Confirmed("b", 0))
    offer(u)
    assert kinds(u.handle(on.Summed("sum", 1))) == ["Step", "SetDeadline"]


def test_a_partner_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    for is_late in (False, True):
        u = pair()
        offer(u)
        assert "SetDeadline" in kinds(u.handle(on.Summed("sum", 1)))
        if is_late:
            u.handle(on.Stepped("result", 1))
            found = u.handle(on.DeadlinePassed())
        else:
            u.handle(on.DeadlinePassed())
            found = u.handle(on.Stepped("result", 1))
        assert do.Adopt("result", is_own=True) in found


def test_the_calls_of_a_pair_end_of_themselves() -> None:
    u = ShardUpdate("a", pair_of("a", "b"))
    found = [*u.handle(on.Seen({"b": LIVES})), *u.handle(on.Begun(1, "offer of a"))]
    assert kinds(found) == ["Pull", "Pause"]


def test_a_backup_is_waited_for_beyond_the_deadline() -> None:
    u = mirroring()
    assert not u.handle(on.DeadlinePassed())
    assert u.shard.state is MIRRORING


# ---- who hangs, and who stood still --------------------------------------------------------------


def test_one_that_hangs_is_asked_before_the_result_is_given_out() -> None:
    u = replica("b", "abc", "a")
    sees(u, a=HANGS, c=GONE)
    assert u.shard.state is CLIPPING, "nobody waits for its work"
    found = u.handle(on.ClipKnown(1))
    ballot = u.shard.ballot
    assert ask(("a",), ballot, is_final=True, count=1) in found
    u.handle(on.Stepped("result", 1))
    assert u.shard.state is MIRRORING
    found = u.handle(agreed("a", ballot, is_final=True, count=1))
    assert do.Adopt("result", is_own=True) in found


def test_the_result_of_one_that_hangs_holds() -> None:
    u = replica("b", "abc", "a")
    sees(u, a=HANGS, c=GONE)
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    found = u.handle(result_of("a", "that of a", u.shard.ballot))
    assert do.Adopt("that of a", is_own=False) in found


def test_one_that_hangs_has_its_say_before_a_takeover() -> None:
    """A replica that hangs itself may find that all others do."""
    u = replica("c")
    found = sees(u, a=HANGS, b=HANGS)
    assert ask(("b",), A.next_of("c", is_holder=False), is_final=False) in found
    assert u.handle(on.Denied("b", A))[-1] == do.Push("b", A, has_gradient=False)
    assert u.shard.state is FOLLOWING


def test_after_standing_still_a_primary_asks_who_has_contributed() -> None:
    u = replica("a", "abc", "a")
    u.handle(pushed("b"))
    u.handle(pushed("c"))
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    assert u.shard.state is STEPPING
    found = u.handle(on.StoodStill())
    assert ask(("b", "c"), A, is_final=True, count=1) in found
    u.handle(on.Stepped("result", 1))
    assert u.shard.state is MIRRORING
    for sender in "bcb":
        denied_by(u, sender, C)
    assert u.shard.state is FOLLOWING, "it has been overthrown"
    assert u.shard.is_spoiled


# ---- who is believed about ballots ---------------------------------------------------------------


def test_only_its_own_primary_sets_a_follower_free() -> None:
    """Not another member, and not by an answer to what was asked under an earlier ballot."""
    c = replica("c", "abcx")
    c.handle(on.Denied("x", B, A))
    assert c.shard.ballot == A
    sees(c, a=GONE)
    c.handle(on.Asked("ask", "b", B, is_final=True))
    c.handle(on.Denied("b", A, A))
    assert c.shard.ballot == B


def test_a_primary_that_stands_back_may_lead_again() -> None:
    """It denies the push by the ballot that it goes by all the same."""
    b = replica("b")
    b.handle(on.Denied("a", A, A))
    assert b.handle(on.Again()) == [do.Push("a", A, has_gradient=True)]


def test_a_stranger_is_believed_nothing() -> None:
    """Neither one that was the primary, nor one that goes by another ballot."""
    c = ShardUpdate("c", Roster(A, tuple("abc"), tuple("ab")))
    c.handle(on.Seen({"b": LIVES}))
    c.handle(on.Denied("a", B, A))
    assert do.Deny("push of x", A) in c.handle(pushed("x", B))


def test_who_is_led_round_in_a_circle_leads() -> None:
    of_b = Ballot(1, "b")
    c = replica("c")
    assert do.Push("b", of_b, has_gradient=True) in c.handle(on.Denied("a", of_b, A))
    c.handle(on.Denied("b", A, of_b))
    assert c.shard.ballot == of_b.next_of("c", is_holder=False)


def test_who_holds_the_state_leads_where_another_holder_may_too() -> None:
    b = replica("b", holders="abc")
    b.handle(on.Denied("a", Ballot(1, "b"), A))
    assert b.shard.ballot == B


def test_who_lacks_the_state_leads_where_the_other_holders_are_dead() -> None:
    for may_lead, ballot in ((True, C), (False, A)):
        c = replica("c", may_lead=may_lead)
        sees(c, b=GONE)
        c.handle(on.Denied("a", Ballot(1, "c"), A))
        assert c.shard.ballot == ballot


def test_who_takes_over_does_not_lead_by_the_ballot_that_another_one_knows() -> None:
    b = replica("b")
    sees(b, a=GONE)
    b.handle(on.Denied("c", Ballot(1, "b"), B, 0))
    assert b.shard.ballot == A


def test_a_primary_that_leads_anew_is_followed() -> None:
    """Where it is asked before, nothing changes yet."""
    anew = A.next_of("a", is_holder=True)
    c = replica("c")
    assert c.handle(on.Asked("ask", "a", anew, is_final=False)) == [do.Agree("ask", anew)]
    assert c.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Agree("ask", A)]
    found = c.handle(on.Asked("ask", "a", anew, is_final=True))
    assert do.Agree("ask", anew) in found


def test_without_a_primary_a_lower_ballot_is_followed_if_that_ones_primary_lives() -> None:
    c = replica("c", "abcd")
    sees(c, a=GONE, b=GONE)
    c.handle(on.Denied("d", B, C, 0))
    assert c.shard.ballot == B, "a higher one, whose primary lives to another one"
    c.handle(pushed("d", A))
    assert c.shard.ballot == B
    sees(c, b=GONE)
    assert do.Push("a", A, has_gradient=True) in c.handle(pushed("d", A))


def test_no_agreement_to_a_ballot_that_is_raised_too_far() -> None:
    c = replica("c")
    sees(c, a=GONE)
    far = Ballot(A.term + MAX_LEAD + 1, "b")
    assert c.handle(on.Asked("ask", "b", far, is_final=False)) == [do.Deny("ask", A)]


def test_an_agreement_lasts_as_long_as_there_is_no_primary() -> None:
    c = replica("c")
    sees(c, a=HANGS)
    assert c.handle(on.Asked("ask", "b", B, is_final=False)) == [do.Agree("ask", B)]
    sees(c, a=HANGS)
    assert c.handle(on.Asked("ask", "a", A, is_final=True)) == [do.Deny("ask", B)]
    far = Ballot(A.term + MAX_LEAD + 1, "b")
    found = c.handle(on.Asked("ask", "b", far, is_final=True))
    assert found[-1] == do.Deny("ask", A), "it goes by that yet"


def test_what_the_primary_of_a_copied_step_announced_before_changes_nothing() -> None:
    b = copied()
    found = b.handle(on.Asked("ask", "a", Ballot(0, "a"), is_final=True))
    assert found == [ask(("a",), B, is_final=False), do.Deny("ask", A)]


def test_a_primary_that_hears_of_another_one_asks_all() -> None:
    a = replica("a")
    assert a.handle(on.Asked("ask", "b", B, is_final=True)) == [do.Deny("ask", A)]
    assert a.handle(on.Again()) == [ask(("b", "c"), A, is_final=True), do.Pause()]


def test_a_contribution_is_a_promise_again() -> None:
    a = replica("a")
    denied_by(a, "c", B)
    a.handle(pushed("c"))
    denied_by(a, "b", B)
    assert a.shard.ballot == A


D = B.next_of("d", is_holder=True)


def leads_anew() -> ShardUpdate:
    """b has taken over from a, and has counted promises once, before its step failed."""
    b = replica("b", "abcd")
    sees(b, a=GONE)
    for sender in "cd":
        b.handle(agreed(sender, B, is_final=False))
    for sender in "cd":
        b.handle(pushed(sender, B))
    b.handle(on.Summed("sum", 1))
    b.handle(on.ClipKnown(1))
    b.handle(on.StepFailed(1))
    assert (b.shard.ballot, b.shard.state, b.shard.count) == (B, GATHERING, 1)
    return b


def test_what_was_agreed_before_is_no_promise_of_one_that_has_left() -> None:
    """d is followed by one, and this primary by none."""
    for event in (
        agreed("c", B, is_final=False, count=1),
        agreed("c", A, is_final=True, count=1),
        agreed("c", B, is_final=True, count=0),
    ):
        b = leads_anew()
        denied_by(b, "c", D)
        b.handle(event)
        denied_by(b, "d", D)
        assert b.shard.ballot == D


def test_who_has_left_no_primary_that_is_one_is_none_that_has_left() -> None:
    """c follows this primary, and nobody that counts follows d."""
    for event in (
        on.Denied("c", D, A, 1),
        on.Denied("c", D, B, 0),
        on.Denied("c", Ballot(1, "b"), B, 1),
        on.Denied("x", D, B, 1),
    ):
        b = leads_anew()
        b.handle(event)
        denied_by(b, "d", D)
        assert b.shard.ballot == B


def test_who_takes_no_step_is_asked_by_whom_it_goes() -> None:
    """It may have said so before it took over, and that comes first."""
    a = mirroring()
    a.handle(agreed("c", A, is_final=True))
    asked = ask(("b", "c"), A, is_final=True, count=1)
    assert asked in a.handle(on.Denied("b", Ballot(1, "b"), A))
    a.handle(agreed("c", A, is_final=True, count=1))
    assert a.shard.state is MIRRORING
    denied_by(a, "b", B)
    a.handle(agreed("c", A, is_final=True, count=2))
    assert a.shard.state is DECIDED, "b leads nobody else"


def test_of_two_other_primaries_the_one_with_more_followers_leads() -> None:
    """Both are dead here: the result is waited for at a follower of that one."""
    x, y = A.next_of("x", is_holder=True), Ballot(5, "y")
    a = replica("a", "abcdexy")
    sees(a, x=GONE, y=GONE)
    denied_by(a, "b", y)
    denied_by(a, "c", x)
    assert do.Push("c", x, has_gradient=False) in denied_by(a, "d", x)


def test_who_joins_waits_for_the_next_one_that_may_lead() -> None:
    c = replica("c", "abcd", may_lead=False)
    assert do.Push("d", A, has_gradient=False) in sees(c, a=GONE, b=GONE)


# ---- a quorum -----------------------------------------------------------------------------------


def declares(num_tokens: int) -> MemberStatus:
    return MemberStatus(declared=num_tokens)


def quorum() -> ShardUpdate:
    """The primary of three, with its own contribution and that of b."""
    u = replica("a", quorum=2)
    assert do.SetGrace() in u.handle(pushed("b"))
    return u


def test_a_primary_goes_on_with_a_quorum_after_a_grace() -> None:
    """Not with its own contribution alone, nor as soon as the quorum is there."""
    u = ShardUpdate("a", replica("a", quorum=2).shard.roster)
    u.handle(on.Seen({"b": declares(0), "c": declares(1)}))
    assert do.SetGrace() not in u.handle(on.Begun(5, "gradient of a"))
    assert do.SetGrace() not in u.handle(pushed("b", num_tokens=0))
    u = quorum()
    assert u.shard.state is GATHERING
    (made,) = u.handle(on.GracePassed())
    assert isinstance(made, do.Sum)
    assert [p for p, _, _ in made.parts] == ["a", "b"]
    assert (made.absent, made.late) == ((), ("c",))


def test_a_grace_begins_when_the_primary_has_closed_the_round() -> None:
    roster = Roster(A, tuple("abcd"), ("a", "b"), ("a", "b"), is_holder=True, quorum=2)
    u = ShardUpdate("a", roster)
    sees(u)
    for sender in "bc":
        assert do.SetGrace() not in u.handle(pushed(sender))
    assert not u.handle(on.GracePassed())
    assert do.SetGrace() in u.handle(on.Begun(1, "gradient of a"))
    assert u.shard.state is GATHERING


def test_what_is_late_is_less_than_what_has_come() -> None:
    """One with as many tokens is waited for; the deadline is for all."""
    u = quorum()
    u.handle(on.Seen({"b": declares(1), "c": declares(2)}))
    assert not u.handle(on.GracePassed())
    (made,) = u.handle(on.DeadlinePassed())
    assert isinstance(made, do.Sum)
    assert (made.absent, made.late) == (("c",), ())


def test_all_are_waited_for_without_a_quorum() -> None:
    u = replica("a")
    assert do.SetGrace() not in u.handle(pushed("b"))
    assert not u.handle(on.GracePassed())
    assert u.shard.state is GATHERING


def test_who_made_a_result_brings_what_is_late_into_the_next_exchange() -> None:
    """And nobody else: it does not know what is in the result."""
    a = quorum()
    (made,) = a.handle(on.GracePassed())
    assert isinstance(made, do.Sum)
    a.handle(on.Summed("sum", made.attempt))
    a.handle(on.ClipKnown(made.attempt))
    assert not a.handle(pushed("c")), "it waits for the result"
    a.handle(on.Stepped("result", made.attempt))
    a.handle(on.Confirmed("b", made.attempt))
    given = a.handle(agreed("c", A, is_final=True))
    assert a.shard.state is DECIDED
    assert do.Give("push of b", "result") in given
    assert do.Give("push of c", "result", is_late=True) in given
    assert a.handle(pushed("c")) == [do.Give("push of c", "result", is_late=True)]
    assert a.handle(pushed("b")) == [do.Give("push of b", "result")]

    b = replica("b", quorum=2)
    b.handle(result_of("a", ballot=A))
    assert b.shard.state is ADOPTED
    assert b.handle(pushed("c")) == [do.Give("push of c", "result")]


def test_where_all_are_waited_for_what_is_too_late_is_lost() -> None:
    a = replica("a")
    a.handle(pushed("b"))
    (made,) = a.handle(on.DeadlinePassed())
    assert isinstance(made, do.Sum)
    a.handle(on.Summed("sum", made.attempt))
    a.handle(on.ClipKnown(made.attempt))
    a.handle(on.Stepped("result", made.attempt))
    a.handle(on.Confirmed("b", made.attempt))
    a.handle(agreed("c", A, is_final=True))
    assert a.shard.state is DECIDED
    assert a.handle(pushed("c")) == [do.Give("push of c", "result")]


def test_what_is_late_goes_to_the_primary_though_others_have_the_result() -> None:
    """As long as that lives. Who has nothing to give takes the result from anybody."""
    for quorum_of, target in ((2, "a"), (0, "b")):
        u = replica("c", quorum=quorum_of)
        assert u.shard.pushing == "a"
        sees(u, b=PAST)
        assert u.shard.pushing == target
    u = replica("c", "abcd", quorum=2)
    sees(u, a=GONE, d=PAST)
    assert u.shard.pushing == "d"
    u = ShardUpdate("c", replica("c", quorum=2).shard.roster)
    sees(u, b=PAST)
    u.handle(on.Begun(0, None))
    assert u.shard.pushing == "b"


# ---- neighbours ------------------------------------------------------------------------------


def gathered(sender: str, *members: str, num_tokens: int = 2) -> on.Pushed:
    """A contribution that has those of neighbours in it."""
    return replace(pushed(sender, num_tokens=num_tokens), members=members)


def summed_by(u: ShardUpdate, *events: on.Pushed) -> tuple[list[str], frozenset[str]]:
    """Whose contributions are summed, and who is told so."""
    (made,) = [c for event in events for c in u.handle(event) if isinstance(c, do.Sum)]
    return [p for p, _, _ in made.parts], made.senders


def test_what_a_neighbour_has_given_counts_once_though_it_gives_it_again() -> None:
    """In whichever order they come, and though that one has nothing of its own."""
    own, whole = pushed("c"), gathered("b", "c")
    assert summed_by(replica("a"), own, whole) == (["a", "b"], frozenset("abc"))
    assert summed_by(replica("a", "abcd"), whole, own, pushed("d")) == (
        ["a", "b", "d"],
        frozenset("abcd"),
    )
    assert summed_by(replica("a", "abcd"), whole, whole, own, pushed("d", num_tokens=0)) == (
        ["a", "b"],
        frozenset("abcd"),
    )


def test_of_contributions_with_one_in_both_the_first_stands_unless_it_is_in_the_other() -> None:
    u = replica("a", "abcde")
    found = summed_by(u, gathered("b", "c"), gathered("d", "c", "e"), pushed("e", num_tokens=0))
    assert found[0] == ["a", "b"]


def test_contributions_without_tokens_take_the_place_of_none() -> None:
    u = replica("a")
    assert summed_by(u, gathered("b", "c"), gathered("b", "c", num_tokens=0)) == (
        ["a", "b"],
        frozenset("abc"),
    )


def test_who_was_promised_nothing_by_a_neighbour_asks_it_before_a_result_is_given() -> None:
    """c has given to b, which says nothing of whom c goes by."""
    u = replica("a", holders="a", clips=False)
    (made,) = [c for c in u.handle(gathered("b", "c")) if isinstance(c, do.Sum)]
    found = u.handle(on.Summed("sum", made.attempt))
    asked = [c for c in found if isinstance(c, do.Ask)]
    assert [c.members for c in asked] == [("c",)]
    found = u.handle(on.Stepped("result", made.attempt))
    assert not any(isinstance(c, do.Give) for c in found)
    found = u.handle(on.Agreed("c", A, is_final=True, count=asked[0].count))
    assert [c.call for c in found if isinstance(c, do.Give)] == ["push of b"]


def neighbour(me: str, head: str = "", members: tuple[str, ...] = ()) -> ShardUpdate:
    """It has given to a neighbour, or neighbours have given to it."""
    u = ShardUpdate(me, Roster(A, tuple("abc"), tuple("ab"), tuple("ab"), me in "ab"))
    sees(u)
    u.handle(on.Begun(1, f"gradient of {me}", members, head))
    return u


def test_a_result_is_waited_for_at_a_neighbour_until_that_fails_once() -> None:
    u = ShardUpdate("c", Roster(A, tuple("abc"), tuple("ab"), tuple("ab")))
    sees(u)
    assert u.handle(on.Begun(1, "gradient", (), "b")) == [do.Push("b", A, has_gradient=False)]
    failed = u.handle(on.PushFailed("b"))
    assert do.Push("a", A, has_gradient=True) in failed


def test_who_has_given_to_a_neighbour_gives_to_the_primary_when_that_is_dead() -> None:
    u = neighbour("c", head="b")
    assert do.Push("a", A, has_gradient=True) in sees(u, b=GONE)


def test_what_the_primary_has_from_a_neighbour_is_not_given_to_it_twice() -> None:
    u = ShardUpdate("c", Roster(A, tuple("abc"), tuple("ab"), tuple("ab")))
    sees(u)
    assert u.handle(on.Begun(1, "gradient", (), "a")) == [do.Push("a", A, has_gradient=False)]


def test_a_neighbour_that_waits_names_nobody_the_successor() -> None:
    """b comes after a; c waits at d because it is its neighbour, and not because a is dead to it
    and d is next. A stranger's call is word of that."""
    for members, state in ((("c",), FOLLOWING), ((), CANVASSING)):
        u = ShardUpdate("d", Roster(A, tuple("abcd"), tuple("ab"), tuple("ab")))
        sees(u)
        u.handle(on.Begun(1, "gradient", members))
        u.handle(pushed("c", num_tokens=0))
        sees(u, a=GONE)
        assert u.shard.state is state


def test_neighbours_wait_on_while_a_step_is_copied_and_others_go_elsewhere() -> None:
    for members, denied in ((("c",), []), ((), ["push of c"])):
        for event in (on.Stepped("result", 1), on.StepFailed(1)):
            u = neighbour("b", members=members)
            u.handle(pushed("c", num_tokens=0))
            u.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
            found = u.handle(event)
            assert [c.call for c in found if isinstance(c, do.Deny)] == denied
            found = u.handle(on.ResultCame("a", "result", A))
            given = [c.call for c in found if isinstance(c, do.Give)]
            assert given == ([] if denied else ["push of c"])
