"""What `document_mask` costs: tokens a second of one stage with it on and off, in one run.

    python benchmarks/documents.py [--repeat 7] [--lengths 256 1024 4096]
        [--device cuda --precision bf16]

A small Llama (about 10 M parameters), a whole model in one stage, forward and backward, by sequence
length and by the number of documents that share a sample. The ways take turns, and each is timed by
the CPU time of this process (on a GPU by the clock); medians, and their ratio to document_mask off.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from swarmnet.batch import Documents
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.stage import TorchStage, build_stage

TOKENS = 4096
"""Of a microbatch."""
WARM = 2


def stage_of(length: int, document_mask: bool, options: argparse.Namespace) -> TorchStage:
    spec = RunSpec.model_validate(
        {
            "model": {
                "kind": "llama",
                "hidden_size": 320,
                "num_hidden_layers": 8,
                "num_attention_heads": 5,
                "num_key_value_heads": 5,
                "intermediate_size": 864,
                "vocab_size": 256,
                "max_position_embeddings": length,
            },
            "data": {"paths": ["python-stdlib"], "document_mask": document_mask},
            "optimizer": {"learning_rate": 1e-3, "rounds": 1},
            "pipeline": {"num_stages": 1, "global_batch": TOKENS, "microbatch": TOKENS // length},
        }
    )
    computing = Computing(precision=options.precision)
    return build_stage(spec, 0, device=options.device, computing=computing)


def ways(length: int) -> dict[str, Documents | None]:
    """By name, the documents of each sample; None for document_mask off."""
    numbers = [n for n in (1, 4, 16) if n <= length // 16]
    samples = TOKENS // length
    told: dict[str, Documents | None] = {"off": None}
    return told | {f"on, {n}": ((length // n,) * n,) * samples for n in numbers}


def seconds_of(stage: TorchStage, length: int, documents: Documents | None, key: int) -> float:
    generator = torch.Generator().manual_seed(key)
    shape = (TOKENS // length, length)
    tokens = from_tensor(torch.randint(256, shape, generator=generator, dtype=torch.int32))
    clock = time.process_time if stage.layers.device.type == "cpu" else time.perf_counter
    began = clock()
    stage.forward_backward((0, key), tokens, tokens, documents)
    if stage.layers.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - began
    stage.forget((0, key))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'length':>8}{'documents':>12}{'tokens/s':>10}{'ratio':>8}")
    for length in options.lengths:
        stages = {on: stage_of(length, on, options) for on in (False, True)}
        seconds: dict[str, list[float]] = {way: [] for way in ways(length)}
        for key in range(WARM + options.repeat):
            for way, documents in ways(length).items():
                took = seconds_of(stages[documents is not None], length, documents, key)
                seconds[way] += [took] if key >= WARM else []
        plain = statistics.median(seconds["off"])
        for way, values in seconds.items():
            median = statistics.median(values)
            print(f"{length:8}{way:>12}{TOKENS / median:10.0f}{plain / median:8.2f}")


if __name__ == "__main__":
    main()
