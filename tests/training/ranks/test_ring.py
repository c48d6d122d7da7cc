"""Causal attention over a sequence that lies on several ranks is that of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from swarmnet.training.attention import blocks, windows
from swarmnet.training.ranks.ring import Ring, part_of_rank, whole
from swarmnet.training.ranks.tensor_parallel import Region
from swarmnet.training.ranks.zigzag import Zigzag
from tests.training.ranks.test_tensor_parallel import close
from tests.training.ranks.threads import TIMEOUT_S


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [10, 11, 16, 37])
def test_each_position_is_of_one_rank_and_their_work_is_alike(length: int, num_ranks: int) -> None:
    zigzag = Zigzag(length, num_ranks)
    positions = [
        [*range(length)[a], *range(length)[b]] for a, b in map(zigzag.pieces, range(num_ranks))
    ]
    assert sorted(p for mine in positions for p in mine) == list(range(length))
    assert [len(mine) for mine in positions] == [zigzag.size(r) for r in range(num_ranks)]
    assert max(map(len, positions)) == zigzag.largest
    work = [sum(p + 1 for p in mine) for mine in positions]
    assert max(work) - min(work) <= 2 * length
    for rank, queries in enumerate(positions):
        for other, keys in enumerate(positions):
            rows, columns = zigzag.seen(rank, other)
            seen = {(q, k) for q in queries[rows] for k in keys[columns] if k <= q or other != rank}
            assert seen == {(q, k) for q in queries for k in keys if k <= q}, (
                "a query sees a later key, or one that is not shown"
            )
            for window in (1, 3, length):
                rows, columns = zigzag.seen_in_window(rank, other, window)
                near = {(q, k) for q in queries for k in keys if 0 <= q - k < window}
                assert {q for q, _ in near} <= set(queries[rows])
                assert {k for _, k in near} <= set(keys[columns])
                assert bool(near) == (rows.start < rows.stop) == (columns.start < columns.stop)


def on_threads(num_ranks: int, work: Callable[[Region], Any]) -> list[Any]:
    """What the ranks make, each a thread."""
    store, found = dist.HashStore(), [None] * num_ranks

    def of_rank(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=TIMEOUT_S))
        found[rank] = work(Region(group, rank, num_ranks))

    threads = [threading.Thread(target=of_rank, args=(r,)) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return found


def documents(samples: int, length: int, part: float) -> Tensor:
    """Numbers of documents; so large a part of the positions begin one."""
    begins = torch.rand(samples, length) < part
    begins[:, 0] = True
    return begins.cumsum(dim=1)


def capped(cap: float) -> Callable[..., Tensor]:
    """Torch's attention with a mask, whose scores are capped."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **_: Any) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        return ((scores / cap).tanh() * cap + attn_mask).softmax(dim=-1) @ v

    return attend


