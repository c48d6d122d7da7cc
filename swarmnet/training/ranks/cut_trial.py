"""Whether models of a family of `transformers` compute the same on several ranks: by the plan that
the family has for tensor parallelism, or with a part of each sequence at each rank. And whether
what layers draw can be drawn for a part. Tried with a small model on two ranks, not believed.

The ranks are threads of this process. Loss, logits and gradient must be those of one rank. What is
drawn comes from a generator of each rank: torch's own is the process's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swarmnet.errors import SpecError, one_line
from swarmnet.plurals import counted
from swarmnet.protocol.generation import text_tokens
from swarmnet.spec import ModelSpec
from swarmnet.system import LOOPBACK_INTERFACE
from swarmnet.training.accelerators import CPU
from swarmnet.training.computing import Computing
from swarmnet.training.memory.device_copies import copies_of
from swarmnet.training.models.adapter import CAP, CHUNKS, SLIDING_WINDOW, adapter_plan
from swarmnet.training.models.base import LayerContext, ModelPlan
from swarmnet.training.models.family_probe import (
    LENGTH,
    PASSES,
    SAMPLES,
    check_size,
    plain_length,
    try_family,
)
from swarmnet.training.models.model_config import load_config
from swarmnet.training.models.shrunk import shrunk_configs
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.ranks.context_parallel_layers import ContextParallelLayers
from swarmnet.training.ranks.cut_layers import CutLayers
from swarmnet.training.ranks.cut_plan import CutPlan, cut_plan
from swarmnet.training.ranks.parallel_layers import ParallelLayers
from swarmnet.training.ranks.part_dropout import PartDraws, Place, everything, samples_of
from swarmnet.training.ranks.tensor_parallel import Region

NUM_RANKS = 2
NUM_OUTPUTS = 3
"""Of a trial, before its gradients."""
TOLERANCE = 1e-3
"""Of the norm of logits, and of each parameter's gradient; rounding makes less than 1e-5 of it."""
LEAST_PART = 1e-3
"""Of the largest norm of a parameter's gradient: less is not told apart from rounding. What
positions do shows in the gradients of queries and keys, which are small beside others."""
WINDOW = 5
"""Of a small model, in positions: fewer than a rank's piece of a sequence has."""
SMALL_CAP = 0.01
"""Of a small model's scores, which are small."""
COLLECTIVE_TIMEOUT_S = 20.0
"""Of a small model's: ranks that do not run the same ones are told after it."""


def check_family(config: Mapping[str, Any]) -> None:
    """Raises `SpecError` unless a small model of this canonical config, cut by its family's plan,
    computes the same on two ranks as on one."""
    fault = try_small(_written(shrunk_configs(config)))
    if fault:
        raise SpecError(
            f"transformers' tensor parallelism for model_type {config['model_type']} {fault}"
        )


def check_shared(config: Mapping[str, Any], sequence_length: int) -> None:
    """Raises `SpecError` unless a model of this canonical config computes the same where ranks
    share its sequences, of so many tokens."""
    kind, chunks = config["model_type"], config.get(CHUNKS) or 0
    if 0 < chunks < sequence_length:
        raise SpecError(
            f"sequences of {counted(sequence_length, 'token')} are longer than the {chunks} that "
            f"attention of this {kind} looks at together"
        )
    limit = plain_length(config)
    if sequence_length > limit:
        raise SpecError(
            f"beyond {counted(limit, 'token')} positions of this {kind} depend on the whole "
            "sequence"
        )
    # Longer than the window where the run's are, or its texts may be.
    longest = min(text_tokens(sequence_length), most_shared(config))
    has_window = 0 < (config.get(SLIDING_WINDOW) or 0) < longest
    sizes = {SLIDING_WINDOW: WINDOW if has_window else LENGTH, CHUNKS: LENGTH, CAP: SMALL_CAP}
    plain = (
        small | {name: size for name, size in sizes.items() if small.get(name)}
        for small in shrunk_configs(config)
    )
    writes = try_family(config).writes
    fault = try_small(_written(plain), shares_sequences=True, writes=writes)
    if fault:
        raise SpecError(f"with a part of each sequence, model_type {kind} {fault}")


def most_shared(config: Mapping[str, Any]) -> float:
    """Tokens of a sequence that ranks can share, by what its layers look at."""
    return min(config.get(CHUNKS) or math.inf, plain_length(config))


