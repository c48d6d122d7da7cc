"""Watching a run through the records that gossip brings.

Records say what *is*; people and programs want to know what *happened*. `RunMonitor` compares
successive views and tells the difference as events, each once. Pure: time is an argument.

A round r is finished when the feeders' committed samples of r reached the global batch and
some live replica is in a later round. Rounds are told in order. A feeder's record carries only
its newest `KEPT_ROUNDS` rounds, so an onlooker that was away for longer may miss rounds; these
are told with what was seen of them, or not at all, but never twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnet.observe.events import (
    COUNTED,
    ContributionDropped,
    Counted,
    Event,
    HeldOut,
    Migrated,
    PeerJoined,
    PeerLost,
    PeerPaused,
    PeerResumed,
    RoundFinished,
    SyncMode,
)
from swarmnet.observe.text import short_id
from swarmnet.observe.view_model import GivenRow, PeerRow, RoundSplit, StageRow, Summary, ViewModel
from swarmnet.plurals import counted
from swarmnet.printable import printable
from swarmnet.protocol.membership.assignment import measurers_among
from swarmnet.protocol.membership.data_holders import only_holder
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import (
    ACTIVE,
    DIGEST_BYTES,
    JOINING,
    KEPT_ROUNDS,
    LEAVING,
    LEFT,
    OBSERVER_STAGE,
    OBSERVING,
    Record,
    RoundCount,
)
from swarmnet.protocol.membership.records import HeldOut as Measured
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import experts
from swarmnet.protocol.pipeline.held_out import told
from swarmnet.protocol.resource_limits import TOLD, told_allowances
from swarmnet.protocol.slots import slot_plan
from swarmnet.protocol.sync_modes import NO_END, RunEnd
from swarmnet.protocol.update.auto_mode import merge

RECENT_ROUNDS = 5
"""Finished rounds behind the throughput that is shown."""
CLEARLY_FASTER = 1.1
"""The fastest stage, over the slowest, from which on that one is called the bottleneck."""
SHOWN_TOTALS = (
    "sent_bytes",
    "received_bytes",
    "links",
    "direct_links",
    "direct_sent_bytes",
    "rerouted",
    "samples_computed",
)
"""Of a record's totals, those that `PeerRow` has."""
MAX_TOTALS = 256
"""Names of totals that are summed up: a record may have any names. Of more, the first and those
that are shown or told."""
GIVEN = ("samples_computed", "sent_bytes", "received_bytes")
"""Of a record's totals, those that `GivenRow` has."""
MAX_GIVEN = 4096
"""Machines of which is known what they gave. Beyond, the one goes first that computed least."""
MAX_FORGOTTEN = 1024
"""Processes that the view has forgotten and that are known again when they come back: a machine may
sleep for longer than records are kept."""


@dataclass(slots=True)
class _Seen:
    """What was last seen of a peer."""

    record: Record
    live: bool = False
    served: int = OBSERVER_STAGE
    """The stage that this process last served."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What was told of a process so far: fields of its record."""

    totals: Mapping[str, int]
    strikes: Mapping[str, int]
    paused: str


NOTHING_TOLD = _Told({}, {}, "")


