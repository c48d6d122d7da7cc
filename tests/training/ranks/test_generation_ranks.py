"""Texts that stages on several ranks write: the numbers of one rank, by the copy that was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnet.errors import NotReady
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from swarmnet.training.stage import TorchStage
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
from tests.training.ranks.threads import rank_threads

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
            assert {"text_drop", "text_drop_copy"} <= set(group.calls)  # type: ignore[attr-defined]
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
