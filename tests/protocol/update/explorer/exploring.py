"""Runs the machine of a shard's update through every order of events in a small world.

Every order of deliveries, every loss of a message, crash, false suspicion and the like within the
budgets of a scenario is tried, and each state is visited once. After every event the invariants are
checked; at the end, that from each state a good end can be reached without another fault: all that
live have one result."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import dataclass

from tests.protocol.update.explorer.invariants import check_end, is_good_end, is_parted
from tests.protocol.update.explorer.moves import Faults
from tests.protocol.update.explorer.small_world import Broken, Scenario
from tests.protocol.update.explorer.wording import end_in_words, label


@dataclass(frozen=True)
class Explored:
    """What was found."""

    num_states: int
    ends: frozenset[str]
    """Each good end, in words: results and optimizer states."""
    num_parted: int
    """States with a good end in which there are two results, of peers parted from each other."""
    is_complete: bool


def explore(scenario: Scenario, limit: int, *, ends_in_words: bool = False) -> Explored:
    """All states, breadth first; raises `Broken` with the way to the first bad one."""
    net = Faults(scenario)
    worlds = [net.first]
    numbers = {net.first: 0}
    came_from = array("I", [0])
    after = array("I")
    offsets = array("Q", [0])
    is_good = bytearray(1)
    ends: set[str] = set()
    parted, number, is_complete = 0, 0, True
    while number < len(worlds):
        world = worlds[number]
        calm: list[int] = []
        faults: list[int] = []
        try:
            if is_good_end(net, world):
                check_end(net, world)
                is_good[number] = 1
                parted += is_parted(net, world)
                if ends_in_words:
                    ends.add(end_in_words(net, world))
            else:
                calm = net.calm_moves(world)
                faults = net.faults(world)
                if not calm:
                    raise Broken("nothing can happen any more")
        except Broken as e:
            raise Broken(f"{e}\n{path(net, worlds, came_from, number)}") from None
        for new in calm:
            known = numbers.setdefault(new, len(worlds))
            if known == len(worlds):
                worlds.append(new)
                came_from.append(number)
                is_good.append(0)
            after.append(known)
        for new in faults:
            if numbers.setdefault(new, len(worlds)) == len(worlds):
                worlds.append(new)
                came_from.append(number)
                is_good.append(0)
        offsets.append(len(after))
        number += 1
        if len(worlds) > limit:
            is_complete = False
            break
    if is_complete:
        stuck = first_stuck(after, offsets, is_good)
        if stuck is not None:
            raise Broken(f"no way to the next round\n{path(net, worlds, came_from, stuck)}")
    return Explored(len(worlds), frozenset(ends), parted, is_complete)


def first_stuck(after: array[int], offsets: array[int], can: bytearray) -> int | None:
    """A state from which no good end can be reached without a further fault. Numbers mostly grow
    along the way, so that few passes from the last one down are enough."""
    left = [n for n in range(len(can) - 1, -1, -1) if not can[n]]
    while True:
        stuck = []
        for n in left:
            if any(can[m] for m in after[offsets[n] : offsets[n + 1]]):
                can[n] = 1
            else:
                stuck.append(n)
        if len(stuck) == len(left):
            return min(stuck, default=None)
        left = stuck


def path(net: Faults, worlds: list[int], came_from: array[int], number: int) -> str:
    """How the first state becomes this one."""
    steps = []
    while number:
        steps.append((worlds[came_from[number]], worlds[number]))
        number = came_from[number]
    return "\n".join(label(net, before, after) for before, after in reversed(steps))


@dataclass(frozen=True)
class Wandered:
    """A random schedule that came to a good end."""

    num_moves: int
    is_parted: bool


class Wanderer:
    """Random schedules of one scenario: what is known of its events is kept between them."""

    def __init__(self, scenario: Scenario) -> None:
        self.net = Faults(scenario)

    def wander(self, rng: random.Random, max_moves: int = 3000) -> Wandered:
        """One random schedule to a good end."""
        net, way = self.net, []
        world = net.first
        try:
            for n in range(max_moves):
                way.append(world)
                if is_good_end(net, world):
                    check_end(net, world)
                    return Wandered(n, is_parted(net, world))
                calm, faults = net.calm_moves(world), net.faults(world)
                if not calm:
                    raise Broken("nothing can happen any more")
                world = rng.choice(faults if faults and rng.random() < 0.05 else calm)
        except Broken as e:
            raise Broken(f"{e}\n{self._path(way)}") from None
        raise Broken(f"no end after {max_moves} moves\n{self._path(way[-60:])}")

    def _path(self, way: list[int]) -> str:
        return "\n".join(label(self.net, a, b) for a, b in itertools.pairwise(way))
