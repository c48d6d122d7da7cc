"""The end of a round: seconds from its last backward pass to the first forward pass of the next.

    python benchmarks/round_end.py [--layers 3 --layers 12] [--replicas 1 --replicas 2]
                                   [--codec none --codec int8] [--threads 2] [--device cpu]
    python benchmarks/round_end.py --where             # and what the worker was at meanwhile
    python benchmarks/round_end.py --width 128 --layers 4 --shard 16384 --shard 65536

The end of a round as `swarm.update.rounds` makes it, with a stage that is a small Llama (3.2 M
parameters a layer, with `--width 128` 0.2 M) and a gradient of random numbers, without
microbatches: the round is closed, the
gradient goes into an exchange, the step is made, the coming parameters are put in place, the new
round is told of, with digests of all shards, and the clock stops when the device is free for a
forward pass. All replicas are in this process and call
each other over the memory transport, so that nothing waits for a network. With more than one, they
share the machine's cores.

Beside the seconds stand those of the bytes that must be moved, by the speed of memory in the same
run (a copy between two vectors, on as many threads): a lone replica reads the gradient twice (its
norm is known before the step) and writes zeros over it, reads and writes the parameters and both
moments once, and with a codec what coding has lost, too. Several replicas on one machine move the
sum of that, and read and write what they send. All columns but `ns/parameter` and `ratio` (of `s`
over `bytes`) are seconds; `CPU` is of all cores, and says more where the machine is busy.

With `--device cuda` the update is made on the GPU, or with `--optimizer-memory host` on the host.
`--device apart` is a second part of main memory in place of a GPU's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnet.identity import Identity
from swarmnet.ports import FORWARD
from swarmnet.protocol.audit import Conclusions
from swarmnet.protocol.codecs import NONE, row_bytes, update_codec
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.runtime.compose import run_settings
from swarmnet.runtime.net import KeySigner
from swarmnet.runtime.run import spare_old_objects
from swarmnet.spec import RunSpec
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.swarm.update.handover import Handover
from swarmnet.swarm.update.rounds import ZeroUpdates
from swarmnet.training.computing import computing_of
from swarmnet.training.device import DeviceThread, WorkerThread, set_num_threads
from swarmnet.training.memory.device_copies import DeviceCopies, OneMemory, OnHost
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.transport.memory import MemoryHub

FEED_FORWARD = {128: 352, 512: 1380}
"""By width."""
HEAD = 64
NUM_TOKENS = 1000
WARM_ROUNDS = 2
READY_S = 60.0
SPEED_BYTES = 128 << 20
SPEED_REPEAT = 5
APART = "apart"


class Apart(OneMemory):
    """Copies between two parts of main memory, as a GPU's between its own and the host's."""

    is_apart = True

    def to_device(self, tensor: Tensor, after: Any = None) -> Tensor:
        return tensor.clone()

    def to_host(self, tensor: Tensor) -> OnHost:
        return OnHost(tensor.clone())


@dataclass(frozen=True, slots=True)
class Way:
    """What is measured."""

    layers: int
    replicas: int
    codec: str
    device: str
    is_on_device: bool = True
    """The update is made on a device that has memory of its own."""
    width: int = 512
    """Of the model."""
    shard: int = 0
    """Parameters of a shard; 0 where that is left open."""

    def spec(self) -> RunSpec:
        return RunSpec.model_validate(
            {
                "model": {
                    "hidden_size": self.width,
                    "intermediate_size": FEED_FORWARD[self.width],
                    "num_hidden_layers": self.layers,
                    "num_attention_heads": self.width // HEAD,
                    "num_key_value_heads": self.width // HEAD,
                    "vocab_size": 256,
                    "max_position_embeddings": 64,
                },
                "data": {"paths": ["python-stdlib"]},
                "optimizer": {"learning_rate": 1e-3, "rounds": 1000},
                "pipeline": {"num_stages": 1, "global_batch": 8, "microbatch": 1},
                "sync": {"codec": self.codec, "shard_parameters": self.shard},
            }
        )


class TimedWorker(WorkerThread):
    """Knows what it was at."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = Counter[str]()

    async def run(self, work: Callable[[], Any]) -> Any:
        result, seconds = await self.timed("other", (), work)
        self.seconds[_name_of(work)] += seconds
        return result

    async def run_all(self, pieces: Sequence[Callable[[], object]], *, side_by_side: bool) -> None:
        await super().run_all(pieces, side_by_side=side_by_side)
        names = {_name_of(piece.__self__.work) for piece in pieces}  # type: ignore[attr-defined]
        together = " and ".join(sorted(names))
        self.seconds[together] += self.seconds.pop("WorkerThread.run_all.work")


def _name_of(work: Any) -> str:
    return getattr(work, "func", work).__qualname__.replace(".<locals>", "")


