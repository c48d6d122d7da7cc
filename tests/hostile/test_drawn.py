"""A hundred attackers that seeds draw, against an honest swarm: its rounds go on, its parameters
are its own, and nothing surprises its peers.

A seed that fails is tried alone with `python -m tests.hostile.against SEED`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from swarmnet.methods.table import METHODS
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record
from tests.hostile.against import NUM_STAGES, meet
from tests.hostile.drawn import OF_ITSELF, Plan, draw

NUM_ATTACKERS, AT_A_TIME = 100, 10
FEW_NAMES = 8
"""More that nobody has seen at work are a flood."""

OPEN: dict[str, Callable[[Plan], bool]] = {
    "all losses are alike in this swarm, so that one of many names guesses that of a trial; in an "
    "exchange it is believed then, as any member is": lambda plan: (
        plan.state in (ACTIVE, LEAVING)
        and plan.num_names > FEW_NAMES
        and any(method == "infer" and how in ("lies", "right") for method, how in plan.answers)
    ),
}
"""Which attackers are left out, and why: what is still to be mended. Nothing else is left out."""


def left_out(plan: Plan) -> bool:
    return any(is_meant(plan) for is_meant in OPEN.values())


def seeds(is_wanted: Callable[[Plan], bool]) -> Iterator[int]:
    return (seed for seed in itertools.count() if is_wanted(draw(seed, NUM_STAGES)))


def called(seed: int) -> set[str]:
    return {calls.method for calls in draw(seed, NUM_STAGES).calls}


def tried() -> list[int]:
    """`NUM_ATTACKERS`, and those after them that make calls which none before has made."""
    wanted = seeds(lambda plan: not left_out(plan))
    found = list(itertools.islice(wanted, NUM_ATTACKERS))
    missing = set(METHODS).difference(*map(called, found))
    while missing:
        seed = next(wanted)
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


@pytest.mark.long
@pytest.mark.parametrize("reason", OPEN)
def test_what_is_left_out_does_harm(reason: str) -> None:
    """Otherwise it need not be left out any more."""
    some = list(itertools.islice(seeds(OPEN[reason]), AT_A_TIME))
    assert not meet(some)[-1].is_well, f"take it off the list: {reason}"
