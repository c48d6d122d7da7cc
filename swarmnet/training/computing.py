"""How one machine computes its stage: in which precision, and what it keeps between the passes.

Replicas of a stage may differ in all of it. What they exchange (parameters, gradients, digests,
checkpoints, activations) is fp32 in one canonical layout.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import swarmnet.training.accelerators as accelerators
from swarmnet.errors import SpecError
from swarmnet.spec import RunSpec

PrecisionName = Literal["fp32", "bf16", "fp16"]
ActivationsName = Literal["keep", "blocks", "recompute", "offload"]
KEEP_NO_WEIGHTS: tuple[ActivationsName, ...] = ("blocks", "recompute")
"""Policies whose graphs hold no weights: those of weights that come layer by layer."""
WeightsPlace = Literal["device", "host", "disk"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Computing:
    """The choices of one machine."""

    precision: PrecisionName = "fp32"
    """Of the passes. Gradients add up, and parameters are stepped, in fp32 whatever this says."""
    activations: ActivationsName = "keep"
    """Between forward and backward: the graph (`keep`); the input of each layer (`blocks`); the
    stage's input (`recompute`); the graph, with its tensors elsewhere (`offload`)."""
    compile: bool = False
    """`torch.compile` each layer."""
    max_in_flight: int = 1 << 16
    """Microbatches between their passes that memory has room for."""
    updates_on_device: bool = False
    """Parameters, gradient and moments lie in the memory of a device that has its own, and the
    update is made there."""
    weights: WeightsPlace = "device"
    """Where the weights lie: in the device's memory, or elsewhere, from where each layer's come for
    its part of a pass."""
    folder: str = ""
    """Where `offload` puts its files without a GPU, and weights on the disk; empty for the system's
    temporary folder."""
    max_device_bytes: int = 0
    """That this process may take of an accelerator's memory; 0 for all of it."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def values(self) -> dict[str, Any]:
        """Plain values, for the other ranks."""
        return asdict(self)


def computing_of(spec: RunSpec, device: torch.device | str = "cpu") -> Computing:
    """What the spec says, where the machine has no wish and nothing was measured."""
    activations = spec.pipeline.activations
    precision = choose_precision(spec, AUTO, device)
    return Computing(precision, "keep" if activations == "auto" else activations)


def choose_precision(
    spec: RunSpec,
    wanted: str = AUTO,
    device: torch.device | str = "cpu",
) -> PrecisionName:
    """What the machine wants, else what the run wants, else what suits the device: on an
    accelerator bf16, where it has none fp16, and fp32 elsewhere."""
    name = spec.pipeline.precision if wanted == AUTO else wanted
    if name == AUTO:
        name = _suits(torch.device(device))
    if name not in DTYPES:
        raise SpecError(f"precision {name!r} is unknown; known are auto, {', '.join(DTYPES)}")
    return name  # type: ignore[return-value]


def _suits(device: torch.device) -> str:
    if device.type == accelerators.CPU:
        return "fp32"
    if accelerators.computes_in(device, torch.bfloat16):
        return "bf16"
    return "fp16" if accelerators.computes_in(device, torch.float16) else "fp32"
