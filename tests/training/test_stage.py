"""Stages in a row are the whole model; buffers, receipts and refusals are as the port says."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from swarmnet.errors import NotReady, ProtocolViolation, SpecError
from swarmnet.ports import LossResult
from swarmnet.training.arrays import from_numpy, from_tensor, to_tensor
from swarmnet.training.computing import ActivationsName, Computing
from swarmnet.training.data import open_data
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    TensorSpec,
    build_layer,
    describe_parameters,
)
from swarmnet.training.models.registry import stage_parameter_ranges, stage_shard_sizes
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.oracles.reference import ReferenceTrainer
from tests.training.flights import batch, batch_of_slot, fly, gradient, named, parameters, stages_of
from tests.training.passes.models import WIDTH, linear_layers, linear_plan
from tests.training.specs import small_spec, write_text


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_text(tmp_path)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_in_a_row_are_the_whole_model(text: str, num_stages: int) -> None:
    spec = small_spec(text, pipeline={"num_stages": num_stages})
    data = open_data(spec)
    reference = ReferenceTrainer(spec, data)
    stages = stages_of(spec)
    state = {k: v for stage in stages for k, v in stage.state_dict().items()}
    assert set(state) == set(reference.state_dict())
    for name, values in reference.state_dict().items():
        assert torch.equal(state[name], values), name
    results = [fly(stages, (0, i), *batch_of_slot(spec, data, 0, i)) for i in range(3)]
    loss_sum, num_tokens = reference.accumulate(0, [0, 1, 2])
    assert sum(r.num_tokens for r in results) == num_tokens == 3 * 2 * 16
    assert math.isclose(sum(r.loss_sum for r in results), loss_sum, rel_tol=1e-6)
    theirs = reference.gradients()
    for stage in stages:
        for name, values in named(stage, gradient(stage)).items():
            torch.testing.assert_close(values, theirs[name], rtol=1e-4, atol=1e-5)


def test_recompute_is_bitwise_keep_and_keeps_no_graph(text: str) -> None:
    keep = small_spec(text, pipeline={"num_stages": 3})
    recompute = small_spec(text, pipeline={"num_stages": 3, "activations": "recompute"})
    data = open_data(keep)
    pair = [stages_of(keep), stages_of(recompute)]
    for i in range(3):
        a, b = (fly(stages, (0, i), *batch(data, i)) for stages in pair)
        assert a.loss_sum == b.loss_sum
    for ours, theirs in zip(*pair, strict=True):
        assert torch.equal(gradient(ours), gradient(theirs))
    pair[1][0].forward((0, 9), batch(data, 9)[0])
    kept = pair[1][0].kept.get((0, 9))
    assert kept is not None
    assert kept.outputs is None


def test_microbatches_may_come_back_in_any_order(text: str) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    first, last = stages_of(spec)
    one_by_one = stages_of(spec)
    batches = {i: batch(data, i) for i in range(3)}
    activations = {i: first.forward((0, i), batches[i][0]) for i in range(3)}
    for i in (2, 0, 1):
        grad = last.forward_backward((0, i), activations[i], batches[i][1]).grad_inputs
        assert grad is not None
        first.backward((0, i), grad)
        fly(one_by_one, (0, i), *batches[i])
    assert torch.equal(gradient(first), gradient(one_by_one[0]))


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_retract_takes_exactly_one_microbatch_out(text: str, activations: str, codec: str) -> None:
    pipeline = {"num_stages": 3, "activations": activations, "codec": codec}
    spec = small_spec(text, pipeline=pipeline)
    data = open_data(spec)
    stages, without = stages_of(spec), stages_of(spec)
    for i in range(3):
        fly(stages, (0, i), *batch(data, i))
        if i != 1:
            fly(without, (0, i), *batch(data, i))
    for stage, expected in zip(stages, without, strict=True):
        assert not torch.allclose(gradient(stage), gradient(expected), atol=1e-3)
        stage.retract((0, 1))
        stage.retract((0, 1))  # and only once
        stage.retract((0, 77))  # unknown
        torch.testing.assert_close(gradient(stage), gradient(expected), rtol=0, atol=5e-6)
        assert len(stage.kept) == 2


@pytest.mark.parametrize("codec", ["bf16", "int8", "int6", "int4"])
def test_a_microbatch_has_the_same_codes_at_every_replica(text: str, codec: str) -> None:
    spec = small_spec(text, pipeline={"num_stages": 2, "codec": codec})
    inputs, targets = batch(open_data(spec), 0)
    sent = []
    for first, last in (stages_of(spec), stages_of(spec)):
        activation = first.forward((0, 1), inputs)
        result = last.forward_backward((0, 1), activation, targets)
        assert result.grad_inputs is not None
        first.check_gradient(result.grad_inputs)
        sent.append([bytes(a.data) for a in (activation, result.grad_inputs)])
    assert sent[0] == sent[1]


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int6", "int4"])
def test_a_forward_pass_without_a_gradient_is_coded_as_one_with(text: str, codec: str) -> None:
    spec = small_spec(text, pipeline={"num_stages": 2, "codec": codec})
    inputs, targets = batch(open_data(spec), 0)
    first, last = stages_of(spec)
    activation = first.forward((0, 1), inputs)
    evaluated = first.evaluate(inputs, None)
    assert isinstance(evaluated, Array)
    assert bytes(evaluated.data) == bytes(activation.data)
    loss = last.evaluate(evaluated, targets)
    assert loss.loss_sum == last.forward_backward((0, 1), activation, targets).loss_sum


def fails_half_way(stage: TorchStage) -> Any:
    """The next backward pass reaches some layers and not the first; returns the hook's handle."""

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")

    return stage.layers.parameters()[0].register_hook(fail)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_backward_pass_that_fails_half_way_leaves_no_part_of_itself(
    text: str, precision: Any
) -> None:
    """But in fp16, passes add into the sum itself, which does not count then."""
    spec = small_spec(text)
    data = open_data(spec)
    stages, without = (
        [build_stage(spec, k, computing=Computing(precision)) for k in range(2)] for _ in range(2)
    )
    for i in range(2):
        fly(stages, (0, i), *batch(data, i))
        fly(without, (0, i), *batch(data, i))
    hook = fails_half_way(stages[0])
    with pytest.raises(torch.OutOfMemoryError):
        fly(stages, (0, 2), *batch(data, 2))
    hook.remove()
    stages[0].forget((0, 2))
    if precision != "fp16":
        assert not any(
            math.isfinite(to_tensor(stages[0].gradient_shard(j)).sum())
            for j in range(len(stages[0].shard_sizes))
        ), "no primary takes any of it"
        stages[0].finish_round()
        assert not gradient(stages[0]).any(), "it is forgotten with its round"
    else:
        assert torch.equal(gradient(stages[0]), gradient(without[0]))