def _written(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(json.dumps(small, sort_keys=True) for small in configs)


@functools.lru_cache(maxsize=16)
def try_small(
    configs: tuple[str, ...], *, shares_sequences: bool = False, writes: bool = True
) -> str:
    """What is wrong with the first of these canonical configs, JSON, that is a model; empty where
    nothing is. `shares_sequences`: each rank has a part of these, else of the matrices; `writes`:
    and of texts, which the family goes on with."""
    for text in configs:
        small = json.loads(text)
        try:
            check_size(load_config(small))
            plan = adapter_plan(ModelSpec(kind="transformers", config=small), LENGTH)
            if not (shares_sequences and writes):
                plan = replace(plan, cache=None)
            expected = _results(_layers(plan, StageLayers), plan)
        except Exception:  # whatever a family's code does with sizes that it never had
            continue
        try:
            model = ModelSpec(kind="transformers", config=small)
            found = on_ranks(plan, None if shares_sequences else cut_plan(model))
        except Exception as error:  # likewise
            return f"does not work here ({one_line(error, 120)})"
        least = LEAST_PART * max(float(part.norm()) for part in expected[NUM_OUTPUTS:])
        for one, other in zip(found, expected, strict=True):
            if not _is_same(one, other, least):
                return "computes something else than one rank does"
        return ""
    return "cannot be tried on a small model"


def on_ranks(plan: ModelPlan, cut: CutPlan | None) -> tuple[Tensor, ...]:
    """`_results` of the model on two ranks, its matrices cut so; None: they share sequences."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    store = dist.HashStore()
    adds_up = cut is None  # a rank's gradients are parts, as with `--sequence-parallel`
    regions = [
        Region(None, rank, NUM_RANKS, sequence_parallel=adds_up) for rank in range(NUM_RANKS)
    ]
    make: Callable[..., CutLayers] = ContextParallelLayers
    if cut is not None:
        make = functools.partial(ParallelLayers, cut=cut)
    lead = _layers(plan, functools.partial(make, region=regions[0]))
    fd = os.dup(lead.shared.fd)
    other = _layers(plan, functools.partial(make, region=regions[1], fd=fd))
    found: list[tuple[Tensor, ...] | BaseException] = [RuntimeError("silent")] * 2

    def work(rank: int, layers: CutLayers) -> None:
        try:
            wait = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            regions[rank].group = dist.ProcessGroupGloo(store, rank, NUM_RANKS, wait)
            found[rank] = _results(layers, plan)
        except Exception as error:
            found[rank] = error

    threads = [
        threading.Thread(target=work, args=(r, layers), name=f"rank-{r}", daemon=True)
        for r, layers in enumerate((lead, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = []
    for result in found:
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    for layers in (lead, other):
        layers.store_gradients()
    lead.add_slots()
    return results[0]


def check_samples(config: Mapping[str, Any]) -> None:
    """Raises `SpecError` unless layers of a small model of this canonical config draw for some
    samples what they draw for these among all."""
    smaller = shrunk_configs(config)
    if not draws_by_sample(tuple(json.dumps(small, sort_keys=True) for small in smaller)):
        raise SpecError(
            f"what model_type {config['model_type']} draws cannot be drawn for some samples"
        )


@functools.lru_cache(maxsize=16)
def draws_by_sample(configs: tuple[str, ...]) -> bool:
    """Of the first of these canonical configs, JSON, that is a model; False where none is."""
    for text in configs:
        small = json.loads(text)
        try:
            check_size(load_config(small))
            plan = adapter_plan(ModelSpec(kind="transformers", config=small), LENGTH)
            expected = _outputs(plan, 1)
        except Exception:  # as in `try_small`
            continue
        return _is_same(_outputs(plan, NUM_RANKS), expected)
    return False


def _outputs(plan: ModelPlan, num_ranks: int) -> Tensor:
    """Of one small microbatch, whose samples are computed in so many parts."""
    inputs, _ = _tokens(plan)
    outputs = []
    for rank, part in enumerate(inputs.chunk(num_ranks)):
        layers = _layers(plan, StageLayers)
        place = functools.partial(samples_of, rank, num_ranks)
        layers.drawing = functools.partial(_drawn, place)
        with torch.no_grad():
            outputs.append(layers.run((0, 0), part))
    return torch.cat(outputs)


@contextlib.contextmanager
def _drawn(place: Place, seed: int) -> Iterator[None]:
    with PartDraws(place, torch.Generator().manual_seed(seed)):
        yield


def _layers(plan: ModelPlan, make: Callable[..., Any]) -> Any:
    device = torch.device(CPU)
    layers = make(
        plan,
        plan.layers,
        stage_index=0,
        num_stages=1,
        shard_size=1 << 30,
        seed=0,
        computing=Computing("fp32", "keep"),
        device=device,
        copies=copies_of(device),
    )
    place = layers.place if isinstance(layers, CutLayers) else everything
    layers.drawing = functools.partial(_drawn, place)
    return layers


def _tokens(plan: ModelPlan) -> Tensor:
    """Inputs and targets, int32 (2, samples, length)."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, SAMPLES, LENGTH)
    return torch.randint(plan.inputs.num_values, shape, generator=generator, dtype=torch.int32)


def _results(layers: StageLayers, plan: ModelPlan) -> tuple[Tensor, ...]:
    """Loss, logits, those of a text, and each parameter's gradient of one small microbatch; of a
    rank, what it has added to."""
    inputs, targets = _tokens(plan)
    loss = layers.loss((0, 0), inputs, targets)
    loss.backward()
    with layers.evaluating(is_whole_batch=True, wants_outputs=True):
        logits = layers.run(None, inputs)
        of_text = _of_text(layers, inputs[:1], logits)
    gradients = (r.part_of(layers.shown.gradients) for r in layers.parameter_ranges)
    return loss.detach(), logits, of_text, *gradients


def _of_text(layers: StageLayers, tokens: Tensor, logits: Tensor) -> Tensor:
    """The logits after some tokens of a text, whose parts come one after the other where ranks
    share it."""
    ends = torch.tensor(PASSES).cumsum(0)
    if layers.plan.cache is None or not isinstance(layers, ContextParallelLayers):
        return logits[:1, ends - 1]
    cache, positions = layers.plan.cache.make(), torch.arange(LENGTH).unsqueeze(0)
    parts = zip(tokens.split(PASSES, dim=1), positions.split(PASSES, dim=1), strict=True)
    return torch.cat([layers.extend(part, LayerContext(at, cache)) for part, at in parts], dim=1)


def _is_same(found: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    difference = (found - expected).norm() / expected.norm().clamp_min(max(least, 1e-12))
    return float(difference.nan_to_num(torch.inf)) < TOLERANCE
