"""Whether anybody listens at an address, before libp2p's daemon is asked to dial it.

After a failed dial the daemon refuses to dial that address again: for 5 s, and for longer with the
square of the number of failures, up to five minutes (go-libp2p, `p2p/net/swarm/swarm_dial.go`). So
whoever looks for a peer that is away would, through the daemon, find it minutes after it is back. A
TCP connection that is closed at once costs one round trip and counts for nothing there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

KNOCK_S = 3.0
"""Longest wait for an answer."""
MAX_PORT = 65_535
HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
NO_ANSWER = "no answer in time"


def tcp_target(address: str) -> tuple[str, int] | None:
    """Host and port of a plain TCP multiaddress; None for any other kind."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[1] not in HOSTS or parts[3] != "tcp":
        return None
    port = int(parts[4]) if parts[4].isdecimal() and len(parts[4]) <= 5 else MAX_PORT + 1
    return (parts[2], port) if port <= MAX_PORT else None


async def knock(addresses: Sequence[str]) -> str:
    """Empty where one of them answers, or is of a kind that cannot be asked this way; else why the
    first does not."""
    targets = [tcp_target(address) for address in addresses]
    known = [target for target in targets if target is not None]
    if not targets or len(known) < len(targets):
        return ""
    tasks = [asyncio.get_running_loop().create_task(_knock(*target)) for target in known]
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(not task.result() for task in done):
                return ""
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _knock(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(KNOCK_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return NO_ANSWER
    except ConnectionRefusedError:
        return "connection refused: nothing listens there"
    except OSError as e:
        return e.strerror.lower() if e.strerror else NO_ANSWER
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""
