"""Whether processes that stay grow while others come and go, and while rounds pass.

    python benchmarks/soak.py --folder soak --rounds 10000 --joins 10000 --as-processes 300 \\
        --at-once 10 --phases 10
    python benchmarks/soak.py --folder soak --show           # the tables again, and soak.svg
    python benchmarks/soak.py --folder soak --show --write   # both to benchmarks/results/

The first command is a piece, and may be given again: it goes on with the same run, from where the
last piece ended, and adds to the same samples. `--peers` lasting peers train the tiniest model over
real libp2p on loopback. Newcomers join them, serve, and leave: one after the other in one process,
of which a new one begins every so many, and some as processes of their own (`--as-processes`, of
all joins). Every second one leaves at once, without handing over; the last one of a process, and
every second one that is a process, dies without a word. A newcomer mostly waits, so `--at-once` of
them come next to each other. They come in so many `--phases`; after each one its share of
`--rounds` passes without newcomers.

Every `--every` seconds there is a sample of each process that stays: the lasting peers, their
network daemons, and this process, which watches the run as `swarmnet local` does. A sample has the
memory that is its own (`RssAnon`), open files and threads; of a peer and of this process also
tasks, the records in the view, peers of which addresses are known, and all entries of all tables;
of a peer, the bytes of its state folder and of its log (who watches writes nothing).

Of each piece the samples of the beginning are left out (`--warm-up` newcomers, after which tables
with room for 1,024 are full; in a piece without newcomers, as many rounds). What a process then
grows by for each round and for each newcomer is fitted to both at once, with a level of its own for
each piece, and for each daemon that takes another's place. Where both come at one pace the two
slopes stand for each other, and no verdict is given: phases tell them apart, or a piece without
newcomers (`--joins 0`). Samples next to each
other are alike, so the fit is to means of blocks of samples. A slope comes with its interval of
95 %. It holds (`yes`) where the upper end is below the bound, 100 bytes a round (1 MB in 10,000)
and 1 kB a newcomer; it does not (`NO`) where the lower end is above; else there are too few
samples. Linux only. Give it time on a processor: a daemon that gets none for seconds is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from swarmnet.runtime.options import LOOPBACK, PeerOptions  # noqa: E402
from swarmnet.system import end_with_parent  # noqa: E402
from tests.swarm.tables import table_sizes  # noqa: E402

RESULTS, PLOT = HERE.parent / "results", "soak.svg"
SAMPLES, PROGRESS, SPEC = "samples.jsonl", "progress.json", "run.toml"
IN_ONE_PROCESS = 25
"""Newcomers, until another process takes over: what is left of them there is not measured."""
JOIN_S, LEAVE_S = 600.0, 60.0
LOOK_S = 0.2
BLOCKS = 40
"""Of samples, in all pieces together."""
AT_ONE_PACE = 0.97
"""A correlation of rounds and newcomers above which their slopes are not told apart."""
ROUND_BYTES, JOIN_BYTES = 100.0, 1000.0
"""Bounds of the slopes."""
PAGE = """# What grows in processes that stay

`python benchmarks/soak.py --folder soak`, then `--show --write`, on two x86-64 cores with other
work. The first lines of the program say what it does and how a slope is found; samples of the
first {warm_up} newcomers or rounds of a piece are left out. A process remembers peers for minutes
after they have gone, and members of its run until the tables of decision 0033 are full: what fewer
newcomers leave than these have room for is not what thousands do.