@dataclass(slots=True)
class _Given:
    """What a machine gave so far."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GIVEN, 0))
    serving_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Sum:
    launched: int
    committed: int
    tokens: int
    loss_sum: float


class RunMonitor:
    """The onlooker. Give it every view through `look`; read `view_model` and `summary` at any
    time.

    Args:
        num_stages, global_batch (samples), samples_per_slot, rounds (length of the run; 0
            where it has no end), batch_ramp: of the run's spec.
        replication: owners that each optimizer shard should have.
        measures: feeders are known to measure held-out data, so that `all_told` waits for the
            first measurement. For the last it waits wherever there was one.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        global_batch: int,
        samples_per_slot: int,
        rounds: int,
        batch_ramp: tuple[tuple[int, int], ...] = (),
        replication: int = 2,
        measures: bool = False,
    ) -> None:
        self.num_stages = num_stages
        self._slots = slot_plan(global_batch, samples_per_slot, batch_ramp)
        self.samples_per_slot = samples_per_slot
        self.rounds = rounds
        self._run_end = RunEnd()
        self.replication = replication
        self.measures = measures
        self._seen: dict[str, _Seen] = {}
        self._forgotten: dict[tuple[str, int], _Told] = {}
        self._counts: dict[tuple[str, int], dict[int, RoundCount]] = {}
        self._totals: dict[str, int] = {}
        self._given: dict[str, _Given] = {}
        """By machine."""
        self._looked_at = 0.0
        self._sent_before = 0
        self._newest = 0
        self._switched = -1
        self._next: int | None = None
        self._looked = False
        self._began_unix_s = 0.0
        self._round_began_at: float | None = None
        self._recent: deque[RoundFinished] = deque(maxlen=RECENT_ROUNDS)
        self._last: RoundFinished | None = None
        self._held_out_first: HeldOut | None = None
        self._held_out_last: HeldOut | None = None
        self._num_finished = self._tokens = 0
        self._seconds = 0.0
        self._tokens_timed = self._tokens_watched = 0

    # -- looking ---------------------------------------------------------------------------

    def look(self, view: View, now: float, unix_s: float) -> list[Event]:
        """As `observe`, and the end of the run that its owner has ordered. `now`: by the clock of
        the view."""
        self._run_end = view.run_end
        live = frozenset(record.peer_id for record in view.live(now))
        return self.observe(view.records(), live, now, unix_s)

    def observe(
        self, records: Sequence[Record], live: Collection[str], now: float, unix_s: float
    ) -> list[Event]:
        """Takes a view in: all known records and the ids of the peers that live. Returns what
        happened since the last look, peers first, rounds last.

        `now`: seconds of a clock that never goes back. `unix_s`: the time to put on the events."""
        first_look, self._looked = not self._looked, True
        if first_look:
            self._began_unix_s = unix_s
        records = sorted(records, key=lambda r: r.peer_id)
        events: list[Event] = []
        for record in records:
            told = self._told_of(record)
            # What it had done before anybody looked is no news, also where it is heard of later.
            is_old = (
                told is None
                and record.peer_id not in self._seen
                and (first_look or 0 < record.started_unix_s < self._began_unix_s)
            )
            told = told or NOTHING_TOLD
            events += self._observe_peer(record, record.peer_id in live, told, is_old, unix_s)
            events += self._observe_totals(record, told.totals, is_old, unix_s)
            self._observe_given(record, told.totals, record.peer_id in live)
        self._observe_serving(0.0 if first_look else now - self._looked_at)
        self._looked_at = now
        events += self._observe_gone(records, unix_s)
        events += self._observe_held_out(records, unix_s)
        events += self._observe_switches(unix_s)
        self._observe_counts(records)
        events += self._finish_rounds(now, unix_s, first_look)
        return events

    def _told_of(self, record: Record) -> _Told | None:
        """What was told of the process whose record this is; None where it is a new one."""
        old = self._seen.get(record.peer_id)
        if old is None:
            return self._forgotten.pop((record.peer_id, record.incarnation), None)
        return _told(old.record) if old.record.incarnation == record.incarnation else None

    def _observe_peer(
        self, record: Record, live: bool, told: _Told, is_old: bool, unix_s: float
    ) -> list[Event]:
        """`is_old`: the first that is seen of a peer that had been there before."""
        events: list[Event] = []
        live = live and record.state != LEFT
        old = self._seen.get(record.peer_id)
        same_process = old is not None and old.record.incarnation == record.incarnation
        seen = _Seen(record, live, old.served if old and same_process else OBSERVER_STAGE)
        self._seen[record.peer_id] = seen
        if record.paused and not told.paused and not is_old:
            events.append(PeerPaused(unix_s, record.peer_id, printable(record.paused)))
        elif told.paused and not record.paused:
            events.append(PeerResumed(unix_s, record.peer_id))
        if record.state != OBSERVING:
            was_live = old is not None and old.live
            if live and not was_live:
                events.append(PeerJoined(unix_s, record.peer_id, record.stage))
            elif was_live and not live:
                events.append(_lost(record, seen.served, unix_s))
            if record.is_replica:
                if seen.served not in (OBSERVER_STAGE, record.stage):
                    events.append(Migrated(unix_s, record.peer_id, seen.served, record.stage))
                seen.served = record.stage
        return events if is_old else events + _strikes(record, told.strikes, unix_s)

    def _observe_totals(
        self, record: Record, before: Mapping[str, int], is_old: bool, unix_s: float
    ) -> list[Event]:
        events: list[Event] = []
        for key in sorted(record.totals):
            grown = record.totals[key] - before.get(key, 0)
            if grown <= 0 or not self._has_room(key):
                continue
            self._totals[key] = self._totals.get(key, 0) + grown
            if is_old and key == "sent_bytes":
                self._sent_before += grown
            if key in COUNTED and not is_old:
                events.append(Counted(unix_s, COUNTED[key], record.peer_id, grown))
        return events

    def _observe_given(self, record: Record, before: Mapping[str, int], live: bool) -> None:
        """Of machines that were live members once: anybody may show a record."""
        machine = machine_of(record.peer_id)
        given = self._given.get(machine)
        if given is None:
            if not live or record.state not in (JOINING, ACTIVE, LEAVING):
                return
            if len(self._given) >= MAX_GIVEN:
                least = min(self._given, key=lambda m: self._given[m].totals["samples_computed"])
                del self._given[least]
            given = self._given[machine] = _Given()
        for key in GIVEN:
            given.totals[key] += max(0, record.totals.get(key, 0) - before.get(key, 0))

    def _observe_serving(self, seconds: float) -> None:
        """Since the last look."""
        served = {
            machine_of(peer_id)
            for peer_id, seen in self._seen.items()
            if seen.live and seen.record.is_replica
        }
        for machine in served & self._given.keys():
            self._given[machine].serving_s += seconds

    def _has_room(self, total: str) -> bool:
        if total.startswith((TOLD, experts.TOLD)):  # not a count since the start
            return False
        if total in self._totals or total in COUNTED or total in SHOWN_TOTALS:
            return True
        return len(self._totals) < MAX_TOTALS

    def _observe_gone(self, records: Sequence[Record], unix_s: float) -> list[Event]:
        """Peers that the view has forgotten."""
        known = {record.peer_id for record in records}
        gone = [seen for peer_id, seen in sorted(self._seen.items()) if peer_id not in known]
        for seen in gone:
            record = self._seen.pop(seen.record.peer_id).record
            if record.state != LEFT:  # a process that has left does not come back
                self._forgotten[record.peer_id, record.incarnation] = _told(record)
            if len(self._forgotten) > MAX_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
        lost = [s for s in gone if s.live and s.record.state != OBSERVING]
        return [_lost(s.record, s.served, unix_s) for s in lost]

    def _observe_held_out(self, records: Sequence[Record], unix_s: float) -> list[Event]:
        newest, last = newest_held_out(records, self._serving(), self._end), self._held_out_last
        if newest is None or (last is not None and newest.round <= last.round):
            return []
        event = HeldOut(unix_s, newest.round, newest.loss, newest.bits_per_byte)
        self._held_out_first = self._held_out_first or event
        self._held_out_last = event
        return [event]

    def _observe_switches(self, unix_s: float) -> list[Event]:
        """What mode `auto` has decided since the last look."""
        known = merge(*(r.switches for r in self._serving()))
        new = [s for s in known if s.round > self._switched]
        self._switched = max([self._switched, *(s.round for s in new)])
        return [SyncMode(unix_s, s.round, s.mode, s.round_s, s.exchange_s) for s in new]

    # -- rounds ----------------------------------------------------------------------------

    def _observe_counts(self, records: Sequence[Record]) -> None:
        """Merges the feeders' counters by maximum, and forgets rounds that are told."""
        reached = self._reached()
        newest = max((r for _, r in reached), default=0)
        self._newest = max(self._newest, min(newest, self._end))
        first = max(0, self._newest - KEPT_ROUNDS) if self._next is None else self._next
        for record in records:
            key = (record.peer_id, record.incarnation)
            kept = self._counts.setdefault(key, {})
            for count in record.counts:
                known = kept.get(count.round)
                if known is None or len(known.committed) <= len(count.committed):
                    kept[count.round] = count
        for key, kept in list(self._counts.items()):
            wanted = {r: c for r, c in kept.items() if first <= r <= self._newest + KEPT_ROUNDS}
            if wanted:
                self._counts[key] = wanted
            else:
                del self._counts[key]
        if self._next is None and reached:
            whole = (r for r in range(first, self._newest) if self._is_whole(r))
            self._next = next(whole, self._newest)

    def _sum(self, round_index: int) -> _Sum:
        counts = [kept[round_index] for kept in self._counts.values() if round_index in kept]
        return _Sum(
            launched=self.samples_per_slot * _num_slots(c.launched.mask for c in counts),
            committed=self.samples_per_slot
            * _num_slots(c.committed.mask | c.settled.mask for c in counts),
            tokens=sum(c.tokens for c in counts),
            loss_sum=sum(c.loss_sum for c in counts),
        )

    def _is_whole(self, round_index: int) -> bool:
        return self._sum(round_index).committed >= self._batch_of(round_index)

    def _batch_of(self, round_index: int) -> int:
        """Samples of a round."""
        return self.samples_per_slot * self._slots.of(round_index)

    def _finish_rounds(self, now: float, unix_s: float, first_look: bool) -> list[Event]:
        """Tells the rounds that are over, in order. Rounds that are told at one look share the
        time since the look before; the first of a run is timed from its first launch."""
        if self._next is None:
            return []
        over: list[tuple[int, _Sum]] = []
        while self._next < self._newest:
            given_up = self._newest - self._next > KEPT_ROUNDS
            if not given_up and not self._is_whole(self._next):
                break
            total = self._sum(self._next)
            if total.tokens > 0:  # else no target of it has a loss, and there is none to tell
                over.append((self._next, total))
            self._next = self._next + 1 if total.committed > 0 else self._next_known()
        began_at = self._round_began_at
        if not over:
            if began_at is None and self._newest == 0 and self._sum(0).launched > 0:
                self._round_began_at = now
            return []
        seconds = 0.0 if began_at is None else (now - began_at) / len(over)
        self._round_began_at = None if first_look else now
        return [self._finish(r, total, seconds, unix_s, first_look) for r, total in over]

    def _next_known(self) -> int:
        """The next round of which anything is known: nothing can be told of those before."""
        known = {r for kept in self._counts.values() for r in kept if r > (self._next or 0)}
        return min(min(known, default=self._newest), self._newest - KEPT_ROUNDS)

    def _finish(
        self, round_index: int, total: _Sum, seconds: float, unix_s: float, first_look: bool
    ) -> RoundFinished:
        event = RoundFinished(
            time_unix_s=unix_s,
            round=round_index,
            loss=total.loss_sum / total.tokens,
            samples=total.committed,
            tokens=total.tokens,
            seconds=seconds,
            tokens_per_s=total.tokens / seconds if seconds > 0 else 0.0,
            peers=len(self._serving()),
            spread=self._spread(),
        )
        self._last = event
        if seconds > 0:
            self._recent.append(event)
        self._num_finished += 1
        self._tokens += total.tokens
        self._seconds += seconds
        self._tokens_timed += total.tokens if seconds > 0 else 0
        self._tokens_watched += 0 if first_look else total.tokens
        return event

    def _spread(self) -> float:
        return max((r.spread for r in self._serving()), default=0.0)

    def _serving(self) -> list[Record]:
        """Records of the live peers that serve, or are about to serve, a stage; by peer id."""
        return [
            seen.record
            for _, seen in sorted(self._seen.items())
            if seen.live and seen.record.state != OBSERVING and seen.record.stage >= 0
        ]

    def _reached(self) -> list[tuple[int, int]]:
        """(stage, round) of each replica that lives, and of each that said goodbye in that round:
        at the end of a run they may all have left between two looks."""
        return [
            (seen.served, seen.record.round)
            for seen in self._seen.values()
            if seen.served != OBSERVER_STAGE
            and (seen.record.state == LEFT or (seen.live and seen.record.is_replica))
        ]

    # -- telling ---------------------------------------------------------------------------

    @property
    def ends_with(self) -> int | None:
        """As of `ViewModel`."""
        return self._run_end.round if self._run_end.is_ordered else None

    @property
    def _end(self) -> int:
        return min(self.rounds or NO_END, self._run_end.round)

    @property
    def done(self) -> bool:
        """The run is over: every stage has a replica that has made its last update. One that its
        owner ends may not come so far; it is over when all replicas have left."""
        ready = {stage for stage, r in self._reached() if r >= self._end}
        if all(stage in ready for stage in range(self.num_stages)):
            return True
        was_served = any(seen.served != OBSERVER_STAGE for seen in self._seen.values())
        is_served = any(seen.live and seen.record.is_replica for seen in self._seen.values())
        return self._run_end.is_ordered and was_served and not is_served

    @property
    def all_told(self) -> bool:
        """The run is done, every round was told, and so was the last held-out measurement. Where
        its owner ends it, there is none, and it may end in the middle of a round."""
        last = self._held_out_last
        if self._run_end.is_ordered:
            return self.done and (self._next or 0) >= min(self._newest, self._end)
        if last is None:
            measured = not self.measures
        else:
            measured = last.round >= self._end
        return self.done and self._next is not None and self._next >= self._end and measured

    def view_model(self) -> ViewModel:
        """The run as of the last look."""
        total = self._sum(self._newest)
        seconds = sum(event.seconds for event in self._recent)
        held_out = self._held_out_last
        return ViewModel(
            round=self._newest,
            rounds=self.rounds,
            launched=total.launched,
            committed=total.committed,
            global_batch=self._batch_of(self._newest),
            done=self.done,
            loss=self._last.loss if self._last else None,
            tokens_per_s=sum(e.tokens for e in self._recent) / seconds if seconds > 0 else None,
            held_out_round=held_out.round if held_out else None,
            held_out_loss=held_out.loss if held_out else None,
            held_out_bits_per_byte=held_out.bits_per_byte if held_out else None,
            stages=self._stage_rows(),
            peers=tuple(self._peer_rows()),
            totals=dict(sorted(self._totals.items())),
            spread=self._spread(),
            samples_per_s=sum(e.samples for e in self._recent) / seconds if seconds > 0 else None,
            split=self._split(),
            data_risk=""
            if self.done
            else data_risk(s.record for s in self._seen.values() if s.live),
            ends_with=self.ends_with,
            given=self._given_rows(),
        )

    def _stage_rows(self) -> tuple[StageRow, ...]:
        serving = self._serving()
        members = [[r for r in serving if r.stage == k] for k in range(self.num_stages)]
        rates = [sum(r.samples_per_s for r in ms if r.state == ACTIVE) for ms in members]
        slowest = bottleneck(rates)
        return tuple(
            self._stage_row(k, members[k], rates[k], k == slowest) for k in range(self.num_stages)
        )

    def _stage_row(
        self, stage: int, members: Sequence[Record], rate: float, is_bottleneck: bool
    ) -> StageRow:
        replicas = [r for r in members if r.state == ACTIVE]
        owners = owners_by_shard(members)
        wanted = min(self.replication, len(replicas))
        num_thin = sum(n < wanted for n in owners)
        return StageRow(
            stage=stage,
            num_replicas=len(replicas),
            num_joining=sum(r.state == JOINING for r in members),
            samples_per_s=rate,
            fewest_owners=min(owners, default=None),
            num_thin_shards=num_thin,
            is_bottleneck=is_bottleneck,
            risk=risk(stage, replicas, num_thin, wanted, len(owners)),
        )

    def _split(self) -> RoundSplit | None:
        told = [r for r in self._serving() if r.is_replica and r.last_open_s > 0]
        if not told:
            return None
        count = len(told)
        return RoundSplit(
            compute_s=sum(r.last_busy_s for r in told) / count,
            exchange_s=sum(r.last_exchange_s for r in told) / count,
            waiting_s=sum(max(0.0, r.last_open_s - r.last_busy_s) for r in told) / count,
        )

    def _given_rows(self) -> tuple[GivenRow, ...]:
        rows = [
            GivenRow(machine, **given.totals, serving_s=given.serving_s)
            for machine, given in self._given.items()
        ]
        return tuple(sorted(rows, key=lambda r: (-r.samples_computed, r.machine)))

    def _peer_rows(self) -> list[PeerRow]:
        shown = [s for s in self._seen.values() if s.record.state != OBSERVING or s.record.paused]
        shown.sort(key=lambda s: (not s.live, s.record.stage, s.record.peer_id))
        return [_peer_row(seen.record, seen.live) for seen in shown]

    def summary(self) -> Summary:
        """The run as far as it was told."""
        sent = self._totals.get("sent_bytes", 0) - self._sent_before
        return Summary(
            rounds=self._num_finished,
            tokens=self._tokens,
            tokens_per_s=self._tokens_timed / self._seconds if self._seconds > 0 else 0.0,
            held_out_first=self._held_out_first,
            held_out_last=self._held_out_last,
            totals=dict(self._totals),
            bytes_per_token=sent / self._tokens_watched if self._tokens_watched else 0.0,
        )


