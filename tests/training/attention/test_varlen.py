"""The kernel that is told where documents begin does what a mask of all scores does, and is not
taken where it does not. In its place stands one of here: a CPU has none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnet.training.attention import varlen
from swarmnet.training.attention.packed import masks_all_scores
from swarmnet.training.attention.varlen import VarlenSequence
from tests.training.attention.test_document_attention import PLACES, drawn, masked, numbers

CPU = torch.device("cpu")


def by_document(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """As torch's `varlen_attn`, whose names of arguments the last two have."""
    assert window_size == (-1, 0)
    assert ends_q.dtype == torch.int32
    assert torch.equal(ends_q, ends_k)
    lengths = ends_q.diff().tolist()
    assert longest_q == longest_k == max(lengths)
    assert enable_gqa == (q_THE.shape[1] != k_TKE.shape[1])
    found = []
    for q, k, v in zip(*(x.split(lengths) for x in (q_THE, k_TKE, v_TKE)), strict=True):
        heads = (x.transpose(0, 1) for x in (q, k, v))
        found.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa))
    return torch.cat(found, dim=1).transpose(0, 1)


def one_too_many(*args: Any, **options: Any) -> Tensor:
    """Takes two documents for one."""
    q, k, v, ends, _, longest, _ = args
    ends = torch.cat((ends[:1], ends[2:]))
    longest = int(ends.diff().max())
    return by_document(q, k, v, ends, ends, longest, longest, **options)


def no_way_back(*args: Any, **options: Any) -> Tensor:
    """Its gradient goes to queries alone."""
    q, k, v, *places = args
    return by_document(q, k.detach() + 0 * k, v.detach() + 0 * v, *places, **options)


def missing(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no such kernel\non this card")


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    varlen.is_right_on.cache_clear()
    yield
    varlen.is_right_on.cache_clear()


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", PLACES)
def test_documents_at_once_are_as_with_a_mask(
    name: str, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "_kernel", lambda: by_document)
    monkeypatch.setattr(varlen, "mask_of", None)
    monkeypatch.setattr(varlen, "is_right_on", lambda *_, **__: True)
    of = numbers(PLACES[name])
    *tensors, grad = drawn(*of.shape, num_kv_heads)
    made = []
    for attend in (VarlenSequence(of).attend, lambda *x: masked(of, *x)):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves)
        out.backward(grad)
        made.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_right_kernel_is_taken(
    is_grouped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pass that asks keeps, or does without."""
    monkeypatch.setattr(varlen, "_kernel", lambda: by_document)

    def no_graph(_: Tensor) -> Tensor:
        raise AssertionError("the trial is no part of the pass")

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(no_graph, no_graph):
        assert varlen.is_right_on(CPU, dtype, 16, is_grouped=is_grouped)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (one_too_many, "other numbers than a mask"),
        (no_way_back, "other numbers than a mask"),
        (missing, "RuntimeError: no such kernel on this card"),
    ],
)
def test_a_wrong_kernel_is_not_taken_and_a_line_says_so(
    kernel: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    of = numbers(PLACES["others"])
    q, k, v, _ = drawn(*of.shape, 2)
    sequence = VarlenSequence(of)
    with caplog.at_level(logging.WARNING, "swarmnet.attention"):
        found = [sequence.attend(q, k, v) for _ in range(2)]
    torch.testing.assert_close(found[1], masked(of, q, k, v))
    (line,) = caplog.messages
    assert why in line
    assert "mask of all scores on cpu in float32" in line
    assert "\n" not in line


def test_a_plan_of_memory_knows_whether_there_is_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def is_right(*about: Any, is_grouped: bool) -> bool:
        told.append(about)
        return about[1] == torch.bfloat16

    monkeypatch.setattr("swarmnet.training.attention.packed.is_right_on", is_right)
    kinds = {kind: torch.device(kind) for kind in ("cpu", "cuda", "mps")}
    found = {
        (kind, dtype): masks_all_scores(device, dtype, 64)
        for kind, device in kinds.items()
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert [about for about, masks in found.items() if not masks] == [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("cuda", torch.bfloat16),
    ]
    assert all(device == kinds["cuda"] for device, *_ in told)
