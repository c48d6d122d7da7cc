"""Measures a copy from one device to another, and products of matrices on the first. Started by
`cards`; gives what it found to its output as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch

import swarmnet.training.accelerators as accelerators
from swarmnet.training.computing import DTYPES

COPIED_BYTES = 1 << 26
SMALLEST, LARGEST = 256, 8192
"""Rows of a product."""
LONG_ENOUGH_S = 0.005
"""For a product: what starts it does not count then."""
REPEATS = 5


def least_s(work: Callable[[], object], *devices: torch.device) -> float:
    """The fastest of some repeats, after one that does not count."""
    found = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        work()
        for device in devices:
            accelerators.wait_for(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def main(first: torch.device, second: torch.device, precision: str) -> None:
    dtype = DTYPES.get(precision)
    if dtype is None:  # what suits the device
        has_bf16 = first.type != accelerators.CPU and accelerators.computes_in(
            first, torch.bfloat16
        )
        dtype = torch.bfloat16 if has_bf16 else torch.float32
    here = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=first)
    there = torch.empty_like(here, device=second)
    copy_s = least_s(lambda: there.copy_(here), first, second)
    size = SMALLEST
    while True:
        matrix = torch.ones(size, size, dtype=dtype, device=first)
        product_s = least_s(lambda m=matrix: m @ m, first)  # type: ignore[misc]
        if product_s > LONG_ENOUGH_S or size >= LARGEST:
            break
        size *= 2
    found = {
        "copied_per_s": COPIED_BYTES / copy_s,
        "flops_per_s": 2 * size**3 / product_s,
        "number_bytes": dtype.itemsize,
    }
    os.write(1, json.dumps(found).encode())  # a pipe to `cards`


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3])
