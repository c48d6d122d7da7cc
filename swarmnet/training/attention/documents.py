"""Attention where several documents share a sample: of each document alone, so that no scores are
made that a mask would hide.

Documents that are short together are attended to at once, with a mask of their own; a call each
would cost more than their scores. Where samples have documents at the same places, these are one
call.

Shapes: B samples, S positions, L queries, M keys, R of the queries, C of the keys, H query heads, K
key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from swarmnet.training.attention.blocks import attend, attend_back

JOINED = 256
"""Positions that documents with a mask reach over at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries of some samples, and all keys that they see. No query is in two parts, nor a key."""

    samples: slice | list[int]
    rows: slice
    columns: slice
    sees_BRC: Tensor | None
    """True where a query sees a key; None: each sees all that `is_causal` lets it see."""
    is_causal: bool


def parts_of(queries_BL: Tensor, keys_BM: Tensor, *, is_own: bool) -> list[Part]:
    """What of queries and keys to attend to at once, by the numbers of their documents, which grow
    along a sequence. `is_own`: they are of the same positions, and no query sees a later key; else
    every key comes before all queries."""
    places: dict[tuple[int, int, int, int], list[tuple[int, bool]]] = {}
    for sample, both in enumerate(zip(queries_BL, keys_BM, strict=True)):
        for place, is_one in _joined(_shared(*map(_runs, both))):
            places.setdefault(place, []).append((sample, is_one))
    parts = []
    for (top, bottom, left, right), found in places.items():
        samples, rows, columns = (
            _slice([s for s, _ in found]),
            slice(top, bottom),
            slice(left, right),
        )
        sees = None
        if not all(is_one for _, is_one in found):
            queries, keys = queries_BL[samples, rows], keys_BM[samples, columns]
            sees = queries.unsqueeze(2) == keys.unsqueeze(1)
            sees = sees.tril() if is_own else sees
        parts.append(Part(samples, rows, columns, sees, is_own and sees is None))
    return parts


def _slice(samples: list[int]) -> slice | list[int]:
    """Of samples that follow each other, which are read without a copy."""
    first, end = samples[0], samples[-1] + 1
    return slice(first, end) if samples == list(range(first, end)) else samples


def _runs(documents: Tensor) -> dict[int, tuple[int, int]]:
    """Where each document begins and ends."""
    numbers, counts = torch.unique_consecutive(documents, return_counts=True)
    ends = [0, *counts.cumsum(0).tolist()]
    return dict(zip(numbers.tolist(), pairwise(ends), strict=True))


def _shared(
    queries: dict[int, tuple[int, int]], keys: dict[int, tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """Of each document that both have, its queries and its keys."""
    return [(*rows, *keys[number]) for number, rows in queries.items() if number in keys]


def _joined(
    places: Sequence[tuple[int, int, int, int]],
) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """Those that follow each other as one, as far as they stay small; and whether it is one."""
    start = 0
    for i, (_, bottom, _, right) in enumerate(places):
        top, _, left, _ = places[start]
        if i > start and max(bottom - top, right - left) > JOINED:
            yield _around(places[start:i])
            start = i
    if places:
        yield _around(places[start:])


def _around(
    places: Sequence[tuple[int, int, int, int]],
) -> tuple[tuple[int, int, int, int], bool]:
    top, _, left, _ = places[0]
    _, bottom, _, right = places[-1]
    return (top, bottom, left, right), len(places) == 1


def attend_in_parts(
    parts: Sequence[Part], q_BLHE: Tensor, k_BMKE: Tensor, v_BMKE: Tensor, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `blocks.attend`."""
    out_BLHE = torch.zeros_like(q_BLHE, memory_format=torch.contiguous_format)
    lse_BHL = q_BLHE.new_full(q_BLHE.transpose(1, 2).shape[:-1], -torch.inf, dtype=torch.float32)
    for p in parts:
        rows, columns = (p.samples, p.rows), (p.samples, p.columns)
        out, lse = attend(
            q_BLHE[rows],
            k_BMKE[columns],
            v_BMKE[columns],
            sees_BLM=p.sees_BRC,
            is_causal=p.is_causal,
            cap=cap,
        )
        out_BLHE[rows] = out
        lse_BHL[p.samples, :, p.rows] = lse
    return out_BLHE, lse_BHL


def attend_back_in_parts(
    parts: Sequence[Part], *tensors: Tensor, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """As `blocks.attend_back`, whose tensors these are, in its order."""
    grad_BLHE, q_BLHE, k_BMKE, v_BMKE, out_BLHE, lse_BHL = tensors
    dq_BLHE, dk_BMKE, dv_BMKE = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_BLHE, k_BMKE, v_BMKE)
    )
    for p in parts:
        rows, columns = (p.samples, p.rows), (p.samples, p.columns)
        dq_BLHE[rows], dk_BMKE[columns], dv_BMKE[columns] = attend_back(
            grad_BLHE[rows],
            q_BLHE[rows],
            k_BMKE[columns],
            v_BMKE[columns],
            out_BLHE[rows],
            lse_BHL[p.samples, :, p.rows],
            sees_BLM=p.sees_BRC,
            is_causal=p.is_causal,
            cap=cap,
        )
    return dq_BLHE, dk_BMKE, dv_BMKE


class PackedSequence:
    """Samples of several documents, for all layers of a pass. Implements
    `models.base.SharedSequence`."""

    takes_windows = False

    def __init__(self, documents_BS: Tensor) -> None:
        """`documents_BS`: the number of each position's document, which grows along a sample."""
        self.length = documents_BS.shape[1]
        self._parts = parts_of(documents_BS, documents_BS, is_own=True)

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
        return attended(self, q_BSHE, k_BSKE, v_BSKE)

    def forward(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the lse (B, H, S) in fp32."""
        return attend_in_parts(self._parts, q_BSHE, k_BSKE, v_BSKE)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        return attend_back_in_parts(self._parts, *tensors)


def mask_of(documents_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """To be added to scores, (B, 1, S, S): 0 where a position sees another, of its own document and
    not after it, else minus infinity."""
    sees_BSS = (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)).tril()
    mask = torch.zeros(sees_BSS.shape, dtype=dtype, device=documents_BS.device)
    return mask.masked_fill_(~sees_BSS, -torch.inf).unsqueeze(1)


class HasPasses(Protocol):
    """Attention with a backward pass of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output, (B, L, H, E), and the lse, (B, H, L)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""


def attended(by: HasPasses, q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor) -> Tensor:
    """The output, which autograd goes back through."""
    return cast(Tensor, _Attention.apply(q_BLHE, k_BLKE, v_BLKE, by))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, by: HasPasses) -> Tensor:
        out, lse = by.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.by = by
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (*ctx.by.backward(grads[0], *ctx.saved_tensors), None)
