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
LLAMA, FAMILY, SHARDED, SEQUENCES = range(4)
"""Columns."""
NONE = "-"
"""In a cell: there is no such model."""
ADVICE = re.compile(r"\b(take|leave|add|use|choose|goes? with)\b")
Cell = tuple[RunSpec, dict[str, Any]]


def table() -> dict[str, list[str]]:
    """By the first cell of a row, the others."""
    text = PAGE.read_text().partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def plain(column: int, **changes: Any) -> RunSpec:
    """A run of the column's kind of model."""
    if column == FAMILY:
        return spec_of("qwen2", 1, document_mask=False, **changes)
    return small_spec(**changes)


def adapters(tmp_path: Path, **lora: Any) -> Callable[[int], Cell]:
    def cell(column: int) -> Cell:
        if column in (LLAMA, SEQUENCES):  # beside what another run ended with
            values = LoraSpec.model_validate({**LORA, **lora})
            return small_spec().model_copy(update={"lora": values}), {}
        folder = tmp_path / "model"
        folder_of(folder, "qwen2")
        return lora_run(folder, tmp_path, lora={**LORA, **lora})[0], {}

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
        return small_spec(data={"document_mask": True}), {}

    def routed(column: int) -> Cell:
        if column != FAMILY:
            return small_spec(model={"num_experts": 4}), {}
        spec = spec_of("mixtral", 1, document_mask=False)
        model = spec.model.model_copy(update={"router_aux_loss_coef": 0.01})
        return spec.model_copy(update={"model": model}), {}

    return {
        "`[lora]`": adapters(tmp_path),
        "`[lora] lora_dropout`": adapters(tmp_path, lora_dropout=0.1),
        '`[lora] base_dtype = "bfloat16"`': adapters(tmp_path, base_dtype="bfloat16"),
        '`[lora] base_dtype = "int8"`, `"nf4"`': adapters(tmp_path, base_dtype="int8"),
        "one matrix as embedding and output matrix": lambda _: (spec_of("qwen2", 1, True), {}),
        "`[data] document_mask`": masked,
        "`[model] subspace`": lambda _: (small_spec(model={"subspace": 8}), {}),
        "a model that draws random numbers": lambda _: (
            spec_of("qwen2", 1, document_mask=False, attention_dropout=0.1),
            {},
        ),
        "a model of your own": custom,
        "routers that have a loss of their own": routed,
        "a model of transformers": lambda _: (plain(FAMILY), {}),
        "`--cp N`": with_option(cp=2),
        "`--precision bf16`": with_option(precision="bf16"),
        "`--precision fp16`": with_option(precision="fp16"),
        "`--activations`": with_option(activations="offload"),
        "`--sequence-parallel`": with_option(sequence_parallel=True),
        "`--compile`": with_option(compile=True),
        "`--weights-memory host`, `disk`": with_option(weights_memory="disk"),
        "`--optimizer-memory device`": with_option(optimizer_memory="device"),
        "`--stages` above 1": with_option(stages="2"),
    }


def test_each_cell_is_taken_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.training.models.lora.check_packing", lambda _: None)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    rows, made = table(), cells(tmp_path)
    assert rows.keys() == made.keys()
    for name, row in rows.items():
        for column, word in enumerate(row):
            if word == NONE:
                continue
            spec, given = made[name](column)
            local = {"local": "fsdp"} if column == SHARDED else {}
            ranks = {"cp": 2} if column == SEQUENCES else {"tp": 2} | local
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
    except UserError as error:
        return str(error)
    return None
