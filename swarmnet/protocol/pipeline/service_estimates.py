"""Estimated service times of the replicas of one stage, from announcements and round trips.

The reply to a call comes after the whole rest of the pipeline. A call takes D + s + q seconds: s is
the replica's own device time, D the way behind it, common to all replicas of a stage, and q the
queue before it. The replica announces s. D is estimated as the least of what calls take beyond s.
The caller's own calls that stood in the queue explain a part of q. The rest is congestion, or a
replica that is slower than it says, and is shared among these calls. Otherwise a burst of calls to
a fast replica would look like a slow one, and shares would oscillate from round to round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from swarmnet.protocol.timing import LEAST_S, SMOOTHING

FIRST_SERVICE_S = 1.0
"""Estimate while nothing at all is known; only proportions matter then
(tests/protocol/pipeline/test_service_estimates.py)."""
MIN_SHARE = 0.05
"""Part of a call's time that counts as the replica's own, at least, where it announces nothing. It
protects others from getting no calls while one seems to take no time
(tests/protocol/pipeline/test_routing.py)."""

SELDOM = 2
"""A replica that gets a call so many times as seldom as others is measured often enough to average
(tests/protocol/pipeline/test_service_estimates.py)."""


@dataclass(slots=True)
class _Replica:
    samples_per_s: float = 0.0
    """Announced; 0 while unknown."""
    is_present: bool = True
    service_s: float | None = None
    """Moving average of the service time of a call; None until measured."""
    rest_s: float | None = None
    """Moving average of what a call took beyond the device time that it announces."""
    measured_at: int = 0
    """When it was measured last, in measurements of all replicas."""


class ServiceEstimates:
    """Seconds of service a call, for each replica that was announced and not dropped."""

    def __init__(self, samples_per_call: float | None = None) -> None:
        """`samples_per_call`: samples in a microbatch. With it, announced throughputs become
        service times in seconds; without it only their proportions are used."""
        self._samples_per_call = samples_per_call
        self._replicas: dict[str, _Replica] = {}
        self._usual_s: float | None = None
        self._num_measured = 0

    def announce(self, samples_per_s: Mapping[str, float]) -> None:
        """The throughput that each live replica announces (samples/s; 0: unknown). Estimates of
        other replicas are kept until they are dropped."""
        for peer_id, replica in self._replicas.items():
            replica.is_present = peer_id in samples_per_s
        for peer_id in sorted(samples_per_s):
            announced = samples_per_s[peer_id]
            replica = self._replicas.setdefault(peer_id, _Replica())
            replica.samples_per_s = announced if 0 < announced < math.inf else 0.0
        each_s = (self._announced_s(self._replicas[p]) for p in samples_per_s)
        known_s = [s for s in each_s if s is not None]
        self._usual_s = median(known_s) if known_s else None

    def drop(self, peer_id: str) -> None:
        """Forgets a replica."""
        del self._replicas[peer_id]

    @property
    def usual_s(self) -> float | None:
        """Device seconds of a call, as announced: the median of the live replicas; None while
        none has announced any."""
        return self._usual_s

    def is_measured(self, peer_id: str) -> bool:
        """False where the estimate of a replica is a guess."""
        return self._replicas[peer_id].service_s is not None

    def seconds(self, peer_id: str) -> float:
        """Seconds of service a call: measured, else guessed."""
        replica = self._replicas[peer_id]
        return replica.service_s if replica.service_s is not None else self._guess()(replica)

    def all(self) -> dict[str, float]:
        """`seconds` of every replica."""
        guess = self._guess()
        return {
            p: guess(r) if r.service_s is None else r.service_s for p, r in self._replicas.items()
        }

    def measure(self, peer_id: str, elapsed_s: float, crowd: int) -> None:
        """Takes in that a call took `elapsed_s` seconds, when `crowd` own calls were outstanding at
        the replica, this one included."""
        replica = self._replicas[peer_id]
        device_s, weight = self._announced_s(replica), self._weight(replica)
        if device_s is not None:
            rest_s = max(0.0, elapsed_s - device_s)
            replica.rest_s = _average(replica.rest_s, rest_s, weight)
        service_s = self._own_share_s(elapsed_s, device_s, crowd)
        replica.service_s = _average(replica.service_s, service_s, weight)

    def _weight(self, replica: _Replica) -> float:
        """Of a new measurement beside the old ones, which grow old for all replicas alike: the more
        calls have gone to others since, the less the old ones count. Else one that was slow once
        would get few calls, and with so few be slow for ever."""
        self._num_measured += 1
        num_replicas = sum(r.is_present for r in self._replicas.values())
        turns = (self._num_measured - replica.measured_at) / max(1, SELDOM * num_replicas)
        replica.measured_at = self._num_measured
        return 1 - (1 - SMOOTHING) ** max(1.0, turns)

    def _own_share_s(self, elapsed_s: float, device_s: float | None, crowd: int) -> float:
        """The service time that one call of `elapsed_s` speaks for: what the replica announces,
        and its share of the delay that neither this, the own calls before it nor the way behind
        the stage explain."""
        explained_s = crowd * (device_s or 0.0) + self._common_s()
        delay_s = max(elapsed_s - explained_s, 0.0 if device_s else MIN_SHARE * elapsed_s)
        return max((device_s or 0.0) + delay_s / crowd, LEAST_S)

    def _announced_s(self, replica: _Replica) -> float | None:
        """Seconds of device time a call, as announced; None while unknown."""
        if self._samples_per_call is None or not replica.samples_per_s:
            return None
        return self._samples_per_call / replica.samples_per_s

    def _common_s(self) -> float:
        """What a call takes beyond the service time at the replica that adds least to it: the way
        behind the stage. 0 while no replica's service time is known."""
        replicas = self._replicas.values()
        rests = [r.rest_s for r in replicas if r.is_present and r.rest_s is not None]
        return min(rests, default=0.0)

    def _guess(self) -> Callable[[_Replica], float]:
        """For replicas that are not measured. One that announces a throughput gets it on the scale
        of the measured ones, but is not taken for faster than these; one that announces nothing
        gets what is usual among those."""
        measured = [(r.service_s, r) for r in self._replicas.values() if r.service_s is not None]
        usual_s = median([s for s, _ in measured] or [FIRST_SERVICE_S])
        scales = [s * r.samples_per_s for s, r in measured if r.samples_per_s]
        scale = median(scales) if scales else self._samples_per_call or FIRST_SERVICE_S
        least_s = min((s for s, r in measured if r.is_present), default=LEAST_S)

        def guess(replica: _Replica) -> float:
            rate = replica.samples_per_s
            return max(scale / rate, least_s) if rate else usual_s

        return guess


def _average(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