{tables}
![memory](soak.svg)
"""
NUMBERS = ("mb", "files", "threads", "tasks", "view", "addresses", "entries", "disk_mb")
RUN = """
name = "soak"
seed = 1
[model]
kind = "llama"
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = 16
vocab_size = 256
max_position_embeddings = 16
[data]
paths = ["{text}"]
tokenizer = "bytes"
held_out_microbatches = 1
[optimizer]
learning_rate = 1e-3
rounds = 1_000_000
[pipeline]
num_stages = 2
global_batch = 8
microbatch = 2
[sync]
shard_parameters = 4096
"""


# ---- the roles of other processes ------------------------------------------------------------


def told_of(root: object, view: Any) -> dict[str, Any]:
    """What only a process itself can count."""
    sizes = table_sizes(root)
    return {
        "tasks": len(asyncio.all_tasks()),
        "view": len(view),
        "addresses": sizes["DialBook._told"] + sizes["KnownPeers._addresses"],
        "entries": sizes.total(),
        "tables": dict(sizes.most_common(60)),
    }


async def lasting(name: str, folder: Path, join: Sequence[str], every_s: float) -> None:
    """One peer that stays, as `swarmnet peer` runs it; ends with SIGINT."""
    from peer.commands.peer import extras
    from peer.options import OutputOptions
    from swarmnet.runtime.run import RunningPeer, run_peer

    async def tell(running: RunningPeer) -> Coroutine[Any, Any, None]:
        async def work() -> None:
            while True:
                found = told_of(running, running.view)
                found["round"] = running.peer.replica.round if running.peer.replica else 0
                write(folder / f"{name}.inside.json", found)
                await asyncio.sleep(every_s)

        return work()

    options = PeerOptions(
        spec=None if join else folder / SPEC,
        join=tuple(join),
        data=(str(folder / "text.txt"),),
        host=LOOPBACK,
        state_dir=state_dir(folder, name),
        ready_file=folder / f"{name}.json",
        threads=1,
    )
    await run_peer(options, [*extras(OutputOptions(plain=True), None, None), tell])


async def joiners(name: str, folder: Path, address: str, number: int, stay_s: float) -> None:
    """So many peers, one after the other, which join, serve and leave."""
    from swarmnet.protocol.membership.records import ACTIVE
    from swarmnet.runtime.run import RunningPeer, run_peer

    for done in range(1, number + 1):
        began: asyncio.Future[RunningPeer] = asyncio.get_running_loop().create_future()

        async def keep(
            running: RunningPeer, began: asyncio.Future[RunningPeer] = began
        ) -> Coroutine[Any, Any, None]:
            began.set_result(running)
            return asyncio.sleep(JOIN_S + LEAVE_S)

        with tempfile.TemporaryDirectory() as state:
            options = PeerOptions(
                join=(address,),
                feed=False,
                fetch_data=False,
                host=LOOPBACK,
                state_dir=Path(state),
                threads=1,
                checkpoint_every=0,
                patience_s=JOIN_S,
                is_quiet=True,
            )
            life = asyncio.create_task(run_peer(options, [keep]))
            async with asyncio.timeout(JOIN_S):
                await asyncio.wait((life, began), return_when=asyncio.FIRST_COMPLETED)
                if life.done():
                    life.result()
                gossip = began.result().peer.gossip
                while gossip.own.state != ACTIVE:
                    await gossip.changed.wait(LOOK_S)
            await asyncio.sleep(stay_s)
            if done == number:  # without a word; its daemon ends with it
                write(joined_file(folder, name), {"done": done})
                shutil.rmtree(state)
                os._exit(0)
            life.cancel()
            if done % 2:
                await asyncio.sleep(0)
                life.cancel()  # a second time: at once
            await asyncio.wait((life,), timeout=LEAVE_S)
        write(joined_file(folder, name), {"done": done})


def joined_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.joined.json"


def state_dir(folder: Path, name: str) -> Path:
    path = folder / "state" / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, values: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values))
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Nothing where there is nothing yet."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}


# ---- a piece ---------------------------------------------------------------------------------


@dataclass
class Progress:
    """Of all pieces so far."""

    piece: int = 0
    joins: int = 0
    as_processes: int = 0


@dataclass
class Left:
    """Newcomers that are still to come, for all streams of them."""

    number: int

    def take(self, most: int) -> int:
        some = min(most, self.number)
        self.number -= some
        return some


@dataclass
class Piece:
    """One start of this program."""

    folder: Path
    options: argparse.Namespace
    before: Progress
    joins: int = 0
    as_processes: int = 0
    children: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    first_round: int | None = None

    async def start(self, name: str, *words: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=log, stderr=log, start_new_session=True
            )
        self.children[name] = child
        return child

    async def role(self, name: str, role: str, *words: str) -> asyncio.subprocess.Process:
        common = (str(HERE), "--folder", str(self.folder), "--parent", str(os.getpid()))
        return await self.start(name, *common, "--role", role, "--name", name, *words)

    async def start_lasting(self) -> str:
        """Returns the address of the first."""
        address = ""
        for n in range(self.options.peers):
            name = f"peer-{n + 1}"
            for left in (f"{name}.json", f"{name}.inside.json"):
                (self.folder / left).unlink(missing_ok=True)
            join = ("--join", address) if address else ()
            child = await self.role(name, "lasting", "--every", str(self.options.every), *join)
            while not (ready := read(self.folder / f"{name}.json")):
                if child.returncode is not None:
                    raise SystemExit(f"{name} ended; see {self.folder / name}.log")
                await asyncio.sleep(LOOK_S)
            address = address or ready["addresses"][0]
        return address

    async def newcomers(self, address: str, left: Left, stream: int) -> None:
        """One after the other, until none is left."""
        options, name = self.options, f"joiners-{stream}"
        while (some := left.take(IN_ONE_PROCESS)) > 0:
            came = await self.in_one_process(address, name, some)
            left.number += some - came
            while self.as_processes * options.joins < options.as_processes * self.joins:
                self.as_processes += 1
                await self.as_process(address, f"newcomer-{stream}", self.as_processes % 2 == 0)
                left.take(1)

    async def in_one_process(self, address: str, name: str, some: int) -> int:
        """Returns how many came."""
        file, seen, is_over = joined_file(self.folder, name), 0, False
        file.unlink(missing_ok=True)
        words = ("--join", address, "--joins", str(some), "--stay", str(self.options.stay))
        child = await self.role(name, "joiners", *words)
        while not is_over:
            is_over = child.returncode is not None
            done = read(file).get("done", 0)
            self.joins, seen = self.joins + done - seen, done
            await asyncio.sleep(LOOK_S)
        if not seen:
            raise SystemExit(f"nobody joins; see {self.folder / name}.log")
        return seen

    async def as_process(self, address: str, name: str, is_killed: bool) -> None:
        ready = self.folder / f"{name}.json"
        ready.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as state:
            ties = ("--parent-pid", str(os.getpid()), "--ready-file", str(ready))
            words = ("--join", address, "--state-dir", state, "--host", LOOPBACK, "--plain")
            more = ("--no-feed", "--threads", "1", "--checkpoint-every", "0")
            child = await self.start(name, "-m", "peer", "peer", *ties, *words, *more)
            for _ in range(int(JOIN_S / LOOK_S)):
                if read(ready) or child.returncode is not None:
                    break
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(self.options.stay)
            if child.returncode is None:
                child.send_signal(signal.SIGKILL if is_killed else signal.SIGINT)
            await asyncio.wait_for(child.wait(), LEAVE_S)
        self.joins += 1

    async def watch(self, observer: Any, monitor: Any) -> None:
        """What `swarmnet local` does, and a sample now and then, until cancelled."""
        loop, sampled_at = asyncio.get_running_loop(), float("-inf")
        with (self.folder / SAMPLES).open("a") as file:
            while True:
                monitor.look(observer.view, loop.time(), time.time())
                if loop.time() - sampled_at >= self.options.every:
                    sampled_at = loop.time()
                    watcher = told_of((observer, monitor), observer.view)
                    for sample in await asyncio.to_thread(self.samples, watcher):
                        file.write(json.dumps(sample) + "\n")
                    file.flush()
                await observer.wait_news(0.5)
                await asyncio.sleep(0.1)

    def samples(self, watcher: dict[str, Any]) -> list[dict[str, Any]]:
        found = [("watcher", psutil.Process(), watcher)]
        found += [
            (name, psutil.Process(child.pid), read(self.folder / f"{name}.inside.json"))
            for name, child in self.children.items()
            if name.startswith("peer-") and child.returncode is None
        ]
        told = [inside.get("round", 0) for _, _, inside in found]
        if self.first_round is None and max(told):
            self.first_round = max(told)
        about = {
            "piece": self.before.piece + 1,
            "t": round(time.time(), 1),
            "round": max(told),
            "joins": self.before.joins + self.joins,
        }
        rows = []
        for name, process, inside in found:
            own = [(name, process), *((f"{name} daemon", p) for p in daemons_of(process))]
            for who, one in own:
                try:
                    row = {"name": who, "pid": one.pid, **about, **measured(one)}
                except (psutil.NoSuchProcess, FileNotFoundError):  # it has just ended
                    continue
                if one is process:
                    row |= inside
                    if name != "watcher":
                        log = (self.folder / f"{name}.log").stat().st_size
                        row["disk_mb"] = (log + folder_bytes(state_dir(self.folder, name))) / 1e6
                rows.append(row | {"round": about["round"]})
        return rows

    @property
    def rounds(self) -> int:
        newest = max(read(p).get("round", 0) for p in self.folder.glob("peer-*.inside.json"))
        return newest - (self.first_round or newest)

    async def work(self, address: str) -> None:
        options = self.options
        for phase in range(1, options.phases + 1):
            share = phase / options.phases
            left = Left(round(share * options.joins) - self.joins)
            async with asyncio.TaskGroup() as group:
                for n in range(options.at_once):
                    group.create_task(self.newcomers(address, left, n + 1))
            before = self.rounds
            while True:
                await asyncio.sleep(options.every)
                if self.rounds - before >= options.rounds / options.phases:
                    break

    async def run(self) -> None:
        from swarmnet.runtime.observing import join_run, monitor_of

        address = await self.start_lasting()
        observer = await join_run([address], "auto")
        watching = asyncio.create_task(self.watch(observer, monitor_of(observer.spec)))
        working = asyncio.create_task(self.work(address))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watching.result()  # which raises
            working.result()
        finally:
            working.cancel()
            done = Progress(
                self.before.piece + 1,
                self.before.joins + self.joins,
                self.before.as_processes + self.as_processes,
            )
            write(self.folder / PROGRESS, asdict(done))
            watching.cancel()
            await observer.close()
            living = [c for c in self.children.values() if c.returncode is None]
            for child in living:
                child.send_signal(signal.SIGINT)
            for child in living:
                try:
                    await asyncio.wait_for(child.wait(), LEAVE_S)
                except TimeoutError:
                    child.kill()


def daemons_of(process: psutil.Process) -> list[psutil.Process]:
    """Its own, not those of processes that it has started."""
    found = []
    for child in process.children():
        try:
            found += [child] if child.name() == "p2pd" else []
        except psutil.NoSuchProcess:
            continue
    return found


def measured(process: psutil.Process) -> dict[str, float]:
    """Of a process, by what the kernel says."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    anon = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return {"mb": anon * 1024 / 1e6, "files": process.num_fds(), "threads": process.num_threads()}


