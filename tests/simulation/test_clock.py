from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from swarmnet.simulation.clock import Deadlock, VirtualTimeLimit, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((name, now()))

        assert now() == 0.0
        await asyncio.gather(wait("month", 30 * 86400.0), wait("b", 1.5), wait("a", 0.25))
        return log

    assert run(main()) == [("a", 0.25), ("b", 1.5), ("month", 30 * 86400.0)]


def test_the_same_instant_keeps_the_order_of_scheduling() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        for i in range(100):
            loop.call_at(5.0, order.append, i)
            loop.call_at(float(i % 7), lambda: None)
        await asyncio.sleep(6.0)
        return order

    assert run(main()) == list(range(100))


def test_timeouts_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600.0)
        return now()

    assert run(main()) == 3600.0


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(50.0, lambda: None).cancel()
        await asyncio.sleep(1.0)
        return now()

    assert run(main()) == 1.0


def test_the_clock_works_far_from_zero() -> None:
    async def main() -> float:
        await asyncio.sleep(1e8)
        for _ in range(10):
            await asyncio.sleep(1e-3)
        return now()

    assert run(main()) == pytest.approx(1e8 + 0.01)


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait_for_godot"):
        run(wait_for_godot())


def test_a_run_that_never_ends_meets_its_limit() -> None:
    async def tick() -> None:
        for second in itertools.count():
            await asyncio.sleep(second % 2)

    with pytest.raises(VirtualTimeLimit, match="tick"):
        run(tick(), limit_s=1000.0)


def test_leftovers_are_cancelled_and_reported() -> None:
    ended: list[str] = []
    leftovers: list[str] = []

    async def stay(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            ended.append(name)

    async def main() -> int:
        tasks = [asyncio.create_task(stay(name), name=name) for name in "ab"]
        await asyncio.sleep(1.0)
        return len(tasks)

    assert run(main(), leftovers=leftovers) == 2
    assert ended == ["a", "b"]
    assert [text.split()[0] for text in leftovers] == ["a", "b"]


def test_an_exception_passes_through() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="no threads"):
        run(main())


def test_a_seed_replays_and_leaves_the_generator_alone() -> None:
    async def main() -> list[float]:
        return [random.random() for _ in range(3)]

    random.seed(1)
    expected = random.random()
    random.seed(1)
    assert run(main(), seed=5) == run(main(), seed=5)
    assert random.random() == expected


def test_a_tangle_of_tasks_replays_exactly() -> None:
    def history(seed: int) -> list[tuple[float, int]]:
        async def main() -> list[tuple[float, int]]:
            rng = random.Random(seed)
            log: list[tuple[float, int]] = []
            queue: asyncio.Queue[int] = asyncio.Queue(4)

            async def produce(i: int) -> None:
                for _ in range(20):
                    await asyncio.sleep(rng.choice([0.0, 0.5, 1.0]))
                    await queue.put(i)

            async def consume() -> None:
                for _ in range(100):
                    log.append((now(), await queue.get()))

            await asyncio.gather(consume(), *(produce(i) for i in range(5)))
            return log

        return run(main())

    assert history(7) == history(7)
    assert history(7) != history(8)
