"""A sign of life for health checks of containers and service managers: a file that is written anew
every few seconds, by the event loop itself, and says whether the peer is of use to its run.

A check needs no Python: `find FILE -mmin -1 -exec grep -q '"healthy": true' {} +`"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.files import write_whole
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.trouble import Trouble
from swarmnet.swarm.peer import Peer

log = logging.getLogger("swarmnet.peer")

TELL_EVERY_S = 5.0
STANDS_STILL_S = 180.0
"""A run of which no round has ended for so long stands still..."""
NEW_S = 60.0
"""After its start a peer does not log that it is of no use yet."""
USUAL_ROUNDS = 3.0
"""...unless its rounds are long: for so many times the longest that was seen here."""


@dataclass
class RoundsSeen:
    """How the rounds of the run follow each other, as one peer sees it."""

    began_at: float
    """When this peer began to look, or the last round that it saw end did."""
    round: int = -1
    longest_s: float = 0.0
    """Of the rounds whose beginning and end were seen."""
    num_ended: int = 0

    def see(self, newest: int, now: float) -> None:
        """`newest`: the round that the run is in, -1 where nobody serves."""
        if newest == self.round:
            return
        if self.num_ended and newest == self.round + 1:
            self.longest_s = max(self.longest_s, now - self.began_at)
        self.num_ended += self.round >= 0
        self.round = newest
        self.began_at = now

    def stands_still(self, now: float) -> bool:
        return now - self.began_at >= max(STANDS_STILL_S, USUAL_ROUNDS * self.longest_s)


def judge_health(
    own: Record, live: Sequence[Record], num_stages: int, rounds: int, seen: RoundsSeen, now: float
) -> str:
    """What is wrong, in a few words; empty where nothing is. A peer that is paused by its owner, or
    whose run is over, is well."""
    if own.paused or seen.round >= rounds:
        return ""
    served = {record.stage for record in live if record.is_replica}
    lacking = [k for k in range(num_stages) if k not in served]
    if lacking:
        return f"nobody serves stage {', '.join(map(str, lacking))}"
    if seen.stands_still(now):
        return f"no round has ended for {now - seen.began_at:.0f} s"
    return ""


async def tell_health(path: Path, peer: Peer) -> None:
    """Writes the file until cancelled, then removes it."""
    began_at = asyncio.get_running_loop().time()
    seen = RoundsSeen(began_at)
    told, trouble = "", Trouble()
    try:
        while True:
            content = describe_health(peer, seen)
            is_new = asyncio.get_running_loop().time() < began_at + NEW_S
            if content["why"] != told and not is_new:
                told = str(content["why"])
                log.warning("unhealthy: %s", told) if told else log.info("healthy again")
            await asyncio.to_thread(_write, path, content, trouble)
            await asyncio.sleep(TELL_EVERY_S)
    finally:
        _remove(path)


def describe_health(peer: Peer, seen: RoundsSeen) -> dict[str, object]:
    """What the file says."""
    own, settings = peer.gossip.own, peer.settings
    now = asyncio.get_running_loop().time()
    live = peer.view.live(now)
    if own.is_replica:  # what others say may be false
        seen.see(own.round, now)
    else:
        seen.see(max((r.round for r in live if r.is_replica), default=-1), now)
    why = judge_health(own, live, settings.num_stages, settings.end, seen, now)
    return {
        "healthy": not why,
        "why": why,
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


def _write(path: Path, content: dict[str, object], trouble: Trouble) -> None:
    try:
        write_whole(path, json.dumps(content) + "\n")
    except OSError as e:
        more = trouble.failed(time.monotonic())
        if more is not None:
            log.warning("cannot write the health file %s: %s%s", path, e.strerror, more)
        return
    if trouble.is_over():
        log.warning("the health file %s is written again", path)