def test_retract_of_work_without_backward_adds_nothing(text: str) -> None:
    spec = small_spec(text)
    first = build_stage(spec, 0)
    first.forward((0, 0), batch(open_data(spec), 0)[0])
    first.retract((0, 0))
    assert not gradient(first).any()


def test_forgotten_work_is_gone(text: str) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    first, last = stages_of(spec)
    activation = first.forward((0, 0), batch(data, 0)[0])
    first.forget((0, 0))
    first.forget((0, 0))
    assert len(first.kept) == 0
    with pytest.raises(NotReady):
        first.backward((0, 0), activation)
    fly([first, last], (0, 1), *batch(data, 1))
    before = gradient(first)
    first.forget((0, 1))
    first.retract((0, 1))
    assert torch.equal(gradient(first), before)


def test_the_same_microbatch_is_never_added_twice(text: str) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    stages = stages_of(spec)
    fly(stages, (0, 0), *batch(data, 0))
    with pytest.raises(ValueError, match="already"):
        stages[0].forward((0, 0), batch(data, 0)[0])


def test_finish_round_takes_what_was_put_aside_and_nothing_else(text: str) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    stages = stages_of(spec)
    stage = stages[0]
    fly(stages, (0, 0), *batch(data, 0))
    before = parameters(stage)
    size = stage.shard_sizes[1]
    stage.stage_parameters(1, from_tensor(torch.full((size,), 0.25)))
    assert torch.equal(parameters(stage), before)
    stage.finish_round()
    after = parameters(stage)
    start = stage.shard_sizes[0]
    assert (after[start : start + size] == 0.25).all()
    assert torch.equal(after[:start], before[:start])
    assert torch.equal(after[start + size :], before[start + size :])
    assert not gradient(stage).any()
    assert len(stage.kept) == 0
    stage.finish_round()
    assert torch.equal(parameters(stage), after)


