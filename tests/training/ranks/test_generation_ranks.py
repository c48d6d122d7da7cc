"""Texts that stages on several ranks write: the numbers of one rank, by the copy that was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import NotReady, RemoteError
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.ranks import context_parallel_layers
from swarmnet.training.ranks.context_parallel_stage import build_context_parallel_stage
from swarmnet.training.ranks.expert_stage import build_expert_stage
from swarmnet.training.ranks.tensor_parallel import Region
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from swarmnet.training.ranks.texts.shared_text import SharedText
from swarmnet.training.stage import TorchStage, build_stage
from tests.training.passes.test_generation import (
    LLAMA,
    NARROW,
    TEXT,
    at_once,
    built,
    change,
    copy_all,
    spec_of,
    through,
    tokens_of,
)
from tests.training.ranks.test_family_ranks import spec_of as family_of
from tests.training.ranks.test_family_sequences import CAPPED, MLA
from tests.training.ranks.test_tensor_parallel import ranks
from tests.training.ranks.threads import rank_threads
from tests.training.specs import small_spec
from tests.training.test_adapter import FAMILIES

ENDS = (8, 12, 13, 14)
"""The first is split by positions in training, where that is done."""


@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [(LLAMA, True), (NARROW, False), ("gemma3", False), ("qwen3 moe", False)],
)
def test_ranks_write_what_one_writes(family: str, sequence_parallel: bool, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, family)
    one, tokens = built(spec), tokens_of(spec)
    expected = torch.cat([at_once(one, tokens[:, :end]) for end in ENDS])
    with (
        rank_threads(spec, 2, sequence_parallel=sequence_parallel) as first,
        rank_threads(spec, 2, sequence_parallel=sequence_parallel) as last,
    ):
        many: list[TorchStage] = [
            build_parallel_stage(spec, k, group, Computing())
            for k, group in enumerate((first, last))
        ]
        for is_copied in (False, True):
            if is_copied:
                copy_all(many)
                change(many)  # a text goes on with what it began with
            begin, found = 0, []
            for end in ENDS:
                found.append(through(many, tokens[:, begin:end], begin, is_copied=is_copied))
                begin = end
            torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)
        for stage, group in zip(many, (first, last), strict=True):
            assert stage.generation is not None
            stage.generation.drop(TEXT)
            stage.generation.drop_copy()
            group.join()
            calls = group.calls  # type: ignore[attr-defined]
            assert {"text_take", "text_drop", "text_drop_copy"} <= set(calls)
            assert "text_copy" not in calls  # the copy lies in memory that all map
        for is_copied, position in ((False, ENDS[-1]), (True, 0)):
            with pytest.raises(NotReady):
                through(many, tokens[:, :1], position, is_copied=is_copied)
        first.join()
        # What was written has not changed how they train.
        x = from_tensor(tokens_of(spec, spec.sequence_length).repeat(2, 1))
        change(one)
        results = []
        for stages in (one, many):
            outputs = stages[0].forward((1, 1), x)
            result = stages[1].forward_backward((1, 1), outputs, x)
            grad = result.grad_inputs
            assert grad is not None
            stages[0].backward((1, 1), grad)
            results.append(result.loss_sum)
        assert results[1] == pytest.approx(results[0], rel=1e-5)


PASSES = (7, 12, 13, 14, 16)
"""Ends of passes: many tokens are cut over ranks, before any and after some; few are not."""
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "gemma3, windows": ("gemma3_text", FAMILIES["gemma3"][1] | {"sliding_window": 6}),
    "gemma2, caps and windows": ("gemma2", CAPPED | {"sliding_window": 6}),
    "values narrower than keys": (
        "deepseek_v3",
        {**MLA, "v_head_dim": 16, "first_k_dense_replace": 4, "num_key_value_heads": 4},
    ),
}


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        (LLAMA, 2),
        (NARROW, 3),
        ("qwen3", 2),
        ("mixtral", 2),
        *((family, 2) for family in WINDOWED),
        pytest.param(LLAMA, 4, marks=pytest.mark.long),
        pytest.param("gemma3", 3, marks=pytest.mark.long),
        pytest.param("llama 3", 4, marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_a_text_write_what_one_writes(
    family: str, num_ranks: int, tmp_path: Path
) -> None:
    """Keys and values stay at the ranks that made them."""
    if family in WINDOWED:
        kind, more = WINDOWED[family]
        spec = family_of(kind, 2, document_mask=False, num_hidden_layers=2, **more)
    else:
        spec = spec_of(tmp_path, family)
    one, tokens = built(spec), tokens_of(spec)
    expected = torch.cat([at_once(one, tokens[:, :end]) for end in PASSES])
    with (
        rank_threads(spec, num_ranks, mode="context") as first,
        rank_threads(spec, 2, mode="context") as last,
    ):
        many: list[TorchStage] = [
            build_context_parallel_stage(spec, k, group, Computing())
            for k, group in enumerate((first, last))
        ]
        for is_copied in (False, True):
            if is_copied:
                copy_all(many)
                change(many)  # a text goes on with what it began with
            begin, found = 0, []
            for end in PASSES:
                found.append(through(many, tokens[:, begin:end], begin, is_copied=is_copied))
                begin = end
            torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
        for group in (first, last):
            group.join()
            assert "text_extend" in group.calls  # type: ignore[attr-defined]


def test_a_rank_keeps_its_part_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is what all ranks keep together, and each has as much. Of a layer with a
    window, what the next token sees."""
    texts: list[SharedText] = []

    class Known(SharedText):
        def __init__(self, region: Region) -> None:
            super().__init__(region)
            texts.append(self)

    monkeypatch.setattr(context_parallel_layers, "SharedText", Known)
    window = 6
    spec = family_of("mistral", 1, document_mask=False, num_hidden_layers=2, sliding_window=window)
    for num_ranks, is_long in ((2, False), (3, True)):
        with rank_threads(spec, num_ranks, mode="context") as group:
            stage = build_context_parallel_stage(spec, 0, group, Computing())
            assert stage.generation is not None
            ends = (10, 16, 17, 18) if is_long else (window,)
            texts.clear()  # of the trial
            begin, tokens = 0, tokens_of(spec, 18)
            for end in ends:
                through([stage], tokens[:, begin:end], begin, is_copied=False)
                begin = end
            group.join()
            assert len(texts) == num_ranks
            numbers = sorted(len(text.positions) for text in texts)
            assert sum(numbers) == ends[-1]
            assert numbers[-1] - numbers[0] <= 2
            kept = sum(text.num_bytes for text in texts)
            seen = window - 1 if is_long else window
            assert kept == seen * stage.generation.token_bytes


