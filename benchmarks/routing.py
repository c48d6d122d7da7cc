"""Who is to get the next microbatch? Rules compared in a queueing model of a pipeline.

    python benchmarks/routing.py [--peers 128] [--stages 4]

A closed network: so many microbatches are in the air for each device, and one that comes home is
followed by the next at once. A device does one piece of work at a time, backward passes first;
speeds are log-uniform. There are no links and no faults: what is lost here is lost to the rule.
Printed, for every rule and number in the air: the part of the poorest stage's capacity that is
used, and how long microbatches take, as multiples of a middle device's time for one.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

FORWARD_PART = 1 / 3
ASKED = 8
IN_HAND_PART = 0.2
IN_AIR = (1.5, 2.5, 4.0, 9.0)
RUN_S, WARM_UP_S = 300.0, 100.0
"""Simulated, and not counted, in times of a middle device for one microbatch."""
SPEED_RATIO = 10.0


@dataclass(eq=False)
class Device:
    stage: int
    service_s: float
    queue: list[tuple[int, int, Microbatch]] = field(default_factory=list)
    """Backward passes before forward ones, in the order in which they came."""
    running: Microbatch | None = None
    free_at: float = 0.0
    in_hand: int = 0
    """Microbatches that are here, or beyond, and will come back."""

    def begin_s(self, now: float) -> float:
        """Until work on one more could begin."""
        waiting = sum(FORWARD_PART if p else 1 - FORWARD_PART for p, _, _ in self.queue)
        return waiting * self.service_s + (self.free_at - now if self.running else 0.0)


@dataclass(eq=False)
class Microbatch:
    launched: float
    path: list[Device]
    is_home_bound: bool = False


Rule = Callable[[Device, float], float]
"""The device with the least gets it."""
RULES: dict[str, Rule | None] = {
    "guess, by speed": None,
    "of eight, done first": lambda d, now: d.begin_s(now) + d.service_s,
    "of eight, begins first": lambda d, now: d.begin_s(now) + 1e-3 * d.service_s,
    "the same, and little in hand": lambda d, now: (
        d.begin_s(now) + IN_HAND_PART * max(d.in_hand, 0.1) * d.service_s
    ),
}


class Pipeline:
    """One history under one rule."""

    def __init__(self, peers: int, stages: int, rule: Rule | None, seed: int) -> None:
        self._rng = random.Random(seed)
        self._rule = rule
        half = SPEED_RATIO**0.5
        self.stages = [
            [Device(s, half ** self._rng.uniform(-1.0, 1.0)) for _ in range(peers // stages)]
            for s in range(stages)
        ]
        self._costs: dict[tuple[Device | None, int], dict[Device, float]] = {}
        self._events: list[tuple[float, int, Device]] = []
        self._number = 0
        self._now = 0.0
        self.took: list[float] = []
        """Of every microbatch that came home after the warm-up."""

    def run(self, in_air: int) -> None:
        """Keeps so many microbatches in the air."""
        for _ in range(in_air):
            self._forward(Microbatch(self._now, []), None)
        while self._events[0][0] <= RUN_S:
            self._now, _, device = heapq.heappop(self._events)
            self._finish(device)

    @property
    def part_of_bound(self) -> float:
        bound = min(sum(1.0 / d.service_s for d in stage) for stage in self.stages)
        return len(self.took) / (RUN_S - WARM_UP_S) / bound

    def _forward(self, microbatch: Microbatch, caller: Device | None) -> None:
        device = self._choose(self.stages[len(microbatch.path)], caller)
        microbatch.path.append(device)
        device.in_hand += 1
        self._submit(device, microbatch, 1)

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

    def _submit(self, device: Device, microbatch: Microbatch, priority: int) -> None:
        self._number += 1
        heapq.heappush(device.queue, (priority, self._number, microbatch))
        if device.running is None:
            self._start(device)

    def _start(self, device: Device) -> None:
        priority, _, device.running = heapq.heappop(device.queue)
        device.running.is_home_bound = not priority
        part = FORWARD_PART if priority else 1 - FORWARD_PART
        if device.stage == len(self.stages) - 1:
            part = 1.0
        device.free_at = self._now + part * device.service_s
        self._number += 1
        heapq.heappush(self._events, (device.free_at, self._number, device))

    def _finish(self, device: Device) -> None:
        microbatch, device.running = device.running, None
        assert microbatch is not None
        if len(microbatch.path) < len(self.stages) and not microbatch.is_home_bound:
            self._forward(microbatch, device)
        else:
            device.in_hand -= 1
            if device.stage:
                self._submit(microbatch.path[device.stage - 1], microbatch, 0)
            else:
                if self._now >= WARM_UP_S:
                    self.took.append(self._now - microbatch.launched)
                self._forward(Microbatch(self._now, []), None)
        if device.running is None and device.queue:
            self._start(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=128)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print("| in the air for each | rule | of the bound | mean way | longest |")
    print("|---|---|---|---|---|")
    for each in IN_AIR:
        for name, rule in RULES.items():
            runs = [Pipeline(args.peers, args.stages, rule, seed) for seed in range(args.seeds)]
            for pipeline in runs:
                pipeline.run(int(each * args.peers))
            part = mean(p.part_of_bound for p in runs)
            way = mean(mean(p.took) for p in runs)
            longest = mean(max(p.took) for p in runs)
            print(f"| {each} | {name} | {100 * part:.1f} % | {way:.1f} | {longest:.1f} |")


if __name__ == "__main__":
    main()