# ---- a swarm of one stage ----------------------------------------------------------------------


class Member:
    """A replica, and what makes its updates."""

    def __init__(self, hub: MemoryHub, spec: RunSpec, rank: int, way: Way) -> None:
        key = Identity.generate()
        self.transport = hub.transport(key.peer_id)
        self.transport.set_run(spec.run_id)
        copies: DeviceCopies | None = Apart() if way.device == APART else None
        device = "cpu" if way.device == APART else way.device
        computing = replace(computing_of(spec, device), updates_on_device=way.is_on_device)
        self.stage: Any = build_stage(
            spec,
            0,
            device=device,
            computing=computing,
            make=lambda *a, **k: TorchStage(*a, copies=copies, **k),
        )
        size = self.stage.num_parameters
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        self._gradient = gradient.to(device)
        self.worker = TimedWorker()
        self.replica = Replica(
            self.stage,
            build_optimizer(spec, self.stage),
            DeviceThread(),
            self.worker,
            Phase(State.OPEN, 0),
            SyncPlan("zero", spec.optimizer.rounds),
        )
        own = Record(
            key.peer_id,
            spec.run_id,
            int(time.time() * 1000),
            1,
            state=ACTIVE,
            stage=0,
            addresses=tuple(self.transport.addresses()),
        )
        rng = random.Random(rank)
        self.gossip = Gossip(self.transport, View(key.peer_id), KeySigner(key), own, rng)
        self.gossip.serves(self.replica)
        settings = run_settings(spec)
        self.exchanges = Exchanges(
            self.transport, self.gossip, settings, WaitLimits(), self.replica, Conclusions(), rng
        )
        handover = Handover(self.gossip, settings, self.replica, self.exchanges, rng)
        self._updates = ZeroUpdates(self.replica, self.exchanges, handover)

    async def until_met(self, size: int) -> None:
        async with asyncio.timeout(READY_S):
            while len(self._live()) < size:
                await self.gossip.changed.wait(0.05)

    def _live(self) -> list[Record]:
        return list(self.gossip.view.members(0, asyncio.get_running_loop().time()))

    def owns(self) -> None:
        shards = self.exchanges.ownership.placement(0).owned_by(self.gossip.own.peer_id)
        for j in shards:
            self.replica.optimizer.create(j)
        self.exchanges.states.restored(shards)

    async def tell(self) -> None:
        """A round has been opened: as a peer does then, which wakes its feeder."""
        await self.replica.measure_digests()
        self.gossip.update(
            round=self.replica.round,
            holds=self.exchanges.states.holds(),
            digests=self.replica.digests,
            urgent=True,
        )

    async def opened(self) -> None:
        """What a peer does then beside the first passes."""
        await self.exchanges.follow_owners()

    async def until_all_opened(self, size: int) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                live = self._live()
                if len(live) == size and all(m.round == self.replica.round for m in live):
                    return
                await self.gossip.changed.wait(0.05)

    def computed(self) -> None:
        """Passes have added a gradient."""
        vectors = self.stage.vectors.present
        vectors.adding.copy_(self._gradient)
        vectors.mark_changed()

    async def end_round(self) -> None:
        replica, r = self.replica, self.replica.round
        await replica.transitions.close_round()
        await self._updates.make(r, NUM_TOKENS)
        await replica.transitions.open_round(r + 1, is_whole=True)
        self._updates.finish_round(r)
        await self.tell()
        await replica.device.run(FORWARD, self._until_computed)

    def _until_computed(self) -> None:
        if self.stage.layers.device.type == "cuda":
            torch.cuda.synchronize(self.stage.layers.device)

    async def close(self) -> None:
        await self.exchanges.close()
        await self.transport.close()
        await self.replica.device.close()
        await self.replica.worker.close()


@contextlib.asynccontextmanager
async def swarm_of(way: Way) -> Any:
    hub, spec, tasks = MemoryHub(), way.spec(), Tasks("benchmark")
    members = [Member(hub, spec, rank, way) for rank in range(way.replicas)]
    for member in members:
        tasks.start(member.gossip.run())
        for other in members[:1]:
            if other is not member:
                there = f"/p2p/{other.transport.peer_id}"
                await member.gossip.reconcile(await member.transport.dial(there))
    for member in members:
        await member.until_met(way.replicas)
    for member in members:
        member.owns()
    try:
        yield members
    finally:
        await tasks.close()
        for member in members:
            await member.close()


