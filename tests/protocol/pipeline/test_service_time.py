"""How fast a device is, learned from its first pieces of work on."""

from __future__ import annotations

import random

import pytest

from swarmnet.protocol.pipeline.service_time import (
    BACKWARD_PART,
    FORWARD_PART,
    PassageTime,
    ServiceTime,
)


def test_unknown_until_a_few_pieces_are_done() -> None:
    service = ServiceTime()
    for _ in range(2):
        service.add(1.0, FORWARD_PART)
        assert service.seconds == 0.0
    service.add(1.0, FORWARD_PART)
    assert service.seconds == pytest.approx(3.0)


def test_many_forwards_before_the_first_backward_do_not_mislead() -> None:
    service = ServiceTime()
    for _ in range(30):
        service.add(4.0, FORWARD_PART)
    service.add(8.0, BACKWARD_PART)
    assert service.seconds == pytest.approx(12.0)


def test_the_first_piece_warms_up() -> None:
    service = ServiceTime()
    service.add(60.0, FORWARD_PART)
    for _ in range(4):
        service.add(1.0, FORWARD_PART)
    assert service.seconds == pytest.approx(3.0)


def test_follows_a_machine_that_becomes_slower() -> None:
    rng = random.Random(0)
    service = ServiceTime()
    for slow in (1.0, 3.0):
        for _ in range(60):
            service.add(slow * rng.uniform(0.9, 1.1), FORWARD_PART)
            service.add(2 * slow * rng.uniform(0.9, 1.1), BACKWARD_PART)
        assert service.seconds == pytest.approx(3 * slow, rel=0.1)


def test_passes_of_another_proportion_even_out() -> None:
    """With recomputation a backward pass is three forward passes."""
    service = ServiceTime()
    for _ in range(100):
        service.add(1.0, FORWARD_PART)
        service.add(3.0, BACKWARD_PART)
    assert service.seconds == pytest.approx(4.0, rel=0.1)


def test_a_clock_that_went_back_is_not_believed() -> None:
    service = ServiceTime()
    for seconds in (1.0, 1.0, -50.0, 1.0):
        service.add(seconds, 1.0)
    assert service.seconds == pytest.approx(1.0)


def test_a_passage_takes_what_it_usually_does_or_what_the_oldest_inside_has() -> None:
    passage = PassageTime()
    assert passage.longest_s([], 50.0) == 0.0
    passage.add(10.0, 14.0)
    assert passage.longest_s([], 50.0) == 4.0
    passage.add(20.0, 34.0)
    assert passage.longest_s([49.0, 48.0], 50.0) == pytest.approx(5.0)
    assert passage.longest_s([49.0, 40.0], 50.0) == 10.0
