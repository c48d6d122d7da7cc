"""A stage's replicas as FIFO queues with a common way behind them, driven by one router or more."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmnet.protocol.pipeline.routing import Router


@dataclass
class Stage:
    """Replicas by name with their service times (seconds a call)."""

    service_s: Mapping[str, float]
    behind_s: float = 0.0
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    free_at: dict[str, float] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)

    def call(self, peer_id: str, now: float) -> float:
        """When the reply of a call sent now arrives."""
        service_s = self.service_s[peer_id] * self.rng.uniform(1 - self.noise, 1 + self.noise)
        start = max(now, self.free_at.get(peer_id, 0.0))
        self.free_at[peer_id] = start + service_s
        self.served[peer_id] = self.served.get(peer_id, 0) + 1
        return start + service_s + self.behind_s


def closed_loop(routers: list[Router], stage: Stage, in_flight: int, num_calls: int) -> float:
    """Every router keeps `in_flight` calls out until `num_calls` were made; returns the seconds
    that it took until the last reply."""
    replies: list[tuple[float, int, int, str, float]] = []
    now, made = 0.0, 0

    def send(index: int) -> None:
        nonlocal made
        peer_id = routers[index].pick(now)
        assert peer_id is not None
        routers[index].sent(peer_id, now)
        made += 1
        heapq.heappush(replies, (stage.call(peer_id, now), made, index, peer_id, now))

    for _ in range(in_flight):
        for index in range(len(routers)):
            send(index)
    while replies:
        now, _, index, peer_id, sent_at = heapq.heappop(replies)
        routers[index].succeeded(peer_id, now, sent_at)
        if made < num_calls:
            send(index)
    return now


def bursts(router: Router, stage: Stage, burst: int, num_bursts: int) -> float:
    """`burst` calls at once, then nothing until all have come back, again and again."""
    now = 0.0
    for _ in range(num_bursts):
        replies = []
        for i in range(burst):
            peer_id = router.pick(now)
            assert peer_id is not None
            router.sent(peer_id, now)
            replies.append((stage.call(peer_id, now), i, peer_id))
        start = now
        for now, _, peer_id in sorted(replies):
            router.succeeded(peer_id, now, start)
    return now
