"""What a model has beside what its run trains, for an export of the whole: the base of the run, and
buffers that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.causes import Failures
from swarmnet.errors import NotNow, SpecError, SwarmnetError, UserError
from swarmnet.ports import Worker
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.runtime.run_files import WEIGHTS, RunFiles
from swarmnet.spec import RunSpec
from swarmnet.swarm.initial.weights import fetch_initial
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.settings import WaitLimits
from swarmnet.transport.base import Transport
from swarmnet.wire import Array

if TYPE_CHECKING:
    from torch import Tensor

    from swarmnet.training.models.initial_weights import ModelWeights

MORE_FOLDERS = "name the state folders of more peers"
WHERE = f"name the model's folder with --weights, or {MORE_FOLDERS.removeprefix('name ')}"


def kept_base(spec: RunSpec, state_dirs: Sequence[Path], folder: Path | None) -> dict[str, Tensor]:
    """By name, from what peers have kept of it and from the model's folder. Raises `UserError`
    where a part is not there."""
    from swarmnet.training.models.initial_weights import read_base

    if not has_base(spec):
        return _own_buffers(spec)
    about = spec.files[WEIGHTS]
    read = (RunFiles(path, spec.files).read(about.sha256) for path in state_dirs)
    hashes = next((data for data in read if data is not None), None)
    if hashes is None:
        raise UserError(f"no state folder has the run's {WEIGHTS}; name one more")
    try:
        return read_base(spec, hashes, state_dirs, folder)
    except SpecError as e:
        raise UserError(f"{e}; {MORE_FOLDERS if spec.adapts_ended else WHERE}") from None


def has_base(spec: RunSpec) -> bool:
    """The run began from more than what it trains. Code of a custom model is not run for that."""
    from swarmnet.training.models.initial_weights import InitialLayout

    is_known = spec.model.kind != "custom" and spec.model.weights
    return bool(is_known) and any(InitialLayout.of(spec).base)


def _own_buffers(spec: RunSpec) -> dict[str, Tensor]:
    """Of a model that began at random, or that has none. A custom model's builder makes them."""
    from swarmnet.training.models.base import initial_buffers
    from swarmnet.training.models.registry import model_plan

    return {} if spec.model.kind == "custom" else initial_buffers(model_plan(spec), spec.seed)


async def fetch_base(
    spec: RunSpec,
    transport: Transport,
    gossip: Gossip,
    worker: Worker,
    files: Mapping[str, bytes],
    folder: Path | None,
) -> dict[str, Tensor]:
    """By name, from the model's folder, else from peers. `files`: of the run. Raises `NotNow` where
    a part is not to be had, `UserError` where all refuse it."""
    from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
    from swarmnet.training.models.registry import model_plan

    if not has_base(spec):
        return await worker.run(lambda: _own_buffers(spec))

    weights = await worker.run(lambda: ModelWeights(spec, files[WEIGHTS], folder))
    layout, at_once = InitialLayout.of(spec), asyncio.Semaphore(WaitLimits().max_fetching)
    loop = asyncio.get_running_loop()
    stages = [
        [
            loop.create_task(_one(transport, gossip, worker, weights, at_once, k, j, size))
            for j, size in enumerate(sizes)
        ]
        for k, sizes in enumerate(layout.base_sizes)
    ]
    tasks = [task for of_stage in stages for task in of_stage]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    shards = [[task.result() for task in of_stage] for of_stage in stages]
    return layout.named(shards, model_plan(spec).base_dtype)


async def _one(
    transport: Transport,
    gossip: Gossip,
    worker: Worker,
    weights: ModelWeights,
    at_once: asyncio.Semaphore,
    stage: int,
    shard: int,
    size: int,
) -> Array:
    async with at_once:
        own = await worker.run(lambda: weights.shard(stage, shard))
        if own is not None:
            return own
        now = asyncio.get_running_loop().time()
        own_id = gossip.own.peer_id
        live = [r for r in gossip.view.live(now) if r.peer_id != own_id and _is_member(r)]
        # Replicas of the stage have it; whoever has the model's folder has all.
        failures = Failures()
        for record in sorted(live, key=lambda r: r.stage != stage):
            try:
                return await fetch_initial(
                    transport,
                    record.peer_id,
                    weights,
                    worker,
                    stage,
                    shard,
                    size,
                    WaitLimits().fetch_timeout_s,
                )
            except SwarmnetError as e:
                failures.add(e, record.peer_id)
    what = f"no peer gives the base of stage {stage}"
    if not weights.adapts_ended:
        what += ", and --weights names no folder of the model"
    if not failures:
        raise NotNow(f"{what}: no peer of the run is there; try again when one is")
    raise failures.as_error(what)


def _is_member(record: Record) -> bool:
    """Who only looks has nothing to give."""
    return record.state != OBSERVING or bool(record.paused)