def newest_held_out(
    records: Iterable[Record], live: Iterable[Record], rounds: int
) -> Measured | None:
    """The newest held-out measurement in a run of so many rounds, by a peer whose turn it was, as
    far as is known. None can be of a later round. `live`: those of the records that serve now."""
    turns = measurers_among(live)
    measured = [h for h in told(records, turns).values() if h.round <= rounds]
    return max(measured, key=lambda h: h.round, default=None)


def bottleneck(rates: Sequence[float]) -> int | None:
    """The slowest of several stages that have all been measured, unless they are about equal."""
    if len(rates) < 2 or min(rates) <= 0 or max(rates) < CLEARLY_FASTER * min(rates):
        return None
    return rates.index(min(rates))


def busy_part(record: Record) -> float:
    """Of a peer's last round, its exchange included, in which its device worked."""
    whole = record.last_open_s + record.last_exchange_s
    return min(1.0, record.last_busy_s / whole) if whole > 0 else 0.0


def owners_by_shard(members: Sequence[Record]) -> list[int]:
    """Live owners of each of a stage's optimizer shards; empty while nobody says what there is."""
    num_shards = max((len(r.digests) // DIGEST_BYTES for r in members), default=0)
    owners = np.zeros(num_shards, np.int64)
    for r in members:
        bits = np.unpackbits(np.frombuffer(r.holds, np.uint8), bitorder="little")[:num_shards]
        owners[: len(bits)] += bits
    return [int(n) for n in owners]


def risk(
    stage: int, replicas: Sequence[Record], num_thin: int, wanted: int, num_shards: int
) -> str:
    """What may go wrong with a stage, in words: the worst first."""
    if not replicas:
        return f"stage {stage} has nobody: training waits"
    if len(replicas) == 1:
        return f"stage {stage}: one failure from loss"
    machines = {machine_of(r.peer_id) for r in replicas}
    if num_thin:
        return (
            f"stage {stage}: {num_thin} of {counted(num_shards, 'shard')} with fewer than "
            f"{counted(wanted, 'owner')}"
        )
    if len(machines) == 1:
        return f"stage {stage}: all its replicas are one machine"
    return ""


def data_risk(live: Iterable[Record]) -> str:
    """What the loss of one peer would mean for the data, in words; empty where others have them."""
    only = only_holder(live)
    if only is None:
        return ""
    what = (
        "start another peer with --fetch-data, which gets the data from it"
        if only.serves_data
        else "restart it with --serve-data, or give another peer the data (--data)"
    )
    return f"the run hangs on {short_id(only.peer_id)}, its only feeder: {what}"


def _peer_row(r: Record, live: bool) -> PeerRow:
    state = "paused" if r.paused else r.state
    busiest_expert, expert_drops = experts.told_experts(r.totals)
    return PeerRow(
        peer_id=r.peer_id,
        stage=r.stage,
        state="lost" if not live and r.state != LEFT else state,
        live=live,
        round=r.round,
        samples_per_s=r.samples_per_s,
        queue_length=r.queue_length,
        **{name: r.totals.get(name, 0) for name in SHOWN_TOTALS},
        agent=printable(r.agent),
        started_unix_s=r.started_unix_s,
        upload_bytes_per_s=r.upload_bytes_per_s,
        busy=busy_part(r),
        has_data=r.has_data,
        paused=printable(r.paused),
        allowances=told_allowances(r.totals),
        household=r.house,
        busiest_expert=busiest_expert,
        expert_drops=expert_drops,
    )


def _told(record: Record) -> _Told:
    return _Told(record.totals, record.strikes, record.paused)


def _strikes(record: Record, known: Mapping[str, int], unix_s: float) -> list[Event]:
    """What a primary newly says of bad contributions."""
    return [
        ContributionDropped(unix_s, sender, count - known.get(sender, 0), record.peer_id)
        for sender, count in sorted(record.strikes.items())
        if count > known.get(sender, 0)
    ]


def _lost(record: Record, served: int, unix_s: float) -> PeerLost:
    """`served`: the stage that it served last; a record of one that left names none."""
    clean = record.state in (LEFT, LEAVING)
    stage = served if record.stage == OBSERVER_STAGE else record.stage
    return PeerLost(unix_s, record.peer_id, stage, clean)


def _num_slots(masks: Iterable[int]) -> int:
    """Of the union of sets of slots, each a mask."""
    union = 0
    for mask in masks:
        union |= mask
    return union.bit_count()
