"""How often a peer gossips: slower in a large swarm, so that its control traffic stays bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnet.protocol.membership.view import View

PUSH_FANOUT = 16
"""Peers to which urgent news is pushed at most."""
SILENCE_STEP = 0.05
"""The view's `silence_s` is changed only when it is off by more than this part."""
TELL_TOGETHER_S = 0.2
TELL_TOGETHER_PER_PEER_S = 0.0025
MAX_TELL_TOGETHER_S = 2.0


@dataclass(frozen=True, slots=True)
class GossipSettings:
    interval_s: float = 0.4
    interval_per_peer_s: float = 0.02
    """A peer exchanges records every `interval_s`, or every so many seconds times the number of
    live peers, whichever is longer: the stamps of all peers travel with an exchange."""
    heartbeat_s: float = 1.0
    heartbeat_per_peer_s: float = 0.1
    """The heartbeat is the longer of `heartbeat_s` and this times the number of live peers."""
    silence_s: float = 8.0
    """A peer whose record has not changed for so long is suspected..."""
    silent_heartbeats: float = 4.0
    """...or for so many heartbeats, whichever is longer."""
    push_delay_s: float = 0.01
    """Changes within this time are pushed together."""


class GossipPace:
    """The intervals of gossip in a swarm of the present size."""

    def __init__(self, settings: GossipSettings, view: View) -> None:
        self._settings, self._view = settings, view
        self.interval_s, self.heartbeat_s = settings.interval_s, settings.heartbeat_s

    @property
    def is_small(self) -> bool:
        """A push reaches every peer."""
        return len(self._view) <= PUSH_FANOUT

    @property
    def publish_every_s(self) -> float:
        """Changes that are not urgent are collected for so long."""
        return 0.0 if self.is_small else self.heartbeat_s / 4

    @property
    def spread_s(self) -> float:
        """About how long it takes until news that is not urgent is known everywhere."""
        if self.is_small:
            return 0.0
        return self.interval_s * math.log2(len(self._view)) + self.publish_every_s

    @property
    def tell_together_s(self) -> float:
        """News within this time wakes the waiting tasks of this peer once. In a large swarm there
        is always some news, and a round is longer."""
        if self.is_small:
            return 0.0
        together_s = max(TELL_TOGETHER_S, TELL_TOGETHER_PER_PEER_S * len(self._view))
        return min(together_s, MAX_TELL_TOGETHER_S)

    def adapt(self, num_live: int) -> None:
        """Sets the intervals for a swarm of `num_live` peers, and after what silence the view
        counts a peer as dead. What a peer sends and hears in a second then does not grow with the
        swarm."""
        settings = self._settings
        self.interval_s = max(settings.interval_s, settings.interval_per_peer_s * num_live)
        self.heartbeat_s = max(settings.heartbeat_s, settings.heartbeat_per_peer_s * num_live)
        silence_s = max(settings.silence_s, settings.silent_heartbeats * self.heartbeat_s)
        if abs(silence_s - self._view.silence_s) > SILENCE_STEP * silence_s:
            self._view.silence_s = silence_s
