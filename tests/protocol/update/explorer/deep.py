"""`make explore`: the deep worlds in every order, and very many random schedules.

    python -m tests.protocol.update.explorer.deep [number of random schedules]

Each world, and each hundred schedules, has a process of its own."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.protocol.update.explorer.exploring import Wanderer, explore
from tests.protocol.update.explorer.scenarios import DEEP, SMALL, any_scenario, with_liar
from tests.protocol.update.explorer.small_world import Broken

WORLDS = SMALL | DEEP
LIMIT = 6_000_000
SCHEDULES_OF_A_WORLD = 100


def explore_one(name: str) -> str:
    """What was found, or the way to what is broken."""
    try:
        found = explore(WORLDS[name], LIMIT)
    except Broken as e:
        return f"BROKEN {name}: {WORLDS[name]}\n{e}"
    kind = "all" if found.is_complete else "NOT ALL"
    return f"{name}: {kind} {found.num_states} states, {found.num_parted} parted ends"


def wander(seed: int) -> str:
    """Random schedules of one world, with a liar in every other one; empty where all is well."""
    scenario = with_liar(seed) if seed % 2 else any_scenario(seed)
    wanderer = Wanderer(scenario)
    for i in range(SCHEDULES_OF_A_WORLD):
        try:
            wanderer.wander(random.Random(f"{seed} {i}"))
        except Broken as e:
            return f"BROKEN schedule {i} of world {seed}: {scenario}\n{e}"
    return ""


def main() -> int:
    schedules = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    is_broken = False
    with ProcessPoolExecutor(max_tasks_per_child=1) as pool:
        for told in pool.map(explore_one, WORLDS):
            print(told, flush=True)
            is_broken |= told.startswith("BROKEN")
        seeds = range(1000, 1000 + schedules // SCHEDULES_OF_A_WORLD)
        for told in filter(None, pool.map(wander, seeds)):
            print(told, flush=True)
            is_broken = True
    print(f"{schedules} random schedules")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
