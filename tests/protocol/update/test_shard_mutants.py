"""Each rule of a shard's update broken on purpose: something must find it.

`mutants.json` says what does: a scenario that is explored, or, for what cannot be seen by
exploring, a test of a race. After a change of the rules, `python -m
tests.protocol.update.explorer.find_mutants` brings it up to date, and prints what nothing finds."""

from __future__ import annotations

import pytest

from tests.protocol.update import test_shard_races
from tests.protocol.update.explorer.find_mutants import EXPLORED, KNOWN, SAME, is_found_by, load
from tests.protocol.update.explorer.mutants import all_mutants, build
from tests.protocol.update.explorer.scenarios import SMALL

FOUND_BY = load()


def test_every_mutant_has_something_that_finds_it() -> None:
    """But those of `SAME`, each with the reason why nothing can."""
    assert FOUND_BY.keys() | SAME.keys() == set(all_mutants())
    assert not FOUND_BY.keys() & SAME.keys()
    explored = sum(found in EXPLORED for found in FOUND_BY.values())
    print(
        f"{explored} found by exploring, {len(FOUND_BY) - explored} by tests, {len(SAME)} by none"
    )


@pytest.mark.parametrize("found_by", sorted(set(FOUND_BY.values())))
def test_every_mutant_is_found(found_by: str) -> None:
    assert found_by in EXPLORED or hasattr(test_shard_races, found_by)
    names = [name for name, found in FOUND_BY.items() if found == found_by]
    missed = [name for name in names if not is_found_by(build(name), found_by)]
    assert not missed


def test_the_unbroken_machine_passes_what_finds_the_others() -> None:
    """Those of `SMALL` are explored whole in `test_shard_update.py`."""
    others = set(FOUND_BY.values()) - SMALL.keys()
    assert others
    assert not any(is_found_by(KNOWN, found_by) for found_by in others)
