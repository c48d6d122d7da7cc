"""A signal ends what runs, in good order."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from peer.loop import Stopped, _supervise, run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_work_tidy_up(number: signal.Signals) -> None:
    tidied: list[bool] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60.0)
        finally:
            tidied.append(True)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be under nohup
    try:
        assert isinstance(asyncio.run(_supervise(work(), None)), Stopped)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert tidied


def test_signals_after_it_do_what_they_did_before() -> None:
    """On the loop of the commands."""

    async def work() -> str:
        return "done"

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert run(work()) == "done"
    assert [signal.getsignal(number) for number in numbers] == before


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
        return "done"

    try:
        assert asyncio.run(_supervise(work(), None)) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)
