"""The layers of a stage: their parameters are parts of flat vectors, and a pass uses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarmnet.errors import SpecError
from swarmnet.training.models.base import LayerBuilder
from swarmnet.training.passes.layers import StageLayers
from tests.training.passes.models import NUM_PARAMETERS, WIDTH, linear_layers, linear_plan


def product(layers: StageLayers, x: torch.Tensor) -> torch.Tensor:
    """What the layers must give for the vectors that they show."""
    a, b = (r.part_of(layers.shown.parameters) for r in layers.parameter_ranges)
    return x @ a.T @ b.T


def test_a_pass_computes_with_the_flat_parameters_and_adds_to_the_flat_gradient() -> None:
    layers = linear_layers()
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(layers.run((0, 0), x), product(layers, x))
    layers.shown.parameters.mul_(2.0)
    torch.testing.assert_close(layers.run((0, 0), x), product(layers, x))
    layers.run((0, 0), x).sum().backward()
    assert layers.shown.gradients.any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_vectors_are_shown_and_the_first_ones_again(precision: str) -> None:
    layers = linear_layers(precision)
    first, x = layers.shown, torch.ones(2, WIDTH, dtype=layers.dtype)
    expected = layers.run((0, 0), x)
    other = first.another()
    other.parameters.zero_()
    other.clear_gradient()
    other.refresh_copies()
    layers.show(other)
    outputs = layers.run((1, 0), x)
    assert not outputs.any()
    outputs.sum().backward()
    assert not first.gradients.any(), "nothing is added to vectors that are not shown"
    layers.show(first)
    assert torch.equal(layers.run((0, 0), x), expected)
    layers.run((0, 0), x).sum().backward()
    assert first.gradients.any()


def test_a_low_precision_sees_changed_parameters_when_copies_are_refreshed() -> None:
    layers = linear_layers("bf16")
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    layers.shown.parameters.zero_()
    assert layers.run((0, 0), x).any()
    layers.parameter_copies.refresh()
    assert not layers.run((0, 0), x).any()


def test_evaluation_makes_no_graph_and_draws_nothing() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5))

    layer = LayerBuilder("a", build, 1, (WIDTH,))
    layers = linear_layers(plan=replace(linear_plan(), layers=(layer,), is_random=True))
    x = torch.ones(64, WIDTH)
    with layers.evaluating(is_whole_batch=True, wants_outputs=True):
        outputs = layers.run(None, x)
    assert not outputs.requires_grad
    assert (outputs == outputs[0]).all()
    trained = layers.run((0, 0), x)
    assert not (trained == trained[0]).all(), "dropout is back after evaluation"
    assert torch.equal(trained, layers.run((0, 0), x)), "the key is the seed"
    assert not torch.equal(trained, layers.run((0, 1), x))


def test_a_stage_without_parameters_is_an_error_of_the_spec() -> None:
    layer = LayerBuilder("flat", torch.nn.Flatten, 0, (WIDTH,))
    plan = replace(linear_plan(), layers=(layer,))
    with pytest.raises(SpecError, match="stage 1 has no parameters"):
        linear_layers(plan=plan, stage_index=1, num_stages=2)


def test_the_number_of_parameters_is_that_of_all_layers() -> None:
    layers = linear_layers()
    assert layers.num_parameters == NUM_PARAMETERS == layers.shown.parameters.numel()
    assert [r.name for r in layers.parameter_ranges] == ["a.weight", "b.weight"]
