"""Plans, beside the best of all plans, and for a swarm of a thousand machines."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from swarmnet.protocol.planning.cost import Costs
from swarmnet.protocol.planning.search import OUT, Plan, best_plan, cut_of, first_fit
from tests.protocol.planning.cases import (
    GB,
    best_of_all,
    job,
    machines,
    needed_gb,
    with_uneven_links,
)

SEEDS = range(200)
UNEVEN = (*range(1, 20), 27, 81)
"""Of the 200 of `benchmarks/planning.py`; the best plans of the last two are in one house."""


def check(plan: Plan, costs: Costs, chosen: tuple[object, ...]) -> None:
    """Every layer once, every stage served, every memory respected."""
    layers = costs.job.layers
    assert plan.cut[0][0] == 0
    assert plan.cut[-1][1] == len(layers)
    assert all(a[1] == b[0] for a, b in zip(plan.cut, plan.cut[1:], strict=False))
    assert {s for s in plan.serves if s != OUT} == set(range(len(plan.cut)))
    for machine, stage in zip(chosen, plan.serves, strict=True):
        if stage != OUT:
            assert needed_gb(layers, *plan.cut[stage]) <= machine.memory  # type: ignore[attr-defined]


def test_small_swarms_lose_at_most_a_twentieth_to_the_best_of_all_plans() -> None:
    possible = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        sizes = (2, 3, 4, 5) if seed % 20 == 0 else (2, 3, 4)
        chosen = machines(rng, rng.choice(sizes))
        costs = Costs(job(rng, rng.randrange(2, 6)))
        best, plan = best_of_all(costs, chosen), best_plan(costs, chosen)
        assert (plan is None) == (best == 0), seed
        if plan is not None:
            possible += 1
            check(plan, costs, chosen)
            assert plan.round == costs.of(plan.cut, chosen, plan.serves)
            assert plan.round.tokens_per_s >= 0.95 * best, seed
    assert possible > len(SEEDS) / 2


def test_so_do_swarms_with_houses_and_links_that_are_poor_or_good() -> None:
    possible = 0
    for seed in UNEVEN:
        rng = random.Random(seed)
        chosen = with_uneven_links(rng, machines(rng, rng.choice((2, 3, 4))))
        costs = Costs(job(rng, rng.randrange(2, 6)))
        best, plan = best_of_all(costs, chosen), best_plan(costs, chosen)
        assert (plan is None) == (best == 0), seed
        if plan is not None:
            possible += 1
            assert plan.round == costs.of(plan.cut, chosen, plan.serves)
            assert plan.round.tokens_per_s >= 0.95 * best, seed
    assert possible > len(UNEVEN) / 2


def test_neighbouring_stages_are_in_one_house() -> None:
    """Whatever the order in which the machines of two houses are named."""
    rng = random.Random(11)
    one = replace(
        machines(rng, 1)[0],
        memory=1.0,
        up_bytes_per_s=2.5e6 / 3,
        down_bytes_per_s=12.5e6 / 3,
        sharing=3,
    )
    made = job(rng, 6, memory_limits=False)
    made = replace(made, layers=(replace(made.layers[0], activation_bytes=1e6),) * 6)
    chosen = [replace(one, name=f"m{i}", house="ab"[i % 2]) for i in range(6)]
    plan = best_plan(Costs(made), chosen, num_stages=6)
    assert plan is not None
    by_stage = "".join(chosen[plan.replicas(k)[0]].house for k in range(6))
    assert by_stage in ("aaabbb", "bbbaaa")


@pytest.mark.parametrize("num_stages", [64, None])
def test_a_thousand_machines_are_planned_in_seconds(num_stages: int | None) -> None:
    rng = random.Random(1)
    chosen = machines(rng, 1000)
    costs = Costs(job(rng, 130))
    started = time.process_time()
    plan = best_plan(costs, chosen, num_stages=num_stages)
    assert time.process_time() - started < 10
    assert plan is not None
    check(plan, costs, chosen)
    if num_stages:
        assert len(plan.cut) == num_stages
        flows = [costs.stage(*x, 64, [chosen[i] for i in plan.replicas(k)])
                 for k, x in enumerate(plan.cut)]  # fmt: skip
        rates = [f.flow for f in flows if f is not None]
        assert min(rates) > 0.7 * sum(rates) / len(rates), "no stage is much poorer than others"


def test_what_is_given_stays() -> None:
    rng = random.Random(3)
    chosen = machines(rng, 4)
    costs = Costs(job(rng, 5, memory_limits=False))
    plan = best_plan(costs, chosen, num_stages=3)
    assert plan is not None
    assert len(plan.cut) == 3
    cut = cut_of([1, 3, 1])
    assert cut == ((0, 1), (1, 4), (4, 5))
    plan = best_plan(costs, chosen, cut=cut)
    assert plan is not None
    assert plan.cut == cut
    assert best_plan(costs, chosen[:2], num_stages=3) is None, "a stage needs a machine"


def test_a_machine_that_makes_rounds_longer_is_left_out() -> None:
    rng = random.Random(5)
    quick = replace(machines(rng, 1)[0], memory=1.0, up_bytes_per_s=1e8, down_bytes_per_s=1e8)
    slow = replace(quick, name="slow", flops_per_s=quick.flops_per_s / 1000, up_bytes_per_s=1e4)
    made = replace(job(rng, 3, memory_limits=False))
    costs = Costs(replace(made, update=replace(made.update, mode="zero")))
    plan = best_plan(costs, [quick, quick, slow], num_stages=1)
    assert plan is not None
    assert plan.serves == (0, 0, OUT)


def test_the_last_layers_stay_together_and_a_tied_matrix_counts_once() -> None:
    rng = random.Random(7)
    made = replace(job(rng, 5, memory_limits=False), last_layers=3, tied=1000)
    costs = Costs(made)
    plan = best_plan(costs, machines(rng, 3), num_stages=3)
    assert plan is not None
    assert plan.cut == ((0, 1), (1, 2), (2, 5))
    assert best_plan(costs, machines(rng, 4), num_stages=4) is None
    total = sum(x.parameters for x in made.layers)
    assert costs.parameters(0, 5) == total - 1000
    assert costs.parameters(0, 2) + costs.parameters(2, 5) == total


def test_a_cut_that_only_fits() -> None:
    rng = random.Random(9)
    costs = Costs(job(rng, 4))
    most = max(needed_gb(costs.job.layers, i, i + 1) for i in range(4))
    small = [replace(m, memory=most) for m in machines(rng, 4)]
    cut = first_fit(costs, small)
    assert cut is not None
    assert all(needed_gb(costs.job.layers, *x) <= most for x in cut)
    assert first_fit(costs, [replace(m, memory=most - 1 / GB) for m in small]) is None
