"""A model that a program has as modules, for the peers that the program itself starts.

The program writes a folder: a builder (`model.py`) like that of any custom model, and beside it the
modules with their loss, by cloudpickle, so that classes of a notebook's cell are in it, and the
samples, where they are no text. A pickle is code. So only a process that was given the builder's
path reads it, as with any code, and only if it is the very file that the builder was written with:
its SHA-256 is in there. Nothing of it is ever sent to a peer, or taken from one.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.batch import IGNORED
from swarmnet.errors import SpecError, one_line
from swarmnet.files import write_whole
from swarmnet.needs import install_command
from swarmnet.plurals import counted
from swarmnet.protocol.slots import permuted
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_numpy
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec, derive_seed
from swarmnet.wire import Array

Loss = Callable[[Tensor, Tensor], Tensor]
BUILDER_FILE, PICKLE_FILE = "model.py", "model.pickle"
BUILDER = '''\
"""Written by swarmnet.local, for the peers that it starts on this machine."""

import sys
from pathlib import Path

from swarmnet.training.models.given_layers import read_plan

sys.path += [path for path in {paths!r} if path not in sys.path]  # where the program found modules


def build(model):
    return read_plan(Path(__file__).with_name({pickle!r}), {digest!r})
'''


@dataclass(frozen=True, slots=True)
class GivenLayer:
    """One layer, and what was measured of it."""

    module: nn.Module
    cost: float
    """FLOPs of a forward pass over one sample."""
    output_shape: tuple[int, ...]
    """Of one sample."""
    is_block: bool
    """There are several of its class."""


@dataclass(frozen=True, slots=True)
class GivenArrays:
    """Samples in two files, one after the other: float32 or int32."""

    files: tuple[Path, Path]
    """Inputs and targets."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class GivenModel:
    """What is written."""

    layers: tuple[GivenLayer, ...]
    loss: Loss
    inputs: TensorSpec
    targets: TensorSpec
    arrays: GivenArrays | None
    """None: text."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Nats, summed over the targets; the last dimension of `outputs` has a number for each
    class."""
    flat = outputs.flatten(0, -2), targets.flatten().long()
    return F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")


def count_targets(targets: Tensor) -> int:
    """Classes that are not `IGNORED`; or samples, where targets are numbers."""
    return len(targets) if targets.is_floating_point() else int((targets != IGNORED).sum())


def write_model(model: GivenModel, folder: Path, paths: Sequence[str]) -> Path:
    """Writes builder and pickle into `folder`; returns the path of the builder's file. `paths`:
    where modules that it imports are found. Raises `SpecError` where a layer cannot be pickled, or
    the library is not there."""
    try:
        import cloudpickle
    except ImportError:
        needed = install_command("cloudpickle")
        raise SpecError(f"model: layers need one more library: {needed}") from None
    try:
        data = cloudpickle.dumps(model)
    except Exception as error:
        raise SpecError(
            f"model: {_refused(model, cloudpickle.dumps)} cannot be given to another process "
            f"({type(error).__name__}: {one_line(error)}); keep files, locks and the like out of it"
        ) from None
    write_whole(folder / PICKLE_FILE, data)
    text = BUILDER.format(
        paths=list(paths), pickle=PICKLE_FILE, digest=hashlib.sha256(data).hexdigest()
    )
    path = folder / BUILDER_FILE
    write_whole(path, text.encode())
    return path


def _refused(model: GivenModel, dumps: Callable[[Any], bytes]) -> str:
    """The part that cannot be pickled, in words."""
    for k, layer in enumerate(model.layers):
        try:
            dumps(layer.module)
        except Exception:
            return f"layer {k}"
    return "the loss"


def read_plan(path: Path, digest: str) -> ModelPlan:
    """The plan of what `write_model` has written, if it is that. Raises `SpecError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"model: cannot read {path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise SpecError(f"model: {path} is not the file that was written with its builder")
    return plan_of(pickle.loads(data))


def plan_of(model: GivenModel) -> ModelPlan:
    """Layers are named by their numbers, as in an `nn.Sequential`; they begin with the values that
    they have."""
    layers = tuple(
        LayerBuilder(str(k), _builder(each.module), each.cost, each.output_shape, {}, each.is_block)
        for k, each in enumerate(model.layers)
    )
    arrays = model.arrays
    return ModelPlan(
        layers=layers,
        inputs=model.inputs,
        targets=model.targets,
        loss=model.loss,
        count=count_targets,
        data=None if arrays is None else lambda spec: ArraySamples(model, arrays, spec),
        takes_ignored=model.loss is cross_entropy,
        is_random=True,
    )


def _builder(module: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = copy.deepcopy(module)
        return made.to("meta") if torch.get_default_device().type == "meta" else made

    return build


class ArraySamples:
    """Samples of two files, of which some are held out; each epoch has its own order."""

    bytes_per_token = 0.0  # not text

    def __init__(self, model: GivenModel, arrays: GivenArrays, spec: RunSpec) -> None:
        """Raises `SpecError` where they are fewer than a microbatch."""
        size, total = spec.pipeline.microbatch, arrays.num_samples
        wanted = int(total * spec.data.held_out_fraction) // size
        self.samples_per_microbatch = size
        self.num_held_out = min(wanted, spec.data.held_out_microbatches)
        self._first = self.num_held_out * size
        """What comes before it, in an order of its own, is held out."""
        self.num_samples = total - self._first
        if self.num_samples < size:
            raise SpecError(f"data: {counted(total, 'sample')}, fewer than a microbatch of {size}")
        self._total = total
        self._seeds = [derive_seed(spec.seed, name) for name in ("held out", "order")]
        self._arrays = [
            np.memmap(path, dtype=of.dtype, mode="r", shape=(total, *of.shape))
            for path, of in zip(arrays.files, (model.inputs, model.targets), strict=True)
        ]

    def microbatch(self, indices: Sequence[int]) -> tuple[Array, Array]:
        places = (divmod(index, self.num_samples) for index in indices)
        order = (permuted(self._seeds[1], e, place, self.num_samples) for e, place in places)
        return self._rows([self._first + number for number in order])

    def held_out(self, index: int) -> tuple[Array, Array]:
        size = self.samples_per_microbatch
        return self._rows(range(index * size, (index + 1) * size))

    def _rows(self, numbers: Sequence[int]) -> tuple[Array, Array]:
        rows = [permuted(self._seeds[0], 0, number, self._total) for number in numbers]
        inputs, targets = (from_numpy(np.ascontiguousarray(each[rows])) for each in self._arrays)
        return inputs, targets


def structure_of(model: GivenModel, data: str) -> str:
    """32 hex digits: what makes two of them the same run, which is not the values that they begin
    with. `data`: a hash of the samples."""
    lines: list[Any] = [
        (type(layer.module).__qualname__, layer.output_shape, _shapes(layer.module))
        for layer in model.layers
    ]
    text = repr((lines, model.inputs, model.targets, data))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]
