"""The table of kept microbatches: what is in it, and when it is gone."""

from __future__ import annotations

import pytest
import torch

from swarmnet.training.passes.kept import KeptMicrobatches


def table(*keys: tuple[int, int], needs_input_gradients: bool = True) -> KeptMicrobatches:
    kept = KeptMicrobatches(needs_input_gradients=needs_input_gradients)
    for key in keys:
        kept.begin(key, torch.zeros(2, 3))
    return kept


def test_an_entry_is_there_until_it_is_forgotten() -> None:
    kept = table((0, 1))
    assert len(kept) == 1
    assert kept.get((0, 1)) is not None
    kept.forget((0, 1))
    kept.forget((0, 1))
    assert len(kept) == 0
    assert kept.get((0, 1)) is None


def test_inputs_need_a_gradient_where_a_stage_waits_for_it() -> None:
    for is_needed in (True, False):
        entry = table((0, 1), needs_input_gradients=is_needed).get((0, 1))
        assert entry is not None
        assert entry.inputs.requires_grad is is_needed


def test_only_what_is_added_can_be_taken_out_and_only_once() -> None:
    kept = table((0, 1), (0, 2))
    entry = kept.get((0, 1))
    assert entry is not None
    assert kept.take_added((0, 1)) is None
    assert not kept.is_added((0, 1))
    entry.mark_added(4.0, torch.ones(2, 3))
    assert kept.is_added((0, 1))
    taken = kept.take_added((0, 1))
    assert taken is entry
    assert taken.scale == 4.0
    assert not taken.inputs.requires_grad
    assert kept.take_added((0, 1)) is None
    assert len(kept) == 1


def test_what_is_added_does_not_begin_again_but_what_is_not_may() -> None:
    kept = table((0, 1))
    first = kept.get((0, 1))
    second = kept.begin((0, 1), torch.zeros(2, 3))
    assert kept.get((0, 1)) is second is not first
    second.mark_added(1.0)
    with pytest.raises(ValueError, match="in the buffer already"):
        kept.begin((0, 1), torch.zeros(2, 3))


def test_work_that_fails_is_forgotten_and_work_that_does_not_stays() -> None:
    kept = table((0, 1), (0, 2))
    with kept.forget_on_error((0, 1)):
        pass
    with pytest.raises(RuntimeError), kept.forget_on_error((0, 2)):
        raise RuntimeError
    assert kept.get((0, 1)) is not None
    assert kept.get((0, 2)) is None


def test_rounds_end_one_by_one() -> None:
    kept = table((0, 1), (1, 1), (1, 2), (2, 1))
    kept.forget_round(1)
    assert len(kept) == 2
    kept.keep_round(2)
    assert kept.get((2, 1)) is not None
    assert len(kept) == 1
    kept.keep_round(None)
    assert len(kept) == 0


def test_the_gradient_of_the_inputs_is_given_once_and_without_its_scale() -> None:
    entry = table((0, 1)).get((0, 1))
    assert entry is not None
    (entry.inputs * 8.0).sum().backward()
    entry.mark_added(4.0)
    assert torch.equal(entry.take_input_gradient(), torch.full((2, 3), 2.0))
    assert not entry.take_input_gradient().any()


def test_a_graph_is_taken_once() -> None:
    entry = table((0, 1)).get((0, 1))
    assert entry is not None
    outputs = entry.inputs * 2
    entry.keep_graph(outputs)
    assert entry.take_graph() is outputs
    assert entry.take_graph() is None
