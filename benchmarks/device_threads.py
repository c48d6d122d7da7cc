"""What it costs a CPU's device thread when other threads of its process have had torch's threads.

    python benchmarks/device_threads.py [--threads N] [--width 128] [--samples 8]

Forward and backward of a small Llama in one stage, each way in a process of its own, by turns:
(a) alone: one thread builds the stage and makes the passes. (b) peer: another thread builds it, a
`DeviceThread` makes the passes. (c) shared: as (b), and all threads have torch's number of threads.
Then OpenMP keeps more threads than there are cores, and GNU's library lets them sleep at the end of
each loop. The ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.cores import CORES
from swarmnet.training.stage import TorchStage, build_stage

ALONE, PEER, SHARED = WAYS = ("alone", "peer", "shared")
LENGTH, LAYERS, VOCABULARY = 128, 4, 256
WARM, TIMED = 8, 40


def stage_of(options: argparse.Namespace) -> TorchStage:
    spec = {
        "model": {
            "hidden_size": options.width,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": options.width // 32,
            "num_key_value_heads": options.width // 32,
            "intermediate_size": options.width * 11 // 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": LENGTH,
        },
        "data": {"paths": ["python-stdlib"]},
        "optimizer": {"learning_rate": 1e-3, "rounds": 1},
        "pipeline": {
            "num_stages": 1,
            "global_batch": options.samples,
            "microbatch": options.samples,
        },
    }
    return build_stage(RunSpec.model_validate(spec), 0)


def seconds(stage: TorchStage, samples: int) -> float:
    """The median microbatch."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator, dtype=torch.int32)
    inputs, took_s = from_tensor(tokens), []
    for i in range(WARM + TIMED):
        start_s = time.perf_counter()
        stage.forward_backward((0, i), inputs, inputs)
        stage.forget((0, i))
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s[WARM:])


def run(options: argparse.Namespace) -> None:
    """One way, in this process."""
    torch.set_num_threads(options.threads)
    if options.way == ALONE:
        print(seconds(stage_of(options), options.samples))
        return
    if options.way == PEER:
        CORES.keep_for_device(options.threads)
    stage = stage_of(options)

    def passes() -> None:
        print(seconds(stage, options.samples), flush=True)

    if options.way == SHARED:
        thread = threading.Thread(target=passes)
        thread.start()
    else:
        with CORES.for_device() as begin:
            thread = threading.Thread(target=lambda: (begin(), passes()))
            thread.start()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8, help="of a microbatch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    options = parser.parse_args()
    if options.way:
        run(options)
        return
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repeat):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, *sys.argv[1:]]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[way].append(float(done.stdout))
    medians = {way: statistics.median(values) for way, values in found.items()}
    for way, median_s in medians.items():
        print(f"{way:8} {median_s * 1e3:8.1f} ms   {median_s / medians[ALONE]:.2f}")


if __name__ == "__main__":
    main()
