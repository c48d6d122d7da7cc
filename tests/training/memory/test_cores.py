"""Vectors are worked on part by part, by helpers too, and the result does not show by whom."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from swarmnet.training import cores
from swarmnet.training.arrays import sum_of_squares
from swarmnet.training.cores import GRAIN, LEAST_SHARED, MOST_HELPERS, Cores, scratch

PART = 8


def use_threads(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Cores:
    """Four cores, and short parts."""
    monkeypatch.setattr(cores, "PART", PART)
    monkeypatch.setattr(cores, "LEAST_SHARED", 0)
    use_threads(monkeypatch, 4)
    return Cores()


def test_every_number_is_worked_on_once(four: Cores) -> None:
    for size in (0, 1, PART, PART + 1, 10 * PART + 3):
        seen = torch.zeros(size)

        def work(part: slice, seen: torch.Tensor = seen) -> None:
            seen[part] += 1

        four.over(size, work)
        assert torch.equal(seen, torch.ones(size))


def test_helpers_work_together_and_not_while_the_device_does(four: Cores) -> None:
    names, together = set[str](), threading.Barrier(4, timeout=10)
    me = threading.current_thread().name

    def work(part: slice) -> None:
        together.wait()  # four at a time
        names.add(threading.current_thread().name)

    four.over(4 * PART, work)
    assert len(names) == 4
    assert me not in names
    alone = set[str]()
    with four.pass_at_work():
        assert four.num_helpers == 0
        four.over(40 * PART, lambda _: alone.add(threading.current_thread().name))
    assert alone == {me}
    assert four.num_helpers == 4


def test_helpers_begin_no_part_beside_a_pass_and_the_caller_goes_on(four: Cores) -> None:
    names, device = list[str](), four.pass_at_work()
    both, lock = threading.Barrier(2, timeout=10), threading.Lock()

    def work(part: slice) -> None:
        with lock:
            names.append(threading.current_thread().name)
            is_second = len(names) == 2
        if len(names) <= 2:
            if is_second:
                device.__enter__()  # the device gets a pass while two helpers are at work
            both.wait()

    four.limit_share(0.5)  # two helpers
    four.over(10 * PART, work)
    device.__exit__(None, None, None)
    assert len(set(names[:2])) == 2
    assert set(names[2:]) == {threading.current_thread().name}
    assert len(names) == 10


def test_parts_are_fair_and_short_vectors_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch, 4)
    for size in (1, LEAST_SHARED - 1, LEAST_SHARED, 600_000, 10 * cores.PART + 1):
        parts, names = list[slice](), set[str]()

        def work(part: slice, parts: list[slice] = parts, names: set[str] = names) -> None:
            parts.append(part)
            names.add(threading.current_thread().name)

        Cores().over(size, work)
        assert sum(p.stop - p.start for p in parts) == size
        assert all(p.start % GRAIN == 0 and p.stop - p.start <= cores.PART for p in parts)
        assert (names == {threading.current_thread().name}) == (size < LEAST_SHARED)
        if size == LEAST_SHARED:
            assert {p.stop - p.start for p in parts} == {LEAST_SHARED // 4}


def test_a_norm_does_not_depend_on_who_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(600_001, generator=torch.Generator().manual_seed(0))
    alone = sum_of_squares(values)
    use_threads(monkeypatch, 4)
    assert {sum_of_squares(values) for _ in range(5)} == {alone}


def test_a_share_of_the_device_is_one_of_the_cores(
    four: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, num_helpers in ((None, 4), (0.75, 3), (0.5, 2), (0.3, 0), (0.1, 0)):
        four.limit_share(share)
        assert four.num_helpers == num_helpers
    four.limit_share(None)
    use_threads(monkeypatch, 100)
    assert four.num_helpers == MOST_HELPERS


def test_an_operation_of_a_helper_has_one_thread() -> None:
    """And those of other threads as many as before, also of threads that come later."""
    script = """