@pytest.mark.parametrize(
    ("num_ranks", "length", "num_kv_heads", "part", "window", "cap"),
    [
        (2, 64, 4, 0.0, 0, 0.0),
        (2, 67, 2, 0.1, 0, 0.0),
        (3, 67, 1, 0.1, 0, 0.0),
        (4, 16, 2, 0.4, 0, 0.0),
        (5, 101, 2, 0.02, 0, 0.0),
        (2, 64, 4, 0.0, 5, 0.0),
        (3, 67, 1, 0.1, 20, 0.0),
        (4, 101, 2, 0.0, 40, 0.0),
        (5, 101, 2, 0.02, 2, 0.0),
        (2, 67, 2, 0.0, 66, 0.0),
        (2, 67, 2, 0.0, 0, 0.5),
        (3, 67, 1, 0.1, 0, 0.2),
        (4, 101, 2, 0.02, 40, 1.0),
    ],
)
def test_a_ring_attends_as_one_does(
    num_ranks: int,
    length: int,
    num_kv_heads: int,
    part: float,
    window: int,
    cap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With documents, windows, caps of scores, lengths that do not divide, and fewer key/value
    heads."""
    monkeypatch.setattr(windows, "ROWS", 7)
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 11)
    torch.manual_seed(num_ranks)
    q, k, v, grad = (torch.randn(2, length, n, 8) for n in (4, num_kv_heads, num_kv_heads, 4))
    of, mask = None, None
    sees = torch.ones(2, length, length, dtype=torch.bool).tril()
    if window:
        sees = sees.triu(1 - window)
    if part:
        of = documents(2, length, part)
        sees &= of.unsqueeze(2) == of.unsqueeze(1)
    if part or window or cap:
        mask = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf).unsqueeze(1)
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    attend = capped(cap) if cap else F.scaled_dot_product_attention
    out = attend(
        *(x.transpose(1, 2) for x in wanted),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    ).transpose(1, 2)
    out.backward(grad)
    zigzag = Zigzag(length, num_ranks)

    def work(region: Region) -> list[Tensor]:
        ring = Ring(zigzag, region, of)
        here = [part_of_rank(zigzag, region.rank, x) for x in (q, k, v, grad)]
        mine = [x.requires_grad_() for x in here[:3]]
        found = ring.attend(*mine, window, cap)
        found.backward(here[3])
        parts = (found.detach(), *(x.grad for x in mine))
        return [whole(zigzag, region, x) for x in parts if x is not None]

    for made in on_threads(num_ranks, work):
        for ours, theirs in zip(made, (out.detach(), *(x.grad for x in wanted)), strict=True):
            assert theirs is not None
            close(ours, theirs)


@pytest.mark.parametrize(("window", "expected"), [(0, 3), (1, 0), (4, 2), (30, 3), (64, 3)])
def test_ranks_that_are_out_of_a_window_send_nothing(
    window: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks with pieces of eight positions, each has neighbours on two."""
    sizes: list[int] = []
    exchange = dist.ProcessGroupGloo.alltoall_base

    def counted(self: Any, came: Tensor, *rest: Any) -> Any:
        sizes.append(came.numel())
        return exchange(self, came, *rest)

    monkeypatch.setattr(dist.ProcessGroupGloo, "alltoall_base", counted)

    def work(region: Region) -> None:
        q, k, v = (torch.randn(2, 16, n, 8) for n in (4, 2, 2))
        Ring(Zigzag(64, 4), region).attend(q, k, v, window)

    on_threads(4, work)
    assert len(sizes) == 4 * expected
    if window == 4:  # three positions before a piece, of one neighbour or the other
        assert sum(sizes) == 6 * 3 * (2 * 2 * 2 * 8)


@pytest.mark.parametrize("sees_some", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_what_other_devices_compute_is_what_the_fused_kernel_does(
    is_own: bool, sees_some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that see nothing are among them."""
    torch.manual_seed(1)
    num_queries, num_keys = 21, 21 if is_own else 13
    q, grad = torch.randn(2, num_queries, 4, 8), torch.randn(2, num_queries, 4, 8)
    k, v = torch.randn(2, num_keys, 2, 8), torch.randn(2, num_keys, 2, 8)
    sees = None
    if sees_some:
        sees = torch.rand(2, num_queries, num_keys) < 0.3
        sees[:, 3] = False
    of: dict[str, Any] = {"sees_BLM": sees, "is_causal": is_own and sees is None}
    made = []
    for rows in (0, 5):
        if rows:
            monkeypatch.setattr(blocks, "ROWS_AT_ONCE", rows)
            monkeypatch.setattr(blocks, "FUSED", ())
        out, lse = blocks.attend(q, k, v, **of)
        if sees is not None:
            assert not out[:, 3].any()
            assert (lse[:, :, 3] == -torch.inf).all()
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        made.append([out, finite, *blocks.attend_back(grad, q, k, v, out, finite, **of)])
    for ours, theirs in zip(*made, strict=True):
        close(ours, theirs)
