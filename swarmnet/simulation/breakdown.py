"""The use of the swarm's capacity: what the live machines did, second by second.

The state of every machine is sampled at each check and weighted with the samples/s that the machine
could process in a middle stage, so that a fast machine that waits counts more than a slow one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.pipeline import progress
from swarmnet.simulation.network import SimulatedNetwork
from swarmnet.swarm.peer import Peer

WORKING = "at work"
STALLED = "stalled"
JOINING = "joining: choosing a stage, downloading it"
LEAVING_STATE = "leaving: handing over"
EXCHANGE = "round closed: waiting for the exchange"
FILL = "round's begin: no microbatch has come yet"
DRAIN = "round's end: everything is launched, waiting for the last"
LINK = "idle behind the own link, which is full"
WAITING = "idle, no work has come"
STATES = (WORKING, WAITING, LINK, FILL, DRAIN, EXCHANGE, JOINING, LEAVING_STATE, STALLED)
LINK_FULL_S = 0.25
"""A link with messages of so many seconds to send is full."""


@dataclass
class Breakdown:
    """Capacity times seconds, by what it was spent on."""

    network: SimulatedNetwork
    num_slots: int
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    _fresh: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By peer: its round, and the work of its device (seconds) when that round began."""

    def add(self, peer: Peer, is_stalled: bool, rate: float, seconds: float, now: float) -> None:
        """Counts the present state of a peer for the `seconds` since the last look."""
        self.spent[self._state(peer, is_stalled, now)] += rate * seconds

    def clear(self) -> None:
        """Begins anew, after the warm-up."""
        self.spent = dict.fromkeys(STATES, 0.0)

    def parts(self) -> dict[str, float]:
        """Each state's part of all capacity."""
        total = sum(self.spent.values())
        return {name: amount / total if total else 0.0 for name, amount in self.spent.items()}

    def _state(self, peer: Peer, is_stalled: bool, now: float) -> str:
        replica = peer.replica
        if is_stalled:
            return STALLED
        if replica is None or not replica.synced:
            return JOINING
        if replica.device.num_waiting:
            return WORKING
        if peer.gossip.own.state == LEAVING:
            return LEAVING_STATE
        r, peer_id = replica.round, peer.transport.peer_id
        if not replica.ahead and not replica.is_open(r):
            return EXCHANGE
        if not replica.ahead and progress.is_launched(peer.view, r, now, self.num_slots):
            return DRAIN
        if self._fresh.get(peer_id, (-1, 0.0))[0] != r:
            self._fresh[peer_id] = (r, replica.device.busy_s)
        if replica.device.busy_s == self._fresh[peer_id][1]:
            return FILL
        return LINK if self.network.queued_s(peer_id, now) > LINK_FULL_S else WAITING
