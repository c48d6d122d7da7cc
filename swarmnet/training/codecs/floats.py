"""Codecs that keep floats: `none` and `bf16`."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import BF16, NONE
from swarmnet.training.arrays import check_finite
from swarmnet.training.codecs.base import Codec


class Plain(Codec):
    """`none`: fp32 as it is. No error."""

    name = NONE

    def encode(self, values: Tensor) -> Tensor:
        return values

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        _check_form(what, coded, torch.float32, num_values)
        check_finite(what, coded)

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        return coded


class BFloat16(Codec):
    """`bf16`: the nearest bfloat16, ties to even. The error of a number is at most 2^-8 of it (and
    2^-134 for numbers below 2^-126)."""

    name = BF16

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16)

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        _check_form(what, coded, torch.bfloat16, num_values)
        check_finite(what, coded)

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        return coded.float()


def _check_form(what: str, coded: Tensor, dtype: torch.dtype, num_values: int) -> None:
    if coded.dtype != dtype or coded.ndim != 2 or coded.shape[1] != num_values:
        raise ProtocolViolation(
            f"{what}: {coded.dtype} of shape {tuple(coded.shape)} instead of {dtype} rows of "
            f"{num_values} numbers"
        )
