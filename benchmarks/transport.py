"""Speed of the carriers: swarmnet's calls against what lies below them and what others do.

    python benchmarks/transport.py [--repeat 3] [--json FILE]

Two processes on this machine, one sends, the other answers each message with next to nothing:

  direct        swarmnet calls over the direct TLS 1.3 connection
  libp2p        swarmnet calls over a stream of hivemind's p2pd
  py-libp2p     swarmnet calls over a stream of py-libp2p; `py-libp2p direct`: its direct connection
  bare TLS      the connection under `direct`, with nothing but lengths on it
  bare stream   the p2pd stream under `libp2p`, likewise
  hivemind      its protobuf RPC: unary (refuses more than 4 MiB) and stream, 64 KB parts
  gloo          torch.distributed send and recv

MB/s (10^6) with a window of messages under way, the round trip of 1 KB (median), and CPU seconds
per GB of both sides, daemons included, at 16 MB. Each figure is the median of `--repeat` turns; the
carriers take turns, since the machine may not be quiet, and only ratios within one run say much.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
CPU_SIZE = "16 MB"
TOTAL_BYTES = {64 << 10: 128 << 20, 1 << 20: 256 << 20, 16 << 20: 512 << 20, 64 << 20: 768 << 20}
WINDOW = {64 << 10: 8, 1 << 20: 4, 16 << 20: 2, 64 << 20: 2}
"""Messages under way at a time."""
PINGS = 300
WARM_MESSAGES = 2
"""Times the window."""
CHILD_TIMEOUT_S = 300
UNARY_BYTES = 4 << 20
HIVEMIND_PART = 64 << 10
OURS = ("direct", "libp2p", "py-libp2p", "py-libp2p direct")
CARRIERS = (
    "direct",
    "libp2p",
    "py-libp2p",
    "py-libp2p direct",
    "bare TLS",
    "bare stream",
    "hivemind unary",
    "hivemind stream",
    "gloo",
)
Send = Callable[[int], Awaitable[None]]
"""Sends a message of a size and returns when it was answered."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def family(pid: int) -> list[int]:
    """A process and its children (daemons)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in family(int(child)))]


def spare_old_objects() -> None:
    """As a peer does, see `peer.loop`."""
    import gc

    gc.collect()
    gc.freeze()


async def measure(send: Send, server_pid: int, sizes: list[int]) -> dict[str, Any]:
    """What one carrier does, from the sender's side."""
    spare_old_objects()  # as a peer does
    pids = family(os.getpid()) + family(server_pid)
    result: dict[str, Any] = {"mb_per_s": {}}
    names = {size: name for name, size in SIZES.items()}
    for size in sizes:
        count, window = TOTAL_BYTES[size] // size, WINDOW[size]
        for _ in range(WARM_MESSAGES):
            await asyncio.gather(*(send(size) for _ in range(window)))
        began, cpu = time.perf_counter(), cpu_s(pids)
        left = iter(range(count))

        async def some(size: int = size, left: Any = left) -> None:
            for _ in left:
                await send(size)

        await asyncio.gather(*(some() for _ in range(window)))
        took = time.perf_counter() - began
        result["mb_per_s"][names[size]] = count * size / took / 1e6
        if names[size] == CPU_SIZE or size == sizes[-1] < SIZES[CPU_SIZE]:
            result["cpu_s_per_gb"] = (cpu_s(pids) - cpu) / (count * size / 1e9)
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await send(1 << 10)
        times.append(time.perf_counter() - began)
    result["rtt_ms"] = statistics.median(times) * 1e3
    return result


