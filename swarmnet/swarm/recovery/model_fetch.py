"""Downloading the whole model from a live swarm, all stages of one and the same round.

It is for peers that serve no stage. Which round it is, and the digests of its shards, most replicas
of each stage say, of those that are nearest by vouching: what one of them says of itself is not the
model of the run, nor what many say whom nobody has seen at work. Each shard comes from any of the
replicas that say the same in their signed records, and is checked, as a joiner does it
(`swarm.update.state_sync`). Replicas serve the parameters of their present round only: where the
run moves on before all is here, the download is begun again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import xxhash

from swarmnet.causes import Failures, is_closed
from swarmnet.errors import ProtocolViolation, Stale, SwarmnetError, UserError
from swarmnet.methods.state import FETCH_PARAMETERS, FetchRequest
from swarmnet.protocol.membership.records import DIGEST_BYTES, Record
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.protocol.update import divergence
from swarmnet.swarm.calls import call
from swarmnet.swarm.downloads import Downloads
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.transport.base import Transport
from swarmnet.wire import Array, Message

FP32_BYTES = 4


class RoundsPassed(UserError):
    """The run moves on faster than the model comes."""


@dataclass(frozen=True, slots=True)
class _Model:
    """What is fetched."""

    round: int
    digests: tuple[bytes, ...]
    """Of each stage, those of all its shards."""


async def fetch_model(
    transport: Transport,
    gossip: Gossip,
    shard_sizes: Sequence[Sequence[int]],
    limits: WaitLimits,
    rng: random.Random,
) -> tuple[int, list[list[Array]]]:
    """The round, and for every stage its shards (flat fp32). `shard_sizes`: elements of each shard
    of each stage. Raises `UserError` where a stage is not served, and `RoundsPassed`."""
    failures = Failures()
    downloads = Downloads(rng, failures)
    for _ in range(MAX_TRIES):  # rounds that pass under a download
        model = await _common_model(gossip, shard_sizes)
        at_once = asyncio.Semaphore(limits.max_fetching)
        fetching = [
            asyncio.ensure_future(
                _fetch(transport, gossip, model, (k, j), sizes, limits, downloads, at_once)
            )
            for k, sizes in enumerate(shard_sizes)
            for j in range(len(sizes))
        ]
        try:
            shards = iter(await asyncio.gather(*fetching))
            return model.round, [[next(shards) for _ in sizes] for sizes in shard_sizes]
        except Stale:
            continue
        finally:
            for task in fetching:
                task.cancel()
            await asyncio.gather(*fetching, return_exceptions=True)
    if any(is_closed(e) for e in failures):
        raise failures.as_error("the model is not given")
    raise RoundsPassed(
        f"the run made {MAX_TRIES} updates while the model was on its way, and no peer has saved "
        "one; export from the peers' --state-dir, or when the run is done"
    )


def _donors(gossip: Gossip, stage: int, num_shards: int) -> list[Record]:
    """Live replicas of a stage that have published digests; those that are nearest."""
    now, view = asyncio.get_running_loop().time(), gossip.view
    there = [r for r in view.live(now, stage) if r.is_replica]
    return view.nearest([r for r in there if len(r.digests) == num_shards * DIGEST_BYTES])


async def _common_model(gossip: Gossip, shard_sizes: Sequence[Sequence[int]]) -> _Model:
    """As `divergence.common`."""
    loop = asyncio.get_running_loop()
    deadline = Deadline.after(loop.time(), PATIENCE_S)
    while True:
        stages = [_donors(gossip, k, len(sizes)) for k, sizes in enumerate(shard_sizes)]
        found = divergence.common(stages)
        if found is not None:
            return _Model(*found)
        if deadline.is_over(loop.time()):
            raise UserError(
                f"the model is not whole: {_what_is_missing(gossip, stages)}; try again, or use "
                "--state-dir"
            )
        await gossip.changed.wait(LOOK_AGAIN_S)


def _what_is_missing(gossip: Gossip, stages: Sequence[Sequence[Record]]) -> str:
    missing = [k for k, replicas in enumerate(stages) if not replicas]
    if not missing:
        return "the stages are not in step"
    live = gossip.view.live(asyncio.get_running_loop().time(), missing[0])
    if any(r.is_replica and r.digests for r in live):
        return f"nobody vouches for those that serve stage {missing[0]}"
    return f"stage {missing[0]} has no replica"


async def _fetch(
    transport: Transport,
    gossip: Gossip,
    model: _Model,
    wanted: tuple[int, int],
    sizes: Sequence[int],
    limits: WaitLimits,
    downloads: Downloads,
    at_once: asyncio.Semaphore,
) -> Array:
    """One shard (stage, shard). Raises `Stale` where no peer has that model any more."""
    k, j = wanted
    same = (model.round, model.digests[k])
    error: SwarmnetError = Stale("no donor")
    digest = model.digests[k][j * DIGEST_BYTES : (j + 1) * DIGEST_BYTES]

    async def ask(peer_id: str) -> Array:
        reply = await call(
            transport,
            peer_id,
            FETCH_PARAMETERS,
            Message(FetchRequest(model.round, k, j)),
            timeout_s=limits.fetch_timeout_s,
        )
        return _checked(reply.arrays, sizes[j], digest)

    async with at_once:
        for _ in range(MAX_TRIES):
            donors = _donors(gossip, k, len(sizes))
            having = [r for r in donors if (r.round, r.digests) == same]
            if not having:
                raise Stale(f"round {model.round} is over")
            givers = [r.peer_id for r in having]
            try:
                return (await downloads.piece(givers, ask, FP32_BYTES * sizes[j]))[1]
            except Stale as e:  # its record with the next round is on its way: at once, then
                error = e
                await gossip.changed.until(partial(_are_past, gossip, having), LOOK_AGAIN_S)
            except SwarmnetError as e:
                error = e
                await asyncio.sleep(LOOK_AGAIN_S)
    if isinstance(error, Stale):
        raise error
    what = f"shard {j} of stage {k} is not to be had"
    raise (downloads.failures or Failures([error])).as_error(what, UserError)


def _are_past(gossip: Gossip, donors: Sequence[Record]) -> bool:
    """The record of one of them, as it was, is out of date."""
    now = [gossip.view.get(donor.peer_id) for donor in donors]
    return any(
        new is None or (new.round, new.digests) != (old.round, old.digests)
        for new, old in zip(now, donors, strict=True)
    )


def _checked(arrays: tuple[Array, ...], size: int, digest: bytes) -> Array:
    if len(arrays) != 1 or arrays[0].dtype != "float32" or arrays[0].shape != (size,):
        raise ProtocolViolation(f"not {size} parameters")
    if xxhash.xxh3_64_digest(arrays[0].data) != digest:
        raise ProtocolViolation("the parameters do not match the digest in the donor's record")
    return arrays[0]
