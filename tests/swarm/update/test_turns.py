"""Turns on an uplink."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.timing import LOOK_LESS_S as LOOK_S
from swarmnet.swarm.update.exchange.turns import LONGEST_UPLOAD_S as MAX_TURN_S
from swarmnet.swarm.update.exchange.turns import Turns


def at(rate: float) -> Callable[[], float]:
    return lambda: rate


async def times(
    turns: Turns, num_bytes: int, number: int, rate: Callable[[], float]
) -> list[float]:
    """When each of several messages that come at once gets its turn, in seconds from now."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    found: list[float] = []

    async def one() -> None:
        await turns.take(num_bytes, rate)
        found.append(loop.time() - began)

    await asyncio.gather(*(one() for _ in range(number)))
    return found


def in_virtual_time(scenario: Callable[[Turns], Awaitable[None]]) -> None:
    async def main() -> None:
        turns = Turns()
        try:
            await scenario(turns)
        finally:
            turns.close()

    run_virtual(main())


def test_messages_take_their_turns_at_the_rate_that_they_get() -> None:
    async def scenario(turns: Turns) -> None:
        assert await times(turns, 7_000, 4, at(1_000.0)) == pytest.approx([0.0, 7.0, 14.0, 21.0])

    in_virtual_time(scenario)


def test_an_idle_uplink_is_free_at_once() -> None:
    async def scenario(turns: Turns) -> None:
        await turns.take(5_000, at(1_000.0))
        await asyncio.sleep(5.1)
        assert await times(turns, 5_000, 1, at(1_000.0)) == [0.0]

    in_virtual_time(scenario)


def test_an_unknown_rate_holds_nothing_up_and_a_wrong_one_not_for_ever() -> None:
    async def scenario(turns: Turns) -> None:
        assert await times(turns, 10**9, 3, at(0.0)) == [0.0] * 3
        assert await times(turns, 10**9, 2, at(1.0)) == pytest.approx([0.0, MAX_TURN_S])

    in_virtual_time(scenario)


def test_a_rate_that_rises_shortens_the_wait() -> None:
    async def scenario(turns: Turns) -> None:
        loop = asyncio.get_running_loop()
        rises_at = loop.time() + 100.0

        def rate() -> float:
            return 9.0 if loop.time() >= rises_at else 1.0

        found = await times(turns, 900, 3, rate)
        second = 100.0 + (900.0 - 100.0) / 9.0
        assert found == pytest.approx([0.0, second, second + 100.0], abs=LOOK_S)

    in_virtual_time(scenario)


@given(st.integers(1, 10**9), st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=5))
def test_a_turn_ends_whatever_is_left_by_rounding(num_bytes: int, rates: list[float]) -> None:
    """What is left of a message never becomes so little that time does not pass."""
    asked = 0

    def rate() -> float:
        nonlocal asked
        asked += 1
        return rates[asked % len(rates)]

    async def scenario(turns: Turns) -> None:
        loop = asyncio.get_running_loop()
        await turns.take(num_bytes, rate)
        began = loop.time()
        await turns.take(1, at(1.0))
        # Two questions by `take`, and one for every look.
        assert asked <= (loop.time() - began) / LOOK_S + 3

    in_virtual_time(scenario)


def test_who_gives_up_waiting_holds_nobody_up() -> None:
    async def scenario(turns: Turns) -> None:
        await turns.take(1_000, at(100.0))
        waiting = asyncio.ensure_future(turns.take(1_000, at(100.0)))
        last = asyncio.ensure_future(times(turns, 1_000, 1, at(100.0)))
        await asyncio.sleep(1.0)
        waiting.cancel()
        assert await last == pytest.approx([10.0])

    in_virtual_time(scenario)


def test_closing_lets_everybody_go() -> None:
    async def scenario(turns: Turns) -> None:
        await turns.take(1_000, at(0.1))
        waiting = asyncio.ensure_future(turns.take(0, at(0.1)))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        turns.close()
        await waiting

    in_virtual_time(scenario)
