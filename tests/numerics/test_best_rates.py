"""How `benchmarks/optimizers.py` chooses a learning rate."""

from __future__ import annotations

from pathlib import Path

from benchmarks.optimizers import SEEDS, Results, wanted

FAMILY = "python", "zero", "adamw"
LOSSES = {
    1e-3: (2.0, 2.0, 2.0),
    2e-3: (1.95, 1.95, 1.95),
    4e-3: (1.81, 1.80, 1.79),
    8e-3: (1.80, 1.82, 1.91),
    16e-3: (1.92, 1.93, 1.94),
}
"""By rate and seed: 8e-3 is the best of the first seed alone."""


def test_the_best_rate_is_that_of_all_seeds_and_its_neighbours_have_them_all(
    tmp_path: Path,
) -> None:
    results = Results(tmp_path / "results.jsonl", 250)

    def search() -> list[tuple[float, int]]:
        return list(wanted(results, FAMILY, (), every_rate=False))

    made = []
    while asked := search():
        rate, seed = asked[0]
        made.append((rate, seed))
        task, way, kind = FAMILY
        said = {"task": task, "way": way, "kind": kind, "rate": rate, "seed": seed, "rounds": 250}
        results.add(said | {"loss": LOSSES[rate][seed - 1]})
    assert results.best(FAMILY) == 4e-3
    assert results.is_enclosed(FAMILY)
    assert len(made) == len(set(made))
    enclosing = [(r, s) for r in (2e-3, 4e-3, 8e-3) for s in SEEDS]
    assert sorted(made) == [*enclosing, (16e-3, SEEDS[0])]
