"""What a relay costs: the same calls straight over p2pd and through a third peer.

    python benchmarks/relay.py [--repeat 3] [--json FILE]

Three processes on this machine (caller, relay, callee), each with its daemon. MB/s (10^6) of calls
with 4 MB, four at a time, and the round trip of a small call (median), straight and relayed in
turns, and the ratio of both. The machine may not be quiet: the ratio is what counts. On a real
network a relayed byte also uses the relay's upload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from swarmnet.identity import Identity
from swarmnet.transport.base import Request
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.libp2p.p2pd import P2pdCarrier
from swarmnet.wire import Array, Message

BYTES, NUM_CALLS, AT_A_TIME, PINGS = 4 << 20, 48, 4, 200
GRANT_S = 600.0
TIMEOUT_S = 120.0


async def open_peer() -> ChannelTransport:
    key = Identity.generate()
    transport = ChannelTransport(P2pdCarrier(key), identity=key)
    await transport.start()
    transport.set_run("benchmark")

    async def sink(request: Request) -> Message:
        return Message()

    async def grant(request: Request) -> Message:
        transport.grant_relay(request.remote, GRANT_S)
        return Message()

    async def join(request: Request) -> Message:
        relay = await transport.dial(request.message.body)
        await transport.call(relay, "grant", Message(), timeout_s=TIMEOUT_S)
        return Message()

    for name, handler in (("sink", sink), ("grant", grant), ("join", join)):
        transport.handle(name, handler)
    return transport


async def serve() -> None:
    """A relay or a callee: prints its address, and ends with its input."""
    transport = await open_peer()
    print(transport.addresses()[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def measure(transport: ChannelTransport, peer_id: str) -> tuple[float, float]:
    """(MB/s, round trip of a small call in ms)."""
    message = Message(None, (Array("uint8", (BYTES,), bytes(BYTES)),))
    turn = asyncio.Semaphore(AT_A_TIME)

    async def one() -> None:
        async with turn:
            await transport.call(peer_id, "sink", message, timeout_s=TIMEOUT_S)

    await asyncio.gather(*(one() for _ in range(AT_A_TIME)))
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(NUM_CALLS)))
    rate = NUM_CALLS * BYTES / (time.perf_counter() - began) / 1e6
    pings = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await transport.call(peer_id, "sink", Message(), timeout_s=TIMEOUT_S)
        pings.append(time.perf_counter() - began)
    return rate, 1000 * statistics.median(pings)


async def main(repeat: int) -> dict[str, Any]:
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--serve",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        addresses = []
        for child in children:
            assert child.stdout is not None
            addresses.append((await child.stdout.readline()).decode().strip())
        relay, callee = addresses
        peer_id = callee.rpartition("/p2p/")[2]
        straight, relayed = await open_peer(), await open_peer()
        await straight.dial(callee)
        await straight.call(peer_id, "join", Message(relay), timeout_s=TIMEOUT_S)
        await relayed.dial(f"{relay}/p2p-circuit/p2p/{peer_id}")
        turns = [
            (await measure(straight, peer_id), await measure(relayed, peer_id))
            for _ in range(repeat)
        ]
        await straight.close()
        await relayed.close()
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            await child.wait()
    return {
        "straight_mb_per_s": statistics.median(s[0] for s, _ in turns),
        "relayed_mb_per_s": statistics.median(r[0] for _, r in turns),
        "ratio": statistics.median(r[0] / s[0] for s, r in turns),
        "straight_ms": statistics.median(s[1] for s, _ in turns),
        "relayed_ms": statistics.median(r[1] for _, r in turns),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.serve:
            runner.run(serve())
        else:
            result = runner.run(main(options.repeat))
            for name, value in result.items():
                print(f"{name:<20}{value:10.2f}")
            if options.json:
                options.json.write_text(json.dumps(result) + "\n")
