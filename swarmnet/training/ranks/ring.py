"""Causal attention over a sequence that lies on several ranks (ring attention, Liu et al., 2023,
arXiv 2310.01889).

A rank has its own queries, keys and values. In each step it gets the keys and values that another
rank has, and attends to them; outputs are put together by their lse (`attention.blocks`). While it
computes, those of the next step are under way. At step s rank r gets them from rank r - s, which
sends what r sees of it and no more. In the backward pass they come once more, and the gradient of
them goes back to the rank that has them. Where attention has a window, a step in which no rank sees
anything is left out.

All ranks make the same collectives in the same order.

Shapes: B samples, S positions, L of them on this rank, M keys of a block, H query heads, K
key/value heads, E head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from swarmnet.training.attention.blocks import attend, attend_back
from swarmnet.training.attention.documents import (
    Part,
    attend_back_in_parts,
    attend_in_parts,
    attended,
    parts_of,
)
from swarmnet.training.attention.dropped import attend_dropping
from swarmnet.training.attention.windows import Window
from swarmnet.training.ranks.tensor_parallel import SEQUENCE_DIM, Region, both_ways
from swarmnet.training.ranks.zigzag import Zigzag


def part_of_rank(zigzag: Zigzag, rank: int, x: Tensor) -> Tensor:
    """The positions of a rank of a tensor (B, S, ...), in order."""
    return torch.cat([x[:, piece] for piece in zigzag.pieces(rank)], dim=SEQUENCE_DIM)


def whole(zigzag: Zigzag, region: Region, x: Tensor) -> Tensor:
    """The positions of all ranks, (B, S, ...), from those of each."""
    shape = list(x.shape)
    shape[SEQUENCE_DIM] = zigzag.largest
    mine = x.new_zeros(shape)
    mine[:, : x.shape[SEQUENCE_DIM]] = x
    parts = [torch.empty_like(mine) for _ in range(region.num_ranks)]
    region.group.allgather([parts], [mine]).wait()
    shape[SEQUENCE_DIM] = zigzag.length
    found = x.new_empty(shape)
    for rank, part in enumerate(parts):
        early = zigzag.early(rank)
        first, last = zigzag.pieces(rank)
        found[:, first] = part[:, :early]
        found[:, last] = part[:, early : zigzag.size(rank)]
    return found


class Ring:
    """The attention of one pass, for all of its layers. Implements `models.base.SharedSequence`."""

    takes_windows = True

    def __init__(self, zigzag: Zigzag, region: Region, documents_BS: Tensor | None = None) -> None:
        """`documents_BS`: the number of each position's document, which grows along the sequence;
        None where all of it is one."""
        self.length = zigzag.length
        self._about = zigzag, region, documents_BS
        self._by_kind: dict[tuple[int, float], _RingOfWindow] = {}
        self._seen_by_window: dict[int, Tensor] = {}

    def attend(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        window: int = 0,
        cap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        """The output of this rank's queries, (B, L, H, E). `window`, `cap`, `dropout`: as of
        `SharedSequence.attend`. Weights that are left out are those of a query beside all keys, so
        with dropout a rank has all of these at once."""
        if dropout:
            k_BSKE, v_BSKE = self._of_all_ranks(k_BLKE, v_BLKE)
            sees_BLS = self._sees(window, q_BLHE.device)
            return attend_dropping(q_BLHE, k_BSKE, v_BSKE, sees_BLS, dropout, cap)
        return attended(self._of_kind(window, cap, q_BLHE.device), q_BLHE, k_BLKE, v_BLKE)

    def forward(
        self, q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor, window: int = 0, cap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Without a backward pass: the output, and the lse (B, H, L), both in fp32."""
        return self._of_kind(window, cap, q_BLHE.device).attend(q_BLHE, k_BLKE, v_BLKE)

    def _of_all_ranks(self, k_BLKE: Tensor, v_BLKE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence."""
        zigzag, region, _ = self._about

        def back(grad: Tensor) -> Tensor:
            return part_of_rank(zigzag, region.rank, region.all_reduce(grad))

        both = torch.stack((k_BLKE, v_BLKE), dim=2)
        k_BSKE, v_BSKE = both_ways(both, partial(whole, zigzag, region), back).unbind(dim=2)
        return k_BSKE, v_BSKE

    def _sees(self, window: int, device: torch.device) -> Tensor:
        """(B or 1, L, S): true where a query of this rank sees a position."""
        if window not in self._seen_by_window:
            zigzag, region, documents_BS = self._about
            at_L = torch.tensor(zigzag.positions(region.rank), device=device)
            back_LS = at_L.unsqueeze(1) - torch.arange(zigzag.length, device=device)
            sees = ((back_LS >= 0) & (back_LS < (window or zigzag.length))).unsqueeze(0)
            if documents_BS is not None:
                own_BL = part_of_rank(zigzag, region.rank, documents_BS)
                sees = sees & (own_BL.unsqueeze(2) == documents_BS.unsqueeze(1))
            self._seen_by_window[window] = sees
        return self._seen_by_window[window]

    def _of_kind(self, window: int, cap: float, device: torch.device) -> _RingOfWindow:
        kind = (0 if window >= self.length else window), cap
        if kind not in self._by_kind:
            self._by_kind[kind] = _RingOfWindow(*self._about, *kind, device)
        return self._by_kind[kind]


class _RingOfWindow:
    """Of the layers with one window, or with none, and one cap of scores."""

    def __init__(
        self,
        zigzag: Zigzag,
        region: Region,
        documents_BS: Tensor | None,
        window: int,
        cap: float,
        device: torch.device,
    ) -> None:
        """As for `Ring`. `window`, `cap`: 0 for none."""
        self._zigzag = zigzag
        self._region = region
        self._window = window
        rank, others = region.rank, range(region.num_ranks)
        of_ranks = None
        if documents_BS is not None:
            of_ranks = [part_of_rank(zigzag, r, documents_BS) for r in others]
        self._blocks: list[_Block | _WindowBlock] = []
        for other in others:
            rows, columns = self._seen(rank, other)
            of_both = None if of_ranks is None else (of_ranks[rank], of_ranks[other])
            if not window:
                block = _Block(rows, columns, other == rank, cap)
                if of_both is not None:
                    block.know(*of_both)
                self._blocks.append(block)
                continue
            positions = zigzag.positions(rank)[rows], zigzag.positions(other)[columns]
            if of_both is not None:
                of_both = of_both[0][:, rows], of_both[1][:, columns]
            seen = Window(*positions, window, device, of_both)
            self._blocks.append(_WindowBlock(rows, columns, seen, cap))
        self._steps = [step for step in others if step and self._is_used(step)]

    def _seen(self, rank: int, other: int) -> tuple[slice, slice]:
        if self._window:
            return self._zigzag.seen_in_window(rank, other, self._window)
        return self._zigzag.seen(rank, other)

    def _is_used(self, step: int) -> bool:
        """Some rank sees keys of the one that it gets them from. All ranks know alike."""
        num_ranks = self._region.num_ranks
        columns = (self._seen(r, (r - step) % num_ranks)[1] for r in range(num_ranks))
        return any(c.start < c.stop for c in columns)

    def forward(self, q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the lse (B, H, L) in fp32."""
        out_BLHE, lse_BHL = self.attend(q_BLHE, k_BLKE, v_BLKE)
        return out_BLHE.to(q_BLHE.dtype), lse_BHL

    def attend(self, q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, the output in fp32."""
        rank = self._region.rank
        ahead = iter(self._steps)
        coming = self._begin_fetch(next(ahead, None), k_BLKE, v_BLKE)
        out_BLHE, lse_BHL = self._blocks[rank].attend(q_BLHE, k_BLKE, v_BLKE)
        out_BLHE = out_BLHE.float()
        for step in self._steps:
            k, v = coming()
            coming = self._begin_fetch(next(ahead, None), k_BLKE, v_BLKE)
            block = self._blocks[self._from(step)]
            if block.is_unseen:
                continue
            rows = block.rows
            more = block.attend(q_BLHE[:, rows], k, v)
            put_together(out_BLHE[:, rows], lse_BHL[:, :, rows], *more)
        return out_BLHE, lse_BHL

    def backward(
        self,
        grad_BLHE: Tensor,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        out_BLHE: Tensor,
        lse_BHL: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        rank = self._region.rank
        ahead = iter(self._steps)
        coming = self._begin_fetch(next(ahead, None), k_BLKE, v_BLKE)
        own = self._blocks[rank]
        found = own.attend_back(grad_BLHE, q_BLHE, k_BLKE, v_BLKE, out_BLHE, lse_BHL)
        dq_BLHE, dk_BLKE, dv_BLKE = (x.float() for x in found)
        given_back: Callable[[], Tensor] | None = None
        before = 0
        for step in self._steps:
            k, v = coming()
            coming = self._begin_fetch(next(ahead, None), k_BLKE, v_BLKE)
            block = self._blocks[self._from(step)]
            back = k.new_zeros(2, *k.shape)
            if not block.is_unseen:
                rows = block.rows
                dq, back[0], back[1] = block.attend_back(
                    grad_BLHE[:, rows],
                    q_BLHE[:, rows],
                    k,
                    v,
                    out_BLHE[:, rows],
                    lse_BHL[:, :, rows],
                )
                dq_BLHE[:, rows] += dq
            if given_back is not None:
                self._add(before, given_back(), dk_BLKE, dv_BLKE)
            given_back, before = self._begin_give(step, back, k_BLKE), step
        if given_back is not None:
            self._add(before, given_back(), dk_BLKE, dv_BLKE)
        to = q_BLHE.dtype
        return dq_BLHE.to(to), dk_BLKE.to(to), dv_BLKE.to(to)

    # ---- what ranks send ---------------------------------------------------------------------

    def _from(self, step: int) -> int:
        """Whose keys come in a step."""
        return (self._region.rank - step) % self._region.num_ranks

    def _to(self, step: int) -> int:
        """Who gets this rank's."""
        return (self._region.rank + step) % self._region.num_ranks

    def _seen_by(self, other: int) -> slice:
        """Of this rank's keys."""
        return self._seen(other, self._region.rank)[1]

    def _begin_fetch(
        self, step: int | None, k_BLKE: Tensor, v_BLKE: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begins to send and get what is attended to in a step, if there is one. The result waits
        for what comes: keys and values, each (B, M, K, E)."""
        if step is None:
            return lambda: (k_BLKE, v_BLKE)  # nobody asks
        seen = self._seen_by(self._to(step))
        sent = torch.stack((k_BLKE[:, seen], v_BLKE[:, seen]))
        columns = self._blocks[self._from(step)].columns
        shape = (2, k_BLKE.shape[0], columns.stop - columns.start, *k_BLKE.shape[2:])
        wait = exchange(self._region, self._to(step), sent, self._from(step), shape)

        def both() -> tuple[Tensor, Tensor]:
            came = wait()
            return came[0], came[1]

        return both

    def _begin_give(self, step: int, back: Tensor, k_BLKE: Tensor) -> Callable[[], Tensor]:
        """Begins to send the gradient of the keys and values of a step to the rank that has them,
        and to get that of this rank's: (2, B, M, K, E)."""
        seen = self._seen_by(self._to(step))
        shape = (2, k_BLKE.shape[0], seen.stop - seen.start, *k_BLKE.shape[2:])
        return exchange(self._region, self._from(step), back, self._to(step), shape)

    def _add(self, step: int, came: Tensor, dk_BLKE: Tensor, dv_BLKE: Tensor) -> None:
        seen = self._seen_by(self._to(step))
        dk_BLKE[:, seen] += came[0]
        dv_BLKE[:, seen] += came[1]


class _Block:
    """This rank's queries beside the keys of one rank."""

    def __init__(self, rows: slice, columns: slice, is_own: bool, cap: float) -> None:
        self.rows, self.columns = rows, columns
        self._cap = cap
        self._is_own = is_own
        self._parts: list[Part] | None = None
        """What sees what, where the keys are not all of one document."""

    @property
    def is_unseen(self) -> bool:
        """No query sees a key."""
        return self._parts is not None and not self._parts

    def know(self, queries: Tensor, keys: Tensor) -> None:
        """The documents of what both ranks have. No key comes after a query, but for own ones."""
        queries, keys = queries[:, self.rows], keys[:, self.columns]
        if not bool((keys[:, 0] == queries[:, -1]).all()):
            self._parts = parts_of(queries, keys, is_own=self._is_own)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._parts is None:
            return attend(q, k, v, sees_BLM=None, is_causal=self._is_own, cap=self._cap)
        return attend_in_parts(self._parts, q, k, v, self._cap)

    def attend_back(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._parts is None:
            return attend_back(*tensors, sees_BLM=None, is_causal=self._is_own, cap=self._cap)
        return attend_back_in_parts(self._parts, *tensors, cap=self._cap)


@dataclasses.dataclass(frozen=True, slots=True)
class _WindowBlock:
    """The same where a query looks back on some positions."""

    rows: slice
    columns: slice
    seen: Window
    cap: float

    @property
    def is_unseen(self) -> bool:
        return self.seen.is_unseen

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.seen.attend(q, k, v, self.cap)

    def attend_back(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, lse = tensors
        return self.seen.attend_back(grad, q, k, v, out, lse, self.cap)


def exchange(
    region: Region, there: int, sent: Tensor, back: int, shape: Sequence[int]
) -> Callable[[], Tensor]:
    """Begins to send to rank `there` and to get a tensor of `shape` from rank `back`; the result
    waits for it. One collective, so that no order of sending and getting can lock ranks up."""
    sent = sent.flatten()
    came = sent.new_empty(math.prod(shape))
    numbers = [[0] * region.num_ranks for _ in range(2)]
    numbers[0][back], numbers[1][there] = came.numel(), sent.numel()
    options = dist.AllToAllOptions()
    work = region.group.alltoall_base(came, sent, *numbers, options)
    under_way = [sent]  # it is read until the wait is over

    def wait() -> Tensor:
        work.wait()
        under_way.clear()
        return came.view(*shape)

    return wait


def put_together(out_BLHE: Tensor, lse_BHL: Tensor, more_BLHE: Tensor, lse: Tensor) -> None:
    """Adds what queries get from further keys to what they have, in place and in fp32. `lse`:
    likewise, (B, H, L)."""
    both = torch.logaddexp(lse_BHL, lse)
    out_BLHE *= _share(lse_BHL, both)
    out_BLHE += more_BLHE * _share(lse, both)
    lse_BHL.copy_(both)


def _share(lse_BHL: Tensor, both_BHL: Tensor) -> Tensor:
    """(B, L, H, 1): what a block counts in both. Nothing, where it sees nothing."""
    both_BHL = both_BHL.masked_fill(both_BHL == -torch.inf, 0.0)
    return (lse_BHL - both_BHL).exp().transpose(1, 2).unsqueeze(-1)
