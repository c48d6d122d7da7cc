"""The adapter over models of transformers against the built-in Llama: tokens/s at the same size.

    python benchmarks/adapter.py                     # on a CPU: one thread, by its CPU time
    python benchmarks/adapter.py --device cuda --compile

Both compute the same layers from the same weights (the built-in Llama's, under their names) as a
stage of a peer does, forward and backward. They take turns, `--repeat` times; the ratio is that of
the medians. On a CPU the clock is that of the process, so that what else the machine does changes
little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing, PrecisionName
from swarmnet.training.stage import TorchStage, build_stage

STAGE = 1
WARM = 3
LEAST_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model, and of its microbatches."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    length: int
    samples: int


SIZES = (
    Size("default run", 128, 12, 4, 4, 352, 128, 8),
    Size("10 M", 320, 12, 5, 5, 864, 256, 4),
    Size("SmolLM2-135M", 576, 6, 9, 3, 1536, 512, 2),
    Size("1 B (layers of)", 2048, 3, 32, 8, 8192, 512, 1),
)


def spec_of(size: Size, *, is_adapter: bool) -> RunSpec:
    """A run whose middle stage has a third of the layers."""
    sizes = {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": size.inner,
        "vocab_size": 256,
        "max_position_embeddings": size.length,
    }
    config = {"model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 1e-5, **sizes}
    model = {"kind": "transformers", "config": config} if is_adapter else sizes
    return RunSpec.model_validate(
        {
            "model": model,
            "data": {"paths": ["python-stdlib"], "sequence_length": size.length},
            "optimizer": {"learning_rate": 1e-3, "rounds": 1},
            "pipeline": {"num_stages": 3, "global_batch": size.samples, "microbatch": size.samples},
        }
    )


def seconds(stage: TorchStage, size: Size, num: int, *, is_cpu: bool) -> float:
    """For `num` microbatches, forward and backward."""
    clock = time.process_time if is_cpu else time.perf_counter
    generator = torch.Generator().manual_seed(0)
    shape = (size.samples, size.length, size.width)
    inputs = from_tensor(torch.randn(shape, generator=generator))
    grads = from_tensor(torch.randn(shape, generator=generator) / 100)

    def microbatch(i: int) -> None:
        stage.forward((0, i), inputs)
        stage.backward((0, i), grads)
        stage.forget((0, i))

    for i in range(WARM):
        microbatch(i)
    if not is_cpu:
        torch.cuda.synchronize()
    began = clock()
    for i in range(num):
        microbatch(WARM + i)
    if not is_cpu:
        torch.cuda.synchronize()
    took = clock() - began
    stage.finish_round()
    return took


def check_same(stages: list[TorchStage], size: Size) -> None:
    """Gives both the same weights; they must make the same of an activation."""
    theirs, ours = (stage.state_dict() for stage in stages)
    for name, values in ours.items():
        values.copy_(theirs[name])
    x = torch.randn((size.samples, size.length, size.width))
    outputs = [
        torch.frombuffer(bytearray(stage.forward((0, 1 << 20), from_tensor(x)).data), dtype=x.dtype)
        for stage in stages
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    if is_cpu:
        torch.set_num_threads(1)
    precision: PrecisionName = options.precision or ("fp32" if is_cpu else "bf16")
    computing = Computing(precision, "keep", options.compile)
    print(f"{options.device}, {precision}, {'compiled' if options.compile else 'eager'}\n")
    print("| size | built-in tokens/s | adapter tokens/s | ratio |\n|---|---|---|---|")
    for size in SIZES:
        stages = [
            build_stage(
                spec_of(size, is_adapter=is_adapter),
                STAGE,
                device=options.device,
                computing=computing,
            )
            for is_adapter in (False, True)
        ]
        if is_cpu and precision == "fp32":
            check_same(stages, size)
        times: list[list[float]] = [[], []]
        for _ in range(options.repeat):
            for stage, found in zip(stages, times, strict=True):
                found.append(seconds(stage, size, options.microbatches, is_cpu=is_cpu))
        tokens = options.microbatches * size.samples * size.length
        theirs, ours = (tokens / statistics.median(found) for found in times)
        mark = "" if ours / theirs >= LEAST_RATIO else " (below)"
        print(f"| {size.name} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.3f}{mark} |")


if __name__ == "__main__":
    main()
