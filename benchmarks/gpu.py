"""One peer's stage of a 1B-class model, against the same layers in a plain loop: tokens/s and MFU.

    python benchmarks/gpu.py                      # on a GPU: bf16, a stage of Llama 3.2 1B's shape
    python benchmarks/gpu.py --compile --codec int8
    python benchmarks/gpu.py --tiny --device cpu  # does the script run?
    python benchmarks/gpu.py --ranks 2            # the stage cut over two GPUs, as `--tp 2` does it
    python benchmarks/gpu.py --swarm [--compile]  # real peers, beside transformers' Llama

(a) plain: forward and backward of the stage's layers, their inputs and output gradients on the
device, gradients in the precision of the passes; nothing else. (b) peer: the stage as a peer has
it, behind its device thread and event loop: arrays from and to main memory, finite checks,
receipts, fp32 sums of gradients, `--in-flight` microbatches between their passes. The two take
turns, `--repeat` times; the ratio is that of the medians.

MFU: FLOPs that the model needs (forward, and twice that backward) over what its devices could do:
`--peak-tflops`, or else what one large matrix product reaches here.

`--swarm`: a model of 154.7 M parameters, sequences of 1,024 tokens, 512 of them a round
(`gpu_swarm.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for what is of benchmarks/

from benchmarks import gpu_swarm
from swarmnet.errors import SwarmnetError
from swarmnet.plurals import counted
from swarmnet.ports import BACKWARD, FORWARD
from swarmnet.protocol.codecs import BOUNDARY_CODECS, NONE, boundary_codec, coded_form
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.computing import Computing, PrecisionName
from swarmnet.training.device import DeviceThread
from swarmnet.training.models.base import build_layer
from swarmnet.training.models.llama import decoder_flops, head_flops
from swarmnet.training.models.registry import model_plan, split_stages
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage, rank_options
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

STAGE = 1
LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
    "max_position_embeddings": 2048,
}
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}
WARM = 3
BACKWARD_COST = 2
PEAK_SIZE, PEAK_SIZE_TINY, PEAK_REPEAT = 8192, 768, 10


def make_spec(options: argparse.Namespace) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": TINY if options.tiny else LLAMA_1B,
            "data": {"paths": ["python-stdlib"]},
            "optimizer": {"learning_rate": 1e-3, "rounds": 1},
            "pipeline": {
                "num_stages": 3,
                "global_batch": options.samples,
                "microbatch": options.samples,
                "codec": options.codec,
            },
        }
    )


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain_layers(stage: TorchStage) -> list[nn.Module]:
    """Those of (a), in the precision of the passes."""
    layers = [
        build_layer(stage.layers.plan, layer, 0).to(stage.layers.device, stage.computing.dtype)
        for layer in stage.layers.builders
    ]
    if stage.computing.compile:
        for layer in layers:
            layer.compile(dynamic=False)
    return layers


def plain_seconds(
    layers: list[nn.Module], stage: TorchStage, came: Tensor, grad: Tensor, total: int
) -> float:
    """(a); gradients add up as the stage's do."""
    dtype = stage.computing.dtype
    came, grad = came.to(stage.layers.device, dtype), grad.to(stage.layers.device, dtype)

    def microbatch() -> None:
        x = inputs = came.detach().requires_grad_()
        for layer in layers:
            x = layer(x)
        x.backward(grad)
        inputs.grad = None

    for _ in range(WARM):
        microbatch()
    wait_for(stage.layers.device)
    start_s = time.perf_counter()
    for _ in range(total):
        microbatch()
    wait_for(stage.layers.device)
    return time.perf_counter() - start_s


def coded(codec: str, values: Tensor) -> Array:
    """(samples, length, width) as it comes from another peer."""
    rows = codec_of(codec).encode(values.reshape(-1, values.shape[-1]))
    return from_tensor(rows.view(coded_form(codec, tuple(values.shape), 2)[1]))


async def peer_seconds(
    stage: TorchStage, came: Tensor, grad: Tensor, total: int, in_flight: int, codec_name: str
) -> float:
    """(b)."""
    device = DeviceThread()
    codec = boundary_codec(codec_name)
    inputs, grads = coded(codec.activations, came), coded(codec.gradients, grad)
    gate = asyncio.Semaphore(in_flight)

    async def microbatch(index: int) -> None:
        key = (0, index)
        async with gate:
            await device.run(FORWARD, stage.forward_pass(key, inputs))
            await device.run(BACKWARD, stage.backward_pass(key, grads))
            stage.forget(key)

    await asyncio.gather(*(microbatch(i) for i in range(WARM)))
    wait_for(stage.layers.device)
    start_s = time.perf_counter()
    await asyncio.gather(*(microbatch(WARM + i) for i in range(total)))
    wait_for(stage.layers.device)
    seconds = time.perf_counter() - start_s
    await device.close()
    stage.finish_round()
    return seconds


def reached_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a large matrix product."""
    a = torch.randn(size, size, device=device).to(dtype)
    best = 0.0
    for _ in range(PEAK_REPEAT):
        wait_for(device)
        start_s = time.perf_counter()
        a @ a
        wait_for(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start_s))
    return best


def peak_flops(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that MFU refers to."""
    size = PEAK_SIZE_TINY if options.tiny else PEAK_SIZE
    return (options.peak_tflops or 0) * 1e12 or reached_flops(device, dtype, size)


