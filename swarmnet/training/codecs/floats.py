"""Codecs that keep floats: `none` and `bf16`."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import check_finite
from swarmnet.training.codecs.base import Codec


class Floats(Codec):
    """The nearest number of a float type, ties to even.

    `none`: fp32 as it is, without an error. `bf16`: the error of a number is at most 2^-8 of it
    (and 2^-134 for numbers below 2^-126)."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self._dtype)

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        if coded.dtype != self._dtype or coded.ndim != 2 or coded.shape[1] != num_values:
            raise ProtocolViolation(
                f"{what}: {coded.dtype} of shape {tuple(coded.shape)} instead of {self._dtype} "
                f"rows of {num_values} numbers"
            )
        check_finite(what, coded)

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        return coded.float()
