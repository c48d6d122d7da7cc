"""A program's own modules and samples, as the files of a model that its peers can build."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from swarmnet.errors import DataError, SpecError, one_line
from swarmnet.files import WITH_ROOM, GivenFile, told_if_not_written
from swarmnet.plurals import counted
from swarmnet.training.models.base import TensorSpec, check_layer
from swarmnet.training.models.given_layers import (
    GivenArrays,
    GivenLayer,
    GivenModel,
    Loss,
    cross_entropy,
    structure_of,
    write_model,
)

FILES = ("inputs.bin", "targets.bin")
KINDS = {"f": "float32", "i": "int32", "u": "int32", "b": "int32"}
"""As samples are kept, by the kind of their numpy dtype."""
LARGEST_INT = 2**31 - 1


def model_table(
    layers: Iterable[nn.Module],
    loss: Loss | None,
    folder: Path,
    *,
    pairs: Iterator[Any] | None,
    length: int,
) -> dict[str, Any]:
    """`[model]` of a run that trains these layers, whose files are written into `folder`.

    Args:
        pairs: inputs and targets; None for text.
        length: tokens of a sample of text.

    Raises:
        SpecError: they are no layers that a run can train.
        DataError: the samples are wrong.
    """
    modules = _modules(layers)
    if pairs is None:
        arrays, digest = None, ""
        inputs = targets = TensorSpec("int32", (length,), num_values=1)
    else:
        arrays, (inputs, targets), digest = _written(pairs, folder)
    given = _measured(modules, inputs)
    width = (given[-1].output_shape or (1,))[-1]
    if pairs is None:
        if given[-1].output_shape[:-1] != (length,):
            raise SpecError(
                f"model: of {counted(length, 'token')} the last layer makes "
                f"{given[-1].output_shape}; a model of text makes a number for each token of the "
                "vocabulary, at each position"
            )
        inputs = targets = TensorSpec("int32", (length,), num_values=width)
    if loss is None and targets.dtype != "int32":
        raise SpecError(
            "model: the targets are numbers and no classes: give loss=, a function of outputs and "
            "targets that sums over the samples"
        )
    if loss is None and targets.num_values > width:
        raise SpecError(
            f"model: the targets have classes up to {targets.num_values - 1}, and the last layer "
            f"makes {width} numbers"
        )
    model = GivenModel(given, loss or cross_entropy, inputs, targets, arrays)
    with told_if_not_written(folder, WITH_ROOM):
        builder = write_model(model, folder, [path for path in sys.path if path])
    options = {"model": structure_of(model, digest)}
    return {"kind": "custom", "builder": f"{builder}:build", "options": options}


def _modules(layers: Any) -> list[nn.Module]:
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList)):
        raise SpecError(
            "model: give its layers, as a list or an nn.Sequential: the run cuts between them"
        )
    modules = list(layers)
    if not modules:
        raise SpecError("model: there is no layer")
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise SpecError(f"model: layer {k} is a {type(module).__name__}, and no nn.Module")
        check_layer(f"model: layer {k}", module)
        if any(tensor.device.type != "cpu" for tensor in module.state_dict().values()):
            raise SpecError(f"model: layer {k} is on a device; give it on the CPU: .cpu()")
    for (a, first), (b, second) in combinations(enumerate(modules), 2):
        if {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}:
            raise SpecError(f"model: layers {a} and {b} have a parameter in common; give each one")
    return modules


def _measured(modules: Sequence[nn.Module], inputs: TensorSpec) -> tuple[GivenLayer, ...]:
    """By a pass over one sample of zeros."""
    alike = Counter(type(module) for module in modules if any(True for _ in module.parameters()))
    found = []
    x: Any = torch.zeros(1, *inputs.shape, dtype=getattr(torch, inputs.dtype))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for k, module in enumerate(modules):
            counter = FlopCounterMode(display=False)
            try:
                with counter:
                    x = module(x)
            except Exception as error:
                raise SpecError(
                    f"model: layer {k} failed with one sample: {type(error).__name__}: "
                    f"{one_line(error)}"
                ) from error
            if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.shape[:1] != (1,):
                raise SpecError(
                    f"model: layer {k} must give one float32 tensor, whose first dimension is the "
                    "samples"
                )
            cost = float(max(counter.get_total_flops(), x.numel()))
            is_block = alike[type(module)] > 1
            found.append(GivenLayer(module, cost, tuple(x.shape[1:]), is_block))
    return tuple(found)


def _written(
    pairs: Iterator[Any], folder: Path
) -> tuple[GivenArrays, tuple[TensorSpec, TensorSpec], str]:
    """Samples in files, what they are like, and a hash of them."""
    paths = folder / FILES[0], folder / FILES[1]
    shapes: list[tuple[int, ...]] = []
    kinds: list[str] = []
    largest, num, digest = [0, 0], 0, hashlib.sha256()
    with GivenFile(paths[0], WITH_ROOM) as first, GivenFile(paths[1], WITH_ROOM) as second:
        for num, pair in enumerate(pairs, 1):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise DataError(f"data: sample {num} is no pair of an input and a target")
            values = [_array(value, num) for value in pair]
            if num == 1:
                shapes, kinds = [v.shape for v in values], [KINDS[v.dtype.kind] for v in values]
            for k, (value, file) in enumerate(zip(values, (first, second), strict=True)):
                if value.shape != shapes[k] or KINDS[value.dtype.kind] != kinds[k]:
                    raise DataError(f"data: sample {num} has another shape or type than the first")
                if kinds[k] == "int32":
                    if value.size and not 0 <= value.min() <= value.max() <= LARGEST_INT:
                        raise DataError(f"data: sample {num} has a class below 0, or a large one")
                    largest[k] = max(largest[k], int(value.max(initial=0)))
                elif not np.isfinite(value).all():
                    raise DataError(f"data: sample {num} is not finite")
                raw = value.astype(kinds[k]).tobytes()
                digest.update(raw)
                file.write(raw)
    if not num:
        raise DataError("data: there is no sample")
    inputs, targets = (
        TensorSpec(kinds[k], shapes[k], largest[k] + 1 if kinds[k] == "int32" else 0)
        for k in range(2)
    )
    return GivenArrays(paths, num), (inputs, targets), digest.hexdigest()


def _array(value: Any, num: int) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    found = np.asarray(value)
    if found.dtype.kind not in KINDS:
        raise DataError(f"data: sample {num} has a {type(value).__name__}, and no numbers")
    return found
