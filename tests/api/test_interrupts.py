"""An interrupt comes at any step of a wait: the thread of the run is not held up by it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, cast

from swarmnet.api.answers import Answer
from swarmnet.api.history import History
from swarmnet.api.life import Life
from swarmnet.api.runs import Run
from swarmnet.api.session import Session


class Quiet:
    """A session without peers."""

    def __init__(self) -> None:
        self.history: History[Any] = History()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def status(self, unix_s: float) -> float:
        await asyncio.sleep(0.002)
        return unix_s


@asynccontextmanager
async def quiet() -> AsyncIterator[Session]:
    yield cast(Session, Quiet())


def is_interrupted(step: int, act: Callable[[], object]) -> bool:
    """Whether `act` came to its nth step, at which this thread is interrupted: a call, or a return,
    also of what is no Python."""
    left = step

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        left -= frame.f_code is not is_interrupted.__code__
        if not left:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def assert_ends_wherever_interrupted(act: Callable[[Life, Run], Callable[[], object]]) -> None:
    step, is_reached = 0, True
    while is_reached:
        step += 1
        before = set(threading.enumerate())
        life = Life(quiet)
        run = Run(life, life.start().result())
        (thread,) = set(threading.enumerate()) - before
        is_reached = is_interrupted(step, act(life, run))
        life.stop()
        thread.join(5.0)
        assert not thread.is_alive(), f"interrupted at step {step}, it hangs"
    assert step > 10, "it was not interrupted while it waits"


def test_a_question_may_be_interrupted_anywhere() -> None:
    assert_ends_wherever_interrupted(lambda life, run: run.status)


def test_so_may_the_end() -> None:
    assert_ends_wherever_interrupted(lambda life, run: life.wait_end)


def test_an_answer_comes_once_and_to_all_that_wait() -> None:
    answer: Answer[int] = Answer()
    assert not answer.wait(0.01)
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(answer.result())) for _ in range(3)]

    async def on_loop() -> int:
        waiting = asyncio.create_task(answer.on_loop())
        given_up = asyncio.create_task(answer.on_loop())
        await asyncio.sleep(0)
        given_up.cancel()
        for thread in threads:
            thread.start()
        await asyncio.to_thread(time.sleep, 0.01)
        answer.give(1)
        answer.give(2)
        return await waiting

    assert asyncio.run(on_loop()) == 1
    for thread in threads:
        thread.join()
    assert got == [1, 1, 1]
    assert answer.result() == 1
    answer.fail(ValueError())
    assert answer.error is None
