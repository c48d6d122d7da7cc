from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import Busy
from swarmnet.ports import BACKWARD, FORWARD, OTHER, REST, Passage
from swarmnet.simulation.clock import run
from swarmnet.simulation.coding import PassCoding
from swarmnet.simulation.device import InlineWorker, SyntheticDevice

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


# ---- a coder beside the device ------------------------------------------------------------------


def passage(name: str, log: list[tuple[str, float]] | None = None) -> Passage[str]:
    """`log` gets when it was computed."""
    loop = asyncio.get_running_loop()

    def compute(came: str) -> str:
        if log is not None:
            log.append((name, loop.time()))
        return came

    return Passage(lambda: name, compute, lambda done: done)


async def end(device: SyntheticDevice, work: Passage[str]) -> tuple[str, float, float]:
    """What it gives, when, and how long the device took."""
    result, took_s = await device.timed(FORWARD, work)
    return result, now(), took_s


def test_one_is_computed_while_the_next_is_decoded_and_the_last_is_coded() -> None:
    """Only the first one's decoding and the last one's coding cannot be hidden."""

    async def main() -> list[tuple[str, float, float]]:
        device = SyntheticDevice(lambda _: 2.0, lambda _: PassCoding(1.0, 1.0))
        ends = await asyncio.gather(*(end(device, passage(x)) for x in "abcd"))
        assert device.busy_s == 9.0
        return ends

    assert run(main()) == [("a", 4.0, 3.0), ("b", 6.0, 2.0), ("c", 8.0, 2.0), ("d", 10.0, 2.0)]


def test_the_device_is_one_passage_ahead_of_the_coder_at_most() -> None:
    async def main() -> tuple[list[float], list[tuple[str, float]]]:
        log: list[tuple[str, float]] = []
        device = SyntheticDevice(lambda _: 1.0, lambda _: PassCoding(0.0, 5.0))
        tasks = [asyncio.create_task(end(device, passage(x, log))) for x in "abcd"]
        await asyncio.sleep(2.5)
        assert device.num_waiting == 4, "nothing has left yet"
        ends = await asyncio.gather(*tasks)
        assert device.num_waiting == 0
        assert device.busy_s == 4.0
        return [at for _, at, _ in ends], log

    ends, log = run(main())
    assert ends == [6.0, 11.0, 16.0, 21.0]
    assert log == [("a", 1.0), ("b", 2.0), ("c", 7.0), ("d", 12.0)]


def test_the_device_decodes_what_the_coder_has_not_begun_and_waits_for_what_it_has() -> None:
    async def main() -> list[float]:
        device = SyntheticDevice(lambda _: 1.0, lambda _: PassCoding(3.0, 4.0))
        other = asyncio.create_task(device.run(OTHER, lambda: None))
        first = asyncio.create_task(end(device, passage("a")))  # decoded from 0 to 3 by the coder
        await asyncio.sleep(5.0)
        second = asyncio.create_task(end(device, passage("b")))  # the coder codes "a" from 4 to 8
        await other
        return [at for _, at, _ in await asyncio.gather(first, second)]

    assert run(main()) == [8.0, 13.0]


def test_other_work_and_failed_passages_need_no_coder() -> None:
    async def main() -> None:
        device = SyntheticDevice(lambda _: 1.0, lambda _: PassCoding(1.0, 1.0))

        def fail(_: object = None) -> str:
            raise ValueError("bad")

        assert (await device.timed(OTHER, lambda: 3), now()) == ((3, 1.0), 1.0)
        with pytest.raises(ValueError, match="bad"):
            await device.run(FORWARD, Passage(lambda: "", fail, str))
        assert now() == 3.0
        with pytest.raises(ValueError, match="bad"):
            await device.run(FORWARD, Passage(lambda: "", str, fail))
        assert now() == 6.0
        assert device.num_waiting == 0

    run(main())


def test_results_come_in_the_order_of_the_work() -> None:
    """Who hears that a round is closed has heard of every microbatch in its gradient."""

    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        device = SyntheticDevice(lambda _: 1.0, lambda _: PassCoding(0.0, 5.0))
        heard: list[tuple[str, float]] = []

        async def hear(name: str, kind: str, work: Callable[[], object]) -> float:
            result = await device.run(kind, work)
            heard.append((name, now()))
            return result if isinstance(result, float) else 0.0

        passages = (hear(x, FORWARD, passage(x)) for x in "ab")
        *_, closed_at = await asyncio.gather(*passages, hear("close", OTHER, loop.time))
        assert closed_at == 7.0, "the device itself does not wait"
        return heard

    assert run(main()) == [("a", 6.0), ("b", 11.0), ("close", 11.0)]


