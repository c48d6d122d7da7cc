"""Attention to a sequence over a machine's ranks in two ways: the ring of `--cp`, and Ulysses.

    python benchmarks/sequence_ways.py [--ranks 2 4] [--lengths 2048 8192] [--repeat 5]

Ulysses (Jacobs et al., 2023, arXiv 2309.14509) is written down here and nowhere else: an all-to-all
gives each rank all positions of a part of the heads, and another one brings its output back. Both
ways attend, forward and backward, to one sequence of 8 heads of 32 numbers, with 8 or 2 heads for
keys and values, fp32. Ranks are processes with one thread each, joined by gloo, and take turns with
the two ways. Medians of the CPU seconds of the rank that takes most (what a busy machine changes
little), of the seconds by the clock, and the MB that a rank sends in both passes, by formula.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from swarmnet.training.ranks.ring import Ring
from swarmnet.training.ranks.tensor_parallel import Region
from swarmnet.training.ranks.zigzag import Zigzag

HEADS, SIZE, SAMPLES = 8, 32, 1
KV_HEADS = (8, 2)
TIMEOUT = timedelta(minutes=5)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AllToAll(torch.autograd.Function):
    """(ranks, ...) to (ranks, ...): part i goes to rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, came = group, torch.empty_like(x)
        group.alltoall_base(came, x, [], [], dist.AllToAllOptions()).wait()
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return AllToAll.apply(grads[0].contiguous(), ctx.group), None


def ulysses(group: Any, num_ranks: int) -> Attend:
    """Of positions in their order, a block a rank."""

    def to_heads(x_BLHE: Tensor) -> Tensor:
        batch, here, heads, size = x_BLHE.shape
        parts = x_BLHE.view(batch, here, num_ranks, heads // num_ranks, size)
        came = AllToAll.apply(parts.permute(2, 0, 1, 3, 4).contiguous(), group)
        return came.transpose(0, 1).reshape(batch, num_ranks * here, -1, size)

    def to_positions(x_BSHE: Tensor) -> Tensor:
        batch, length, heads, size = x_BSHE.shape
        parts = x_BSHE.view(batch, num_ranks, length // num_ranks, heads, size)
        came = AllToAll.apply(parts.transpose(0, 1).contiguous(), group)
        return came.permute(1, 2, 0, 3, 4).reshape(batch, length // num_ranks, -1, size)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (to_heads(x).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return to_positions(out.transpose(1, 2))

    return attend


def sent_mb(way: str, length: int, num_ranks: int, kv_heads: int) -> float:
    """Of a rank, both passes."""
    numbers, width = 2 * kv_heads * SIZE, HEADS * SIZE
    if way == "ring":
        return 3 * 3 * SAMPLES * length * numbers * (num_ranks - 1) / num_ranks / 1e6
    one = 4 * SAMPLES * length * (2 * width + numbers) * (num_ranks - 1) / num_ranks**2
    return 2 * one / 1e6


def rank_of(rank: int, num_ranks: int, folder: str, options: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    group = dist.ProcessGroupGloo(store, rank, num_ranks, TIMEOUT)
    for length in options.lengths:
        ring = Ring(Zigzag(length, num_ranks), Region(group, rank, num_ranks))
        ways: dict[str, Attend] = {"ring": ring.attend, "ulysses": ulysses(group, num_ranks)}
        for kv_heads in KV_HEADS:
            if kv_heads % num_ranks:
                del ways["ulysses"]  # a rank would have a part of a head
            timed(ways, length, rank, num_ranks, kv_heads, group, options.repeat)


def timed(
    ways: dict[str, Attend],
    length: int,
    rank: int,
    num_ranks: int,
    kv_heads: int,
    group: Any,
    repeat: int,
) -> None:
    """Prints a row, on rank 0."""
    here = length // num_ranks
    generator = torch.Generator().manual_seed(rank)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    *made, grad = (torch.randn(SAMPLES, here, n, SIZE, generator=generator) for n in heads)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(repeat + 1):  # the first one warms up
        for way, attend in ways.items():
            tensors = [x.clone().requires_grad_() for x in made]
            group.barrier().wait()
            clock, cpu = time.perf_counter(), time.process_time()
            attend(*tensors).backward(grad)
            took = torch.tensor([time.process_time() - cpu, time.perf_counter() - clock])
            largest = dist.AllreduceOptions()
            largest.reduceOp = dist.ReduceOp.MAX
            group.allreduce([took], largest).wait()
            if number:
                found[way].append((float(took[0]), float(took[1])))
    if rank:
        return
    for way, values in found.items():
        cpu_s, clock_s = (statistics.median(x) for x in zip(*values, strict=True))
        sent = sent_mb(way, length, num_ranks, kv_heads)
        print(
            f"{num_ranks:6}{length:8}{kv_heads:10}{way:>9}{cpu_s:9.3f}{clock_s:9.3f}{sent:9.1f}",
            flush=True,
        )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(words)
    print(" ranks  length  kv heads      way      CPU  seconds  MB sent")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            about = num_ranks, str(Path(folder)), options
            mp.spawn(rank_of, args=about, nprocs=num_ranks)


if __name__ == "__main__":
    main()
