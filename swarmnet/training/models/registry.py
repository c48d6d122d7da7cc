"""From a spec to a model's plan, and from the plan to stages and shards."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from swarmnet.errors import SpecError, UserError, one_line
from swarmnet.plurals import counted
from swarmnet.protocol.planning.cuts import split_layers
from swarmnet.protocol.planning.exchange import MAX_MESSAGE_BYTES, auto_shard_parameters
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    ParameterRange,
    cut_shards,
    describe_frozen,
    describe_parameters,
    num_parameters,
)
from swarmnet.training.models.llama import llama_plan
from swarmnet.training.models.matrices import (
    MATRIX_MOMENTS,
    OTHER_MOMENTS,
    Matrix,
    Parts,
    blocks_of,
    cut_whole,
    family_parts,
    muon_matrices,
    orthogonal_flops,
)
from swarmnet.training.models.routing import ROUTED_FAMILIES
from swarmnet.training.models.subspace import subspace_plan

SHARD_MULTIPLE = 1_024


def model_plan(spec: RunSpec) -> ModelPlan:
    """The plan of the spec's model.

    Raises:
        SpecError: the custom builder cannot be loaded or returns something else than a plan.
    """
    if spec.model.kind == "llama":
        made = subspace_plan if spec.model.subspace else llama_plan
        plan = made(spec.model, spec.sequence_length)
    elif spec.model.kind == "transformers":
        from swarmnet.training.models.adapter import adapter_plan  # slow to import
        from swarmnet.training.models.family_probe import check_documents_apart, checked

        plan = checked(adapter_plan(spec.model, spec.sequence_length), spec.model.config)
        if spec.data.document_mask:
            by_sequence = check_documents_apart(spec.model.config, spec.sequence_length)
            plan = replace(plan, takes_sequence=plan.takes_sequence and by_sequence)
    else:
        plan = _call_builder(spec.model.builder, spec.model.options)
        _check_plan(plan, spec.model.builder)
    if spec.lora is not None:
        from swarmnet.training.models.lora import lora_plan, names_experts

        if spec.model.kind == "transformers" and any(map(names_experts, spec.lora.target_modules)):
            from swarmnet.training.models.family_probe import check_experts_adapted

            check_experts_adapted(spec.model.config)
        plan = lora_plan(plan, spec.lora)
    if spec.data.document_mask:
        check_document_mask(plan)
    model = spec.model
    has_weights = bool(model.weights or model.source or model.continues)
    split = spec.pipeline.layers
    if split and sum(split) != len(plan.layers):
        raise SpecError(
            f"[pipeline] layers: they add up to {sum(split)}, but the model has "
            f"{counted(len(plan.layers), 'layer')}; swarmnet plan --measure prints some that fit"
        )
    if split and split[-1] < plan.whole_end:
        raise SpecError(
            f"[pipeline] layers: the last stage has {counted(split[-1], 'layer')}; with [model] "
            f"subspace the last {plan.whole_end} (decoder layer, norm and head) are one stage: "
            "what goes from one of them to the next has the whole width"
        )
    return replace(plan, split=split or plan.split, has_weights=has_weights)


def num_experts(model: ModelSpec) -> int:
    """Experts of a layer, where ranks can divide them; 0 for other models."""
    if model.kind != "transformers":
        return model.num_experts
    if model.config["model_type"] not in ROUTED_FAMILIES:
        return 0
    from swarmnet.training.models.model_config import load_config  # slow to import

    config = load_config(model.config)
    return int(getattr(config, "num_local_experts", None) or config.num_experts)


def experts_met(model: ModelSpec) -> tuple[int, int]:
    """Of a model with experts, how many a token meets in a layer, and the width of its state."""
    if model.kind != "transformers":
        return model.num_experts_per_tok, model.hidden_size
    from swarmnet.training.models.model_config import load_config  # slow to import

    config = load_config(model.config)
    return int(config.num_experts_per_tok), int(config.hidden_size)


def draws_itself(spec: RunSpec) -> bool:
    """The model draws random numbers, beside those of `[lora] lora_dropout`."""
    if spec.lora is None or not spec.lora.lora_dropout:
        return model_plan(spec).is_random
    return model_plan(spec.model_copy(update={"lora": None})).is_random


def check_document_mask(plan: ModelPlan) -> None:
    """Raises `SpecError` unless the model can keep the documents of a sample apart."""
    if not (plan.takes_context and plan.takes_ignored and plan.inputs.shape):
        raise SpecError(
            "[data] document_mask: this model's plan does not say takes_context and takes_ignored; "
            "teach it both, or take document_mask out"
        )


def split_stages(plan: ModelPlan, num_stages: int) -> list[tuple[LayerBuilder, ...]]:
    """The layers of each stage: as the run says, else by their costs.

    Raises:
        SpecError: there are fewer layers than stages, or a cost is no number.
    """
    if plan.split:
        ends = list(accumulate(plan.split))
        assert len(ends) == num_stages, "the spec has been checked"
        return [plan.layers[end - n : end] for end, n in zip(ends, plan.split, strict=True)]
    try:
        counts = split_counts(plan, [layer.cost for layer in plan.layers], num_stages)
    except ValueError as error:
        raise SpecError(f"[pipeline] num_stages: {error}") from None
    return [plan.layers[end - n : end] for end, n in zip(accumulate(counts), counts, strict=True)]


def split_counts(plan: ModelPlan, costs: Sequence[float], num_stages: int) -> list[int]:
    """Layers of each stage, by what each layer costs. Raises `ValueError` as `split_layers`."""
    begin = len(costs) - plan.whole_end
    counts = [len(part) for part in split_layers([*costs[:begin], sum(costs[begin:])], num_stages)]
    return [*counts[:-1], counts[-1] - 1 + plan.whole_end]


def stage_costs(plan: ModelPlan, num_stages: int) -> list[float]:
    """Cost of each stage for one sample, in the unit of the layers' costs."""
    return [sum(layer.cost for layer in stage) for stage in split_stages(plan, num_stages)]