def test_closing_waits_for_what_the_coder_has_to_end() -> None:
    async def main() -> None:
        device = SyntheticDevice(lambda _: 1.0, lambda _: PassCoding(0.0, 5.0))
        tasks = [asyncio.create_task(end(device, passage(x))) for x in "abc"]
        await asyncio.sleep(1.5)
        await device.close()
        assert now() == 11.0, "what is computed is coded: two passages"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r[0] for r in results[:2]] == ["a", "b"]  # type: ignore[index]
        assert isinstance(results[2], asyncio.CancelledError)

    run(main())


def test_a_machine_that_stands_still_neither_computes_nor_codes() -> None:
    async def main() -> list[float]:
        until = [10.0]
        device = SyntheticDevice(
            lambda _: 2.0, lambda _: PassCoding(1.0, 1.0), lambda: max(0.0, until[0] - now())
        )
        ends = [(await end(device, passage("a")))[1]]
        until[0] = 20.0
        return [*ends, (await end(device, passage("b")))[1]]

    assert run(main()) == [14.0, 24.0]


PARTS = st.integers(0, 8)


@given(st.lists(st.tuples(PARTS, PARTS, PARTS), min_size=1, max_size=12))
def test_passages_are_never_done_sooner_than_the_bound_nor_later_than_in_turn(
    parts: list[tuple[int, int, int]],
) -> None:
    """Seconds to arrive, to be computed and to depart, of passages that are all there at once."""

    async def main() -> float:
        computing = iter([compute_s for _, compute_s, _ in parts])
        coding = iter([PassCoding(arrive_s, depart_s) for arrive_s, _, depart_s in parts])
        device = SyntheticDevice(lambda _: next(computing), lambda _: next(coding))
        names = [str(i) for i in range(len(parts))]
        ends = await asyncio.gather(*(end(device, passage(name)) for name in names))
        assert [name for name, _, _ in ends] == names
        assert device.num_waiting == 0
        return now()

    arrive_s, compute_s, depart_s = (sum(seconds) for seconds in zip(*parts, strict=True))
    all_s = arrive_s + compute_s + depart_s
    took_s = run(main())
    assert max(compute_s, depart_s, all_s / 2) - 1e-6 <= took_s <= all_s + 1e-6


@pytest.mark.parametrize(
    ("most_owed", "passes"), [(9, [1.0, 2.0, 3.0]), (1, [1.0, 4.0, 7.0]), (2, [1.0, 2.0, 5.0])]
)
def test_what_passes_have_left_is_done_when_none_waits_or_too_much_is_owed(
    most_owed: int, passes: list[float]
) -> None:
    async def main() -> list[tuple[str, float]]:
        device = SyntheticDevice(lambda _: 1.0, most_owed=lambda: most_owed)
        log: list[tuple[str, float]] = []

        def with_rest(name: str) -> Passage[str]:
            left = iter([True, False])  # two parts of a second each
            return replace(passage(name, log), rest=lambda: next(left))

        other = asyncio.create_task(end_of_other(device))
        tasks = [asyncio.create_task(end(device, with_rest(x))) for x in "abc"]
        await asyncio.sleep(0.0)
        assert device.num_waiting == 4
        ends = await asyncio.gather(*tasks)
        assert [at - 1.0 for _, at, _ in ends] == passes, "the first second is of other work"
        await other
        while device.busy_s < 10.0:
            assert device.num_waiting == 0
            await asyncio.sleep(0.5)
        last = await end(device, passage("d", log))
        assert last[1:] == (11.0, 1.0)
        assert (await end(device, with_rest("e")))[2] == 1.0 + 6.0 / 3.0
        return log

    assert [name for name, _ in run(main())] == list("abcde")


async def end_of_other(device: SyntheticDevice) -> None:
    await device.run(OTHER, lambda: None)


def test_other_work_waits_for_what_passes_have_left() -> None:
    """Who reads the sum after it finds it whole."""

    async def main() -> None:
        device, done = SyntheticDevice(SECONDS_WITH_REST.__getitem__, most_owed=lambda: 5), []
        left, loop = iter([True, True, False]), asyncio.get_running_loop()

        def rest() -> bool:
            done.append(loop.time())
            return next(left)

        async def read() -> None:
            await device.run(OTHER, lambda: done.append("read"))

        await asyncio.gather(end(device, replace(passage("a"), rest=rest)), read())
        assert done == [1.25, 1.5, 1.75, "read"]

    run(main())


SECONDS_WITH_REST = {**SECONDS, REST: 0.25}
