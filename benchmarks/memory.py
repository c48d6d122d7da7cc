"""Peak memory of a stage by activation policy and precision, beside the formula.

    python benchmarks/memory.py                 # the tables of benchmarks/results/memory.md
    python benchmarks/memory.py --device fake
    python benchmarks/memory.py --device cuda

One stage in the middle of a pipeline: `--in-flight` microbatches go forward, then each comes back
and another one goes forward in its place, and in the end all come back; as in a swarm, what came
and what was sent is held meanwhile. On a CPU every tensor is counted from the operation that makes
it until its memory is given back; scratch inside one operation is not seen. On a GPU it is what the
allocator says, and what came and was sent lies in main memory and does not count. `fake` is a
second part of main memory (`tests/training/memory/fake_device.py`, needs a C++ compiler), which
counts as a GPU's allocator does; attention is one operation there, as with a GPU's kernels. There
`weights` may be `host` or `disk`: each layer's come for its part of a pass.

`formula`: weights, gradients and what is not trained (no optimizer is made here), and the
activations of `swarmnet.training.memory.plan`: what `swarmnet plan` says. `elsewhere` is what
`offload` has moved, by the formula. `adapters` trains those of q_proj and v_proj alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parents[1]))

from swarmnet.spec import LoraSpec, RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import (
    KEEP_NO_WEIGHTS,
    ActivationsName,
    Computing,
    PrecisionName,
    WeightsPlace,
)
from swarmnet.training.memory.activation_choice import known_activations
from swarmnet.training.memory.pass_trace import attend_at_once
from swarmnet.training.memory.plan import (
    PRECISIONS,
    base_bytes,
    fixed_bytes,
    of_streamed,
    state_bytes,
    streamed_bytes,
)
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.memory import fake_device

STAGE, NUM_STAGES = 1, 3
POLICIES: tuple[ActivationsName, ...] = ("keep", "blocks", "recompute", "offload")
PLACES: tuple[WeightsPlace, ...] = ("device", "host", "disk")
TRAINED = ("all", "adapters")
NUM_MORE = 2
"""Microbatches beyond those in flight at the beginning."""


class PeakMeter(TorchDispatchMode):
    """Bytes of the tensors that operations make and that are alive; the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_now = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()
        self._at: Counter[int] = Counter()
        """How many of these storages begin at an address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self.see, func(*args, **(kwargs or {})))

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the tensor's storage, once, until it is given back. One of torch's `meta` device
        has no memory."""
        if tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:  # noqa: SLF001  torch has no public name for it
            return tensor
        self._seen.add(storage._cdata)  # noqa: SLF001
        at, num_bytes = storage.data_ptr(), storage.nbytes()
        self._at[at] += 1
        if self._at[at] == 1:  # an array and the tensor that reads it are one memory
            self.bytes_now += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        weakref.finalize(storage, self._gone, storage._cdata, at, num_bytes)  # noqa: SLF001
        return tensor

    def _gone(self, key: int, at: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self._at[at] -= 1
        if not self._at[at]:
            self.bytes_now -= num_bytes


@dataclass(frozen=True)
class Cell:
    """What a row of the table is of."""

    precision: PrecisionName
    trained: str
    weights: WeightsPlace
    activations: ActivationsName


@dataclass(frozen=True)
class Row:
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


def planned(spec: RunSpec, stage: TorchStage, cell: Cell, options: argparse.Namespace) -> Row:
    """Without a peak."""
    numbers = PRECISIONS[cell.precision]
    if cell.weights == "device":
        held = sum(state_bytes(stage.num_parameters, 1, 1, numbers)[:2])
        held += base_bytes(spec, STAGE, numbers) + fixed_bytes(spec.model)
    else:
        held = sum(streamed_bytes(spec, STAGE, numbers))
    one = known_activations(spec, STAGE, numbers)
    assert one is not None
    if cell.weights != "device":
        one = of_streamed(one)
    if options.device != "cpu":
        # The gradient for fp16 is scaled there, in fp32.
        came = one.grad_came if cell.precision == "fp16" else 0
        one = replace(one, came=0, outputs=one.outputs or one.sent, sent=0, grad_came=came)
    here, elsewhere = one.held(cell.activations, options.in_flight)
    return Row(0, held + here, elsewhere)


def measure(
    spec: RunSpec, cell: Cell, options: argparse.Namespace, folder: str, fake: Any | None
) -> Row:
    if cell.trained == "adapters":
        lora = LoraSpec(r=8, lora_alpha=8.0, target_modules=("q_proj", "v_proj"))
        spec = spec.model_copy(update={"lora": lora})
    computing = Computing(
        cell.precision,
        cell.activations,
        weights=cell.weights,
        updates_on_device=options.device != "cpu" and cell.weights == "device",
        folder=folder,
    )
    before = 0 if fake is None else fake.fake_used()
    device = "fake:0" if fake else options.device
    # In all threads: those of a device's backward passes compute layers again.
    with mock.patch.object(functional, "scaled_dot_product_attention", attend_at_once):
        return _measured(spec, cell, computing, options, device, before, fake)


def _measured(
    spec: RunSpec,
    cell: Cell,
    computing: Computing,
    options: argparse.Namespace,
    device: str,
    before: int,
    fake: Any | None,
) -> Row:
    stage = build_stage(spec, STAGE, device=device, computing=computing)
    for number in stage.base.missing:  # nobody has brought the base
        size = stage.base.shard_sizes[number]
        stage.base.put(number, from_tensor(torch.full((size,), 0.01)))
    fly(stage, options)  # rotary tables, threads, pools
    stage.finish_round()
    found = planned(spec, stage, cell, options)
    if fake is not None:
        fake.fake_reset_peak()
        fly(stage, options)
        peak = fake.fake_peak() - before
    elif options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        fly(stage, options)
        peak = torch.cuda.max_memory_allocated()
    else:
        with PeakMeter() as meter:
            vectors = stage.vectors.present
            held: list[torch.Tensor] = []
            held += [p for module in stage.layers.modules for p in module.parameters()]
            held += [b for module in stage.layers.modules for b in module.buffers()]
            for tensor in (vectors.parameters, vectors.gradients, *held):
                meter.see(tensor)
            fly(stage, options)
        peak = meter.peak_bytes
    return Row(peak, found.formula_bytes, found.elsewhere_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "fake"), default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="of the stage")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2, help="of a microbatch")
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=TRAINED)
    options = parser.parse_args()
    torch.manual_seed(0)
    spec = make_spec(options)
    print("| precision | trained | weights | activations | peak | formula | ratio | elsewhere |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        fake = None
        if options.device == "fake":
            fake = fake_device.install(fake_device.build(Path(folder)))
        places = PLACES if fake is not None else PLACES[:1]
        for of in itertools.product(options.precisions, options.trained, places, POLICIES):
            cell = Cell(*cast(tuple[PrecisionName, str, WeightsPlace, ActivationsName], of))
            if cell.weights != "device" and (
                cell.activations not in KEEP_NO_WEIGHTS or cell.precision == "fp16"
            ):
                continue  # refused
            row = measure(spec, cell, options, folder, fake)
            print(
                f"| {cell.precision} | {cell.trained} | {cell.weights} | {cell.activations} "
                f"| {row.peak_bytes / 1e6:.1f} MB | {row.formula_bytes / 1e6:.1f} MB "
                f"| {row.peak_bytes / row.formula_bytes:.2f} "
                f"| {row.elsewhere_bytes / 1e6:.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
