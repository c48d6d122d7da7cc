"""Small runs and machines, made from a seed; and the best plan by looking at all."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

from swarmnet.protocol.planning.cost import Costs
from swarmnet.protocol.planning.model import Cut, Held, Job, Layer, Machine, Update

GB = 1e9


def layers(rng: random.Random, num: int) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            flops=rng.uniform(0.2, 2.0) * 1e9,
            parameters=rng.randrange(10**6, 10**7),
            activation_bytes=float(rng.randrange(10**4, 10**6)),
            gradient_bytes=float(rng.randrange(10**4, 10**6)),
        )
        for _ in range(num)
    )


def machines(rng: random.Random, num: int) -> tuple[Machine, ...]:
    return tuple(
        Machine(
            name=f"m{i}",
            flops_per_s=rng.uniform(1, 10) * 1e11,
            up_bytes_per_s=rng.uniform(1, 20) * 1e6,
            down_bytes_per_s=rng.uniform(5, 40) * 1e6,
            latency_s=rng.uniform(0, 0.1),
            memory=rng.uniform(0.15, 0.9),
        )
        for i in range(num)
    )


POOR, GOOD = (20e6 / 8, 100e6 / 8), (1e9 / 8, 1e9 / 8)
"""Bytes/s up and down, of a home and of a data centre."""


def with_uneven_links(rng: random.Random, chosen: Sequence[Machine]) -> tuple[Machine, ...]:
    """The same machines, each behind a poor link or a good one, alone or in a house that two or
    three of them share."""
    found: list[Machine] = []
    while len(found) < len(chosen):
        num = min(rng.choice((1, 1, 2, 2, 3)), len(chosen) - len(found))
        up, down = rng.choice((POOR, GOOD))
        house = f"house {len(found)}" if num > 1 else ""
        has_key, latency_s = rng.random() < 0.5, rng.uniform(0, 0.1)
        found += [
            replace(
                m,
                up_bytes_per_s=up / num,
                down_bytes_per_s=down / num,
                latency_s=latency_s,
                house=house,
                sharing=num,
                has_key=has_key and num > 1,
            )
            for m in chosen[len(found) : len(found) + num]
        ]
    rng.shuffle(found)
    return tuple(found)


def needed_gb(job_layers: tuple[Layer, ...], first: int, end: int) -> float:
    return 16 * sum(x.parameters for x in job_layers[first:end]) / GB


def job(rng: random.Random, num_layers: int, *, memory_limits: bool = True) -> Job:
    made = layers(rng, num_layers)

    def fits(first: int, end: int, num_stages: int, memory: Hashable) -> Held | None:
        needed = needed_gb(made, first, end)
        assert isinstance(memory, float)
        if memory_limits and needed > memory:
            return None
        return Held(needed * GB, 0.0, "keep", 4, computes_again=needed > memory / 2)

    return Job(
        layers=made,
        tokens=128,
        microbatch=rng.choice((1, 2, 4)),
        global_batch=rng.choice((16, 64, 256)),
        update=Update(rng.choice(("zero", "delayed", "local")), "int8", 2, 10),
        memory=fits,
    )


def all_cuts(num_layers: int, num_stages: int) -> Iterator[Cut]:
    for borders in combinations(range(1, num_layers), num_stages - 1):
        ends = (*borders, num_layers)
        yield tuple(zip((0, *borders), ends, strict=True))


def best_of_all(costs: Costs, chosen: tuple[Machine, ...]) -> float:
    """Tokens/s of the best plan; 0 where there is none."""
    best, num_layers = 0.0, len(costs.job.layers)
    for num_stages in range(1, min(num_layers, len(chosen)) + 1):
        for cut in all_cuts(num_layers, num_stages):
            for serves in product(range(-1, num_stages), repeat=len(chosen)):
                found = costs.of(cut, chosen, serves)
                if found is not None:
                    best = max(best, found.tokens_per_s)
    return best
