"""The device thread: order, results, errors, cancellation, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from swarmnet.errors import Busy, NotReady
from swarmnet.ports import BACKWARD, FORWARD, OTHER
from swarmnet.training import device as device_module
from swarmnet.training.device import DeviceThread, WorkerThread


class Gate:
    """Holds the device until it is opened."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.opened.wait(30)


async def hold(device: DeviceThread) -> tuple[Gate, asyncio.Task[None]]:
    gate = Gate()
    task = asyncio.create_task(device.run(OTHER, gate))
    await asyncio.to_thread(gate.started.wait, 30)
    return gate, task


def noting(order: list[str], name: str) -> Callable[[], str]:
    def work() -> str:
        order.append(name)
        return name

    return work


@pytest.mark.parametrize("as_seat", [False, True])
def test_the_earliest_round_first(as_seat: bool) -> None:
    async def main() -> None:
        thread = DeviceThread()
        device = thread.seat() if as_seat else thread
        gate, held = await hold(thread)
        order: list[str] = []
        jobs = [(FORWARD, 2), (BACKWARD, 2), (OTHER, 1), (FORWARD, 1), (BACKWARD, 1)]
        tasks = [
            asyncio.create_task(device.run(kind, noting(order, f"{kind} {turn}"), turn))
            for kind, turn in jobs
        ]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*tasks, held)
        assert order == ["backward 1", "forward 1", "other 1", "backward 2", "forward 2"]
        await thread.close()

    asyncio.run(main())


def test_backward_first_then_forward_then_other_and_the_oldest_first() -> None:
    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        order: list[str] = []
        names = ["other 1", "forward 1", "backward 1", "forward 2", "other 2", "backward 2"]
        tasks = [
            asyncio.create_task(device.run(name.split()[0], noting(order, name))) for name in names
        ]
        await asyncio.sleep(0)
        assert device.num_waiting == 7
        gate.opened.set()
        assert await asyncio.gather(*tasks) == names
        await held
        assert order == [
            "backward 1",
            "backward 2",
            "forward 1",
            "forward 2",
            "other 1",
            "other 2",
        ]
        assert device.num_waiting == 0
        await device.close()

    asyncio.run(main())


def test_work_runs_on_one_thread_that_is_not_the_loop() -> None:
    async def main() -> None:
        device, worker = DeviceThread(), WorkerThread()
        idents = {await device.run(kind, threading.get_ident) for kind in (BACKWARD, FORWARD)}
        assert len(idents) == 1
        other = await worker.run(threading.get_ident)
        assert len({*idents, other, threading.get_ident()}) == 3
        await device.close()
        await worker.close()

    asyncio.run(main())


