"""What one rank draws, and how it rounds, is what another one does for its part, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.training.models.base import seeded
from swarmnet.training.models.packing import BITS, Packed
from swarmnet.training.ranks.cuts import Cut
from swarmnet.training.ranks.packed_parts import packed_part
from swarmnet.training.ranks.part_dropout import drawn_in_part, narrowed

LENGTH = 24
MASK = torch.ones(LENGTH, LENGTH).tril().bool()
SEED, RATE = 5, 0.3


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    [
        {"is_causal": True, "enable_gqa": True},
        {"attn_mask": MASK, "enable_gqa": True, "scale": 0.3},
        {"attn_mask": torch.zeros(MASK.shape).masked_fill(~MASK, -1e30), "enable_gqa": True},
    ],
    ids=["causal", "mask", "numbers"],
)
def test_weights_of_attention_that_are_left_out(how: dict[str, Any], dtype: torch.dtype) -> None:
    """By samples, and by heads, of which two share keys and values."""
    q, k, v = (drawn(2, heads, LENGTH, 16, seed=heads).to(dtype) for heads in (4, 2, 2))
    attend, options = functional.scaled_dot_product_attention, {"dropout_p": RATE, **how}
    with seeded(SEED):
        whole = attend(q, k, v, **options)
        assert not torch.equal(whole, attend(q, k, v, **options))
    with drawn_in_part(lambda shape: narrowed(shape, 1, 4, 2), SEED):
        heads = attend(q[:, 2:], k[:, 1:], v[:, 1:], **options)
    with drawn_in_part(lambda shape: narrowed(shape, 0, 2, 1), SEED):
        samples = attend(q[1:], k[1:], v[1:], **options)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-3}
    torch.testing.assert_close(heads, whole[:, 2:], **near)
    torch.testing.assert_close(samples, whole[1:], **near)


def test_what_is_left_out_of_a_layer_s_outputs() -> None:
    """Also the second time, and of what is whole."""
    x, dropout = drawn(3, 5, 6), torch.nn.Dropout(RATE)
    with seeded(SEED):
        wholes = [dropout(x) for _ in range(3)]
    with drawn_in_part(lambda s: narrowed(s, 0, 3, 1) if s[0] == 2 else None, SEED):
        assert torch.equal(dropout(x[1:]), wholes[0][1:])
        assert torch.equal(dropout(x), wholes[1])
        assert torch.equal(functional.dropout(x[1:].clone(), RATE, inplace=True), wholes[2][1:])
        assert dropout.eval()(x) is x


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(
    "cut",
    [Cut(0, 64, 128, "own"), Cut(1, 64, 192, "own"), Cut(0, 32, 64, "own", 2)],
    ids=["rows", "columns", "rows of two"],
)
def test_a_part_of_a_matrix_in_few_bits(kind: str, cut: Cut) -> None:
    pytest.importorskip("torchao")
    weight = drawn(256, 192)
    packed = Packed(weight, kind)
    part = packed_part(packed, cut, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        whole = packed.unpacked(dtype)
        expected = cut.of(whole).reshape(cut.shape(weight.shape))
        assert torch.equal(part.unpacked(dtype), expected)
    assert part.num_bytes < 1.05 * packed.num_bytes * expected.numel() / weight.numel()
