"""Speed of an update: swarmnet's sharded one against what others do with the same gradients.

    python benchmarks/averaging.py [--peers 2 --peers 4] [--repeat 5] [--json FILE]
    python benchmarks/averaging.py --households [--repeat 5]

N processes on this machine, one torch thread each, about 64 MB of fp32 gradients (a small Llama of
one stage). All start when the last one has its gradient, and the clock stops when the last one has
the next round's parameters in place:

  gloo            torch.distributed all_reduce, then fused AdamW over everything at everybody
  hivemind        DecentralizedAverager: from `step` to the end, and without the matchmaking;
                  no optimizer step
  swarmnet        the update of `swarm.update.exchanges` with real gossip, p2pd and AdamW on shards,
                  R owners a shard, over direct connections or over libp2p alone; 64 shards as a
                run has that does not say, which suit dozens of replicas, or 16 large ones

Seconds are medians over the rounds. CPU seconds (user and system, daemons included, of all
processes) are per GB of gradients averaged (N times the model). Bytes sent are per peer, over the
size of the gradient; 2 (N - 1) / N is the least that can be (ring all-reduce). Backups whose
machines make other bits than the primary's cost (R - 1) / N more.

Whether the phases of an update overlap: a shard is being *reduced* from its first contribution of
another peer, complete at the primary, to the sum; *stepped* until the result is there; *gathered*
until the last replica has it. Printed are the lengths of the three phases over all shards, and
how much of the time from the first to the last of these moments had two or three under way.

With `--households` there are two houses of four, over direct connections: first without a key, then
with one for each house. What goes from a peer of one house to one of the other crosses an uplink.
Peers have the same ids both times, so the same owners have the same shards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from transport import cpu_s, family, free_port

SPEC = """
name = "averaging benchmark"
[model]
kind = "llama"
hidden_size = 512
num_hidden_layers = 5
num_attention_heads = 8
num_key_value_heads = 8
intermediate_size = 1380
vocab_size = 256
max_position_embeddings = 64
[data]
paths = ["python-stdlib"]
tokenizer = "bytes"
[optimizer]
learning_rate = 1e-3
rounds = 1000
grad_clip_norm = {clip}
[pipeline]
num_stages = 1
global_batch = 8
microbatch = 1
[sync]
replication = {replication}
aggregation = "mean"
shard_parameters = {shard}
"""
LARGE_SHARD = 1 << 20
"""Parameters; sixteen shards of 4 MB."""
NUM_HOUSES, HOUSE = 2, 4
"""Households, and the peers of each."""
ALONE, TOGETHER = "without households", "with a key for each house"
NUM_TOKENS = 1000
WARM_ROUNDS = 2
READY_S = 60.0
CHILD_TIMEOUT_S = 180
MIN_MATCHMAKING_S = 0.5
"""hivemind's; with the group's size known it begins when all are there, so this is an upper bound
on what looking for peers adds."""


def say(**values: Any) -> None:
    """To the parent: one line."""
    print(json.dumps(values), flush=True)


def load(replication: int, clip: float, shard: int = 0) -> Any:
    """The spec, from a temporary file as any run's. `shard`: parameters of one; 0: as many shards
    as a run has that does not say (64)."""
    import tempfile

    from swarmnet.spec import load_spec

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(SPEC.format(replication=replication, clip=clip, shard=shard))
        file.flush()
        return load_spec(Path(file.name))


def num_parameters() -> int:
    return int(load(1, 0.0).model.num_parameters)


# ---- (a) gloo ----------------------------------------------------------------------------------


def gloo(rank: int, size: int, port: int) -> None:
    """One rank: a line a round."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    torch.manual_seed(rank)
    parameters = torch.nn.Parameter(torch.zeros(num_parameters()))
    gradient = torch.randn_like(parameters)
    parameters.grad = gradient
    optimizer = torch.optim.AdamW([parameters], fused=True)
    say(ready=True)
    while sys.stdin.readline().strip() == "go":
        began = time.perf_counter()
        dist.all_reduce(gradient)
        gradient.div_(size * NUM_TOKENS)
        optimizer.step()
        say(seconds=time.perf_counter() - began)


# ---- (b) hivemind ------------------------------------------------------------------------------


