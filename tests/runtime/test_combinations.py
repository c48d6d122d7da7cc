"""What ranks of a peer go with: each cell of the table in the documentation is taken, or refused in
one line that says what to take."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.commands.peer import check as check_choices
from swarmnet.errors import UserError
from swarmnet.runtime.apart.seat import open_seats
from swarmnet.runtime.computing import check_options
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import choose_devices
from swarmnet.spec import LoraSpec, RunSpec, load_spec
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.ranks.test_family_ranks import spec_of
from tests.training.specs import small_spec
from tests.training.test_families import folder_of

ROOT = Path(__file__).parents[2]
PAGE, HEADING = ROOT / "docs" / "parallelism.md", "## What combines with what"
LLAMA, FAMILY, SHARDED, SEQUENCES, EXPERTS = range(5)
"""Columns."""
NONE = "-"
"""In a cell: there is no such model."""
ADVICE = re.compile(r"\b(take|leave|add|use|choose|goes? with)\b")
Cell = tuple[RunSpec, dict[str, Any]]


def table() -> dict[str, list[str]]:
    """By each name in the first cell of a row, the others."""
    text = PAGE.read_text().partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {
        name: [cell.strip() for cell in row[1:]]
        for row in rows[2:]
        for name in row[0].strip().split(", ")
    }


def plain(column: int, **changes: Any) -> RunSpec:
    """A run of the column's kind of model."""
    if column == FAMILY:
        return spec_of("qwen2", 1, document_mask=False, **changes)
    if column == EXPERTS:
        changes["model"] = {"num_experts": 4} | changes.get("model", {})
    return small_spec(**changes)


def mixture(tied: bool = False, **more: Any) -> RunSpec:
    return spec_of("mixtral", 1, tied, document_mask=False, num_local_experts=4, **more)


def adapters(tmp_path: Path, **lora: Any) -> Callable[[int], Cell]:
    def cell(column: int) -> Cell:
        if column in (LLAMA, SEQUENCES):  # beside what another run ended with
            values = LoraSpec.model_validate({**LORA, **lora})
            return small_spec().model_copy(update={"lora": values}), {}
        folder = tmp_path / f"model-{column == EXPERTS}"
        if column == EXPERTS:
            folder_of(folder, "mixtral", num_local_experts=4)
            modules = {"target_modules": "all-linear"}
            return lora_run(folder, tmp_path, lora={**LORA, **modules, **lora})[0], {}
        folder_of(folder, "qwen2")
        return lora_run(folder, tmp_path, lora={**LORA, **lora})[0], {}

    return cell


def on_experts(tmp_path: Path) -> Callable[[int], Cell]:
    lora = {**LORA, "target_modules": ["experts.gate_up_proj", "experts.down_proj"]}

    def cell(column: int) -> Cell:
        if column == LLAMA:
            values = LoraSpec.model_validate(lora)
            return small_spec(model={"num_experts": 4}).model_copy(update={"lora": values}), {}
        folder = tmp_path / "mixture"
        folder_of(folder, "mixtral", num_local_experts=4)
        return lora_run(folder, tmp_path, lora=lora)[0], {}

    return cell


def custom(_: int) -> Cell:
    return load_spec(ROOT / "examples" / "custom_model.toml"), {}


def cells(tmp_path: Path) -> dict[str, Callable[[int], Cell]]:
    """By row, from a column to the run and the options."""

    def with_option(**options: Any) -> Callable[[int], Cell]:
        return lambda column: (plain(column), options)

    def masked(column: int) -> Cell:
        if column == FAMILY:
            return spec_of("qwen2", 1), {}
        return plain(column, data={"document_mask": True}), {}

    def routed(column: int) -> Cell:
        if column != FAMILY:
            return small_spec(model={"num_experts": 4}), {}
        spec = mixture()
        model = spec.model.model_copy(update={"router_aux_loss_coef": 0.01})
        return spec.model_copy(update={"model": model}), {}

    return {
        "`[lora]`": adapters(tmp_path),
        "`[lora]` on experts": on_experts(tmp_path),
        "`[lora] lora_dropout`": adapters(tmp_path, lora_dropout=0.1),
        '`[lora] base_dtype = "bfloat16"`': adapters(tmp_path, base_dtype="bfloat16"),
        '`[lora] base_dtype = "int8"` or `"nf4"`': adapters(tmp_path, base_dtype="int8"),
        "one matrix as embedding and output matrix": lambda column: (
            mixture(tied=True) if column == EXPERTS else spec_of("qwen2", 1, True),
            {},
        ),
        "`[data] document_mask`": masked,
        "`[model] subspace`": lambda _: (small_spec(model={"subspace": 8}), {}),
        "a model of transformers with dropout": lambda column: (
            mixture(attention_dropout=0.1)
            if column == EXPERTS
            else spec_of("qwen2", 1, document_mask=False, attention_dropout=0.1),
            {},
        ),
        "a model of your own": custom,
        "routers that have a loss of their own": routed,
        "a model of transformers": lambda column: (
            mixture() if column == EXPERTS else plain(FAMILY),
            {},
        ),
        "`--cp N`": with_option(cp=2),
        "`--ep N`": lambda column: (
            mixture() if column == FAMILY else small_spec(model={"num_experts": 4}),
            {"ep": 2},
        ),
        "`--precision bf16`": with_option(precision="bf16"),
        "`--precision fp16`": with_option(precision="fp16"),
        "`--activations`": with_option(activations="offload"),
        "`--sequence-parallel`": with_option(sequence_parallel=True),
        "`--compile`": with_option(compile=True),
        "`--weights-memory host` or `disk`": with_option(weights_memory="disk"),
        "`--optimizer-memory device`": with_option(optimizer_memory="device"),
        "`--stages` above 1": with_option(stages="2"),
    }


def test_each_cell_is_taken_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.training.models.lora.check_packing", lambda _: None)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    rows, made = table(), cells(tmp_path)
    assert rows.keys() == made.keys()
    for name, row in rows.items():
        for column, word in enumerate(row):
            if word == NONE:
                continue
            spec, given = made[name](column)
            local = {"local": "fsdp"} if column == SHARDED else {}
            own = {SEQUENCES: {"cp": 2}, EXPERTS: {"ep": 2}}
            ranks: dict[str, Any] = own.get(column, {"tp": 2} | local)
            options = PeerOptions(tmp_path, spec=tmp_path, **ranks, **given)
            refusal = refused(spec, options)
            assert (refusal is None) == (word == "yes"), (name, column, refusal)
            if refusal is not None:
                assert word == "no"
                assert "\n" not in refusal
                assert ADVICE.search(refusal), refusal


def refused(spec: RunSpec, options: PeerOptions) -> str | None:
    """Why a peer would not start so, before any rank does."""
    try:
        check_choices(options)  # type: ignore[arg-type]  of these it looks at fewer
        check_options(spec, options, choose_devices(spec, options))
        open_seats(spec, options)
    except UserError as error:
        return str(error)
    return None
