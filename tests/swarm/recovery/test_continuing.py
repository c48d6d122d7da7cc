"""A run begins with the parameters that another one ended with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swarmnet.errors import SpecError
from swarmnet.runtime.joining.past import open_ended, open_past, past_line
from swarmnet.runtime.run_files import RunFiles
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore, find_checkpoints
from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
from swarmnet.training.models.source_weights import TIED
from swarmnet.training.resolving import Resolved, resolve, resolve_run
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.swarm.initial.test_weights import folder_of
from tests.swarm.lora_runs import LORA

ROUNDS = 4
Tables = Mapping[str, Mapping[str, Any]]


def changed(spec: RunSpec, tables: Tables) -> RunSpec:
    values = spec.model_dump()
    for table, fields in tables.items():
        values[table] = (values[table] or {}) | dict(fields)
    return RunSpec.model_validate(values)


def ended_run(path: Path, spec: RunSpec, weights: ModelWeights | None = None) -> dict[str, Any]:
    """Trains a run whose peers, one a stage, keep their state below `path`; returns its last
    parameters by name."""
    last: dict[str, torch.Tensor] = {}
    num_stages = spec.pipeline.num_stages

    async def scenario(swarm: Swarm) -> None:
        for stage in range(num_stages):
            store = CheckpointStore(path / f"peer-{stage}", spec)
            disk = Disk(store, InlineWorker(), 2)
            swarm.start(f"peer-{stage}", stage=stage, disk=disk, weights=weights)
        await swarm.until_round(ROUNDS)
        await swarm.until(
            lambda: (
                {m.round for _, m in every_checkpoint(path)} >= {ROUNDS}
                and len([m for _, m in every_checkpoint(path) if m.round == ROUNDS]) == num_stages
            )
        )
        last.update({n: p.clone() for n, p in swarm.parameters().items()})

    in_virtual_time(scenario, spec)
    return last


def every_checkpoint(path: Path) -> list[Any]:
    return [one for peer in sorted(path.glob("peer-*")) for one in find_checkpoints(peer)]


def continuing(spec: RunSpec, path: Path, wanted: str, tables: Tables) -> Resolved:
    """The run of another file that names what it continues, as peer-0 starts it."""
    more = {**tables, "model": {**tables.get("model", {}), "continues": wanted}}
    return resolve_run(
        changed(spec, more), past=open_past(path / "peer-0", changed(spec, more).model.continues)
    )


def first_parameters(
    spec: RunSpec, giver: ModelWeights, others: ModelWeights
) -> dict[str, torch.Tensor]:
    """Of a run in which nobody feeds, so that it stays where it began."""
    found: dict[str, torch.Tensor] = {}

    async def scenario(swarm: Swarm) -> None:
        last = spec.pipeline.num_stages - 1
        swarm.start("first", stage=last, weights=giver, feeds=False)
        for stage in range(last):
            swarm.start(f"other-{stage}", stage=stage, weights=others, feeds=False)
        await swarm.until_round(0)
        found.update({n: p.clone() for n, p in swarm.parameters().items()})

    in_virtual_time(scenario, spec)
    return found


def weights_of(resolved: Resolved, path: Path) -> ModelWeights:
    """As the peer that starts the run has them."""
    spec = resolved.spec
    ended = open_ended(spec, InitialLayout.of(spec), path / "peer-0", "")
    assert ended is not None
    return ModelWeights(spec, resolved.contents["weights.sha256"], None, ended=ended)


@pytest.mark.parametrize(
    "tables",
    [
        {"optimizer": {"rounds": 9, "learning_rate": 5e-4}},
        {"pipeline": {"num_stages": 1, "layers": ()}, "sync": {"shard_parameters": 3000}},
        {"data": {"held_out_microbatches": 2}, "sync": {"mode": "local"}},
    ],
    ids=["longer", "cut otherwise", "another mode"],
)
def test_another_run_begins_with_exactly_these_parameters(tmp_path: Path, tables: Tables) -> None:
    spec = resolve(tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS))
    last = ended_run(tmp_path, spec)
    resolved = continuing(spec, tmp_path, spec.run_id[:16], tables)
    after = resolved.spec
    assert after.model.continues == f"{spec.run_id}@{ROUNDS}"
    assert after.open_keys == ()
    assert RunSpec.from_canonical(after.canonical()) == after
    hashes = resolved.contents["weights.sha256"]
    first = first_parameters(
        after, weights_of(resolved, tmp_path), ModelWeights(after, hashes, None)
    )
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in last)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSpec]:
    path = tmp_path_factory.mktemp("ended")
    spec = resolve(tiny_spec(path, num_stages=2, rounds=ROUNDS))
    ended_run(path, spec)
    return path, spec


LONGER: Tables = {"optimizer": {"rounds": 9}}


def test_a_folder_means_the_last_run_in_it_and_a_round_may_be_named(
    ended: tuple[Path, RunSpec],
) -> None:
    path, spec = ended
    by_id = continuing(spec, path, spec.run_id, LONGER).spec
    assert continuing(spec, path, str(path), LONGER).spec == by_id
    earlier = continuing(spec, path, f"{spec.run_id[:8]}@2", LONGER).spec
    assert earlier.model.continues == f"{spec.run_id}@2"
    assert earlier.run_id != by_id.run_id
    assert earlier.model.weights != by_id.model.weights


@pytest.mark.parametrize(
    ("wanted", "tables", "line"),
    [
        ("0123456789abcdef", {}, "this machine has no checkpoint of it"),
        ("{id}@3", {}, "this machine has no checkpoint of it"),
        ("{path}/nothing", {}, "is no folder and no id of a run"),
        ("{path}/empty", {}, "this machine has no checkpoint in it"),
        ("{path}/peer-0", {}, r"all 2 stages \(of round 4, stage 1 is missing\)"),
        ("{id}", {"model": {"intermediate_size": 48}}, "intermediate_size is 64 there, 48 here"),
        ("{id}", {"model": {"num_attention_heads": 8}}, "num_attention_heads is 4 there, 8 here"),
    ],
)
def test_what_cannot_be_continued_is_said_in_a_line(
    ended: tuple[Path, RunSpec], wanted: str, tables: Tables, line: str
) -> None:
    path, spec = ended
    (path / "empty").mkdir(exist_ok=True)
    text = wanted.format(id=spec.run_id, path=path)
    with pytest.raises(SpecError, match=line) as error:
        continuing(spec, path, text, tables)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("[model] continues: ")


def test_a_damaged_checkpoint_is_no_beginning(tmp_path: Path) -> None:
    spec = resolve(tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS))
    ended_run(tmp_path, spec)
    [file] = (tmp_path / "peer-1").glob(f"checkpoints/*/round-*{ROUNDS}/stage.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(SpecError, match="is damaged; name an earlier round"):
        continuing(spec, tmp_path, spec.run_id, LONGER)
    assert continuing(spec, tmp_path, f"{spec.run_id}@2", LONGER).spec.model.weights


def test_the_same_file_started_again_is_the_same_run(tmp_path: Path) -> None:
    """Also where it names a folder, in which the newest checkpoints are its own by then."""
    spec = resolve(tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS))
    ended_run(tmp_path, spec)
    resolved = continuing(spec, tmp_path, str(tmp_path), LONGER)
    RunFiles(tmp_path / "peer-0", resolved.spec.files).save(resolved.contents)
    ended_run(tmp_path, resolved.spec, weights_of(resolved, tmp_path))
    again = continuing(spec, tmp_path, str(tmp_path), LONGER)
    assert again.spec == resolved.spec
    assert again.contents["weights.sha256"] == resolved.contents["weights.sha256"]
    further = continuing(spec, tmp_path, str(tmp_path), {"optimizer": {"rounds": 20}}).spec
    assert further.model.continues.startswith(f"{resolved.spec.run_id}@")


def test_a_run_that_begins_beside_a_similar_one_says_so(ended: tuple[Path, RunSpec]) -> None:
    path, spec = ended
    similar = resolve(changed(spec, {"optimizer": {"rounds": 9, "learning_rate": 5e-4}}))
    line = past_line(similar, path / "peer-0")
    assert f"checkpoints of run {spec.run_id[:16]} up to round {ROUNDS}" in line
    assert "another [optimizer] learning_rate, [optimizer] rounds; " in line
    assert f'write continues = "{spec.run_id[:16]}" under [model]' in line
    assert past_line(spec, path / "peer-0") == "", "it is this run"
    other = resolve(changed(spec, {"model": {"intermediate_size": 48}}))
    assert past_line(other, path / "peer-0") == ""
    assert past_line(similar, path / "elsewhere") == ""
    after = continuing(spec, path, spec.run_id, LONGER).spec
    assert f"round {ROUNDS} of run {spec.run_id[:16]}" in past_line(after, path / "peer-0")


def test_a_spec_may_not_name_weights_without_their_origin(ended: tuple[Path, RunSpec]) -> None:
    path, spec = ended
    values = json.loads(continuing(spec, path, spec.run_id, LONGER).spec.canonical())
    del values["model"]["continues"]
    with pytest.raises(SpecError, match="weights goes with from or continues"):
        RunSpec.from_canonical(json.dumps(values).encode())


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_a_run_over_a_model_s_folder_goes_on(tmp_path: Path, lora: Any) -> None:
    """With `[lora]`, adapters go on, and the base comes from the model's folder again."""
    folder = folder_of(tmp_path / "model")
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values["model"] = {"from": str(folder)}
    values["lora"] = lora
    values["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    written = RunSpec.model_validate(values)
    before = resolve_run(written)
    hashes = before.contents["weights.sha256"]
    last = ended_run(tmp_path, before.spec, ModelWeights(before.spec, hashes, folder))
    RunFiles(tmp_path / "peer-0", before.spec.files).save(before.contents)
    resolved = continuing(written, tmp_path, before.spec.run_id, LONGER)
    after, hashes = resolved.spec, resolved.contents["weights.sha256"]
    past = open_ended(after, InitialLayout.of(after), tmp_path / "peer-0", "")
    giver = ModelWeights(after, hashes, folder, ended=past)
    first = first_parameters(after, giver, ModelWeights(after, hashes, None))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in last)
    start = load_file(folder / "model.safetensors")
    assert any(not torch.equal(last[n], start[n]) for n in last if n in start) == (lora is None)
    other = dict(lora or LORA) | {"r": 2} if lora else LORA
    line = r"\[lora\] rank is 4 there, 2 here" if lora else "only one of the two trains adapters"
    with pytest.raises(SpecError, match=line):
        continuing(written, tmp_path, before.spec.run_id, {"lora": other})


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_tied_matrix_goes_on_where_it_has_more_or_fewer_stages(
    tmp_path: Path, before: int, after: int
) -> None:
    folder = folder_of(tmp_path / "model")
    values = tiny_spec(tmp_path, num_stages=before, rounds=ROUNDS).model_dump()
    values["model"] = {"from": str(folder)}
    values["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    written = RunSpec.model_validate(values)
    ended = resolve_run(written)
    weights = ModelWeights(ended.spec, ended.contents["weights.sha256"], folder)
    last = ended_run(tmp_path, ended.spec, weights)
    tables = {"pipeline": {"num_stages": after, "layers": ()}}
    resolved = continuing(written, tmp_path, ended.spec.run_id, tables)
    hashes = resolved.contents["weights.sha256"]
    others = ModelWeights(resolved.spec, hashes, None)
    first = first_parameters(resolved.spec, weights_of(resolved, tmp_path), others)
    assert all(torch.equal(first[name], last[TIED.get(name, name)]) for name in first)
    assert first.keys() - last.keys() == (TIED.keys() if after == 2 else set())
    assert last.keys() - first.keys() == (TIED.keys() if after == 1 else set())


@pytest.mark.parametrize("num_stages", [2, 1], ids=["cut alike", "cut otherwise"])
def test_adapters_go_on_over_the_same_weights_only(tmp_path: Path, num_stages: int) -> None:
    """The name of a folder and its config.json prove nothing."""
    folder = folder_of(tmp_path / "model")
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values |= {"model": {"from": str(folder)}, "lora": LORA}
    values["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    written = RunSpec.model_validate(values)
    before = resolve_run(written)
    hashes, run_id = before.contents["weights.sha256"], before.spec.run_id
    ended_run(tmp_path, before.spec, ModelWeights(before.spec, hashes, folder))
    tables = {**LONGER, "pipeline": {"num_stages": num_stages, "layers": ()}}
    with pytest.raises(SpecError, match=r"has not the hashes of the base of run .* files too"):
        continuing(written, tmp_path, run_id, tables)
    RunFiles(tmp_path / "peer-1", before.spec.files).save(before.contents)
    renamed = folder.rename(tmp_path / "renamed")
    elsewhere = {**tables, "model": {"source": str(renamed)}}
    assert continuing(written, tmp_path, run_id, elsewhere).spec.model.weights
    folder_of(tmp_path / "model", seed=5)
    with pytest.raises(SpecError, match=r"trained adapters for model, and .* has other w"):
        continuing(written, tmp_path, run_id, tables)
