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
from swarmnet.protocol.planning.exchange import auto_shard_parameters
from swarmnet.run_identity import from_json
from swarmnet.spec import RunSpec, Spread, SyncSpec, spec_of_values, values_of_spec
from swarmnet.training.memory.stage_table import StageTable
from swarmnet.training.models import matrices as about
from swarmnet.training.models.base import cut_shards, describe_parameters, ranges_of
from swarmnet.training.models.matrices import (
    check_matrices,
    cut_whole,
    family_parts,
    muon_matrices,
    step_flops,
)
from swarmnet.training.models.registry import (
    model_plan,
    stage_matrices,
    stage_moments,
    stage_parameter_ranges,
    stage_shard_sizes,
)
from swarmnet.training.resolving import resolve
from tests.swarm.harness import model_sizes
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
    assert [(m.block.start, m.shape) for m in several] == [(16 * i, (4, 4)) for i in range(3)]
    sync = SyncSpec(codec="none")
    check_matrices([layer], parts, sync)
    with monkeypatch.context() as patch:
        patch.setattr(about, "MAX_MESSAGE_BYTES", 4 * 16)  # and a number of steps
        with pytest.raises(SpecError, match=r"qkv_proj.weight, part 0 of 3 is too large .*\(16 pa"):
            check_matrices([layer], parts, sync)
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
            check_matrices([layer], wrong, sync)


def family(kind: str, **changes: Any) -> RunSpec:
    values = small_spec(optimizer=MUON).model_dump()
    sizes = model_sizes(kind, num_hidden_layers=4, **changes)
    values["model"] = {"kind": "transformers", "config": sizes}
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
    ("kind", "module", "name", "num_parts"),
    [
        ("phi3", "mlp", "gate_up_proj.weight", 2),
        ("glm", "mlp", "gate_up_proj.weight", 2),
        ("qwen3_moe", "mlp", "experts.gate_up_proj", 2),
        ("mixtral", "mlp", "experts.gate_up_proj", 2),
        ("aria_text", "mlp.experts", "gate_up_proj", 2),
        ("phi3", "self_attn", "qkv_proj.weight", 3),
        ("minimax", "self_attn", "qkv_proj.weight", 3),
        ("qwen3_5_text", "linear_attn", "in_proj_qkv.weight", 3),
        ("qwen3_next", "linear_attn", "in_proj_qkvz.weight", 4),
    ],
)
def test_parts_are_what_the_family_computes_with(
    kind: str, module: str, name: str, num_parts: int
) -> None:
    """Without gate or what it gates, a layer adds nothing there; nor without values, nor linear
    attention without queries or keys. Softmax looks everywhere alike without queries, as it does
    without keys."""
    before, *without = outputs_without_parts(kind, module, name, num_parts)
    assert before.abs().max() > 0
    assert not without.pop().any()
    if kind == "phi3" and name.startswith("qkv"):
        assert torch.equal(*without)
        assert not torch.equal(without[0], before)
    else:
        assert not torch.cat(without).any()


def outputs_without_parts(kind: str, module: str, name: str, num_parts: int) -> list[torch.Tensor]:
    """What a module of the first layer that has such a parameter gives: as it is, and without each
    of the parameter's parts."""
    layer, parts = layer_with(kind, f"{module}.{name}")
    built = layer.build().eval()
    own = built.get_submodule(module)
    for bias in (p for n, p in own.named_parameters() if n.endswith("bias")):
        torch.nn.init.zeros_(bias)
    found: list[torch.Tensor] = []
    own.register_forward_hook(lambda *about: found.append(_first(about[-1])))
    values = own.get_parameter(name)
    r, inside = matrices_within(layer, parts, f"{module}.{name}")
    assert len(inside) % num_parts == 0
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        built(x)
        whole = values.clone()
        for part in range(num_parts):
            flat = whole.flatten().clone()
            for m in inside[part::num_parts]:
                m.view_of(flat).zero_()
            values.copy_(flat.view(r.shape))
            built(x)
    return found


def layer_with(kind: str, name: str, **changes: Any) -> tuple[Any, Any]:
    """The first decoder layer with such a parameter, and the parts of its family."""
    spec = family(kind, **changes)
    layers = [x for x in model_plan(spec).layers if x.is_block]
    named = (x for x in layers if any(r.name.endswith(name) for r in describe_parameters([x])))
    return next(named), family_parts(spec.model, layers)


