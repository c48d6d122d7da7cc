"""A sample of `tests.fuzzing`; the whole of it is a command of its own."""

from __future__ import annotations

import pytest

from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import load_spec
from tests.fuzzing import fuzz, spec_target, targets

INPUTS = 4000


@pytest.mark.parametrize("seed", range(3))
def test_no_decoder_crashes_or_hangs(seed: int) -> None:
    every = [*targets(), spec_target(load_spec(default_spec_path()))]
    outcomes = fuzz(every, INPUTS, seed)
    assert sum(outcomes.values()) == INPUTS
    for target in every:
        assert outcomes[f"{target.name}: refused"] > 0
    for name in ("stream", "record", "body"):
        assert outcomes[f"{name}: taken"] > 0, "mutations that break everything reach nothing"


def test_the_seeds_themselves_are_taken() -> None:
    for target in targets():
        for seed in target.seeds:
            if target.name != "body" or seed != b"\xc0":
                target.decode(seed)
