"""Plans beside what is: real runs, the simulator, exhaustive search, and the time of a large plan.

    python -m benchmarks.planning [--only runs swarms search large]

`runs`: six runs of `swarmnet local` on this machine, one at a time, each planned by
`--machines here*N` before and after it. Printed: planned and measured tokens/s, CPU seconds for a
thousand tokens as planned (passes alone) and as all peers used them, and the peak of tensors of the
peer with most, from a shorter run in which every tensor is counted, each with the microbatches that
it had in flight then. How many these are depends on the rates that replicas announce: who announces
twice the other one's rate feeds twice as many. So a second ratio is with as many planned as were
counted. On a machine that does other work besides, tokens/s say nothing: compare the load with its
cores, and look at the CPU seconds.
`swarms`: twenty random swarms in virtual time. `search`: 200 random small cases beside the best of
all plans, and as many with links that are poor or good, some of them shared by a house. `large`: a
plan of 1,000 machines and 64 stages, likewise.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for what is of tests/

from swarmnet.protocol.planning.cost import Costs  # noqa: E402
from swarmnet.protocol.planning.model import Machine  # noqa: E402
from swarmnet.protocol.planning.search import best_plan  # noqa: E402
from tests.protocol.planning.cases import (  # noqa: E402
    best_of_all,
    job,
    machines,
    with_uneven_links,
)

PARTS = ("large", "search", "swarms", "runs")
NUM_SWARMS, NUM_CASES = 20, 200
NUM_MACHINES, NUM_STAGES, NUM_LAYERS = 1000, 64, 130


LINKS: dict[str, Callable[[random.Random, tuple[Machine, ...]], tuple[Machine, ...]]] = {
    "even": lambda rng, chosen: chosen,
    "uneven": with_uneven_links,
}


def large() -> None:
    """The time of a large plan."""
    for name, linked in LINKS.items():
        rng = random.Random(1)
        chosen = linked(rng, machines(rng, NUM_MACHINES))
        costs = Costs(job(random.Random(1), NUM_LAYERS))
        started = time.process_time()
        plan = best_plan(costs, chosen, num_stages=NUM_STAGES)
        took_s = time.process_time() - started
        assert plan is not None
        about = f"{NUM_MACHINES} machines, links {name}, {len(plan.cut)} stages"
        print(f"{about}: {took_s:.1f} s of a core", flush=True)


def search() -> None:
    """Plans over the best of all plans."""
    for name, linked in LINKS.items():
        worst, possible, agreed = 1.0, 0, True
        for seed in range(NUM_CASES):
            rng = random.Random(seed)
            num = rng.choice((2, 3, 4, 5) if seed % 20 == 0 else (2, 3, 4))
            chosen = linked(rng, machines(rng, num))
            costs = Costs(job(rng, rng.randrange(2, 6)))
            best, plan = best_of_all(costs, chosen), best_plan(costs, chosen)
            agreed &= (plan is None) == (best == 0)
            if plan is not None:
                possible += 1
                worst = min(worst, plan.round.tokens_per_s / best)
        print(
            f"{NUM_CASES} small cases, links {name}: {possible} have a plan, the worst reaches "
            f"{worst:.3f} of the best of all; found wherever there is one: {agreed}",
            flush=True,
        )


def swarms() -> None:
    """Plans beside the simulator."""
    from benchmarks import planned_swarms

    print("| seed | swarm | simulated samples/s | planned | planned / simulated |")
    print("|---|---|---|---|---|")
    ratios = []
    for seed in range(NUM_SWARMS):
        text, ratio = planned_swarms.line(seed)
        ratios.append(ratio)
        print(text, flush=True)
    near = sum(abs(r - 1) <= 0.1 for r in ratios)
    print(f"{near} of {NUM_SWARMS} within 10 %, {min(ratios):.2f} to {max(ratios):.2f}", flush=True)


def runs() -> None:
    """Plans beside real runs."""
    from benchmarks import planned_runs

    print(f"{os.cpu_count()} cores")
    print(
        "| run | planned tokens/s | measured | ratio | CPU s a 1,000 tokens, passes | used | "
        "planned peak, MB, in flight | measured | ratio | with as many | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for shape in planned_runs.SHAPES:
        print(planned_runs.line(shape), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    wanted = parser.parse_args().only
    for part in PARTS:
        if part in wanted:
            {"large": large, "search": search, "swarms": swarms, "runs": runs}[part]()


if __name__ == "__main__":
    main()
