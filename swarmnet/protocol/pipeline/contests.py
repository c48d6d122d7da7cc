"""How long one feeder's flights are waited for by all others.

A slot counts once where its flights meet, so the second one is turned away, for as long as the
first one may come back (`Contests`). A flight that takes far longer than others do, and whose
feeder says all the while that it is under way, keeps nobody out: who answers so for ever would stop
every round. Nor does the end of a round wait for it (`Holders`)."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median

from swarmnet.protocol.moments import LONG_AGO, Deadline, Since
from swarmnet.protocol.pipeline.reservations import DISTRUST_S, MAX_DISTRUSTED
from swarmnet.protocol.pipeline.routing import DEADLINE_FACTOR, FIRST_DEADLINE_S, MIN_DEADLINE_S

ROUNDS = 8
"""The last ones, of which the usual time of a round is the median."""
REST_TIMES = 8
"""As long as it was waited for in vain, one rests; each time for twice as long, so many times. It
protects the pace from who holds rounds up again and again (tests/hostile/test_members.py)."""
MAX_RESTING = 1024
UNKNOWN = ""
"""In place of a name: all that do not count yet. A new name costs nothing."""


def waits_s(usual_s: float) -> float:
    """How long a flight that does not count yet is given here, before it counts as one that never
    will. `usual_s`: that a microbatch is here, with its way through the stages after this one; 0
    while unknown."""
    return max(DEADLINE_FACTOR * usual_s if usual_s > 0 else FIRST_DEADLINE_S, MIN_DEADLINE_S)


@dataclass(slots=True)
class Contests:
    """What one replica has seen of feeders whose flights kept others out. One that let its time
    pass keeps nobody out for `DISTRUST_S`, as with places that lapse (`reservations`)."""

    _distrusted: OrderedDict[str, Deadline] = field(default_factory=OrderedDict)

    def keeps_out(self, feeder: str, began_at: float, usual_s: float, now: float) -> bool:
        """Whether a flight of a feeder that came here at `began_at`, and does not count yet, keeps
        another feeder's out. `usual_s`: as of `waits_s`."""
        if now - began_at > waits_s(usual_s):
            self._distrusted[feeder] = Deadline.after(now, DISTRUST_S)
            self._distrusted.move_to_end(feeder)
            if len(self._distrusted) > MAX_DISTRUSTED:
                self._distrusted.popitem(last=False)
        until = self._distrusted.get(feeder)
        return until is None or until.is_over(now)


@dataclass(frozen=True, slots=True)
class _Rest:
    until: Deadline
    times: int


_NONE = _Rest(Deadline(LONG_AGO), 0)


@dataclass(frozen=True, slots=True)
class Held:
    """What the end of a round waits for, as one replica sees it."""

    num_committed: int
    """Slots, by the word of those that count."""
    known: frozenset[str] = frozenset()
    """Feeders that count, and alone hold the end up."""
    by_unknown: bool = False
    """Feeders that do not count yet alone hold it up."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Slots that some feeders say they have committed in a round, and the tokens in them."""

    num_slots: int = 0
    num_tokens: int = 0


