"""Attention of each document alone is what a mask of documents makes of attention to all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnet.training.attention import documents
from swarmnet.training.attention.documents import PackedSequence, parts_of

HEADS, SIZE = 4, 8
PLACES = {
    "one": [[40], [40]],
    "alike": [[13, 20, 7], [13, 20, 7], [13, 20, 7]],
    "others": [[40], [1, 38, 1], [20, 20], [1] * 40],
    "short and long": [[2, 3, 20, 1, 1, 2, 11], [3, 2, 20, 15], [20, 20]],
}


def numbers(lengths: list[list[int]]) -> Tensor:
    """Of documents of these lengths, (samples, positions)."""
    rows = [torch.arange(1, len(n) + 1).repeat_interleave(torch.tensor(n)) for n in lengths]
    return torch.stack(rows)


def drawn(samples: int, length: int, num_kv_heads: int) -> list[Tensor]:
    """Queries, keys, values, and the gradient of an output."""
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, num_kv_heads, num_kv_heads, HEADS)
    return [torch.randn(samples, length, n, SIZE, generator=generator) for n in heads]


def masked(of: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output by torch's attention with a mask of all scores."""
    sees = (of.unsqueeze(2) == of.unsqueeze(1)).tril()
    mask = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf).unsqueeze(1)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("joined", [1, 8, 64])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", PLACES)
def test_documents_alone_are_as_with_a_mask(
    name: str, num_kv_heads: int, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "JOINED", joined)
    of = numbers(PLACES[name])
    *tensors, grad = drawn(*of.shape, num_kv_heads)
    made = []
    for attend in (PackedSequence(of).attend, lambda *x: masked(of, *x)):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves)
        out.backward(grad)
        made.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLACES)
def test_no_more_scores_are_made_than_short_documents_share(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is longer has no mask, and every position is in one part."""
    monkeypatch.setattr(documents, "JOINED", 8)
    of = numbers(PLACES[name])
    counts = torch.zeros(of.shape, dtype=torch.int64)
    for part in parts_of(of, of, is_own=True):
        assert part.rows == part.columns
        counts[part.samples, part.rows] += 1
        assert part.is_causal == (part.sees_BRC is None)
        reach = part.rows.stop - part.rows.start
        assert part.is_causal or reach <= 8
        if part.is_causal:
            inside = of[part.samples, part.rows]
            assert (inside == inside[:, :1]).all()
    assert (counts == 1).all()


def test_samples_with_documents_at_the_same_places_are_one_call() -> None:
    (part,) = parts_of(numbers([[64]] * 4), numbers([[64]] * 4), is_own=True)
    assert part.samples == slice(0, 4)
    assert part.is_causal
    (short,) = parts_of(numbers([[3, 61], [64]]), numbers([[3, 61], [64]]), is_own=True)
    assert short.sees_BRC is not None
    assert short.sees_BRC.shape == (2, 64, 64)
    assert not short.sees_BRC[0, 3, :3].any(), "a document sees the one before it"
