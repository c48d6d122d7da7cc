"""The swarm's own order of passes, played, and what split backward passes gain in it."""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from swarmnet.protocol.planning.flow import IN_FLIGHT_PER_REPLICA
from swarmnet.protocol.planning.owed import most_owed
from swarmnet.protocol.planning.own_order import own_order
from swarmnet.protocol.planning.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Step
from swarmnet.protocol.planning.timeline import StageTimes, Timeline, played
from swarmnet.protocol.planning.ways import Way

EVEN = StageTimes(1.0, 1.0, 1.0)
SIZES = [(1, 1), (1, 3), (2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (6, 12), (8, 16)]
DECISION = Path(__file__).parents[3] / "docs" / "decisions" / "0047-what-a-split-would-gain.md"


def play(k: int, m: int, way: float = 0.0, *, is_split: bool) -> Timeline:
    window = int(IN_FLIGHT_PER_REPLICA * k) + 1

    def ways(source: int, target: int, is_back: bool) -> Way:
        assert abs(source - target) == 1
        return Way(way, way)

    times = [EVEN] * k
    return played(
        lambda _, num: own_order(times, num, window, ways, is_split=is_split), times, m, ways
    )


@pytest.mark.parametrize(("k", "m"), SIZES)
def test_without_ways_the_bubble_is_that_of_1f1b_and_a_split_leaves_a_third(k: int, m: int) -> None:
    whole, split = (play(k, m, is_split=x) for x in (False, True))
    assert whole.bubble == pytest.approx((k - 1) / (m + k - 1))
    assert split.round_s - 3 * m == pytest.approx(k - 1)


@pytest.mark.parametrize("way", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("is_split", [False, True])
def test_every_pass_is_made_once_with_no_more_in_flight(way: float, is_split: bool) -> None:
    k, m = 4, 32
    found = play(k, m, way, is_split=is_split)
    for stage, lane in enumerate(found.schedule.steps):
        kinds = (FORWARD, INPUT, WEIGHT) if is_split and stage else (FORWARD, BACKWARD)
        assert Counter(lane) == {Step(x, stage, i): 1 for x in kinds for i in range(m)}
        ends = accumulate({INPUT: 1, WEIGHT: -1}.get(step.kind, 0) for step in lane)
        assert max(ends) <= (most_owed(stage) if is_split else 0)
    assert found.peak_activations <= IN_FLIGHT_PER_REPLICA * k + 1


def test_backward_passes_come_first_and_old_ones_before_new_ones() -> None:
    first, last = play(2, 4, is_split=False).schedule.steps
    assert [(s.kind, s.microbatch) for s in last] == [
        (kind, i) for i in range(4) for kind in (FORWARD, BACKWARD)
    ]
    assert [s.kind for s in first][:3] == [FORWARD, FORWARD, FORWARD], "the first is not back yet"
    assert [s.microbatch for s in first if s.kind == BACKWARD] == [0, 1, 2, 3]


def test_the_figures_of_the_decision() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", DECISION.read_text(), re.M
    )
    assert len(rows) > 10
    for k, m, way, whole, split in (map(int, row) for row in rows):
        found = [play(k, m, way, is_split=x).round_s for x in (False, True)]
        assert found == [whole, split], (k, m, way)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("k", "m"), [(2, 8), (3, 8), (4, 16)])
def test_no_round_is_shorter_than_what_a_link_has_to_send(k: int, m: int, is_split: bool) -> None:
    """A middle stage sends an activation and a gradient of each microbatch over its uplink."""
    way = 10.0
    sent = (2 if k > 2 else 1) * m * way
    took_s = play(k, m, way, is_split=is_split).round_s
    assert sent <= took_s <= sent + 2 * (k - 1) * way + 3 * m * k / 2


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_is_no_order(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        own_order([EVEN] * sizes[0], sizes[1], sizes[2])