@pytest.mark.parametrize("mode", ["context", "experts"])
def test_ranks_agree_that_a_text_s_numbers_are_not_finite(mode: str) -> None:
    """Though one of them alone has the token that makes them so, or all of the text."""
    model = {"num_hidden_layers": 1, "num_experts": 0 if mode == "context" else 2}
    spec = small_spec(model=model, pipeline={"num_stages": 1})
    build = build_context_parallel_stage if mode == "context" else build_expert_stage
    with rank_threads(spec, 2, mode=mode) as group:
        stage = build(spec, 0, group, Computing())
        embedding = stage.layers.parameter_ranges[0].part_of(stage.layers.shared.values)
        embedding[3] = torch.inf
        tokens = torch.ones(1, 8, dtype=torch.int32)
        through([stage], tokens, 0, is_copied=False)
        tokens[0, -1] = 3
        with pytest.raises(RemoteError, match="not finite"):
            through([stage], tokens, 0, is_copied=False)
        group.join()


def test_processes_share_a_text() -> None:
    """The rest of this page has threads."""
    spec = small_spec(model={"num_key_value_heads": 1}, pipeline={"num_stages": 1})
    one, tokens = [build_stage(spec, 0)], tokens_of(spec)
    expected = torch.cat([at_once(one, tokens[:, :end]) for end in PASSES])
    with ranks(spec, 2, mode="context") as group:
        many: list[TorchStage] = [build_context_parallel_stage(spec, 0, group)]
        copy_all(many)
        begin, found = 0, []
        for end in PASSES:
            found.append(through(many, tokens[:, begin:end], begin))
            begin = end
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
