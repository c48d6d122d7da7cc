"""How attention goes where documents share a sample, by kind of device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swarmnet.training.attention.documents import PackedSequence
from swarmnet.training.attention.varlen import VarlenSequence, is_right_on

PACKED: dict[str, Callable[[Tensor], Any]] = {"cpu": PackedSequence, "cuda": VarlenSequence}
"""From the numbers of positions' documents, (samples, positions), a `models.base.SharedSequence`.
Other kinds of device have a mask of all scores."""


def packed_on(device: torch.device) -> Callable[[Tensor], Any] | None:
    """What `PACKED` has for a device."""
    return PACKED.get(device.type)


def masks_all_scores(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether attention makes one for documents that share a sample. `dtype`: of the pass."""
    if PACKED.get(device.type) is not VarlenSequence:
        return device.type not in PACKED
    return not is_right_on(device, dtype, head_size, is_grouped=False)


@functools.cache
def leave_uncompiled(packed: Any) -> None:
    """A compiler's graphs end before attention: they would each be of one set of documents. Told
    where something is compiled: the compiler takes two seconds to import."""
    packed.attend = torch.compiler.disable(packed.attend)
