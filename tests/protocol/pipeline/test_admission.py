"""Who is asked before a microbatch is sent, who lets one more in, and how long it waits there."""

from __future__ import annotations

import pytest

from swarmnet.protocol.pipeline.admission import (
    ASK_S,
    ASK_WORK_S,
    CROWDED_S,
    IN_HAND_PART,
    LEAST_IN_HAND,
    FullStages,
    most_inside,
    queue_room,
    shares_work,
    wait_s,
)


def test_asking_pays_where_the_way_or_the_work_is_long() -> None:
    stages = FullStages()
    assert not stages.asks(0, ASK_S, ASK_WORK_S, 0.0)
    assert stages.asks(0, 2 * ASK_S, None, 0.0)
    assert stages.asks(0, 0.0, 2 * ASK_WORK_S, 0.0)
    assert not stages.asks(0, 0.0, None, 0.0)


def test_a_stage_that_turned_a_long_queue_on_callers_is_asked_for_a_while() -> None:
    stages = FullStages()
    stages.turned_away(0, ASK_S / 2, 10.0)
    assert not stages.asks(0, 0.0, None, 10.0), "a short wait"
    assert stages.is_full(0, 10.0)
    stages.turned_away(0, ASK_S, 10.0)
    assert stages.asks(0, 0.0, None, 10.0 + CROWDED_S - 0.1)
    assert not stages.asks(0, 0.0, None, 10.0 + CROWDED_S)
    assert not stages.asks(1, 0.0, None, 10.0), "another stage"


def test_a_stage_counts_as_full_for_a_while_after_it_was_said() -> None:
    stages = FullStages()
    assert not stages.is_full(0, 0.0)
    stages.has_no_room(0, 5.0)
    assert stages.is_full(0, 5.0 + CROWDED_S - 0.1)
    assert not stages.is_full(0, 5.0 + CROWDED_S)
    assert not stages.asks(0, 0.0, None, 5.0)
    assert not stages.is_full(1, 5.0)


def test_own_data_is_any_replicas_first_work_where_the_way_is_nothing_beside_it() -> None:
    assert shares_work(0.0, 2 * ASK_WORK_S)
    assert not shares_work(0.0, ASK_WORK_S)
    assert not shares_work(0.0, None)
    assert not shares_work(2 * ASK_S, 2 * ASK_WORK_S)


def test_announced_ones_wait_in_a_longer_queue_as_far_as_the_device_gets_in_time() -> None:
    assert queue_room(3, 32, 240.0, 0.0) == 3, "it does not know its speed yet"
    assert queue_room(3, 32, 240.0, 1.0) == 32
    assert queue_room(3, 32, 240.0, 12.0) == 20
    assert queue_room(3, 32, 240.0, 1000.0) == 3


def test_a_coming_round_gets_half_of_the_places() -> None:
    assert most_inside(256, 64, is_coming=False) == 64
    assert most_inside(32, 64, is_coming=False) == 32
    assert most_inside(256, 64, is_coming=True) == 32
    assert most_inside(256, 1, is_coming=True) == 1


def test_the_wait_is_until_work_begins_and_of_the_last_ones_until_it_is_done() -> None:
    def waits(num_inside: int, *, each_s: float = 10.0, is_last: bool = False) -> float:
        return wait_s(
            device_s=6.0, link_s=4.0, each_s=each_s, num_inside=num_inside, is_last=is_last
        )

    assert waits(5) == pytest.approx(6.0 + IN_HAND_PART * 5 * 10.0)
    assert waits(0) == pytest.approx(6.0 + IN_HAND_PART * LEAST_IN_HAND * 10.0)
    assert waits(0, each_s=1.0) < waits(0), "of two idle ones, the faster one"
    assert waits(5, is_last=True) == 16.0
    by_link = wait_s(device_s=1.0, link_s=4.0, each_s=0.0, num_inside=1, is_last=False)
    assert by_link == 4.0
