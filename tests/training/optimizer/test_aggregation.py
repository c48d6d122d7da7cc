from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.training import cores
from swarmnet.training.optimizer import aggregation
from swarmnet.training.optimizer.aggregation import centered_clip, scaled_sum, trimmed, trimmed_mean

RULES = [trimmed_mean, centered_clip]
SIZE = 50


def honest(loads: list[int], seed: int, noise: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """Sums over tokens around one true gradient."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(SIZE, generator=generator)
    return [
        n * truth + noise * math.sqrt(n) * torch.randn(SIZE, generator=generator) for n in loads
    ], truth


loads_of = st.lists(st.integers(1, 100), min_size=4, max_size=12)


@settings(max_examples=30, deadline=None)
@given(loads_of, st.integers(0, 10**6))
def test_the_plain_sum_is_bit_for_bit_the_sum(loads: list[int], seed: int) -> None:
    parts, _ = honest(loads, seed)
    total = parts[0].clone()
    for p in parts[1:]:
        total.add_(p)
    assert torch.equal(scaled_sum(parts, [1.0] * len(parts)), total)
    half = scaled_sum(parts, [0.5] * len(parts))
    torch.testing.assert_close(half, total / 2)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20, deadline=None)
@given(loads_of, st.integers(0, 10**6))
def test_those_who_agree_get_what_they_agree_on(rule, loads: list[int], seed: int) -> None:
    parts, truth = honest(loads, seed, noise=0.0)
    torch.testing.assert_close(rule(parts, loads), sum(loads) * truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20, deadline=None)
@given(st.integers(5, 12), st.integers(0, 10**6), st.floats(-1e6, 1e6))
def test_a_false_one_in_five_does_not_move_it_out_of_the_others_range(
    rule, n: int, seed: int, times: float
) -> None:
    loads = [10] * n
    parts, truth = honest(loads, seed)
    num_false = trimmed(n)
    for i in range(num_false):
        parts[i] = parts[i] * times
    error = rule(parts, loads) / sum(loads) - truth
    plain = math.sqrt(SIZE / 10)  # of one contributor alone
    assert error.norm().item() < 2 * plain


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=10, deadline=None)
@given(loads_of, st.integers(0, 10**6), st.floats(0.1, 100.0))
def test_it_scales_and_shifts_with_its_inputs(rule, loads: list[int], seed: int, k: float) -> None:
    parts, _ = honest(loads, seed)
    shift = torch.linspace(-1, 1, SIZE)
    moved = [k * p + n * shift for p, n in zip(parts, loads, strict=True)]
    expected = k * rule(parts, loads) + sum(loads) * shift
    torch.testing.assert_close(rule(moved, loads), expected, rtol=1e-3, atol=1e-2 * k)


@pytest.mark.parametrize("rule", RULES)
def test_pieces_change_nothing_and_repeats_are_bit_equal(rule, monkeypatch) -> None:
    parts, _ = honest([3, 5, 7, 9, 11], 1)
    before = [p.clone() for p in parts]
    whole = rule(parts, [3, 5, 7, 9, 11])
    assert torch.equal(rule(parts, [3, 5, 7, 9, 11]), whole)
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
    monkeypatch.setattr(aggregation, "PIECE", 7)
    torch.testing.assert_close(rule(parts, [3, 5, 7, 9, 11]), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_helpers_change_no_bit(rule, monkeypatch) -> None:
    parts, _ = honest([3, 5, 7, 9, 11], 2)
    monkeypatch.setattr(aggregation, "PIECE", 7)
    monkeypatch.setattr(cores, "PART", 14)
    monkeypatch.setattr(cores, "GRAIN", 7)
    alone = rule(parts, [3, 5, 7, 9, 11])
    monkeypatch.setattr(cores, "LEAST_SHARED", 0)
    monkeypatch.setattr(cores, "CORES", cores.Cores())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert cores.CORES.num_helpers == 3
    assert torch.equal(rule(parts, [3, 5, 7, 9, 11]), alone)


def test_the_trimmed_mean_by_hand() -> None:
    parts = [torch.tensor([v]) for v in (1.0, 4.0, 30.0, -1000.0)]  # per token 1, 2, 3, -1000
    # dropped are -1000 and 3; left are 1 (1 token) and 2 (2 tokens): 5/3 a token, 14 tokens
    expected = torch.tensor([14 * 5 / 3])
    torch.testing.assert_close(trimmed_mean(parts, [1, 2, 10, 1]), expected)


def test_how_many_are_trimmed() -> None:
    assert [trimmed(n) for n in (1, 2, 3, 4, 8, 10, 15, 100)] == [0, 0, 1, 1, 2, 2, 3, 25]


def test_no_iteration_is_the_median() -> None:
    parts = [torch.tensor([float(v)]) for v in (1, 2, 3, 400, -100)]
    assert centered_clip(parts, [1] * 5, iterations=0).item() == 2.0 * 5