class Holders:
    """Feeders that the ends of rounds have waited for in vain, as one replica has seen it.

    A feeder says which slots it has launched, and others leave these to it. Whether it has, nobody
    else sees; one that has not, and lives, would hold a round up for ever. So where few feeders
    alone keep a round from its end, and for `DEADLINE_FACTOR` times as long as whole rounds take
    nothing is committed, they rest: once all else is launched, their slots count as not launched,
    and others launch them. Rounds that were held up so do not count in what rounds take.

    Those that do not count yet rest together, since a new name costs nothing, and as soon as they
    have held rounds up for the time of one, and for more than one part in `REST_TIMES` of all
    time; or have committed what nobody computed: slots without their tokens, or in a round of which
    most are in no sum. While they rest, they have to show that they work before they
    count."""

    def __init__(self) -> None:
        self._round = -1
        self._began = Since()
        self._looked = Since()
        self._last = Held(0)
        self._held_s: dict[str, float] = {}
        """By feeder, since a slot was committed last; of `UNKNOWN`, less what is forgiven."""
        self._idle_s = 0.0
        """Of this round, in which some held it up alone."""
        self._took_s: deque[float] = deque(maxlen=ROUNDS)
        self._tokens_each = 0.0
        """Of a slot, by the word of those that count; 0 while unknown."""
        self._rests: OrderedDict[str, _Rest] = OrderedDict()

    def look(self, round_index: int, held: Held, now: float) -> None:
        """How a round stands here; to be called several times a second."""
        # What is longer than some looks, this machine was at something else.
        passed_s = min(self._looked.s(now), MIN_DEADLINE_S) if self._round >= 0 else 0.0
        self._looked.begin(now)
        if round_index != self._round:
            self._begin(round_index, now)
        elif held.num_committed != self._last.num_committed:
            self._forget_known()
        else:
            self._pass(passed_s, held, now)
        forgiven = passed_s / REST_TIMES
        self._held_s[UNKNOWN] = max(0.0, self._held_s.get(UNKNOWN, 0.0) - forgiven)
        self._last = held

    def _begin(self, round_index: int, now: float) -> None:
        took_s = self._began.s(now)
        if 0 <= self._round == round_index - 1 and self._idle_s <= took_s - self._idle_s:
            self._took_s.append(took_s)
        self._round, self._idle_s = round_index, 0.0
        self._began.begin(now)
        self._forget_known()

    def _forget_known(self) -> None:
        self._held_s = {UNKNOWN: self._held_s.get(UNKNOWN, 0.0)}

    def _pass(self, passed_s: float, held: Held, now: float) -> None:
        names = set(held.known & self._last.known)
        if held.by_unknown and self._last.by_unknown:
            names.add(UNKNOWN)
        if names:
            self._idle_s += passed_s
        for name in names:
            self._held_s[name] = self._held_s.get(name, 0.0) + passed_s
            if self._held_s[name] >= self._patience_s(name):
                self.found(name, self._held_s.pop(name), now)

    def ended(self, known: Committed, unknown: Committed, now: float, *, is_lost: bool) -> None:
        """A round has ended, and so has its exchange. Slots in which those that do not count say to
        have found less than half of the tokens that are in others were not done; nor were theirs,
        where most tokens of the round are in no sum (`is_lost`)."""
        if known.num_slots:
            each = known.num_tokens / known.num_slots
            self._tokens_each += (each - self._tokens_each) / (2 if self._tokens_each else 1)
        if unknown.num_slots and is_lost:
            self.found(UNKNOWN, self._began.s(now), now)
        elif 2 * unknown.num_tokens < unknown.num_slots * self._tokens_each:
            self.found(UNKNOWN, self.usual_s, now)

    def found(self, name: str, cost_s: float, now: float) -> None:
        """One (`UNKNOWN`: all that do not count) has cost the others so much time."""
        rest = self._rests.get(name, _NONE)
        if not rest.until.is_over(now):
            return
        length_s = (REST_TIMES << min(rest.times, REST_TIMES)) * cost_s
        self._rests[name] = _Rest(Deadline.after(now, length_s), rest.times + 1)
        self._rests.move_to_end(name)
        if len(self._rests) > MAX_RESTING:
            self._rests.popitem(last=False)

    def resting(self, now: float) -> tuple[frozenset[str], bool]:
        """Who rests now, and whether those do that do not count yet."""
        names = frozenset(n for n, rest in self._rests.items() if not rest.until.is_over(now))
        return names - {UNKNOWN}, UNKNOWN in names

    @property
    def usual_s(self) -> float:
        """Seconds that a round takes; `FIRST_DEADLINE_S` while that is unknown."""
        return median(self._took_s) if len(self._took_s) == ROUNDS else FIRST_DEADLINE_S

    def _patience_s(self, name: str) -> float:
        times = 1.0 if name == UNKNOWN else DEADLINE_FACTOR
        known = len(self._took_s) == ROUNDS
        return max(times * self.usual_s if known else FIRST_DEADLINE_S, MIN_DEADLINE_S)
