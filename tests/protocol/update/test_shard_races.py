"""Races in the update of a shard, each as a few events at one replica. Replicas: a (primary) and b
hold the optimizer state, c does not."""

from __future__ import annotations

from typing import Any

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, Ballot, Roster, Standing, first_ballot
from swarmnet.protocol.update.roster import pair as pair_of
from swarmnet.protocol.update.shard_facts import (
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
LIVES, GONE, PAST = Standing(), Standing(life=DEAD), Standing(is_past=True)


def replica(me: str, peers: str = "abc", holders: str = "ab", **options: Any) -> ShardUpdate:
    """It has closed the round, and all others live."""
    roster = Roster(A, tuple(peers), tuple(holders), tuple(holders), me in holders, **options)
    u = ShardUpdate(me, roster)
    sees(u)
    u.handle(on.Begun(1, f"gradient of {me}"))
    return u


def sees(u: ShardUpdate, **standings: Standing) -> list[do.Command]:
    """What is known of the others now; those that are not named live."""
    members = {p: standings.get(p, LIVES) for p in u.facts.roster.order if p != u.facts.me}
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
    assert u.facts.state is CLIPPING
    return u


def stepping() -> ShardUpdate:
    """It has the step made, and b is to make it too."""
    u = clipping()
    assert do.Mirror("sum", ("b",), A, 1) in u.handle(on.ClipKnown(1))
    assert u.facts.state is STEPPING
    return u


def mirroring() -> ShardUpdate:
    u = stepping()
    assert not u.handle(on.Stepped("result", 1))
    assert u.facts.state is MIRRORING
    return u


def copying(me: str = "b", **options: Any) -> ShardUpdate:
    u = replica(me, **options)
    found = u.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    assert do.Repeat("step", 1) in found
    return u


def kinds(commands: list[do.Command]) -> list[str]:
    return [type(c).__name__ for c in commands]


def test_the_result_is_given_out_when_the_backup_has_it() -> None:
    u = mirroring()
    assert u.handle(on.Confirmed("b")) == [
        do.Adopt("result", is_own=True),
        do.Give("push of b", "result"),
        do.Give("push of c", "result"),
    ]
    assert u.facts.state is DECIDED
    assert u.is_over


def test_the_primary_dies_before_the_mirror() -> None:
    """The backup asks whether it is dead to all, has all promise, and sums anew."""
    b = replica("b")
    assert sees(b, a=GONE) == [
        do.GiveUpPush(),
        do.Ask(("c",), B, is_final=False),
        do.Pause(),
    ]
    found = b.handle(on.Agreed("c", B, is_final=False))
    assert do.Ask(("c",), B, is_final=True) in found
    found = b.handle(pushed("c", B))
    assert [c.senders for c in found if isinstance(c, do.Sum)] == [frozenset("bc")]


def test_the_primary_dies_after_the_mirror() -> None:
    """The backup has the result, and gives it to those that come."""
    b = copying()
    assert b.handle(on.Stepped("result", 1)) == [do.Confirm("mirror")]
    assert do.Adopt("result", is_own=False) in sees(b, a=GONE)
    assert b.handle(pushed("c")) == [do.Give("push of c", "result")]
    assert b.handle(on.Asked("ask", "c", C, is_final=True)) == [do.Give("ask", "result")]


def test_a_mirrored_step_that_comes_after_a_promise_is_denied() -> None:
    b = replica("b")
    b.handle(on.Asked("ask", "c", C, is_final=True))
    assert b.facts.ballot == C
    found = b.handle(on.MirrorCame("mirror", "a", A, "step", fits=True))
    assert found == [do.Deny("mirror", C)]


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
    assert b.facts.state is FOLLOWING
    assert b.facts.ballot == A


def test_the_suspected_primary_is_heard_again() -> None:
    b = replica("b")
    sees(b, a=GONE)
    assert b.facts.state is CANVASSING
    assert do.Push("a", A, has_gradient=True) in sees(b)
    assert not b.handle(on.Agreed("c", B, is_final=False))
    assert b.facts.ballot == A


def test_overthrown_while_clipping() -> None:
    u = clipping()
    found = u.handle(on.Asked("ask", "b", B, is_final=True))
    assert found == [
        do.Deny("push of b", B),
        do.Deny("push of c", B),
        do.Agree("ask", B),
        do.Push("b", B, has_gradient=True),
    ]
    assert not u.handle(on.ClipKnown(1))
    assert u.facts.state is FOLLOWING


def test_overthrown_while_stepping() -> None:
    """Its state has seen a gradient that the others' has not, and it leads as no holder now."""
    u = stepping()
    found = u.handle(on.Asked("ask", "b", B, is_final=True))
    assert found[0] == do.Spoiled()
    assert not u.handle(on.Stepped("result", 1))
    assert u.facts.next_ballot().term % 2 == 0


def test_what_an_earlier_attempt_brings_does_not_count() -> None:
    assert not clipping().handle(on.Summed("other", 0))
    assert not clipping().handle(on.ClipKnown(0))
    assert not stepping().handle(on.Stepped("other", 0))
    assert not copying().handle(on.Stepped("other", 0))
    assert not copying().handle(on.StepFailed(0))


def test_a_member_back_after_the_sum_is_waited_for() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    sees(u, c=GONE)
    assert u.facts.state is CLIPPING
    found = sees(u)
    assert do.Deny("push of b", A) in found
    assert u.facts.state is GATHERING


def test_a_member_back_after_the_step_is_asked_for_its_promise() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    sees(u, c=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    u.handle(on.Again())
    assert do.Ask(("c",), A, is_final=True) in sees(u)
    u.handle(on.Confirmed("b"))
    u.handle(on.Agreed("b", A, is_final=True))
    assert u.facts.state is MIRRORING
    assert do.Adopt("result", is_own=True) in u.handle(on.Agreed("c", A, is_final=True))


def test_the_answer_to_a_question_is_no_promise() -> None:
    """A member that agreed before the takeover may have got the old primary's step since."""
    u = replica("b")
    sees(u, a=GONE)
    u.handle(on.Agreed("c", B, is_final=False))
    sees(u, a=GONE, c=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    assert u.facts.state is DECIDED  # nobody else lives
    u = replica("b")
    sees(u, a=GONE)
    u.handle(on.Agreed("c", B, is_final=False))
    sees(u, a=GONE, c=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    sees(u, a=GONE)
    u.handle(on.Stepped("result", 1))
    u.handle(on.Agreed("c", B, is_final=False))
    assert u.facts.state is MIRRORING


def test_a_backup_back_after_the_step_gets_it_before_anybody_else_the_result() -> None:
    u = clipping()
    sees(u, b=GONE)
    assert not any(isinstance(c, do.Mirror) for c in u.handle(on.ClipKnown(1)))
    u.handle(on.Again())
    assert do.Mirror("sum", ("b",), A, 1) in sees(u)
    u.handle(on.Stepped("result", 1))
    u.handle(on.Agreed("b", A, is_final=True))
    assert u.facts.state is MIRRORING


def test_promises_are_asked_for_again_after_a_death() -> None:
    """The dead one may have led others by a higher ballot before, and given out another result."""
    u = replica("a")
    u.handle(pushed("c"))
    sees(u, b=GONE)
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    assert do.Ask(("c",), A, is_final=True) in u.handle(on.Stepped("result", 1))
    found = u.handle(on.ResultCame("c", "another result"))
    assert found == [
        do.Spoiled(),
        do.Adopt("another result", is_own=False),
        do.Give("push of c", "another result"),
    ]


def test_the_result_is_elsewhere() -> None:
    c = replica("c")
    assert sees(c, b=PAST) == [do.GiveUpPush(), do.Push("b", A, has_gradient=False)]
    assert do.Adopt("result", is_own=False) in c.handle(on.ResultCame("b", "result"))
    assert c.facts.state is ADOPTED
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
    u.handle(on.Summed("sum", 1))
    u.handle(on.ClipKnown(1))
    u.handle(on.Stepped("result", 1))
    assert do.Give("push of c", "result") in u.handle(on.Confirmed("b"))
    assert "c" not in u.facts.senders


def test_zero_tokens_are_counted_and_not_summed() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    (made,) = [c for c in u.handle(pushed("c", num_tokens=0)) if isinstance(c, do.Sum)]
    assert [p for p, _, _ in made.parts] == ["a", "b"]
    assert made.senders == frozenset("abc")


def test_who_declares_no_tokens_is_not_waited_for() -> None:
    u = replica("a")
    u.handle(pushed("b"))
    assert "Sum" in kinds(sees(u, c=Standing(declared=0)))


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
    assert do.Ask(("c",), B, is_final=False) in b.handle(pushed("c", num_tokens=0))


def test_of_several_backups_none_gives_out_before_the_primary_has() -> None:
    b = copying(holders="abc")
    assert b.handle(on.Stepped("result", 1)) == [do.Confirm("mirror")]
    assert b.facts.state is COPIED
    assert not b.handle(pushed("c"))
    found = b.handle(on.ResultCame("a", "the primary's"))
    assert do.Adopt("the primary's", is_own=False) in found
    assert do.Give("push of c", "the primary's") in found


def test_a_broken_call_for_the_mirrored_step_comes_again() -> None:
    """The primary waits for the step, not for the first call."""
    b = copying()
    assert not b.handle(on.MirrorCame("mirror 2", "a", A, "step", fits=False))
    assert do.Confirm("mirror 2") in b.handle(on.Stepped("result", 1))


def test_a_backup_that_cannot_make_the_step_waits_for_the_result() -> None:
    b = copying()
    b.handle(on.PushFailed("a"))
    assert b.handle(on.StepFailed(1)) == [do.Refuse("mirror")]
    assert b.handle(on.Again()) == [do.Push("a", A, has_gradient=True)]


def test_a_lost_mirror_is_sent_again_after_a_pause() -> None:
    u = mirroring()
    u.handle(on.Again())
    assert u.handle(on.MirrorFailed("b")) == [do.Pause()]
    assert u.handle(on.Again()) == [do.Mirror("sum", ("b",), A, 1)]


def test_a_stage_that_has_moved_on_is_followed_by_a_download() -> None:
    c = replica("c")
    assert c.handle(on.MovedOn()) == [do.Abandon()]
    assert c.facts.state is ABANDONED
    assert c.handle(pushed("b")) == [do.Deny("push of b", A)]


def test_a_ballot_beyond_all_terms_is_not_followed() -> None:
    c = replica("c")
    assert c.handle(pushed("b", Ballot((1 << 20) + 1, "b"))) == [do.Deny("push of b", A)]


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
    u.handle(on.Confirmed("b"))
    assert do.Step("sum", A, 1) in u.handle(on.Summed("sum", 1))
    assert u.handle(on.Stepped("result", 1)) == [do.Adopt("result", is_own=True)]


def test_a_meeting_lasts_until_the_partner_has_the_offer_too() -> None:
    u = pair()
    offer(u)
    assert do.Mirror("sum", ("b",), A, 1) in u.handle(on.Summed("sum", 1))
    assert not u.handle(on.Stepped("result", 1))
    assert do.Adopt("result", is_own=True) in u.handle(on.Confirmed("b"))


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


def test_a_primary_waits_for_tokens_that_were_counted_and_nobody_known_has() -> None:
    """In a run's first round, when all join at once: two replicas that do not know each other yet
    would each make a step of its own."""
    a = ShardUpdate("a", Roster(A, ("a",), ("a",), ("a",), is_holder=True))
    a.handle(on.Seen({}, counted=3))
    assert not [c for c in a.handle(on.Begun(1, "ga")) if isinstance(c, do.Sum)]
    a.handle(on.Seen({"b": Standing()}, counted=3))
    (total,) = (c for c in a.handle(on.Pushed(1, "b", A, 2, "gb")) if isinstance(c, do.Sum))
    assert total.senders == {"a", "b"}


def test_tokens_that_nobody_brings_are_waited_for_no_longer_than_their_holder_could_live() -> None:
    a = ShardUpdate("a", Roster(A, ("a",), ("a",), ("a",), is_holder=True))
    a.handle(on.Seen({}, counted=3))
    a.handle(on.Begun(1, "ga"))
    assert [c for c in a.handle(on.Seen({}, counted=0)) if isinstance(c, do.Sum)]
