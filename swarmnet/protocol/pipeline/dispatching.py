"""How a microbatch finds a replica of the next stage: which of them may have it, which answer is
the last word, and how long one that says nothing is waited for. The choice among those that may
have it is `routing`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarmnet.errors import Refused, Stale, SwarmnetError, Taken
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.pipeline.routing import MIN_DEADLINE_S
from swarmnet.protocol.timing import LAPSES, LEAST_WAIT_S

DEPTH_GRACE_S = 0.5
"""Added to a deadline for each stage behind the callee: the caller nearest to a silent peer notices
first. It protects the work of the stages between (tests/swarm/pipeline/test_path_hints.py)."""
LONGEST_CALL_S = 1200.0
"""However often a callee says that it is at work. It protects a microbatch from one that never ends
(tests/swarm/pipeline/test_room.py)."""
MAX_AHEAD = 2
"""So many replicas of a stage must say that a round is over where no record does."""
MAX_REFUSALS = 3
"""After so many replicas, or all that there are, have found the same arrays wrong, the fault is
theirs."""


def unfit(
    view: View, stage: int, round_index: int, feeder: str, *, slack: int, now: float
) -> list[str]:
    """Replicas of a stage that have not opened the round yet, and those that the feeder cannot
    reach: it could not tell them that the microbatch counts. As long as there is some other: where
    none has opened it, those that are nearest to it are asked, and will.

    `slack`: rounds by which a record may be behind the round that its replica works on. In a large
    swarm, where it takes a while until it is known of all that they have opened a round, those one
    round behind are asked: the call itself tells them that the round before is over."""
    replicas = view.in_reach(stage, now)
    newest = max((r.round for r in replicas), default=0)
    wanted = min(newest, round_index - slack)
    late = [r.peer_id for r in replicas if r.round < wanted]
    cut = [r.peer_id for r in replicas if view.reach.are_cut(feeder, r.peer_id)]
    if len({*late, *cut}) < len(replicas):
        return [*late, *cut]
    return cut if newest < round_index - slack and len(cut) < len(replicas) else late


def are_all(view: View, stage: int, peer_ids: Collection[str], now: float) -> bool:
    """There is no other live replica of a stage."""
    return all(r.peer_id in peer_ids for r in view.in_reach(stage, now))


def is_refused(view: View, stage: int, refusers: Collection[str], now: float) -> bool:
    """Several replicas have found arrays wrong, or there is none left that might find them
    right."""
    return len(refusers) >= MAX_REFUSALS or are_all(view, stage, refusers, now)


@dataclass(slots=True)
class Search:
    """One microbatch looks for a replica of a stage."""

    round: int
    stage: int
    hint: tuple[str, ...]
    """Who may know it already, from that stage on."""
    prefers_self: bool
    """The own replica does it, where there is one."""
    longest: Deadline
    """When it is given up, whatever comes."""
    last_error: SwarmnetError | None = None
    _refusers: dict[str, None] = field(default_factory=dict)
    """Who found its arrays wrong."""
    _ahead: dict[str, None] = field(default_factory=dict)
    """For whom its round is over."""

    def preferred(self, own_id: str | None) -> str | None:
        """Who is to get it. `own_id`: of this peer, where it serves the stage."""
        if self.prefers_self and own_id is not None:
            return own_id
        return self.hint[0] if self.hint else None

    def is_last_word(self, peer_id: str, error: SwarmnetError, view: View, now: float) -> bool:
        """Whether no other replica need be asked after this answer."""
        if isinstance(error, Stale):
            theirs = error.details.get("round")
            if not isinstance(theirs, int) or theirs == self.round:
                return True
            if theirs < self.round:
                return False
            self._ahead[peer_id] = None
            # Where records show it too, or there is no other replica to ask, one is enough.
            return (
                len(self._ahead) >= MAX_AHEAD
                or view.is_past(self.round, now)
                or are_all(view, self.stage, self._ahead, now)
            )
        if isinstance(error, Refused):
            self._refusers[peer_id] = None
            return is_refused(view, self.stage, self._refusers, now)
        return isinstance(error, Taken)

    def failed(self, peer_id: str, error: SwarmnetError, beyond: tuple[str, ...] | None) -> None:
        """A replica did not do it; another one is to. `beyond`: through whom it went from there,
        which need not be done again; None where that was never said."""
        self.last_error = error
        self.goes_on(peer_id, beyond)

    def goes_on(self, peer_id: str, beyond: tuple[str, ...] | None) -> None:
        """Another one is to do it, whatever becomes of it at this replica."""
        if beyond is not None:
            self.hint = (peer_id, *beyond)
        self.prefers_self = False


def look_again_s(now: float, ready_at: float | None, longest_s: float) -> float:
    """How long to wait where no replica may be picked: until one is ready again, but no longer than
    `longest_s`, for another may come. `ready_at`: as `Router.ready_at`."""
    wait_s = longest_s if ready_at is None else min(longest_s, ready_at - now)
    return max(LEAST_WAIT_S, wait_s)


@dataclass(slots=True)
class Patience:
    """How long the callee of a microbatch may be silent: neither a reply nor progress comes.

    After each `look_s` it is asked whether it has the microbatch. One that then says nothing at all
    is not waited for. One that has been silent for `silence_s` has to say that it has it: who
    re-routes, or is slower than it used to be, gets the time for it. A word is no work: it is
    believed a few times where another replica could do it, and progress counts where the microbatch
    has come further than before. From when it is late for the first time, another one may do it
    beside it."""

    late_s: float
    silence_s: float
    look_s: float
    silent_since: float
    look_at: float
    """When it is asked next."""
    num_believed: int = int(LAPSES)
    """So often its word will do."""
    is_late: bool = False
    """It has been."""
    furthest: int = -1
    """Stages behind the callee that the microbatch has reached, as far as was told."""

    @classmethod
    def begin(
        cls,
        now: float,
        deadline_s: float,
        late_s: float,
        *,
        depth: int,
        probe_part: float,
        upload_s: float,
    ) -> Patience:
        """A call is made now. `deadline_s`, `late_s`: as of a `Router`; `depth`: stages behind the
        callee;
        `probe_part`: of the deadline, until a callee is asked; `upload_s`: until it has all."""
        grace_s = DEPTH_GRACE_S * depth
        silence_s = deadline_s + grace_s
        look_s = min(silence_s, max(MIN_DEADLINE_S, probe_part * deadline_s))
        since = now + upload_s
        begun = cls(late_s + grace_s, silence_s, look_s, since, since)
        begun.wait_more(since)
        return begun

    def heard(self, now: float, reached: int) -> None:
        """The callee has told of its progress: that the microbatch has reached so many stages
        behind it."""
        if reached > self.furthest:
            self.furthest = reached
            self.silent_since = now
        self._look_after(now)

    def look(self, now: float) -> None:
        """It has been silent until it is to be asked. (A timer may fire a little early.)"""
        self.is_late |= max(now, self.look_at) >= self.silent_since + self.late_s

    def wait_more(self, now: float) -> None:
        """It is asked again later."""
        self._look_after(now)

    def _look_after(self, now: float) -> None:
        """No later than when it is late, or may be given up."""
        at = (self.silent_since + self.late_s, self.silent_since + self.silence_s)
        self.look_at = min([now + self.look_s, *(t for t in at if now < t)])

    def ends(self, has_it: bool | None, now: float, *, is_only: bool = False) -> bool:
        """Whether a silent callee is given up, that was asked whether it has the microbatch; None:
        it said nothing. `is_only`: there is no other replica to send it to."""
        is_late = now >= self.silent_since + self.silence_s
        if has_it is None or (is_late and not has_it):
            return True
        if is_late:
            self.num_believed -= not is_only
            self.silent_since = now
        return self.num_believed < 0
