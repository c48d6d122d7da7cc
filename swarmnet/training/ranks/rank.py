"""The process of a rank other than 0: does what rank 0 says, and ends with it.

Started by `local_group`; nobody else runs it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from swarmnet.errors import SwarmnetError
from swarmnet.training.processes.frames import Link, live


def serve(link: Link, rank: int) -> None:
    """Does the calls of rank 0 until it closes the link."""
    number = 0
    calls: dict[str, Callable[..., None]] = {}
    while True:
        call, values, arrays, fd = link.receive()
        number += 1
        is_refused = False
        if call == "start":
            calls = _start(rank, **values)
        else:
            try:
                calls[call](values, arrays, fd)
            except (SwarmnetError, ValueError):  # rank 0 raises the same to whoever asked
                is_refused = True
        link.answer(number, is_refused)


def _start(
    rank: int,
    *,
    num_ranks: int,
    devices: list[str],
    threads: int,
    timeout_s: float,
    store: str,
    options: dict[str, Any],
) -> dict[str, Callable[..., None]]:
    import torch

    from swarmnet.training.ranks.local_group import open_process_group

    if threads:
        torch.set_num_threads(threads)
    device = torch.device(devices[rank])
    if options.get("mode") == "fsdp":
        from swarmnet.training.ranks.fsdp import follow as follow_fsdp

        return follow_fsdp(rank, num_ranks, device, store, timeout_s, options)
    row_size = options.get("row_size", 1)
    group = open_process_group(device, store, rank, num_ranks, timeout_s, row_size)
    return following_of(options)(group, rank, num_ranks, device, options)


def following_of(options: Mapping[str, Any]) -> Callable[..., dict[str, Callable[..., None]]]:
    """What makes the calls of a rank, by what the ranks divide: `options` of `rank_options`."""
    from swarmnet.training.ranks import (
        context_parallel_stage,
        expert_stage,
        tensor_parallel_stage,
    )
    from swarmnet.training.ranks.rows import row_stage

    if options.get("row_size", 1) > 1:
        return row_stage.follow
    mode = options.get("mode", "")
    known = {"context": context_parallel_stage, "experts": expert_stage}
    return known.get(mode, tensor_parallel_stage).follow


if __name__ == "__main__":
    FD, RANK, PARENT = (int(word) for word in sys.argv[1:4])
    live(FD, PARENT, functools.partial(serve, rank=RANK))
