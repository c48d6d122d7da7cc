"""Long calls that end as soon as their callee is not live any more.

A contributor's call for shards takes as long as the whole exchange, and there may be one for each
shard: hundreds at a time, to a few dozen peers. A silent callee would hold its calls up to their
deadline. So all callees are looked at together, the less often the longer their calls take anyway,
and probed when an answer should have come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from swarmnet.errors import Unreachable
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.transport.base import Transport
from swarmnet.wire import Message

LOOK_S, MAX_LOOK_S = 0.5, 5.0
LOOK_PART = 0.25
"""Of the time that calls have taken so far: until they are looked at again, within these bounds."""
PROBE_CALL_S = 1.0
"""A callee that has not answered for so long is probed."""
PROBE_PART = 0.2
"""Of the time that calls take or have taken: until it is probed, and probed again."""


class LiveCalls:
    """The long calls of one caller."""

    def __init__(self, transport: Transport, gossip: Gossip, usual_s: Callable[[], float]) -> None:
        """`usual_s()`: how long such calls took lately, or should take; 0 where that is
        unknown."""
        self._transport = transport
        self._gossip = gossip
        self._usual_s = usual_s
        self._open: dict[str, dict[asyncio.Timeout, float]] = {}
        """By callee: what ends its calls, and when each began; the oldest first."""
        self._probed: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        """Raises as `Transport.call`; `Unreachable` where the callee has fallen silent."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:
                self._open.setdefault(peer_id, {})[scope] = loop.time()
                if self._timer is None:
                    self._timer = loop.call_later(LOOK_S, self._look)
                return await self._transport.call(
                    peer_id, method, message, timeout_s=timeout_s, on_progress=on_progress
                )
        except TimeoutError:
            raise Unreachable(f"{peer_id[-8:]} has fallen silent") from None
        finally:
            calls = self._open[peer_id]
            del calls[scope]
            if not calls:
                del self._open[peer_id]
                self._probed.pop(peer_id, None)
            if not self._open and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._gossip.awake_s()  # after a stall of this process, no peer is silent
        now, longest_s, usual_s = loop.time(), 0.0, self._usual_s()
        for peer_id, calls in self._open.items():
            waited_s = now - next(iter(calls.values()))
            longest_s = max(longest_s, waited_s)
            self._ask(peer_id, waited_s, max(waited_s, usual_s), now)
            if not self._gossip.view.is_live(peer_id, now):
                for scope in calls:
                    if not scope.expired():
                        scope.reschedule(now)
        self._timer = None
        if self._open:
            wait_s = min(max(LOOK_S, LOOK_PART * longest_s), MAX_LOOK_S)
            self._timer = loop.call_later(wait_s, self._look)

    def _ask(self, peer_id: str, waited_s: float, takes_s: float, now: float) -> None:
        pause_s = max(PROBE_CALL_S, PROBE_PART * takes_s)
        if waited_s >= pause_s and now - self._probed.get(peer_id, -math.inf) >= pause_s:
            self._probed[peer_id] = now
            self._gossip.probe(peer_id)