def matrices_within(layer: Any, parts: Any, name: str) -> tuple[Any, list[Any]]:
    """A parameter, and its matrices, with where they lie in it."""
    [r] = [r for r in describe_parameters([layer]) if r.name.endswith(name)]
    found = muon_matrices([layer], parts)
    return r, [m.moved(-r.start) for m in found if r.start <= m.block.start < r.stop]


def test_gate_and_up_of_gpt_oss_are_columns_in_turn() -> None:
    """Without the gate nothing passes; what it gates has 1 added to it."""
    before, no_gate, no_up = outputs_without_parts("gpt_oss", "mlp.experts", "gate_up_proj", 2)
    assert before.any()
    assert not no_gate.any()
    assert no_up.any()
    assert not torch.equal(no_up, before)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "kimi_linear", "minicpm3", "youtu"])
def test_keys_and_values_of_latents_alternate(kind: str) -> None:
    """Without values a layer attends to nothing. Without keys, and what is rotated of them, it
    attends to all alike, as it does without queries."""
    name = "self_attn.kv_b_proj.weight"
    turns = ["linear_attention", "full_attention"] * 2
    changes = {"layer_types": turns} if kind == "kimi_linear" else {}
    layer, parts = layer_with(kind, name, **changes)
    built = layer.build().eval()
    found: list[torch.Tensor] = []
    built.self_attn.register_forward_hook(lambda *about: found.append(_first(about[-1])))
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    begin = {n: p.clone() for n, p in built.named_parameters()}

    def without(*absent: tuple[str, int]) -> torch.Tensor:
        with torch.no_grad():
            for n, p in built.named_parameters():
                p.copy_(begin[n])
            for n, part in absent:
                r, inside = matrices_within(layer, parts, n)
                p = built.get_parameter(n)
                flat = p.flatten()
                inside[part].view_of(flat).zero_()
                p.copy_(flat.view(r.shape))
            built(x)
        return found.pop()

    query = "q_b_proj" if "self_attn.q_b_proj.weight" in begin else "q_proj"
    rotated = ("self_attn.kv_a_proj_with_mqa.weight", 1)
    alike = without((f"self_attn.{query}.weight", 0))
    assert not without((name, 1)).any()
    assert alike.any()
    assert torch.equal(without((name, 0), rotated), alike)
    assert not torch.equal(without((name, 0)), alike)


