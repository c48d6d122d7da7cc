"""Memory: the formulae, and real peers held to them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.batch import Documents
from swarmnet.spec import RunSpec
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.training.arrays import to_tensor
from swarmnet.training.attention import packed
from swarmnet.training.attention.documents import Part, parts_of
from swarmnet.training.computing import Computing
from swarmnet.training.cores import scratch
from swarmnet.training.data import open_data
from swarmnet.training.memory import offload
from swarmnet.training.memory.plan import (
    BF16,
    FP16,
    FP32,
    MIXED,
    Precision,
    plan_memory,
    stage_activations,
    state_bytes,
)
from swarmnet.training.models.base import LayerContext, with_mask
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, coded, in_virtual_time, tiny_spec
from tests.training.flights import batch
from tests.training.specs import small_spec, write_text

ROUNDS = 5
NUM_REPLICAS = 4
SWITCH = {"num_experts_per_tok": 1, "norm_topk_prob": False, "router_z_loss_coef": 0.0}
SCRATCH = ("gradient", "own", "change")
"""Vectors that a thread that makes updates keeps."""


@given(st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 8))
def test_the_formulae_of_the_paper(n: int, replicas: int, replication: int) -> None:
    for precision, bare in ((FP32, 16), (BF16, 18), (FP16, 20), (MIXED, 16)):
        assert precision.total == bare
        assert sum(state_bytes(n, 1, replication, precision)) == bare * n  # alone: all of it
        held = [sum(state_bytes(n, replicas, replication, precision)) for _ in range(replicas)]
        copies = min(replication, replicas)
        everything = (precision.weights + precision.gradients) * n * replicas
        assert sum(held) == pytest.approx(everything + precision.optimizer * n * copies)
    # table 1 of the paper: 7.5 G parameters on 64 devices, optimizer sharded: 31.4 GB
    assert sum(state_bytes(7_500_000_000, 64, 1, MIXED)) / 1e9 == pytest.approx(31.4, abs=0.1)


def kept_bytes(
    stage: TorchStage,
    inputs: Array,
    targets: Array,
    documents: Documents | None = None,
    *,
    has_own_tables: bool = False,
) -> tuple[int, Array | None]:
    """What there is of one microbatch of several samples between its passes (beside parameters and
    the rotary tables that all microbatches share), and the output; each storage once.
    `has_own_tables`: each microbatch has some of its own."""
    kept: dict[int, torch.Tensor] = {}
    parameters = (p for module in stage.layers.modules for p in module.parameters())
    spared = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(t: torch.Tensor) -> torch.Tensor:
        at = t.untyped_storage().data_ptr()
        is_table = t.ndim >= 3 and t.shape[0] == 16 and t.shape[1] == 1
        is_table |= t.ndim >= 3 and t.shape[0] == 1 and not has_own_tables
        if at not in spared and not is_table:
            kept[at] = t
        return t

    masks: list[weakref.ref[torch.Tensor]] = []

    def making(context: LayerContext, dtype: torch.dtype) -> LayerContext:
        made = with_mask(context, dtype)
        if documents is not None:
            assert made.mask is not None
            masks.append(weakref.ref(made.mask))
        return made

    def making_parts(*args: Any, **options: Any) -> list[Part]:
        made = parts_of(*args, **options)
        masks.extend(weakref.ref(p.sees_BRC) for p in made if p.sees_BRC is not None)
        return made

    def making_fixed(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert plan.fixed is not None
        made = plan.fixed(tokens, dtype)
        masks.append(weakref.ref(made))
        return made

    plan = stage.layers.plan
    if plan.fixed is not None:
        stage.layers.plan = dataclasses.replace(plan, fixed=making_fixed)

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        mock.patch("swarmnet.training.passes.layers.with_mask", making),
        mock.patch("swarmnet.training.attention.documents.parts_of", making_parts),
    ):
        if stage.is_last:
            stage.forward_backward((0, 0), inputs, targets, documents)
            output = None
        else:
            output = stage.forward((0, 0), inputs, documents)
    entry = stage.kept.get((0, 0))
    assert entry is not None
    for array in (inputs, output):
        tensor = None if array is None else to_tensor(array)
        if tensor is not None:
            kept[tensor.untyped_storage().data_ptr()] = tensor
    context = entry.context or LayerContext()
    beside = context.positions, context.tokens
    for tensor in (entry.inputs, entry.outputs, *beside, *(ref() for ref in masks)):
        if tensor is not None:
            kept[tensor.untyped_storage().data_ptr()] = tensor
    return sum(t.untyped_storage().nbytes() for t in kept.values()), output


@pytest.mark.parametrize(
    ("model", "documents", "masked"),
    [
        ({}, None, False),
        ({"num_key_value_heads": 4}, None, False),
        ({}, ((10, 6), (3, 13)), False),
        ({}, ((10, 6), (3, 13)), True),
        ({"subspace": 8}, None, False),
        ({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}, None, False),
        ({"num_experts": 8, "shared_expert_intermediate_size": 40, **SWITCH}, None, False),
    ],
)
@pytest.mark.parametrize("policy", ["keep", "blocks", "recompute", "offload"])
@pytest.mark.parametrize("precision", [FP32, BF16, FP16], ids=lambda p: p.name)
def test_activations_are_what_a_stage_keeps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    policy: Any,
    model: dict[str, Any],
    documents: Documents | None,
    masked: bool,
) -> None:
    """Between the passes: with one microbatch more in flight there is so much more. `masked`: as
    on devices other than CPUs."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    if masked:
        monkeypatch.setattr(packed, "PACKED", {})
    spec = small_spec(
        write_text(tmp_path),
        model=model,
        pipeline={"num_stages": 3},
        data={"document_mask": documents is not None},
    )
    assert spec.model.max_position_embeddings == 16
    computing = Computing(precision.name, policy, folder=str(tmp_path))  # type: ignore[arg-type]
    known = partial(stage_activations, masked=masked)
    data, targets = batch(open_data(spec), 0)
    for k in range(3):
        inputs = Array(data.dtype, data.shape, bytes(data.data))
        stage = build_stage(spec, k, computing=computing)
        measured, output = kept_bytes(stage, inputs, targets, documents)
        one, two = (
            plan_memory(
                spec,
                num_replicas=1,
                in_flight=n,
                precision=precision,
                activations=policy,
                known=known,
            )[k].activations
            for n in (1, 2)
        )
        assert one is not None
        assert two is not None
        if stage.is_last:
            assert two == one
            if policy == "keep":
                stage_s = known(spec, k, precision)
                assert stage_s is not None
                assert one - stage_s.passing == pytest.approx(measured, rel=0.01)
        else:
            assert two - one == pytest.approx(measured, rel=0.01), f"stage {k}"
        data = output or data