def test_the_layers_compute_with_the_flat_buffers(text: str) -> None:
    """After rounds, updates and passes, parameters and gradients are still views."""
    spec = small_spec(text)
    data = open_data(spec)
    stages = stages_of(spec)
    for r in range(2):
        fly(stages, (r, 0), *batch(data, 0))
        for stage in stages:
            for flat, pick in ((parameters, lambda p: p), (gradient, lambda p: p.grad)):
                values = named(stage, flat(stage))
                vectors = stage.vectors.present
                for name, p in zip(values, stage.layers.parameters(), strict=True):
                    assert torch.equal(values[name], pick(p)), name
                    low = vectors.gradients if pick(p) is p.grad else vectors.parameters
                    offset = pick(p).data_ptr() - low.data_ptr()
                    assert 0 <= offset < low.numel() * 4
            for j, size in enumerate(stage.shard_sizes):
                stage.stage_parameters(j, from_tensor(torch.randn(size) * 0.02))
            stage.finish_round()


def copying_stage(*arguments: Any, **options: Any) -> TorchStage:
    """A stage whose coming parameters wait in memory of their own, and are copied."""
    return TorchStage(*arguments, **(options | {"reuses_gradient": False}))


def places(stage: TorchStage) -> tuple[int, int]:
    """The addresses of parameters and gradients."""
    vectors = stage.vectors.present
    return vectors.parameters.data_ptr(), vectors.gradients.data_ptr()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_parameters_that_lie_in_the_gradient_are_as_those_that_are_copied(
    text: str, precision: str, activations: ActivationsName
) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    computing = Computing(precision=precision, activations=activations)
    swaps, copies = (
        [build_stage(spec, i, computing=computing, make=make) for i in range(2)]
        for make in (TorchStage, copying_stage)
    )
    for r, last_shard in enumerate([None, 1, None, None]):
        results = [fly(stages, (r, 0), *batch(data, r)) for stages in (swaps, copies)]
        assert results[0] == results[1]
        rng = torch.Generator().manual_seed(r)
        for one, other in zip(swaps, copies, strict=True):
            assert torch.equal(gradient(one), gradient(other))
            before = places(one)
            for j, size in list(enumerate(one.shard_sizes))[:last_shard]:
                values = from_tensor(0.02 * torch.randn(size, generator=rng))
                one.stage_parameters(j, values)
                other.stage_parameters(j, values)
            one.finish_round()
            other.finish_round()
            assert places(one) == (before[::-1] if last_shard is None else before)
            assert torch.equal(parameters(one), parameters(other))
            assert not gradient(one).any()
            assert one.digest(0) == other.digest(0)


