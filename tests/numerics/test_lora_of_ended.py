"""Adapters beside what another run of the built-in Llama ended with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet.errors import SpecError
from swarmnet.runtime.compose import run_settings
from swarmnet.runtime.exporting.base_weights import kept_base
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.runtime.joining.past import open_ended
from swarmnet.runtime.run_files import RunFiles
from swarmnet.spec import RunSpec
from swarmnet.training.data import open_data
from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
from swarmnet.training.models.model_config import read_config
from swarmnet.training.resolving import Resolved, resolve
from tests.oracles.plain_peft import PlainPeftTrainer
from tests.swarm.harness import relative_difference, tiny_spec
from tests.swarm.lora_runs import initial_adapters
from tests.swarm.recovery.test_continued_moments import (
    GRID,
    ROUNDS,
    Later,
    begun,
    changed,
    giver_of,
    trained,
)
from tests.swarm.recovery.test_continuing import continuing

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
"""Matrices that read the residual stream: they are the same in a subspace and in what it folds
to."""
ALL = {"r": 4, "lora_alpha": 8, "target_modules": ["all-linear"]}
ON_EXPERTS = LORA | {"target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "router_aux_loss_coef": 0.0,
    "router_z_loss_coef": 0.0,
}
RATE = {"learning_rate": 3e-2, "min_learning_rate_ratio": 1.0, "warmup_rounds": 0}
K = 8


def base_run(path: Path, **model: Any) -> tuple[RunSpec, dict[str, torch.Tensor]]:
    """A run of the whole model, and its last parameters; its peers keep their state in `path`."""
    spec = tiny_spec(path.parent, num_stages=2, rounds=ROUNDS, num_layers=3)
    spec = spec.with_values(spec.model_dump() | {"model": spec.model.model_dump() | model})
    run, weights = begun(spec, path, None)
    _, last = trained(run, weights=weights, state=path)
    return run, last


def adapters_of(run: RunSpec, path: Path, lora: dict[str, Any], **tables: Any) -> Resolved:
    """A run of adapters beside what a run ended with."""
    optimizer = RATE | tables.pop("optimizer", {})
    wanted = {"lora": lora, "optimizer": optimizer, **tables}
    return after(run, "adapters", path, wanted)


def after(run: RunSpec, name: str, path: Path, tables: dict[str, Any]) -> Resolved:
    """A run of this name that continues another one, of which the state is in `path`."""
    values = run.model_dump() | {"name": name, "files": {}}
    values["model"] |= {"weights": "", "moments": False, "continues": ""}
    if values["lora"] is not None:
        values["lora"]["adapter"] = ""
    spec = RunSpec.model_validate(values | {"lora": None})
    if values["lora"] is not None:
        tables = {"lora": values["lora"], **tables}
    resolved = continuing(spec, path, run.run_id, tables)
    RunFiles(path / GRID[0][0], resolved.spec.files).save(resolved.contents)
    return resolved


def keep_base(resolved: Resolved, path: Path, into: Path) -> None:
    """As a peer keeps it. `path`: of the run that it comes from."""
    spec, layout = resolved.spec, InitialLayout.of(resolved.spec)
    ended = open_ended(spec, layout, path / GRID[0][0], "")
    assert ended is not None
    hashes = resolved.contents["weights.sha256"]
    weights = ModelWeights(spec, hashes, None, ended=ended, state_dir=into / GRID[0][0])
    for stage, sizes in enumerate(layout.base_sizes):
        for j in range(len(sizes)):
            shard = weights.shard(stage, j)
            assert shard is not None
            weights.keep(stage, j, shard)


def folded_in(out: Path, spec: RunSpec, named: dict[str, torch.Tensor], **merged: Any) -> Any:
    """The exported model as `transformers` loads it."""
    write_folder(out, Trained(spec, ROUNDS, named, **merged), "fp32")
    return AutoModelForCausalLM.from_pretrained(out)


def slots_of(spec: RunSpec) -> range:
    return range(run_settings(spec).slots.of(0))


@pytest.mark.parametrize(
    ("model", "lora"),
    [({}, LORA), ({"subspace": K, "subspace_seed": 1}, LORA), (MIXTURE, ON_EXPERTS)],
    ids=["dense", "subspace", "experts"],
)
def test_losses_and_adapters_are_those_of_peft(
    tmp_path: Path, model: dict[str, Any], lora: dict[str, Any]
) -> None:
    """And a further run goes on with the adapters beside the same base."""
    state = tmp_path / "state"
    run, last = base_run(state, **model)
    theirs = folded_in(tmp_path / "whole", run, last)
    resolved = adapters_of(run, state, lora)
    spec = resolved.spec
    assert spec.model.subspace_seed == run.model.subspace_seed
    again = tmp_path / "again"
    losses, found = trained(spec, weights=giver_of(resolved, state, None), state=again)

    config = read_config(tmp_path / "whole").values
    of_peft = spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})
    data = open_data(spec)
    trainer = PlainPeftTrainer(of_peft, theirs.state_dict(), initial_adapters(spec), data)
    expected = [trainer.step(r, slots_of(spec)) for r in range(ROUNDS)]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.01, "it has learnt something"
    assert relative_difference(found, trainer.parameters()) < 1e-3

    RunFiles(again / GRID[0][0], spec.files).save(resolved.contents)
    keep_base(resolved, state, again)
    third = after(spec, "third", again, {})
    assert third.spec.model.moments
    assert third.spec.lora is not None
    assert third.spec.lora.adapter
    later = Later(open_data(third.spec), third.spec, ROUNDS)
    further, _ = trained(third.spec, weights=giver_of(third, again, None), data=later)
    expected = [trainer.step(r, slots_of(spec)) for r in range(ROUNDS, 2 * ROUNDS)]
    assert further == pytest.approx(expected, rel=1e-3)


def test_an_export_folds_adapters_that_write_into_the_subspace(tmp_path: Path) -> None:
    """Merged, and as PEFT's adapter over the exported base: both give the logits of the stages."""
    from peft import PeftModel

    state = tmp_path / "state"
    run, last = base_run(state, subspace=K, subspace_seed=1)
    resolved = adapters_of(run, state, ALL, optimizer={"rounds": 2})
    spec = resolved.spec
    assert spec.lora is not None
    assert {"o_proj", "down_proj"} <= set(spec.lora.target_modules)
    generator = torch.Generator().manual_seed(3)
    named = {
        name: 0.3 * torch.randn(values.shape, generator=generator)
        for name, values in initial_adapters(spec).items()
    }
    keep_base(resolved, state, state)
    base = kept_base(spec, [state / GRID[0][0]], None)
    assert {n: v for n, v in base.items() if not torch.equal(v, last[n])} == {}
    whole = Trained(spec, ROUNDS, named).whole(base)
    merged = folded_in(tmp_path / "merged", spec, dict(whole.named), is_merged=True).eval()
    write_folder(tmp_path / "adapter", Trained(spec, ROUNDS, named), "fp32")
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"writes of round {ROUNDS} of run `{run.run_id[:16]}`" in card
    theirs = folded_in(tmp_path / "whole", run, last)
    inputs = torch.randint(256, (2, 16), generator=generator)
    with torch.no_grad():
        plain = theirs.eval()(inputs).logits
        adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
        ours, peft = merged(inputs).logits, adapted(inputs).logits
    torch.testing.assert_close(ours, peft, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, ours, atol=1e-2), "adapters say something"


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2)
    with pytest.raises(SpecError, match=r"\[lora\] trains adapters beside .* \[model\] continues"):
        resolve(parsed(spec, {"lora": LORA}))
    custom = {"kind": "custom", "builder": "m.py:f", "continues": "a" * 16}
    values = spec.model_dump() | {"lora": LORA, "model": custom}
    with pytest.raises(ValueError, match=r"\[lora\] is for models of known layers"):
        RunSpec.model_validate(values)


def parsed(spec: RunSpec, tables: dict[str, Any]) -> RunSpec:
    try:
        return changed(spec, tables)
    except ValueError as e:
        raise SpecError(str(e)) from None
