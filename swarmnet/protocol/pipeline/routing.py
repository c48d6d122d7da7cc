"""The choice of a replica for the next microbatch: interleaved weighted round-robin over the
replicas of a stage.

From SWARM (Ryabinin et al. 2023, arXiv:2301.11913, appendix): every replica has an accumulated
cost. The replica with the least cost gets the next microbatch, and its estimated service time is
added to its cost. So replicas get shares proportional to their speed, interleaved as evenly as can
be.

What differs here:

- *What is measured* is a round trip through the rest of the pipeline: `service_estimates` takes
  the way behind the replica and the caller's own queue out of it.
- *A new replica* starts at the present minimum and gets a call at once. Until it is measured its
  estimate is what it announces, on the scale of those that are.
- *A failure costs.* The time waited goes into the estimate, and the replica is banned for
  seconds. The ban doubles with every failed try, and a success clears it.
- *A word is no work.* While others have room, one that comes later, or has failed, has one call at
  a time more than it has answered since (as TCP's slow start, RFC 5681). Those from which nothing
  has come back yet, among others from which something has, are tried one at a time. Where one takes
  longer than calls to the others usually do, another replica does the same, and those on trial rest
  for a while, longer each time. So names that say what they like and swallow what they
  get cost little. Who is only slow may answer later, and has a share from then on.
- *A deadline follows the measured latency*, as TCP's retransmission timer does (RFC 6298).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarmnet.protocol.backoff import FIRST_PAUSE_S, next_pause_s
from swarmnet.protocol.pipeline.service_estimates import ServiceEstimates
from swarmnet.protocol.timing import PATIENCE_S, SMOOTHING

DEADLINE_FACTOR = 3.0
"""Of the deviation, in what nearly every call stays below, and of that, in the deadline of a call.
It protects a replica that is slower than usual from losing its work, and the microbatch of a silent
one from waiting long (tests/protocol/pipeline/test_routing.py)."""
MIN_DEADLINE_S = 1.0
"""It protects calls that are usually quick from one hiccup of the machine or the network
(tests/protocol/pipeline/test_routing.py)."""
FIRST_DEADLINE_S = PATIENCE_S
"""Deadline of calls to a replica that never answered: its first may include a slow warm-up."""
MIN_BUSY_S = 0.02
"""A full replica is not asked again sooner: it protects it from a caller that asks in a loop
(tests/protocol/pipeline/test_routing.py)."""
BUSY_JITTER = 0.25
"""Callers that one replica turned away do not all come back at the same instant."""


@dataclass(slots=True)
class _Latency:
    """Of calls, as TCP measures it (RFC 6298)."""

    latency_s: float | None = None
    """None until one was measured."""
    deviation_s: float = 0.0

    @property
    def usual_s(self) -> float:
        """What nearly every call stays below; 0 while none was measured."""
        return (
            0.0 if self.latency_s is None else self.latency_s + DEADLINE_FACTOR * self.deviation_s
        )

    def measure(self, elapsed_s: float) -> None:
        if self.latency_s is None:
            self.latency_s = elapsed_s
            self.deviation_s = elapsed_s
        else:
            error_s = elapsed_s - self.latency_s
            self.deviation_s += SMOOTHING * (abs(error_s) - self.deviation_s)
            self.latency_s += SMOOTHING * error_s


@dataclass(slots=True)
class _Replica:
    cost_s: float
    """Accumulated, on a scale where the replica with the least is next."""
    infer_cost_s: float = 0.0
    """The same of forward passes alone."""
    infer_ban_s: float = 0.0
    infer_banned_until: float = -math.inf
    """From forward passes alone."""
    tried: bool = False
    latency: _Latency = field(default_factory=_Latency)
    crowd: float = 1.0
    """Moving average of own calls outstanding when one was sent."""
    calls: list[tuple[float, int]] = field(default_factory=list)
    """Own calls that are out: when sent, and how many were out then, this one included."""
    banned_until: float = -math.inf
    ban_s: float = 0.0
    busy_until: float = -math.inf
    present: bool = True
    is_passed_over: bool = False
    """Another one does what it has been given, which may still come back from here."""
    num_answered: int | None = None
    """Calls since it came, where others had answered before, or since it failed last; None where
    neither was."""

    @property
    def has_room(self) -> bool:
        """It may have one more call beside those that are out, by what it has done."""
        return self.num_answered is None or len(self.calls) <= self.num_answered

    @property
    def is_tested(self) -> bool:
        """Something has come back from it."""
        return self.latency.latency_s is not None

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
    ) -> None:
        """`samples_per_call`: samples in a microbatch; with it, announced throughputs become
        service times in seconds, without it only their proportions are used."""
        self._rng = rng
        self._replicas: dict[str, _Replica] = {}
        self._estimates = ServiceEstimates(samples_per_call)
        self._virtual_s = self._virtual_infer_s = 0.0
        self._infer = _Latency()
        """Of forward passes alone, at all replicas."""
        self._announced: dict[str, float] = {}
        self._has_tested = False
        """There is a live replica from which something has come back."""
        self._rest_s = 0.0
        self._rests_until = -math.inf
        """Of those from which nothing has."""

    # -- the replicas ----------------------------------------------------------------------

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
                self._estimates.drop(peer_id)
        for peer_id in sorted(samples_per_s):
            if peer_id not in self._replicas:
                num_answered = 0 if self._has_tested else None
                self._replicas[peer_id] = _Replica(self._virtual_s, num_answered=num_answered)
        self._estimates.announce(samples_per_s)
        self._look_for_tested()

    def _look_for_tested(self) -> None:
        self._has_tested = any(r.present and r.is_tested for r in self._replicas.values())

    def is_on_its_word(self, peer_id: str) -> bool:
        """Whether nothing has come back from a replica yet, while from others something has."""
        replica = self._replicas.get(peer_id)
        return self._has_tested and replica is not None and not replica.is_tested

    @property
    def usual_s(self) -> float | None:
        """Device seconds of a call, as announced: the median of the live replicas; None while
        none has announced any."""
        return self._estimates.usual_s

    def is_ready(self, peer_id: str, now: float, exclude: Collection[str] = ()) -> bool:
        """Whether `pick` may choose a replica now."""
        replica = self._replicas.get(peer_id)
        if replica is None or not replica.present or peer_id in exclude:
            return False
        if self.is_on_its_word(peer_id) and not self._may_try(peer_id, now):
            return False
        return replica.ready_at() <= now

    def _may_try(self, peer_id: str, now: float) -> bool:
        """No other from which nothing has come back yet is tried now."""
        if now < self._rests_until:
            return False
        return not any(
            r.calls and not r.is_tested and not r.is_passed_over
            for p, r in self._replicas.items()
            if p != peer_id
        )

    def _ready(self, now: float, exclude: Collection[str]) -> dict[str, _Replica]:
        return {p: r for p, r in self._replicas.items() if self.is_ready(p, now, exclude)}

    def late(self, now: float) -> list[str]:
        """Replicas that have a call for longer than `late_s`."""
        found = []
        for peer_id, replica in self._replicas.items():
            sent_at = min((at for at, _ in replica.calls), default=now)
            if now - sent_at > self.late_s(peer_id):
                found.append(peer_id)
        return found

    def pick(
        self, now: float, *, exclude: Collection[str] = (), prefer: str | None = None
    ) -> str | None:
        """The replica for the next call: `prefer` where it may be asked now, else the one with
        the least accumulated cost. None where every replica is banned, busy or excluded. The
        call is charged to the replica at once."""
        ready = self._ready(now, exclude)
        if not ready:
            return None
        if prefer not in ready:
            ready = {p: r for p, r in ready.items() if r.has_room} or ready
        for replica in ready.values():  # an absent replica has no claim to the calls it missed
            replica.cost_s = max(replica.cost_s, self._virtual_s)
        least = min(r.cost_s for r in ready.values())
        self._virtual_s = least
        if prefer is not None and prefer in ready:
            choice = prefer
        else:
            untried = [p for p, r in ready.items() if not r.tried]
            cheapest = [p for p, r in ready.items() if r.cost_s <= least]
            choice = self._rng.choice(untried or cheapest)
        ready[choice].tried = True
        ready[choice].cost_s += self._estimates.seconds(choice)
        return choice

    def pick_to_infer(self, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """The replica for a forward pass alone, which a full queue of microbatches does not keep
        out. Charged apart from microbatches: a replica to which its own peer gives all that it
        feeds owes the others nothing for that."""
        ready = {
            p: r
            for p, r in self._replicas.items()
            if r.present and max(r.banned_until, r.infer_banned_until) <= now and p not in exclude
        }
        if not ready:
            return None
        for replica in ready.values():
            replica.infer_cost_s = max(replica.infer_cost_s, self._virtual_infer_s)
        least = self._virtual_infer_s = min(r.infer_cost_s for r in ready.values())
        choice = self._rng.choice([p for p, r in ready.items() if r.infer_cost_s <= least])
        ready[choice].infer_cost_s += self._estimates.seconds(choice)
        return choice

    def infer_deadline_s(self) -> float:
        """Seconds to allow a forward pass alone: by such passes, at any replica; while none was
        measured by microbatches, which take longer."""
        usual_s = self._infer.usual_s
        if usual_s:
            return max(DEADLINE_FACTOR * usual_s, MIN_DEADLINE_S)
        return max(self._longest_usual_s(), MIN_DEADLINE_S) if self._has_tested else PATIENCE_S

    def inferred(self, peer_id: str, elapsed_s: float) -> None:
        """A forward pass alone has come back."""
        self._infer.measure(elapsed_s)
        if peer_id in self._replicas:
            self._replicas[peer_id].infer_ban_s = 0.0

    def infer_failed(self, peer_id: str, now: float) -> None:
        """One has not, and the replica is not asked for the next ones. It may be training."""
        replica = self._replicas.get(peer_id)
        if replica is not None and now >= replica.infer_banned_until:
            replica.infer_ban_s = next_pause_s(replica.infer_ban_s, longest_s=PATIENCE_S)
            replica.infer_banned_until = now + replica.infer_ban_s

    def sample(self, now: float, count: int, *, exclude: Collection[str] = ()) -> list[str]:
        """Up to `count` replicas that may be asked now, drawn evenly. Where callees say themselves
        how long a call would take, the best of a few drawn at random is nearly as good as the best
        of all, and no herds form (Mitzenmacher 2001, "The power of two choices")."""
        all_ready = self._ready(now, exclude)
        ready = [p for p, r in all_ready.items() if r.has_room] or list(all_ready)
        return self._rng.sample(ready, min(count, len(ready)))

    def take(self, peer_id: str) -> None:
        """Charges a call to a replica that was chosen otherwise than by `pick`."""
        replica = self._replicas.get(peer_id)
        if replica is not None:
            replica.tried = True
            cost_s = max(replica.cost_s, self._virtual_s)
            replica.cost_s = cost_s + self._estimates.seconds(peer_id)

    def put_off(self, peer_id: str, now: float, backlog_s: float) -> None:
        """The replica said, before it was called, that it has no room: as `busy`."""
        replica = self._replicas.get(peer_id)
        if replica is not None:
            wait_s = min(max(backlog_s, MIN_BUSY_S), FIRST_PAUSE_S)
            wait_s *= self._rng.uniform(1 - BUSY_JITTER, 1 + BUSY_JITTER)
            replica.busy_until = max(replica.busy_until, now + wait_s)

    def ready_at(self, now: float, exclude: Collection[str] = ()) -> float | None:
        """The earliest time (>= now) at which some replica may be picked; None where there is none
        but those that are excluded, which no passing of time makes fit."""
        times = [
            max(r.ready_at(), self._rests_until) if self.is_on_its_word(p) else r.ready_at()
            for p, r in self._replicas.items()
            if r.present and p not in exclude
        ]
        return max(now, min(times)) if times else None

    # -- how calls went --------------------------------------------------------------------

    def sent(self, peer_id: str, now: float) -> None:
        """A call went out."""
        replica = self._replicas.get(peer_id)
        if replica is not None:
            crowd = len(replica.calls) + 1
            replica.calls.append((now, crowd))
            replica.crowd += SMOOTHING * (crowd - replica.crowd)

    def succeeded(self, peer_id: str, now: float, sent_at: float) -> None:
        """The reply to a call that was sent then has come."""
        crowd = self._returned(peer_id, sent_at)
        if crowd is None:
            return
        replica = self._replicas[peer_id]
        replica.ban_s = 0.0
        replica.banned_until = -math.inf
        if replica.num_answered is not None:
            replica.num_answered += 1
        self._measure(peer_id, max(0.0, now - sent_at), crowd)

    def busy(self, peer_id: str, now: float, backlog_s: float) -> None:
        """The replica turned the call away with `backlog_s` seconds of work, and is not asked
        before about then."""
        self._returned(peer_id, now)
        self.put_off(peer_id, now, backlog_s)

    def failed(self, peer_id: str, now: float, sent_at: float) -> None:
        """A call that was sent then failed, or ran past its deadline. Calls that fail while the
        replica is banned already do not prolong the ban."""
        was_passed_over = peer_id in self._replicas and self._replicas[peer_id].is_passed_over
        crowd = self._returned(peer_id, sent_at)
        if crowd is None:
            return
        replica, waited_s = self._replicas[peer_id], now - sent_at
        replica.num_answered = 0
        if waited_s > (replica.latency.latency_s or math.inf):
            self._measure(peer_id, waited_s, crowd)
        if not was_passed_over:
            self._rest(peer_id, now)
        if now >= replica.banned_until:
            replica.ban_s = next_pause_s(replica.ban_s, longest_s=PATIENCE_S)
            replica.banned_until = now + replica.ban_s

    def passed_over(self, peer_id: str, now: float) -> None:
        """Another replica has done what a call was for that is still out."""
        self._replicas[peer_id].is_passed_over = True
        self._rest(peer_id, now)

    def _rest(self, peer_id: str, now: float) -> None:
        if self.is_on_its_word(peer_id):
            self._rest_s = next_pause_s(self._rest_s, first_s=PATIENCE_S)
            self._rests_until = now + self._rest_s

    def abandoned(self, peer_id: str, now: float) -> None:
        """The caller gave the call up for reasons that are not the replica's."""
        self._returned(peer_id, now)

    def deadline_s(self, peer_id: str) -> float:
        """Seconds to allow a call that is sent now. Grows with the own calls that are outstanding
        there beyond what was usual when the latency was measured."""
        replica = self._replicas.get(peer_id)
        if replica is None or replica.latency.latency_s is None:
            return max(FIRST_DEADLINE_S, self._longest_usual_s())
        crowding = max(1.0, (len(replica.calls) + 1) / max(1.0, replica.crowd))
        return max(DEADLINE_FACTOR * crowding * replica.latency.usual_s, MIN_DEADLINE_S)

    def _longest_usual_s(self) -> float:
        """A newcomer may be as slow as the slowest known replica."""
        usual_s = max((r.latency.usual_s for r in self._replicas.values()), default=0.0)
        return DEADLINE_FACTOR * usual_s

    def late_s(self, peer_id: str) -> float:
        """Seconds after which another replica is to do what is sent to this one now: its deadline,
        but on trial no longer than calls to the others take."""
        deadline_s = self.deadline_s(peer_id)
        if not self.is_on_its_word(peer_id):
            return deadline_s
        return min(deadline_s, max(MIN_DEADLINE_S, self._others_s()))

    def _others_s(self) -> float:
        """What nearly every call to a live replica stays below; 0 where none was measured."""
        return max((r.latency.usual_s for r in self._replicas.values() if r.present), default=0.0)

    def _returned(self, peer_id: str, sent_at: float) -> int | None:
        """The call that was sent at about `sent_at` is over. Returns how many own calls were
        outstanding at the replica when it was sent, itself included; None for an unknown one."""
        replica = self._replicas.get(peer_id)
        if replica is None:
            return None
        calls = replica.calls
        if not calls:
            return 1
        index = min(range(len(calls)), key=lambda i: abs(calls[i][0] - sent_at))
        _, crowd = calls.pop(index)
        replica.is_passed_over &= bool(calls)
        return crowd

    def _measure(self, peer_id: str, elapsed_s: float, crowd: int) -> None:
        """Takes in how long a call took."""
        if self.is_on_its_word(peer_id):
            self._rest_s = 0.0
            self._rests_until = -math.inf
        self._replicas[peer_id].latency.measure(elapsed_s)
        self._has_tested |= self._replicas[peer_id].present
        first = not self._estimates.is_measured(peer_id)
        before = self._estimates.all() if first else {}
        self._estimates.measure(peer_id, elapsed_s, crowd)
        if first:
            self._rescale(before)

    def _rescale(self, before: Mapping[str, float]) -> None:
        """Puts charges that were made with the estimates `before` on the scale of the present ones.
        Otherwise a first guess that was far too high would be made up for by a long run of calls to
        others."""
        for peer_id, estimate_s in self._estimates.all().items():
            replica = self._replicas[peer_id]
            excess_s = max(0.0, replica.cost_s - self._virtual_s)
            replica.cost_s = self._virtual_s + excess_s * estimate_s / before[peer_id]
