"""How many ranks this machine's peer has, on which devices, and its end with theirs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from peer.options import PeerOptions
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.training.local_group import LocalGroup

log = logging.getLogger("swarmnet.peer")


def choose_devices(spec: RunSpec, options: PeerOptions) -> list[str]:
    """A device for each rank. Raises `SpecError` where `--tp` does not go with the model.

    Without `--tp`: all GPUs, or as many as the model can be cut into."""
    import torch

    from swarmnet.training.tensor_parallel import check_cut, fits

    num_gpus = torch.cuda.device_count()
    if options.tp is not None:
        check_cut(spec, options.tp)
        kind = "cuda" if num_gpus >= options.tp else "cpu"
        return [f"cuda:{i}" if kind == "cuda" else "cpu" for i in range(options.tp)]
    if num_gpus < 2 or spec.model.kind != "llama":
        return ["cpu"]
    num_ranks = max(n for n in range(1, num_gpus + 1) if n == 1 or fits(spec.model, n))
    return [f"cuda:{i}" for i in range(num_ranks)]


def open_ranks(spec: RunSpec, options: PeerOptions) -> LocalGroup | None:
    """The other ranks of this peer, started; None where it has one only. Blocks for seconds.
    Raises `SpecError` or `RankLost`."""
    devices = choose_devices(spec, options)
    if len(devices) == 1:
        return None
    from swarmnet.training.local_group import LocalGroup
    from swarmnet.training.tensor_parallel_stage import rank_options

    return LocalGroup(
        len(devices),
        devices=devices,
        threads=options.threads,
        options=rank_options(spec, sequence_parallel=options.sequence_parallel),
    )


async def until_over(life: asyncio.Task[None], group: LocalGroup | None) -> None:
    """Returns as `life` does; where a rank is lost meanwhile, ends it at once and raises
    `RankLost`. When this is cancelled, `life` goes on."""
    if group is None:
        await asyncio.shield(life)
        return
    watching = asyncio.get_running_loop().create_task(group.watch())
    try:
        await asyncio.wait((life, watching), return_when=asyncio.FIRST_COMPLETED)
        if group.failure is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            raise type(group.failure)(str(group.failure))
        life.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
