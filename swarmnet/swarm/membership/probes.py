"""Answering peers that want to know how they are connected (`swarmnet doctor`).

A peer dials back, which shows whether the asker can be reached from outside, and it takes and gives
a few bytes, which shows how fast. Both are cheap, bounded and rare for each asker; a peer that
trains does not notice them. Dialling back is libp2p's handshake and nothing else, so no peer can be
made to speak to a stranger's service (cf. libp2p AutoNAT)."""

from __future__ import annotations

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

MAX_PROBES = 2
"""Served at a time."""
MAX_REASON_CHARS = 200


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
            reasons = []
            for address in asked.addresses:
                try:
                    await self._transport.dial(address, timeout_s=CONNECT_S)
                    reasons.append("")
                except SwarmnetError as e:
                    reasons.append(str(e)[:MAX_REASON_CHARS] or type(e).__name__)
            return Message(DialBackReply(tuple(reasons), time.time()))
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
