"""What it takes to share sequences among ranks (`--cp N`), beside one rank.

    python benchmarks/sequences.py [--lengths 2048 8192] [--ranks 1 2] [--width 128] [--layers 4]
        [--documents N] [--passes 3] [--activations keep] [--json FILE]

A microbatch of one sequence goes forward and back through the first of two stages of a built-in
Llama, in fp32 on CPUs with one thread a rank; the ranks are processes, as those of a peer. For each
length and number of ranks, in processes of their own:

- `kept`: by how much the memory of a rank grows with a microbatch between its passes, of the rank
  that grows most; `plan`: the same by the formula that `swarmnet plan --explain --cp N` has;
- `peak`: by how much it grows at most, in all of the passes;
- medians of the seconds of a microbatch, and of the CPU seconds of the rank that takes most (what a
  busy machine does not change much), and tokens a second.

`--documents`: so many documents of the same length in a sequence, which attention keeps apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from swarmnet.batch import Documents
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.memory.plan import FP32, stage_activations
from swarmnet.training.ranks.context_parallel_stage import build_context_parallel_stage
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.tensor_parallel_stage import rank_options
from swarmnet.training.stage import build_stage

VOCABULARY, HEAD_SIZE = 256, 32
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_TRIM_THRESHOLD_": "0"}
"""Memory that a process no longer uses is not counted."""
MEGABYTE = 1e6


@dataclass(frozen=True)
class Row:
    """Of one length and number of ranks. Memory in bytes, of one rank."""

    length: int
    ranks: int
    kept: float
    plan: float
    peak: float
    seconds: float
    cpu_s: float
    tokens_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measured(options))))
        return
    rows = [apart(options, length, n) for length in options.lengths for n in options.ranks]
    print("  length  ranks      kept      plan      peak   seconds       CPU  tokens/s")
    for r in rows:
        memory = "".join(f"{x / MEGABYTE:7.1f} MB" for x in (r.kept, r.plan, r.peak))
        print(
            f"{r.length:8}{r.ranks:7}{memory}{r.seconds:10.2f}{r.cpu_s:10.2f}{r.tokens_per_s:10,.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


def apart(options: Any, length: int, num_ranks: int) -> Row:
    """Measured in a process of its own."""
    words = ["--lengths", str(length), "--ranks", str(num_ranks), "--one"]
    for name in ("width", "layers", "documents", "passes", "activations"):
        words += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env={**os.environ, **GIVES_BACK},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def measured(options: Any) -> Row:
    torch.set_num_threads(1)
    (length,), (num_ranks,) = options.lengths, options.ranks
    spec = run_of(options, length)
    computing = Computing(activations=options.activations, folder=".")
    plan = stage_activations(spec, 0, FP32, num_ranks)
    assert plan is not None
    two, one = (plan.held(options.activations, n)[0] for n in (2, 1))
    if num_ranks == 1:
        stage = build_stage(spec, 0, computing=computing)
        return Row(length, 1, *of_passes(stage, [os.getpid()], options, length, two - one))
    group = LocalGroup(num_ranks, threads=1, options=rank_options(spec, mode="context"))
    try:
        stage = build_context_parallel_stage(spec, 0, group, computing)
        pids = [os.getpid(), *group.pids]
        return Row(
            length, num_ranks, *of_passes(stage, pids, options, length, two - one, group.join)
        )
    finally:
        group.close()


def run_of(options: Any, length: int) -> RunSpec:
    heads = options.width // HEAD_SIZE
    return RunSpec.model_validate(
        {
            "model": {
                "hidden_size": options.width,
                "intermediate_size": 3 * options.width,
                "num_hidden_layers": options.layers,
                "num_attention_heads": heads,
                "num_key_value_heads": max(1, heads // 2),
                "vocab_size": VOCABULARY,
                "max_position_embeddings": length,
            },
            "data": {"paths": ["python-stdlib"], "document_mask": options.documents > 1},
            "optimizer": {"learning_rate": 1e-3, "rounds": 4},
            "pipeline": {
                "num_stages": 2,
                "layers": [options.layers, 3],  # the embedding and all layers but one
                "global_batch": 2,
                "microbatch": 1,
            },
        }
    )


def of_passes(
    stage: Any,
    pids: Sequence[int],
    options: Any,
    length: int,
    plan: float,
    join: Any = lambda: None,
) -> tuple[float, float, float, float, float, float]:
    """`Row` from `kept` on."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator, dtype=torch.int32)
    inputs = from_tensor(tokens)
    grad = from_tensor(torch.randn(1, length, options.width, generator=generator))
    documents: Documents | None = None
    if options.documents > 1:
        each, rest = divmod(length, options.documents)
        documents = ((each,) * (options.documents - 1) + (each + rest,),)
    kept, seconds, cpus, before = [], [], [], [0.0] * len(pids)
    for number in range(options.passes + 1):  # the first one warms up
        join()
        resident = [memory_of(pid, "VmRSS") for pid in pids]
        if number == 1:
            before = resident
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest is counted anew
        busy = [cpu_of(pid) for pid in pids]
        started = time.perf_counter()
        sent = stage.forward((0, number), inputs, documents)
        join()
        halfway = time.perf_counter()
        now = [memory_of(pid, "VmRSS") for pid in pids]
        went_on = time.perf_counter()
        stage.backward((0, number), grad)
        join()
        ended = time.perf_counter()
        del sent
        stage.forget((0, number))
        if number:
            kept.append(max(b - a for a, b in zip(resident, now, strict=True)))
            seconds.append(halfway - started + ended - went_on)
            cpus.append(max(cpu_of(pid) - a for pid, a in zip(pids, busy, strict=True)))
    highest = [memory_of(pid, "VmHWM") for pid in pids]
    peak = max(b - a for a, b in zip(before, highest, strict=True))
    median = statistics.median(seconds)
    cpu_s = statistics.median(cpus)
    return statistics.median(kept), plan, peak, median, cpu_s, length / median


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def memory_of(pid: int, name: str) -> float:
    """Bytes, of `/proc/PID/status`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
