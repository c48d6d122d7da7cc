"""A sign of life for health checks of containers and service managers: a file that is written anew
every few seconds, by the event loop itself, for as long as the peer is part of its run.

A check needs no Python: `find FILE -mmin -1 | grep -q .`"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from pathlib import Path

from swarmnet.swarm.peer import Peer

log = logging.getLogger("swarmnet.peer")

TELL_EVERY_S = 5.0


async def tell_health(path: Path, peer: Peer) -> None:
    """Writes the file until cancelled, then removes it."""
    try:
        while True:
            await asyncio.to_thread(_write, path, describe_health(peer))
            await asyncio.sleep(TELL_EVERY_S)
    finally:
        _remove(path)


def describe_health(peer: Peer) -> dict[str, object]:
    """What the file says."""
    own = peer.gossip.own
    live = peer.view.live(asyncio.get_running_loop().time())
    return {
        "peer_id": own.peer_id,
        "state": own.state,
        "stage": own.stage,
        "round": own.round,
        "paused": own.paused,
        "live_peers": len(live),
        "time_unix_s": round(time.time(), 1),
    }


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _write(path: Path, content: dict[str, object]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content) + "\n")
        beside.replace(path)
    except OSError as e:
        log.warning("cannot write the health file %s: %s", path, e.strerror)
