"""What a replica may spend on texts that others let its model write (`swarmnet generate`).

A *session* is one text at one replica: the keys and values of its tokens so far stay there until
the text is over, or nobody has gone on with it for `IDLE_S`. All tokens of a text are to come from
the parameters of one round. So a session holds a *copy* of them; a replica keeps one copy at most,
which the sessions of that round share, and which goes with the last of them.

Training goes first: a pass for a text waits until the device has nothing else to do, but for no
longer than keeps these passes at `DEVICE_SHARE` of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarmnet.causes import Failures
from swarmnet.errors import Busy, NoRoute, NotReady, Refused, Stale, SwarmnetError
from swarmnet.plurals import counted
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.rate import RateLimiter
from swarmnet.protocol.timing import ANSWER_S, CONNECT_S, LAPSES, PATIENCE_S, UPKEEP_S

MAX_TOKENS = 4096
"""Of a text, the prompt included, where the run's sequences have no more."""
LONGEST_TEXT = 1 << 17
"""Of a text, in any run (tests/protocol/test_generation.py)."""
MAX_PASS_TOKENS = 512
"""In one pass, where a microbatch has no fewer: the device does nothing else meanwhile."""
EXACT_PARTS = 4
"""Passes of a text whose activations go from stage to stage in fp32, in place of one: a call has no
more bytes than where the run's codec makes a byte of a number."""
MAX_SESSIONS = 16
"""At a replica, of all callers."""
MAX_SESSIONS_EACH = 4
"""Of one calling machine."""
MAX_UNKNOWN_SESSIONS = MAX_SESSIONS - MAX_SESSIONS_EACH
"""Of all callers together that nobody has seen at work: names cost nothing."""
IDLE_S = UPKEEP_S
"""A session that nobody goes on with is dropped after this
(tests/protocol/test_generation.py)."""
LONGEST_S = 600.0
"""A session is dropped after this, whatever comes (tests/protocol/test_generation.py)."""
KEEP_S = IDLE_S / LAPSES
"""How often replicas are told that the text goes on."""
ONE_ROUND_S = ANSWER_S
"""For finding a round that all stages have; then the text mixes rounds
(tests/swarm/generation/test_generating.py)."""
REFUSED_S = CONNECT_S
"""For an invite to become known to the peers that refuse."""
TOKENS_PER_S, BURST_TOKENS = 256.0, 4.0 * MAX_TOKENS
"""Of one calling machine at a replica; at once in longer texts as much more as these are longer
(tests/protocol/test_generation.py)."""
LEAST_TOKENS_PER_S, SLOW_AFTER_S = TOKENS_PER_S / MAX_PASS_TOKENS, PATIENCE_S
"""A session of that age whose text has grown more slowly than so, half a token a second, gives its
place to a caller that finds none (tests/protocol/test_generation.py)."""
DEVICE_SHARE = 0.1
"""Of the device's time, while training wants it too (tests/protocol/test_generation.py)."""

Key = tuple[str, str]
"""Of a session: peer id of the caller, and the name that it gave."""


def text_tokens(sequence_length: int) -> int:
    """Tokens that a text may have in a run of sequences of so many: what a model learns from it
    can also read."""
    return min(LONGEST_TEXT, max(MAX_TOKENS, sequence_length))


def pass_tokens(microbatch_tokens: int) -> int:
    """Tokens that one pass may have, in a run whose microbatches have so many: a pass is not to
    hold the device for longer than training does."""
    return max(1, min(MAX_PASS_TOKENS, microbatch_tokens))


