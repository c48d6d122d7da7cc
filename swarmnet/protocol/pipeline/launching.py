"""Which slots a feeder may launch: whether it feeds, its window, its share of a round.

The numbers are in `feeding` and `progress`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.protocol import slots
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import ALL, View
from swarmnet.protocol.pipeline import feeding, progress


@dataclass(slots=True)
class Launches:
    """When a round was fed, by this feeder and as far as it hears by others. Points in time are of
    its clock."""

    round: int
    began_at: float = 0.0
    launched_at: float = 0.0
    """When it launched its newest microbatch."""
    _heard: int = 0
    """Slots that others have launched, and since when they have been so many in this round."""
    _heard_at: float = 0.0

    def begin(self, now: float) -> None:
        """The round is open from now on; perhaps once more."""
        self.began_at = self._heard_at = now

    def launched(self, now: float) -> None:
        """This feeder has launched one."""
        self.launched_at = now

    def hear(self, by_others: int, now: float) -> None:
        """So many slots have been launched by others."""
        if by_others != self._heard:
            self._heard, self._heard_at = by_others, now

    def quiet_s(self, now: float) -> float:
        """Seconds in which no launch has become known, nor was one made here."""
        return now - max(self._heard_at, self.launched_at)

    def age_s(self, now: float) -> float:
        """Seconds since the round has begun."""
        return now - self.began_at


@dataclass(frozen=True, slots=True)
class FeederView:
    """What a peer knows now, when it decides what to launch."""

    view: View
    own: Record
    now: float
    spread_s: float
    """How long news take to reach all."""
    is_small: bool
    """Every peer of the swarm hears of the others at once."""
    num_slots: int
    """Of a round."""

    @property
    def feeders(self) -> Sequence[str]:
        """All of them, by peer id."""
        return assignment.feeders(self.view, self.now)

    def is_feeder(self) -> bool:
        """Whether this peer is one of the feeders."""
        return self.own.state == ACTIVE and self.own.peer_id in self.feeders

    def next_slot(self, launches: Launches, patience_s: float) -> int | None:
        """The slot of a round that this feeder may launch now; None for none. It takes others'
        share where they have been quiet for `patience_s`."""
        view, now, own, feeders = self.view, self.now, self.own, self.feeders
        own_launched = len(own.count(launches.round).launched)
        launches.hear(view.counters.launched_at_most(launches.round) - own_launched, now)
        if own.peer_id not in feeders:
            return None
        state = progress.round_progress(view, launches.round, now, self.num_slots)
        if not state.missing:
            return None
        if state.given_up:
            return self._given_up_slot(launches, state.given_up, patience_s)
        rank, share = feeders.index(own.peer_id), self._share(feeders)
        slot = slots.next_slot(state.missing, share, rank, len(feeders))
        if slot in share:
            return slot
        if len(feeders) > progress.FEW_FEEDERS:
            return self._helping_slot(launches, feeders, state.missing)
        # One at a time is taken over from a slow or dead feeder, where no launch of another has
        # become known since the last one here.
        return slot if launches.quiet_s(now) >= patience_s else None

    def _given_up_slot(self, launches: Launches, given_up: int, patience_s: float) -> int | None:
        """Those that are waited for divide these among them, and take turns where some do not come
        to it."""
        feeders = [p for p in self.feeders if self.view.awaits(p)]
        if self.own.peer_id not in feeders:
            return None
        turn = progress.turn_of(launches.quiet_s(self.now), max(patience_s, self.spread_s))
        rank, late = feeders.index(self.own.peer_id), slots.slots_in(given_up)
        return progress.helping_slot(late, rank, len(feeders), turn)

    def leaves_to_others(self, launches: Launches) -> bool:
        """Whether this peer, one of many feeders, has launched its part of a round, and what is
        missing is on its way."""
        feeders = self.feeders
        if len(feeders) <= progress.FEW_FEEDERS or not self.is_feeder():
            return False
        state = progress.round_progress(self.view, launches.round, self.now, self.num_slots)
        share = self._share(feeders)
        if slots.next_slot(state.missing, share, 0, len(feeders)) in share:
            return False
        return self._helping_slot(launches, feeders, state.missing) is None

    def window(self, num_stages: int, num_completed: int, *, shares: bool) -> int:
        """Microbatches that this feeder keeps in flight, of which `num_completed` have counted so
        far. `shares`: any free replica does the first work for them (`admission.shares_work`)."""
        now, view = self.now, self.view
        replicas = sum(len(view.replicas(s, now)) for s in range(num_stages))
        feeders = max(1, len(self.feeders))
        part = 1.0 / feeders if self.is_small else self._part(feeders, shares)
        most = feeding.window(replicas, part, self.num_slots, is_small=self.is_small, asks=shares)
        return feeding.slow_start(most, replicas, part, num_completed)

    def serves_itself(self, *, shares: bool) -> bool:
        """In a large swarm in which most replicas of stage 0 feed, each works on its own data,
        unless the work is so long that whichever replica is free does it."""
        if shares:
            return False
        first = len(self.view.replicas(0, self.now))
        return not self.is_small and 2 * len(self.feeders) > first

    def does_own(self, wait_s: float, upload_s: float) -> bool:
        """Whether its own replica is to do what this feeder launches now, where that serves stage
        0: it would begin after `wait_s`, and another after `upload_s`."""
        own = self.own
        if own.stage != 0:
            return False
        return not self.is_small or feeding.does_own(
            own.samples_per_s, self._rates(), wait_s=wait_s, upload_s=upload_s
        )

    def _part(self, num_feeders: int, shares: bool) -> float:
        own = self.own
        if own.stage != 0 or shares:
            return 1.0 / num_feeders
        return feeding.part_of_feeder(own.samples_per_s, self._rates())

    def _rates(self) -> Sequence[float]:
        """Of all feeders that serve stage 0, as announced."""
        view, now = self.view, self.now
        return view.remembered(
            0,
            "rates of feeders",
            now,
            lambda: [r.samples_per_s for r in view.replicas(0, now) if r.has_data],
        )

    def _share(self, feeders: Sequence[str]) -> range:
        return slots.share_of(feeders.index(self.own.peer_id), len(feeders), self.num_slots)

    def _helping_slot(self, launches: Launches, feeders: Sequence[str], missing: int) -> int | None:
        """A slot of another's share, among many feeders."""
        spread_s, age_s = self.spread_s, launches.age_s(self.now)
        rank, turn = feeders.index(self.own.peer_id), progress.turn_of(age_s, spread_s)

        def late_slots() -> list[int]:
            by_peer = dict(self.view.counters.by_peer(launches.round))
            launched = [len(by_peer[p].launched) if p in by_peer else 0 for p in feeders]
            return progress.late_slots(missing, launched, self.num_slots, age_s, spread_s)

        # Looked at more often than anything changes.
        late = self.view.remembered(ALL, ("late", launches.round, turn), self.now, late_slots)
        slot = progress.helping_slot(late, rank, len(feeders), turn)
        if slot is not None:
            return slot
        quiet_s = launches.quiet_s(self.now)
        return progress.stuck_slot(missing, rank, len(feeders), quiet_s, spread_s)
