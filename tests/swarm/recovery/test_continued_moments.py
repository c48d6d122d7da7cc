"""The moments of an optimizer go on in a run that continues another."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.batch import Batch
from swarmnet.ports import Data
from swarmnet.runtime.compose import run_settings
from swarmnet.runtime.joining.past import open_ended, past_line
from swarmnet.runtime.run_files import RunFiles
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore, find_checkpoints
from swarmnet.training.data import open_data
from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
from swarmnet.training.resolving import Resolved, resolve, resolve_run
from tests.numerics.test_lora import Losses
from tests.oracles.reference import ReferenceTrainer
from tests.swarm.harness import (
    Swarm,
    in_virtual_time,
    relative_difference,
    stepped_by_parts,
    tiny_spec,
)
from tests.swarm.initial.test_weights import folder_of
from tests.swarm.lora_runs import LORA
from tests.swarm.recovery.test_continuing import changed, continuing

ROUNDS = 4
OF_FAMILIES = {"parts": "phi3", "spread": "deepseek_v3"}
WHAT = ("whole", "adapters", "muon", *OF_FAMILIES)
CONSTANT = {
    "learning_rate": 3e-3,
    "min_learning_rate_ratio": 1.0,
    "warmup_rounds": 0,
    "rounds": ROUNDS,
}


def grid_of(num_stages: int) -> list[tuple[str, int]]:
    """Names and stages of two peers a stage. The first has what the run begins from, the last
    feeds."""
    later = range(1, num_stages)
    return [("a0", 0), *((f"b{k}", k) for k in later), ("b0", 0), *((f"a{k}", k) for k in later)]


GRID = grid_of(2)


class Later:
    """The samples of rounds that come later, in place of those of the same slots."""

    def __init__(self, data: Data, spec: RunSpec, by: int) -> None:
        settings, self._data = run_settings(spec), data
        self.num_samples = data.num_samples
        slots = [(r, s) for r in range(ROUNDS) for s in range(settings.slots.of(r))]
        self._theirs = {
            tuple(settings.samples_of(r, s, data.num_samples)): settings.samples_of(
                r + by, s, data.num_samples
            )
            for r, s in slots
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def microbatch(self, indices: Sequence[int]) -> Batch:
        return self._data.microbatch(self._theirs[tuple(indices)])


def trained(
    spec: RunSpec,
    *,
    weights: Callable[[str], ModelWeights | None] = lambda name: None,
    data: Data | None = None,
    state: Path | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run of two replicas a stage, and its last parameters."""
    grid = grid_of(spec.pipeline.num_stages)
    losses: list[float] = []
    last: dict[str, torch.Tensor] = {}
    rounds = spec.optimizer.rounds

    async def scenario(swarm: Swarm) -> None:
        for name, stage in grid:
            disk = None
            if state is not None:
                disk = Disk(CheckpointStore(state / name, spec), InlineWorker(), ROUNDS)
            feeds = name == grid[-1][0]
            if feeds:  # when the others are in round 0, of which nothing is launched
                await swarm.until_round(0)
                await asyncio.sleep(5.0)
            swarm.start(name, stage=stage, weights=weights(name), data=data, disk=disk, feeds=feeds)
        seen = Losses(swarm)
        await swarm.until(lambda: seen.until(rounds))
        await swarm.until_round(rounds)
        seen.until(rounds)
        if state is not None:
            await swarm.until(lambda: len(saved(state, grid)) == len(grid))
        losses.extend(seen.of(r) for r in range(rounds))
        last.update({n: p.clone() for n, p in swarm.parameters().items()})
        assert swarm.total("samples_lost") == 0
        assert swarm.total("shard_reset") == 0

    in_virtual_time(scenario, spec)
    return losses, last


def saved(state: Path, grid: Sequence[tuple[str, int]]) -> list[Any]:
    folders = [state / name for name, _ in grid]
    return [m for f in folders for _, m in find_checkpoints(f) if m.round == ROUNDS]


def giver_of(resolved: Resolved, state: Path, folder: Path | None, kept: Path | None = None) -> Any:
    """What each peer has of what a run began from: the first has all, the others nothing. `kept`:
    the state folder of all, where they keep what is not trained."""
    spec, hashes = resolved.spec, resolved.contents["weights.sha256"]

    def weights(name: str) -> ModelWeights:
        keeps = None if kept is None else kept / name
        if name != GRID[0][0]:
            return ModelWeights(spec, hashes, None, state_dir=keeps)
        ended = open_ended(spec, InitialLayout.of(spec), state / name, "")
        assert ended is not None
        return ModelWeights(spec, hashes, folder, ended=ended, state_dir=keeps)

    return weights


