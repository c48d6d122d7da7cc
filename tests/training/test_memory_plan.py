"""Memory: the formulae, and real peers held to them."""

from __future__ import annotations

import asyncio
import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.spec import RunSpec
from swarmnet.training.data import open_data
from swarmnet.training.memory_plan import FP32, MIXED, plan_memory, state_bytes
from swarmnet.training.stage import build_stage
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.training.specs import small_spec, write_text

ROUNDS = 5
NUM_REPLICAS = 4


@given(st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 8))
def test_the_formulae_of_the_paper(n: int, replicas: int, replication: int) -> None:
    for precision, bare in ((FP32, 16), (MIXED, 16)):
        assert precision.total == bare
        assert sum(state_bytes(n, 1, replication, precision)) == bare * n  # alone: all of it
        held = [sum(state_bytes(n, replicas, replication, precision)) for _ in range(replicas)]
        copies = min(replication, replicas)
        everything = (precision.weights + precision.gradients) * n * replicas
        assert sum(held) == pytest.approx(everything + precision.optimizer * n * copies)
    # table 1 of the paper: 7.5 G parameters on 64 devices, optimizer sharded: 31.4 GB
    assert sum(state_bytes(7_500_000_000, 64, 1, MIXED)) / 1e9 == pytest.approx(31.4, abs=0.1)


def kept_bytes(stage: Any, inputs: Array, targets: Array) -> tuple[int, Array | None]:
    """What autograd keeps of one microbatch (beside parameters and the rotary tables), and the
    output; each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in stage.state_dict().values()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        at = t.untyped_storage().data_ptr()
        if at not in parameters and (t.ndim < 3 or t.shape[1] != 1 or t.shape[0] != 16):
            kept[at] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        if stage.is_last:
            stage.forward_backward((0, 0), inputs, targets)
            output = None
        else:
            output = stage.forward((0, 0), inputs)
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    return total + (len(output.data) if output is not None else 0), output


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_activations_are_what_autograd_keeps(tmp_path: Path, kv_heads: int) -> None:
    spec = small_spec(
        write_text(tmp_path),
        model={"num_key_value_heads": kv_heads},
        pipeline={"num_stages": 3},
    )
    assert spec.model.max_position_embeddings == 16
    inputs, targets = open_data(spec).microbatch(0)
    for row in plan_memory(spec, num_replicas=1, in_flight=1):
        measured, output = kept_bytes(build_stage(spec, row.stage), inputs, targets)
        assert row.activations == pytest.approx(measured, rel=0.01), f"stage {row.stage}"
        inputs = output or inputs
    many = plan_memory(spec, num_replicas=1, in_flight=5)
    one = plan_memory(spec, num_replicas=1, in_flight=1)
    assert [m.activations / o.activations for m, o in zip(many, one, strict=True)] == [5, 5, 1]  # type: ignore[operator]


def test_recomputing_keeps_the_inputs_only(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), pipeline={"num_stages": 2, "activations": "recompute"})
    three, four = (plan_memory(spec, num_replicas=1, in_flight=k)[0] for k in (3, 4))
    tokens = 4 * spec.pipeline.microbatch * spec.model.max_position_embeddings
    assert four.activations - three.activations == tokens  # type: ignore[operator]


def tensor_bytes() -> int:
    """Bytes of every tensor and every array in this process, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    arrays: list[Array] = []
    for thing in gc.get_objects():
        if type(thing) is Array:
            arrays.append(thing)
        elif issubclass(type(thing), torch.Tensor):  # asks nothing of lazy modules
            storage = thing.untyped_storage()
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


def large(folder: Path) -> RunSpec:
    """Large enough for parameters to be what counts, in many shards."""
    spec = tiny_spec(folder, num_stages=1)
    values = spec.model_dump()
    values["optimizer"]["rounds"] = ROUNDS
    values["model"] |= {"hidden_size": 64, "intermediate_size": 256}
    values["sync"]["shard_parameters"] = 2048
    values["optimizer"]["warmup_rounds"] = 0
    return RunSpec.model_validate(values)


@pytest.mark.filterwarnings("ignore")
def test_real_peers_hold_what_the_plan_says(tmp_path: Path) -> None:
    """All tensors of a process with a whole swarm in it, and the share of each peer."""
    spec = large(tmp_path)
    (row,) = plan_memory(spec, num_replicas=NUM_REPLICAS, in_flight=0)

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
