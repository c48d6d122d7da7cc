"""What `Costs` remembers is what it would reckon anew, whatever was asked of it before."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace

import pytest

from swarmnet.protocol.planning import cost
from swarmnet.protocol.planning.cost import Costs, Round
from swarmnet.protocol.planning.model import Cut, Held, Job, Machine, Update
from tests.protocol.planning.cases import all_cuts, layers, machines

NUM_LAYERS, NUM_PLANS = 5, 400
MODES = ("zero", "delayed", "local", "gossip")
OTHER = {
    "name": "another",
    "flops_per_s": 3e11,
    "up_bytes_per_s": 4e5,
    "down_bytes_per_s": 3e5,
    "latency_s": 0.7,
    "hours": 5.0,
    "microbatch_s": 0.2,
    "update_parameters_per_s": 1e6,
    "shared_parameters_per_s": 2e6,
    "shard_s": 0.03,
    "shared_shard_s": 0.04,
    "exact_flops_per_s": 1e9,
    "memory": 0.31,
    "house": "attic",
    "sharing": 3,
    "has_key": True,
}


def fits(first: int, end: int, num_stages: int, memory: Hashable) -> Held | None:
    """Depends on all that it is told."""
    assert isinstance(memory, float)
    if memory < 0.2 and end - first > 3:
        return None
    return Held(
        0.0,
        0.0,
        "keep",
        1 + num_stages,
        computes_again=memory < 0.4 and num_stages > 2,
        splits=first > 0,
        between_s=0.01 * num_stages * memory,
        moved_s=0.02 * end,
    )


def job(rng: random.Random, mode: str) -> Job:
    made = tuple(replace(x, muon_parameters=10**5, muon_flops=1e8) for x in layers(rng, NUM_LAYERS))
    return Job(made, 128, 2, 64, Update(mode, "int8", 2, 3), fits, splits_pay=True)


def nearly(rng: random.Random) -> list[Machine]:
    """Machines of which each differs from the first in one field; and some of one house."""
    one, *others = machines(rng, 4)
    at_home = {"house": "home", "up_bytes_per_s": 1e6, "down_bytes_per_s": 4e6}
    found = [one, *(replace(one, **{name: value}) for name, value in OTHER.items())]  # type: ignore[arg-type]
    return [*found, *(replace(m, **at_home) for m in others)]  # type: ignore[arg-type]


def a_plan(rng: random.Random, pool: Sequence[Machine]) -> tuple[Cut, list[Machine], list[int]]:
    """What a house is, all of its machines are."""
    num_stages = rng.randint(1, 4)
    cut = rng.choice(list(all_cuts(NUM_LAYERS, num_stages)))
    few = [pool[0], *(m for m in pool if m.house == "home")]
    chosen = rng.choices(rng.choice((pool, few)), k=rng.randint(num_stages, 7))
    if rng.random() < 0.7:  # equal ones, that are gone after this plan
        house = {"has_key": rng.random() < 0.5, "sharing": rng.choice((3, 9))}
        chosen = [replace(m, **(house if m.house == "home" else {})) for m in chosen]  # type: ignore[arg-type]
    serves = [*range(num_stages), *rng.choices(range(-1, num_stages), k=len(chosen) - num_stages)]
    return cut, chosen, serves


def test_each_field_of_a_machine_is_one_that_may_differ() -> None:
    assert set(OTHER) == {x.name for x in fields(Machine)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("most", [cost.MAX_STAGES, 3])
def test_what_is_remembered_is_what_would_be_reckoned(
    mode: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random plans, asked in a row of one `Costs` and each of a fresh one."""
    monkeypatch.setattr(cost, "MAX_STAGES", most)
    rng = random.Random(f"remembered {mode}")
    of = job(rng, mode)
    pool, costs, possible = nearly(rng), Costs(of), 0
    for _ in range(NUM_PLANS):
        cut, chosen, serves = a_plan(rng, pool)
        about = *rng.choice(cut), len(cut)
        assert costs.rates(replace(chosen[0]), *about) == Costs(of).rates(chosen[0], *about)
        found, fresh = costs.of(cut, chosen, serves), Costs(of).of(cut, chosen, serves)
        assert (found is None) == (fresh is None)
        if found is None or fresh is None:
            continue
        possible += 1
        for part in Round.__slots__:
            assert getattr(found, part) == pytest.approx(getattr(fresh, part), rel=1e-9, abs=1e-9)
    assert possible > NUM_PLANS / 4
