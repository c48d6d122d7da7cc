"""Weights that are not trained, in 8 or 4 bits a parameter: torchao's tensors, which work on every
device. They are made from the checked weights when a stage is built, and brought to the passes'
precision for each use; disk and wire know nothing of it.

`int8`: a scale for each row (torchao's weight-only quantization). `nf4`: 4-bit numbers with a
normal distribution's quantiles, a scale for 64 of them, the scales in 8 bits (QLoRA, Dettmers et
al. 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
NUMBERS_PER_BYTE = {INT8: 1, NF4: 2}
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

    def by_row(self) -> PackedPart:
        """All of it. The inputs of nf4 are a multiple of `NF4_BLOCK`."""
        if self._kind == INT8:
            (part,) = self._parts
            return PackedPart(INT8, part.qdata, part.scale.view(-1, 1))
        outputs, inputs = self._shape
        assert inputs % NF4_BLOCK == 0, "it has been checked"
        codes = torch.cat([part.quantized_data for part in self._parts])
        scales = torch.cat(
            [
                part.dequantize_scalers(
                    part.quantized_scalers, part.quantization_factor, part.scaler_block_size
                )
                for part in self._parts
            ]
        )
        size = self._shape.numel()
        return PackedPart(
            NF4,
            codes[: size // NUMBERS_PER_BYTE[NF4]].view(outputs, -1),
            scales[: size // NF4_BLOCK].view(outputs, -1),
            self._parts[0].nf4,
        )

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        inner = [getattr(part, n) for part in self._parts for n in part.__tensor_flatten__()[0]]
        return sum(t.numel() * t.element_size() for t in inner)


class PackedPart:
    """Some rows of a matrix in few bits, or some columns of each, for a rank that has no more: the
    numbers are those of the whole matrix, to the bit."""

    def __init__(
        self, kind: str, codes: Tensor, scales: Tensor, values: Tensor | None = None
    ) -> None:
        """
        Args:
            kind: a key of `BITS`.
            codes: int8 (rows, columns), or of nf4 two in a byte, (rows, columns / 2).
            scales: fp32 (rows, 1), or of nf4 bf16 (rows, columns / `NF4_BLOCK`).
            values: of the 16 codes of nf4, bf16.
        """
        self.kind = kind
        self.codes = codes
        self.scales = scales
        self.values = values

    def with_parts(self, of: Callable[[Tensor, int], Tensor]) -> PackedPart:
        """`of(tensor, n)`: a part of the codes or scales, of which one is for n columns; 0 for all
        of a row."""
        per_scale = 0 if self.kind == INT8 else NF4_BLOCK
        codes, scales = of(self.codes, NUMBERS_PER_BYTE[self.kind]), of(self.scales, per_scale)
        return PackedPart(self.kind, codes, scales, self.values)

    def to(self, device: torch.device) -> PackedPart:
        """In memory of its own there."""
        codes, scales = (
            t.to(device, copy=True, memory_format=torch.contiguous_format)
            for t in (self.codes, self.scales)
        )
        values = None if self.values is None else self.values.to(device)
        return PackedPart(self.kind, codes, scales, values)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """(rows, columns), as near as it is."""
        if self.values is None:
            return (self.codes.bfloat16() * self.scales).bfloat16().to(dtype)
        both = torch.stack((self.codes >> 4, self.codes & 0b1111), dim=-1).long()
        numbers = self.values[both].view(*self.scales.shape, NF4_BLOCK)
        return (numbers * self.scales.unsqueeze(-1)).flatten(1).to(dtype)

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return self.codes.nbytes + self.scales.nbytes


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
