"""Stand-ins: a child process that is no peer, and an observer that saw a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmnet.causes import Failures
from swarmnet.errors import SwarmnetError
from swarmnet.protocol.membership.records import ACTIVE, HeldOut, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.options import TransportName
from swarmnet.spec import RunSpec
from tests.protocol.making import counted

FAKE_PEER = """
import json, os, pathlib, signal, sys, time
mode, arguments = sys.argv[1], sys.argv[2:]
def after(name):
    return arguments[arguments.index(name) + 1]
ready = pathlib.Path(after("--ready-file"))
ready.with_suffix(".args").write_text(json.dumps(arguments))
state = pathlib.Path(after("--state-dir"))
state.mkdir(exist_ok=mode == "again")
if mode == "again":
    with (state / "starts").open("a") as starts:
        starts.write("x")
first = "--spec" in arguments
if mode == "refuse" and first:
    print("a log line")
    sys.exit("swarmnet: port 1 is taken; choose another --port")
if mode == "crash" and first:
    raise ZeroDivisionError
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif mode == "saves":
    def save(*_):
        time.sleep(1)
        saved = pathlib.Path(after("--state-dir"), "checkpoints")
        saved.mkdir()
        (saved / "x").touch()
        sys.exit(0)
    signal.signal(signal.SIGINT, save)
elif mode == "unsaved":
    signal.signal(signal.SIGINT, lambda *_: sys.exit("swarmnet: stage 0 ends unsaved"))
else:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
beside = ready.with_suffix(".new")
address = {"address": "/fake/p2p/first", "peer_id": "first", "pid": os.getpid()}
beside.write_text(json.dumps(address))
beside.replace(ready)
if mode == "one-dies" and not first or mode == "all-die":
    print("the last thing that I saw")
    sys.exit(3)
while True:
    time.sleep(1)
"""


def fake_command(folder: Path, mode: str) -> tuple[str, ...]:
    """The command of a child process that behaves as `mode` says."""
    import sys

    script = folder / "fake_peer.py"
    script.write_text(FAKE_PEER)
    return (sys.executable, str(script), mode)


def run_records(spec: RunSpec, round_index: int, version: int) -> list[Record]:
    """One feeding replica a stage, at the beginning of a round."""
    batch = spec.pipeline.global_batch
    num_slots = batch // spec.pipeline.microbatch
    counts = tuple(
        counted(r, num_slots, num_slots, True, batch * 10, batch * 10 * (5.0 - r))
        for r in range(max(0, round_index - 4), round_index)
    )
    if round_index < spec.optimizer.rounds:
        counts = (*counts[-3:], counted(round_index, launched=num_slots))
    return [
        Record(
            f"peer-at-stage-{stage}",
            spec.run_id,
            1,
            version,
            state=ACTIVE,
            stage=stage,
            round=round_index,
            counts=counts if stage == 0 else (),
            has_data=stage == 0,
            held_out=HeldOut(round_index, 5.0, 8.0 - round_index) if stage == 0 else None,
            totals={"sent_bytes": 1000 * round_index},
        )
        for stage in range(spec.pipeline.num_stages)
    ]


class FakeObserver:
    """Sees a round more at every wait, up to `last_round`."""

    def __init__(self, spec: RunSpec, *, last_round: int, sample: bytes | None = b"f():") -> None:
        self.spec = spec
        self.view = View("observer")
        self.closed = False
        self._last_round = last_round
        self._sample = sample
        self._round = 0
        self.version = 0

    def _see(self) -> None:
        now = asyncio.get_running_loop().time()
        self.version += 1
        for record in run_records(self.spec, self._round, self.version):
            self.view.merge(record, now)

    async def join(self, addresses: Sequence[str], transport: TransportName) -> FakeObserver:
        assert list(addresses) == ["/fake/p2p/first"]
        self._see()
        return self

    async def wait_news(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self._round = min(self._round + 1, self._last_round)
        self._see()

    async def generate(
        self, prompt: str, num_tokens: int, seconds: float, failures: Failures | None = None
    ) -> str:
        if self._sample is None:
            raise SwarmnetError("nobody serves stage 1")
        return self._sample[:num_tokens].decode()

    async def close(self) -> None:
        self.closed = True


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for what another process is about to do."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the other process sets no event
            await asyncio.sleep(0.02)
