"""Real `swarmnet` processes over real libp2p, on loopback, for tests.

Every process that is started here carries the test's own folder as its `TMPDIR`, and so does
whatever it starts: that is how leftovers are found, and how everything is ended, by pid.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarmnet.errors import SwarmnetError
from swarmnet.identity import Identity
from swarmnet.methods.state import FetchRequest
from swarmnet.protocol.membership.peer_ids import seat_id
from swarmnet.runtime.counted import COUNTED_FILE, read_counted
from swarmnet.runtime.joining.find import fetch_run
from swarmnet.runtime.joining.ready import Ready, read_ready_file
from swarmnet.runtime.net import open_net
from swarmnet.spec import RunSpec
from swarmnet.training.stage import build_stage
from swarmnet.transport.base import Transport
from swarmnet.wire import Message
from tests.processes.faults import may_begin
from tests.processes.prefork import Forked, Prefork

LOOK_S = 0.05
START_LIMIT_S = 180.0
RUN_LIMIT_S = 180.0
END_LIMIT_S = 90.0
"""Bounds of waits, generous: a machine may be busy. None is ever waited for in full on success."""
SWARMNET = (sys.executable, "-m", "peer")
"""A start of its own, as a person's. Without it a process is forked (`prefork`)."""
SPARING = ("--max-device-share", "20%")
"""For peers whose rounds only have to go on, beside what a test is about."""
FOLDER_PREFIX = "sn-"
_prefork: Prefork | None = None


def prefork() -> Prefork:
    """One for all tests of this process."""
    global _prefork
    if _prefork is None:
        _prefork = Prefork()
        atexit.register(_prefork.close)
    return _prefork


def tiny_run(
    folder: Path,
    *,
    num_stages: int = 2,
    rounds: int = 20,
    seed: int = 1,
    data: str | None = None,
    sync_mode: str = "zero",
) -> Path:
    """A run.toml of a Llama that computes in no time, on text that is made here. Its updates are
    compared with those of a plain loop, so nothing is coded: a number next to the middle of two
    codes becomes one or the other by the order in which the gradients before it were summed."""
    text = folder / "text.txt"
    rng = random.Random(0)
    text.write_bytes(bytes(rng.choice(b"abcdefgh \n") for _ in range(20_000)))
    spec = folder / f"run-{seed}.toml"
    spec.write_text(f"""
seed = {seed}
[model]
kind = "llama"
hidden_size = 32
num_hidden_layers = {max(3, num_stages)}
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 64
vocab_size = 256
max_position_embeddings = 16
[data]
paths = ["{data or text}"]
tokenizer = "bytes"
held_out_microbatches = 1
[optimizer]
learning_rate = 1e-3
warmup_rounds = 3
rounds = {rounds}
grad_clip_norm = 0.5
[pipeline]
num_stages = {num_stages}
global_batch = 32
microbatch = 4
codec = "none"
evaluate_every = 0
[sync]
mode = "{sync_mode}"
codec = "none"
local_steps = 5
shard_parameters = 4096
""")
    return spec


