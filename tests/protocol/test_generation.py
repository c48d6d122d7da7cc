"""What a replica spends on texts: who may have how many, which parameters, and until when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import Busy, NotNow, NotReady, Refused, Stale, SwarmnetError, UserError
from swarmnet.methods.microbatch import GenerateRequest
from swarmnet.protocol.generation import (
    BURST_TOKENS,
    DEVICE_SHARE,
    IDLE_S,
    LEAST_TOKENS_PER_S,
    LONGEST_S,
    LONGEST_TEXT,
    MAX_PASS_TOKENS,
    MAX_SESSIONS,
    MAX_SESSIONS_EACH,
    MAX_TOKENS,
    MAX_UNKNOWN_SESSIONS,
    ONE_ROUND_S,
    REFUSED_S,
    SLOW_AFTER_S,
    TOKENS_PER_S,
    DeviceTurn,
    Found,
    Key,
    Parameters,
    Session,
    Sessions,
    Wish,
    gives_up,
    is_round_lost,
    mixes_rounds,
    newest_common,
    next_offer,
    pass_tokens,
    text_tokens,
)
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.timing import PATIENCE_S

KEY = ("caller", "text")


def opened(
    sessions: Sessions,
    key: Key = KEY,
    *,
    present: int = 3,
    now: float = 0.0,
    is_known: bool = True,
    **wish: object,
) -> Session:
    said = Wish(**{"round": 3, "max_tokens": 100, **wish})  # type: ignore[arg-type]
    chosen = sessions.choose(key, key[0], said, present, has_room=True, is_known=is_known)
    return sessions.open(key, key[0], said, chosen, present, now, is_known=is_known)


def test_sessions_of_a_round_share_its_copy_which_goes_with_the_last() -> None:
    sessions, other = Sessions(), ("caller", "another")
    wish = Wish(3, 100)
    assert sessions.choose(KEY, "caller", wish, 3, True) is Parameters.COPIED
    opened(sessions)
    # The replica has gone on; the copy is still there.
    assert sessions.choose(other, "caller", wish, 5, False) is Parameters.SHARED
    opened(sessions, other, present=5)
    with pytest.raises(Stale) as refused:
        sessions.choose(("caller", "third"), "caller", Wish(5, 100), 5, True)
    assert refused.value.details["round"] == 3
    assert sessions.end(KEY)
    assert not sessions.end(KEY)
    assert sessions.copied_round == 3
    assert sessions.end(other)
    assert sessions.copied_round is None
    assert sessions.choose(KEY, "caller", Wish(5, 100), 5, True) is Parameters.COPIED


def test_rounds_are_mixed_only_where_the_caller_says_so() -> None:
    sessions = Sessions()
    for present, has_room, is_full in ((3, False, True), (4, True, None)):
        with pytest.raises(Stale) as refused:
            sessions.choose(KEY, "caller", Wish(3, 100), present, has_room)
        assert refused.value.details["round"] == present
        assert refused.value.details.get("is_full") is is_full
        mixed = Wish(3, 100, mixes=True)
        assert sessions.choose(KEY, "caller", mixed, present, has_room) is Parameters.PRESENT
    session = sessions.open(KEY, "caller", mixed, Parameters.PRESENT, 4, 0.0)
    assert not session.is_copied
    assert session.round == 4
    assert sessions.copied_round is None


def test_callers_have_few_sessions_and_a_replica_has_not_many() -> None:
    sessions = Sessions()
    for i in range(MAX_SESSIONS):
        caller = f"caller {i // MAX_SESSIONS_EACH}"
        if i and i % MAX_SESSIONS_EACH == 0:
            with pytest.raises(Busy, match="you have"):
                opened(sessions, (f"caller {i // MAX_SESSIONS_EACH - 1}", "one more"))
        opened(sessions, (caller, f"text {i}"))
    with pytest.raises(Busy, match="too many texts are"):
        opened(sessions, ("nobody yet", "text"))
    opened(sessions, ("caller 0", "text 0"))  # anew, in its own place
    assert sessions.num_open == MAX_SESSIONS


def unknown_hold_all(sessions: Sessions) -> None:
    """That they may have together."""
    for i in range(MAX_UNKNOWN_SESSIONS):
        opened(sessions, (f"name {i // MAX_SESSIONS_EACH}", f"{i}"), is_known=False)
    with pytest.raises(Busy, match="too many texts are"):
        opened(sessions, ("another name", "text"), is_known=False)


def test_names_that_nobody_has_seen_at_work_leave_places_to_those_that_work() -> None:
    sessions = Sessions()
    unknown_hold_all(sessions)
    for i in range(MAX_SESSIONS - MAX_UNKNOWN_SESSIONS):
        opened(sessions, ("member", f"{i}"))
    assert sessions.num_open == MAX_SESSIONS


def test_a_text_that_does_not_grow_gives_its_place_to_another() -> None:
    sessions = Sessions()
    unknown_hold_all(sessions)
    member = opened(sessions, ("member", "text"))

    def giving_way(now: float, *, by: str = "another", is_known: bool = False) -> Session | None:
        return sessions.giving_way((by, "text"), by, now, is_known=is_known)

    assert giving_way(SLOW_AFTER_S - 1.0) is None
    slow = giving_way(SLOW_AFTER_S)
    assert slow is not None
    assert slow is not member
    assert giving_way(SLOW_AFTER_S, is_known=True) is None, "there is a place"
    assert giving_way(SLOW_AFTER_S, by="name 0") is None, "it has its share"
    sessions.keep(slow.key, SLOW_AFTER_S)
    assert giving_way(SLOW_AFTER_S) is slow, "saying so is no work"
    enough = int(LEAST_TOKENS_PER_S * SLOW_AFTER_S)
    sessions.done(sessions.begin(slow.key, 0, enough, SLOW_AFTER_S), enough, SLOW_AFTER_S)
    other = giving_way(SLOW_AFTER_S)
    assert other is not None
    assert other is not slow
    sessions.end(other.key)
    assert giving_way(SLOW_AFTER_S) is None
    opened(sessions, ("another", "text"), is_known=False)


def test_a_session_is_over_when_another_one_has_its_name() -> None:
    sessions = Sessions()
    first = opened(sessions)
    assert sessions.is_open(first)
    second = opened(sessions)
    assert not sessions.is_open(first)
    assert sessions.is_open(second)
    assert sessions.end(KEY) is second
    assert not sessions.is_open(second)


def test_a_text_goes_on_where_it_is() -> None:
    sessions = Sessions()
    with pytest.raises(NotReady):
        sessions.begin(KEY, 0, 10, 0.0)
    session = opened(sessions)
    with pytest.raises(NotReady):
        sessions.begin(("another caller", KEY[1]), 0, 10, 0.0)
    sessions.begin(KEY, 0, 10, 0.0)
    with pytest.raises(Busy):
        sessions.begin(KEY, 0, 10, 0.0)
    sessions.done(session, 10, 0.0)
    for position in (0, 9, 11):
        with pytest.raises(NotReady):
            sessions.begin(KEY, position, 1, 0.0)
    with pytest.raises(Refused):
        sessions.begin(KEY, 10, 91, 0.0)
    sessions.done(sessions.begin(KEY, 10, 90, 0.0), 90, 0.0)


def test_a_machine_may_have_so_many_tokens_and_no_more() -> None:
    for longest in (64, MAX_TOKENS, 2 * MAX_TOKENS):
        sessions, most = Sessions(longest), max(longest, MAX_TOKENS)
        for i in range(MAX_SESSIONS_EACH):
            session = opened(sessions, ("caller", f"{i}"), max_tokens=most)
            sessions.done(sessions.begin(session.key, 0, most, 0.0), most, 0.0)
        takes_no_more(sessions)
    assert BURST_TOKENS == MAX_TOKENS * MAX_SESSIONS_EACH


def takes_no_more(sessions: Sessions) -> None:
    sessions.end(("caller", "0"))
    opened(sessions, ("caller", "0"))
    with pytest.raises(Busy) as refused:
        sessions.begin(("caller", "0"), 0, 64, 0.0)
    assert refused.value.backlog_s == 64 / TOKENS_PER_S
    opened(sessions, ("another", "0"))
    sessions.begin(("another", "0"), 0, 64, 0.0)
    sessions.begin(("caller", "0"), 0, 64, refused.value.backlog_s)


def test_a_text_may_be_as_long_as_the_sequences_of_its_run() -> None:
    assert [text_tokens(n) for n in (16, MAX_TOKENS, 5000, LONGEST_TEXT, 1 << 20)] == [
        MAX_TOKENS,
        MAX_TOKENS,
        5000,
        LONGEST_TEXT,
        LONGEST_TEXT,
    ]
    about: dict[str, Any] = {"opens": True, "round": 1}
    assert GenerateRequest(0, "text", max_tokens=LONGEST_TEXT, **about).max_tokens == 131_072
    with pytest.raises(ValueError, match="1 to 131072 tokens"):
        GenerateRequest(0, "text", max_tokens=LONGEST_TEXT + 1, **about)


def test_sessions_that_rest_or_never_end_are_dropped() -> None:
    sessions = Sessions()
    opened(sessions)
    assert sessions.expired(IDLE_S - 0.1) == []
    assert sessions.expired(IDLE_S) == [KEY]
    at = 0.0
    while at < LONGEST_S:
        assert sessions.expired(at) == []
        sessions.keep(KEY, at)
        at += IDLE_S / 2
    assert sessions.expired(at) == [KEY]
    session = sessions.begin(KEY, 0, 1, at)
    assert sessions.expired(at + 2 * IDLE_S) == []  # it is at work
    sessions.done(session, 1, at)
    assert sessions.expired(at) == [KEY]


def test_a_session_is_kept_whatever_it_is_at() -> None:
    sessions = Sessions()
    with pytest.raises(NotReady):
        sessions.keep(KEY, 0.0)
    session = opened(sessions)
    sessions.done(sessions.begin(KEY, 0, 10, 0.0), 10, 0.0)
    assert sessions.keep(KEY, IDLE_S / 2) is session
    assert sessions.expired(IDLE_S) == []
    assert session.num_tokens == 10
    sessions.begin(KEY, 10, 1, IDLE_S)
    assert sessions.keep(KEY, IDLE_S) is session
    assert session.is_busy


@given(st.integers(1, 1 << 20))
def test_a_pass_is_no_longer_than_that_of_a_microbatch(tokens: int) -> None:
    assert 1 <= pass_tokens(tokens) <= min(tokens, MAX_PASS_TOKENS)


@given(st.lists(st.floats(1e-4, 1.0), min_size=20, max_size=60), st.floats(0.0, 1.0))
def test_texts_have_their_share_of_a_busy_device(works: list[float], first_at: float) -> None:
    """A pass that always has to wait as long as it must."""
    turn, now, worked_s = DeviceTurn(), first_at, 0.0
    assert turn.wait_s(now) == 0.0
    for work_s in works:
        now += turn.wait_s(now) + work_s
        turn.worked(work_s, now)
        worked_s += work_s
    now += turn.wait_s(now)
    assert worked_s / (now - first_at) == pytest.approx(DEVICE_SHARE)


def test_only_known_errors_reach_a_caller() -> None:
    sessions = Sessions()
    for position, count in ((0, 1), (1 << 62, 1), (0, 1 << 62)):
        with pytest.raises(SwarmnetError):
            sessions.begin(KEY, position, count, 0.0)


# ---- at the one who asks for a text -------------------------------------------------------------


def said(*errors: SwarmnetError, peers: tuple[str, ...] = ()) -> Found:
    found = Found(peers=list(peers))
    for error in errors:
        found.refused(error)
    return found


def test_what_replicas_offer_in_place_of_a_round_is_remembered() -> None:
    full = Stale("no room", round=4, is_full=True)
    found = said(Stale("over", round=6), NotReady("not begun", round=3), full, Busy("many"))
    assert (found.offers, found.is_full) == ([6, 3, 4], True)
    assert isinstance(found.error, Busy)
    assert said(NotReady("joining")).offers == []
    assert not said(Stale("over", round=6)).is_full
    found.only_coded()
    assert found.is_coded
    assert isinstance(found.error, NotReady)


def test_the_round_is_the_newest_that_every_stage_has_or_will_have() -> None:
    assert newest_common([{3, 4}, {4, 5}, {2, 4}]) == 4
    assert newest_common([{3, 4}, {5}]) == 4, "no common one: the newest of the stage behind"
    assert newest_common([{3}, set()]) == 0


def test_the_next_try_is_by_the_offers_of_the_stages_that_refused() -> None:
    over = said(Stale("over", round=6), Stale("over", round=7))
    assert next_offer([over, said(Stale("over", round=9))]) == 7
    assert next_offer([over, said(Stale("over", round=2), peers=("a",))]) == 7
    assert next_offer([said(Busy("many")), said(peers=("a",))]) is None


def test_after_a_while_or_where_there_is_no_room_a_text_mixes_rounds() -> None:
    assert not mixes_rounds([said(Stale("over", round=6))], ONE_ROUND_S - 0.1)
    assert mixes_rounds([said(Stale("over", round=6))], ONE_ROUND_S)
    assert mixes_rounds([said(), said(Stale("no room", round=4, is_full=True))], 0.0)


def test_replicas_that_refuse_are_not_asked_for_long_and_others_for_longer() -> None:
    refused, busy = said(Refused("no invite")), said(Busy("many"))
    gives_up([refused, busy], REFUSED_S - 0.1)
    with pytest.raises(UserError, match=r"stage 1 does not write: refused \(no invite\)"):
        gives_up([said(peers=("a",)), refused], REFUSED_S)
    gives_up([busy], PATIENCE_S - 0.1)
    with pytest.raises(NotNow, match=r"stage 0 does not write now: busy \(many\); try again"):
        gives_up([busy], PATIENCE_S)
    gives_up([said(Refused("no invite"), peers=("a",))], PATIENCE_S)


def test_a_round_is_lost_when_all_are_past_it_or_none_was_found_in_time() -> None:
    until = Deadline(50.0)
    assert not is_round_lost(said(NotReady("not begun", round=2)), 4, until, 49.9)
    assert not is_round_lost(said(Stale("over", round=5), Stale("", round=4)), 4, until, 49.9)
    assert is_round_lost(said(Stale("over", round=5)), 4, until, 49.9)
    assert not is_round_lost(said(Busy("many")), 4, until, 49.9)
    assert is_round_lost(said(Busy("many")), 4, until, 50.0)
