"""Dropout where a rank has a part of a tensor: what one rank would leave out of it. All ranks draw
for the whole tensor, by the same seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnet.training.models.base import seeded
from swarmnet.training.torch_calls import TorchCalls


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is drawn for a part."""

    shape: Sequence[int]
    """Of the whole tensor."""
    part: Callable[[Tensor], Tensor]
    """What this rank has of it."""


NUM_DIMS_OF_WEIGHTS = 4
"""Of attention: samples, heads, positions that attend, positions attended to."""
Place = Callable[[torch.Size], Drawn | None]
"""From the shape of what this rank has. None where a tensor of this shape is whole."""


def everything(_: torch.Size) -> None:
    """A `Place` where a rank has the whole of each tensor."""


def both(of_rows: Place, in_row: Place) -> Place:
    """Where ranks are in rows: what a row has of a tensor, and of that what a rank of it has."""

    def place(shape: torch.Size) -> Drawn | None:
        row = of_rows(shape)
        mine = in_row(shape if row is None else torch.Size(row.shape))
        if row is None or mine is None:
            return row or mine
        return Drawn(mine.shape, lambda drawn: row.part(mine.part(drawn)))

    return place


def narrowed(shape: Sequence[int], dim: int, whole: int, start: int) -> Drawn:
    """A part of this shape begins at `start` of a dimension, of which the whole has `whole`."""
    of_all = list(shape)
    of_all[dim] = whole
    return Drawn(of_all, lambda drawn: drawn.narrow(dim, start, shape[dim]))


def samples_of(rank: int, num_ranks: int, shape: torch.Size) -> Drawn:
    """A `Place` where a rank has so many samples of all that layers draw for."""
    return narrowed(shape, 0, shape[0] * num_ranks, shape[0] * rank)


def factors(x: Tensor, p: float, place: Drawn, generator: torch.Generator | None = None) -> Tensor:
    """By which dropout multiplies the elements of a part: 0, or 1 / (1 - p). `generator`: on the
    CPU, in place of torch's own."""
    if generator is None:
        drawn = functional.dropout(x.new_ones(place.shape), p)
    else:
        drawn = x.new_empty(place.shape).bernoulli_(1.0 - p, generator=generator)
        drawn = drawn.div_(1.0 - p or 1.0)
    return place.part(drawn)


class PartDropout(nn.Module):
    """Of a tensor whose part is known to the caller."""

    def __init__(self, p: float, dim: int, place: Callable[[int], tuple[int, int]]) -> None:
        """
        Args:
            p: probability of an element to be left out.
            dim: of which a rank has a part.
            place: from the size of the part to that of the whole, and where the part begins.
        """
        super().__init__()
        self._p = p
        self._dim = dim
        self._place = place

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        if not self.training:
            return x
        place = narrowed(x.shape, self._dim, *self._place(x.shape[self._dim]))
        return x * factors(x, self._p, place)


class PartDraws(TorchCalls):
    """In this context torch's dropout, also that of weights of attention, leaves out of a part what
    it would leave out of the whole. The weights are made, as torch does on a CPU: no fused kernel
    tells what it draws."""

    def __init__(self, place: Place, generator: torch.Generator | None = None) -> None:
        """`generator`: as of `factors`."""
        instead: dict[Callable[..., Any], Callable[..., Any]] = {
            functional.dropout: self._dropped,
            functional.scaled_dot_product_attention: self._attended,
        }
        super().__init__(instead)
        self._place = place
        self._generator = generator

    def _dropped(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """As torch's, whose names of arguments these are; so the next one."""
        if not training or p == 0.0:
            return input
        place = self._place(input.shape) or Drawn(input.shape, lambda drawn: drawn)
        drawn = factors(input, p, place, self._generator)
        return input.mul_(drawn) if inplace else input * drawn

    def _attended(
        self,
        q_BHSE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return functional.scaled_dot_product_attention(
                q_BHSE,
                k_BKTE,
                v_BKTE,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        dtype, size = q_BHSE.dtype, q_BHSE.shape[-1]
        # In fp32, as torch does it.
        q_BHSE, k_BHTE, v_BHTE = (x.float() for x in (q_BHSE, k_BKTE, v_BKTE))
        if enable_gqa:
            groups = q_BHSE.shape[1] // k_BHTE.shape[1]
            k_BHTE, v_BHTE = (x.repeat_interleave(groups, dim=1) for x in (k_BHTE, v_BHTE))
        scores_BHST = (q_BHSE * (size**-0.5 if scale is None else scale)) @ k_BHTE.transpose(2, 3)
        if is_causal:
            attn_mask = scores_BHST.new_ones(scores_BHST.shape[2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores_BHST = scores_BHST.masked_fill(~attn_mask, -torch.inf)  # a token sees itself
        elif attn_mask is not None:
            scores_BHST = scores_BHST + attn_mask
        weights_BHST = self._dropped(scores_BHST.softmax(dim=-1), dropout_p)
        return (weights_BHST @ v_BHTE).to(dtype)


@contextlib.contextmanager
def drawn_in_part(place: Place, seed: int) -> Iterator[None]:
    """As `seeded`, for a rank."""
    with seeded(seed), PartDraws(place):
        yield
