"""Memory is used again only when nobody can see it any more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarmnet.transport.buffers import MAX_TRIES, POOLED_BYTES, BufferPool

SIZE = POOLED_BYTES


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def test_memory_that_was_let_go_is_used_again() -> None:
    pool = BufferPool()
    view = pool.take(SIZE)
    first = address(view)
    del view
    assert address(pool.take(SIZE)) == first
    assert pool.num_bytes == SIZE


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view[10:20],
        lambda view: view.cast("f"),
        lambda view: np.frombuffer(view, dtype=np.float32)[3:],
        lambda view: torch.frombuffer(view, dtype=torch.float32)[5:].view(-1),
    ],
)
def test_memory_that_anybody_can_see_is_not(hold: object) -> None:
    pool = BufferPool()
    view = pool.take(SIZE)
    first = address(view)
    held = hold(view)  # type: ignore[operator]
    del view
    again = [pool.take(SIZE) for _ in range(3 * MAX_TRIES)]
    assert first not in [address(v) for v in again]
    del held
    assert len({address(v) for v in again}) == len(again)


def test_the_pool_is_bounded_and_what_it_forgets_lives_on() -> None:
    pool = BufferPool(max_bytes=3 * SIZE)
    held = [pool.take(SIZE) for _ in range(5)]
    held += [pool.take(2 * SIZE) for _ in range(2)]
    assert pool.num_bytes <= 3 * SIZE
    for number, view in enumerate(held):
        view[:] = bytes([number]) * len(view)
    assert [view[-1] for view in held] == list(range(7))
    assert len(pool.take(100 * SIZE)) == 100 * SIZE  # larger than the pool: not its business
    assert pool.num_bytes <= 3 * SIZE
