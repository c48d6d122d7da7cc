"""Who is to get the next microbatch? Rules compared in a queueing model of a pipeline.

    python benchmarks/routing.py [--peers 400] [--stages 8] [--no-links]

A closed network: so many microbatches are in flight for each device, and one that comes home is
followed by the next at once. A device does one piece of work at a time, backward passes first;
speeds are log-uniform, and devices are shared out so that the stages are about equal: where one is
much poorer than the others its devices are always at work, and every rule looks good. A caller
sends an activation up its own link, a gradient comes back up another one, first come, first served;
nothing is ever lost. Printed, for every rule and number in flight: the part of the poorest stage's
capacity that is used, the part of all devices' time in which they have nothing to do, and how long
microbatches take, as multiples of a middle device's time for one.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

FORWARD_PART = 1 / 3
ASKED = 8
IN_AIR = (2.5, 4.0, 6.0, 9.0)
RUN_S, WARM_UP_S = 500.0, 100.0
"""Simulated, and not counted, in times of a middle device for one microbatch."""
SPEED_RATIO = 10.0
SEND_S, UPLINK_SIGMA = 0.07, 0.5
"""An activation takes so long on a middle uplink (1 MiB at 15 Mbit/s, where a microbatch takes a
middle device 8 s); uplinks are log-normal."""
ARRIVAL, HOME_BOUND, DONE = range(3)


@dataclass(eq=False)
class Device:
    stage: int
    service_s: float
    send_s: float
    queue: list[tuple[int, int, Microbatch]] = field(default_factory=list)
    """Backward passes before forward ones, in the order in which they came."""
    running: Microbatch | None = None
    free_at: float = 0.0
    in_hand: int = 0
    """Microbatches that are here, on their way here, or beyond, and will come back."""
    coming: int = 0
    """On their way here, of those that nobody has worked on here."""
    link_free_at: float = 0.0
    idle_since: float | None = 0.0
    idle_s: float = 0.0

    def begin_s(self, now: float) -> float:
        """Until work on one more could begin, where a piece counts as half a microbatch."""
        waiting = len(self.queue) + (self.running is not None) + self.coming
        return max(waiting * self.service_s / 2, self.link_free_at - now)


@dataclass(eq=False)
class Microbatch:
    launched: float
    path: list[Device]
    is_home_bound: bool = False


Rule = Callable[[Device, float], float]
"""The device with the least gets it."""


def in_hand(part: float) -> Rule:
    """The one that could begin first; and what is in its hands weighs this part."""
    return lambda d, now: d.begin_s(now) + part * max(d.in_hand, 0.1) * d.service_s


RULES: dict[str, Rule | None] = {
    "guess, by speed": None,
    "of eight, done first": lambda d, now: d.begin_s(now) + d.service_s,
    "of eight, begins first": lambda d, now: d.begin_s(now) + 1e-3 * d.service_s,
    "the same, in hand 0.03": in_hand(0.03),
    "the same, in hand 0.1": in_hand(0.1),
    "the same, in hand 0.2": in_hand(0.2),
}


class Pipeline:
    """One history under one rule."""

    def __init__(
        self, peers: int, stages: int, rule: Rule | None, seed: int, *, has_links: bool
    ) -> None:
        self._rng = rng = random.Random(seed)
        self._rule = rule
        self.stages: list[list[Device]] = [[] for _ in range(stages)]
        half = SPEED_RATIO**0.5
        for _ in range(peers):
            speed = half ** rng.uniform(-1.0, 1.0)
            send_s = SEND_S * math.exp(rng.gauss(0.0, UPLINK_SIGMA)) if has_links else 0.0
            poorest = min(range(stages), key=self._capacity)
            self.stages[poorest].append(Device(poorest, 1.0 / speed, send_s))
        self._costs: dict[tuple[Device | None, int], dict[Device, float]] = {}
        self._events: list[tuple[float, int, int, Device, Microbatch]] = []
        self._number = 0
        self._now = 0.0
        self.took: list[float] = []
        """Of every microbatch that came home after the warm-up."""

    def run(self, in_air: int) -> None:
        """Keeps so many microbatches in flight."""
        for _ in range(in_air):
            self._forward(Microbatch(self._now, []), None)
        while self._events[0][0] <= RUN_S:
            self._now, _, what, device, microbatch = heapq.heappop(self._events)
            if what == DONE:
                self._finish(device)
            else:
                device.coming -= what == ARRIVAL
                self._submit(device, microbatch, priority=int(what == ARRIVAL))

    @property
    def part_of_bound(self) -> float:
        bound = min(map(self._capacity, range(len(self.stages))))
        return len(self.took) / (RUN_S - WARM_UP_S) / bound

    @property
    def part_idle(self) -> float:
        """Of all devices' time, each with its speed."""
        devices = [d for stage in self.stages for d in stage]
        idle = sum((d.idle_s + self._idle_until(d, RUN_S)) / d.service_s for d in devices)
        return idle / (RUN_S - WARM_UP_S) / sum(1 / d.service_s for d in devices)

    def _capacity(self, stage: int) -> float:
        return sum(1.0 / d.service_s for d in self.stages[stage])

    def _idle_until(self, device: Device, now: float) -> float:
        since = now if device.idle_since is None else device.idle_since
        return max(0.0, now - max(WARM_UP_S, since))

    def _forward(self, microbatch: Microbatch, caller: Device | None) -> None:
        device = self._choose(self.stages[len(microbatch.path)], caller)
        microbatch.path.append(device)
        device.in_hand += 1
        device.coming += 1
        self._send(ARRIVAL, None if caller is device else caller, device, microbatch)

    def _choose(self, replicas: list[Device], caller: Device | None) -> Device:
        rule, rng = self._rule, self._rng
        if rule is not None:
            drawn = rng.sample(replicas, min(ASKED, len(replicas)))
            return min(drawn, key=lambda d: rule(d, self._now))
        # Interleaved weighted round-robin, of every caller for itself, as in SWARM.
        costs = self._costs.get((caller, replicas[0].stage))
        if costs is None:
            costs = {d: rng.random() * d.service_s for d in replicas}
            self._costs[caller, replicas[0].stage] = costs
        device = min(costs, key=costs.__getitem__)
        costs[device] += device.service_s
        return device

    def _send(self, what: int, source: Device | None, target: Device, m: Microbatch) -> None:
        at = self._now
        if source is not None:
            at = source.link_free_at = max(at, source.link_free_at) + source.send_s
        self._at(at, what, target, m)

    def _at(self, when: float, what: int, device: Device, microbatch: Microbatch) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, device, microbatch))

    def _submit(self, device: Device, microbatch: Microbatch, priority: int) -> None:
        self._number += 1
        heapq.heappush(device.queue, (priority, self._number, microbatch))
        if device.running is None:
            self._start(device)

    def _start(self, device: Device) -> None:
        priority, _, microbatch = heapq.heappop(device.queue)
        device.idle_s += self._idle_until(device, self._now)
        device.running, device.idle_since = microbatch, None
        microbatch.is_home_bound = not priority
        part = FORWARD_PART if priority else 1 - FORWARD_PART
        if device.stage == len(self.stages) - 1:
            part = 1.0
        device.free_at = self._now + part * device.service_s
        self._at(device.free_at, DONE, device, microbatch)

    def _finish(self, device: Device) -> None:
        microbatch, device.running = device.running, None
        assert microbatch is not None
        if len(microbatch.path) < len(self.stages) and not microbatch.is_home_bound:
            self._forward(microbatch, device)
        else:
            device.in_hand -= 1
            if device.stage:
                self._send(HOME_BOUND, device, microbatch.path[device.stage - 1], microbatch)
            else:
                if self._now >= WARM_UP_S:
                    self.took.append(self._now - microbatch.launched)
                self._forward(Microbatch(self._now, []), device)
        if device.running is None and device.queue:
            self._start(device)
        elif device.running is None:
            device.idle_since = self._now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=400)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--no-links", action="store_true", help="sending takes no time")
    args = parser.parse_args()
    print("| in flight for each | rule | of the bound | idle | mean way | longest |")
    print("|---|---|---|---|---|---|")
    for each in IN_AIR:
        for name, rule in RULES.items():
            runs = [
                Pipeline(args.peers, args.stages, rule, seed, has_links=not args.no_links)
                for seed in range(args.seeds)
            ]
            for pipeline in runs:
                pipeline.run(int(each * args.peers))
            part, idle = mean(p.part_of_bound for p in runs), mean(p.part_idle for p in runs)
            way = mean(mean(p.took) for p in runs)
            longest = mean(max(p.took) for p in runs)
            print(
                f"| {each} | {name} | {100 * part:.1f} % | {100 * idle:.1f} % | {way:.1f} "
                f"| {longest:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
