from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import Busy
from swarmnet.simulation.clock import run
from swarmnet.simulation.device import InlineWorker, SyntheticDevice
from swarmnet.swarm.ports import BACKWARD, FORWARD, OTHER

SECONDS = {BACKWARD: 2.0, FORWARD: 1.0, OTHER: 0.5}


def now() -> float:
    return asyncio.get_running_loop().time()


def test_backward_first_and_the_oldest_first() -> None:
    async def main() -> list[tuple[str, float]]:
        device = SyntheticDevice(SECONDS.__getitem__)
        log: list[tuple[str, float]] = []

        async def work(name: str, kind: str) -> None:
            log.append((await device.run(kind, lambda: name), now()))

        jobs = [("f1", FORWARD), ("o1", OTHER), ("f2", FORWARD), ("b1", BACKWARD), ("b2", BACKWARD)]
        tasks = [asyncio.create_task(work(*job)) for job in jobs]
        await asyncio.sleep(0.0)
        assert device.num_waiting == 5
        await asyncio.gather(*tasks)
        assert device.num_waiting == 0
        assert device.busy_s == 6.5
        return log

    assert run(main()) == [("f1", 1.0), ("b1", 3.0), ("b2", 5.0), ("f2", 6.0), ("o1", 6.5)]


def test_the_earliest_round_first() -> None:
    async def main() -> list[str]:
        device = SyntheticDevice(SECONDS.__getitem__)
        order: list[str] = []
        jobs = [(FORWARD, 2), (BACKWARD, 2), (OTHER, 1), (FORWARD, 1), (BACKWARD, 1)]
        tasks = [
            asyncio.create_task(
                device.run(kind, lambda k=kind, t=turn: order.append(f"{k} {t}"), turn)
            )  # type: ignore[misc]
            for kind, turn in jobs
        ]
        await asyncio.gather(*tasks)
        return order

    order = run(main())
    assert order[1:] == ["backward 1", "forward 1", "other 1", "backward 2"]


def test_cancelling_removes_what_has_not_started() -> None:
    async def main() -> None:
        device = SyntheticDevice(SECONDS.__getitem__)
        done: list[str] = []
        first = asyncio.create_task(device.run(FORWARD, lambda: done.append("first")))
        second = asyncio.create_task(device.run(FORWARD, lambda: done.append("second")))
        await asyncio.sleep(0.5)
        first.cancel()
        second.cancel()
        await asyncio.sleep(0.0)
        assert device.num_waiting == 1
        await asyncio.sleep(10.0)
        assert done == ["first"]
        assert device.busy_s == 1.0

    run(main())


def test_errors_go_to_the_waiter_and_the_device_goes_on() -> None:
    async def main() -> None:
        device = SyntheticDevice(lambda kind: 1.0)

        def fail() -> None:
            raise ValueError("bad")

        with pytest.raises(ValueError, match="bad"):
            await device.run(FORWARD, fail)
        assert await device.run(FORWARD, lambda: 3) == 3

    run(main())


def test_the_queue_is_bounded() -> None:
    async def main() -> None:
        device = SyntheticDevice(lambda kind: 1.0, max_waiting=2)
        tasks = [asyncio.create_task(device.run(FORWARD, int)) for _ in range(2)]
        await asyncio.sleep(0.0)
        with pytest.raises(Busy) as refused:
            await device.run(FORWARD, int)
        assert refused.value.backlog_s == 2.0
        await asyncio.gather(*tasks)

    run(main())


def test_close_drops_the_queue_and_waits_for_what_runs() -> None:
    async def main() -> None:
        device = SyntheticDevice(lambda kind: 1.0)
        tasks = [asyncio.create_task(device.run(FORWARD, lambda: 1)) for _ in range(3)]
        await asyncio.sleep(0.5)
        await device.close()
        assert now() == 1.0
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[0] == 1
        assert all(isinstance(r, asyncio.CancelledError) for r in results[1:])
        with pytest.raises(RuntimeError, match="closed"):
            await device.run(FORWARD, int)
        await device.close()

    run(main())


def test_the_worker_does_one_thing_at_a_time() -> None:
    async def main() -> list[tuple[int, float]]:
        worker = InlineWorker(2.0)

        async def work(i: int) -> tuple[int, float]:
            return await worker.run(lambda: i), now()

        results = await asyncio.gather(*(work(i) for i in range(3)))
        await worker.close()
        with pytest.raises(RuntimeError, match="closed"):
            await worker.run(int)
        return results

    assert run(main()) == [(0, 2.0), (1, 4.0), (2, 6.0)]


def test_what_work_takes_besides_passes_before_its_result_is_there() -> None:
    """And before the next piece begins, whether it failed or not."""

    async def main() -> list[tuple[str, float]]:
        times = [1.0, 0.0, 3.0]
        worker = InlineWorker(0.5, lambda: times.pop(0))
        begun: list[float] = []

        def fail() -> None:
            begun.append(loop.time())
            raise ValueError("bad")

        async def work(name: str) -> tuple[str, float]:
            with pytest.raises(ValueError, match="bad"):
                await worker.run(fail)
            return name, now()

        loop = asyncio.get_running_loop()
        results = await asyncio.gather(*(work(name) for name in "abc"))
        assert begun == [0.5, 2.0, 2.5]
        return results

    assert run(main()) == [("a", 1.5), ("b", 2.0), ("c", 5.5)]


def test_work_that_is_not_wanted_any_more_takes_no_time() -> None:
    async def main() -> None:
        device = SyntheticDevice(lambda kind: 1.0)
        loop = asyncio.get_running_loop()
        wanted = [True] * 3

        def check(i: int) -> None:
            if not wanted[i]:
                raise ValueError(i)

        jobs = [
            loop.create_task(device.run(OTHER, lambda i=i: i, 0, lambda i=i: check(i)))  # type: ignore[misc]
            for i in range(3)
        ]
        await asyncio.sleep(0.5)
        wanted[1] = False
        assert await jobs[0] == 0
        with pytest.raises(ValueError, match="1"):
            await jobs[1]
        assert await jobs[2] == 2
        assert loop.time() == pytest.approx(2.0)
        assert device.busy_s == pytest.approx(2.0)

    run(main())