@dataclass(slots=True)
class Ends:
    """Of rounds."""

    num_parameters: int = 0
    num_shards: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of this process, on all cores."""
    worker_s: Counter[str] = field(default_factory=Counter)
    """What the workers were at, all rounds together."""


async def ends_of(way: Way, rounds: int) -> Ends:
    """Of so many rounds."""
    found = Ends()
    async with swarm_of(way) as members:
        await asyncio.gather(*(m.tell() for m in members))
        await asyncio.gather(*(m.opened() for m in members))
        spare_old_objects()  # as a peer does
        for turn in range(WARM_ROUNDS + rounds):
            await asyncio.gather(*(m.until_all_opened(way.replicas) for m in members))
            for member in members:
                member.computed()
                member.worker.seconds.clear()
            began, began_cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(m.end_round() for m in members))
            if turn >= WARM_ROUNDS:
                found.seconds.append(time.perf_counter() - began)
                found.cpu_s.append(time.process_time() - began_cpu)
                for member in members:
                    found.worker_s.update(member.worker.seconds)
            await asyncio.gather(*(m.opened() for m in members))
        alike = {m.replica.digests for m in members}
        assert len(alike) == 1, "replicas of one stage have other parameters"
        found.num_parameters = members[0].stage.num_parameters
        found.num_shards = members[0].replica.num_shards
    return found


# ---- what must be moved ------------------------------------------------------------------------


def memory_speed(device: str) -> float:
    """Bytes read and written a second, by copies of a vector on all threads."""
    where = "cpu" if device == APART else device
    source = torch.ones(SPEED_BYTES // 4, device=where)
    target = torch.zeros_like(source)
    best = 0.0
    for _ in range(SPEED_REPEAT):
        began = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        best = max(best, 2 * SPEED_BYTES / (time.perf_counter() - began))
    return best


def least_bytes(way: Way) -> float:
    """A parameter, of all replicas together."""
    names = update_codec(way.codec)
    own = float(4 * (2 + 1) + 2 * 4 * 3)  # the gradient; parameters and moments
    if way.codec != NONE:
        own += 2 * 2 + 2 * 4  # what coding has lost of contributions, and of results
    n = way.replicas
    if n == 1:
        return own
    owners = min(2, n)
    coded = sum(row_bytes(c, 1 << 20) / (1 << 20) for c in (names.contributions, names.results))
    update = 4 * 3 + 4 * 2 + 2 * 4 * 2 * owners / n  # gradient, parameters, moments
    return n * (update + (12 if way.codec != NONE else 0)) + 2 * coded * (n - 1)


def report(way: Way, rounds: int, *, where: bool, speed: float) -> dict[str, Any]:
    found = asyncio.run(ends_of(way, rounds))
    size, median = found.num_parameters, statistics.median(found.seconds)
    num_shards = found.num_shards
    cpu_s, least_s = statistics.median(found.cpu_s), least_bytes(way) * size / speed
    cells = (
        f"{size / 1e6:.1f} M",
        way.replicas,
        way.codec,
        way.device,
        num_shards,
        f"{median:.3f}",
        f"{min(found.seconds):.3f}",
        f"{cpu_s:.3f}",
        f"{1e9 * median / size:.1f}",
        f"{least_s:.3f}",
        f"{median / least_s:.1f}",
    )
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    worker_s = {name: s / rounds for name, s in found.worker_s.most_common()}
    if where:
        for name, seconds in worker_s.items():
            print(f"    {1e9 * seconds / size:6.2f} ns a parameter  {name}", flush=True)
    return {
        "parameters": size,
        "replicas": way.replicas,
        "codec": way.codec,
        "device": way.device,
        "shards": num_shards,
        "seconds": median,
        "best_seconds": min(found.seconds),
        "cpu_s": cpu_s,
        "bytes_s": least_s,
        "worker_s": worker_s,
    }


def ways(options: argparse.Namespace) -> Iterator[Way]:
    for layers in options.layers or (3, 12):
        for replicas in options.replicas or (1, 2):
            for codec in options.codec or (NONE, "int8"):
                for shard in options.shard or (0,):
                    is_there = options.optimizer_memory == "device"
                    at = options.device, is_there
                    yield Way(layers, replicas, codec, *at, options.width, shard)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, action="append", help="of the model; repeatable")
    parser.add_argument("--replicas", type=int, action="append", help="repeatable")
    parser.add_argument("--codec", action="append", help="of [sync]; repeatable")
    parser.add_argument("--width", type=int, choices=FEED_FORWARD, default=512)
    parser.add_argument("--shard", type=int, action="append", help="parameters; repeatable")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or apart")
    parser.add_argument("--optimizer-memory", choices=("device", "host"), default="device")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    set_num_threads(options.threads)
    speed = memory_speed(options.device)
    print(f"memory: {speed / 1e9:.1f} GB/s read and written, {options.threads} threads\n")
    print(
        "| parameters | replicas | codec | device | shards | s | best | CPU | ns/parameter "
        "| bytes | ratio |"
    )
    print("|" + "---|" * 11, flush=True)
    rows = [report(way, options.rounds, where=options.where, speed=speed) for way in ways(options)]
    if options.json:
        options.json.write_text(json.dumps({"bytes_per_s": speed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
