"""Mode `auto`: the choice between exchanges beside the rounds and between them.

Between them (`zero`) an update is exact, and every round waits for its exchange. Beside them
(`delayed`) no peer waits, and every update is one round late. So the choice is `delayed` where an
exchange takes a good part of a round, `zero` where it hardly matters, and no change between the
two. `local` and `gossip` are no candidates: they use the memory again that sharding saves, and they
change the learning progress per token in a way that no clock shows. Where not even `delayed` hides
the exchange, users are told what would (`Adviser`).

One feeder decides (`swarm.update.delayed_updates`), by the medians that replicas publish, for some
rounds ahead, and every peer passes the decision on in its record. Every replica that drains a round
has seen the record of each feeder that launched in it, so it knows by then what the feeder decided
before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.sync_modes import DELAYED, ZERO, Switch, SyncPlan
from swarmnet.protocol.update import divergence

DELAYED_ABOVE, ZERO_BELOW = 0.25, 0.1
"""Bounds of the duration of an exchange over that of a round."""
AHEAD_ROUNDS = 3
"""Rounds from the decision to the first exchange in the new mode."""
IN_A_ROW = 3
"""Rounds that must want the same change."""
REST_ROUNDS = 10
"""Rounds between two changes, at least."""
KEPT_SWITCHES = 4
KEPT_EXCHANGES = 4
"""The shortest of so many counts: a replica that is early in an exchange waits for the others,
too."""
LONG_ABOVE, SHORT_BELOW = 1.25, 0.9
"""Exchange over round: above the first, a round waits for the exchange beside it; below the second
it does not any more."""
EXCHANGE_PART = 0.1
"""Part of the time that exchanges should take where replicas make steps of their own."""
LEAST_S = 1e-6
"""A shorter published round counts as this: peers may publish anything."""
MOST_STEPS = 1e9


def merge(*several: Iterable[Switch]) -> tuple[Switch, ...]:
    """The newest switches, ascending. Of two for one round, the lower (mode, seconds) is valid."""
    by_round: dict[int, Switch] = {}
    for switch in (s for switches in several for s in switches):
        known = by_round.setdefault(switch.round, switch)
        if (switch.mode, switch.round_s, switch.exchange_s) < (
            known.mode,
            known.round_s,
            known.exchange_s,
        ):
            by_round[switch.round] = switch
    return tuple(by_round[r] for r in sorted(by_round))[-KEPT_SWITCHES:]


def pace(records: Iterable[Record]) -> tuple[float, float]:
    """Seconds of a round and of an exchange: medians over a stage's replicas, and of these the
    longest; 0 and 0 where nothing was measured."""
    by_stage: dict[int, list[Record]] = {}
    for r in records:
        if r.is_replica and r.round_s > 0:
            by_stage.setdefault(r.stage, []).append(r)
    round_s = max((median(r.round_s for r in rs) for rs in by_stage.values()), default=0.0)
    exchange_s = max((median(r.exchange_s for r in rs) for rs in by_stage.values()), default=0.0)
    return round_s, exchange_s


def heard(records: Iterable[Record]) -> list[Switch]:
    """What others have decided, as live records say, but for what nobody can decide yet: whoever
    says so, in the round that replicas have reached."""
    known = list(records)
    last = divergence.reached(r for r in known if r.is_replica)
    return [
        s for r in known for s in r.switches if s.round <= min(r.round, last) + AHEAD_ROUNDS + 1
    ]


def known_switches(
    plan: SyncPlan,
    newest_open: int,
    others: Iterable[Switch],
    holder: Callable[[], Record | None],
    *,
    is_synced: bool,
) -> tuple[tuple[Switch, ...], bool]:
    """The changes that hold at a replica, and whether those by which it went do not.

    `newest_open`: the newest round that has begun there. `others`: as `heard`. `holder()`: the
    record with the valid parameters of the stage's newest round (`divergence.newest`), asked for
    where modes differ. What that one knew holds, for the rounds that have begun."""
    others = list(others)
    switches = merge(plan.switches, others)
    if is_synced and (switches == plan.switches or plan.agrees(switches, newest_open)):
        return switches, False
    winner = holder()
    if not is_synced:
        if winner is None:
            return switches, False
        return merge(winner.switches, (s for s in others if s.round > winner.round)), False
    is_behind = winner is not None and not plan.agrees(winner.switches, newest_open)
    holding = winner.switches if winner is not None and is_behind else plan.switches
    return merge(holding, (s for s in others if s.round > newest_open)), is_behind


@dataclass
class OwnTimes:
    """What a replica publishes of the times of its rounds and exchanges."""

    _exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_EXCHANGES))

    def add(
        self, before_s: float, open_s: float, exchange_s: float, smoothing: float
    ) -> tuple[float, float]:
        """One more round, which was open for `open_s`, and exchange. `before_s`: what was published
        of rounds before, 0 for nothing; `smoothing`: the weight of the new one."""
        self._exchanges.append(exchange_s)
        round_s = before_s + smoothing * (open_s - before_s) if before_s else open_s
        return round_s, min(self._exchanges)


@dataclass
class Chooser:
    """The memory of the deciding feeder."""

    votes: int = 0

    def rest(self) -> None:
        """It is another peer's turn to decide."""
        self.votes = 0

    def decide(
        self, plan: SyncPlan, round_index: int, round_s: float, exchange_s: float
    ) -> Switch | None:
        """A change, or the first decision; None to leave the mode as it is. To be called once a
        round."""
        first = max(round_index + AHEAD_ROUNDS, plan.warmup_rounds)
        if round_s <= 0 or round_index + AHEAD_ROUNDS + IN_A_ROW <= plan.warmup_rounds:
            return None
        present = plan.mode_at(first)
        share = exchange_s / round_s
        wanted = DELAYED if share > DELAYED_ABOVE else ZERO if share < ZERO_BELOW else present
        if wanted == present and plan.switches:
            self.votes = 0
            return None
        self.votes += 1
        rests = bool(plan.switches) and round_index < plan.switches[-1].round + REST_ROUNDS
        if self.votes < IN_A_ROW or rests:
            return None
        self.votes = 0
        return Switch(first, wanted, round_s, exchange_s)


def local_steps_for(round_s: float, exchange_s: float) -> int:
    """The number of own steps between two exchanges with which these take `EXCHANGE_PART` of the
    time: from H rounds + exchange = exchange / part."""
    steps = exchange_s * (1 - EXCHANGE_PART) / (EXCHANGE_PART * max(round_s, LEAST_S))
    return max(1, math.ceil(min(steps, MOST_STEPS)))


@dataclass
class Adviser:
    """Notices when exchanges take longer than the rounds that they run beside."""

    votes: int = 0
    has_told: bool = False

    def steps(self, round_s: float, exchange_s: float) -> int:
        """The number of own steps that would hide the exchanges, when users should be told; else 0.
        To be called once a round. Users are told once, and again only after exchanges were
        short."""
        if round_s <= 0:
            return 0
        share = exchange_s / round_s
        self.votes = self.votes + 1 if share > LONG_ABOVE else 0
        if share < SHORT_BELOW:
            self.has_told = False
        if self.votes < IN_A_ROW or self.has_told:
            return 0
        self.has_told = True
        return local_steps_for(round_s, exchange_s)
