"""How the vectors of one round follow those of another."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import xxhash

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import from_tensor
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.passes.round_vectors import RoundVectors
from tests.training.passes.models import NUM_PARAMETERS, linear_layers

SIZES = (8, 8, 2)


def put_all_aside(vectors: RoundVectors, value: float) -> None:
    for j, size in enumerate(vectors.shard_sizes):
        vectors.put_aside(j, from_tensor(torch.full((size,), value)))


def is_all(vectors: RoundVectors, value: float) -> bool:
    return bool((vectors.present.parameters == value).all())


@pytest.mark.parametrize("reuses_gradient", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_was_put_aside_is_there_after_the_round(precision: Any, reuses_gradient: bool) -> None:
    layers = linear_layers(precision)
    vectors = RoundVectors(layers, reuses_gradient=reuses_gradient)
    assert vectors.shard_sizes == SIZES
    assert vectors.coming_shard(0) is None
    for value in (1.0, 2.0, 3.0):
        put_all_aside(vectors, value)
        coming = vectors.coming_shard(1)
        assert coming is not None
        assert (coming == value).all()
        assert not is_all(vectors, value)
        vectors.finish_round()
        assert is_all(vectors, value)
        assert not vectors.gradient_shard(0).any()
        assert layers.shown is vectors.present
        assert all((p == value).all() for p in layers.parameters()), "the layers see them"


def test_some_shards_may_stay_as_they_are() -> None:
    vectors = RoundVectors(linear_layers(), reuses_gradient=True)
    before = vectors.present.parameters.clone()
    vectors.put_aside(1, from_tensor(torch.full((8,), 4.0)))
    vectors.finish_round()
    after = vectors.present.parameters
    assert (after[8:16] == 4.0).all()
    assert torch.equal(after[:8], before[:8])
    assert torch.equal(after[16:], before[16:])


@pytest.mark.parametrize(
    ("shard_index", "values"),
    [
        (3, torch.zeros(8)),
        (-1, torch.zeros(8)),
        (0, torch.zeros(7)),
        (0, torch.zeros(8).double()),
        (0, torch.full((8,), math.nan)),
    ],
)
def test_parameters_that_cannot_be_are_refused(shard_index: int, values: torch.Tensor) -> None:
    vectors = RoundVectors(linear_layers(), reuses_gradient=True)
    with pytest.raises(ProtocolViolation):
        vectors.put_aside(shard_index, from_tensor(values))
    assert vectors.coming_shard(0) is None


def ahead(layers: StageLayers) -> RoundVectors:
    """Round 0 with a gradient of 1, and round 1 open ahead with parameters of 5."""
    vectors = RoundVectors(layers, reuses_gradient=False)
    assert vectors.can_open_ahead
    put_all_aside(vectors, 5.0)
    vectors.open_ahead(1)
    assert vectors.round_ahead == 1
    vectors.use(0)
    layers.shown.adding.fill_(1.0)
    return vectors


def test_a_round_ahead_has_parameters_and_a_gradient_of_its_own() -> None:
    layers = linear_layers()
    vectors = ahead(layers)
    assert layers.shown is vectors.present
    vectors.use(1)
    assert all((p == 5.0).all() for p in layers.parameters())
    layers.shown.adding.fill_(2.0)
    kept = vectors.copy_gradient(0)
    assert (kept == 1.0).all()
    vectors.finish_round()
    assert vectors.round_ahead is None
    assert is_all(vectors, 5.0)
    assert (vectors.gradient_shard(0) == 2.0).all()
    assert (kept == 1.0).all(), "the copy outlives the round"


def test_a_round_ahead_that_is_dropped_leaves_the_present_one() -> None:
    layers = linear_layers()
    vectors = ahead(layers)
    before = vectors.present.parameters.clone()
    vectors.use(1)
    vectors.drop_ahead()
    assert vectors.round_ahead is None
    vectors.use(0)
    assert layers.shown is vectors.present
    assert torch.equal(vectors.present.parameters, before)
    assert vectors.present.gradients.sum() == NUM_PARAMETERS
    vectors.open_ahead(1)
    vectors.use(1)
    assert not layers.shown.adding.any(), "it begins anew"


def test_a_round_may_end_beside_a_pass_of_the_next_one() -> None:
    layers = linear_layers()
    vectors = ahead(layers)
    vectors.use(1)
    shown = [(p.data_ptr(), p.grad) for p in layers.parameters()]
    vectors.finish_round()
    assert [(p.data_ptr(), p.grad) for p in layers.parameters()] == shown
    vectors.use(1)
    assert [(p.data_ptr(), p.grad) for p in layers.parameters()] == shown
    assert layers.shown is vectors.present


@pytest.mark.parametrize("opens", [False, True])
def test_what_a_measurement_reads_stays_though_the_round_ends(opens: bool) -> None:
    """Its memory is that of the coming parameters then."""
    layers = linear_layers()
    vectors = ahead(layers)
    before = vectors.present.parameters.clone()
    has_begun = threading.Event()

    def overwrite() -> None:
        has_begun.set()
        if opens:
            vectors.open_ahead(2)
        else:
            put_all_aside(vectors, 7.0)

    other = threading.Thread(target=overwrite)
    with vectors.showing():
        vectors.finish_round()
        assert is_all(vectors, 5.0)
        other.start()
        has_begun.wait()
        other.join(0.1)  # where it does not wait, this is enough
        shown = torch.cat([p.detach().reshape(-1) for p in layers.parameters()])
        assert torch.equal(shown, before)
    other.join()
    with vectors.showing():
        assert all((p == 5.0).all() for p in layers.parameters())


def test_a_measurement_of_the_round_ahead_reads_its_parameters_before_and_after_it_begins() -> None:
    layers = linear_layers()
    vectors = ahead(layers)

    def shown() -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in layers.parameters()])

    with vectors.showing(1):
        assert (shown() == 5.0).all()
        vectors.finish_round()
        assert (shown() == 5.0).all()
    with vectors.showing(1):
        assert (shown() == 5.0).all()


def test_a_measurement_of_any_other_round_reads_the_present_parameters() -> None:
    layers = linear_layers()
    vectors = ahead(layers)
    for round_index in (0, None):
        with vectors.showing(round_index):
            shown = torch.cat([p.detach().reshape(-1) for p in layers.parameters()])
            assert torch.equal(shown, vectors.present.parameters)
            assert not (shown == 5.0).any()


def test_layers_that_show_one_pair_only_open_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = linear_layers()
    monkeypatch.setattr(layers, "overlaps_rounds", False)
    assert not RoundVectors(layers, reuses_gradient=True).can_open_ahead


def test_without_memory_for_a_second_pair_nothing_is_opened_ahead_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = RoundVectors(linear_layers(), reuses_gradient=False)
    put_all_aside(vectors, 5.0)

    def another(self: Vectors) -> Vectors:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Vectors, "another", another)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        vectors.open_ahead(1)
    assert not vectors.can_open_ahead
    assert vectors.round_ahead is None
    vectors.finish_round()
    assert is_all(vectors, 5.0)


def test_a_shard_that_was_refused_is_not_put_aside_any_more() -> None:
    """Its first parts may lie there already."""
    vectors = RoundVectors(linear_layers(), reuses_gradient=True)
    vectors.put_aside(0, from_tensor(torch.full((8,), 4.0)))
    with pytest.raises(ProtocolViolation):
        vectors.put_aside(0, from_tensor(torch.tensor([*[5.0] * 7, math.nan])))
    assert vectors.coming_shard(0) is None


def digest_of(shard: torch.Tensor) -> bytes:
    return xxhash.xxh3_64_digest(shard.numpy().tobytes())


@pytest.mark.parametrize("way", ["swap", "copy", "some", "ahead", "dropped"])
def test_digests_are_of_the_bytes_that_are_there(way: str) -> None:
    """They are known before the round is over, and those of shards that stay are as before."""
    vectors = RoundVectors(linear_layers(), reuses_gradient=way == "swap")
    shards = range(len(SIZES))
    for turn in range(1, 4):
        present = [digest_of(vectors.present.parameter_shards[j]) for j in shards]
        assert [vectors.digest(j) for j in shards] == present
        assert [vectors.coming_digest(j) for j in shards] == [b""] * 3
        for j in (1,) if way == "some" else shards:
            vectors.put_aside(j, from_tensor(torch.full((SIZES[j],), 7.0 + j)))
            assert vectors.coming_digest(j)
            vectors.put_aside(j, from_tensor(torch.full((SIZES[j],), float(turn + j))))
        coming = [vectors.coming_digest(j) for j in shards]
        if way in ("ahead", "dropped"):
            vectors.open_ahead(turn)
            assert [vectors.coming_digest(j) for j in shards] == coming
        if way == "dropped":
            vectors.drop_ahead()
        assert [vectors.digest(j) for j in shards] == present, "they are still there"
        vectors.finish_round()
        after = [digest_of(vectors.present.parameter_shards[j]) for j in shards]
        assert [vectors.digest(j) for j in shards] == after
        assert [a or b for a, b in zip(coming, present, strict=True)] == after