def folder_bytes(folder: Path) -> int:
    total = 0
    for at, _, names in os.walk(folder):  # which passes over folders that were just removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a checkpoint that was just removed
                total += os.stat(f"{at}/{name}").st_size
    return total


# ---- what it means ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """Bytes for each, with half the width of the interval of 95 %."""

    mean: float
    half: float
    is_its_own: bool
    """Not that of what came at the same pace."""

    def verdict(self, bound: float) -> str:
        if not self.is_its_own:
            return "not told apart"
        if self.mean + self.half < bound:
            return "yes"
        return "NO" if self.mean - self.half > bound else "too few samples"


def slopes(rows: Sequence[dict[str, Any]], warm_up: int) -> tuple[Slope, Slope] | None:
    """Of the memory of one process: for each round, and for each newcomer; None where there are
    too few samples after the warm-up."""
    kept: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for row in rows:
        life = kept.setdefault((row["piece"], row["pid"]), [])
        life.append((row["round"], row["joins"], 1e6 * row["mb"]))
    lives = []
    for life in kept.values():
        first_joins = life[0][1]
        number = 1 if life[-1][1] > first_joins else 0
        lives.append([x for x in life if x[number] - life[0][number] >= warm_up])
    size = max(1, sum(map(len, lives)) // BLOCKS)
    blocks = []
    for life in filter(None, lives):
        own = np.array(life)
        parts = np.array_split(own, max(1, len(own) // size))
        means = np.array([part.mean(axis=0) for part in parts])
        blocks.append(means - means.mean(axis=0))
    if not blocks:
        return None
    table = np.concatenate(blocks)
    free = len(table) - len(blocks) - 2
    if free < 3:
        return None
    x, y = table[:, :2], table[:, 2]
    inverse = np.linalg.pinv(x.T @ x)
    fit = inverse @ x.T @ y
    variance = float(((y - x @ fit) ** 2).sum()) / free
    wide = 1.96 * (1 + 2.4 / free) * np.sqrt(variance * np.diag(inverse))  # about Student's t
    lengths = np.sqrt((x**2).sum(axis=0))
    together = float(x[:, 0] @ x[:, 1]) / max(1.0, float(lengths.prod()))
    is_its_own = abs(together) < AT_ONE_PACE
    rounds, joins = (Slope(float(m), float(w), is_its_own) for m, w in zip(fit, wide, strict=True))
    return rounds, joins


def load(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Samples by process."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / SAMPLES).read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["name"], []).append(row)
    return found


def told(folder: Path, warm_up: int) -> str:
    """The tables."""
    lines: list[str] = []
    done, found = read(folder / PROGRESS), load(folder)
    rows = [row for own in found.values() for row in own]
    rounds = sum(
        max(r["round"] for r in rows if r["piece"] == p)
        - min(r["round"] for r in rows if r["piece"] == p)
        for p in {r["piece"] for r in rows}
    )
    lines.append(
        f"{done.get('piece', 0)} pieces, {rounds:,} rounds, {done.get('joins', 0):,} newcomers "
        f"({done.get('as_processes', 0)} as processes). Of each number the first and the last.\n"
    )
    lines.append("| process | " + " | ".join(n.replace("_mb", ", MB") for n in NUMBERS) + " |")
    lines.append("|---" * (len(NUMBERS) + 1) + "|")
    for name, own in found.items():
        lines.append(f"| {name} | " + " | ".join(first_and_last(own, n) for n in NUMBERS) + " |")
    lines.append("\n| process | bytes a round | below 100 | bytes a newcomer | below 1,000 |")
    lines.append("|---|---|---|---|---|")
    for name, own in found.items():
        both = slopes(own, warm_up)
        if both is None:
            lines.append(f"| {name} | | too few samples | | too few samples |")
            continue
        cells = [
            f"{s.mean:,.0f} ± {s.half:,.0f} | {s.verdict(bound)}"
            for s, bound in zip(both, (ROUND_BYTES, JOIN_BYTES))
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name, own in found.items():
        grown = grown_tables(own)
        if grown:
            lines.append(f"\n{name}, tables that grew most in the last piece: {grown}")
    return "\n".join(lines) + "\n"


def first_and_last(rows: Sequence[dict[str, Any]], number: str) -> str:
    found = [row[number] for row in rows if number in row]
    shown = [f"{n:,.1f}" if isinstance(n, float) else f"{n:,}" for n in found]
    return f"{shown[0]}, {shown[-1]}" if shown else ""


def grown_tables(rows: Sequence[dict[str, Any]]) -> str:
    last = [row for row in rows if row["piece"] == rows[-1]["piece"] and "tables" in row]
    if not last:
        return ""
    grown = Counter(last[-1]["tables"])
    grown.subtract(last[0]["tables"])
    return ", ".join(f"{name} {n:+,}" for name, n in grown.most_common(6) if n > 0)


def draw(folder: Path, plot: Path) -> None:
    """The memory of each process over newcomers, and over rounds."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "soak"
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    for name, rows in load(folder).items():
        for panel, key in zip(panels, ("joins", "round"), strict=True):
            line = None
            for piece in sorted({row["piece"] for row in rows}):
                own = [row for row in rows if row["piece"] == piece]
                xs, ys = [row[key] for row in own], [row["mb"] for row in own]
                color = None if line is None else line.get_color()
                (line,) = panel.plot(xs, ys, color=color, label=None if color else name)
    for panel, text in zip(panels, ("newcomers", "rounds"), strict=True):
        panel.set_xlabel(text)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("memory of its own, MB")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(plot, metadata={"Date": None})


# ---- the command -----------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """The run, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / SPEC).exists():
        return
    rng, text = random.Random(0), folder / "text.txt"
    text.write_bytes(bytes(rng.choice(b"abcdefgh \n") for _ in range(20_000)))
    (folder / SPEC).write_text(RUN.format(text=text))


def main() -> None:
    """A piece, and the table of all pieces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--joins", type=int, default=100)
    parser.add_argument("--as-processes", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--phases", type=int, default=1)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--stay", type=float, default=1.0)
    parser.add_argument("--warm-up", type=int, default=1500)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--role", choices=["", "lasting", "joiners"], default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--join", default="")
    parser.add_argument("--parent", type=int)
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = options.folder.resolve()
    if options.role:
        assert threading.current_thread() is threading.main_thread()
        end_with_parent(options.parent, signal.SIGKILL)
        join = [options.join] if options.join else []
        try:
            if options.role == "lasting":
                asyncio.run(lasting(options.name, folder, join, options.every))
            else:
                asyncio.run(
                    joiners(options.name, folder, options.join, options.joins, options.stay)
                )
        except (KeyboardInterrupt, asyncio.CancelledError):
            pass
        return
    if not options.show:
        prepare(folder)
        asyncio.run(Piece(folder, options, Progress(**read(folder / PROGRESS))).run())
    tables = told(folder, options.warm_up)
    print(tables, end="")
    draw(folder, folder / PLOT)
    if options.write:
        (RESULTS / "soak.md").write_text(PAGE.format(warm_up=options.warm_up, tables=tables))
        draw(folder, RESULTS / PLOT)


if __name__ == "__main__":
    main()
