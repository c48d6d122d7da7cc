"""What of a shard goes over the wire in one message, and what the spec says of it beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnet.protocol.planning import exchange
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.models.registry import stage_moments
from swarmnet.training.optimizer.local_steps import build_local_steps, build_optimizer
from swarmnet.training.stage import build_stage
from swarmnet.transport import frames
from swarmnet.wire import Array
from tests.swarm.harness import tiny_spec


def bytes_of(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays)


def sent_at_once(spec: RunSpec) -> list[int]:
    """Of each shard, after a step of its primary: bytes of its largest message."""
    stage = build_stage(spec, 0)
    optimizer = build_optimizer(spec, stage)
    local = build_local_steps(spec, stage, optimizer)
    found = []
    for j, size in enumerate(stage.shard_sizes):
        optimizer.create(j)
        gradient = from_tensor(torch.full((size,), 1e-3))
        is_delayed = spec.sync.mode == "delayed"
        if spec.sync.mode != "gossip":
            optimizer.step(j, stage.parameter_shard(j), gradient, 1.0, 0, is_delayed)
        messages = [optimizer.export(j)[1]]
        if local is not None:
            messages += [local.export(j)[1]]
        if local is not None and spec.sync.mode == "gossip":
            messages += [local.offer(j)[1]]
        found.append(max(map(bytes_of, messages)))
    return found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip"])
def test_the_largest_message_about_a_shard_is_known_beforehand(
    tmp_path: Path, mode: str, codec: str, kind: str
) -> None:
    values = tiny_spec(tmp_path, num_stages=1, sync={"mode": mode, "codec": codec}).model_dump()
    values["optimizer"] |= {"kind": kind}
    spec = RunSpec.model_validate(values)
    sent, numbers = sent_at_once(spec), stage_moments(spec, 0)
    assert 1 in numbers or kind == "adamw"
    for size, num_moments, most in zip(
        build_stage(spec, 0).shard_sizes, numbers, sent, strict=True
    ):
        said = spec.sync.largest_message_bytes(size, num_moments)
        assert said - 4 <= most <= said, "but for a number of steps"


def test_it_is_the_transports_limit() -> None:
    assert exchange.MAX_MESSAGE_BYTES == frames.MAX_MESSAGE_BYTES