def test_shards_are_views_and_digests_are_of_their_bytes(text: str) -> None:
    stage = build_stage(small_spec(text), 0)
    assert stage.parameter_shard(0).data.obj.base is not None
    assert sum(stage.shard_sizes) == stage.num_parameters
    assert set(stage.shard_sizes[:-1]) == {1000}
    values = np.frombuffer(stage.parameter_shard(2).data, dtype="<f4")
    expected = xxhash.xxh3_64_intdigest(values.tobytes()).to_bytes(8, "big")
    assert stage.digest(2) == expected
    assert build_stage(small_spec(text), 0).digest(2) == expected
    assert stage.digest(1) != expected


@pytest.mark.parametrize("num_stages", [1, 3])
def test_layout_is_known_without_building(text: str, num_stages: int) -> None:
    spec = small_spec(text, pipeline={"num_stages": num_stages}, sync={"shard_parameters": 0})
    for i, stage in enumerate(stages_of(spec)):
        assert stage_parameter_ranges(spec, i) == stage.parameter_ranges
        assert stage_shard_sizes(spec, i) == stage.shard_sizes
        assert stage.shard_sizes[0] in (16_384, stage.num_parameters)


def test_automatic_shards_are_about_64_for_a_large_stage() -> None:
    model = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 688}
    sizes = stage_shard_sizes(small_spec(model=model, sync={"shard_parameters": 0}), 0)
    assert 50 <= len(sizes) <= 64
    assert sizes[0] % 1024 == 0


# ---- evaluation ---------------------------------------------------------------------------------


def test_evaluation_is_the_loss_and_changes_nothing(text: str) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    first, last = stages_of(spec)
    inputs, targets = data.held_out(0).arrays
    result = last.evaluate(first.evaluate(inputs, None), targets)  # type: ignore[arg-type]
    assert isinstance(result, LossResult)
    assert result.grad_inputs is None
    expected = fly(stages_of(spec), (0, 0), inputs, targets)
    assert math.isclose(result.loss_sum, expected.loss_sum, rel_tol=1e-6)
    assert result.num_tokens == expected.num_tokens
    assert not gradient(first).any()
    assert len(first.kept) == len(last.kept) == 0


def test_evaluation_of_shorter_sequences_gives_the_logits_of_the_prefix(text: str) -> None:
    spec = small_spec(text)
    first, last = stages_of(spec)
    inputs = to_tensor(open_data(spec).held_out(0).inputs)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        hidden = first.evaluate(from_tensor(tokens), None)
        outputs = last.evaluate(hidden, None)  # type: ignore[arg-type]
        assert isinstance(outputs, Array)
        return to_tensor(outputs)

    whole = logits(inputs)
    assert whole.shape == (2, 16, 256)
    torch.testing.assert_close(logits(inputs[:1, :5].contiguous()), whole[:1, :5])


# ---- refusals -----------------------------------------------------------------------------------


def tokens(shape: tuple[int, ...] = (2, 16), dtype: Any = np.int32, value: int = 5) -> Array:
    return from_numpy(np.full(shape, value, dtype))


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (tokens((3, 16)), tokens()),
        (tokens((2, 15)), tokens()),
        (tokens((2, 16, 1)), tokens()),
        (tokens(dtype=np.int64), tokens()),
        (tokens(dtype=np.float32), tokens()),
        (tokens(), tokens((2, 15))),
        (tokens(), tokens(dtype=np.int16)),
    ],
)
def test_wrong_shape_or_dtype_is_refused(text: str, inputs: Array, targets: Array) -> None:
    spec = small_spec(text, pipeline={"num_stages": 1})
    stage = build_stage(spec, 0)
    stage.check(tokens(), tokens())
    with pytest.raises(ProtocolViolation):
        stage.check(inputs, targets)
    with pytest.raises(ProtocolViolation):
        stage.forward_backward((0, 0), inputs, targets)
    assert not gradient(stage).any()
    assert len(stage.kept) == 0


