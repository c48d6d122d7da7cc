"""Samples that were lost: a round counted them, and they are in no update of this stage.

A replica that takes part in an exchange learns the tokens behind its result
(`swarm.update.exchanges`). What the round counted is in the feeders' records. The difference died
with a replica, came too late, or was refused. It is taken when the round has been over for
`SETTLED_ROUNDS`: then the counters of all feeders are here. One replica of the stage reports it, in
its total `samples_lost`: the active one with the lowest peer id that was there from the first of
the exchange's rounds on. Only where that one dies, or is suspected, in those very rounds may a loss
be reported twice or not at all.

In mode `local` a sample counts as averaged when the own step that it is in was part of an exchange:
books are closed once an exchange, by the first shard. What lacks in one may be late, and in a later
one then. So where tokens lack, the books are closed when they have come, or when it is too late for
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.slots import SlotPlan
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL, MOST_LATE, SyncPlan
from swarmnet.protocol.update.late_tokens import Late

SETTLED_ROUNDS = 2
"""A feeder's record has the counters of a round for at least so many rounds more."""
KEPT_EXCHANGES = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """The books of one exchange at one stage. Tokens are exact; samples are too where every
    microbatch has the same number of tokens."""

    round: int
    stage: int
    counted_tokens: int
    averaged_tokens: int
    """In this exchange, or late and in a later one."""
    lost_samples: int


@dataclass(frozen=True, slots=True)
class _Counted:
    """What an exchange counted, and the tokens of it that are in a result."""

    exchange: int
    samples: int
    tokens: int
    averaged: int
    there: frozenset[str]
    """Replicas that had come so far. One that had lost touch has no books of it, though it may be
    back when they are closed."""

    def loss(self, stage: int) -> Loss:
        averaged = self.averaged
        tokens = max(
            self.tokens, averaged
        )  # what is averaged was counted: a record has yet to come
        lost = round(self.samples * (tokens - averaged) / tokens) if tokens else 0
        return Loss(self.exchange, stage, tokens, averaged, lost)


@dataclass
class LostSamples:
    """The books of one replica."""

    view: View
    stage: int
    slots: SlotPlan
    samples_per_microbatch: int
    _next: int | None = None
    _counted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Samples and tokens by round."""
    _averaged: dict[int, tuple[int, Late]] = field(default_factory=dict)
    """By exchange: tokens of its rounds, and of those of exchanges before."""
    _open: list[_Counted] = field(default_factory=list)
    """Exchanges in which tokens lack that may be in a later one, ascending."""

    def averaged(self, exchange: int, num_tokens: int, late: Late = ()) -> None:
        """An exchange is done: so many tokens are behind its result. `late`: of them, those of
        exchanges before."""
        self._averaged[exchange] = num_tokens - sum(late), late
        for old in sorted(self._averaged)[:-KEPT_EXCHANGES]:
            del self._averaged[old]

    def opened(
        self, round_index: int, plan: SyncPlan, own: Record, now: float, *, has_just_left: bool
    ) -> list[Loss]:
        """A round has begun here, or the run is over: the books that this peer closes for its
        stage, those without a loss too. Where there is no exchange of the whole stage, there are no
        books. `own`: the own record; `has_just_left`: its state is LEAVING, and the others do not
        know yet."""
        if plan.mode == GOSSIP:
            return []
        if self._next is None or self._next > round_index:
            self._next = round_index
        over = round_index >= plan.rounds
        last = round_index - 1 if over else round_index - SETTLED_ROUNDS
        told = []
        for r in range(max(self._next, last - KEPT_EXCHANGES), last + 1):
            for counted in self._close(r, plan, own, now):
                window = plan.window(0, counted.exchange)
                if self._tells(window, plan, own, now, counted.there, has_just_left):
                    told.append(counted.loss(self.stage))
            self._next = r + 1
        return told

    def has_lost_most(self, round_index: int, plan: SyncPlan, now: float) -> bool:
        """Whether the exchange after a round, which is done here, lacks more than half of the
        tokens that feeders have counted in its rounds so far."""
        if plan.mode == GOSSIP or round_index not in self._averaged:
            return False
        counted = sum(
            progress.round_progress(self.view, r, now, self.slots.of(r)).tokens
            for r in plan.window(0, round_index)
        )
        return 2 * self._averaged[round_index][0] < counted

    def _close(self, r: int, plan: SyncPlan, own: Record, now: float) -> Iterator[_Counted]:
        """The books of an exchange, and of those before, as far as they can be closed; none where
        there is no exchange of that number, or not all of it is known here."""
        state = progress.round_progress(self.view, r, now, self.slots.of(r))
        samples = state.num_flights * self.samples_per_microbatch
        self._counted[r] = (samples, state.tokens)
        if not plan.is_due(0, r):
            return
        open_, self._open = self._open, []
        window = plan.window(0, r)
        averaged = self._averaged.pop(r, None)
        known = all(q in self._counted for q in window)
        samples = sum(self._counted.get(q, (0, 0))[0] for q in window)
        tokens = sum(self._counted.get(q, (0, 0))[1] for q in window)
        for q in [q for q in self._counted if q <= r]:
            del self._counted[q]
        if averaged is None:
            return
        fresh, late = averaged
        before = plan.exchanges_before(0, r, MOST_LATE)
        came = dict(zip(before, late))
        open_ = [replace(c, averaged=c.averaged + came.get(c.exchange, 0)) for c in open_]
        if known:
            # A replica that has not come so far has lost touch, and will fetch the stage again.
            others = self.view.replicas(self.stage, now)
            there = {own.peer_id, *(m.peer_id for m in others if m.round >= window.stop - 1)}
            open_.append(_Counted(r, samples, tokens, fresh, frozenset(there)))
        may_lack = {r, *before[: MOST_LATE - 1]} if plan.mode == LOCAL else set[int]()
        for counted in open_:
            is_late = counted.averaged < counted.tokens and r < plan.rounds - 1
            if is_late and counted.exchange in may_lack:
                self._open.append(counted)
            else:
                yield counted

    def _tells(
        self,
        window: range,
        plan: SyncPlan,
        own: Record,
        now: float,
        had_come: frozenset[str],
        has_just_left: bool,
    ) -> bool:
        """True where this peer reports for its stage. One of those does that were there from the
        first of these rounds on, else of those that joined in them."""
        replicas = list(self.view.replicas(self.stage, now))
        if has_just_left:  # for the others it still counts
            replicas.append(own)
        replicas = [m for m in replicas if m.peer_id in had_come]
        for latest in (window.start, window.stop):
            there = [m.peer_id for m in replicas if plan.parameter_version(m.active_from) <= latest]
            if there:
                return min(there) == own.peer_id
        return True
