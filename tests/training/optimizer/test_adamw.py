"""A step has the same bits wherever a number lies, and whoever makes it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from swarmnet.training.optimizer import adamw
from swarmnet.training.optimizer.adamw import (
    WHOLE,
    Step,
    fused_multiply_add,
    fuses_as_written,
    hard_vectors,
    step,
    written,
)

ABOUT = Step(3e-3, 0.9, 0.95, 1e-8, 5)


@pytest.fixture
def kernel_looked_at_anew() -> Iterator[None]:
    fuses_as_written.cache_clear()
    yield
    fuses_as_written.cache_clear()


def stepped(vectors: tuple[Tensor, ...], decay: float = 0.1) -> list[Tensor]:
    p, g, m, v = (t.clone() for t in vectors)
    step(p, g, m, v, ABOUT, decay)
    return [p, g, m, v]


@pytest.mark.parametrize("size", [1, WHOLE - 1, WHOLE, 4099])
def test_bits_are_those_of_the_written_step_wherever_a_number_lies(size: int) -> None:
    vectors = hard_vectors(size)
    wanted = [t.clone() for t in vectors]
    written(wanted[0], wanted[1], wanted[2], wanted[3], ABOUT, 0.1)
    made = stepped(vectors)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    moved = stepped(tuple(t[order] for t in vectors))
    for exact, ours, theirs in zip(wanted, made, moved, strict=True):
        assert torch.equal(exact, ours)
        assert torch.equal(ours[order], theirs)


def test_a_kernel_that_makes_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel_looked_at_anew: None,
) -> None:
    vectors, good = hard_vectors(100), stepped(hard_vectors(100))
    kernel = torch._fused_adamw_
    assert fuses_as_written()

    def other(parameters: list[Tensor], *arguments: object, **options: object) -> None:
        kernel(parameters, *arguments, **options)
        parameters[0][-1] = torch.nextafter(parameters[0][-1], torch.tensor(math.inf))

    monkeypatch.setattr(torch, "_fused_adamw_", other)
    fuses_as_written.cache_clear()
    with caplog.at_level(logging.WARNING, "swarmnet.optimizer"):
        made = stepped(vectors)
    assert "other bits" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(good, made, strict=True))


def test_a_multiply_add_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(500, generator=generator), torch.randn(500, generator=generator)
    scale = 2.0 ** torch.randint(-40, 40, (500,), generator=generator).float()
    c = torch.randn(500, generator=generator) * scale
    c[::3] = -(a * b)[::3]  # what is left is what the product has lost
    # Next to the middle of two fp32 numbers, which a sum in doubles takes for the middle.
    a[0], b[0], c[0] = 1 + 2.0**-23, 2.0**-24, 1.0
    a[1], b[1], c[1] = 2.0**-24, 1 - 2.0**-23, 1.0
    made = fused_multiply_add(a, b, c)
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), made.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        here = torch.tensor(got)
        beside = [torch.nextafter(here, torch.tensor(s * math.inf)).item() for s in (1, -1)]
        off = abs(Fraction(got) - exact)
        assert all(off <= abs(Fraction(other) - exact) for other in beside)
    assert made[0].item() == 1 + 2.0**-23
    assert made[1].item() == 1.0
    huge = torch.tensor([3e38])
    assert fused_multiply_add(huge, 10.0, huge).item() == math.inf


def test_no_decay_leaves_what_has_no_gradient_alone() -> None:
    p, g, m, v = hard_vectors(100)
    zeros = (p, torch.zeros_like(g), torch.zeros_like(m), torch.zeros_like(v))
    assert torch.equal(stepped(zeros, decay=0.0)[0], p)
    assert not torch.equal(stepped(zeros, decay=0.1)[0], p)
    assert adamw.SAMPLE % WHOLE == 0
