"""Back to a faster way where there is one again.

A peer that is called through a relay is dialled straight from time to time; the channel through the
relay ends when a straight one stands and nothing is on its way. Direct channels look for faster
addresses themselves (`links`).
"""

from __future__ import annotations

import asyncio
import logging

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.transport.dialer import Dialer
from swarmnet.transport.links import DirectLinks
from swarmnet.transport.open_channels import OpenChannels

log = logging.getLogger("swarmnet.transport")

LOOK_EVERY_S = UPKEEP_S / 2
"""So that a way that is back is used within `UPKEEP_S`, dials included."""
MAX_TRYING = 16
"""Dials at a time."""


class FasterWays:
    """Of one transport."""

    def __init__(self, channels: OpenChannels, dialer: Dialer, links: DirectLinks | None) -> None:
        self._channels = channels
        self._dialer = dialer
        self._links = links
        self._trying: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                self._look()
        finally:
            tasks = list(self._trying.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        for channel in self._channels.detours():
            if channel.is_idle:
                channel.close()
        for peer_id in self._channels.connected():
            used = self._channels.first(peer_id)
            if used is not None and used.is_relayed and peer_id not in self._trying:
                self._try(peer_id)
        if self._links is not None:
            self._links.look()

    def _try(self, peer_id: str) -> None:
        if len(self._trying) < MAX_TRYING:
            task = asyncio.get_running_loop().create_task(self._straighten(peer_id))
            self._trying[peer_id] = task
            task.add_done_callback(lambda _: self._trying.pop(peer_id, None))

    async def _straighten(self, peer_id: str) -> None:
        try:
            await self._dialer.straighten(peer_id)
            log.info("%s is called without a relay again", peer_id[-8:])
        except SwarmnetError as e:
            log.debug("no straight way to %s: %s", peer_id[-8:], e)