def processes_of(folder: Path) -> dict[int, str]:
    """Live processes whose `TMPDIR` is `folder`: command lines by pid."""
    mark = b"\0TMPDIR=" + str(folder).encode() + b"\0"
    found = prefork().living_in(folder) if _prefork is not None else {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in b"\0" + (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = line.decode(errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile
    return found


def children_of(pid: int) -> list[int]:
    """Pids of its children now."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def sockets_in(folder: Path) -> list[Path]:
    """Runtime folders and sockets below a `TMPDIR`."""
    return [p for p in folder.rglob("*") if p.is_socket() or p.name.startswith("swarmnet-")]


def _ends(lines: Sequence[str], count: int) -> list[str]:
    """So many of the first lines, and of the last."""
    if len(lines) <= 2 * count:
        return list(lines)
    return [*lines[:count], f"… {len(lines) - 2 * count} more lines …", *lines[-count:]]


@dataclass
class Command:
    """One `swarmnet` process."""

    name: str
    process: subprocess.Popen[bytes] | Forked
    folder: Path
    _told: list[dict[str, Any]] = field(default_factory=list)
    _read_to: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        """What it has printed."""
        return (self.folder / f"{self.name}.out").read_text(errors="replace")

    def errors(self) -> list[str]:
        """The lines of its stderr."""
        return (self.folder / f"{self.name}.err").read_text(errors="replace").splitlines()

    def describe(self) -> str:
        code = self.process.poll()
        said = [*_ends(self.output().splitlines(), 4), *_ends(self.errors(), 12)]
        lines = "\n  ".join(said)
        return f"{self.name} ({'alive' if code is None else f'exit code {code}'})\n  {lines}"

    def events(self, name: str) -> list[dict[str, Any]]:
        """Complete lines of its `--metrics` with this event."""
        path = self.folder / f"{self.name}.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_to)
                complete, newline, _ = file.read().rpartition(b"\n")
            self._told += map(json.loads, complete.splitlines())
            self._read_to += len(complete) + len(newline)
        return [e for e in self._told if e["event"] == name]

    def ready(self) -> Ready | None:
        return read_ready_file(self.folder / f"{self.name}.ready")

    @property
    def address(self) -> str:
        ready = self.ready()
        assert ready is not None, self.describe()
        return ready.address

    @property
    def peer_id(self) -> str:
        return self.address.rpartition("/p2p/")[2]

    @property
    def counted(self) -> Path:
        """Where it keeps, as a feeder, which microbatches counted."""
        return self.folder / self.name / COUNTED_FILE


def has_state(peer: Command) -> bool:
    """A living peer says with --debug that it has the optimizer state that it owns."""
    assert peer.process.poll() is None, peer.describe()
    return any("has the optimizer state" in line for line in peer.errors())


def serves(peer: Command) -> bool:
    """It says with --debug that it has the parameters of its stage."""
    return any("serving from round" in line for line in peer.errors())


@dataclass
class Machine:
    """The processes of one test. Nothing that it waits for is waited for without a bound."""

    folder: Path
    commands: list[Command] = field(default_factory=list)

    def start(
        self,
        name: str,
        *arguments: str,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: str = "",
    ) -> Command:
        """Starts `swarmnet ARGUMENTS`: with `command` as a start of its own, else forked.
        `before`: code that a forked one runs first."""
        environment = {
            **os.environ,
            **(environment or {}),
            "TMPDIR": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        process: subprocess.Popen[bytes] | Forked
        with (
            (self.folder / f"{name}.out").open("wb") as out,
            (self.folder / f"{name}.err").open("wb") as err,
        ):
            if command:
                process = subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )
            else:
                paths = (Path(out.name), Path(err.name))
                process = prefork().fork(arguments, environment, *paths, before)
        started = Command(name, process, self.folder)
        self.commands.append(started)
        return started

    def start_peer(
        self,
        name: str,
        *arguments: str,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: str = "",
    ) -> Command:
        """Starts `swarmnet peer` on loopback with a state folder, ready file and metrics."""
        return self.start(
            name,
            "peer",
            "--plain",
            "--host",
            "127.0.0.1",
            "--threads",
            "1",
            "--state-dir",
            str(self.folder / name),
            "--ready-file",
            str(self.folder / f"{name}.ready"),
            "--metrics",
            str(self.folder / f"{name}.jsonl"),
            *arguments,
            command=command,
            environment=environment,
            before=before,
        )

    def start_swarm(
        self,
        spec: Path,
        joiners: Sequence[Sequence[str]],
        kill_at: Mapping[int, str] | None = None,
        *,
        everywhere: Sequence[str] = (),
        together: bool = False,
    ) -> list[Command]:
        """A first peer and others that join it, with further arguments each. `kill_at`: the moments
        (`tests.processes.faults`) at which a peer kills itself, by its number (the first has 0), if
        it is the first to come to it. `everywhere`: arguments of all. `together`: the first round
        begins when all are replicas. They say what they do on their stderr."""
        more = ("--debug", *everywhere)
        arm = f"from tests.processes.faults import arm; arm({{!r}}, {str(self.folder)!r})"
        before = dict.fromkeys(range(1 + len(joiners)), self.hold(0) if together else "")
        for i, moments in (kill_at or {}).items():
            before[i] += arm.format(moments)
        first = self.start_peer(
            "peer-0", "--spec", str(spec), "--stage", "0", *more, before=before[0]
        )
        self.until_ready(first)
        data = str(self.folder / "text.txt")
        join = ("--join", first.address, "--data", data, *more)
        others = [
            self.start_peer(f"peer-{i}", *join, *extra, before=before[i])
            for i, extra in enumerate(joiners, start=1)
        ]
        self.until_ready(*others)
        if together:
            mode = tomllib.loads(spec.read_text())["sync"]["mode"]
            is_in = serves if mode == "gossip" else has_state  # which nobody shares there
            for peer in (first, *others):
                self.until(lambda p=peer: is_in(p))
            may_begin(self.folder, 0)
        return [first, *others]

    def hold(self, *rounds: int) -> str:
        """Code that a forked peer runs first: as feeder it begins these rounds when
        `faults.may_begin` says so, with this machine's folder."""
        call = f"hold_feeding({str(self.folder)!r}, {rounds})"
        return f"from tests.processes.faults import hold_feeding; {call}\n"

    def until_ready(self, *peers: Command) -> None:
        """The peers listen; fails at once where one has ended."""

        def listen() -> bool:
            for peer in peers:
                assert peer.process.poll() is None, peer.describe()
            return all(peer.ready() is not None for peer in peers)

        self.until(listen, START_LIMIT_S)

    def until(self, condition: Callable[[], object], limit_s: float = RUN_LIMIT_S) -> None:
        """Waits for a condition; fails with what every process said where it does not come."""
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {limit_s:.0f} s:\n{self.describe()}")
            time.sleep(LOOK_S)

    def until_round(self, peer: Command, number: int) -> None:
        """A peer has told that so many rounds are over (short ones may go untold)."""

        def over() -> bool:
            assert peer.process.poll() is None, peer.describe()
            return any(event["round"] + 1 >= number for event in peer.events("round"))

        self.until(over)

    def until_all_are_in(self, peers: Sequence[Command], number: int) -> None:
        """Each of them has told that so many rounds are over, and is a replica that has the
        optimizer state it owns (as it says with --debug): who only listens, or is joining, tells
        the rounds of the others."""

        for peer in peers:
            self.until_round(peer, number)
            self.until(lambda p=peer: has_state(p))

    def wait(self, command: Command, limit_s: float = END_LIMIT_S) -> int:
        """The exit code of a command that is about to end."""
        self.until(lambda: command.process.poll() is not None, limit_s)
        code = command.process.returncode
        assert code is not None
        return code

    def interrupt(self, command: Command) -> None:
        """Ctrl-C."""
        command.process.send_signal(signal.SIGINT)

    def kill(self, command: Command) -> None:
        """kill -9."""
        command.process.kill()
        command.process.wait()

    def describe(self) -> str:
        return "\n".join(c.describe() for c in self.commands)

    def end(self) -> None:
        """Ends whatever is left, by pid."""
        for pid in processes_of(self.folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for command in self.commands:
            command.process.kill()
            command.process.wait()


@contextmanager
def machine() -> Iterator[Machine]:
    """A folder of its own with a short name (sockets in it have paths of at most 107 bytes);
    at the end every process is gone, whatever happened."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    running = Machine(folder)
    try:
        yield running
    finally:
        running.end()
        shutil.rmtree(folder, ignore_errors=True)


# ---- looking in from outside ----------------------------------------------------------------


@asynccontextmanager
async def stranger(spec: RunSpec | None = None) -> AsyncIterator[Transport]:
    """A transport in this process that speaks to peers; says that it belongs to the run of
    `spec`."""
    net = await open_net("p2pd", Identity.generate(), host="127.0.0.1", port=0, announce=())
    if spec is not None:
        net.transport.set_run(spec.run_id)
    try:
        yield net.transport
    finally:
        await net.transport.close()


async def parameters_of(
    spec: RunSpec, addresses: Sequence[str], *, seats: Mapping[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """The model by name with which the peers at `addresses` ended the run, each of them asked
    for its stage (`seats`: which seat of a machine is asked, by its place in the list); asserts
    that the replicas of a stage have the same bits."""
    stages = [build_stage(spec, index) for index in range(spec.pipeline.num_stages)]
    flats: dict[int, torch.Tensor] = {}
    async with stranger(spec) as transport:
        for i, address in enumerate(addresses):
            peer_id = await transport.dial(address)
            assert (await fetch_run(transport, peer_id)).run_id == spec.run_id
            peer_id = seat_id(peer_id, (seats or {}).get(i, 0))
            index, flat = await _flat(transport, peer_id, spec, stages)
            assert torch.equal(flats.setdefault(index, flat), flat), "replicas differ"
    assert sorted(flats) == list(range(len(stages))), "a stage has no replica"
    return {
        r.name: flats[index][r.start : r.stop].view(r.shape)
        for index, stage in enumerate(stages)
        for r in stage.parameter_ranges
    }


async def _flat(
    transport: Transport, peer_id: str, spec: RunSpec, stages: Sequence[Any]
) -> tuple[int, torch.Tensor]:
    """A peer's stage and its parameters when the run was over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + START_LIMIT_S
    error: SwarmnetError | None = None
    while loop.time() < end:
        for index, stage in enumerate(stages):
            try:
                parts = []
                for shard in range(len(stage.shard_sizes)):
                    request = FetchRequest(spec.optimizer.rounds, index, shard)
                    reply = await transport.call(
                        peer_id, "fetch_parameters", Message(request), timeout_s=20.0
                    )
                    data = bytearray(reply.arrays[0].data)
                    parts.append(torch.frombuffer(data, dtype=torch.float32))
                return index, torch.cat(parts)
            except SwarmnetError as e:  # of the other stage, or not there yet
                error = e
        await asyncio.sleep(LOOK_S)
    raise AssertionError(f"{peer_id} gave no parameters: {error}")


def counted_by(peers: Sequence[Command]) -> dict[int, list[int]]:
    """Microbatch ids that each round counted, by the word of all feeders."""
    return read_counted([peer.counted for peer in peers if peer.counted.exists()])
