"""A stage in a process of its own computes what one in the peer's process computes, bit for bit;
and what befalls that process is one error here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import NotReady, ProtocolViolation, StageLost
from swarmnet.ports import LossResult
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.optimizer.local_steps import build_local_steps, build_optimizer
from swarmnet.training.stage import build_stage
from swarmnet.wire import Array
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.flights import copied_gradient, fly, gradient, parameters, stages_of
from tests.training.passes.test_generation import (
    LLAMA,
    TEXT,
    at_once,
    built,
    change,
    copy_all,
    spec_of,
    through,
    tokens_of,
)
from tests.training.processes.hosts import WholeStage, process_stage, thread_stages
from tests.training.ranks.test_lora_ranks import fill
from tests.training.ranks.test_tensor_parallel import close, tokens
from tests.training.specs import MODEL, small_spec
from tests.training.test_families import folder_of
from tests.training.test_lora import tokens as lora_tokens

SHAPE = (2, MODEL["max_position_embeddings"], MODEL["hidden_size"])


@pytest.mark.parametrize(
    ("precision", "activations", "codec"),
    [("fp32", "keep", "none"), ("fp32", "recompute", "int8"), ("bf16", "blocks", "int4")],
)
@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_rounds_have_the_bits_of_one_process(
    mode: str, precision: Any, activations: Any, codec: str
) -> None:
    pipeline = {"num_stages": 2, "codec": codec}
    spec = small_spec(pipeline=pipeline, sync={"mode": mode, "shard_parameters": 1000})
    computing = Computing(precision, activations)
    here: list[Any] = [build_stage(spec, k, computing=computing) for k in range(2)]
    with thread_stages(spec, computing) as apart:
        stages: list[Any] = list(apart)
        for round_index in range(3):
            results = []
            for both in (here, stages):
                for number in range(3):
                    key = (round_index, number)
                    results.append(fly(both, key, tokens(spec, number), tokens(spec, 10 + number)))
                for stage in both:
                    stage.retract((round_index, 1))
                    stage.forget((round_index, 2))
            assert [r.loss_sum for r in results[:3]] == [r.loss_sum for r in results[3:]]
            assert [r.num_tokens for r in results[:3]] == [r.num_tokens for r in results[3:]]
            for one, other in zip(here, stages, strict=True):
                assert gradient(one).any()
                assert torch.equal(copied_gradient(other), copied_gradient(one))
                assert torch.equal(gradient(other), gradient(one))
                generator = torch.Generator().manual_seed(round_index)
                for j in range(len(one.shard_sizes)):
                    step = torch.randn(one.shard_sizes[j], generator=generator) / 50
                    coming = from_tensor(to_tensor(one.parameter_shard(j)) + step)
                    for stage in (one, other):
                        stage.stage_parameters(j, coming)
                for stage in (one, other):
                    stage.finish_round()
                assert torch.equal(parameters(other), parameters(one))
                assert [other.digest(j) for j in range(len(one.shard_sizes))] == [
                    one.digest(j) for j in range(len(one.shard_sizes))
                ]
                assert not gradient(other).any()


def test_what_is_measured_and_done_again_has_these_bits_too() -> None:
    spec = small_spec(pipeline={"num_stages": 2, "codec": "int8"})
    one, last = stages_of(spec)
    x, targets = tokens(spec, 1), tokens(spec, 2)
    with thread_stages(spec) as (first, second):
        expected, outputs = one.evaluate(x, targets), first.evaluate(x, targets)
        assert isinstance(outputs, Array)
        assert isinstance(expected, Array)
        assert bytes(outputs.data) == bytes(expected.data)
        loss, wanted = second.evaluate(outputs, targets), last.evaluate(expected, targets)
        assert isinstance(loss, LossResult)
        assert loss == wanted
        logits, those = second.evaluate(outputs, None), last.evaluate(expected, None)
        assert isinstance(logits, Array)
        assert isinstance(those, Array)
        assert torch.equal(to_tensor(logits), to_tensor(those))
        activation = one.forward((0, 5), x)
        grad = last.forward_backward((0, 5), activation, targets).grad_inputs
        for mine, theirs, inputs, back in (
            (first, one, x, grad),
            (second, last, activation, None),
        ):
            again = mine.recompute_pass((0, 5), inputs, targets, back)()
            real = theirs.recompute_pass((0, 5), inputs, targets, back)()
            assert mine.difference(again, real) == 0.0
            assert (again.outputs is None) == (real.outputs is None) == (mine is second)
            assert not gradient(mine).any()


def test_texts_are_those_of_one_process(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA)
    tokens_here = tokens_of(spec)
    ends = (8, 12, 13)
    one = built(spec)
    expected = torch.cat([at_once(one, tokens_here[:, :end]) for end in ends])
    with thread_stages(spec) as stages:
        many: list[Any] = list(stages)
        for is_copied in (False, True):
            if is_copied:
                copy_all(many)
                change(many)
            begin, found = 0, []
            for end in ends:
                part = tokens_here[:, begin:end]
                found.append(through(many, part, begin, is_copied=is_copied))
                begin = end
            torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)
        for stage in many:
            stage.generation.drop(TEXT)
            stage.generation.drop_copy()
        for is_copied, position in ((False, ends[-1]), (True, 0)):
            with pytest.raises(NotReady):
                through(many, tokens_here[:, :1], position, is_copied=is_copied)


def test_a_base_comes_to_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder_of(folder, "qwen2")
    spec, _ = lora_run(folder, tmp_path, lora=LORA)
    here: list[Any] = stages_of(spec)
    with thread_stages(spec) as apart:
        stages: list[Any] = list(apart)
        for both in (here, stages):
            for stage in both:
                fill(stage, spec, folder)
        with pytest.raises(ProtocolViolation):
            stages[0].base.put(0, from_tensor(torch.zeros(3)))
        x, targets = lora_tokens(1), lora_tokens(2)
        results = [fly(both, (0, 1), x, targets) for both in (here, stages)]
        assert results[0].loss_sum == results[1].loss_sum
        for one, other in zip(here, stages, strict=True):
            assert gradient(one).any()
            assert torch.equal(gradient(other), gradient(one))


@pytest.mark.parametrize(
    ("mode", "kind"), [("zero", "adamw"), ("zero", "muon"), ("local", "adamw"), ("gossip", "muon")]
)
def test_updates_are_made_of_it_as_of_any_stage(mode: str, kind: str) -> None:
    spec = small_spec(optimizer={"kind": kind}, sync={"mode": mode, "shard_parameters": 1000})
    here: list[Any] = stages_of(spec)
    with thread_stages(spec) as apart:
        stages: list[Any] = list(apart)
        for both in (here, stages):
            fly(both, (0, 1), tokens(spec, 1), tokens(spec, 2))
            for stage in both:
                optimizer = build_optimizer(spec, stage)
                local = build_local_steps(spec, stage, optimizer)
                assert (local is None) == (mode == "zero")
                if local is not None:
                    local.step(2 * SHAPE[1], 0)
                else:
                    for j in range(len(stage.shard_sizes)):
                        optimizer.create(j)
                        _, after = optimizer.step(
                            j, stage.parameter_shard(j), stage.gradient_shard(j), 0.01, 0
                        )
                        stage.stage_parameters(j, after)
                stage.finish_round()
        for one, other in zip(here, stages, strict=True):
            assert torch.equal(parameters(other), parameters(one))


def test_errors_are_of_the_same_kind_and_the_process_goes_on() -> None:
    spec = small_spec(pipeline={"num_stages": 2, "codec": "none"})
    grad = from_tensor(torch.ones(SHAPE))
    with thread_stages(spec) as (stage, _):
        with pytest.raises(ProtocolViolation):
            stage.forward((0, 1), from_tensor(torch.full((2, 16), 10_000, dtype=torch.int32)))
        with pytest.raises(NotReady):
            stage.backward((0, 1), grad)
        stage.forward((0, 2), tokens(spec, 1))
        with pytest.raises(ProtocolViolation):
            stage.backward((0, 2), from_tensor(torch.full(SHAPE, float("nan"))))
        stage.backward((0, 2), grad)
        with pytest.raises(ValueError, match="in the buffer already"):
            stage.backward((0, 2), grad)
        stage.forget((0, 2))
        with pytest.raises(NotReady):
            stage.backward((0, 2), grad)
        assert stage.free_bytes == 7.0
        assert stage.process.failure is None


def test_an_error_that_spoils_the_process_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, or of what nobody has thought of."""
    spec = small_spec(pipeline={"num_stages": 2})
    with thread_stages(spec) as (stage, other):
        monkeypatch.setattr(
            "swarmnet.training.stage.TorchStage.forward", lambda *_: [][1], raising=True
        )
        with pytest.raises(StageLost, match="stage 0 is lost here: its process: IndexError"):
            stage.forward((0, 1), tokens(spec, 1))
        with pytest.raises(StageLost, match="IndexError"):
            stage.retract((0, 1))
        assert other.process.failure is None
        stage.forget((0, 1))  # from any thread, and never an error


