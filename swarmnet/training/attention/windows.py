"""Attention that looks back over a window of positions: a query sees so many keys, its own the last
of them. Queries are taken some at a time, each time with the keys that any of them sees.

Shapes: B samples, L queries, M keys, R of the queries, C of the keys, H query heads, K key/value
heads, E head size.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.training.attention.blocks import attend, attend_back

ROWS = 256
"""Queries at a time."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries, and keys of which each is seen by some of them."""

    rows: slice
    columns: slice
    sees_all: bool
    """Each query sees each key."""


class Window:
    """What some positions see of others."""

    def __init__(
        self,
        queries: list[int],
        keys: list[int],
        size: int,
        device: torch.device,
        documents: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """
        Args:
            queries: their positions, in ascending order.
            keys: likewise.
            size: positions that a query looks back on, its own included.
            device: that attention is computed on.
            documents: (B, L) and (B, M), numbers of the documents that positions are of; None
                where all are of one.
        """
        self._size = size
        self._documents = documents
        self._queries_L = torch.tensor(queries, device=device)
        self._keys_M = torch.tensor(keys, device=device)
        self._tiles = list(_tiles(queries, keys, size))

    @property
    def is_unseen(self) -> bool:
        """No query sees a key."""
        return not self._tiles

    def attend(
        self, q_BLHE: Tensor, k_BMKE: Tensor, v_BMKE: Tensor, cap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """As `blocks.attend`."""
        out_BLHE = torch.zeros_like(q_BLHE, memory_format=torch.contiguous_format)
        lse_BHL = q_BLHE.new_full(
            q_BLHE.transpose(1, 2).shape[:-1], -torch.inf, dtype=torch.float32
        )
        for tile in self._tiles:
            rows, columns = tile.rows, tile.columns
            out_BLHE[:, rows], lse_BHL[:, :, rows] = attend(
                q_BLHE[:, rows],
                k_BMKE[:, columns],
                v_BMKE[:, columns],
                sees_BLM=self._sees(tile),
                is_causal=False,
                cap=cap,
            )
        return out_BLHE, lse_BHL

    def attend_back(
        self,
        grad_BLHE: Tensor,
        q_BLHE: Tensor,
        k_BMKE: Tensor,
        v_BMKE: Tensor,
        out_BLHE: Tensor,
        lse_BHL: Tensor,
        cap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `blocks.attend_back`."""
        dq_BLHE, dk_BMKE, dv_BMKE = (
            torch.zeros_like(x, memory_format=torch.contiguous_format, dtype=torch.float32)
            for x in (q_BLHE, k_BMKE, v_BMKE)
        )
        for tile in self._tiles:
            rows, columns = tile.rows, tile.columns
            dq_BLHE[:, rows], dk, dv = attend_back(
                grad_BLHE[:, rows],
                q_BLHE[:, rows],
                k_BMKE[:, columns],
                v_BMKE[:, columns],
                out_BLHE[:, rows],
                lse_BHL[:, :, rows],
                sees_BLM=self._sees(tile),
                is_causal=False,
                cap=cap,
            )
            dk_BMKE[:, columns] += dk
            dv_BMKE[:, columns] += dv
        return dq_BLHE.to(q_BLHE.dtype), dk_BMKE.to(k_BMKE.dtype), dv_BMKE.to(v_BMKE.dtype)

    def _sees(self, tile: _Tile) -> Tensor | None:
        """(B or 1, R, C). Made for each pass: all tiles' together would take more than what a
        rank keeps."""
        if tile.sees_all and self._documents is None:
            return None
        back_RC = self._queries_L[tile.rows].unsqueeze(1) - self._keys_M[tile.columns]
        sees = ((back_RC >= 0) & (back_RC < self._size)).unsqueeze(0)
        if self._documents is None:
            return sees
        queries_BL, keys_BM = self._documents
        return sees & (
            queries_BL[:, tile.rows].unsqueeze(2) == keys_BM[:, tile.columns].unsqueeze(1)
        )


def _tiles(queries: list[int], keys: list[int], size: int) -> list[_Tile]:
    """Those in which something is seen. The queries of one follow each other."""
    found, start = [], 0
    while start < len(queries):
        stop = start + 1
        while (
            stop < len(queries) and stop - start < ROWS and queries[stop] == queries[stop - 1] + 1
        ):
            stop += 1
        first, last = queries[start], queries[stop - 1]
        left = bisect_right(keys, first - size)
        right = bisect_right(keys, last)
        if left < right:
            is_whole = keys[right - 1] <= first and keys[left] > last - size
            found.append(_Tile(slice(start, stop), slice(left, right), is_whole))
        start = stop
    return found
