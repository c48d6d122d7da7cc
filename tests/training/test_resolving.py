"""Whoever starts a run chooses what its spec leaves open, and chooses as it always did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnet.errors import SpecError
from swarmnet.protocol import codecs
from swarmnet.spec import BOUNDARY_CODEC_KEY, UPDATE_CODEC_KEY, RunSpec, load_spec, parse_spec
from swarmnet.training.models.registry import (
    model_plan,
    shard_parameters,
    split_stages,
    stage_parameter_ranges,
    stage_shard_sizes,
)
from swarmnet.training.resolving import resolve
from tests.test_spec import LLAMA
from tests.training.specs import small_spec

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.toml"), *(ROOT / "peer").glob("*.toml")])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_nobody_gets_other_stages_or_shards(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    written = load_spec(path)
    spec = resolve(written)
    assert spec.open_keys == ()
    for k in range(written.pipeline.num_stages):
        assert stage_parameter_ranges(spec, k) == stage_parameter_ranges(written, k)
        assert stage_shard_sizes(spec, k) == stage_shard_sizes(written, k)
    assert spec.sync_warmup_rounds == written.sync_warmup_rounds


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["zero", "local"])
def test_the_outcome_stands_in_the_spec(num_stages: int, mode: str) -> None:
    pipeline = {"num_stages": num_stages}
    written = small_spec(pipeline=pipeline, sync={"shard_parameters": 0, "mode": mode})
    spec, plan = resolve(written), model_plan(written)
    assert spec.pipeline.layers == tuple(len(s) for s in split_stages(plan, num_stages))
    assert spec.sync.shard_parameters == shard_parameters(written, plan)
    assert spec.sync.warmup_rounds == 6, "a third of 20"
    assert resolve(spec) == spec
    assert RunSpec.from_canonical(spec.canonical()) == spec


def test_what_a_person_gave_stays() -> None:
    given = {"layers": [1, 5]}, {"shard_parameters": 77, "warmup_rounds": 2}
    spec = resolve(small_spec(pipeline=given[0], sync=given[1]))
    assert spec.pipeline.layers == (1, 5)
    assert (spec.sync.shard_parameters, spec.sync.warmup_rounds) == (77, 2)
    with pytest.raises(SpecError, match="they add up to 5"):
        resolve(small_spec(pipeline={"layers": [1, 4]}))


def test_a_custom_model_is_looked_for_where_this_machine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    there = load_spec(ROOT / "examples" / "custom_model.toml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="no file"):
        resolve(there)
    spec = resolve(there, f"{ROOT}/examples/custom_model.py:build")
    assert spec.model.builder == there.model.builder
    assert spec.pipeline.layers == (3, 3)


def test_a_builder_gets_the_same_options_from_the_starter_as_from_joiners() -> None:
    """JSON does not tell 2.0 from 2."""
    custom = {
        "model": {
            "kind": "custom",
            "builder": "m.py:build",
            "options": {"scale": 2.0, "large": 1e20},
        },
        "optimizer": {"learning_rate": 0.01, "rounds": 10},
        "pipeline": {"num_stages": 1, "layers": [1], "global_batch": 2, "microbatch": 2},
        "sync": {"shard_parameters": 5, "warmup_rounds": 0},
    }
    spec = resolve(RunSpec.model_validate(custom))
    joiner = RunSpec.from_canonical(spec.canonical())
    for options in (spec.model.options, joiner.model.options):
        assert options == {"scale": 2, "large": 1e20}
        assert [type(v) for v in options.values()] == [float, int]


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int6", "int4"])
def test_the_codec_that_was_asked_for_stands_in_the_canonical_spec(codec: str) -> None:
    spec = resolve(parse_spec(LLAMA.replace("[pipeline]\n", f'[pipeline]\ncodec = "{codec}"\n')))
    assert spec.pipeline.codec == codec
    assert RunSpec.from_canonical(spec.canonical()).pipeline.codec == codec
    values = json.loads(spec.canonical())["pipeline"]
    assert values.get("codec", "none") == codec  # a key at its default is left out


def test_who_starts_a_run_chooses_a_codec_that_no_one_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = parse_spec(LLAMA)
    assert {BOUNDARY_CODEC_KEY, UPDATE_CODEC_KEY} <= set(written.open_keys)
    assert resolve(written).pipeline.codec == codecs.AUTO_BOUNDARY_CODEC
    assert resolve(written).sync.codec == codecs.AUTO_UPDATE_CODEC
    monkeypatch.setattr("swarmnet.spec.AUTO_BOUNDARY_CODEC", "bf16")
    monkeypatch.setattr("swarmnet.spec.AUTO_UPDATE_CODEC", "bf16")
    later = resolve(written)
    assert (later.pipeline.codec, later.sync.codec) == ("bf16", "bf16")
    values = json.loads(later.canonical())
    assert (values["pipeline"]["codec"], values["sync"]["codec"]) == ("bf16", "bf16")


def test_a_run_of_before_the_codecs_stays_without_whatever_auto_means_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codecs_off = LLAMA + 'codec = "none"\n[sync]\ncodec = "none"\n'
    canonical = resolve(parse_spec(codecs_off)).canonical()
    assert b"codec" not in canonical
    monkeypatch.setattr("swarmnet.spec.AUTO_BOUNDARY_CODEC", "bf16")
    spec = RunSpec.from_canonical(canonical)
    assert spec.open_keys == ()
    assert (resolve(spec).pipeline.codec, resolve(spec).sync.codec) == ("none", "none")


def test_what_was_not_shown_to_be_harmless_is_not_coded_unasked() -> None:
    gossip = resolve(parse_spec(LLAMA + '[sync]\nmode = "gossip"\n'))
    assert (gossip.pipeline.codec, gossip.sync.codec) == ("int8", "none")
