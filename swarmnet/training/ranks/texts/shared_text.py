"""A text whose keys and values lie on several ranks, each with those of the tokens that it has
computed, or was given.

A pass over many tokens is cut over the ranks as a sequence is in training: what its tokens see of
each other goes around by the ring. What they see of earlier tokens, the ranks that have these
compute: queries go to all of them, and what they get there comes back. So keys and values stay
where they are, and no rank ever has those of the whole text. A pass over few tokens is computed by
all ranks alike; each attends to the keys that it has. Either way, outputs are put together by their
lse (`attention.blocks`), so nothing is approximated.

All ranks make the same collectives in the same order. There is no backward pass.

Shapes: B samples (one), L positions of a rank, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

from swarmnet.training.attention.windows import Window
from swarmnet.training.ranks.ring import Ring, exchange, put_together
from swarmnet.training.ranks.tensor_parallel import Region
from swarmnet.training.ranks.zigzag import Zigzag


class SharedText:
    """What a rank keeps of one text, for all layers of a stage."""

    def __init__(self, region: Region) -> None:
        """`region`: the ranks that share it."""
        self.region = region
        self.num_tokens = 0
        """Of all ranks."""
        self.positions: list[int] = []
        """Of the tokens of this rank, in ascending order."""
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Of keys and values that are here."""
        return sum(x.untyped_storage().nbytes() for both in self._kept.values() for x in both)

    def begin(self, count: int, zigzag: Zigzag | None) -> TextPass:
        """A pass over so many further tokens, cut so; None: by all ranks alike. `end` ends it."""
        return TextPass(self, count, zigzag)

    def end(self, one: TextPass) -> None:
        """All layers have the tokens of the pass."""
        self.positions = one.positions
        self.num_tokens = one.length

    def kept(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that are here for an attention, by its number in a pass: of the last of
        `positions`, (B, ..., K, E). `like`: such ones."""
        none = like[:, :0]
        return self._kept.get(number, (none, none))

    def keep(self, number: int, k_BMKE: Tensor, v_BMKE: Tensor) -> None:
        """In place of those that were there."""
        self._kept[number] = k_BMKE, v_BMKE


class TextPass:
    """The attention of one pass, for all of its layers, which call it one after the other, in each
    pass in the same order. Implements `models.base.SharedSequence`."""

    takes_windows = True

    def __init__(self, text: SharedText, count: int, zigzag: Zigzag | None) -> None:
        """As `SharedText.begin`."""
        self._text = text
        self._region = region = text.region
        self._before = text.num_tokens
        self._zigzag = zigzag
        self.length = text.num_tokens + count
        new = range(self._before, self.length)
        self._new = list(new)
        """Of the tokens of this pass that this rank computes, their positions."""
        self._mine = slice(None)
        """Of these, the tokens that are to stay here."""
        if zigzag is None:  # one after the other's turn
            first = (region.rank - self._before) % region.num_ranks
            self._mine = slice(first, None, region.num_ranks)
        else:
            self._new = self._of_rank(zigzag, region.rank)
            self._ring = Ring(zigzag, region)
        self.positions = text.positions + self._new[self._mine]
        """As `SharedText.positions`, after the pass."""
        self._seen: dict[tuple[int, int, int], Window] = {}
        self._number = 0

    def attend(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        window: int = 0,
        cap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        """The output of this rank's queries, (B, L, H, E). `window`, `cap`: as of
        `SharedSequence.attend`."""
        assert not dropout, "texts are written as they are"
        number, self._number = self._number, self._number + 1
        size = window or self.length
        old_k, old_v = self._text.kept(number, k_BLKE)
        k_BMKE, v_BMKE = (
            torch.cat((old, new[:, self._mine]), dim=1)
            for old, new in ((old_k, k_BLKE), (old_v, v_BLKE))
        )
        if self._zigzag is None:
            out = self._by_all(q_BLHE, k_BMKE, v_BMKE, size, cap)
        else:
            out = self._in_parts(q_BLHE, k_BLKE, v_BLKE, old_k, old_v, window, cap)
        if window:  # what the next token does not see, none will
            here = self._last(self.positions, k_BMKE)
            gone = bisect_right(here, self.length - window)
            k_BMKE, v_BMKE = k_BMKE[:, gone:].clone(), v_BMKE[:, gone:].clone()
        self._text.keep(number, k_BMKE, v_BMKE)
        return out

    # ---- inside -----------------------------------------------------------------------------

    def _of_rank(self, zigzag: Zigzag, rank: int) -> list[int]:
        return [self._before + p for p in zigzag.positions(rank)]

    @staticmethod
    def _last(positions: list[int], k_BMKE: Tensor) -> list[int]:
        """Those that keys are of: the last ones."""
        return positions[len(positions) - k_BMKE.shape[1] :]

    def _by_all(
        self, q_BLHE: Tensor, k_BMKE: Tensor, v_BMKE: Tensor, size: int, cap: float
    ) -> Tensor:
        """All ranks have the same queries."""
        keys = self._last(self.positions, k_BMKE)
        seen = self._window(-1, self._new, keys, size, q_BLHE)
        mine = seen.attend(q_BLHE, k_BMKE, v_BMKE, cap)
        packed = _packed(*mine)
        parts = [torch.empty_like(packed) for _ in range(self._region.num_ranks)]
        self._region.group.allgather([parts], [packed]).wait()
        out, lse = _unpacked(parts[0], q_BLHE.shape)
        for part in parts[1:]:
            put_together(out, lse, *_unpacked(part, q_BLHE.shape))
        return out.to(q_BLHE.dtype)

    def _in_parts(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        old_k: Tensor,
        old_v: Tensor,
        window: int,
        cap: float,
    ) -> Tensor:
        """Each rank has the queries of its part of the pass. `old_k`, `old_v`: of earlier tokens,
        of this rank."""
        assert self._zigzag is not None
        out, lse = self._ring.forward(q_BLHE, k_BLKE, v_BLKE, window, cap)
        if not self._before:
            return out.to(q_BLHE.dtype)
        region, zigzag = self._region, self._zigzag
        batch, _, heads, size = q_BLHE.shape
        keys = self._last(self._text.positions, old_k)
        for step in range(region.num_ranks):
            there, back = (
                (region.rank + step) % region.num_ranks,
                (region.rank - step) % region.num_ranks,
            )
            shape = (batch, zigzag.size(back), heads, size)
            q = q_BLHE
            if step:
                q = exchange(region, there, q_BLHE, back, shape)()
            queries = self._of_rank(zigzag, back)
            seen = self._window(back, queries, keys, window or self.length, q)
            made = _packed(*seen.attend(q, old_k, old_v, cap))
            if step:
                num_elements = batch * q_BLHE.shape[1] * heads * (size + 1)
                made = exchange(region, back, made, there, (num_elements,))()
            put_together(out, lse, *_unpacked(made, q_BLHE.shape))
        return out.to(q_BLHE.dtype)

    def _window(
        self, rank: int, queries: list[int], keys: list[int], size: int, like: Tensor
    ) -> Window:
        """What queries of a rank see of keys that are here; made once for all layers."""
        key = rank, len(keys), size
        if key not in self._seen:
            self._seen[key] = Window(queries, keys, size, like.device)
        return self._seen[key]


def _packed(out_BLHE: Tensor, lse_BHL: Tensor) -> Tensor:
    """Both in one, fp32."""
    return torch.cat((out_BLHE.float().flatten(), lse_BHL.flatten()))


def _unpacked(packed: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """`shape`: of the queries, (B, L, H, E)."""
    batch, length, heads, _ = shape
    out, lse = packed.split((shape.numel(), batch * length * heads))
    return out.view(shape), lse.view(batch, heads, length)
