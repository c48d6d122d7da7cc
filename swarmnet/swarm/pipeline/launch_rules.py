"""Which slots a feeder may launch: whether it feeds, its window, its share of a round.

The numbers are in `protocol.pipeline.feeding` and `protocol.pipeline.progress`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmnet.protocol import slots
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.membership.view import ALL
from swarmnet.protocol.pipeline import feeding, progress
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.fed_rounds import FedRound
from swarmnet.swarm.pipeline.wiring import Wiring
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import Limits, RunSettings


class LaunchRules:
    """What the view says that this peer may launch now."""

    def __init__(
        self, gossip: Gossip, wiring: Wiring, settings: RunSettings, limits: Limits
    ) -> None:
        self._gossip = gossip
        self._wiring = wiring
        self._settings = settings
        self._limits = limits

    def is_feeder(self) -> bool:
        """Whether this peer is one of the feeders."""
        own = self._gossip.own
        return own.state == ACTIVE and own.peer_id in self._feeders(_now())

    def next_slot(self, mine: FedRound) -> int | None:
        """The slot of a round that this feeder may launch now; None for none."""
        now, num_slots = _now(), self._settings.num_slots
        view, own, feeders = self._gossip.view, self._gossip.own, self._feeders(now)
        own_launched = len(own.count(mine.round).launched)
        launched_by_others = view.counters.launched_at_most(mine.round) - own_launched
        if launched_by_others != mine.heard:
            mine.heard, mine.heard_at = launched_by_others, now
        if own.peer_id not in feeders:
            return None
        state = progress.round_progress(view, mine.round, now, num_slots)
        if not state.missing:
            return None
        rank, share = feeders.index(own.peer_id), self._share(feeders)
        slot = slots.next_slot(state.missing, share, rank, len(feeders))
        if slot in share:
            return slot
        if len(feeders) > progress.FEW_FEEDERS:
            return self._helping_slot(mine, feeders, state.missing, now)
        # One at a time is taken over from a slow or dead feeder, where no launch of another has
        # become known since the last one here.
        quiet_s = now - max(mine.heard_at, mine.launched_at)
        return slot if quiet_s >= self._limits.patience_s else None

    def window(self, num_completed: int) -> int:
        """Microbatches that this feeder keeps in flight. `num_completed`: those of its own that
        have counted so far."""
        if self._settings.max_in_flight:
            return self._settings.max_in_flight
        now = _now()
        view, settings = self._gossip.view, self._settings
        replicas = sum(len(view.replicas(s, now)) for s in range(settings.num_stages))
        feeders = max(1, len(self._feeders(now)))
        is_small = self._gossip.is_small
        part = 1.0 / feeders if is_small else self._part(feeders, now)
        asks = self._wiring.shares(0)
        most = feeding.window(replicas, part, settings.num_slots, is_small=is_small, asks=asks)
        return feeding.slow_start(most, replicas, part, num_completed)

    def room(self, replica: Replica, num_completed: int) -> int:
        """Microbatches to launch now. Among many feeders, one whose own device or uplink has enough
        to do leaves the rest to others."""
        most = self._limits.max_waiting_forwards * (2 if replica.service_s else 1)
        if replica.index != 0 or not self.serves_itself():
            return self.window(num_completed)
        return feeding.send_window_room(
            most,
            replica.device.num_waiting,
            queued_bytes=self._gossip.transport.traffic.queued_bytes(),
            sent_bytes=replica.measured.sent_bytes,
        )

    def serves_itself(self) -> bool:
        """In a large swarm in which most replicas of stage 0 feed, each works on its own data,
        unless the work is so long that whichever replica is free does it."""
        if self._wiring.shares(0):
            return False
        now = _now()
        first = len(self._gossip.view.replicas(0, now))
        return not self._gossip.is_small and 2 * len(self._feeders(now)) > first

    def leaves_to_others(self, mine: FedRound) -> bool:
        """Whether this peer, one of many feeders, has launched its part of a round, and what is
        missing is on its way."""
        now = _now()
        feeders = self._feeders(now)
        if len(feeders) <= progress.FEW_FEEDERS or not self.is_feeder():
            return False
        num_slots = self._settings.num_slots
        state = progress.round_progress(self._gossip.view, mine.round, now, num_slots)
        share = self._share(feeders)
        if slots.next_slot(state.missing, share, 0, len(feeders)) in share:
            return False
        return self._helping_slot(mine, feeders, state.missing, now) is None

    def _feeders(self, now: float) -> Sequence[str]:
        return assignment.feeders(self._gossip.view, now)

    def _part(self, num_feeders: int, now: float) -> float:
        view, own = self._gossip.view, self._gossip.own
        if own.stage != 0 or self._wiring.shares(0):
            return 1.0 / num_feeders
        rates = view.remembered(
            0,
            "rates of feeders",
            now,
            lambda: [r.samples_per_s for r in view.replicas(0, now) if r.has_data],
        )
        return feeding.part_of_feeder(own.samples_per_s, rates)

    def _share(self, feeders: Sequence[str]) -> range:
        rank = feeders.index(self._gossip.own.peer_id)
        return slots.share_of(rank, len(feeders), self._settings.num_slots)

    def _helping_slot(
        self, mine: FedRound, feeders: Sequence[str], missing: int, now: float
    ) -> int | None:
        """A slot of another's share, among many feeders."""
        spread_s, age_s = self._gossip.spread_s, now - mine.began_at
        rank, turn = feeders.index(self._gossip.own.peer_id), progress.turn_of(age_s, spread_s)

        def late_slots() -> list[int]:
            by_peer = dict(self._gossip.view.counters.by_peer(mine.round))
            launched = [len(by_peer[p].launched) if p in by_peer else 0 for p in feeders]
            num_slots = self._settings.num_slots
            return progress.late_slots(missing, launched, num_slots, age_s, spread_s)

        # Looked at more often than anything changes.
        late = self._gossip.view.remembered(ALL, ("late", mine.round, turn), now, late_slots)
        slot = progress.helping_slot(late, rank, len(feeders), turn)
        if slot is not None:
            return slot
        quiet_s = now - max(mine.heard_at, mine.launched_at)
        return progress.stuck_slot(missing, rank, len(feeders), quiet_s, spread_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
