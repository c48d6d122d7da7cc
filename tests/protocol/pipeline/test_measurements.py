"""What a replica measures of its own work."""

from __future__ import annotations

import pytest

from swarmnet.protocol.pipeline.measurements import Measurements
from swarmnet.protocol.pipeline.routing import DEADLINE_FACTOR
from swarmnet.protocol.timing import PATIENCE_S


def measured(work_s: float) -> Measurements:
    """It knows how long a microbatch takes."""
    found = Measurements()
    for _ in range(5):
        found.worked(work_s, 1.0)
    return found


@pytest.mark.parametrize("work_s", [0.1, 10.0])
def test_a_device_hangs_that_ends_no_pass_for_long(work_s: float) -> None:
    longest_s = max(PATIENCE_S, DEADLINE_FACTOR * work_s)
    known = measured(work_s)
    assert not known.hangs(1000.0), "nothing waits"
    known.pass_waits(1000.0)
    known.pass_waits(1001.0)
    assert not known.hangs(1000.0 + longest_s)
    assert known.hangs(1000.1 + longest_s)
    known.pass_ended(1002.0, is_done=False)
    assert known.hangs(1000.1 + longest_s), "that nobody waits for one is no work"
    known.pass_waits(1003.0)
    known.pass_ended(1005.0, is_done=True)
    assert not known.hangs(1005.0 + longest_s)
    assert known.hangs(1005.1 + longest_s)


def test_a_microbatch_is_two_pieces_of_work() -> None:
    assert Measurements().piece_s == 0.0
    assert measured(3.0).piece_s == pytest.approx(1.5)


def test_a_device_of_unknown_speed_is_waited_for() -> None:
    unknown = Measurements()
    unknown.pass_waits(0.0)
    assert not unknown.hangs(1e6)


def test_a_round_has_parts() -> None:
    found = Measurements()
    found.serving(10.0)
    found.closed(14.0)
    assert found.open_s == 4.0
    found.settled(15.0)
    found.averaged(17.0)
    times = found.opened(20.0)
    assert (times.open_s, times.settling_s, times.averaging_s, times.opening_s) == (4, 1, 2, 3)
    assert (sum(found.rounds.counts), found.rounds.sum) == (1, 10.0), "from opening to opening"
    found.closed(21.0)
    assert found.open_s == 1.0
