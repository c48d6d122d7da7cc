"""Weights that are not trained, in 8 or 4 bits a parameter: torchao's tensors, which work on every
device. They are made from the checked weights when a stage is built, and brought to the passes'
precision for each use; disk and wire know nothing of it.

`int8`: a scale for each row (torchao's weight-only quantization). `nf4`: 4-bit numbers with a
normal distribution's quantiles, a scale for 64 of them, the scales in 8 bits (QLoRA, Dettmers et
al. 2023).
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.needs import install_command

INT8, NF4 = "int8", "nf4"
BITS = {INT8: 8.1, NF4: 4.13}
"""A parameter, scales included."""
NF4_BLOCK, NF4_SCALES = 64, 256
NF4_UNIT = NF4_BLOCK * NF4_SCALES
"""Parameters of which torchao takes a multiple."""
NF4_AT_ONCE = 64 * NF4_UNIT
"""It needs many times the memory of what it packs."""


def check_packing(kind: str) -> None:
    """Raises `SpecError` where this machine cannot pack weights so; an empty kind is none."""
    if kind in BITS and find_spec("torchao") is None:
        raise SpecError(
            f'[lora] base_dtype = "{kind}" needs torchao on every machine of the run: '
            + install_command("torchao")
        )


class Packed:
    """A matrix in few bits."""

    def __init__(self, weight: Tensor, kind: str) -> None:
        """`weight`: [outputs, inputs], of any float type. `kind`: a key of `BITS`."""
        quantization = _torchao()
        _leave_uncompiled()
        self._shape = weight.shape
        self._kind = kind
        low = weight.detach().bfloat16()
        if kind == INT8:
            rows = quantization.PerRow()
            self._parts = [quantization.Int8Tensor.from_hp(low, granularity=rows)]
        else:
            flat = torch.nn.functional.pad(low.reshape(-1), (0, -low.numel() % NF4_UNIT))
            self._parts = [
                quantization.to_nf4(part.view(-1, NF4_BLOCK), NF4_BLOCK, NF4_SCALES)
                for part in flat.split(NF4_AT_ONCE)
            ]

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], as near as it is."""
        if self._kind == INT8:
            values: Tensor = self._parts[0].dequantize()
            return values.to(dtype)
        flat = [part.get_original_weight().reshape(-1).to(dtype) for part in self._parts]
        return torch.cat(flat)[: self._shape.numel()].view(self._shape)

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        inner = [getattr(part, n) for part in self._parts for n in part.__tensor_flatten__()[0]]
        return sum(t.numel() * t.element_size() for t in inner)


@cache
def _leave_uncompiled() -> None:
    """The compiler cannot read these tensors. Told with the first one: it is imported to be told,
    which takes two seconds."""
    Packed.unpacked = torch.compiler.disable(Packed.unpacked)  # type: ignore[method-assign]


def _torchao() -> Any:
    """Its module for quantization. Kernels that this machine has no use for are not lamented."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from torchao import quantization

    return quantization
