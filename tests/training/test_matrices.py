"""Which parameters Muon steps, and that none of them is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import SpecError
from swarmnet.run_identity import from_json
from swarmnet.spec import RunSpec, spec_of_values, values_of_spec
from swarmnet.training.models import matrices as about
from swarmnet.training.models.base import cut_shards, describe_parameters, ranges_of
from swarmnet.training.models.matrices import (
    check_matrices,
    cut_whole,
    family_parts,
    muon_matrices,
)
from swarmnet.training.models.model_config import load_config
from swarmnet.training.models.registry import (
    model_plan,
    stage_matrices,
    stage_moments,
    stage_parameter_ranges,
    stage_shard_sizes,
)
from swarmnet.training.resolving import resolve
from tests.swarm.harness import MODEL_SIZES
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
    matrices = [r for r in ranges if r.name.startswith("m")]
    names = {r.name for r in matrices}
    sizes = cut_whole(ranges, matrices, size, num_tied)
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
    found = frozenset(m.name for k in range(2) for m in stage_matrices(spec, k))
    assert len(found) == 4 * 7
    ranges = [r for k in range(2) for r in stage_parameter_ranges(spec, k)]
    for r in ranges:
        is_matrix = r.name.startswith("model.layers.") and "norm" not in r.name
        assert (r.name in found) is is_matrix, r.name
    for stage in range(2):
        sizes, numbers = stage_shard_sizes(spec, stage), stage_moments(spec, stage)
        names = {m.name for m in stage_matrices(spec, stage)}
        one = sum(size for size, n in zip(sizes, numbers, strict=True) if n == 1)
        assert one == sum(r.num_elements for r in ranges if r.name in names)


def test_several_matrices_in_one_are_adamw_s_unless_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = model_plan(small_spec(optimizer=MUON)).layers

    def fused() -> torch.nn.Module:
        module = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 12, bias=False)})
        module["o_proj"] = torch.nn.Linear(4, 4)
        return module

    layer = replace(layers[1], build=fused)
    [matrix] = muon_matrices([layer], {})
    assert matrix.name == "model.layers.0.o_proj.weight"
    parts = {"qkv_proj": (1, 1, 1)}
    *several, _ = muon_matrices([layer], parts)
    assert [(m.start, m.shape) for m in several] == [(16 * i, (4, 4)) for i in range(3)]
    check_matrices([layer], parts)
    with monkeypatch.context() as patch:
        patch.setattr(about, "MAX_MATRIX_PARAMETERS", 15)
        with pytest.raises(SpecError, match=r"qkv_proj.weight, part 0 of 3 is too large .*\(16 pa"):
            check_matrices([layer], parts)
    for wrong, fault in [
        (
            {"qkv_proj": (4, 1, 2)},
            r"qkv_proj = \[4, 1, 2\] does not divide model\.layers\.0\.qkv_p",
        ),
        ({"qkv_proj": (10, 1, 1)}, r"qkv_proj = \[10, 1, 1\] does not divide"),
        ({"o_proj.bias": (1,)}, r"o_proj.bias = \[1\] does not divide .*, of shape \[4\]"),
        ({"proj": (1, 1)}, r"\[optimizer\] parts: no decoder layer has a parameter proj"),
    ]:
        with pytest.raises(SpecError, match=fault):
            check_matrices([layer], wrong)


def family(kind: str, **changes: Any) -> RunSpec:
    values = small_spec(optimizer=MUON).model_dump()
    known = load_config({"model_type": kind}).canonical_values.keys()
    sizes = MODEL_SIZES | {"num_hidden_layers": 4} | changes
    sizes = {k: v for k, v in sizes.items() if k in known}
    values["model"] = {"kind": "transformers", "config": {"model_type": kind, **sizes}}
    return RunSpec.model_validate(values)


OLD_CUTS = {
    "phi3": ((1024, *[1000] * 5, 120, 1536), (64,), (*[1000] * 8, 288)),
    "qwen3_moe": ((1024, 512, 512, 1024, *[1000] * 12, 304, 128), (64,), (*[1000] * 8, 288)),
}
"""Of a last stage of two layers, as versions cut it that knew no parts: each layer's matrices and
what is between them, what is between the layers, and the rest."""


@pytest.mark.parametrize("kind", OLD_CUTS)
def test_runs_that_name_no_parts_keep_their_cuts_and_their_id(kind: str) -> None:
    spec, (layer, between, rest) = family(kind), OLD_CUTS[kind]
    assert b"parts" not in spec.canonical()
    assert stage_shard_sizes(spec, 1) == (*layer, *between, *layer, *rest)
    again = spec_of_values(values_of_spec(spec), "a file")
    assert again.run_id == spec.run_id, "a file that says that it names none"
    assert resolve(again).run_id == resolve(spec).run_id


@pytest.mark.parametrize("kind", OLD_CUTS)
def test_a_run_that_starts_has_the_parts_of_its_family(kind: str) -> None:
    values = from_json(family(kind).canonical())
    started = resolve(spec_of_values(values, "a file"))
    parts = parts_of(kind)
    assert started.optimizer.parts == parts
    assert b'"parts"' in started.canonical()
    assert RunSpec.from_canonical(started.canonical()) == started
    assert resolve(started) == started
    old = stage_shard_sizes(family(kind), 1)
    sizes = stage_shard_sizes(started, 1)
    assert sizes != old
    assert sum(sizes) == sum(old)
    names = [m.name for m in stage_matrices(started, 1)]
    assert len(set(names)) == len(names)
    muon = sum(m.num_elements for m in stage_matrices(started, 1))
    one = [s for s, n in zip(sizes, stage_moments(started, 1), strict=True) if n == 1]
    assert sum(one) == muon
    inside = [r for r in stage_parameter_ranges(started, 1) if ".layers." in r.name]
    assert muon == sum(r.num_elements for r in inside if "norm" not in r.name)


def parts_of(kind: str, **changes: Any) -> Any:
    spec = family(kind, **changes)
    return dict(family_parts(spec.model, model_plan(spec).layers))


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("phi3", "mlp", "gate_up_proj.weight"),
        ("glm", "mlp", "gate_up_proj.weight"),
        ("qwen3_moe", "mlp", "experts.gate_up_proj"),
        ("mixtral", "mlp", "experts.gate_up_proj"),
        ("phi3", "self_attn", "qkv_proj.weight"),
        ("qwen3_5_text", "linear_attn", "in_proj_qkv.weight"),
    ],
)
def test_parts_are_what_the_family_computes_with(kind: str, module: str, name: str) -> None:
    """Without gate or what it gates, a layer adds nothing there; nor without values, nor linear
    attention without queries or keys. Softmax looks everywhere alike without queries, as it does
    without keys."""
    spec = family(kind)
    plan = model_plan(spec)
    layer = next(x for x in plan.layers if x.is_block)
    built = layer.build().eval()
    own = built.get_submodule(module)
    values = own.get_parameter(name)
    found: list[torch.Tensor] = []
    own.register_forward_hook(lambda *about: found.append(_first(about[-1])))
    [r] = [r for r in describe_parameters([layer]) if r.name.endswith(f"{module}.{name}")]
    matrices = muon_matrices([layer], family_parts(spec.model, plan.layers))
    inside = [m for m in matrices if r.start <= m.start < r.stop]
    num_parts = 3 if "qkv" in name else 2
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        built(x)
        whole = values.clone()
        for part in range(num_parts):
            flat = whole.flatten()
            for m in inside[part::num_parts]:
                flat[m.start - r.start : m.stop - r.start] = 0.0
            values.copy_(flat.view(r.shape))
            built(x)
    before, *without = found
    assert before.abs().max() > 0
    assert not without.pop().any()
    if name.startswith("qkv"):
        assert torch.equal(*without)
        assert not torch.equal(without[0], before)
    else:
        assert not torch.cat(without).any()


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def test_families_name_their_parts() -> None:
    experts = {"experts.gate_up_proj": (1, 1), "experts.down_proj": (1,)}
    assert parts_of("phi3") == {"self_attn.qkv_proj": (2, 1, 1), "mlp.gate_up_proj": (1, 1)}
    assert parts_of("mixtral") == parts_of("qwen3_moe") == experts
    assert parts_of("llama") == parts_of("gemma2") == {}
    assert parts_of("glm") == {"mlp.gate_up_proj": (1, 1)}
    transposed = {"experts.gate_up_proj_bias": (), "experts.down_proj_bias": ()}
    assert parts_of("gpt_oss", head_dim=16) == {"experts.down_proj": (1,), **transposed}
    latent = {"self_attn.kv_a_proj_with_mqa": (2, 1)}
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16}
    assert parts_of("minicpm3", **sizes) == latent


def test_what_muon_cannot_train_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(write_text(tmp_path), optimizer=MUON)
    assert resolve(spec).optimizer.kind == "muon"
    layers = model_plan(spec).layers
    with pytest.raises(SpecError, match=r"this model has none \(a builder says is_block"):
        check_matrices([replace(layer, is_block=False) for layer in layers], {})
    monkeypatch.setattr(about, "MAX_MATRIX_PARAMETERS", 32 * 48 - 1)
    with pytest.raises(SpecError, match=r"mlp.gate_proj.weight is too large for a message \(1536"):
        resolve(spec)
