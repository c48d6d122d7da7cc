"""A hundred attackers that seeds draw, against an honest swarm: its rounds go on, its parameters
are its own, and nothing surprises its peers.

A seed that fails is tried alone with `python -m tests.hostile.against SEED`."""

from __future__ import annotations

import itertools

import pytest

from swarmnet.methods.table import METHODS
from swarmnet.protocol.membership.records import Record
from tests.hostile.against import NUM_STAGES, meet
from tests.hostile.drawn import OF_ITSELF, draw

NUM_ATTACKERS, AT_A_TIME = 100, 10


def called(seed: int) -> set[str]:
    return {calls.method for calls in draw(seed, NUM_STAGES).calls}


def tried() -> list[int]:
    """`NUM_ATTACKERS`, and those after them that make calls which none before has made."""
    found = list(range(NUM_ATTACKERS))
    missing = set(METHODS).difference(*map(called, found))
    for seed in itertools.count(NUM_ATTACKERS):
        if not missing:
            break
        if missing & called(seed):
            found.append(seed)
            missing -= called(seed)
    return found


TRIED = tried()


@pytest.mark.parametrize("first", range(0, len(TRIED), AT_A_TIME))
def test_attackers_do_no_harm(first: int) -> None:
    outcomes = meet(TRIED[first : first + AT_A_TIME])
    assert outcomes[-1].is_well, str(outcomes[-1])


def test_every_call_and_every_field_of_a_record_is_attacked() -> None:
    plans = [draw(seed, NUM_STAGES) for seed in TRIED]
    assert set().union(*map(called, TRIED)) == set(METHODS)
    assert {how for plan in plans for _, how in plan.answers} == {
        "silent",
        "refuses",
        "lies",
        "progress",
    }
    lied = {name for plan in plans for name in plan.record_lies}
    assert len(lied) > 0.8 * (len(Record.__dataclass_fields__) - len(OF_ITSELF))