def shard_parameters(spec: RunSpec, plan: ModelPlan) -> int:
    """Parameters of a shard: what the spec says, else as it suits the largest stage."""
    if spec.sync.shard_parameters:
        return spec.sync.shard_parameters
    largest = max(
        num_parameters(describe_parameters(layers))
        for layers in split_stages(plan, spec.pipeline.num_stages)
    )
    return -(-auto_shard_parameters(largest) // SHARD_MULTIPLE) * SHARD_MULTIPLE


def tied_elements(plan: ModelPlan, num_stages: int, stage_index: int) -> int:
    """How many of a stage's parameters, the first ones, another stage has too. None where they are
    of the base, for it does not change.

    Raises:
        SpecError: they are not the first ones of the first stage, tied to the last one.
    """
    stages = split_stages(plan, num_stages)
    if num_stages == 1 or plan.has_base or stage_index not in (0, num_stages - 1):
        return 0
    at = {layer.name: k for k, layers in enumerate(stages) for layer in layers}
    total = 0
    for layer in plan.layers:
        for owner in layer.tied.values():
            name = owner.rpartition(".")[0]
            if at[name] == at[layer.name]:
                continue
            first = describe_parameters(stages[0])[0]
            if total or first.name != owner or at[layer.name] != num_stages - 1:
                raise SpecError(
                    f"{layer.name} is tied to {owner}: only the model's first parameter can be "
                    "tied over stages, to its last layer"
                )
            total = first.num_elements
    return total


def stage_shards(spec: RunSpec, plan: ModelPlan, stage_index: int) -> tuple[int, ...]:
    """Elements of each shard of a stage. Raises `SpecError`."""
    num_stages, size = spec.pipeline.num_stages, shard_parameters(spec, plan)
    layers = split_stages(plan, num_stages)[stage_index]
    if not plan.has_base and (frozen := describe_frozen(layers)):
        raise SpecError(f"{frozen[0].name} must be a float32 parameter that requires a gradient")
    tied = tied_elements(plan, num_stages, stage_index)
    total = num_parameters(describe_parameters(layers))
    if total == 0:
        raise SpecError(
            f"[pipeline] num_stages: stage {stage_index} has no parameters to train; use fewer, or "
            "set [pipeline] layers"
        )
    if spec.optimizer.kind == "muon":
        matrices = muon_matrices(layers, muon_parts(spec, plan.layers))
        blocks = blocks_of(matrices)
        sizes = cut_whole(describe_parameters(layers), blocks, size, tied)
        starts = {b.start for b in blocks}
    else:
        sizes, starts = cut_shards(total, size, tied), set[int]()
    for start, elements in zip(accumulate(sizes, initial=0), sizes, strict=False):
        num_moments = MATRIX_MOMENTS if start in starts else OTHER_MOMENTS
        needed = spec.sync.largest_message_bytes(elements, num_moments)
        if needed > MAX_MESSAGE_BYTES:
            raise SpecError(
                f"[sync] shard_parameters: a shard of {elements} parameters is too large for a "
                f'message ({needed} bytes with [sync] mode = "{spec.sync.mode}", of '
                f"{MAX_MESSAGE_BYTES}); write fewer, or leave it out"
            )
    return sizes


def _call_builder(builder: str, options: dict[str, Any]) -> ModelPlan:
    function = _load_builder(builder)
    try:
        plan = function(**options)
    except UserError:
        raise
    except Exception as error:
        raise SpecError(
            f"[model] builder {builder} failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not isinstance(plan, ModelPlan):
        raise SpecError(f"[model] builder {builder} must return a swarmnet ModelPlan")
    return plan


def _load_builder(builder: str) -> Callable[..., Any]:
    path_text, _, function_name = builder.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise SpecError(
            f"[model] builder: no file {path} seen from here; put it on this machine, at that path"
        )
    function = getattr(_load_module(path, builder), function_name, None)
    if not callable(function):
        raise SpecError(f"[model] builder: {path} has no function {function_name}")
    return function


class _AsItIsNow(SourceFileLoader):
    """Compiles the file each time. Python would run what it has compiled before, where that is of a
    file of the same size and second: not what the run's fingerprint is of."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_module(path: Path, builder: str) -> ModuleType:
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    name = f"swarmnet_custom_{digest}"
    if path.suffix != ".py":
        raise SpecError(f"[model] builder: {path} is no Python file")
    loader = _AsItIsNow(name, str(path))
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise SpecError(
            f"[model] builder {builder} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
    return module


def _check_plan(plan: ModelPlan, builder: str) -> None:
    names = [layer.name for layer in plan.layers]
    if not names or "" in names or len(set(names)) != len(names):
        raise SpecError(f"[model] builder {builder}: layers need names, each its own")
    for spec in (plan.inputs, plan.targets):
        if spec.dtype not in ("float32", "int32"):
            raise SpecError(f"[model] builder {builder}: inputs and targets are float32 or int32")
        if spec.dtype == "int32" and spec.num_values <= 0:
            raise SpecError(f"[model] builder {builder}: int32 data needs num_values")


def stage_parameter_ranges(spec: RunSpec, stage_index: int) -> tuple[ParameterRange, ...]:
    """Where each named parameter lies in the flat vector of a stage, without building it."""
    plan = model_plan(spec)
    return describe_parameters(split_stages(plan, spec.pipeline.num_stages)[stage_index])


def stage_shard_sizes(spec: RunSpec, stage_index: int) -> tuple[int, ...]:
    """Elements of each shard of a stage, without building it."""
    return stage_shards(spec, model_plan(spec), stage_index)


def muon_parts(spec: RunSpec, layers: Sequence[LayerBuilder]) -> Parts:
    """How Muon divides matrices of these layers that are several in one: as the run says, or would
    say once it is started. Raises `SpecError`."""
    if not isinstance(spec.optimizer.parts, dict):
        return family_parts(spec.model, layers)
    return spec.optimizer.parts


def stage_matrices(spec: RunSpec, stage_index: int) -> tuple[Matrix, ...]:
    """The matrices of a stage that Muon steps, where they lie in its flat vector; none where the
    run has AdamW."""
    if spec.optimizer.kind != "muon":
        return ()
    plan = model_plan(spec)
    layers = split_stages(plan, spec.pipeline.num_stages)[stage_index]
    return muon_matrices(layers, muon_parts(spec, plan.layers))


def stage_matrix_parameters(spec: RunSpec, stage_index: int) -> int:
    """How many of a stage's parameters Muon steps."""
    return sum(m.num_elements for m in stage_matrices(spec, stage_index))


def stage_products(spec: RunSpec, stage_index: int) -> float:
    """FLOPs of one step of Muon on a stage, for each of its parameters."""
    plan = model_plan(spec)
    layers = split_stages(plan, spec.pipeline.num_stages)[stage_index]
    flops = orthogonal_flops(layers, muon_parts(spec, plan.layers))
    return flops / num_parameters(describe_parameters(layers))


def stage_moments(spec: RunSpec, stage_index: int) -> tuple[int, ...]:
    """Of each shard of a stage, how many vectors its owners keep of a run with `[optimizer]`'s
    steps: AdamW's two, or Muon's one."""
    sizes = stage_shard_sizes(spec, stage_index)
    starts = {b.start for b in blocks_of(stage_matrices(spec, stage_index))}
    numbers = {True: MATRIX_MOMENTS, False: OTHER_MOMENTS}
    return tuple(numbers[at in starts] for at in accumulate(sizes[:-1], initial=0))
