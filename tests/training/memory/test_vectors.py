"""Flat vectors of a round: shards and parts are views, and a device's sum is collected once."""

from __future__ import annotations

import torch

from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import ParameterRange

RANGES = (ParameterRange("a", 0, (2, 3), 6), ParameterRange("b", 6, (4,), 4))


def vectors(*, has_sums: bool = False, has_copies: bool = False) -> Vectors:
    return Vectors(
        torch.arange(10.0),
        torch.zeros(10),
        4,
        RANGES,
        sums=torch.zeros(10) if has_sums else None,
        copies=[torch.zeros(2, 3), torch.zeros(4)] if has_copies else None,
    )


def test_shards_and_parts_are_views() -> None:
    one = vectors()
    assert [s.numel() for s in one.parameter_shards] == [4, 4, 2]
    one.parameter_shards[1].fill_(7.0)
    assert one.values[0].tolist() == [[0, 1, 2], [3, 7, 7]]
    assert one.shown is one.values
    one.added[1].fill_(2.0)
    assert one.gradient_shards[2].tolist() == [2.0, 2.0]


def test_a_sum_on_the_device_is_collected_when_it_has_changed() -> None:
    one = vectors(has_sums=True)
    one.added[0].fill_(1.0)
    one.collect()
    assert not one.gradients.any(), "nobody said that it has changed"
    one.mark_changed()
    one.collect()
    assert one.gradients.tolist() == [1.0] * 6 + [0.0] * 4
    one.clear_gradient()
    assert not one.adding.any()
    assert not one.gradients.any()
    one.spoil_gradient()
    one.collect()
    assert one.gradients.isnan().all()


def test_copies_take_the_parameters_when_they_are_refreshed() -> None:
    one = vectors(has_copies=True)
    one.refresh_copies()
    assert [c.flatten().tolist() for c in one.shown] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert all(c.data_ptr() != v.data_ptr() for c, v in zip(one.shown, one.values, strict=True))


def test_swapped_vectors_have_the_same_memory_the_other_way_round() -> None:
    one = vectors()
    other = one.swapped()
    assert other.parameters is one.gradients
    assert other.gradients is one.parameters
    assert other.values[0].data_ptr() == one.gradients.data_ptr()
    assert other.swapped().parameters is one.parameters


def test_another_pair_is_of_the_same_kind_in_other_memory() -> None:
    one = vectors(has_sums=True, has_copies=True)
    other = one.another()
    other.parameters.zero_()
    other.clear_gradient()
    other.refresh_copies()
    other.mark_changed()
    other.added[0].fill_(1.0)
    other.collect()
    assert other.gradients.sum() == 6
    assert one.parameters.tolist() == list(range(10))
    assert not one.adding.any()
    assert [c.shape for c in other.shown] == [c.shape for c in one.shown]
