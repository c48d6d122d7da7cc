"""The machine of a shard's update, through every order of events of small worlds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.protocol.update.explorer.exploring import Wanderer, explore
from tests.protocol.update.explorer.scenarios import ONE_OF_EACH, SMALL, any_scenario, with_liar
from tests.protocol.update.explorer.small_world import Scenario

WORLDS, SCHEDULES = 60, 30
LIARS, SCHEDULES_WITH_LIARS = 50, 8


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_events_ends_with_one_result(name: str) -> None:
    found = explore(SMALL[name], limit=300_000)
    print(f"{name}: {found.num_states} states")
    assert found.is_complete


@pytest.mark.parametrize("name", ["a crash", "a lost message", "a false suspicion", "three owners"])
def test_what_is_forgotten_changes_no_end(name: str) -> None:
    """Exploring without reductions comes to the same ends, by more states."""
    reduced = explore(SMALL[name], limit=300_000, ends_in_words=True)
    whole = explore(replace(SMALL[name], reduced=False), limit=300_000, ends_in_words=True)
    assert reduced.ends == whole.ends
    assert reduced.num_states < whole.num_states


def test_a_crash_a_lost_message_and_a_false_suspicion_in_every_order() -> None:
    found = explore(ONE_OF_EACH, limit=3_000_000)
    print(f"one of each: {found.num_states} states, {found.num_parted} ends of parted peers")
    assert found.is_complete


def wander(scenario: Scenario, seed: int, schedules: int) -> None:
    wanderer = Wanderer(scenario)
    for i in range(schedules):
        try:
            wanderer.wander(random.Random(f"{seed} {i}"))
        except OverflowError:  # what it remembers fills it up
            wanderer = Wanderer(scenario)
            wanderer.wander(random.Random(f"{seed} {i}"))


@pytest.mark.parametrize("seed", range(WORLDS))
def test_random_schedules_of_larger_swarms_end_with_one_result(seed: int) -> None:
    wander(any_scenario(seed), seed, SCHEDULES)


@pytest.mark.parametrize("seed", range(LIARS))
def test_random_schedules_with_a_liar_end_with_a_result_of_the_others(seed: int) -> None:
    """One result; several only where records differ and the liar follows all, as it says."""
    wander(with_liar(seed), seed, SCHEDULES_WITH_LIARS)