def hivemind_averager(rank: int, size: int, where: list[str]) -> None:
    """One peer; forks, so nothing of torch has run in this process before."""
    import hivemind
    import torch
    from hivemind.averaging.control import AveragingStage

    dht = hivemind.DHT(initial_peers=where, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    say(where=[str(a) for a in dht.get_visible_maddrs()])
    generator = torch.Generator().manual_seed(rank)
    averager = hivemind.DecentralizedAverager(
        [torch.randn(num_parameters(), generator=generator)],
        dht,
        prefix="benchmark",
        target_group_size=size,
        min_group_size=size,
        min_matchmaking_time=MIN_MATCHMAKING_S,
        request_timeout=MIN_MATCHMAKING_S / 2,
        start=True,
    )
    say(ready=True)
    while sys.stdin.readline().strip() == "go":
        began = time.perf_counter()
        control = averager.step(wait=False, require_trigger=True, timeout=READY_S)
        while control.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
            if control.done():
                break
            time.sleep(0.001)
        matched = time.perf_counter()
        control.allow_allreduce()
        control.result(READY_S)
        ended = time.perf_counter()
        say(seconds=ended - began, without_matchmaking=ended - matched)
    averager.shutdown()
    dht.shutdown()


# ---- (c) swarmnet ------------------------------------------------------------------------------


class Moments:
    """When things happened to the shards of an update, by a clock that all processes share."""

    def __init__(self, exchanges: Any, stage: Any) -> None:
        self.came: dict[int, float] = {}
        self.summed: dict[int, float] = {}
        self.stepped: dict[int, float] = {}
        self.put: dict[int, float] = {}
        work, service = exchanges.work, exchanges._service  # noqa: SLF001  timed from outside
        check, total, step = service._gradients_of, work.total, work.step  # noqa: SLF001
        put = stage.stage_parameters

        def _gradients_of(shards: Any, *contributions: Any) -> Any:
            for j in shards:
                self.came.setdefault(j, time.perf_counter())
            return check(shards, *contributions)

        async def timed_total(exchange: int, shard: int, parts: Any, **options: Any) -> Any:
            result = await total(exchange, shard, parts, **options)
            self.summed[shard] = time.perf_counter()
            return result

        async def timed_step(exchange: int, shard: int, *arguments: Any) -> Any:
            result = await step(exchange, shard, *arguments)
            self.stepped[shard] = time.perf_counter()
            return result

        def stage_parameters(shard_index: int, values: Any) -> None:
            put(shard_index, values)
            self.put[shard_index] = time.perf_counter()

        service._gradients_of = _gradients_of  # noqa: SLF001  likewise
        work.total, work.step = timed_total, timed_step
        stage.stage_parameters = stage_parameters

    def told(self) -> dict[str, Any]:
        """Of one update; forgets it."""
        own = {j: (self.came[j], self.summed[j], self.stepped[j]) for j in self.stepped}
        told = {"own": own, "put": dict(self.put)}
        for times in (self.came, self.summed, self.stepped, self.put):
            times.clear()
        return told


def overlap(told: list[dict[str, Any]]) -> dict[str, float]:
    """Of one update, from what its peers say of their shards; in parts of its length."""
    put = [t["put"] for t in told]
    phases: list[list[tuple[float, float]]] = [[], [], []]
    for peer in told:
        for j, (came, summed, stepped) in peer["own"].items():
            gathered = max(p[j] for p in put)
            for phase, interval in zip(
                phases, ((came, summed), (summed, stepped), (stepped, gathered)), strict=True
            ):
                phase.append(interval)
    ends = [(min(a for a, _ in p), max(b for _, b in p)) for p in phases]
    begin, end = min(a for a, _ in ends), max(b for _, b in ends)
    turns = sorted(
        (t, k, change)
        for k, phase in enumerate(phases)
        for a, b in phase
        for t, change in ((a, 1), (b, -1))
    )
    open_, at, several = [0, 0, 0], begin, [0.0] * 4
    for t, k, change in turns:
        several[sum(n > 0 for n in open_)] += t - at
        open_[k] += change
        at = t
    length = end - begin
    return {
        **{
            name: (b - a) / length
            for name, (a, b) in zip(("reduce", "step", "gather"), ends, strict=True)
        },
        "two": (several[2] + several[3]) / length,
        "three": several[3] / length,
    }


class Uplink:
    """Counts what this process sends to some peers. To be made before there is a channel."""

    def __init__(self, others: set[str]) -> None:
        from swarmnet.transport.calls.writer import Writer

        self._others = others
        self._writers: list[Any] = []
        begin = Writer.__init__

        def begun(writer: Writer, *arguments: Any, **options: Any) -> None:
            begin(writer, *arguments, **options)
            self._writers.append(writer)

        Writer.__init__ = begun  # type: ignore[method-assign]

    @property
    def sent_bytes(self) -> int:
        """So far, frame headers included, closed channels too."""
        return sum(
            w._written_bytes  # noqa: SLF001  counted from outside
            for w in self._writers
            if w._remote in self._others  # noqa: SLF001  likewise
        )


def house_of(rank: int) -> int:
    return rank // HOUSE


def key_of(kind: int, index: int) -> Any:
    """A key that is the same in every run. `kind`: 0 of peers, 1 of houses."""
    from swarmnet.identity import Identity

    return Identity(bytes([kind, index]) * 16)


async def swarmnet(rank: int, where: list[str], options: dict[str, Any]) -> None:
    """One peer with a stage, without microbatches."""
    import torch

    from swarmnet.household import household_of
    from swarmnet.identity import Identity
    from swarmnet.protocol.audit import Conclusions
    from swarmnet.protocol.membership.records import ACTIVE, Record
    from swarmnet.protocol.membership.view import View
    from swarmnet.protocol.update.replica_phase import Phase, State
    from swarmnet.runtime.compose import run_settings
    from swarmnet.runtime.net import KeySigner, open_net
    from swarmnet.runtime.run import spare_old_objects
    from swarmnet.swarm.membership.gossip import Gossip
    from swarmnet.swarm.replica.replica import Replica
    from swarmnet.swarm.settings import WaitLimits
    from swarmnet.swarm.tasks import Tasks
    from swarmnet.swarm.update.exchanges import Exchanges
    from swarmnet.swarm.update.handover import Handover
    from swarmnet.swarm.update.rounds import ZeroUpdates
    from swarmnet.training.device import DeviceThread, WorkerThread
    from swarmnet.training.optimizer.local_steps import build_optimizer
    from swarmnet.training.stage import build_stage
    from swarmnet.transport.direct import DirectListener

    torch.set_num_threads(1)
    spec = load(options["replication"], options["clip"], options["shard"])
    size = options["peers"]
    key = key_of(0, rank) if options["houses"] else Identity.generate()
    far = {key_of(0, i).peer_id for i in range(size) if house_of(i) != house_of(rank)}
    uplink = Uplink(far if options["houses"] else set())
    has_key = options["houses"] == TOGETHER
    net = await open_net(
        "p2pd",
        key,
        host="127.0.0.1",
        port=0,
        announce=(),
        direct=DirectListener("127.0.0.1", 0) if options["direct"] else None,
    )
    transport = net.transport
    transport.set_run(spec.run_id)
    stage = build_stage(spec, 0)
    gradient = torch.randn(num_parameters(), generator=torch.Generator().manual_seed(rank))
    optimizer, start = build_optimizer(spec, stage), Phase(State.OPEN, 0)
    replica = Replica(stage, optimizer, DeviceThread(), WorkerThread(), start)
    own = Record(
        key.peer_id,
        spec.run_id,
        int(time.time() * 1000),
        1,
        state=ACTIVE,
        stage=0,
        addresses=tuple(transport.addresses()),
        household=household_of(key_of(1, house_of(rank)), key.peer_id) if has_key else None,
    )
    gossip = Gossip(transport, View(key.peer_id), KeySigner(key), own, random.Random(key.peer_id))
    gossip.serves(replica)
    settings = run_settings(spec)
    exchanges = Exchanges(
        transport, gossip, settings, WaitLimits(), replica, Conclusions(), random.Random(rank)
    )
    handover = Handover(gossip, settings, replica, exchanges, random.Random())
    updates = ZeroUpdates(replica, exchanges, handover)
    moments = Moments(exchanges, stage)
    tasks = Tasks("benchmark")
    tasks.start(gossip.run())
    say(where=transport.addresses()[:1])
    for address in where:
        await gossip.reconcile(await transport.dial(address))

    loop = asyncio.get_running_loop()

    async def until_all_at(r: int) -> None:
        """Everybody is known to be in this round, and to hold its shards."""
        async with asyncio.timeout(READY_S):
            while True:
                live = gossip.view.members(0, loop.time())
                if len(live) == size and all(m.round == r and m.digests for m in live):
                    return
                await gossip.changed.wait(0.05)

    async with asyncio.timeout(READY_S):
        while len(gossip.view.members(0, loop.time())) < size:
            await gossip.changed.wait(0.05)
    shards = exchanges.ownership.placement(0).owned_by(key.peer_id)
    for j in shards:
        replica.optimizer.create(j)
    exchanges.states.restored(shards)

    async def opened() -> None:
        await replica.measure_digests()
        gossip.update(
            round=replica.round,
            holds=exchanges.states.holds(),
            digests=replica.digests,
            urgent=True,
        )
        await exchanges.follow_owners()

    await opened()
    spare_old_objects()  # as a peer does
    sent = direct = crossed = 0
    while True:
        await until_all_at(replica.round)  # who has its own parameters may have some to send still
        stage.vectors.present.gradients.copy_(gradient)
        sent = sum(transport.traffic.sent_bytes.values()) - sent
        direct = transport.traffic.direct_sent_bytes - direct
        crossed = uplink.sent_bytes - crossed
        say(ready=True, sent_bytes=sent, direct_bytes=direct, crossed_bytes=crossed)
        crossed = uplink.sent_bytes
        sent = sum(transport.traffic.sent_bytes.values())
        direct = transport.traffic.direct_sent_bytes
        if (await loop.run_in_executor(None, sys.stdin.readline)).strip() != "go":
            break
        began, r = time.perf_counter(), replica.round
        await replica.transitions.close_round()
        await updates.make(r, NUM_TOKENS)
        await replica.transitions.open_round(r + 1, is_whole=True)
        exchanges.finish_round(r)
        seconds = time.perf_counter() - began
        say(seconds=seconds, moments=moments.told())
        await opened()
    await tasks.close()
    await exchanges.close()
    await transport.close()
    await replica.device.close()
    await replica.worker.close()


# ---- the parent --------------------------------------------------------------------------------


class Child:
    """A process that says lines of JSON and is told when to go."""

    def __init__(self, kind: str, rank: int, options: dict[str, Any], where: Any) -> None:
        arguments = ["--child", kind, str(rank), json.dumps(options), json.dumps(where)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GOLOG_LOG_LEVEL": "error"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def hear(self, key: str) -> dict[str, Any]:
        """The next line that has a key; others are not for us."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and key in (values := json.loads(line)):
                return dict(values)
        raise SystemExit(f"a child ended: {self.process.args}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(kind: str, options: dict[str, Any], rounds: int) -> dict[str, float]:
    """One way, N fresh processes."""
    size = options["peers"]
    children: list[Child] = []
    where: Any = free_port() if kind == "gloo" else []
    try:
        for rank in range(size):
            children.append(Child(kind, rank, options, where))
            if kind != "gloo" and not where:
                where = children[0].hear("where")["where"]
        seconds, cpu, lines, sent = [], [], [], []
        model_bytes = 4 * num_parameters()
        for turn in range(WARM_ROUNDS + rounds):
            if turn == 0 or kind == "swarmnet":
                ready = [child.hear("ready") for child in children]
                sent += ready if turn > WARM_ROUNDS else []
            pids = [pid for child in children for pid in family(child.process.pid)]
            used, began = cpu_s(pids), time.perf_counter()
            for child in children:
                child.go()
            heard = [child.hear("seconds") for child in children]
            took = time.perf_counter() - began
            if turn >= WARM_ROUNDS:
                seconds.append(took)
                cpu.append((cpu_s(pids) - used) / (size * model_bytes / 1e9))
                lines += heard
        result = {
            "seconds": statistics.median(seconds),
            "best_seconds": min(seconds),
            "cpu_s_per_gb": statistics.median(cpu),
        }
        if kind == "hivemind":
            result["without_matchmaking"] = statistics.median(
                h["without_matchmaking"] for h in lines
            )
        if kind == "swarmnet":
            sent += [child.hear("ready") for child in children]
            sent_bytes = statistics.mean(h["sent_bytes"] for h in sent)
            result["sent_over_model"] = sent_bytes / model_bytes
            direct_bytes = statistics.mean(h["direct_bytes"] for h in sent)
            result["direct_part"] = direct_bytes / sent_bytes
            if options["houses"]:
                crossed_bytes = sum(h["crossed_bytes"] for h in sent) / len(seconds)
                result["crossed_over_model"] = crossed_bytes / model_bytes
            updates = [lines[i : i + size] for i in range(0, len(lines), size)]
            found = [overlap([h["moments"] for h in update]) for update in updates]
            result |= {name: statistics.median(f[name] for f in found) for name in found[0]}
        return result
    finally:
        for child in children:
            child.end()


def ways(clip: float) -> dict[str, tuple[str, dict[str, Any]]]:
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "gloo all_reduce + fused AdamW": ("gloo", {}),
        "hivemind DecentralizedAverager": ("hivemind", {}),
    }
    for replication in (1, 2):
        for name, direct in (("direct", True), ("libp2p", False)):
            options = {"replication": replication, "direct": direct, "clip": clip, "shard": 0}
            options |= {"houses": ""}
            row = f"swarmnet {name}, R = {replication}"
            found[row] = ("swarmnet", options)
            found[f"{row}, large shards"] = ("swarmnet", {**options, "shard": LARGE_SHARD})
    return found


def houses(clip: float) -> dict[str, tuple[str, dict[str, Any]]]:
    options = {"replication": 2, "direct": True, "clip": clip, "shard": 0}
    return {name: ("swarmnet", {**options, "houses": name}) for name in (ALONE, TOGETHER)}


def table_of_houses(results: dict[str, dict[str, float]]) -> str:
    """In Markdown."""
    lines = [
        f"{NUM_HOUSES} houses of {HOUSE} processes",
        "",
        "| | over all uplinks / gradient | sent by a process / gradient | s an update | best |",
        "|---|---|---|---|---|",
    ]
    for name, r in results.items():
        over = f"{r['crossed_over_model']:.2f}", f"{r['sent_over_model']:.2f}"
        cells = (name, *over, f"{r['seconds']:.3f}", f"{r['best_seconds']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    before, after = (results[name]["crossed_over_model"] for name in (ALONE, TOGETHER))
    return "\n".join([*lines, "", f"uplinks carry {after / before:.3f} of what they did"])


def table(size: int, results: dict[str, dict[str, float]]) -> str:
    """In Markdown."""
    lines = [
        f"{size} processes; the least that can be sent is {2 * (size - 1) / size:.2f}",
        "",
        "| way | s an update | best | CPU s/GB | sent / gradient |",
        "|---|---|---|---|---|",
    ]
    for name, r in results.items():
        seconds = f"{r['seconds']:.3f}"
        if "without_matchmaking" in r:
            seconds += f" ({r['without_matchmaking']:.3f} without matchmaking)"
        sent = f"{r['sent_over_model']:.2f}" if "sent_over_model" in r else "-"
        if r.get("direct_part"):
            sent += f" ({100 * r['direct_part']:.0f} % direct)"
        cells = (name, seconds, f"{r['best_seconds']:.3f}", f"{r['cpu_s_per_gb']:.1f}", sent)
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [
        f"{name}: reduce {100 * r['reduce']:.0f} %, step {100 * r['step']:.0f} %, gather "
        f"{100 * r['gather']:.0f} % of an update; two at once {100 * r['two']:.0f} %, all three "
        f"{100 * r['three']:.0f} %"
        for name, r in results.items()
        if "two" in r
    ]
    if "hivemind DecentralizedAverager" in results:
        base = results["hivemind DecentralizedAverager"]["seconds"]
        lines.append("")
        lines += [
            f"{name}: {base / r['seconds']:.2f} x hivemind's speed"
            for name, r in results.items()
            if name.startswith("swarmnet")
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=int, action="append")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that count")
    parser.add_argument("--clip", type=float, default=0.0, help="global clipping; 0: none")
    parser.add_argument("--only", action="append", help="ways whose name has this, or this")
    parser.add_argument("--households", action="store_true", help="two houses of four peers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, metavar=("KIND", "RANK", "OPTIONS", "WHERE"))
    options = parser.parse_args()
    if options.child:
        kind, rank, text, where = options.child
        values, where = json.loads(text), json.loads(where)
        if kind == "gloo":
            gloo(int(rank), values["peers"], where)
        elif kind == "hivemind":
            hivemind_averager(int(rank), values["peers"], where)
        else:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(swarmnet(int(rank), where, values))
        return
    if options.households and (options.only or options.peers):
        parser.error("--households is one table of eight peers, with neither --only nor --peers")
    everything = {}
    asked = houses if options.households else ways
    for size in [NUM_HOUSES * HOUSE] if options.households else options.peers or [2, 4]:
        results = {}
        for name, (kind, values) in asked(options.clip).items():
            if options.only and not any(part in name for part in options.only):
                continue
            print(f"{size} processes: {name}", file=sys.stderr, flush=True)
            results[name] = run(kind, {**values, "peers": size}, options.repeat)
            print(json.dumps(results[name]), file=sys.stderr, flush=True)
        text = table_of_houses(results) if options.households else table(size, results)
        print(text, "\n", flush=True)
        everything[size] = results
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