def compare_swarms(
    options: argparse.Namespace, device: torch.device, precision: PrecisionName
) -> None:
    """`--swarm`."""
    size = gpu_swarm.TINY if options.tiny else gpu_swarm.FULL
    model = ModelSpec.model_validate({"kind": "llama", **size.model()})
    flops = size.layers * decoder_flops(model, size.length) + head_flops(model, size.length)
    dtype = Computing(precision).dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    peak = peak_flops(options, device, dtype)
    print(f"{name}, torch {torch.__version__}, {precision}, peak {peak / 1e12:.2f} TFLOP/s\n")
    more = ["--device", device.type, "--precision", precision]
    if options.activations:
        more += ["--activations", options.activations]
    gpu_swarm.print_table(
        size,
        device,
        dtype,
        "int8" if options.codec == NONE else options.codec,
        compiled=options.compile,
        peak_flops=peak,
        flops_a_token=(1 + BACKWARD_COST) * flops / size.length,
        options=more,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--activations", choices=("keep", "blocks", "recompute", "offload"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--codec", choices=tuple(BOUNDARY_CODECS), default=NONE)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="devices that share the stage")
    parser.add_argument("--swarm", action="store_true", help="real peers on this device")
    parser.add_argument("--samples", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if options.device != "cpu" and has_gpu else "cpu")
    if wrong := why_not(options, device, torch.cuda.device_count() if has_gpu else 0):
        sys.exit(f"gpu.py: {wrong}")
    precision: PrecisionName = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    if options.swarm:
        compare_swarms(options, device, precision)
        return
    spec = make_spec(options)
    computing = Computing(precision, options.activations or "keep", options.compile)
    try:
        with on_ranks(options.ranks, device, spec) as group:
            if group is None:
                stage = build_stage(spec, STAGE, device=device, computing=computing)
            else:
                stage = build_parallel_stage(spec, STAGE, group, computing)
            compare_stage(options, spec, stage, device)
    except SwarmnetError as error:
        sys.exit(f"gpu.py: {error}")


def why_not(options: argparse.Namespace, device: torch.device, num_gpus: int) -> str:
    """What does not go on this machine, in a line; empty where all does."""
    if options.ranks < 1:
        return f"--ranks {options.ranks}: 1 or more"
    if options.swarm and options.ranks > 1:
        return "--swarm compares peers of one rank; leave --ranks out"
    wants_gpu = options.device == "cuda" or (options.device == "auto" and not options.tiny)
    if wants_gpu and not num_gpus:
        return "no GPU that torch can use; --device cpu --tiny proves the script"
    if device.type == "cpu" and not options.tiny:
        return "a model of this size takes a GPU; add --tiny"
    if device.type == "cuda" and num_gpus < options.ranks:
        return f"--ranks {options.ranks}: this machine has {counted(num_gpus, 'GPU')} for them"
    return ""


@contextmanager
def on_ranks(num_ranks: int, device: torch.device, spec: RunSpec) -> Iterator[LocalGroup | None]:
    """The ranks, on devices of their own; None for one."""
    if num_ranks == 1:
        yield None
        return
    devices = [f"cuda:{i}" for i in range(num_ranks)] if device.type == "cuda" else None
    with closing(LocalGroup(num_ranks, devices=devices, options=rank_options(spec))) as group:
        yield group


def compare_stage(
    options: argparse.Namespace, spec: RunSpec, stage: TorchStage, device: torch.device
) -> None:
    """(a) and (b)."""
    computing, precision = stage.computing, stage.computing.precision
    layers = split_stages(model_plan(spec), spec.pipeline.num_stages)[STAGE]
    flops = (
        len(layers)
        * decoder_flops(spec.model, spec.sequence_length)
        * options.samples
        * (1 + BACKWARD_COST)
    )
    peak = peak_flops(options, device, computing.dtype)
    shape = (options.samples, spec.sequence_length, spec.model.hidden_size)
    came, grad = torch.randn(shape), torch.randn(shape) / 100
    total = options.microbatches
    modules = plain_layers(stage)
    plain: list[float] = []
    ours: list[float] = []
    for _ in range(options.repeat):
        plain.append(plain_seconds(modules, stage, came, grad, total))
        peer = peer_seconds(stage, came, grad, total, options.in_flight, options.codec)
        ours.append(asyncio.run(peer))
    tokens = total * options.samples * spec.sequence_length
    print(
        f"{len(layers)} layers, {stage.num_parameters / 1e6:.1f} M parameters, {precision} on "
        f"{device}, peak {peak / 1e12:.2f} TFLOP/s"
    )
    num_devices = options.ranks if device.type == "cuda" else 1
    for name, seconds, many in (("plain", plain, 1), ("peer", ours, num_devices)):
        median_s = statistics.median(seconds)
        mfu = flops * total / median_s / (peak * many)
        print(f"{name:6} {tokens / median_s:12,.0f} tokens/s   MFU {mfu:.3f}")
    on = f", on {options.ranks} ranks" if options.ranks > 1 else ""
    print(f"peer{on} / plain: {statistics.median(plain) / statistics.median(ours):.3f}")


if __name__ == "__main__":
    main()