def payload(size: int) -> np.ndarray[Any, Any]:
    """Bytes that no layer can make shorter."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


# ---- swarmnet's calls --------------------------------------------------------------------------


async def open_swarmnet(name: str) -> Any:
    from swarmnet.identity import Identity
    from swarmnet.transport.channel import ChannelTransport
    from swarmnet.transport.direct import DirectListener
    from swarmnet.transport.libp2p.p2pd import P2pdCarrier

    key = Identity.generate()
    carrier: Any
    if name.startswith("py-libp2p"):
        from swarmnet.transport.libp2p.py_libp2p import PyLibp2pCarrier

        carrier = PyLibp2pCarrier(key)
    else:
        carrier = P2pdCarrier(key)
    direct = DirectListener("127.0.0.1", 0) if name.endswith("direct") else None
    transport = ChannelTransport(carrier, direct=direct)
    await transport.start()
    return transport


async def serve_swarmnet(name: str) -> tuple[Any, Callable[[], Awaitable[None]]]:
    from swarmnet.wire import Message

    transport = await open_swarmnet(name)

    async def take(request: Any) -> Message:
        return Message()

    transport.handle("take", take)
    return transport.addresses()[0], transport.close


async def send_swarmnet(name: str, address: str, pid: int) -> dict[str, Any]:
    from swarmnet.wire import Array, Message

    transport = await open_swarmnet(name)
    peer_id, is_direct = await transport.dial(address), name.endswith("direct")
    arrays = {n: Array("uint8", (n,), payload(n).data) for n in (1 << 10, *SIZES.values())}

    async def send(size: int) -> None:
        await transport.call(peer_id, "take", Message(None, (arrays[size],)), timeout_s=60)

    if is_direct:
        while not transport.traffic.direct_links:
            await send(max(SIZES.values()))
        before = transport.traffic.direct_sent_bytes
    transport_calls = await measure(send, pid, list(SIZES.values()))
    if is_direct:
        assert transport.traffic.direct_sent_bytes - before > sum(TOTAL_BYTES.values())
    await transport.close()
    return transport_calls


# ---- the same streams, bare --------------------------------------------------------------------


class BareServer(asyncio.BufferedProtocol):
    """Reads a size, then so many bytes into memory that is used again; answers with a byte."""

    def __init__(self, stream: Any) -> None:
        self.transport = stream.transport
        self.keep = stream.keep
        self.memory: dict[int, memoryview] = {}
        self.target = memoryview(bytearray(8))
        self.filled, self.is_head = 0, True
        self.transport.set_protocol(self)
        self.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.target[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        if self.filled < len(self.target):
            return
        self.filled = 0
        if self.is_head:
            size = int.from_bytes(self.target, "big")
            if size not in self.memory:
                self.memory[size] = memoryview(bytearray(size))
            self.target = self.memory[size]
        else:
            self.transport.write(b"a")
            self.target = memoryview(bytearray(8))
        self.is_head = not self.is_head


class BareClient(asyncio.Protocol):
    """Writes messages one after the other in parts, as much as the stream takes."""

    PART = 256 << 10

    def __init__(self, stream: Any) -> None:
        self.transport = stream.transport
        self.keep = stream.keep
        self.data = {n: payload(n).data for n in (1 << 10, *SIZES.values())}
        self.answers: deque[asyncio.Future[None]] = deque()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.turn = asyncio.Lock()
        self.transport.set_write_buffer_limits(high=1 << 20)
        self.transport.set_protocol(self)
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    def data_received(self, data: bytes) -> None:
        for _ in data:
            self.answers.popleft().set_result(None)

    async def send(self, size: int) -> None:
        answer = asyncio.get_running_loop().create_future()
        async with self.turn:
            self.answers.append(answer)
            self.transport.write(size.to_bytes(8, "big"))
            data = self.data[size]
            for start in range(0, size, self.PART):
                if not self.may_write.is_set():
                    await self.may_write.wait()
                self.transport.write(data[start : start + self.PART])
        await answer


async def serve_bare_stream() -> tuple[Any, Callable[[], Awaitable[None]]]:
    from swarmnet.identity import Identity
    from swarmnet.transport.libp2p.p2pd import P2pdCarrier

    carrier = P2pdCarrier(Identity.generate())
    await carrier.start(BareServer)
    return carrier.addresses()[0], carrier.close


async def send_bare_stream(address: str, pid: int) -> dict[str, Any]:
    from swarmnet.identity import Identity
    from swarmnet.transport.libp2p.p2pd import P2pdCarrier

    carrier = P2pdCarrier(Identity.generate())
    await carrier.start(BareServer)
    client = BareClient(await carrier.open(await carrier.connect(address)))
    result = await measure(client.send, pid, list(SIZES.values()))
    await carrier.close()
    return result


async def serve_bare_tls() -> tuple[Any, Callable[[], Awaitable[None]]]:
    from swarmnet.transport.direct import DirectListener
    from swarmnet.wire import pack

    listener = DirectListener("127.0.0.1", 0)
    await listener.start(BareServer)
    return pack(listener.ticket("client", ["/ip4/127.0.0.1/tcp/1"])).hex(), listener.close


async def send_bare_tls(ticket: str, pid: int) -> dict[str, Any]:
    from swarmnet.transport.direct import Ticket, client_context, dial_direct
    from swarmnet.wire import unpack

    parsed = unpack(bytes.fromhex(ticket), Ticket)
    client = BareClient(await dial_direct("server", parsed, client_context()))
    result = await measure(client.send, pid, list(SIZES.values()))
    client.transport.close()
    return result


# ---- hivemind's RPC ----------------------------------------------------------------------------


async def serve_hivemind() -> tuple[Any, Callable[[], Awaitable[None]]]:
    from hivemind.p2p import P2P
    from hivemind.proto import runtime_pb2 as pb

    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])

    async def unary(request: Any, context: Any) -> Any:
        return pb.ExpertResponse()

    async def stream(requests: Any, context: Any) -> Any:
        async for _ in requests:
            pass
        yield pb.ExpertResponse()

    await p2p.add_protobuf_handler("unary", unary, pb.ExpertRequest)
    await p2p.add_protobuf_handler(
        "stream", stream, pb.ExpertRequest, stream_input=True, stream_output=True
    )
    return str((await p2p.get_visible_maddrs())[0]), p2p.shutdown


async def send_hivemind(address: str, pid: int, is_unary: bool) -> dict[str, Any]:
    from hivemind.p2p import P2P, PeerID
    from hivemind.proto import runtime_pb2 as pb

    p2p = await P2P.create(initial_peers=[address], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    peer = PeerID.from_base58(address.rpartition("/p2p/")[2])
    data = {n: payload(n).tobytes() for n in (1 << 10, *SIZES.values())}

    async def unary(size: int) -> None:
        request = pb.ExpertRequest(tensors=[pb.Tensor(buffer=data[size])])
        await p2p.call_protobuf_handler(peer, "unary", request, pb.ExpertResponse)

    async def stream(size: int) -> None:
        async def parts() -> Any:
            for start in range(0, size, HIVEMIND_PART):
                buffer = data[size][start : start + HIVEMIND_PART]
                yield pb.ExpertRequest(tensors=[pb.Tensor(buffer=buffer)])

        replies = await p2p.iterate_protobuf_handler(peer, "stream", parts(), pb.ExpertResponse)
        async for _ in replies:
            pass

    sizes = [n for n in SIZES.values() if not is_unary or n < UNARY_BYTES]
    result = await measure(unary if is_unary else stream, pid, sizes)
    await p2p.shutdown()
    return result


# ---- gloo --------------------------------------------------------------------------------------


def gloo(rank: int, port: int, pid: int) -> dict[str, Any] | None:
    """Rank 0 receives, rank 1 sends."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sizes = [1 << 10, *SIZES.values()]
    memory = {n: torch.from_numpy(payload(n)) for n in sizes}
    head, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    if rank == 0:
        while True:
            dist.recv(head, 1)
            if not head.item():
                return None
            dist.recv(memory[int(head.item())], 1)
            dist.send(answer, 1)

    async def send(size: int) -> None:
        head[0] = size
        dist.send(head, 0)
        dist.send(memory[size], 0)
        dist.recv(answer, 0)

    result = asyncio.run(measure(send, pid, list(SIZES.values())))
    head[0] = 0
    dist.send(head, 0)
    return result


