"""Answering peers that want to know how they are connected (`swarmnet doctor`).

A peer dials back, which shows whether the asker can be reached from outside, and it takes and gives
a few bytes, which shows how fast. Both are cheap, bounded and rare for each asker; a peer that
trains does not notice them. Only the host from which the asker is seen to come is dialled, with
libp2p's handshake and nothing else, and whatever fails is answered in the same words: so nobody
can have a peer speak to another one's service, or find out where it listens (cf. libp2p
AutoNAT)."""

from __future__ import annotations

import logging
import time

from swarmnet.errors import Busy, SwarmnetError
from swarmnet.methods.contact import (
    BANDWIDTH,
    DIAL_BACK,
    BandwidthRequest,
    DialBackReply,
    DialBackRequest,
)
from swarmnet.methods.method import MAX_PROBE_BYTES
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.calls import serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.peer")

MAX_PROBES = 2
"""Served at a time."""
NOT_REACHED = "not reached"


class Probes:
    """Answers the questions of `swarmnet doctor`."""

    def __init__(self, transport: Transport, gossip: Gossip) -> None:
        self._transport = transport
        self._gossip = gossip
        self._running = 0
        serve(transport, DIAL_BACK, self._on_dial_back)
        serve(transport, BANDWIDTH, self._on_bandwidth)

    def _admit(self, request: Request) -> None:
        if self._running >= MAX_PROBES:
            raise Busy("too many probes", backlog_s=FIRST_PAUSE_S)

    async def _on_dial_back(self, request: Request[DialBackRequest]) -> Message[DialBackReply]:
        asked = request.message.body
        self._admit(request)
        self._running += 1
        try:
            reasons, host = [], ""
            for address in asked.addresses:
                try:
                    host = await self._transport.dial_back(request.remote, address, CONNECT_S)
                    reasons.append("")
                except SwarmnetError as e:
                    log.debug("%s is not reached: %s", request.remote[-8:], e)
                    reasons.append(NOT_REACHED)
            return Message(DialBackReply(tuple(reasons), time.time(), host))
        finally:
            self._running -= 1

    async def _on_bandwidth(self, request: Request[BandwidthRequest]) -> Message[None]:
        asked = request.message.body
        self._admit(request)
        self._running += 1
        try:
            size = min(asked.reply_bytes, MAX_PROBE_BYTES)
            return Message(None, (Array("uint8", (size,), bytes(size)),))
        finally:
            self._running -= 1
