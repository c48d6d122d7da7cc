"""Attention of documents that share a sample, in one kernel that is told where each begins:
FlashAttention for sequences of any lengths (Dao, 2023, arXiv 2307.08691), which torch has for GPUs.
It makes no scores between documents.

`is_right_on` tries it once for each kind of head: on a few documents it must give what a mask of
all scores does, with the gradients. Where it does not, as on cards without it and in fp32, that
mask is taken.

Shapes: B samples, S positions, T = B x S, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnet.errors import one_line
from swarmnet.training.attention.documents import mask_of

log = logging.getLogger("swarmnet.attention")

TRIED = ((200,), (1, 63, 136), (66, 65, 69))
"""Documents of samples, tokens of each."""
TRIED_HEADS = 4
TOLERANCE = 0.02
"""Of the norm of outputs and gradients; rounding to bf16 makes less than 0.005 of it."""
CAUSAL = (-1, 0)
"""Positions that a query sees before its own, of which -1 is all, and after it."""


class VarlenSequence:
    """Samples of several documents, for all layers of a pass. Implements
    `models.base.SharedSequence`."""

    takes_windows = False

    def __init__(self, documents_BS: Tensor) -> None:
        """`documents_BS`: the number of each position's document, which grows along a sample."""
        self.length = documents_BS.shape[1]
        self._documents_BS = documents_BS
        begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
        begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        starts = begins_BS.flatten().nonzero().squeeze(1)
        self._ends = torch.cat((starts, starts.new_tensor([begins_BS.numel()]))).int()
        self._longest = int(self._ends.diff().max())
        self._mask: Tensor | None = None

    def attend(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        window: int = 0,
        cap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        """The output, (B, S, H, E)."""
        assert not any((window, cap, dropout))
        heads, size = q_BSHE.shape[2:]
        is_grouped = k_BSKE.shape[2] != heads
        if is_right_on(q_BSHE.device, q_BSHE.dtype, size, is_grouped=is_grouped):
            return self.at_once(q_BSHE, k_BSKE, v_BSKE)
        return self.masked(q_BSHE, k_BSKE, v_BSKE)

    def at_once(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """As `attend`, by the kernel."""
        of_all = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
        places = (self._ends, self._ends, self._longest, self._longest)
        is_grouped = k_BSKE.shape[2] != q_BSHE.shape[2]
        found: Tensor = _kernel()(*of_all, *places, window_size=CAUSAL, enable_gqa=is_grouped)
        return found.view(q_BSHE.shape)

    def masked(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """Likewise, by a mask, which all layers of the pass share."""
        if self._mask is None:
            self._mask = mask_of(self._documents_BS, q_BSHE.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=True)
        return attended.transpose(1, 2)


@functools.cache
def is_right_on(
    device: torch.device, dtype: torch.dtype, head_size: int, *, is_grouped: bool
) -> bool:
    """The kernel is there for heads of this size, which share keys or not, and does what a mask
    does. Where it does not, a line says why."""
    num_kv_heads = TRIED_HEADS // 2 if is_grouped else TRIED_HEADS
    # A thread of its own has no gradients switched off, nor hooks for what they keep, as the pass
    # that asks may have.
    with ThreadPoolExecutor(1) as elsewhere:
        trial = elsewhere.submit(_fault, device, dtype, head_size, num_kv_heads)
        try:
            fault = trial.result()
        except Exception as error:  # kernels are missing in many ways
            fault = f"{type(error).__name__}: {one_line(error, 120)}"
    if fault:
        log.warning(
            "documents that share a sample are attended to with a mask of all scores on %s in %s: "
            "FlashAttention for heads of %d: %s",
            device,
            str(dtype).removeprefix("torch."),
            head_size,
            fault,
        )
    return not fault


def _fault(device: torch.device, dtype: torch.dtype, head_size: int, num_kv_heads: int) -> str:
    """What is wrong with the kernel; empty for nothing."""
    rows = [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in TRIED]
    documents_BS = torch.stack(rows)
    generator = torch.Generator().manual_seed(0)
    shape = documents_BS.shape
    drawn = [
        torch.randn(*shape, heads, head_size, generator=generator)
        for heads in (TRIED_HEADS, num_kv_heads, num_kv_heads, TRIED_HEADS)
    ]
    found: list[list[Tensor]] = []
    for place, kind in ((device, dtype), (torch.device("cpu"), torch.float32)):
        *tensors, grad = (x.to(dtype).to(place, kind, copy=True) for x in drawn)
        leaves = [x.requires_grad_() for x in tensors]
        sequence = VarlenSequence(documents_BS.to(place))
        attend = sequence.masked if found else sequence.at_once
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, grad)
        found.append([x.detach().float().cpu() for x in (out, *gradients)])
    for ours, theirs in zip(*found, strict=True):
        apart = float((ours - theirs).norm() / theirs.norm())
        if not apart < TOLERANCE:
            return f"it gives other numbers than a mask, {apart:.2g} of them"
    return ""


@functools.cache
def _kernel() -> Any:
    """Of torch; older ones have none, or one that is told otherwise."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