# ---- processes ---------------------------------------------------------------------------------


async def serve(carrier: str) -> None:
    """Prints where it can be reached and serves until stdin ends."""
    if carrier in OURS:
        where, close = await serve_swarmnet(carrier)
    elif carrier == "bare TLS":
        where, close = await serve_bare_tls()
    elif carrier == "bare stream":
        where, close = await serve_bare_stream()
    else:
        where, close = await serve_hivemind()
    spare_old_objects()
    print(json.dumps(where), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await close()


async def send_all(carrier: str, where: Any, pid: int) -> dict[str, Any]:
    if carrier in OURS:
        return await send_swarmnet(carrier, where, pid)
    if carrier == "bare TLS":
        return await send_bare_tls(where, pid)
    if carrier == "bare stream":
        return await send_bare_stream(where, pid)
    return await send_hivemind(where, pid, carrier.endswith("unary"))


def child(role: str, carrier: str, where: Any, pid: int) -> None:
    """One of the two processes."""
    if carrier == "gloo":
        if role == "serve":
            print(json.dumps(where), flush=True)
        result = gloo(int(role == "send"), int(where), pid)
    else:
        main = serve(carrier) if role == "serve" else send_all(carrier, where, pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(main)
    if result is not None:
        print(json.dumps(result), flush=True)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_one(carrier: str) -> dict[str, Any]:
    """One turn of a carrier in two fresh processes."""
    script = [sys.executable, str(Path(__file__).resolve())]
    where: Any = free_port() if carrier == "gloo" else None
    arguments = ["--child", "serve", carrier, json.dumps(where), "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GOLOG_LOG_LEVEL": "error"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen([*script, *arguments], **pipes) as server:  # type: ignore[call-overload]
        try:
            where = server.stdout.readline().strip()
            arguments = ["--child", "send", carrier, where, str(server.pid)]
            done = subprocess.run(
                [*script, *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                timeout=CHILD_TIMEOUT_S,
                check=True,
            )
            return dict(json.loads(done.stdout.splitlines()[-1]))
        finally:
            server.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()


def median_of(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure."""
    sizes = turns[0]["mb_per_s"]
    return {
        "mb_per_s": {s: statistics.median(t["mb_per_s"][s] for t in turns) for s in sizes},
        "rtt_ms": statistics.median(t["rtt_ms"] for t in turns),
        "cpu_s_per_gb": statistics.median(t["cpu_s_per_gb"] for t in turns),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        f"| carrier | RTT 1 KB, ms | {' | '.join(SIZES)} | CPU s/GB |",
        "|---|" + "---|" * (len(SIZES) + 2),
    ]
    for name, r in results.items():
        rates = [f"{r['mb_per_s'][s]:,.0f}" if s in r["mb_per_s"] else "-" for s in SIZES]
        cells = [name, f"{r['rtt_ms']:.2f}", *rates, f"{r['cpu_s_per_gb']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(results: dict[str, dict[str, Any]]) -> str:
    """What is to be reached, size by size."""
    lines = []
    for name, base, aim in (
        ("direct", "libp2p", 2.0),
        ("direct", "bare TLS", 0.8),
        ("libp2p", "bare stream", 0.8),
    ):
        if name in results and base in results:
            found = [
                f"{results[name]['mb_per_s'][s] / results[base]['mb_per_s'][s]:.2f}" for s in SIZES
            ]
            lines.append(f"{name} / {base} (aim {aim}): {', '.join(found)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--carrier", action="append", choices=CARRIERS)
    parser.add_argument("--child", nargs=4, metavar=("ROLE", "CARRIER", "WHERE", "PID"))
    options = parser.parse_args()
    if options.child:
        role, carrier, where, pid = options.child
        child(role, carrier, json.loads(where), int(pid))
        return
    turns: dict[str, list[dict[str, Any]]] = {c: [] for c in options.carrier or CARRIERS}
    for turn in range(options.repeat):
        for carrier, results in turns.items():
            print(f"turn {turn + 1}: {carrier}", file=sys.stderr, flush=True)
            results.append(run_one(carrier))
    results = {carrier: median_of(t) for carrier, t in turns.items()}
    print(table(results))
    print()
    print(ratios(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
