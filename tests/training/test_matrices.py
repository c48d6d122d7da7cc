"""Which parameters Muon steps, and that none of them is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import SpecError
from swarmnet.training.models import matrices as about
from swarmnet.training.models.base import cut_shards, ranges_of
from swarmnet.training.models.matrices import check_matrices, cut_whole, muon_matrices
from swarmnet.training.models.registry import (
    model_plan,
    stage_matrices,
    stage_moments,
    stage_parameter_ranges,
    stage_shard_sizes,
)
from swarmnet.training.resolving import resolve
from tests.training.specs import small_spec, write_text

MUON = {"kind": "muon"}


@given(
    kinds=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=30),
    size=st.integers(1, 50),
    num_tied=st.integers(0, 40),
)
def test_no_matrix_is_cut_and_none_shares_a_shard_with_other_parameters(
    kinds: list[tuple[bool, int]], size: int, num_tied: int
) -> None:
    named = [("tied", num_tied)] * bool(num_tied)
    named += [(f"{'m' if is_matrix else 'v'}{i}", n) for i, (is_matrix, n) in enumerate(kinds)]
    ranges = ranges_of((name, torch.empty(n, device="meta")) for name, n in named)
    names = {r.name for r in ranges if r.name.startswith("m")}
    sizes = cut_whole(ranges, names, size, num_tied)
    assert sum(sizes) == ranges[-1].stop
    assert sizes[: len(cut_shards(num_tied, size))] == cut_shards(num_tied, size)
    ends = list(accumulate(sizes))
    for start, stop in zip([0, *ends], ends, strict=False):
        inside = [r for r in ranges if r.start < stop and r.stop > start]
        muon = [r for r in inside if r.name in names]
        assert not muon or muon == inside
        assert all(start <= r.start and r.stop <= stop for r in muon)
        assert stop - start <= size or len(muon) == 1


def test_runs_with_adamw_keep_their_cuts() -> None:
    spec = small_spec()
    for stage in range(2):
        total = stage_parameter_ranges(spec, stage)[-1].stop
        assert stage_shard_sizes(spec, stage) == cut_shards(total, 1000)
        assert not stage_matrices(spec, stage)
        assert set(stage_moments(spec, stage)) == {2}


@pytest.mark.parametrize("subspace", [0, 8])
def test_they_are_the_matrices_of_decoder_layers(subspace: int) -> None:
    spec = small_spec(
        model={"subspace": subspace, "subspace_seed": int(subspace > 0)}, optimizer=MUON
    )
    found = frozenset().union(*(stage_matrices(spec, k) for k in range(2)))
    assert len(found) == 4 * 7
    ranges = [r for k in range(2) for r in stage_parameter_ranges(spec, k)]
    for r in ranges:
        is_matrix = r.name.startswith("model.layers.") and "norm" not in r.name
        assert (r.name in found) is is_matrix, r.name
    for stage in range(2):
        sizes, numbers = stage_shard_sizes(spec, stage), stage_moments(spec, stage)
        names = stage_matrices(spec, stage)
        one = sum(size for size, n in zip(sizes, numbers, strict=True) if n == 1)
        assert one == sum(r.num_elements for r in ranges if r.name in names)


def test_several_matrices_in_one_are_left_to_adamw() -> None:
    layers = model_plan(small_spec(optimizer=MUON)).layers

    def fused() -> torch.nn.Module:
        module = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 12, bias=False)})
        module["o_proj"] = torch.nn.Linear(4, 4)
        return module

    layer = replace(layers[1], build=fused)
    assert muon_matrices([layer]) == {"model.layers.0.o_proj.weight"}


def test_what_muon_cannot_train_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(write_text(tmp_path), optimizer=MUON)
    assert resolve(spec).optimizer.kind == "muon"
    layers = model_plan(spec).layers
    with pytest.raises(SpecError, match=r"this model has none \(a builder says is_block"):
        check_matrices([replace(layer, is_block=False) for layer in layers])
    monkeypatch.setattr(about, "MAX_MATRIX_PARAMETERS", 32 * 48 - 1)
    with pytest.raises(SpecError, match=r"mlp.gate_proj.weight is too large for a message \(1536"):
        resolve(spec)