@pytest.mark.parametrize(
    ("of", "first", "names"), [("qkvz", 0, 4), ("ba", 4, 2)], ids=["qkvz", "ba"]
)
def test_linear_attention_reads_its_parts_by_head(of: str, first: int, names: int) -> None:
    """The family's own code says which numbers are which: those of a part that is absent are 0,
    and all others are as they were."""
    name = f"linear_attn.in_proj_{of}.weight"
    layer, parts = layer_with("qwen3_next", name)
    own = layer.build().linear_attn
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))

    def read() -> tuple[torch.Tensor, ...]:
        return own.fix_query_key_value_ordering(own.in_proj_qkvz(x), own.in_proj_ba(x))

    weight = own.get_parameter(name.removeprefix("linear_attn."))
    _, inside = matrices_within(layer, parts, name)
    with torch.no_grad():
        before, whole = read(), weight.clone()
        for part, m in enumerate(inside):
            flat = whole.flatten().clone()
            m.view_of(flat).zero_()
            weight.copy_(flat.view(whole.shape))
            for number, (was, now) in enumerate(zip(before, read(), strict=True)):
                assert was.any()
                is_absent = number == first + part
                assert torch.equal(now, torch.zeros_like(was) if is_absent else was)
    assert len(inside) == names


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def test_families_name_their_parts() -> None:
    experts = {"experts.gate_up_proj": (1, 1), "experts.down_proj": (1,)}
    assert parts_of("phi3") == {"self_attn.qkv_proj": (2, 1, 1), "mlp.gate_up_proj": (1, 1)}
    assert parts_of("mixtral") == parts_of("qwen3_moe") == experts
    assert parts_of("llama") == parts_of("gemma2") == {}
    assert parts_of("glm") == {"mlp.gate_up_proj": (1, 1)}
    halves, whole = Spread(columns=(1, 1)), {"experts.down_proj": (1,)}
    assert parts_of("aria_text") == {"experts.gate_up_proj": halves, **whole}
    assert parts_of("gpt_oss") == {
        "experts.gate_up_proj": Spread(columns=(1, 1), times=48),
        "experts.gate_up_proj_bias": (),
        "experts.down_proj_bias": (),
        **whole,
    }
    latent = {
        "self_attn.kv_a_proj_with_mqa": (2, 1),
        "self_attn.kv_b_proj": Spread(rows=(6, 5), times=4),
    }
    assert parts_of("minicpm3") == latent
    assert parts_of("deepseek_v3") == latent | experts
    assert parts_of("qwen3_next") == {
        "linear_attn.in_proj_qkvz": Spread(rows=(3, 3, 10, 10), times=2),
        "linear_attn.in_proj_ba": Spread(rows=(1, 1), times=2),
        **experts,
    }
    by_head = Spread(rows=(1, 1, 1), times=4)
    assert parts_of("minimax") == {"self_attn.qkv_proj": by_head, **experts}


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "gpt_oss", "minimax", "aria_text"])
def test_parameters_over_which_parts_are_spread_are_not_cut(kind: str) -> None:
    values = from_json(family(kind).canonical())
    started = resolve(spec_of_values(values, "a file"))
    assert started.optimizer.parts == parts_of(kind)
    assert RunSpec.from_canonical(started.canonical()) == started
    assert resolve(started) == started
    of_both = [m for stage in range(2) for m in stage_matrices(started, stage)]
    planned = StageTable(started)
    assert sum(planned.muon) == sum(m.num_elements for m in of_both)
    assert sum(planned.orthogonal) == sum(step_flops(m.shape) for m in of_both)
    num_spread = 0
    for stage in range(2):
        ends = list(accumulate(stage_shard_sizes(started, stage)))
        matrices = stage_matrices(started, stage)
        for m in matrices:
            assert not any(m.block.start < e < m.block.stop for e in ends)
            num_spread += m.block.num_elements > m.num_elements
        number = torch.zeros(ends[-1])
        for m in matrices:
            m.view_of(number).add_(1.0)
        assert number.max() == 1, "no number is of two matrices"
        assert number.sum() == sum(m.num_elements for m in matrices)
        starts = [0, *ends[:-1]]
        moments = stage_moments(started, stage)
        assert all(
            (number[start:end] == (n == 1)).all()
            for start, end, n in zip(starts, ends, moments, strict=True)
        )
    assert num_spread


def with_parts(**parts: Any) -> RunSpec:
    values = family("deepseek_v3").model_dump()
    values["optimizer"]["parts"] = parts
    return RunSpec.model_validate(values)


def test_a_division_is_written_in_one_form() -> None:
    by_rows = with_parts(kv_b_proj={"rows": [6, 5], "times": 4})
    assert by_rows.optimizer.parts == {"kv_b_proj": Spread(rows=(6, 5), times=4)}
    assert b'"parts":{"kv_b_proj":{"rows":[6,5],"times":4}}' in by_rows.canonical()
    behind = with_parts(x={"columns": [1, 1], "times": 1})
    assert b'"parts":{"x":{"columns":[1,1]}}' in behind.canonical()
    for spec in (by_rows, behind):
        assert RunSpec.from_canonical(spec.canonical()) == spec
        assert RunSpec.model_validate(spec.model_dump()) == spec
        assert spec_of_values(values_of_spec(spec), "a file").run_id == spec.run_id
    once = with_parts(x={"rows": [6, 5], "times": 1})
    assert once == with_parts(x=[6, 5])
    assert once.run_id == with_parts(x=(6, 5)).run_id


@pytest.mark.parametrize(
    "wrong",
    [
        {"times": 2},
        {"rows": [], "times": 2},
        {"rows": [1], "columns": [1]},
        {"rows": [1, 0], "times": 2},
        {"rows": [1, 1], "times": 0},
        {"rows": [1, 1], "times": True},
        {"rows": [1, 1], "times": (1 << 20) + 1},
        {"rows": [1, 1], "turns": 2},
        {"columns": "ab"},
        2,
    ],
)
def test_what_divides_nothing_is_refused_in_one_line(wrong: Any) -> None:
    values = family("deepseek_v3").model_dump()
    values["optimizer"]["parts"] = {"kv_b_proj": wrong}
    with pytest.raises(SpecError, match=r"parts must be names with the proportions") as caught:
        spec_of_values(values, "a file")
    assert "\n" not in str(caught.value)


