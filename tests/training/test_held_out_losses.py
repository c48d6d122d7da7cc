"""Which round has the lowest held-out loss."""

from __future__ import annotations

import pytest

from swarmnet.training.held_out_losses import best_round


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({}, None),
        ({10: 3.0}, 10),
        ({0: 5.0, 10: 4.0, 20: 3.0}, 20),
        ({0: 5.0, 10: 3.0, 20: 2.0, 30: 2.1, 40: 2.5}, 20),
        ({0: 5.0, 10: 0.01, 20: 4.0, 30: 3.0, 40: 2.0, 50: 2.5}, 40),
        ({0: 5.0, 10: 4.0, 20: 3.0, 30: 99.0, 40: 2.0, 50: 2.5}, 40),
    ],
    ids=["none", "one", "falling", "rising", "a false low one", "a false high one"],
)
def test_the_best_round_is_not_the_word_of_one(losses: dict[int, float], best: int | None) -> None:
    assert best_round(losses, set(losses)) == best
