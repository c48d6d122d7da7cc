"""What one hostile machine does to an honest swarm of real processes, over libp2p on loopback.

    python -m benchmarks.hostile                         # all kinds of attack, one after the other
    python -m benchmarks.hostile --only feeders --only ballots [--seconds 10] [--share 0.25]
    python -m benchmarks.hostile --only drawn-17         # the attacker of a seed (tests/hostile)

Four peers train a tiny Llama in two stages. Printed are rounds a second of the slowest of them, as
the peers' own records say: before an attack, during it, after the attacker has gone, and while a
*control* burns as much CPU as the attacker did, and attacks nobody. An attack costs what `during`
lacks of `control`: beside a busy machine, only the ratio counts. The attacker is a process with
libp2p daemons of its own; it sleeps as soon as all of them together have used more than `--share`
of a core. `memory`: of its own, of the peer that grew most during the attack, in MB before it, and
by how much.

The attacks are those of `tests/hostile`, which meet a larger swarm in virtual time there. An open
run is attacked: who is refused by a closed one does less. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from swarmnet.identity import Identity
from swarmnet.protocol.membership.records import DIGEST_BYTES, Record
from swarmnet.runtime.joining.find import fetch_run
from swarmnet.runtime.net import KeySigner, open_net
from swarmnet.spec import RunSpec
from swarmnet.training.byte_tokenizer import byte_tokenizer_files
from swarmnet.transport.base import Transport
from swarmnet.wire import Array
from tests.hostile import attacks
from tests.hostile.attacker import Attacker, Name
from tests.hostile.drawing import Truth
from tests.hostile.drawn import Drawn, draw
from tests.processes.running import Command, Machine, machine, tiny_run

NUM_STAGES, NUM_PEERS = 2, 4
ROUNDS = 1_000_000
WARM_ROUNDS = 20
DAEMONS = 4
"""Names of the attacker that can be called; all further ones are keys, of which it only tells."""
SETTLES_S, LOOK_S, HEAR_S = 3.0, 0.02, 0.2
LONGEST_SLEEP_S = 0.5
CHILD_LIMIT_S, HEAR_LIMIT_S = 180.0, 120.0
CONTROL = "control"
DRAWN = "drawn-"
MB = 1e6

Kind = Callable[[RunSpec, int], attacks.Attack]
"""Of a run whose stages have so many shards."""


def false_step(spec: RunSpec) -> Array:
    """A gradient of a shard that nobody has computed."""
    num = spec.sync.shard_parameters
    return Array("float32", (num,), b"\0\0\x80\x3f" * num)


def past_the_end(spec: RunSpec, shards: int) -> attacks.Attack:
    """Of the largest file of the run."""
    file = max(spec.files.values(), key=lambda f: f.size)
    return attacks.past_the_end(file.sha256, file.size)


def infers(spec: RunSpec, shards: int) -> attacks.Attack:
    """As many samples as a microbatch has."""
    length = spec.sequence_length
    tokens = Array("int32", (attacks.MICROBATCH, length), bytes(4 * attacks.MICROBATCH * length))
    return attacks.infers((tokens, tokens))


def others(spec: RunSpec, shards: int) -> attacks.Attack:
    """Parameters of its own, under twenty names."""
    step = false_step(spec)
    return attacks.have_others(20, [[step] * shards] * NUM_STAGES, 0)


def tied_spec(folder: Path) -> Path:
    """A run whose first and last stage share a matrix, and which has files that others may ask
    for."""
    path = tiny_run(folder, num_stages=NUM_STAGES, rounds=ROUNDS)
    for name, data in byte_tokenizer_files(64).items():
        (folder / name).write_bytes(data)
    text = path.read_text().replace('"bytes"', f'"{folder / "tokenizer.json"}"')
    sizes = 'kind = "transformers"\n[model.config]\nmodel_type = "llama"\n'
    text = text.replace('kind = "llama"\n', sizes)
    text = text.replace("[data]\n", "tie_word_embeddings = true\n[data]\nsequence_length = 16\n")
    path.write_text(text)
    return path


def own_data(spec: RunSpec) -> Callable[[int, int, int], tuple[Array, ...]]:
    """What looks like tokens, and like activations."""
    length, width = spec.model.max_position_embeddings, spec.model.hidden_size
    tokens = Array("int32", (attacks.MICROBATCH, length), bytes(4 * attacks.MICROBATCH * length))
    shape = (attacks.MICROBATCH, length, width)
    values = Array("float32", shape, bytes(4 * math.prod(shape)))

    def arrays(stage: int, r: int, the_id: int) -> tuple[Array, ...]:
        return (values if stage else tokens), tokens

    return arrays


KINDS: dict[str, Kind] = {
    "ahead": lambda spec, shards: attacks.lies(3, attacks.ahead),
    "nowhere": lambda spec, shards: attacks.lies(3, attacks.nowhere),
    "follows": lambda spec, shards: attacks.lies(3, attacks.follows),
    "observers": lambda spec, shards: attacks.observe,
    "feeders": lambda spec, shards: attacks.feed,
    "samples": lambda spec, shards: attacks.claims(shards, samples=1 << 61),
    "checkpoint": lambda spec, shards: attacks.offers_a_checkpoint(shards),
    "large-records": lambda spec, shards: attacks.tell_much,
    "false-signatures": lambda spec, shards: attacks.sign_falsely,
    "gossip": lambda spec, shards: attacks.asks_much(),
    "unread": lambda spec, shards: attacks.reads_nothing,
    "silent": lambda spec, shards: attacks.swallows(2, has=None, tells=0),
    "swallows": lambda spec, shards: attacks.swallows(2, has=True, tells=100),
    "slots": lambda spec, shards: attacks.takes_slots(own_data(spec)),
    "others-slots": lambda spec, shards: attacks.feeds_as_others(2, own_data(spec)),
    "norms": lambda spec, shards: attacks.says_huge_norms(4, shards),
    "ballots": lambda spec, shards: attacks.usurpers(4, shards, false_step(spec)),
    "tied": lambda spec, shards: attacks.pushes_tied(shards, false_step(spec)),
    "others": others,
    "files": past_the_end,
    "saved": lambda spec, shards: attacks.has_all_kept(),
    "infer": infers,
    "suspicions": lambda spec, shards: attacks.suspect_all,
}
"""By name."""


# ---- the attacker ------------------------------------------------------------------------------


class Borrowed:
    """The endpoint of a name without a daemon: others speak for it, and nobody can call it."""

    def __init__(self, peer_id: str, of: Transport) -> None:
        self.peer_id = peer_id
        self._of = of

    def addresses(self) -> list[str]:
        return [a.replace(self._of.peer_id, self.peer_id) for a in self._of.addresses()]

    def notify(self, *arguments: Any) -> None:
        self._of.notify(*arguments)

    async def call(self, *arguments: Any, **options: Any) -> Any:
        return await self._of.call(*arguments, **options)

    def handle(self, *arguments: Any, **options: Any) -> None:
        """Nobody calls it."""

    def guard(self, *arguments: Any) -> None:
        """Nor is there anything to guard."""

    def set_run(self, run_id: str) -> None:
        """It is told by whom it borrows of."""


class Network:
    """A `tests.hostile.attacker.Hub` on libp2p."""

    def __init__(self) -> None:
        self._opened: list[Transport] = []
        self._free: list[Transport] = []
        self._keys: dict[str, Identity] = {}

    async def open(self, num: int, victims: Sequence[str]) -> RunSpec:
        """So many daemons, each connected to all victims (addresses), whose run is returned."""
        for _ in range(num):
            key = Identity.generate()
            net = await open_net("p2pd", key, host="127.0.0.1", port=0, announce=())
            peer_ids = [await net.transport.dial(address) for address in victims]
            self._keys[key.peer_id] = key
            self._opened.append(net.transport)
        self._free = self._opened[:]
        return await fetch_run(self._opened[0], peer_ids[0])

    def transport(self, peer_id: str) -> Any:
        if self._free:
            return self._free.pop(0)
        key = Identity.generate()
        self._keys[key.peer_id] = key
        return Borrowed(key.peer_id, self._opened[-1])

    def signer_of(self, peer_id: str) -> KeySigner:
        return KeySigner(self._keys[peer_id])

    def kill(self, peer_id: str) -> None:
        """All end at once, with `close`."""

    async def close(self) -> None:
        await asyncio.gather(*(transport.close() for transport in self._opened))


class Onlooker:
    """What a name hears of the swarm: an `attacks.Seen`."""

    def __init__(self, name: Name, victims: Sequence[str]) -> None:
        self._name = name
        self._victims = victims
        self.records: dict[str, Record] = {}

    async def look(self) -> None:
        """Asks each peer for its own record."""
        for victim in self._victims:
            heard = await self._name.hear(victim)
            if victim in heard:
                self.records[victim] = heard[victim]

    async def follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(HEAR_S)

    def rounds(self) -> list[int]:
        return [record.round for record in self.records.values()]

    def stages(self) -> dict[str, int]:
        return {p: record.stage for p, record in self.records.items() if record.stage >= 0}


class Cap:
    """Keeps the CPU of this process and its daemons below a share of a core, by sleeping."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._began_s, self._began_cpu_s = time.monotonic(), self._cpu_s()

    def _cpu_s(self) -> float:
        return sum(t.user + t.system for t in (p.cpu_times() for p in self._family))

    def used_s(self) -> float:
        """CPU seconds since it was made."""
        return self._cpu_s() - self._began_cpu_s

    def rest(self) -> None:
        """Sleeps where more was used than is allowed by now."""
        allowed_s = self._share * (time.monotonic() - self._began_s)
        over_s = self.used_s() - allowed_s
        if over_s > 0:
            time.sleep(min(over_s / self._share, LONGEST_SLEEP_S))

    async def hold(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.rest()


def drawn(seed: int, victims: Sequence[str], seen: Onlooker, spec: RunSpec) -> attacks.Attack:
    """The attacker of a seed, under as many names as can be called."""
    plan = draw(seed, NUM_STAGES)
    plan = replace(plan, num_names=min(plan.num_names, DAEMONS), stays_s=math.inf)
    records = list(seen.records.values())

    async def attack(attacker: Attacker, swarm: Any) -> None:
        truth = Truth(
            spec.run_id,
            "",
            tuple(victims),
            NUM_STAGES,
            max(len(r.digests) for r in records) // DIGEST_BYTES,
            attacks.NUM_SLOTS,
            attacks.MICROBATCH,
            max(swarm.rounds()),
            0,
            records[0].history,
            {r.peer_id: r.incarnation for r in records},
        )
        await Drawn(plan, attacker, truth).run()

    return attack


async def attack(kind: str, victims: Sequence[str], cap: Callable[[], Cap]) -> None:
    """The child: says that it is ready, and attacks until it is told to end."""
    network = Network()
    spec = await network.open(DAEMONS + 1, victims)
    peer_ids = [address.rpartition("/p2p/")[2] for address in victims]
    attacker = Attacker(network, spec.run_id, peer_ids, random.Random(0), network.signer_of)
    eyes = Name(network, "", spec.run_id, signer_of=network.signer_of)
    seen = Onlooker(eyes, peer_ids)
    async with asyncio.timeout(HEAR_LIMIT_S):
        while len(seen.records) < len(victims):
            await seen.look()
    shards = max(len(r.digests) for r in seen.records.values()) // DIGEST_BYTES
    seed = kind.removeprefix(DRAWN)
    chosen = drawn(int(seed), peer_ids, seen, spec) if seed != kind else KINDS[kind](spec, shards)
    await begun()
    limit = cap()

    async def go() -> None:
        await chosen(attacker, seen)

    tasks = [asyncio.create_task(work) for work in (seen.follow(), limit.hold(), go())]
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    failed = [e for e in await asyncio.gather(*tasks, return_exceptions=True) if e is not None]
    used_s = limit.used_s()
    await network.close()
    print(json.dumps({"cpu_s": used_s}), flush=True)
    for e in failed:
        if not isinstance(e, asyncio.CancelledError):
            raise e


async def begun() -> None:
    """The parent has read that this process is ready, and says when to begin."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def burn(cap: Callable[[], Cap]) -> None:
    """The control: work for nobody, until it is told to end."""
    await begun()
    limit, end = cap(), asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not end.done():
        until = time.monotonic() + LOOK_S
        while time.monotonic() < until:
            random.random()
        limit.rest()
        await asyncio.sleep(0)
    print(json.dumps({"cpu_s": limit.used_s()}), flush=True)


# ---- the swarm ---------------------------------------------------------------------------------


class Child:
    """An attacker or a control."""

    def __init__(self, kind: str, share: float, victims: Sequence[str]) -> None:
        words = ["-m", "benchmarks.hostile", "--as", kind, "--share", str(share)]
        words += [word for address in victims for word in ("--victim", address)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=pipe, stdout=pipe, text=True
        )

    async def _line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(CHILD_LIMIT_S):
            return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    async def ready(self) -> None:
        """Waits until it could begin."""
        if (said := await self._line()) != "ready":
            raise SystemExit(f"the attacker did not begin: {said}")

    def tell(self) -> None:
        """To begin; then, to end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    async def ended(self) -> float:
        """CPU seconds that it took."""
        said = await self._line()
        await asyncio.to_thread(self._process.wait, CHILD_LIMIT_S)
        if self._process.returncode or not said:
            raise SystemExit(f"the attacker failed: {said}")
        return float(json.loads(said)["cpu_s"])

    def kill(self) -> None:
        if self._process.poll() is None:
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
            self._process.kill()
            self._process.wait()


@dataclass
class Honest:
    """The peers, and who looks at them."""

    peers: list[Command]
    seen: Onlooker

    @property
    def victims(self) -> list[str]:
        return [peer.address for peer in self.peers]

    async def rounds_per_s(self, seconds: float) -> float:
        """Of the slowest peer, by its own records."""
        first, began_s = await self._look()
        await asyncio.sleep(seconds)
        last, ended_s = await self._look()
        return min(last[p] - first[p] for p in first) / (ended_s - began_s)

    async def _look(self) -> tuple[dict[str, int], float]:
        for peer in self.peers:
            if peer.process.poll() is not None:
                raise SystemExit(peer.describe())
        self.seen.records.clear()
        async with asyncio.timeout(HEAR_LIMIT_S):
            while len(self.seen.records) < len(self.peers):
                await self.seen.look()
        return {p: r.round for p, r in self.seen.records.items()}, time.monotonic()

    def memory(self) -> list[float]:
        """MB that each peer has to itself, its daemon included."""
        found = []
        for peer in self.peers:
            process = psutil.Process(peer.pid)
            family = [process, *process.children(recursive=True)]
            found.append(sum(p.memory_full_info().uss for p in family) / MB)
        return found


async def met(honest: Honest, kind: str, seconds: float, share: float) -> str:
    """One row of the table."""

    async def beside(kind: str, share: float) -> tuple[float, float, float]:
        """Rounds a second before and meanwhile, and the share of a core that it took."""
        child = Child(kind, share, honest.victims)
        try:
            await child.ready()
            await asyncio.sleep(SETTLES_S)
            before = await honest.rounds_per_s(seconds)
            child.tell()
            began_s = time.monotonic()
            during = await honest.rounds_per_s(seconds)
            took_s = time.monotonic() - began_s
            child.tell()
            return before, during, await child.ended() / took_s
        finally:
            child.kill()

    had = honest.memory()
    before, during, used = await beside(kind, share)
    grown, most = max((now - then, then) for now, then in zip(honest.memory(), had, strict=True))
    await asyncio.sleep(SETTLES_S)
    after, control, burnt = await beside(CONTROL, max(used, 0.01))
    rates = f"{before:.2f} | {during:.2f} | {after:.2f} | {control:.2f} | {during / control:.2f}"
    return f"| {kind} | {rates} | {used:.2f}, {burnt:.2f} | {most:.0f} {grown:+.0f} |"


async def meet(kinds: Sequence[str], seconds: float, share: float, on: Machine) -> None:
    spec_path = tied_spec(on.folder)
    joiners = [["--stage", str(i % NUM_STAGES)] for i in range(1, NUM_PEERS)]
    peers = await asyncio.to_thread(on.start_swarm, spec_path, joiners)
    network = Network()
    spec = await network.open(1, [peer.address for peer in peers])
    eyes = Name(network, "", spec.run_id, signer_of=network.signer_of)
    honest = Honest(peers, Onlooker(eyes, [peer.peer_id for peer in peers]))
    try:
        await asyncio.to_thread(on.until_all_are_in, peers, WARM_ROUNDS)
        print("| attack | before | during | after | control | during/control | ", end="")
        print("of a core: attacker, control | memory, MB |")
        print("|" + "---|" * 8, flush=True)
        for kind in kinds:
            print(await met(honest, kind, seconds, share), flush=True)
    finally:
        await network.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help=f"{', '.join(KINDS)} or {DRAWN}SEED")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument("--share", type=float, default=0.25, help="of a core, for the attacker")
    parser.add_argument("--as", dest="kind", help=argparse.SUPPRESS)
    parser.add_argument("--victim", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind == CONTROL:
        asyncio.run(burn(lambda: Cap(options.share)))
    elif options.kind:
        asyncio.run(attack(options.kind, options.victim, lambda: Cap(options.share)))
    else:
        chosen = options.only or list(KINDS)
        for kind in chosen:
            if kind not in KINDS and not kind.removeprefix(DRAWN).isdecimal():
                parser.error(f"there is no attack {kind}")
        with machine() as on:
            asyncio.run(meet(chosen, options.seconds, options.share, on))


if __name__ == "__main__":
    main()