def test_spread_parts_are_taken_out_and_put_back() -> None:
    layers = model_plan(small_spec(optimizer=MUON)).layers
    layer = replace(layers[1], build=lambda: torch.nn.Linear(4, 12, bias=False))
    values = torch.arange(48.0)

    def matrices(spread: Spread) -> list[list[list[float]]]:
        found = muon_matrices([layer], {"layers.0": spread})
        again = torch.zeros(48)
        for m in found:
            m.view_of(again).copy_(m.spread(m.matrix_of(values)))
        assert torch.equal(again, values)
        return [m.matrix_of(values).tolist() for m in found]

    by_rows = matrices(Spread(rows=(2, 1), times=2))
    rows = values.view(12, 4).tolist()
    assert by_rows == [[rows[i] for i in own] for own in ((0, 1, 2, 3, 6, 7, 8, 9), (4, 5, 10, 11))]
    turns = matrices(Spread(columns=(1, 1), times=2))
    assert turns == [[row[::2] for row in rows], [row[1::2] for row in rows]]
    behind = matrices(Spread(columns=(1, 1)))
    assert behind == [[row[:2] for row in rows], [row[2:] for row in rows]]
    for wrong, fault in [
        (Spread(rows=(2, 1), times=3), r"= \{ rows = \[2, 1\], times = 3 \} does not divide"),
        (Spread(columns=(1, 3)), r"\{ columns = \[1, 3\], times = 1 \} does not .* \[12, 4\]"),
        (Spread(columns=(1, 1), times=4), r"columns = \[1, 1\], times = 4 \} does not divide"),
    ]:
        with pytest.raises(SpecError, match=fault):
            matrices(wrong)


def test_what_muon_cannot_train_is_refused_in_one_line(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), optimizer=MUON)
    assert resolve(spec).optimizer.kind == "muon"
    layers = model_plan(spec).layers
    with pytest.raises(SpecError, match=r"this model has none \(a builder says is_block"):
        check_matrices([replace(layer, is_block=False) for layer in layers], {}, spec.sync)


@pytest.mark.parametrize(
    ("sync", "num_bytes"),
    [
        ({"codec": "none"}, 0),
        ({"codec": "auto"}, 2),
        ({"mode": "delayed"}, 2),
        ({"mode": "local"}, 0),
        ({"mode": "local", "codec": "topk"}, 2),
        ({"mode": "gossip"}, 3),
        ({"mode": "gossip", "codec": "int8"}, 0),
    ],
)
def test_a_matrix_is_refused_whose_state_no_message_holds(
    tmp_path: Path, sync: dict[str, Any], num_bytes: int
) -> None:
    """One of 640 MiB: alone it can be sent, with a second vector of its size it cannot. Where
    nothing else is open, too."""
    sizes = {"hidden_size": 8192, "intermediate_size": 20480}
    spec = small_spec(write_text(tmp_path), model=sizes, optimizer=MUON, sync=sync)
    matrix = r"model.layers.0.mlp.gate_proj.weight is too large for a message \(167772160 param"
    if not num_bytes:
        assert resolve(spec).optimizer.kind == "muon"
        return
    with pytest.raises(SpecError, match=f"{matrix}eters: {num_bytes * (640 << 20)} bytes"):
        resolve(spec)
    with pytest.raises(SpecError, match=matrix):
        StageTable(spec)


def test_a_shard_is_refused_whose_state_no_message_holds() -> None:
    """A written size; one that is left open is never so large."""
    sizes = {"hidden_size": 8192, "intermediate_size": 20480, "num_hidden_layers": 1}
    changes: dict[str, Any] = {"model": sizes, "pipeline": {"num_stages": 1}}
    for size, mode, is_refused in [
        ((1 << 27) - 1, "zero", False),
        ((1 << 27) - 1, "delayed", True),
        (1 << 26, "delayed", False),
        (1 << 26, "gossip", False),
        ((1 << 27) - 1, "gossip", True),
    ]:
        spec = small_spec(**changes, sync={"shard_parameters": size, "mode": mode})
        if is_refused:
            with pytest.raises(SpecError, match=rf"a shard of {size} parameters is too large"):
                stage_shard_sizes(spec, 0)
        else:
            assert max(stage_shard_sizes(spec, 0)) == size
    assert auto_shard_parameters(1 << 40) == 1 << 26