import threading, torch
from swarmnet.training import cores
torch.set_num_threads(3)
found = []
cores.CORES.over(8 * cores.PART, lambda _: found.append(torch.get_num_threads()))
later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
later.start()
later.join()
print(set(found[:-1]), found[-1], torch.get_num_threads())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "{1} 3 3"


def test_operations_of_the_device_alone_have_threads() -> None:
    """Also of a device that comes later; where none is left, all is as before."""
    script = """
import asyncio, threading, torch
from swarmnet.training.cores import CORES
from swarmnet.training.device import DeviceThread, WorkerThread
torch.set_num_threads(3)

def of_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]

async def main():
    worker, device = WorkerThread(), DeviceThread()
    for _ in range(2):
        print(
            await device.run("other", torch.get_num_threads),
            await worker.run(torch.get_num_threads),
            torch.get_num_threads(),
            of_new_thread(),
            CORES.num_helpers,
        )
        torch.ones(100_000).exp()
        await device.run("other", torch.ones(100_000).exp)
    second = DeviceThread()
    await device.close()
    print(await second.run("other", torch.get_num_threads), torch.get_num_threads())
    await second.close()
    await second.close()
    apart = DeviceThread(has_cores=False)
    print(await apart.run("other", torch.get_num_threads), torch.get_num_threads())
    await apart.close()
    await worker.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["3 1 1 1 3", "3 1 1 1 3", "3 1", "3 3"]


def test_rows_of_a_product_are_shared(four: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    names, mm = set[str](), torch.mm

    def named(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        names.add(threading.current_thread().name)
        return mm(*args, out=out)

    monkeypatch.setattr(torch, "mm", named)
    for rows in (1, 3, 4, 257):
        a, b = torch.randn(rows, 40, generator=generator), torch.randn(40, 30, generator=generator)
        torch.testing.assert_close(four.product(a, b), a @ b)
    assert threading.current_thread().name in names  # a single row
    names.clear()
    monkeypatch.setattr(cores, "LEAST_SHARED", 10_000)
    four.product(a, b[:, :10])
    assert names == {threading.current_thread().name}


def test_what_work_raises_is_raised_and_nothing_runs_on(four: Cores) -> None:
    running = set[int]()

    def work(part: slice) -> None:
        running.add(part.start)
        try:
            if part.start == 3 * PART:
                raise ValueError("bad part")
        finally:
            running.discard(part.start)

    for _ in range(20):
        with pytest.raises(ValueError, match="bad part"):
            four.over(50 * PART, work)
        assert not running


def test_a_vector_that_cannot_be_cut_is_one_part(four: Cores) -> None:
    parts = list[slice]()
    four.over(5 * PART, parts.append, in_parts=False)
    assert parts == [slice(0, 5 * PART)]


def test_scratch_is_of_a_thread_and_a_name() -> None:
    ours = scratch("a", torch.empty(5))
    assert scratch("a", torch.empty(3)).data_ptr() == ours.data_ptr()
    assert scratch("b", torch.empty(5)).data_ptr() != ours.data_ptr()
    theirs = list[int]()
    thread = threading.Thread(target=lambda: theirs.append(scratch("a", torch.empty(5)).data_ptr()))
    thread.start()
    thread.join()
    assert theirs != [ours.data_ptr()]
    assert scratch("a", torch.empty(cores.PART + 1)).numel() == cores.PART + 1


def test_pieces_are_worked_on_side_by_side_each_by_one_thread(four: Cores) -> None:
    together, names = threading.Barrier(4, timeout=10), list[set[str]]()

    def piece() -> None:
        together.wait()  # four at a time
        own = {threading.current_thread().name}
        four.over(10 * PART, lambda _: own.add(threading.current_thread().name))
        names.append(own)

    four.side_by_side([piece] * 8)
    assert [len(own) for own in names] == [1] * 8, "helpers wait for no helpers"
    assert len(set.union(*names)) == 4


def test_a_piece_that_fails_is_heard_of(four: Cores) -> None:
    def piece() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        four.side_by_side([piece] * 8)
    with four.pass_at_work(), pytest.raises(ValueError, match="no"):
        four.side_by_side([piece] * 8)
    four.side_by_side([])
