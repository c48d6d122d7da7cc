"""What stays of peers that have gone in the network daemon of one that stays.

    python benchmarks/daemon.py --newcomers 200 [--without-config] [--environment GOGC=50]

One peer's daemon (hivemind's p2pd), with a node of the DHT, stays. Newcomers come one after the
other, each with a daemon of its own: they dial it, call it a few times, join the DHT, store a
record and look for others, and leave. Every `--every` newcomers a line says of the daemon that
stays:

  memory      of its own (`RssAnon`), MB
  heap        objects in it, MB, those that nobody uses any more among them
  free        of its heap, and not yet given back to the system, MB
  goal        size at which Go collects the heap next, MB
  goroutines, files, connections

The first and the last lines come twice, the second time after a collection was asked for: then
`heap` is what is in use. `--without-config`: without `p2pd.CONFIG`, so that the daemon relays.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from swarmnet.identity import Identity  # noqa: E402
from swarmnet.transport.base import Request  # noqa: E402
from swarmnet.transport.channel import ChannelTransport  # noqa: E402
from swarmnet.transport.libp2p.p2pd import P2pdCarrier  # noqa: E402
from swarmnet.wire import Message  # noqa: E402

CALLS = 5
RECORD_BYTES, EXPIRY_S = 600, 60.0
NEWCOMER_S = 60.0
ANSWER_S = 20.0


class Profiled(P2pdCarrier):
    """Its daemon says how its memory is used, at a port of this machine."""

    def __init__(self, key: Identity, environment: dict[str, str], *, without_config: bool) -> None:
        super().__init__(key)
        self._environment = {**self._environment, **environment}
        self._without_config = without_config
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.profile_port: int = free.getsockname()[1]

    def _arguments(self, control: Path) -> list[str]:
        ours = super()._arguments(control)
        if self._without_config:
            ours = [a for a in ours if not a.startswith("-f=")]
        return [*ours, "-pprof=1", f"-pprofPort={self.profile_port}"]

    def profile(self, path: str) -> str:
        """Blocks."""
        address = f"http://localhost:{self.profile_port}/debug/pprof/{path}"
        with urllib.request.urlopen(address, timeout=ANSWER_S) as answer:
            return str(answer.read().decode(errors="replace"))


async def opened(carrier: P2pdCarrier, key: Identity) -> ChannelTransport:
    """A transport that answers calls."""
    transport = ChannelTransport(carrier, identity=key)
    await transport.start()
    transport.set_run("benchmark")

    async def answer(request: Request) -> Message:
        return Message()

    transport.handle("answer", answer)
    return transport


async def node_of(carrier: P2pdCarrier, initial: list[str]) -> Any:
    """Of the DHT."""
    from hivemind.dht.node import DHTNode

    return await DHTNode.create(
        p2p=carrier.p2p,
        initial_peers=initial,
        ensure_bootstrap_success=False,
        num_workers=2,
        strict=False,
    )


async def visit(address: str) -> None:
    """A newcomer, from its start to its end."""
    from hivemind.utils import get_dht_time

    key = Identity.generate()
    carrier = P2pdCarrier(key)
    transport = await opened(carrier, key)
    try:
        async with asyncio.timeout(NEWCOMER_S):
            peer = await transport.dial(address)
            for _ in range(CALLS):
                await transport.call(peer, "answer", Message(), timeout_s=ANSWER_S)
            node = await node_of(carrier, [address])
            expiry = get_dht_time() + EXPIRY_S
            record = os.urandom(RECORD_BYTES)
            await node.store("peers", record, expiry, subkey=transport.peer_id)
            await node.get("peers", latest=True)
            await node.shutdown()
    finally:
        await transport.close()


def own_memory(pid: int) -> float:
    """MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(n.split()[1]) for n in lines if n.startswith("RssAnon:")) / 1e6


async def tell(carrier: Profiled, told: str, *, collects: bool) -> None:
    """A line about the daemon that stays."""
    assert carrier.daemon_pid is not None
    process = psutil.Process(carrier.daemon_pid)
    memory = own_memory(process.pid)
    heap = await asyncio.to_thread(carrier.profile, f"heap?debug=1{'&gc=1' if collects else ''}")
    bytes_of = {n: int(v) for n, v in re.findall(r"^# (\w+) = (\d+)$", heap, re.M)}
    running = (await asyncio.to_thread(carrier.profile, "goroutine?debug=1")).split("\n")[0]
    idle = bytes_of["HeapIdle"] - bytes_of["HeapReleased"]
    sizes = (memory, *(n / 1e6 for n in (bytes_of["HeapAlloc"], idle, bytes_of["NextGC"])))
    connections = len(await carrier.p2p.list_peers())
    counts = (running.rpartition(" ")[2], process.num_fds(), connections)
    cells = [told, *(f"{s:.1f}" for s in sizes), *map(str, counts)]
    print("| " + " | ".join(cells) + " |", flush=True)


async def run(options: argparse.Namespace) -> None:
    key = Identity.generate()
    given = dict(word.split("=", 1) for word in options.environment)
    carrier = Profiled(key, given, without_config=options.without_config)
    lasting = await opened(carrier, key)
    node = await node_of(carrier, [])
    print("| newcomers | memory | heap | free | goal | goroutines | files | connections |")
    print("|---" * 8 + "|", flush=True)
    for n in range(options.newcomers + 1):
        if n:
            await visit(lasting.addresses()[0])
        is_last = n == options.newcomers
        if n % options.every == 0 or is_last:
            await tell(carrier, str(n), collects=False)
        if n in (0, options.every) or is_last:
            await tell(carrier, f"{n}, collected", collects=True)
    await node.shutdown()
    await lasting.close()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--newcomers", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--without-config", action="store_true")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