def compare(stage: WholeStage, one: Any, spec: Any) -> None:
    """Two microbatches of the first stage, and a round's end."""
    x, grad = tokens(spec, 1), from_tensor(torch.randn(SHAPE))
    for number in range(2):
        out, expected = stage.forward((0, number), x), one.forward((0, number), x)
        close(to_tensor(out), to_tensor(expected))
        assert stage.backward((0, number), grad) is None
        one.backward((0, number), grad)
    own: Any = stage
    close(gradient(own), gradient(one))
    stage.finish_round()
    assert not gradient(own).any()


@pytest.mark.long
@pytest.mark.parametrize("given", [{"tp": 2, "local": "fsdp"}, {"cp": 2}], ids=["fsdp", "cp"])
def test_ranks_of_any_kind_compute_it(given: dict[str, Any], tmp_path: Path) -> None:
    spec = small_spec(pipeline={"num_stages": 2, "codec": "none"})
    with process_stage(spec, 0, ["cpu", "cpu"], tmp_path, **given) as stage:
        compare(stage, stages_of(spec)[0], spec)


async def until_lost(stage: WholeStage) -> str:
    try:
        await asyncio.wait_for(stage.process.watch(), 60.0)
    except StageLost as error:
        return str(error)
    return ""


def test_a_process_of_ranks_computes_the_same_and_is_lost_with_one(tmp_path: Path) -> None:
    spec = small_spec(pipeline={"num_stages": 2, "codec": "none"})
    with process_stage(spec, 0, ["cpu", "cpu"], tmp_path, tp=2) as stage:
        assert "stage 0: fp32 on cpu (2 ranks" in stage.line
        compare(stage, stages_of(spec)[0], spec)
        (host,) = stage.process.pids
        children = Path(f"/proc/{host}/task").glob("*/children")
        (rank,) = [int(pid) for path in children for pid in path.read_text().split()]
        os.kill(rank, 9)  # while it has nothing to do
        told = asyncio.run(until_lost(stage))
        assert told == (
            f"stage 0 is lost here: its process: rank 1 (pid {rank}) ended with SIGKILL"
        )
        with pytest.raises(StageLost):
            stage.forward((1, 1), tokens(spec, 1))
        stage.process.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in (host, rank))
        with pytest.raises(StageLost):
            stage.forward((1, 2), tokens(spec, 1))
