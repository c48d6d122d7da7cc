"""Peak memory of a stage by activation policy and precision, beside the formula.

    python benchmarks/memory.py                 # the table of benchmarks/results/memory.md
    python benchmarks/memory.py --device cuda

One stage in the middle of a pipeline: `--in-flight` microbatches go forward, then each comes back
and another one goes forward in its place, and in the end all come back; as in a swarm, what came
and what was sent is held meanwhile. On a CPU every tensor is counted from the operation that makes
it until its memory is given back; scratch inside one operation is not seen. On a GPU it is what the
allocator says, and what came and was sent lies in main memory and does not count.

`formula`: weights and gradients (no optimizer is made here) and the activations of
`swarmnet.training.memory.plan`. It leaves out what a backward pass has besides: the gradients
on their way through a layer. `elsewhere` is what `offload` has moved, by the formula.
"""

from __future__ import annotations

import argparse
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import ActivationsName, Computing, PrecisionName
from swarmnet.training.memory.plan import PRECISIONS, stage_activations, state_bytes
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

STAGE, NUM_STAGES = 1, 3
POLICIES: tuple[ActivationsName, ...] = ("keep", "blocks", "recompute", "offload")
NUM_MORE = 2
"""Microbatches beyond those in flight at the beginning."""


class PeakMeter(TorchDispatchMode):
    """Bytes of the tensors that operations make and that are alive; the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_now = 0
        self.peak_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self.see, func(*args, **(kwargs or {})))

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the tensor's storage, once, until it is given back. One of torch's `meta` device
        has no memory."""
        if tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  torch has no public name for the memory itself
        num_bytes = storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.bytes_now += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes_now)
            weakref.finalize(storage, self._gone, key, num_bytes)
        return tensor

    def _gone(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.bytes_now -= num_bytes


@dataclass(frozen=True)
class Row:
    precision: PrecisionName
    activations: ActivationsName
    peak_bytes: int
    formula_bytes: float
    elsewhere_bytes: float


def make_spec(options: argparse.Namespace) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {
                "hidden_size": options.width,
                "num_hidden_layers": NUM_STAGES * options.layers,
                "num_attention_heads": options.width // 32,
                "intermediate_size": options.width * 11 // 4,
                "vocab_size": 256,
                "max_position_embeddings": options.length,
            },
            "data": {"paths": ["python-stdlib"]},
            "optimizer": {"learning_rate": 1e-3, "rounds": 1},
            "pipeline": {
                "num_stages": NUM_STAGES,
                "global_batch": options.samples,
                "microbatch": options.samples,
            },
        }
    )


def fly(stage: TorchStage, options: argparse.Namespace) -> None:
    """Microbatches through the stage, `in_flight` at a time."""
    shape = (options.samples, options.length, options.width)
    total = options.in_flight + NUM_MORE
    held: dict[int, tuple[Array, Array]] = {}
    for i in range(total + options.in_flight):
        oldest = i - options.in_flight
        if oldest >= 0:
            grad = from_tensor(torch.randn(shape) / 100)
            stage.backward((0, oldest), grad)
            stage.forget((0, oldest))
            del held[oldest], grad
        if i < total:
            came = from_tensor(torch.randn(shape))
            held[i] = came, stage.forward((0, i), came)


def measure(
    spec: RunSpec,
    precision: PrecisionName,
    activations: ActivationsName,
    options: argparse.Namespace,
    folder: str,
) -> Row:
    computing = Computing(precision, activations, folder=folder)
    stage = build_stage(spec, STAGE, device=options.device, computing=computing)
    fly(stage, options)  # rotary tables, threads, pools
    stage.finish_round()
    numbers = PRECISIONS[precision]
    state = sum(state_bytes(stage.num_parameters, 1, 1, numbers)[:2])
    one = stage_activations(spec, STAGE, numbers)
    assert one is not None
    here, elsewhere = one.held(activations, options.in_flight)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        fly(stage, options)
        peak = torch.cuda.max_memory_allocated()
        here -= options.in_flight * (one.sent + (0 if one.outputs == 0 else one.came))
    else:
        with PeakMeter() as meter:
            vectors = stage.vectors.present
            for tensor in (vectors.parameters, vectors.gradients, *stage.layers.parameters()):
                meter.see(tensor)
            fly(stage, options)
        peak = meter.peak_bytes
    return Row(precision, activations, peak, state + here, elsewhere)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="of the stage")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2, help="of a microbatch")
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    options = parser.parse_args()
    torch.manual_seed(0)
    spec = make_spec(options)
    print("| precision | activations | peak | formula | peak / formula | elsewhere |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for precision in cast(list[PrecisionName], options.precisions):
            for policy in POLICIES:
                row = measure(spec, precision, policy, options, folder)
                print(
                    f"| {precision} | {policy} | {row.peak_bytes / 1e6:.1f} MB "
                    f"| {row.formula_bytes / 1e6:.1f} MB "
                    f"| {row.peak_bytes / row.formula_bytes:.2f} "
                    f"| {row.elsewhere_bytes / 1e6:.1f} MB |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