def test_errors_reach_who_asked_and_the_device_goes_on() -> None:
    async def main() -> None:
        device = DeviceThread()

        def fail(error: BaseException) -> None:
            raise error

        for error in (ValueError("no"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                # a task would let KeyboardInterrupt stop the loop; the coroutine itself does not
                await device.run(FORWARD, lambda error=error: fail(error))  # type: ignore[misc]
        with pytest.raises(RuntimeError, match="StopIteration"):
            await device.run(FORWARD, lambda: next(iter(())))
        assert await device.run(FORWARD, lambda: 5) == 5
        assert device.num_waiting == 0
        await device.close()

    asyncio.run(main())


def test_cancelled_work_that_has_not_started_never_runs() -> None:
    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        order: list[str] = []
        tasks = [
            asyncio.create_task(device.run(FORWARD, noting(order, name)))
            for name in ("a", "b", "c")
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert device.num_waiting == 3
        gate.opened.set()
        await asyncio.gather(held, tasks[0], tasks[2])
        assert order == ["a", "c"]
        assert device.num_waiting == 0
        await device.close()

    asyncio.run(main())


def test_a_pass_waits_for_passes_of_its_turn_and_for_all_of_earlier_ones() -> None:
    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        kinds = [(OTHER, 1), (OTHER, 2), (BACKWARD, 2), (FORWARD, 2), (OTHER, 3), (FORWARD, 3)]
        tasks = [asyncio.create_task(device.run(k, lambda: None, turn)) for k, turn in kinds]
        await asyncio.sleep(0)
        assert [device.waiting_until(turn) - 1 for turn in range(5)] == [0, 0, 3, 5, 6]
        assert device.num_waiting == 7
        gate.opened.set()
        await asyncio.gather(held, *tasks)
        await device.close()

    asyncio.run(main())


def test_cancelled_work_that_has_started_finishes_unheard() -> None:
    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        assert device.num_waiting == 1
        gate.opened.set()
        assert await device.run(OTHER, lambda: "next") == "next"
        assert device.num_waiting == 0
        await device.close()

    asyncio.run(main())


def test_closing_refuses_what_waits_and_what_comes_later() -> None:
    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        waiting = asyncio.create_task(device.run(FORWARD, lambda: None))
        await asyncio.sleep(0)
        closing = asyncio.create_task(device.close())
        with pytest.raises(NotReady):
            await waiting
        gate.opened.set()
        await held
        await closing
        with pytest.raises(NotReady):
            await device.run(FORWARD, lambda: None)
        await device.close()
        assert device.num_waiting == 0

    asyncio.run(main())


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "MAX_WAITING", 2)

    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        waiting = asyncio.create_task(device.run(FORWARD, lambda: None))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await device.run(BACKWARD, lambda: None)
        gate.opened.set()
        await asyncio.gather(held, waiting)
        await device.close()

    asyncio.run(main())


def test_busy_time_grows_with_work_and_nothing_of_it_is_kept() -> None:
    class Tensor:
        pass

    async def main() -> None:
        device = DeviceThread()
        assert device.busy_s == 0.0
        value = Tensor()
        alive = weakref.ref(value)
        await device.run(FORWARD, lambda value=value: sum(range(1000)) and None)  # type: ignore[misc]
        assert device.busy_s > 0.0
        del value
        await device.run(OTHER, lambda: None)
        gc.collect()
        assert alive() is None
        await device.close()

    asyncio.run(main())


def test_a_capped_share_is_kept_by_resting_and_counts_as_work() -> None:
    async def main() -> None:
        device = DeviceThread()
        thread = await device.run(FORWARD, threading.current_thread)
        device.limit_share(0.25)
        began = time.perf_counter()
        for _ in range(4):
            await device.run(FORWARD, lambda: time.sleep(0.02))
        elapsed_s = time.perf_counter() - began
        assert elapsed_s >= 3 * 0.02 / 0.25 + 0.02, "it rests between any two pieces of work"
        assert device.busy_s >= 4 * 0.02 / 0.25, "whoever measures its speed finds it slower"
        device.limit_share(1e-6)  # a minute's rest, which is the longest
        await device.run(FORWARD, lambda: time.sleep(0.02))
        async with asyncio.timeout(30):
            await device.close()
        assert not thread.is_alive(), "closing does not wait for the rest"

    asyncio.run(main())


def test_seats_of_a_device_have_clocks_of_their_own() -> None:
    async def main() -> None:
        device = DeviceThread()
        one, other = device.seat(), device.seat()
        await one.run(FORWARD, lambda: time.sleep(0.02))
        assert one.busy_s >= 0.02
        assert other.busy_s == 0
        assert device.busy_s == one.busy_s
        await asyncio.gather(
            other.run(FORWARD, lambda: time.sleep(0.01)), one.run(BACKWARD, lambda: None)
        )
        assert other.busy_s >= 0.01
        assert device.busy_s == pytest.approx(one.busy_s + other.busy_s)
        value, worked_s = await one.timed(FORWARD, lambda: time.sleep(0.01) or 7)  # type: ignore[func-returns-value]
        assert value == 7
        assert 0.01 <= worked_s < one.busy_s
        await one.close()  # not its to close
        assert await other.run(FORWARD, lambda: 5) == 5
        await device.close()

    asyncio.run(main())


def test_work_that_is_not_wanted_any_more_is_not_begun() -> None:
    async def main() -> None:
        device = DeviceThread()
        gate, held = await hold(device)
        order: list[str] = []
        wanted = [True]

        def check() -> None:
            if not wanted[0]:
                raise ValueError("not wanted")

        job = asyncio.create_task(device.run(FORWARD, noting(order, "work"), 0, check))
        await asyncio.sleep(0)
        wanted[0] = False
        gate.opened.set()
        with pytest.raises(ValueError, match="not wanted"):
            await job
        await held
        assert not order
        await device.close()

    asyncio.run(main())