@pytest.mark.parametrize("value", [-1, 256, 2**31 - 1])
def test_a_token_that_does_not_exist_is_refused(text: str, value: int) -> None:
    spec = small_spec(text, pipeline={"num_stages": 1})
    stage = build_stage(spec, 0)
    with pytest.raises(ProtocolViolation):
        stage.forward_backward((0, 0), tokens(value=value), tokens())
    with pytest.raises(ProtocolViolation):
        stage.forward_backward((0, 0), tokens(), tokens(value=value))
    with pytest.raises(ProtocolViolation):
        stage.evaluate(tokens(value=value), None)
    assert not gradient(stage).any()
    assert len(stage.kept) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_is_refused_and_nothing_added(text: str, bad: float) -> None:
    spec = small_spec(text)
    data = open_data(spec)
    first, last = stages_of(spec)
    activation = first.forward((0, 0), batch(data, 0)[0])
    poisoned = to_tensor(activation).clone()
    poisoned[1, 3, 5] = bad
    with pytest.raises(ProtocolViolation):
        last.forward_backward((0, 0), from_tensor(poisoned), batch(data, 0)[1])
    with pytest.raises(ProtocolViolation):
        first.backward((0, 0), from_tensor(poisoned))
    assert not gradient(first).any()
    assert not gradient(last).any()
    assert len(last.kept) == 0
    # the microbatch can still be completed
    result = last.forward_backward((0, 0), activation, batch(data, 0)[1])
    assert result.grad_inputs is not None
    with pytest.raises(ProtocolViolation):
        first.backward((0, 0), from_tensor(torch.zeros(2, 15, 32)))
    first.backward((0, 0), result.grad_inputs)
    assert gradient(first).any()


def test_parameters_that_cannot_be_are_refused(text: str) -> None:
    stage = build_stage(small_spec(text), 0)
    good = torch.zeros(1000)
    bad = good.clone()
    bad[999] = math.nan
    for shard_index, values in (
        (0, from_tensor(bad)),
        (0, from_tensor(good[:999])),
        (0, from_tensor(good.double())),
        (0, Array("float32", (1000,), bytes(3999))),
        (len(stage.shard_sizes), from_tensor(good)),
        (-1, from_tensor(good)),
    ):
        with pytest.raises(ProtocolViolation):
            stage.stage_parameters(shard_index, values)
    before = parameters(stage)
    stage.finish_round()
    assert torch.equal(parameters(stage), before)


def test_evaluation_refuses_what_does_not_fit(text: str) -> None:
    stage = build_stage(small_spec(text, pipeline={"num_stages": 1}), 0)
    for inputs in (tokens((3, 16)), tokens((2, 17)), tokens((0, 16)), tokens(dtype=np.uint8)):
        with pytest.raises(ProtocolViolation):
            stage.evaluate(inputs, None)
    with pytest.raises(ProtocolViolation):
        stage.evaluate(tokens((2, 8)), tokens((2, 9)))


def test_more_stages_than_layers_is_an_error_of_the_spec() -> None:
    plan = dropout_plan()
    with pytest.raises(SpecError, match="no parameters"):
        TorchStage(
            plan,
            (LayerBuilder("flat", torch.nn.Flatten, 0, (4,)),),
            stage_index=0,
            num_stages=1,
            shard_size=8,
            microbatch=2,
            seed=0,
        )


# ---- random layers ------------------------------------------------------------------------------


