"""The base of a run that trains adapters, for an export that merges both."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.errors import SwarmnetError, UserError
from swarmnet.runtime.run_files import WEIGHTS, RunFiles
from swarmnet.spec import RunSpec
from swarmnet.swarm.initial.weights import fetch_initial
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.ports import Worker
from swarmnet.swarm.settings import Limits
from swarmnet.transport.base import Transport
from swarmnet.wire import Array

if TYPE_CHECKING:
    from torch import Tensor

    from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights

MISSING = "name the model's folder with --weights, or leave --merge out"


def kept_base(spec: RunSpec, state_dirs: Sequence[Path], folder: Path | None) -> dict[str, Tensor]:
    """The base by name, from what peers have kept of it and from the model's folder. Raises
    `UserError` where a part is not there."""
    from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights

    about = spec.files[WEIGHTS]
    read = (RunFiles(path, spec.files).read(about.sha256) for path in state_dirs)
    hashes = next((data for data in read if data is not None), None)
    if hashes is None:
        raise UserError(f"--merge: no state folder has the run's {WEIGHTS}; name one more")
    sources = [ModelWeights(spec, hashes, None, state_dir=path) for path in state_dirs]
    if folder is not None:
        sources.append(ModelWeights(spec, hashes, folder))
    layout = InitialLayout.of(spec)
    shards: list[list[Array]] = []
    for stage, sizes in enumerate(layout.base_sizes):
        shards.append([])
        for j in range(len(sizes)):
            found = (source.shard(stage, j) for source in sources)
            shard = next((values for values in found if values is not None), None)
            if shard is None:
                raise UserError(f"--merge: the base of stage {stage} is not all here; {MISSING}")
            shards[-1].append(shard)
    return _named(spec, layout, shards)


async def fetch_base(
    spec: RunSpec,
    transport: Transport,
    gossip: Gossip,
    worker: Worker,
    files: Mapping[str, bytes],
    folder: Path | None,
) -> dict[str, Tensor]:
    """The base by name, from the model's folder, else from peers. `files`: of the run. Raises
    `UserError` where a part is not to be had."""
    from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights

    weights = await worker.run(lambda: ModelWeights(spec, files[WEIGHTS], folder))
    layout, at_once = InitialLayout.of(spec), asyncio.Semaphore(Limits().max_fetching)
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
    return _named(spec, layout, [[task.result() for task in of_stage] for of_stage in stages])


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
        live = gossip.view.live(now)
        # Replicas of the stage have it; whoever has the model's folder has all.
        for record in sorted(live, key=lambda r: r.stage != stage):
            with suppress(SwarmnetError):
                return await fetch_initial(
                    transport, record.peer_id, weights, worker, stage, shard, size,
                    Limits().fetch_timeout_s,
                )  # fmt: skip
    raise UserError(f"--merge: no peer gives the base of stage {stage}; {MISSING}")


def _named(
    spec: RunSpec, layout: InitialLayout, shards: Sequence[Sequence[Array]]
) -> dict[str, Tensor]:
    import torch

    from swarmnet.training.arrays import to_tensor
    from swarmnet.training.models.registry import model_plan

    rounding = model_plan(spec).base_dtype
    named: dict[str, Tensor] = {}
    for ranges, of_stage in zip(layout.base, shards, strict=True):
        flat = torch.cat([to_tensor(shard) for shard in of_stage])
        if rounding is not None:
            flat = flat.to(rounding).float()
        named |= {r.name: r.part_of(flat) for r in ranges}
    return named