def spec_of(tmp_path: Path, what: str, *, num_stages: int) -> tuple[RunSpec, Path | None]:
    """A run, and the folder of its model where it trains adapters. `what`: of `WHAT`."""
    kind = "muon" if what == "muon" else "adamw"
    spec = changed(
        tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS),
        {"optimizer": CONSTANT | {"kind": kind}},
    )
    if what in OF_FAMILIES:
        return stepped_by_parts(spec, OF_FAMILIES[what]), None
    if what != "adapters":
        return spec, None
    folder = folder_of(tmp_path / "model")
    values = spec.model_dump()
    values |= {"model": {"from": str(folder)}, "lora": LORA}
    values["optimizer"]["learning_rate"] = 3e-2
    values["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    return RunSpec.model_validate(values), folder


def begun(of: RunSpec, state: Path, folder: Path | None) -> tuple[RunSpec, Any]:
    """The run, and what its peers have of its beginning."""
    resolved = resolve_run(of)
    if folder is None:
        return resolved.spec, lambda name: None
    hashes = resolved.contents["weights.sha256"]
    RunFiles(state / GRID[0][0], resolved.spec.files).save(resolved.contents)
    return resolved.spec, lambda name: ModelWeights(
        resolved.spec, hashes, folder if name == GRID[0][0] else None
    )


@pytest.mark.parametrize("what", WHAT)
def test_two_runs_of_half_the_length_are_the_whole_one(tmp_path: Path, what: str) -> None:
    """And they are not without moments, or this test could not fail."""
    spec, folder = spec_of(tmp_path, what, num_stages=2)
    state = tmp_path / "state"
    whole, weights = begun(changed(spec, {"optimizer": {"rounds": 2 * ROUNDS}}), state, folder)
    expected, last = trained(whole, weights=weights)
    half, weights = begun(spec, state, folder)
    first, _ = trained(half, weights=weights, state=state)
    assert first == pytest.approx(expected[:ROUNDS], rel=1e-4)

    resolved = continuing(spec.model_copy(update={"name": "again"}), state, half.run_id, {})
    after = resolved.spec
    assert after.model.moments
    assert "parameters and moments of round" in past_line(after, state / "peer-0")
    later = Later(open_data(after), after, ROUNDS)
    second, found = trained(after, weights=giver_of(resolved, state, folder), data=later)
    assert second == pytest.approx(expected[ROUNDS:], rel=2e-5)
    assert relative_difference(found, last) < 1e-3

    other = {"optimizer": {"beta1": 0.9001}}  # which alone changes next to nothing
    resolved = continuing(spec, state, half.run_id, other)
    assert not resolved.spec.model.moments
    later = Later(open_data(resolved.spec), resolved.spec, ROUNDS)
    without, _ = trained(resolved.spec, weights=giver_of(resolved, state, folder), data=later)
    assert without[0] == pytest.approx(expected[ROUNDS], rel=1e-4), "the same parameters"
    assert without[-1] != pytest.approx(expected[-1], rel=1e-3)


@pytest.mark.parametrize("what", WHAT)
def test_they_go_on_over_another_cut_and_back(tmp_path: Path, what: str) -> None:
    """From 4 stages (3 of a model of so many layers) to 2 and back, with other shards: the losses
    of one run."""
    most = 3 if what == "adapters" else 4
    spec, folder = spec_of(tmp_path, what, num_stages=most)
    states = [tmp_path / f"state-{i}" for i in range(3)]
    whole, weights = begun(changed(spec, {"optimizer": {"rounds": 3 * ROUNDS}}), states[0], folder)
    expected, last = trained(whole, weights=weights)
    run, weights = begun(spec, states[0], folder)
    found, parameters = trained(run, weights=weights, state=states[0])
    for i, num_stages in enumerate((2, most)):
        name = spec.model_copy(update={"name": f"again-{i}"})
        tables = {
            "pipeline": {"layers": (), "num_stages": num_stages},
            "sync": {"shard_parameters": 3000 + 500 * i},
        }
        resolved = continuing(name, states[i], run.run_id, tables)
        run = resolved.spec
        assert run.model.moments
        RunFiles(states[i + 1] / GRID[0][0], run.files).save(resolved.contents)
        later = Later(open_data(run), run, (i + 1) * ROUNDS)
        giver = giver_of(resolved, states[i], folder, states[i + 1])
        losses, parameters = trained(run, weights=giver, data=later, state=states[i + 1])
        found += losses
    assert found == pytest.approx(expected, rel=2e-5)
    assert relative_difference(parameters, last) < 1e-3


def test_a_run_without_an_end_goes_on_in_one_that_lowers_the_rate(tmp_path: Path) -> None:
    """Its rate is constant, and nobody takes a round of it for the last. The run that continues it
    has moments, no warm-up, and ends."""
    tables = {"optimizer": {"schedule": "constant", "warmup_rounds": 2, "rounds": 0}}
    spec = resolve(changed(tiny_spec(tmp_path, num_stages=2), tables))
    losses = ReferenceTrainer(spec)

    async def without_end(swarm: Swarm) -> None:
        for name, stage in GRID:
            disk = Disk(CheckpointStore(tmp_path / name, spec), InlineWorker(), ROUNDS)
            swarm.start(name, stage=stage, disk=disk)
        await swarm.until(lambda: len(saved(tmp_path, GRID)) == len(GRID))
        await swarm.until_round(ROUNDS + 2)
        assert all(not m.life.done() for m in swarm.members.values())
        for r in range(ROUNDS):
            losses.step(r, sorted(swarm.counted[r]))

    in_virtual_time(without_end, spec)
    rounds = ROUNDS + 1
    down = {"schedule": "wsd", "warmup_rounds": 0, "rounds": rounds, "decay_rounds": rounds}
    wanted = f"{spec.run_id}@{ROUNDS}"
    resolved = continuing(spec, tmp_path, wanted, {"optimizer": down})
    after = resolved.spec
    assert after.model.moments
    losses.continue_as(after)
    weights = giver_of(resolved, tmp_path, None)

    async def with_end(swarm: Swarm) -> None:
        for name, stage in GRID:
            swarm.start(name, stage=stage, weights=weights(name))
        await swarm.until_round(rounds)
        for r in range(rounds):
            losses.step(r, sorted(swarm.counted[r]))
        assert relative_difference(swarm.parameters(), losses.state_dict()) < 1e-4

    in_virtual_time(with_end, after)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSpec]:
    path = tmp_path_factory.mktemp("moments")
    spec = resolve(tiny_spec(path, num_stages=2, rounds=ROUNDS))
    trained(spec, state=path)
    return path, spec


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"sync": {"mode": "local"}}, r"\[sync\] mode is local here, where each replica has its"),
        ({"optimizer": {"beta2": 0.9}}, r"\[optimizer\] beta2 is 0.95 there, 0.9 here"),
        ({"optimizer": {"kind": "muon"}}, r"\[optimizer\] kind is adamw there, muon here"),
    ],
)
def test_moments_that_do_not_fit_begin_at_zero_and_a_line_says_why(
    ended: tuple[Path, RunSpec],
    tables: Mapping[str, Mapping[str, Any]],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, spec = ended
    with caplog.at_level(logging.WARNING, "swarmnet"):
        resolved = continuing(spec, path, spec.run_id, tables)
    assert not resolved.spec.model.moments
    [line] = [r.getMessage() for r in caplog.records if "continues" in r.getMessage()]
    assert re.match(rf"\[model\] continues: moments begin at zero: {why}", line)
    assert "with the parameters of round 4" in past_line(resolved.spec, path / "peer-0")


def test_they_go_on_in_the_modes_whose_owners_have_them(ended: tuple[Path, RunSpec]) -> None:
    path, spec = ended
    for mode in ("delayed", "auto"):
        assert continuing(spec, path, spec.run_id, {"sync": {"mode": mode}}).spec.model.moments


def test_moments_that_no_checkpoint_has_begin_at_zero(
    ended: tuple[Path, RunSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec = ended
    for name, _ in GRID:
        shutil.copytree(path / name, tmp_path / name)
    longer = {"optimizer": {"rounds": 9}}
    whole = continuing(spec, tmp_path, spec.run_id, longer).spec
    assert whole.model.moments
    # A damaged copy does no harm where another peer has the same shards.
    [file] = (tmp_path / "a1").glob(f"checkpoints/*/round-*{ROUNDS}/optimizer.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert continuing(spec, tmp_path, spec.run_id, longer).spec == whole
    shutil.rmtree(tmp_path / "b1")
    with caplog.at_level(logging.WARNING, "swarmnet"):
        without = continuing(spec, tmp_path, spec.run_id, longer).spec
    assert not without.model.moments
    assert "zero: no checkpoint here has those of stage 1, shard 0" in caplog.text


def test_only_who_continues_a_run_has_moments(ended: tuple[Path, RunSpec]) -> None:
    _, spec = ended
    with pytest.raises(ValueError, match="moments is filled in"):
        changed(spec, {"model": {"moments": True}})
