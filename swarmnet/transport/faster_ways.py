"""Back to a faster way where there is one again.

Every half minute each peer with a channel is looked at. One that is called through a relay is
dialled straight; the channel through the relay ends when a straight one stands and nothing is on
its way. Where another address of a peer is faster than that which is used, a direct channel leads
there (`links`).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.transport.dialer import Dialer
from swarmnet.transport.links import DirectLinks
from swarmnet.transport.open_channels import OpenChannels

log = logging.getLogger("swarmnet.transport")

LOOK_EVERY_S = UPKEEP_S / 2
"""So that a way that is back is used within `UPKEEP_S`, dials included."""
MAX_TRYING = 16
"""Peers at a time; the others wait for their turn."""


class FasterWays:
    """Of one transport."""

    def __init__(self, channels: OpenChannels, dialer: Dialer, links: DirectLinks | None) -> None:
        self._channels = channels
        self._dialer = dialer
        self._links = links
        self._waiting: dict[str, None] = {}
        """To be looked at, those that wait longest first."""
        self._trying: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                self._look()
        finally:
            self._waiting.clear()
            tasks = list(self._trying.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        for channel in self._channels.detours():
            if channel.is_idle:
                channel.close()
        if self._links is not None:
            self._links.close_left()
        # In the order in which they wait: who waits from before keeps its place.
        waiting = self._waiting | dict.fromkeys(self._channels.connected())
        self._waiting = {peer_id: None for peer_id in waiting if peer_id not in self._trying}
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._trying) < MAX_TRYING:
            peer_id = next(iter(self._waiting))
            del self._waiting[peer_id]
            task = asyncio.get_running_loop().create_task(self._look_at(peer_id))
            self._trying[peer_id] = task
            task.add_done_callback(partial(self._ended, peer_id))

    def _ended(self, peer_id: str, task: asyncio.Task[None]) -> None:
        del self._trying[peer_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("looking for a faster way to %s failed", peer_id[-8:], exc_info=error)
        self._begin()

    async def _look_at(self, peer_id: str) -> None:
        used = self._channels.first(peer_id)
        if used is not None and used.is_relayed:
            await self._straighten(peer_id)
        if self._links is not None:
            await self._links.look_for_faster(peer_id)

    async def _straighten(self, peer_id: str) -> None:
        try:
            await self._dialer.straighten(peer_id)
            log.info("%s is called without a relay again", peer_id[-8:])
        except SwarmnetError as e:
            log.debug("no straight way to %s: %s", peer_id[-8:], e)