def exact_pass_tokens(microbatch_tokens: int) -> int:
    """As `pass_tokens`, of a pass whose activations are in fp32."""
    return max(1, pass_tokens(microbatch_tokens) // EXACT_PARTS)


class Parameters(Enum):
    """Which parameters a new session computes with."""

    SHARED = "the copy that is there"
    COPIED = "a copy, which is to be made now"
    PRESENT = "those of the present round, whichever that is"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller says of a new session."""

    round: int
    """Of the parameters."""
    max_tokens: int
    mixes: bool = False
    """Where there is no copy of that round to be had, the present parameters will do."""


@dataclass(slots=True, eq=False)
class Session:
    """One text at one replica. No other one is equal to it, though it had the same key."""

    key: Key
    machine: str
    """Of the caller."""
    round: int
    """Of the parameters; of those that it began with, where it has no copy."""
    is_copied: bool
    max_tokens: int
    began_at: float
    """Seconds, of the caller's clock; the same for the next one."""
    used_at: float
    is_known: bool = False
    """Its caller was seen at work."""
    num_tokens: int = 0
    """So many are in its cache."""
    is_busy: bool = False

    def is_slow(self, now: float) -> bool:
        """It holds a place and makes little of it."""
        age_s = now - self.began_at
        is_late = self.num_tokens < LEAST_TOKENS_PER_S * age_s
        return is_late and age_s >= SLOW_AFTER_S and not self.is_busy


@dataclass(slots=True)
class Sessions:
    """The sessions of one replica. Times are seconds of one clock."""

    longest: int = MAX_TOKENS
    """Tokens that a text may have."""
    copied_round: int | None = None
    """Of the copy of parameters that is kept; None: none is."""
    _open: dict[Key, Session] = field(default_factory=dict)
    _rates: RateLimiter = field(init=False)

    def __post_init__(self) -> None:
        burst = max(BURST_TOKENS, float(MAX_SESSIONS_EACH * self.longest))
        self._rates = RateLimiter(TOKENS_PER_S, burst)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def max_tokens(self) -> int:
        """That may come into all caches."""
        return sum(s.max_tokens for s in self._open.values())

    def giving_way(self, key: Key, machine: str, now: float, *, is_known: bool) -> Session | None:
        """The session to be ended so that a caller gets a place, where there is none: of the slow
        ones that with the fewest tokens, first of callers that are not known, and for such a caller
        of these alone. None where there is a place, or no such session."""
        others = [s for s in self._open.values() if s.key != key]
        if _num_of(machine, others) >= MAX_SESSIONS_EACH or not _is_full(others, is_known):
            return None
        slow = [s for s in others if s.is_slow(now) and (is_known or not s.is_known)]
        return min(slow, key=lambda s: (s.is_known, s.num_tokens, s.began_at), default=None)

    def choose(
        self,
        key: Key,
        machine: str,
        wish: Wish,
        present: int,
        has_room: bool,
        *,
        is_known: bool = False,
    ) -> Parameters:
        """Which parameters a new session gets. `present`: the replica's round. `has_room`: for a
        copy. `is_known`: the caller was seen at work.

        Raises:
            Busy: too many sessions.
            Stale: the round is not to be had here; `details["round"]`: one that is, and
                `details["is_full"]`: there is no room for a copy.
        """
        others = [s for s in self._open.values() if s.key != key]
        if _is_full(others, is_known):
            raise Busy("too many texts are being written here", backlog_s=FIRST_PAUSE_S)
        if _num_of(machine, others) >= MAX_SESSIONS_EACH:
            raise Busy("you have too many texts being written here", backlog_s=FIRST_PAUSE_S)
        if self.copied_round == wish.round:
            return Parameters.SHARED
        if self.copied_round is None and has_room and wish.round == present:
            return Parameters.COPIED
        if wish.mixes:
            return Parameters.PRESENT
        if self.copied_round is not None:
            other = self.copied_round
            raise Stale(f"a text is being written here by round {other}", round=other)
        if not has_room:
            text = "there is no room here for a copy of the parameters"
            raise Stale(text, round=present, is_full=True)
        raise Stale(f"round {wish.round} is over here", round=present)

    def open(
        self,
        key: Key,
        machine: str,
        wish: Wish,
        chosen: Parameters,
        present: int,
        now: float,
        *,
        is_known: bool = False,
    ) -> Session:
        """Begins a session, in place of one of the same name. A copy that was to be made is
        there. `is_known`: as of `choose`."""
        is_copied = chosen is not Parameters.PRESENT
        r = wish.round if is_copied else present
        if is_copied:
            self.copied_round = r
        session = Session(key, machine, r, is_copied, wish.max_tokens, now, now, is_known)
        self._open[key] = session
        return session

    def begin(self, key: Key, position: int, num_tokens: int, now: float) -> Session:
        """A pass of so many tokens, from this position on, begins; `done` ends it.

        Raises:
            NotReady: there is no such session, or it is elsewhere: its text has to be begun anew.
            Refused: more tokens than the session said.
            Busy: a pass of it is under way, or its caller asks for more tokens than it may.
        """
        session = self.keep(key, now)
        if session.is_busy:
            raise Busy("the token before is not done", backlog_s=FIRST_PAUSE_S)
        if session.num_tokens != position:
            raise NotReady(
                f"this text has {counted(session.num_tokens, 'token')} here, not {position}"
            )
        if position + num_tokens > session.max_tokens:
            raise Refused(f"the text was to have at most {counted(session.max_tokens, 'token')}")
        if not self._rates.allows(session.machine, now, float(num_tokens)):
            backlog_s = num_tokens / TOKENS_PER_S
            raise Busy("you ask for too many tokens", backlog_s=backlog_s)
        session.is_busy = True
        return session

    def keep(self, key: Key, now: float) -> Session:
        """The text goes on, be it elsewhere for now. Raises `NotReady` where there is no such
        session."""
        session = self._open.get(key)
        if session is None:
            raise NotReady("this text is not known here")
        session.used_at = now
        return session

    def done(self, session: Session, num_tokens: int, now: float) -> None:
        """A pass is over, and its tokens are in the cache."""
        session.num_tokens += num_tokens
        session.used_at, session.is_busy = now, False

    def is_open(self, session: Session) -> bool:
        """It has not ended, and none of the same name was opened in its place."""
        return self._open.get(session.key) is session

    def end(self, key: Key) -> Session | None:
        """Forgets a session, and says which, if there was one. The copy goes with the last that has
        it."""
        found = self._open.pop(key, None)
        if not any(s.is_copied for s in self._open.values()):
            self.copied_round = None
        return found

    def expired(self, now: float) -> list[Key]:
        """Sessions that are to be ended: nobody goes on with them, or they take too long."""
        return [
            s.key
            for s in self._open.values()
            if not s.is_busy and (now - s.used_at >= IDLE_S or now - s.began_at >= LONGEST_S)
        ]


def _num_of(machine: str, sessions: Sequence[Session]) -> int:
    return sum(s.machine == machine for s in sessions)


def _is_full(sessions: Sequence[Session], is_known: bool) -> bool:
    """For one more of a caller that is known, or is not."""
    if len(sessions) >= MAX_SESSIONS:
        return True
    return not is_known and sum(not s.is_known for s in sessions) >= MAX_UNKNOWN_SESSIONS


@dataclass(slots=True)
class DeviceTurn:
    """When a pass for a text may go before training."""

    _next_at: float = 0.0

    def wait_s(self, now: float) -> float:
        """How long a pass is to wait for the device to be idle, before it goes first."""
        return max(0.0, self._next_at - now)

    def worked(self, work_s: float, now: float) -> None:
        """A pass took so long, and is over now."""
        self._next_at = max(self._next_at, now + work_s * (1.0 / DEVICE_SHARE - 1.0))


# ---- at the one who asks for a text -------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """What came of asking the replicas of a stage for a session."""

    error: SwarmnetError = field(default_factory=lambda: NoRoute("nobody was asked"))
    """Of the last one that has none."""
    failures: Failures = field(default_factory=Failures)
    """Of all that have none."""
    peers: list[str] = field(default_factory=list)
    """Those that have one."""
    offers: list[int] = field(default_factory=list)
    """Rounds that those have which refused."""
    is_full: bool = False
    """One that refused had no room for a copy."""
    is_coded: bool = False
    """One takes activations only as the run codes them, and that was not wanted."""

    def refused(self, error: SwarmnetError) -> None:
        """A replica opened none."""
        self.error = error
        self.failures.add(error)
        if not isinstance(error, (Stale, NotReady)):
            return
        theirs = error.details.get("round")
        if isinstance(theirs, int):
            self.offers.append(theirs)
            self.is_full |= error.details.get("is_full") is True

    def only_coded(self) -> None:
        """A replica would take activations only as the run codes them."""
        self.is_coded = True
        self.error = NotReady("its peers have an older version")


def newest_common(rounds: Sequence[Collection[int]]) -> int:
    """The newest round that every stage has, or will have. `rounds`: those of its replicas, by
    stage."""
    common = set.intersection(*map(set, rounds))
    return max(common) if common else min(max(r, default=0) for r in rounds)


def gives_up(found: Sequence[Found], waited_s: float) -> None:
    """Raises `UserError` where a stage without a session refuses (`InviteError` where that is for
    want of an invite), `NotNow` where another reason lasts: after `waited_s` seconds it is of no
    use to ask again."""
    for k, stage in enumerate(found):
        if stage.peers:
            continue
        failures = stage.failures or Failures([stage.error])
        if isinstance(stage.error, Refused) and waited_s >= REFUSED_S:
            raise failures.as_error(f"stage {k} does not write")
        if waited_s >= PATIENCE_S:
            raise failures.as_error(f"stage {k} does not write now")


def nobody_serves(stage: int, num_paused: int) -> NoRoute:
    """Why a text has nobody to ask. `num_paused`: peers that rest by their owners' wish, of
    whichever stage."""
    text = f"no replica of stage {stage} is known"
    if num_paused:
        text += f"; {counted(num_paused, 'peer')} paused, and may serve it again"
    return NoRoute(text)


def next_offer(found: Sequence[Found]) -> int | None:
    """The newest round that all stages may have which had no session, by what they offer; None
    where they offer none."""
    bounds = [max(stage.offers) for stage in found if not stage.peers and stage.offers]
    return min(bounds, default=None)


def mixes_rounds(found: Sequence[Found], waited_s: float) -> bool:
    """Whether the text goes on without a copy of one round: none was found for long, or there is no
    room for one."""
    return waited_s >= ONE_ROUND_S or any(stage.is_full for stage in found)


def is_round_lost(found: Found, round_index: int, until: Deadline, now: float) -> bool:
    """Whether no replica of a stage will have the round of a text any more, for which none has
    opened a session. `until`: how long it may be looked for."""
    is_past = bool(found.offers) and min(found.offers) > round_index
    return is_past or until.is_over(now)
