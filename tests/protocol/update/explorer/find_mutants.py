"""What finds a mutant of the update of a shard:

python -m tests.protocol.update.explorer.find_mutants
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swarmnet.protocol.update.shard_update import ShardUpdate
from tests.protocol.update import test_shard_races
from tests.protocol.update.explorer import small_world
from tests.protocol.update.explorer.exploring import explore
from tests.protocol.update.explorer.mutants import all_mutants, build
from tests.protocol.update.explorer.scenarios import SMALL
from tests.protocol.update.explorer.small_world import Scenario

KNOWN = ShardUpdate
PATH = Path(__file__).with_name("mutants.json")
LIMIT = 20_000
"""States of a scenario that are looked at."""

EXPLORED: dict[str, Scenario] = {}
"""The scenarios, the cheap ones first."""
for _name in (
    "a lost message",
    "a crash",
    "primary and backup cut",
    "a mute contributor",
    "an early deadline",
    "a pair",
    "a false suspicion",
    "a backup that cannot step",
    "records that differ",
    "one that is left behind",
    "one contributor with tokens",
    "three owners and a lost message",
    "sums that take long",
    "the only owner's device hangs",
    "the only owner's device hangs for ever",
    "the only owner's process stops",
    "a liar that agrees",
    "a liar that denies",
    "a primary that owes its result",
    "one of two that owes its result",
    "one that owes its result and is passed over by one",
):
    EXPLORED[_name] = SMALL[_name]
EXPLORED |= {
    "rosters of which each names another": SMALL["rosters of which each names another"],
    "a backup that cannot step, and a crash": SMALL["a backup that cannot step, and a crash"],
    "a crash and an early deadline": SMALL["a crash and an early deadline"],
    "a failure and an early deadline": Scenario(failures=1, deadlines=1),
    "three owners": SMALL["three owners"],
    "each its own primary": SMALL["each its own primary"],
    "one that another takes for a holder": SMALL["one that another takes for a holder"],
    "a crash and a lost message": SMALL["a crash and a lost message"],
    "a quorum": SMALL["a quorum"],
    "a quorum and a mute contributor": SMALL["a quorum and a mute contributor"],
    "a quorum and a lost message": SMALL["a quorum and a lost message"],
    "a quorum and a crash": SMALL["a quorum and a crash"],
    "a quorum, where records differ": SMALL["a quorum, where records differ"],
}
SAME: dict[str, str] = {
    "condition adopt_if_shown event.made_is_None false": "`is_shown` says so too",
    "condition is_for_primary self.begun_is_not_None true": "asked where this replica has begun",
}
"""Mutants that nothing finds, and why."""


def load() -> dict[str, str]:
    """What finds each mutant."""
    found: dict[str, str] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return found


def is_found_by(machine: Any, found_by: str) -> bool:
    """Whether a scenario or a test finds this class of machines broken."""
    if found_by in EXPLORED:
        return _is_explored(machine, EXPLORED[found_by])
    return _fails(machine, found_by)


def _is_explored(machine: Any, scenario: Scenario) -> bool:
    """Whatever is raised is a find: a broken rule may run into anything."""
    small_world.ShardUpdate = machine  # type: ignore[misc]
    try:
        explore(scenario, LIMIT)
    except Exception:
        return True
    finally:
        small_world.ShardUpdate = KNOWN  # type: ignore[misc]
    return False


def _fails(machine: Any, test: str) -> bool:
    run = getattr(test_shard_races, test)
    test_shard_races.ShardUpdate = machine  # type: ignore[misc]
    try:
        run()
    except Exception:
        return True
    finally:
        test_shard_races.ShardUpdate = KNOWN  # type: ignore[misc]
    return False


def races() -> list[str]:
    """The tests of races without arguments."""
    return [name for name in vars(test_shard_races) if name.startswith("test_")]


def find(name: str, first: str | None) -> str | None:
    """What finds a mutant: `first`, or else what takes the least time."""
    machine = build(name)
    scenarios = list(EXPLORED)
    order = [*scenarios[:3], *races(), *scenarios[3:]]
    known = [first] if first in order else []
    return next((f for f in known + order if is_found_by(machine, f)), None)


def main() -> None:
    found = load()
    names = [name for name in all_mutants() if name not in SAME]
    result: dict[str, str] = {}
    for name in names:
        by = find(name, found.get(name))
        if by is not None:
            result[name] = by
        else:
            print("nothing finds", name, flush=True)
    PATH.write_text(json.dumps(result, indent=1) + "\n")
    print(len(result), "found of", len(names))
    sys.exit(0)


if __name__ == "__main__":
    main()
