"""Orphans: microbatches at a replica of which nobody has said whether they count.

The replica asks their feeders (`swarm.update.rounds`). Here is how long one is asked, and what
becomes of a microbatch by its word."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from swarmnet.protocol.membership.failure_detector import ALIVE, SUSPECT, SUSPECT_S, State
from swarmnet.protocol.timing import LEAST_WAIT_S

COUNTS, WAITS, NEVER_COUNTS = "counts", "waits", "never counts"
"""Fates of an orphan: it stays in the gradient, it may count yet, it is taken out."""


class Question:
    """Asks one feeder which microbatches count, again and again. Times are seconds awake: while the
    own process stands still nobody is late."""

    def __init__(self, now: float, longest_s: float, *, is_over: bool, look_again_s: float) -> None:
        """`longest_s`: how long a feeder that lives may take; `is_over`: the round is over, so that
        what is not known to count is taken out; `look_again_s`: rest between two tries."""
        self._is_over = is_over
        self._look_again_s = look_again_s
        self._end = now + longest_s
        self._latest = self._end + SUSPECT_S
        self._was_looked_at = not is_over

    def left_s(self, now: float) -> float:
        """Seconds for the next answer."""
        return max(LEAST_WAIT_S, self._end - now)

    def must_look(self, now: float) -> bool:
        """True once, when its time is over and nobody has looked yet whether the feeder lives."""
        if self._was_looked_at or now < self._end:
            return False
        self._was_looked_at = True
        return True

    def looked(self, now: float, more_s: float) -> None:
        """Gives a feeder that was looked for `more_s`: where it hears, it need not be late."""
        self._end = now + more_s

    def goes_on(self, now: float, state: State, more_s: float, *, may_answer: bool) -> bool:
        """True where the feeder is asked once more, after a try that failed. `state`: its life
        (`failure_detector`); `may_answer`: by what the try failed with."""
        if state is SUSPECT and self._is_over:
            may_answer = True
            self._end = max(self._end, min(self._latest, now + more_s))
        elif state is not ALIVE:
            return False
        return may_answer and now + self._look_again_s <= self._end


class GoneFeeders:
    """Feeders that did not live at the last look in the middle of a round. The last commits of one
    may be on their way yet: only at the next look it counts as gone."""

    def __init__(self) -> None:
        self._gone: set[str] = set()

    def is_gone(self, feeder: str, *, is_live: bool, is_known: Callable[[str], object]) -> bool:
        """Takes in a look. `is_known(peer)`: false for those that may be forgotten."""
        if not is_live and feeder in self._gone:
            return True
        self._gone = {p for p in self._gone if p != feeder and is_known(p)}
        if not is_live:
            self._gone.add(feeder)
        return False


def fate(
    microbatch_id: int, counted: Collection[int], in_flight: Iterable[int], *, is_over: bool
) -> str:
    """Judges an orphan by the word of its feeder. In a round that is not over here, those
    in flight may count yet."""
    if microbatch_id in counted:
        return COUNTS
    return WAITS if not is_over and microbatch_id in in_flight else NEVER_COUNTS