def dropout_plan() -> ModelPlan:
    def layer() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))

    return ModelPlan(
        layers=(LayerBuilder("a", layer, 1, (4,)), LayerBuilder("b", layer, 1, (4,))),
        inputs=TensorSpec("float32", (4,)),
        targets=TensorSpec("float32", (4,)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        count=lambda targets: targets.numel(),
        is_random=True,
    )


def dropout_stage(activations: ActivationsName) -> TorchStage:
    plan = dropout_plan()
    return TorchStage(
        plan,
        plan.layers[:1],
        stage_index=0,
        num_stages=2,
        shard_size=8,
        microbatch=8,
        seed=5,
        computing=Computing(activations=activations),
    )


def test_dropout_is_the_same_when_a_pass_is_done_again() -> None:
    inputs = from_tensor(torch.ones(8, 4))
    keep, recompute = dropout_stage("keep"), dropout_stage("recompute")
    outputs = [stage.forward((0, 3), inputs) for stage in (keep, recompute)]
    assert bytes(outputs[0].data) == bytes(outputs[1].data)
    other = keep.forward((0, 4), inputs)
    assert bytes(other.data) != bytes(outputs[0].data)
    for stage in (keep, recompute):
        stage.backward((0, 3), inputs)
    assert torch.equal(gradient(keep), gradient(recompute))
    keep.retract((0, 3))
    assert gradient(keep).abs().max() < 1e-6
    evaluated = keep.evaluate(inputs, None)
    assert isinstance(evaluated, Array)
    assert bytes(keep.evaluate(inputs, None).data) == bytes(evaluated.data)  # type: ignore[union-attr]


class Meanwhile(torch.nn.Module):
    """In the middle of a layer's pass."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Sequence[Callable[[], object]] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.work:
            one()
        return x


def layers_between_dropouts() -> tuple[StageLayers, list[Meanwhile]]:
    """A layer that draws twice, and what is done before each time."""
    between = [Meanwhile(), Meanwhile()]

    def build() -> torch.nn.Module:
        dropouts = [torch.nn.Dropout(0.5) for _ in between]
        parts = [part for pair in zip(between, dropouts, strict=True) for part in pair]
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), *parts)

    plan = replace(linear_plan(), layers=(LayerBuilder("a", build, 1, (WIDTH,)),), is_random=True)
    return linear_layers(plan=plan), between


def test_dropout_is_the_same_while_another_thread_counts_parameters() -> None:
    layers, (first, second) = layers_between_dropouts()
    x = torch.ones(16, WIDTH)
    expected = layers.run((0, 3), x)
    begun, goes_on = threading.Event(), threading.Event()

    def build() -> torch.nn.Module:
        begun.set()
        goes_on.wait()
        return torch.nn.Linear(WIDTH, WIDTH)

    other = LayerBuilder("other", build, 1, (WIDTH,))
    counting = threading.Thread(target=lambda: describe_parameters([other]), daemon=True)
    first.work = (counting.start, begun.wait)
    second.work = (goes_on.set, counting.join)
    assert torch.equal(layers.run((0, 3), x), expected)


def test_a_pass_and_the_building_of_a_layer_do_not_draw_from_each_other() -> None:
    """Neither begins while the other goes on."""
    layers, (_, second) = layers_between_dropouts()
    x = torch.ones(16, WIDTH)
    passes, built = threading.Event(), threading.Event()
    outputs = [layers.run((0, 3), x)]
    meanwhile: list[Callable[[], object]] = []

    def build() -> torch.nn.Module:
        first = torch.nn.Linear(WIDTH, WIDTH)
        for one in meanwhile:
            one()
        return torch.nn.Sequential(first, torch.nn.Linear(WIDTH, WIDTH))

    other = LayerBuilder("other", build, 1, (WIDTH,))
    expected = build_layer(linear_plan(), other, 5)
    second.work = (passes.set, built.wait)
    thread = threading.Thread(target=lambda: outputs.append(layers.run((0, 3), x)), daemon=True)
    meanwhile += [thread.start, lambda: passes.wait(0.2)]  # it waits: else it passes at once
    found = build_layer(linear_plan(), other, 5)
    built.set()
    thread.join()
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    assert torch.equal(*outputs)


def test_work_that_is_given_up_while_it_runs_leaves_nothing_behind() -> None:
    stage = dropout_stage("keep")
    stage.layers.modules[0].register_forward_pre_hook(lambda *_: stage.forget((0, 3)))
    stage.forward((0, 3), from_tensor(torch.ones(8, 4)))
    assert len(stage.kept) == 0
