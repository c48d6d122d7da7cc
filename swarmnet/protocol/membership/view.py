"""What a peer knows of all peers: a set of versioned records that merge in any order.

Two views that have seen the same records are equal, whatever the order in which these came. A
record does not say whether its peer is alive: a peer is live in a view as long as there is news of
it (see `failure_detector`). A live peer takes part in the run: its samples count, and it has its
place among the owners of shards. It need not be in reach of this peer: `reaches` says that. Peers
that are out of reach together, with no path of serving peers to them, are the other side of a
partition, and not live here, whatever news an onlooker brings; what their feeders count there is
not counted here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from swarmnet.protocol.membership.agreement import Agreement
from swarmnet.protocol.membership.failure_detector import SILENCE_S, FailureDetector
from swarmnet.protocol.membership.indices import (
    ALL,
    AnswerCache,
    Digest,
    RoundCounters,
    StageIndex,
)
from swarmnet.protocol.membership.peer_ids import MAX_SEATS, machine_of, seat_id
from swarmnet.protocol.membership.reach import Reach
from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    LEAVING,
    LEFT,
    MAX_VOUCHES,
    OBSERVING,
    Record,
    Stamp,
)
from swarmnet.protocol.membership.reputation import Level, Reputation
from swarmnet.protocol.sync_modes import RunEnd

T = TypeVar("T")

MANY_NEWCOMERS = 8
"""That come to a swarm at a time, where few are known."""
MAX_PEERS = 16_384
"""Known peers at most."""

FIRST_ROUNDS = 8
"""Of a run: the word of who has worked is on its way, while replicas come one after the other."""


class View:
    """The records known to one peer.

    The list of live peers is read far more often than it changes. So answers are remembered, for
    each stage apart, until a record of that stage changes or the first of its live peers may have
    been silent for too long.

    `detector`, `digest`, `counters` and `agreement` are to be read by others; only the view changes
    them. What happens to a peer is told to `reach`."""

    def __init__(
        self, own_peer_id: str, *, silence_s: float = SILENCE_S, run_end: RunEnd | None = None
    ) -> None:
        self.own_peer_id = own_peer_id
        self.run_end = run_end or RunEnd()
        """By its owner's order, as this process has heard of it."""
        self.detector = FailureDetector(own_peer_id, silence_s)
        self.digest = Digest()
        self.counters = RoundCounters()
        self.agreement = Agreement(own_peer_id)
        self._records: dict[str, Record] = {}
        self._index = StageIndex()
        self.reputation = Reputation(own_peer_id)
        """To be read by others; what was seen of a peer is told to the view."""
        self._answers = AnswerCache(
            lambda stage, now: self.detector.next_silence_at(self._index.ids(stage), now)
        )
        self._on_forgotten: list[Callable[[str], None]] = []
        self._newest_round = 0
        """Of any record or call of another peer, ever, whatever that is worth."""
        self._called: dict[str, int] = {}
        """By peer, the newest round that it has asked for."""
        self._not_awaited: frozenset[str] = frozenset()
        self._is_unknown_heard = True
        self.reach = Reach(
            own_peer_id,
            self.detector,
            self._records,
            self._index,
            self.counters,
            self._answers,
        )

    def __len__(self) -> int:
        return len(self._records)

    def has_machine(self, machine: str) -> bool:
        """Whether there is a record of one of its seats."""
        return any(seat_id(machine, k) in self._records for k in range(MAX_SEATS))

    def on_forgotten(self, listener: Callable[[str], None]) -> None:
        """`listener(machine)` when there is no record of any of a machine's seats any more."""
        self._on_forgotten.append(listener)

    @property
    def silence_s(self) -> float:
        """A peer whose stamp has not advanced for this long is not live."""
        return self.detector.silence_s

    def set_silence(self, silence_s: float) -> None:
        """A peer is silent after so long from now on."""
        if silence_s != self.detector.silence_s:
            self.detector.silence_s = silence_s
            self._answers.clear()

    # -- records ---------------------------------------------------------------------------

    def merge(self, record: Record, now: float) -> bool:
        """Takes a record in. Returns True when it was news: a higher stamp than the known one.

        The own record comes in the same way. A caller that hears its own id from others decides
        itself whether to take that record in."""
        peer_id, stage = record.peer_id, record.stage
        if not self.digest.is_news(peer_id, record.stamp):
            return False
        before = self._records.get(peer_id)
        if before is None:
            if not self._make_room(now):
                return False
            self._index.add(peer_id, stage)
            self.counters.add(record)
        else:
            if before.stage != stage:
                self._index.move(peer_id, before.stage, stage)
                self._answers.drop(before.stage)
            if before.counts != record.counts and self.reach.counts(peer_id):
                self.counters.replace(before, record)
        self._records[peer_id] = record
        self.digest.put(peer_id, record.stamp)
        self._answers.drop(stage)
        self.reach.merged(before, record, now)
        if before is None or _told(before) != _told(record):
            self.agreement.heard(record)
        if peer_id == self.own_peer_id:
            if before is not None and record.round > before.round:
                self._heed(self.reputation.round_began())
            return True
        self._newest_round = max(self._newest_round, record.round)
        if record.vouches != (b"" if before is None else before.vouches):
            self._heed(self.reputation.vouched(peer_id, record.vouches))
        return True

    def get(self, peer_id: str) -> Record | None:
        """The known record of a peer."""
        return self._records.get(peer_id)

    def records(self) -> list[Record]:
        """All known records, the own one included, by peer id."""
        return [self._records[p] for p in self._index.ids(ALL)]

    def newer_than(self, stamps: Mapping[str, Stamp]) -> list[Record]:
        """Records that the owner of `stamps` lacks or has older, by peer id."""
        return [self._records[p] for p in self.digest.newer_than(stamps)]

    # -- live peers ------------------------------------------------------------------------

    def reaches(self, peer_id: str, now: float) -> bool:
        """Whether a peer is live and can be called."""
        return self.is_live(peer_id, now) and not self.detector.is_lost(peer_id)

    def is_live(self, peer_id: str, now: float) -> bool:
        """Known, not LEFT, heard of within `silence_s`, also since it was lost, and in this part
        of the swarm. A peer never finds itself silent or lost."""
        if self.detector.clock.has_stood_still(now):
            self.reach.awake_s(now)
        record = self._records.get(peer_id)
        return record is not None and record.state != LEFT and self.detector.is_sound(peer_id, now)

    def gone_s(self, peer_id: str, now: float) -> float:
        """For how long a peer has not been live or not in reach, seconds: 0 for one that is,
        infinity for one that has left or is not known."""
        if self.reaches(peer_id, now):
            return 0.0
        record = self._records.get(peer_id)
        if record is None or record.state == LEFT:
            return math.inf
        return self.detector.gone_s(peer_id, now)

    def is_gone(self, peer_id: str, for_s: float, now: float) -> bool:
        """Whether `gone_s` is as much."""
        return self.gone_s(peer_id, now) >= for_s

    def live(self, now: float, stage: int = ALL) -> Sequence[Record]:
        """Records of the live peers of a stage, or of all live peers, by peer id, whether they
        count or not."""
        return self.remembered(stage, "live", now, lambda: self._live_in(stage, now))

    def is_flooded(self, now: float) -> bool:
        """Whether more peers are to show that they work than newcomers usually are: as many as
        those that count, or `MANY_NEWCOMERS` where these are fewer; or whether some have held
        rounds up of late (`await_all_but`). Only then they have to show it before they count."""
        return self.remembered(ALL, "flooded", now, lambda: self._is_flooded(now))

    def counted(self, now: float, stage: int = ALL) -> Sequence[Record]:
        """Those of the live peers that count here, by peer id: all but observers, and in a flood of
        names those that `reputation` knows."""
        return self.remembered(
            stage, "counted", now, lambda: self._that_count(self.live(now, stage), now)
        )

    def replicas(self, stage: int, now: float) -> Sequence[Record]:
        """Live replicas that serve `stage` now and count, by peer id; to one that only looks on,
        those that are `nearest`. Where there are none, all count: the stage has no others."""

        def found() -> list[Record]:
            there = [r for r in self.live(now, stage) if r.is_replica]
            own = self._records.get(self.own_peer_id)
            if own is not None and own.state == OBSERVING:
                return self.nearest(there) or there
            return self._counting(there, now)

        return self.remembered(stage, "replicas", now, found)

    def nearest(self, there: Sequence[Record]) -> list[Record]:
        """Those of some replicas of a stage whose parameters are the run's, to a peer that has none
        yet, or only looks on (`Reputation.nearest`); in the same order."""
        near = set(self.reputation.nearest([r.peer_id for r in there]))
        return [r for r in there if r.peer_id in near]

    def on_trial(self, stage: int, now: float) -> Sequence[Record]:
        """Live replicas that serve `stage`, or are about to (by the digests of their parameters),
        can be called, and are still to show that they work, by peer id."""
        return self.remembered(stage, "on trial", now, lambda: self._on_trial(stage, now))

    def is_to_show(self, stage: int, now: float) -> bool:
        """Whether the own peer has to show that it works before it counts in a stage: there are
        others through which microbatches go."""
        own = self.own_peer_id
        return (
            self.is_flooded(now)
            and not self.reputation.counts(own)
            and any(r.peer_id != own for r in self.replicas(stage, now))
        )

    def has_newcomers(self, stage: int, now: float) -> bool:
        """Whether anybody joins a stage in a flood of names, or has joined and is on trial."""
        return self.is_flooded(now) and self.remembered(
            stage,
            "newcomers",
            now,
            lambda: (
                bool(self.on_trial(stage, now))
                or any(r.state == JOINING for r in self.live(now, stage))
            ),
        )

    def in_reach(self, stage: int, now: float) -> Sequence[Record]:
        """The replicas of a stage that can be called, and are not barred, by peer id."""
        lost, barred = self.detector.is_lost, self.is_barred
        return self.remembered(
            stage,
            "in reach",
            now,
            lambda: [
                r for r in self.replicas(stage, now) if not (lost(r.peer_id) or barred(r.peer_id))
            ],
        )

    def members(self, stage: int, now: float) -> Sequence[Record]:
        """Live peers of `stage` by peer id, leaving ones included, and joining ones, which do not
        have to count. Where no other one counts, all do."""

        def found() -> list[Record]:
            there = self.live(now, stage)
            joining = [r for r in there if r.state == JOINING]
            serving = self._counting([r for r in there if r.state in (ACTIVE, LEAVING)], now)
            return sorted((*joining, *serving), key=lambda r: r.peer_id)

        return self.remembered(stage, "members", now, found)

    def takes_part(self, peer_id: str, now: float) -> bool:
        """Whether a known peer counts, or counted when it was last heard of; or serves a stage
        that has no peers which do."""
        if self.reputation.counts(peer_id):
            return True
        record = self._records.get(peer_id)
        if record is None or record.state == OBSERVING:
            return False
        if not self.is_flooded(now):
            return True
        return any(r is record for r in self.replicas(record.stage, now))

    def awaits(self, peer_id: str) -> bool:
        """Whether the end of a round waits for what this peer says that it has launched."""
        return peer_id not in self._not_awaited

    @property
    def awaits_all(self) -> bool:
        """Whether that holds for all."""
        return not self._not_awaited

    def await_all_but(self, peer_ids: frozenset[str], *, is_unknown_heard: bool) -> None:
        """From now on the ends of rounds wait for all but these. Without `is_unknown_heard`, who
        does not count yet has shown to be worth no wait: it is as in a flood of such names."""
        if (peer_ids, is_unknown_heard) != (self._not_awaited, self._is_unknown_heard):
            self._not_awaited, self._is_unknown_heard = peer_ids, is_unknown_heard
            self._answers.clear()

    def is_barred(self, peer_id: str) -> bool:
        """A peer has lied, as this one has found: it gets no work, no exchange waits for it, and
        nothing is fetched from it. In the lists of feeders and their counters it stays, for on
        those all peers have to agree."""
        return self.reputation.level(peer_id) is Level.BARRED

    def lost(self, stage: int, now: float) -> Sequence[Record]:
        """Records of peers of `stage` that are not live, or out of reach, by peer id: of those
        whose part of an exchange would be waited for (`known`)."""

        def found() -> list[Record]:
            is_lost = self.detector.is_lost
            live = {r.peer_id for r in self.live(now, stage) if not is_lost(r.peer_id)}
            there = [self._records[p] for p in self._index.ids(stage)]
            if not self._all_are_waited_for(stage, now):
                there = self._known(there)
            return [r for r in there if r.peer_id not in live]

        return self.remembered(ALL, ("lost", stage), now, found)

    def is_past(self, round_index: int, now: float) -> bool:
        """Others have begun a later round, as `shown_round` says."""
        return self._newest_round > round_index and self.shown_round(now) > round_index

    def shown_round(self, now: float) -> int:
        """The newest round that others have begun, as far as they show it together: more than half
        of all the others that serve; or of those of one stage, the own one or one next to it, this
        peer included. A later one is only the word of some. One stage is enough, for one that has
        gone on works on nothing older. 0 where nobody serves.

        Only those are heard that `reputation` knows; where it knows no other one, all."""
        return self.remembered(ALL, "shown round", now, lambda: self._shown_round(now))

    def known(self, stage: int, now: float) -> Sequence[Record]:
        """Members of a stage that serve it, or leave, and whose part of an exchange is waited for,
        by peer id: this one, and those that `reputation` knows, by what it has seen of them and the
        word of those seen at work. All members in the first rounds of a run, in which all work for
        the first time, where it knows no other one of them, of stages that are not next to its own,
        of which word does not reach it, where the run has one stage, whose replicas see nothing of
        what others compute, and where there are more peers than a record vouches for."""

        def found() -> list[Record]:
            members = [r for r in self.members(stage, now) if not self.is_barred(r.peer_id)]
            if self._all_are_waited_for(stage, now):
                return members
            serving = [r for r in members if r.stage >= 0 and r.state in (ACTIVE, LEAVING)]
            return self._known(serving)

        # It goes by who counts in other stages, and by the own record.
        return self.remembered(ALL, ("known", stage), now, found)

    def _all_are_waited_for(self, stage: int, now: float) -> bool:
        """As `known` says, whatever `reputation` knows."""
        serving, own = self.counted(now), self.get(self.own_peer_id)
        is_alone = all(r.stage == stage for r in serving if r.is_replica)
        is_early = own is None or own.round < FIRST_ROUNDS
        return is_early or self._is_far(stage) or is_alone or len(serving) > MAX_VOUCHES

    def called(self, peer_id: str, round_index: int) -> None:
        """A call of a known peer shows that it works on a round, as its record will say."""
        if peer_id in self._records and round_index > self._called.get(peer_id, 0):
            self._called[peer_id] = round_index
            self._newest_round = max(self._newest_round, round_index)
            self._answers.drop(self._records[peer_id].stage)

    def remembered(self, stage: int, name: object, now: float, ask: Callable[[], T]) -> T:
        """`ask()`, or what it returned the last time, where nothing has changed since that concerns
        the peers of `stage` (`ALL`: any peer). The caller must not change the answer."""
        if self.detector.clock.has_stood_still(now):
            self.reach.awake_s(now)
        return self._answers.get(stage, name, now, ask)

    # -- forgetting ------------------------------------------------------------------------

    def forget_old(self, now: float, after_s: float) -> list[str]:
        """Drops every peer (but the own) that has been silent, suspected or LEFT for `after_s`
        seconds; returns their ids, sorted. Feeders of the newest rounds are kept for their
        counters, because rounds may be longer than that. The old records are not taken in again for
        another `after_s`: a peer that forgets later would bring them back."""
        self.digest.expire(now, after_s)
        since = now - after_s
        newest = max((r.round for r in self.counted(now)), default=0)
        old = [
            p
            for p in self._index.ids(ALL)
            if self.detector.heard_at(p) <= since
            and p != self.own_peer_id
            and not self.is_live(p, now)
            and not (self.reputation.counts(p) and self._has_counted(p, newest))
        ]
        for peer_id in old:
            self._forget(peer_id, now)
        return old

    def forget(self, peer_id: str, now: float) -> None:
        """Drops another peer, where it is known, for lack of room. Its record from now is not taken
        in again before `forget_old` says so."""
        if peer_id in self._records and peer_id != self.own_peer_id:
            self._forget(peer_id, now)

    # -- what was seen of them -------------------------------------------------------------

    def named(self, peer_id: str) -> None:
        """A person has named this peer as one of the run, and it has answered."""
        self.reputation.named(peer_id)
        self._heed(is_news=True)

    def met(self, peer_id: str) -> None:
        """Records were exchanged with a peer to which this one turned."""
        self._heed(self.reputation.met(peer_id))

    def delivered(self, peer_id: str) -> bool:
        """A peer was seen at work (see `Reputation.delivered`); True where that is new."""
        is_news = self.reputation.delivered(peer_id, self._records)
        self._heed(is_news)
        return is_news

    def found_loss(self, peer_id: str) -> bool:
        """As `Reputation.found_loss`."""
        is_news = self.reputation.found_loss(peer_id)
        self._heed(is_news)
        return is_news

    def lied(self, peer_id: str) -> None:
        """There is evidence that a peer has lied (see `Reputation.lied`)."""
        self._heed(self.reputation.lied(peer_id))

    # -- within ----------------------------------------------------------------------------

    def _heed(self, is_news: bool) -> None:
        """Who counts has changed."""
        if is_news:
            self._answers.clear()

    def _is_flooded(self, now: float) -> bool:
        if not self._is_unknown_heard:
            return True
        counts = self.reputation.counts
        serving = [r for r in self.live(now) if r.state != OBSERVING]
        if len(serving) <= MANY_NEWCOMERS:
            return False
        num_unknown = 0
        for num_seen, r in enumerate(serving):
            if len(serving) - num_seen + num_unknown <= MANY_NEWCOMERS:
                return False  # whatever the others are
            num_unknown += not counts(r.peer_id)
        return num_unknown > max(MANY_NEWCOMERS, len(serving) - num_unknown)

    def _that_count(self, there: Sequence[Record], now: float) -> list[Record]:
        """All but observers, the own one excepted; in a flood those that `reputation` knows."""
        own, counts, is_flooded = self.own_peer_id, self.reputation.counts, self.is_flooded(now)
        return [
            r
            for r in there
            if (r.peer_id == own if r.state == OBSERVING else not is_flooded or counts(r.peer_id))
        ]

    def _shown_round(self, now: float) -> int:
        by_stage: dict[int, list[int]] = {}
        others: list[int] = []
        active = [r for r in self.counted(now) if r.stage >= 0 and r.state == ACTIVE]
        for r in self._known([r for r in active if not self.is_barred(r.peer_id)]):
            begun = max(r.round, self._called.get(r.peer_id, 0))
            if not self._is_far(r.stage):
                by_stage.setdefault(r.stage, []).append(begun)
            if r.peer_id != self.own_peer_id:
                others.append(begun)
        return max((_most_have_begun(rounds) for rounds in (others, *by_stage.values())), default=0)

    def _is_far(self, stage: int) -> bool:
        """A stage is not next to the own one, so that few of its replicas are known here."""
        mine = self._records.get(self.own_peer_id)
        return mine is not None and abs(mine.stage - stage) > 1

    def _known(self, there: list[Record]) -> list[Record]:
        """Those of these that are known; where no other one is, all."""
        own = self.own_peer_id
        known = [r for r in there if r.peer_id == own or self.reputation.works(r.peer_id)]
        return known if any(r.peer_id != own for r in known) else there

    def _counting(self, there: list[Record], now: float) -> list[Record]:
        """Those that count; where none does, all."""
        return self._that_count(there, now) or there

    def _on_trial(self, stage: int, now: float) -> list[Record]:
        counting = {r.peer_id for r in self.replicas(stage, now)}
        lost = self.detector.is_lost
        if not self.is_flooded(now):
            return []
        return [
            r
            for r in self.live(now, stage)
            if (r.is_replica or (r.state == JOINING and r.digests))
            and r.peer_id not in counting
            and not self.reputation.counts(r.peer_id)
            and not self.is_barred(r.peer_id)
            and not lost(r.peer_id)
        ]

    def _live_in(self, stage: int, now: float) -> list[Record]:
        records, sound = self._records, self.detector.sound(self._index.ids(stage), now)
        return [r for p in sound if (r := records[p]).state != LEFT]

    def _has_counted(self, peer_id: str, newest_round: int) -> bool:
        """The record of a peer that counts has samples of a round that may not have ended."""
        counts = self._records[peer_id].counts
        return any(c.committed and c.round >= newest_round for c in counts)

    def _make_room(self, now: float) -> bool:
        """Forgets the peer that has been silent longest when the view is full; False where all
        are live."""
        if len(self._records) < MAX_PEERS:
            return True
        ids = self._index.ids(ALL)
        silent = [p for p in ids if not self.is_live(p, now) and p != self.own_peer_id]
        if not silent:
            return False
        self._forget(min(silent, key=lambda p: (self.detector.heard_at(p), p)), now)
        return True

    def _forget(self, peer_id: str, now: float) -> None:
        record = self._records.pop(peer_id)
        self._called.pop(peer_id, None)
        self.reputation.forget(peer_id)
        self._index.remove(peer_id, record.stage)
        self.reach.forget(record)
        self.digest.forget(peer_id, now)
        self.agreement.forget(peer_id)
        self._answers.drop(record.stage)
        if not self.has_machine(machine := machine_of(peer_id)):
            for forget in self._on_forgotten:
                forget(machine)


def _most_have_begun(rounds: list[int]) -> int:
    """The newest round that more than half of those have begun which are in these rounds."""
    return sorted(rounds, reverse=True)[len(rounds) // 2] if rounds else 0


def _told(record: Record) -> tuple[int, int, bytes]:
    """With which parameters a peer has begun its round, as it says."""
    return record.stage, record.round, record.digests
