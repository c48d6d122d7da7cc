"""What a machine with two stages gains where each has cores, and a process, of its own.

    python benchmarks/seats.py [--cores 2] [--layers 8] [--width 256] [--length 128]
        [--microbatches 12] [--in-flight 4] [--repeats 5] [--devices cuda:0 cuda:1] [--json FILE]

Microbatches go through both stages of a Llama and back, in fp32, coded between the stages as the
run says (int8), as a peer's devices do it. `one process`: both stages before one device thread,
whose operations use all cores, as `--stages 2` has them. `apart`: each stage in a process with half
of the cores, as `--stages 2 --tp N` and several GPUs have them. The ways take turns; the least
wall-clock seconds a microbatch (work of others only adds to them), and the median of the CPU
seconds of all processes. With `--devices` the one process has the first of them, and each of two
processes its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from swarmnet.ports import BACKWARD, FORWARD
from swarmnet.runtime.apart.seat import ApartSeat
from swarmnet.runtime.options import PeerOptions
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.device import DeviceThread, set_num_threads
from swarmnet.training.stage import build_stage

SAMPLES, VOCABULARY, HEADS = 4, 256, 8


@dataclass(frozen=True)
class Row:
    """One way, in seconds a microbatch."""

    way: str
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.devices:
        try:
            torch.zeros(1, device=name)
        except (RuntimeError, AssertionError) as error:  # what torch raises for no such device
            sys.exit(f"seats.py: --devices {name}: {str(error).splitlines()[0]}")
    set_num_threads(options.cores)
    rows = asyncio.run(both(options))
    for row in rows:
        gain = rows[0].wall_s / row.wall_s
        print(f"{row.way:14}{row.wall_s:8.3f} s{row.cpu_s:8.3f} s of CPUs{gain:7.2f} x")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


async def both(options: argparse.Namespace) -> list[Row]:
    spec = run_of(options)
    here: list[Any] = [build_stage(spec, k, device=options.devices[0]) for k in range(2)]
    one = DeviceThread(has_cores=options.devices[0] == "cpu")
    with tempfile.TemporaryDirectory() as folder:
        peer = PeerOptions(Path(folder), spec=Path(folder), threads=options.cores // 2 or 1)
        devices_of = [(name,) for name in options.devices]
        seats = [ApartSeat(spec, peer, devices_of, k) for k in range(2)]
        devices = [DeviceThread(has_cores=False) for _ in seats]
        try:
            apart = [await asyncio.to_thread(seat.build, k) for k, seat in enumerate(seats)]
            ways = {"one process": (here, [one.seat(), one.seat()]), "apart": (apart, devices)}
            taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for repeat in range(options.repeats + 1):
                for way, (stages, threads) in ways.items():
                    found = await measured(spec, stages, threads, options, repeat)
                    if repeat:  # the first is not counted
                        taken[way].append(found)
        finally:
            for seat in seats:
                await asyncio.to_thread(seat.close)
            for device in (one, *devices):
                await device.close()
    return [
        Row(way, min(s for s, _ in found), statistics.median(s for _, s in found))
        for way, found in taken.items()
    ]


def run_of(options: argparse.Namespace) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {
                "hidden_size": options.width,
                "num_hidden_layers": options.layers,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "intermediate_size": 3 * options.width,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": options.length,
            },
            "data": {"paths": ["python-stdlib"]},
            "optimizer": {"learning_rate": 1e-3, "rounds": 4},
            "pipeline": {"num_stages": 2, "global_batch": SAMPLES, "microbatch": SAMPLES},
        }
    )


async def measured(
    spec: RunSpec, stages: list[Any], devices: list[Any], options: argparse.Namespace, repeat: int
) -> tuple[float, float]:
    """Seconds a microbatch, by the clock and of CPUs."""
    generator = torch.Generator().manual_seed(repeat)
    shape = (SAMPLES, options.length)
    x, y = (
        from_tensor(torch.randint(VOCABULARY, shape, generator=generator, dtype=torch.int32))
        for _ in range(2)
    )
    first, last = stages
    room = asyncio.Semaphore(options.in_flight)

    async def microbatch(number: int) -> None:
        key = (0, number)
        async with room:
            out = await devices[0].run(FORWARD, first.forward_pass(key, x))
            result = await devices[1].run(FORWARD, last.loss_pass(key, out, y))
            await devices[0].run(BACKWARD, first.backward_pass(key, result.grad_inputs))
            for stage in stages:
                stage.forget(key)

    begin_s, cpu_s = time.perf_counter(), cpu_of_all()
    numbers = range(repeat * options.microbatches, (repeat + 1) * options.microbatches)
    await asyncio.gather(*map(microbatch, numbers))
    took = time.perf_counter() - begin_s, cpu_of_all() - cpu_s
    return took[0] / options.microbatches, took[1] / options.microbatches


def cpu_of_all() -> float:
    """CPU seconds of this process and of those below it."""
    own = psutil.Process()
    times = [p.cpu_times() for p in (own, *own.children(recursive=True))]
    return sum(t.user + t.system for t in times)


if __name__ == "__main__":
    main()
