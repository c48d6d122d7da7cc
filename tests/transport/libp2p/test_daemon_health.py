"""A daemon that hangs is told from one that lacks a processor, in virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarmnet.simulation.clock import run
from swarmnet.system import ProcessorUse
from swarmnet.transport.libp2p.daemon_health import (
    HANGS_S,
    LONGEST_S,
    LOOK_S,
    NOTHING_SAID,
    OVERLOADED,
    PING_EVERY_S,
    STILL_SILENT,
    Silence,
    until_broken,
)

LATEST_S = PING_EVERY_S + HANGS_S + 2 * LOOK_S
FAR_S = 3600.0


class Daemon:
    """It has so much of a processor (`share`) of which it wants more or does not, and answers when
    it has had `needs_s` of it."""

    def __init__(self, share: float, *, wants_more: bool, needs_s: float = 1e9) -> None:
        self.share, self.wants_more, self.needs_s = share, wants_more, needs_s
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.answers, self.asked = 0, 0

    async def ask(self) -> None:
        self.asked += 1
        await asyncio.sleep(self.needs_s / self.share if self.share else 1e9)
        self.answers += 1

    def use(self) -> ProcessorUse | None:
        used_s = self.share * asyncio.get_running_loop().time()
        return ProcessorUse(used_s, self.wants_more)

    async def broken_after(self) -> tuple[str, float]:
        return await until_broken(self.ended, self.ask, self.use), asyncio.get_running_loop().time()


def test_one_that_sleeps_and_does_not_answer_hangs() -> None:
    async def main() -> None:
        reason, at_s = await Daemon(0.0, wants_more=False).broken_after()
        assert reason == NOTHING_SAID
        assert at_s <= LATEST_S

    run(main(), limit_s=FAR_S)


def test_one_that_computes_all_the_time_and_does_not_answer_hangs() -> None:
    async def main() -> None:
        reason, at_s = await Daemon(1.0, wants_more=True).broken_after()
        assert reason == NOTHING_SAID
        assert at_s <= LATEST_S

    run(main(), limit_s=FAR_S)


def test_one_that_gets_little_of_a_processor_hangs_when_it_has_had_enough_of_it() -> None:
    async def main() -> None:
        reason, at_s = await Daemon(0.1, wants_more=True).broken_after()
        assert reason == NOTHING_SAID
        assert HANGS_S / 0.1 <= at_s <= LATEST_S / 0.1

    run(main(), limit_s=FAR_S)


def test_one_that_answers_late_for_want_of_a_processor_is_not_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        daemon = Daemon(0.01, wants_more=True, needs_s=0.1)
        watching = asyncio.create_task(daemon.broken_after())
        await asyncio.sleep(600)
        assert not watching.done()
        assert daemon.asked - 1 <= daemon.answers <= daemon.asked, "it is asked once at a time"
        assert set(caplog.messages) == {OVERLOADED}
        assert daemon.asked - 1 <= len(caplog.messages) <= daemon.asked, "one line for each"
        daemon.ended.set_result(-9)
        reason, at_s = await watching
        assert reason == "ended with code -9"
        assert at_s == 600

    with caplog.at_level(logging.WARNING):
        run(main(), limit_s=FAR_S)


def test_one_that_waits_for_a_broken_disk_for_ever_is_replaced() -> None:
    async def main() -> None:
        reason, at_s = await Daemon(0.0, wants_more=True).broken_after()
        assert reason == STILL_SILENT
        assert LONGEST_S <= at_s <= LONGEST_S + LATEST_S

    run(main(), limit_s=FAR_S)


def test_one_whose_state_nobody_says_hangs_by_the_clock() -> None:
    async def main() -> None:
        daemon = Daemon(0.0, wants_more=True)
        reason = await until_broken(daemon.ended, daemon.ask, lambda: None)
        assert reason == NOTHING_SAID
        assert asyncio.get_running_loop().time() <= LATEST_S

    run(main(), limit_s=FAR_S)


@pytest.mark.parametrize("refusals", [3, 10**9])
def test_refusals_that_pass_are_forgotten(refusals: int) -> None:
    async def main() -> None:
        daemon = Daemon(1.0, wants_more=False)

        async def ask() -> None:
            daemon.asked += 1
            if daemon.asked <= refusals:
                raise ConnectionRefusedError

        watching = asyncio.create_task(until_broken(daemon.ended, ask, daemon.use))
        await asyncio.sleep(60)
        assert watching.done() is (refusals > 3)
        if watching.done():
            assert watching.result() == NOTHING_SAID
            assert daemon.asked <= 2 * HANGS_S / LOOK_S, "it is not asked without a pause"
        watching.cancel()

    run(main(), limit_s=FAR_S)


def test_a_pause_of_this_process_is_no_silence_of_the_daemon() -> None:
    sleeps = ProcessorUse(0.0, wants_more=False)
    silence = Silence(0.0, sleeps)
    assert silence.look(150.0, sleeps) == ""
    looks = [silence.look(150.0 + 10 * n, sleeps) for n in range(1, 20)]
    assert looks.index(NOTHING_SAID) + 2 == HANGS_S / LOOK_S
