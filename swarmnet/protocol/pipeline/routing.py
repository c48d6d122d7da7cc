"""Who gets the next microbatch: interleaved weighted round-robin over the replicas of a stage.

From SWARM (Ryabinin et al. 2023, arXiv:2301.11913, appendix): every replica has an accumulated
cost; the one with the least gets the next microbatch, and its estimated service time is added to
the cost. So replicas get shares proportional to their speed, interleaved as evenly as can be.

What differs here:

- *What is measured.* The reply to a call comes after the whole rest of the pipeline: it takes
  D + s + q, where s is the replica's own device time, D the way behind it, common to all
  replicas of a stage, and q the queue before it. s is announced; D is estimated as the least of
  what calls take beyond it; what the own calls that stood in that queue explain is taken off;
  the rest is congestion (or a replica slower than it says), shared among these calls. Otherwise
  a burst of calls to a fast replica looks like a slow one, and shares oscillate from round to
  round.
- *A new replica* starts at the present minimum and gets a call at once. Until it is measured its
  estimate is what it announces, on the scale of those that are.
- *A failure costs.* The time waited goes into the estimate, and the replica is banned for
  seconds; the ban doubles with every failed try and a success clears it.
- *A deadline follows the measured latency*, as TCP's retransmission timer does (RFC 6298).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

ESTIMATE_GAIN = 0.2
"""Weight of a new measurement in the moving average of the service time."""
LATENCY_GAIN, DEVIATION_GAIN = 1 / 8, 1 / 4
"""The same for latency and its mean deviation (RFC 6298)."""
FIRST_SERVICE_S = 1.0
"""Estimate while nothing at all is known; only proportions matter then."""
MIN_SERVICE_S = 1e-6
MIN_SHARE = 0.05
"""Of a call's time that counts as the replica's own, at least, where it announces nothing."""
DEADLINE_FACTOR = 3.0
MIN_DEADLINE_S = 1.0
FIRST_DEADLINE_S = 30.0
"""Deadline of calls to a replica that never answered: its first may include a slow warm-up."""
MAX_DEADLINE_S = 300.0
BAN_S = 1.0
BAN_MAX_S = 30.0
MIN_BUSY_S = 0.02
MAX_BUSY_S = 2.0
BUSY_JITTER = 0.25
"""Callers that one replica turned away do not all come back at the same instant."""


@dataclass(slots=True)
class _Replica:
    cost_s: float
    """Accumulated, on a scale where the replica with the least is next."""
    samples_per_s: float
    """Announced; 0 while unknown."""
    tried: bool = False
    service_s: float | None = None
    """Moving average of the service time of a call; None until measured."""
    rest_s: float | None = None
    """Moving average of what a call took beyond the device time that it announces."""
    latency_s: float | None = None
    deviation_s: float = 0.0
    crowd: float = 1.0
    """Moving average of own calls outstanding when one was sent."""
    calls: list[tuple[float, int]] = field(default_factory=list)
    """Own calls that are out: when sent, and how many were out then, this one included."""
    banned_until: float = -math.inf
    ban_s: float = 0.0
    busy_until: float = -math.inf
    present: bool = True

    def ready_at(self) -> float:
        return max(self.banned_until, self.busy_until)


class Router:
    """Chooses among the replicas of one next stage, for one caller.

    For every call: `pick`, `sent`, then exactly one of `succeeded`, `busy`, `failed` or (where
    the caller gave up for reasons that are not the replica's) `abandoned`."""

    def __init__(
        self,
        rng: random.Random,
        *,
        samples_per_call: float | None = None,
        first_deadline_s: float = FIRST_DEADLINE_S,
    ) -> None:
        """`samples_per_call`: samples in a microbatch; with it, announced throughputs become
        service times in seconds, without it only their proportions are used. `first_deadline_s`:
        for calls to a replica that never answered."""
        self._rng = rng
        self._first_deadline_s = first_deadline_s
        self._samples_per_call = samples_per_call
        self._replicas: dict[str, _Replica] = {}
        self._virtual_s = 0.0
        self._announced: dict[str, float] = {}
        self._usual_s: float | None = None

    # -- who there is ----------------------------------------------------------------------

    def update(self, samples_per_s: Mapping[str, float], now: float) -> None:
        """The live replicas and the throughput that each announces (samples/s; 0: unknown). A
        replica that vanishes keeps its ban, in case it comes back before that ends."""
        if samples_per_s == self._announced:
            return
        self._announced = dict(samples_per_s)
        for peer_id, replica in list(self._replicas.items()):
            replica.present = peer_id in samples_per_s
            if not replica.present and not replica.calls and now >= replica.banned_until:
                del self._replicas[peer_id]
        for peer_id in sorted(samples_per_s):
            announced = samples_per_s[peer_id]
            announced = announced if 0 < announced < math.inf else 0.0
            known = self._replicas.get(peer_id)
            if known is None:
                self._replicas[peer_id] = _Replica(self._virtual_s, announced)
            else:
                known.samples_per_s = announced
        each_s = (self._announced_s(self._replicas[p]) for p in samples_per_s)
        known_s = [s for s in each_s if s is not None]
        self._usual_s = median(known_s) if known_s else None

    @property
    def usual_s(self) -> float | None:
        """Device seconds of a call at a usual one of the live replicas, as announced; None while
        none has announced any."""
        return self._usual_s

    def pick(
        self, now: float, *, exclude: Collection[str] = (), prefer: str | None = None
    ) -> str | None:
        """The replica for the next call: `prefer` where it may be asked now, else the one with
        the least accumulated cost. None where every replica is banned, busy or excluded. The
        call is charged to the replica at once."""
        ready = {
            p: r
            for p, r in self._replicas.items()
            if r.present and r.ready_at() <= now and p not in exclude
        }
        if not ready:
            return None
        for replica in ready.values():  # who was away has no claim to what it missed
            replica.cost_s = max(replica.cost_s, self._virtual_s)
        least = min(r.cost_s for r in ready.values())
        self._virtual_s = least
        if prefer in ready:
            choice = prefer
        else:
            untried = [p for p, r in ready.items() if not r.tried]
            cheapest = [p for p, r in ready.items() if r.cost_s <= least]
            choice = self._rng.choice(untried or cheapest)
        ready[choice].tried = True
        ready[choice].cost_s += self._estimate_s(ready[choice])
        return choice

    def sample(self, now: float, count: int, *, exclude: Collection[str] = ()) -> list[str]:
        """Up to `count` replicas that may be asked now, drawn evenly. Where callees say themselves
        how long a call would take, the best of a few drawn at random is nearly as good as the best
        of all, and no herds form (Mitzenmacher 2001, "The power of two choices")."""
        ready = [
            p
            for p, r in self._replicas.items()
            if r.present and r.ready_at() <= now and p not in exclude
        ]
        return self._rng.sample(ready, min(count, len(ready)))

    def take(self, peer_id: str) -> None:
        """Charges a call to a replica that was chosen otherwise than by `pick`."""
        replica = self._replicas.get(peer_id)
        if replica is not None:
            replica.tried = True
            replica.cost_s = max(replica.cost_s, self._virtual_s) + self._estimate_s(replica)

    def put_off(self, peer_id: str, now: float, backlog_s: float) -> None:
        """It said, before it was called, that it has no room: as `busy`."""
        replica = self._replicas.get(peer_id)
        if replica is not None:
            wait_s = _clamp(backlog_s, MIN_BUSY_S, MAX_BUSY_S)
            wait_s *= self._rng.uniform(1 - BUSY_JITTER, 1 + BUSY_JITTER)
            replica.busy_until = max(replica.busy_until, now + wait_s)

    def ready_at(self, now: float) -> float | None:
        """The earliest time (>= now) at which some replica may be picked; None without replicas."""
        times = [r.ready_at() for r in self._replicas.values() if r.present]
        return max(now, min(times)) if times else None

    def is_banned(self, peer_id: str, now: float) -> bool:
        replica = self._replicas.get(peer_id)
        return replica is not None and now < replica.banned_until

    def service_s(self, peer_id: str) -> float | None:
        """The present estimate of a replica's service time, for display."""
        replica = self._replicas.get(peer_id)
        return None if replica is None else self._estimate_s(replica)

    # -- how calls went --------------------------------------------------------------------

    def sent(self, peer_id: str, now: float) -> None:
        """A call went out."""
        replica = self._replicas.get(peer_id)
        if replica is not None:
            crowd = len(replica.calls) + 1
            replica.calls.append((now, crowd))
            replica.crowd += LATENCY_GAIN * (crowd - replica.crowd)

    def succeeded(self, peer_id: str, now: float, elapsed_s: float) -> None:
        """The reply came, `elapsed_s` after the call was sent."""
        back = self._back(peer_id, now - elapsed_s)
        if back is None:
            return
        replica, crowd = back
        replica.ban_s = 0.0
        replica.banned_until = -math.inf
        self._measure(replica, max(0.0, elapsed_s), crowd)

    def busy(self, peer_id: str, now: float, backlog_s: float) -> None:
        """It turned the call away with `backlog_s` seconds of work: not asked before about then."""
        self._back(peer_id, now)
        self.put_off(peer_id, now, backlog_s)

    def failed(self, peer_id: str, now: float, waited_s: float) -> None:
        """The call failed or ran past its deadline after `waited_s`. Calls that fail while the
        replica is banned already do not prolong the ban."""
        back = self._back(peer_id, now - waited_s)
        if back is None:
            return
        replica, crowd = back
        if replica.latency_s is not None and waited_s > replica.latency_s:
            self._measure(replica, waited_s, crowd)
        if now >= replica.banned_until:
            replica.ban_s = min(max(BAN_S, 2 * replica.ban_s), BAN_MAX_S)
            replica.banned_until = now + replica.ban_s

    def abandoned(self, peer_id: str, now: float) -> None:
        """The caller gave the call up for reasons that are not the replica's."""
        self._back(peer_id, now)

    def deadline_s(self, peer_id: str) -> float:
        """Seconds to allow a call that is sent now. Grows with the own calls that are outstanding
        there beyond what was usual when the latency was measured."""
        replica = self._replicas.get(peer_id)
        if replica is None or replica.latency_s is None:
            return max(self._first_deadline_s, self._longest_usual_s())
        usual_s = replica.latency_s + 4 * replica.deviation_s
        crowding = max(1.0, (len(replica.calls) + 1) / max(1.0, replica.crowd))
        return _clamp(DEADLINE_FACTOR * crowding * usual_s, MIN_DEADLINE_S, MAX_DEADLINE_S)

    def _longest_usual_s(self) -> float:
        """A newcomer may be as slow as the slowest that is known."""
        usual = (
            DEADLINE_FACTOR * (r.latency_s + 4 * r.deviation_s)
            for r in self._replicas.values()
            if r.latency_s is not None
        )
        return min(max(usual, default=0.0), MAX_DEADLINE_S)

    # -- estimates -------------------------------------------------------------------------

    def _back(self, peer_id: str, sent_at: float) -> tuple[_Replica, int] | None:
        """The call that was sent at about `sent_at` is over: its replica, and how many own calls
        were outstanding there when it was sent, itself included."""
        replica = self._replicas.get(peer_id)
        if replica is None:
            return None
        calls = replica.calls
        if not calls:
            return replica, 1
        index = min(range(len(calls)), key=lambda i: abs(calls[i][0] - sent_at))
        return replica, calls.pop(index)[1]

    def _measure(self, replica: _Replica, elapsed_s: float, crowd: int) -> None:
        """Takes in how long a call took."""
        if replica.latency_s is None:
            replica.latency_s, replica.deviation_s = elapsed_s, elapsed_s / 2
        else:
            error_s = elapsed_s - replica.latency_s
            replica.deviation_s += DEVIATION_GAIN * (abs(error_s) - replica.deviation_s)
            replica.latency_s += LATENCY_GAIN * error_s
        device_s = self._announced_s(replica)
        if device_s is not None:
            replica.rest_s = _average(replica.rest_s, max(0.0, elapsed_s - device_s))
        first = replica.service_s is None
        before = self._estimates() if first else {}
        service_s = self._own_share_s(elapsed_s, device_s, crowd)
        replica.service_s = _average(replica.service_s, service_s)
        if first:
            self._rescale(before)

    def _own_share_s(self, elapsed_s: float, device_s: float | None, crowd: int) -> float:
        """The service time that one call of `elapsed_s` speaks for: what the replica announces,
        and its share of the delay that neither this, the own calls before it nor the way behind
        the stage explain."""
        explained_s = crowd * (device_s or 0.0) + self._common_s()
        delay_s = max(elapsed_s - explained_s, 0.0 if device_s else MIN_SHARE * elapsed_s)
        return max((device_s or 0.0) + delay_s / crowd, MIN_SERVICE_S)

    def _announced_s(self, replica: _Replica) -> float | None:
        """Seconds of device time a call, as announced; None while unknown."""
        if self._samples_per_call is None or not replica.samples_per_s:
            return None
        return self._samples_per_call / replica.samples_per_s

    def _common_s(self) -> float:
        """What a call takes beyond the service time at the replica that adds least to it: the way
        behind the stage. 0 while no replica's service time is known."""
        rests = [r.rest_s for r in self._replicas.values() if r.present and r.rest_s is not None]
        return min(rests, default=0.0)

    def _estimate_s(self, replica: _Replica) -> float:
        """Seconds of service a call: measured, else guessed."""
        return replica.service_s if replica.service_s is not None else self._guess()(replica)

    def _guess(self) -> Callable[[_Replica], float]:
        """For replicas that are not measured: what one announces, on the scale of those that are
        measured; where it announces nothing, what is usual among those."""
        measured = [(r.service_s, r) for r in self._replicas.values() if r.service_s is not None]
        usual_s = median([s for s, _ in measured] or [FIRST_SERVICE_S])
        scales = [s * r.samples_per_s for s, r in measured if r.samples_per_s]
        scale = median(scales) if scales else self._samples_per_call or FIRST_SERVICE_S

        def guess(replica: _Replica) -> float:
            rate = replica.samples_per_s
            return max(scale / rate, MIN_SERVICE_S) if rate else usual_s

        return guess

    def _estimates(self) -> dict[str, float]:
        guess = self._guess()
        return {
            p: guess(r) if r.service_s is None else r.service_s for p, r in self._replicas.items()
        }

    def _rescale(self, before: Mapping[str, float]) -> None:
        """Charges made with other estimates count on the scale of the present ones: otherwise a
        first guess that was far too high would be made up for by a long run of calls to others."""
        for peer_id, estimate_s in self._estimates().items():
            replica = self._replicas[peer_id]
            excess_s = max(0.0, replica.cost_s - self._virtual_s)
            replica.cost_s = self._virtual_s + excess_s * estimate_s / before[peer_id]


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + ESTIMATE_GAIN * (new - old)


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