@pytest.fixture(autouse=True, scope="module")
def only_new_objects() -> Iterator[None]:
    """What was there before these tests is not looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def tensor_bytes() -> int:
    """Bytes of every tensor and every array in this process, each storage once, but for what a
    process has once however many peers it is: that may be there already, or come."""
    gc.collect()
    spared = {scratch(name, torch.empty(1)).data_ptr() for name in SCRATCH}
    found: dict[int, int] = {}
    arrays: list[Array] = []
    for thing in gc.get_objects():
        if type(thing) is Array:
            arrays.append(thing)
        elif issubclass(type(thing), torch.Tensor):  # asks nothing of lazy modules
            storage = thing.untyped_storage()
            if storage.data_ptr() not in spared:
                found[storage.data_ptr()] = storage.nbytes()
    spans = sorted((start, start + num) for start, num in found.items())
    for array in arrays:
        try:
            values = np.frombuffer(array.data, dtype=np.uint8)
        except (TypeError, ValueError):  # bad input of another test
            continue
        at = values.ctypes.data
        if values.nbytes and not any(start <= at < stop for start, stop in spans):
            found[at] = values.nbytes
    return sum(found.values())


def large(
    folder: Path, precision: str, mode: str = "zero", codec: str = "none", kind: str = "adamw"
) -> RunSpec:
    """Large enough for parameters to be what counts, in many shards."""
    spec = tiny_spec(folder, num_stages=1, num_layers=3)
    values = spec.model_dump()
    values["optimizer"]["rounds"] = ROUNDS
    values["pipeline"]["precision"] = precision
    values["model"] |= {"hidden_size": 64, "intermediate_size": 256}
    values["sync"] |= {"shard_parameters": 2048, "mode": mode, "local_steps": 2} | coded(codec)
    values["optimizer"] |= {"warmup_rounds": 0, "kind": kind}
    return RunSpec.model_validate(values)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_what_results_have_left_out_is_counted_where_it_is(replication: int) -> None:
    """With few numbers, and of what Muon steps, its primary has it, and no backup."""

    def coding(mode: str, codec: str, num_muon: int) -> float:
        coded, bare = (
            state_bytes(100, NUM_REPLICAS, replication, FP32, mode, name, num_muon)[3]
            for name in (codec, "none")
        )
        return (coded - bare) / 100

    every = 2 + 4 * replication / NUM_REPLICAS
    primary = 2 + 4 / NUM_REPLICAS
    assert coding("local", "topk", 0) == coding("zero", "int8", 0) == pytest.approx(every)
    assert coding("local", "topk-208", 0) == pytest.approx(primary)
    assert coding("zero", "int8", 100) == pytest.approx(primary)
    of_adamw, of_muon = (
        state_bytes(100, NUM_REPLICAS, replication, FP32, "delayed", "none", num)[3]
        for num in (0, 100)
    )
    assert of_adamw == of_muon  # a backup keeps what the primary is ahead by, or is made of


@pytest.mark.parametrize("codec", ["topk-208", "topk"])
def test_who_follows_holds_nothing_of_what_results_have_left_out(
    tmp_path: Path, codec: str
) -> None:
    spec = large(tmp_path, "fp32", "local", codec)

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(ROUNDS)
        await asyncio.sleep(2.0)
        replicas = [m.peer.replica for m in swarm.members.values() if m.peer.replica]
        num_shards = len(replicas[0].stage.shard_sizes)
        vectors = sum(len(r.optimizer.export(j)[1]) for r in replicas for j in r.optimizer.owned())
        owners = 2 * num_shards
        expected = owners + (num_shards if codec == "topk-208" else owners)
        assert vectors == expected

    in_virtual_time(scenario, spec)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
def test_real_peers_hold_what_the_plan_says(tmp_path: Path, precision: Precision) -> None:
    """All tensors of a process with a whole swarm in it, and the share of each peer."""
    spec = large(tmp_path, precision.name)
    (row,) = plan_memory(spec, num_replicas=NUM_REPLICAS, in_flight=0, precision=precision)

    async def scenario(swarm: Swarm) -> None:
        before = tensor_bytes()
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(ROUNDS)
        await asyncio.sleep(2.0)
        measured = (tensor_bytes() - before) / NUM_REPLICAS
        print(f"plan {row.total:,.0f} bytes, measured {measured:,.0f}")
        assert measured == pytest.approx(row.total, rel=0.05)
        for member in swarm.members.values():
            replica = member.peer.replica
            assert replica is not None
            sizes = replica.stage.shard_sizes
            own = 8 * sum(sizes[j] for j in replica.optimizer.owned())
            # Hashing spreads shards as throws of dice do: the more shards, the more evenly.
            assert own == pytest.approx(row.optimizer, rel=4 / math.sqrt(len(sizes)))

    in_virtual_time(scenario, spec)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "codec", "kind"),
    [
        pytest.param("local", "none", "adamw", marks=pytest.mark.long),
        ("gossip", "none", "adamw"),
        pytest.param("zero", "int8", "adamw", marks=pytest.mark.long),
        ("zero", "int4", "adamw"),
        ("local", "topk", "adamw"),
        ("local", "topk-208", "adamw"),
        ("gossip", "int8", "adamw"),
        ("zero", "none", "muon"),
        ("zero", "int8", "muon"),
        ("local", "none", "muon"),
    ],
)
def test_other_modes_and_codecs_hold_what_the_plan_says(
    tmp_path: Path, mode: str, codec: str, kind: str
) -> None:
    spec = large(tmp_path, "fp32", mode, codec, kind)
    (row,) = plan_memory(spec, num_replicas=NUM_REPLICAS, in_flight=0)

    async def scenario(swarm: Swarm) -> None:
        before = tensor_bytes()
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(ROUNDS)
        await asyncio.sleep(2.0)
        measured = (tensor_bytes() - before) / NUM_REPLICAS
        print(f"{mode}, {codec}: plan {row.total:,.0f} bytes, measured {measured:,.0f}")
        assert measured == pytest.approx(row.total, rel=0.05)

    in_virtual_time(scenario, spec)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("codec", "kind"), [("none", "adamw"), ("int8", "adamw"), ("none", "muon")]
)
def test_an_update_that_is_under_way_takes_what_the_plan_says(
    tmp_path: Path, codec: str, kind: str
) -> None:
    """In mode `delayed`, while a round goes on and a gradient waits for its exchange; afterwards
    there is no more than that."""
    spec = large(tmp_path, "fp32", "delayed", codec, kind)
    (row,) = plan_memory(spec, num_replicas=NUM_REPLICAS, in_flight=0)

    async def scenario(swarm: Swarm) -> None:
        def num_owing() -> int:
            return sum(m.peer.updates.is_owing for m in swarm.members.values())

        def measured() -> float:
            return (tensor_bytes() - before) / NUM_REPLICAS

        before = tensor_bytes()
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)
        for member in swarm.members.values():  # so that a gradient has to be copied
            member.peer.replica.stage.layers.overlaps_rounds = False  # type: ignore
            _begin_later(member.peer.exchanges)
        waiting: list[float] = []
        then = 0.0
        while not waiting or num_owing():  # messages come and go meanwhile
            await asyncio.sleep(0.001)
            then = measured()
            if num_owing() == NUM_REPLICAS and swarm.rounds() == [4] * NUM_REPLICAS:
                waiting.append(then)
            assert max(swarm.rounds()) <= 4, "the exchange took longer than the round"
        print(
            f"delayed, {codec}: plan {row.total:,.0f} bytes, {min(waiting):,.0f}, then {then:,.0f}"
        )
        assert min(waiting) == pytest.approx(row.total, rel=0.05)
        assert then <= 1.05 * row.total

    in_virtual_time(scenario, spec)


def _begin_later(exchanges: Exchanges) -> None:
    """So that it is seen what a replica holds while a gradient waits."""
    update = exchanges.make

    async def later(*arguments: Any) -> None:
        await asyncio.sleep(0.005)
        await update(*arguments)

    exchanges.make = later  # type: ignore[method-assign, assignment]


def test_coming_parameters_take_the_place_of_the_gradient(tmp_path: Path) -> None:
    """In the middle of an update a replica holds two flat vectors and no third."""
    spec = small_spec(write_text(tmp_path))
    stage = build_stage(spec, 0)
    before = tensor_bytes()
    wanted = []
    for j, size in enumerate(stage.shard_sizes):
        values = torch.randn(size)
        wanted.append(values.clone())
        stage.stage_parameters(j, Array("float32", (size,), values.numpy().tobytes()))
        del values
    wanted_bytes = sum(w.nbytes for w in wanted)
    assert tensor_bytes() - before == wanted_bytes
    stage.finish_round()
    for j, values in enumerate(wanted):
        assert bytes(stage.parameter_shard(j).data) == values.numpy().tobytes()
        assert not any(bytes(stage.gradient_shard(j).data))
