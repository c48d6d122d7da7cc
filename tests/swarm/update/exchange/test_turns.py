"""Turns on an uplink."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.leftovers import ROOM_S
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.swarm.update.exchange.pace import LONGEST_UPLOAD_S, Turns
from swarmnet.transport.base import Traffic

RATE = 1_000.0


class Uplink:
    """Sends `RATE` bytes/s of what it is given."""

    def __init__(self) -> None:
        self.turns = Turns(Traffic(queued_bytes=self.queued_bytes))
        self.sent_at: list[float] = []
        self._free_at = 0.0
        self.idle_s = 0.0
        """Between the first message and the last."""

    def queued_bytes(self) -> int:
        left_s = self._free_at - asyncio.get_running_loop().time()
        return max(0, int(left_s * RATE))

    def put(self, num_bytes: int) -> float:
        """Returns when the last byte is gone."""
        now = asyncio.get_running_loop().time()
        if self._free_at:
            self.idle_s += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + num_bytes / RATE
        return self._free_at - now

    async def send(self, num_bytes: int, rate: float = RATE) -> None:
        """A message of an exchange."""
        await self.turns.take(num_bytes, rate)
        self.sent_at.append(asyncio.get_running_loop().time())
        self.put(num_bytes)


def in_virtual_time(scenario: Callable[[Uplink], Awaitable[None]]) -> None:
    async def main() -> None:
        uplink = Uplink()
        try:
            await scenario(uplink)
        finally:
            uplink.turns.close()

    run_virtual(main())


def test_messages_take_turns_and_leave_no_time_between_them() -> None:
    async def scenario(uplink: Uplink) -> None:
        await asyncio.gather(*(uplink.send(7_000) for _ in range(4)))
        assert uplink.sent_at == pytest.approx([0.0, 7.0, 14.0, 21.0])
        assert uplink.idle_s == pytest.approx(0.0)

    in_virtual_time(scenario)


def test_what_is_urgent_waits_behind_one_message_at_most() -> None:
    """And the exchange takes what it leaves, all of that."""

    async def scenario(uplink: Uplink) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        exchange = [loop.create_task(uplink.send(1_000)) for _ in range(20)]
        for _ in range(10):
            assert uplink.put(500) <= 1.5 + ROOM_S
            await asyncio.sleep(1.7)
        await asyncio.gather(*exchange)
        assert uplink.idle_s == pytest.approx(0.0, abs=0.01)
        assert uplink.sent_at[-1] - began == pytest.approx(19 * 1.0 + 10 * 0.5, abs=1.5 + ROOM_S)

    in_virtual_time(scenario)


def test_an_exchange_has_half_of_a_link_that_is_full_of_what_is_urgent() -> None:
    async def scenario(uplink: Uplink) -> None:
        loop = asyncio.get_running_loop()
        exchange = [loop.create_task(uplink.send(1_000)) for _ in range(10)]
        while not all(task.done() for task in exchange):
            if uplink.queued_bytes() < 4_000:
                uplink.put(500)
            await asyncio.sleep(0.05)
        assert uplink.sent_at[-1] == pytest.approx(9 * 2.0, rel=0.1)

    in_virtual_time(scenario)


def test_an_idle_uplink_is_free_at_once() -> None:
    async def scenario(uplink: Uplink) -> None:
        await uplink.send(5_000)
        await asyncio.sleep(5.1)
        await uplink.send(5_000)
        assert uplink.sent_at == pytest.approx([0.0, 5.1])

    in_virtual_time(scenario)


def test_an_unknown_rate_holds_nothing_up_and_a_wrong_one_not_for_ever() -> None:
    async def scenario(uplink: Uplink) -> None:
        for _ in range(3):
            await uplink.send(10_000, rate=0.0)
        assert uplink.sent_at == [0.0] * 3
        await asyncio.sleep(30.0)
        uplink.sent_at.clear()
        await asyncio.gather(*(uplink.send(10, rate=1e-6) for _ in range(2)))
        assert uplink.sent_at == pytest.approx([30.0, 30.0 + LONGEST_UPLOAD_S])

    in_virtual_time(scenario)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e9)), min_size=1, max_size=8))
def test_every_message_has_its_turn_in_bounded_time(messages: list[tuple[int, float]]) -> None:
    """Whatever was measured of the uplink."""

    async def scenario(uplink: Uplink) -> None:
        sending = (uplink.send(num_bytes, rate) for num_bytes, rate in messages)
        async with asyncio.timeout(2 * len(messages) * (LONGEST_UPLOAD_S + LOOK_LESS_S)):
            await asyncio.gather(*sending)

    in_virtual_time(scenario)


def test_who_gives_up_waiting_holds_nobody_up() -> None:
    async def scenario(uplink: Uplink) -> None:
        uplink.put(5_000)
        for_room = asyncio.ensure_future(uplink.send(1_000))
        for_its_turn = asyncio.ensure_future(uplink.send(1_000))
        last = asyncio.ensure_future(uplink.send(5_000))
        await asyncio.sleep(0.5)
        for_room.cancel()
        for_its_turn.cancel()
        await last
        assert uplink.sent_at == pytest.approx([5.0], abs=2 * ROOM_S)

    in_virtual_time(scenario)


def test_closing_lets_everybody_go() -> None:
    async def scenario(uplink: Uplink) -> None:
        await uplink.turns.take(1_000, 0.1)
        waiting = asyncio.ensure_future(uplink.turns.take(0, 0.1))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        uplink.turns.close()
        await waiting

    in_virtual_time(scenario)
