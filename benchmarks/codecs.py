"""Speed of the codecs: fp32 to codes and back, on one core or on a GPU.

    python benchmarks/codecs.py [--device cuda] [--repeat 9] [--json FILE]

For each codec and size of an activation: bits a number on the wire, MB (10^6) of fp32 a second that
one core encodes, decodes, and does both with (checks of what arrives included); and the speed of a
link below which the codec saves time, though nothing overlaps: where a MB that goes as it is takes
longer than coding it, sending the codes and decoding them. Times are CPU times of the thread, since
the machine may not be quiet, and with `--device cuda` wall-clock times up to the end of the GPU's
work, the numbers and the codes in its memory; medians of `--repeat`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarmnet.protocol.codecs import CHUNK, NONE, TOPK
from swarmnet.training.codecs.base import Codec
from swarmnet.training.codecs.fused import fused_codec
from swarmnet.training.codecs.registry import CODECS

SHAPES = {"0.5 MB": (1024, 128), "8 MB": (2048, 1024), "64 MB": (8192, 2048)}
"""[tokens, width]: of the default run, of a small model, of a large one."""
OUTLIERS = 20.0
"""Times the others: every 50th number of a token."""
BITS = 8
MEGA = 1e6


@dataclass(frozen=True)
class Row:
    """A codec at one size."""

    codec: str
    size: str
    bits: float
    encode_mb_s: float
    decode_mb_s: float
    both_mb_s: float
    pays_below_mbit_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU that torch can use")
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = [
        measure(codec, size, device, options.repeat)
        for codec in CODECS.values()
        if codec.name != NONE
        for size in SHAPES
    ]
    print("| codec | size | bits a number | encode | decode | both, MB/s | pays below, Mbit/s |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| `{r.codec}` | {r.size} | {r.bits:.2f} | {r.encode_mb_s:,.0f} | "
            f"{r.decode_mb_s:,.0f} | {r.both_mb_s:,.0f} | {r.pays_below_mbit_s:,.0f} |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


def measure(codec: Codec, size: str, device: torch.device, repeat: int) -> Row:
    """The median of some turns."""
    values = activation(*SHAPES[size]).to(device)
    if codec.name == TOPK:  # it codes shards, in rows of this size
        values = values.reshape(-1, CHUNK)
    n = values.shape[1]
    coded = codec.encode(values)

    def receive() -> Tensor:
        codec.check("activation", coded, n)
        return codec.decode(coded, n)

    def encode() -> Tensor:
        return codec.encode(values)

    fused = fused_codec(codec, n, device, values.dtype)
    if fused is not None:
        encode = functools.partial(fused.encode, values)

        def receive() -> Tensor:
            decoded, findings = fused.decode(coded, values.dtype)
            fused.check("activation", coded, findings.cpu())
            return decoded

    clock = clock_of(device)
    encode_s = median_s(encode, clock, repeat)
    decode_s = median_s(receive, clock, repeat)
    megabytes = values.nbytes / MEGA
    both = megabytes / (encode_s + decode_s)
    saved = 1.0 - coded.nbytes / values.nbytes
    return Row(
        codec.name,
        size,
        BITS * coded.nbytes / values.numel(),
        megabytes / encode_s,
        megabytes / decode_s,
        both,
        BITS * saved * both,
    )


def activation(tokens: int, width: int) -> Tensor:
    """Normal numbers with outliers in the same places of each token."""
    values = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    values[:, ::50] *= OUTLIERS
    return values


def clock_of(device: torch.device) -> Callable[[], float]:
    """In seconds: of the CPU time of this thread, or of the time when the GPU is done."""
    if device.type == "cpu":
        return time.thread_time

    def when_done() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return when_done


def median_s(work: Callable[[], Tensor], clock: Callable[[], float], repeat: int) -> float:
    """Seconds of a turn, the median."""
    work()
    times = []
    for _ in range(repeat):
        began_s = clock()
        work()
        times.append(clock() - began_s)
    return statistics.median(times)


if __name__ == "__main__":
    main()
