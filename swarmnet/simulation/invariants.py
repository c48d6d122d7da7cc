"""The invariants of a simulated swarm, which must hold at every moment, whatever peers have died.

`InvariantMonitor` is told of every piece of work at once (by the synthetic stages and optimizers)
and checks the peers at every `look`. The first broken invariant is kept with its time; the run ends
there.

1. A microbatch of round r meets only the parameters of round r, and its backward the same as its
   forward.
2. No optimizer step contains a microbatch twice, or one of another round, and no optimizer state
   sees two steps of one round; sums are what their microbatches add up to. In mode `local` a step
   may contain microbatches of the exchange before, that were not in the step of that one.
3. What a stage averaged in a round was committed by a feeder. Committed = averaged + lost, exactly,
   by the peers' own books too, and no loss is told twice.
   Where replicas make steps of their own, no two of a stage have the same microbatch in theirs.
4. Replicas of a stage in the same round agree within `Bounds.converge_s`: in their common
   parameters, where they make steps of their own. In mode `gossip`, where they have none, they are
   never further apart than `Bounds.spread_meetings`.
5. A peer that moves leaves another replica behind.
6. Queues stay within their limits.
7. Peers that no cut separates see each other: no peer of a stage is on an island for longer than
   `Bounds.island_s`.
8. While every stage has a live replica the run continues: a round ends within `Bounds.progress_s`
   of the last one or of the last fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from swarmnet.ports import StepKey
from swarmnet.protocol.membership.records import ACTIVE, OBSERVER_STAGE
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL, MOST_LATE, SyncPlan
from swarmnet.protocol.update.lost_samples import Loss
from swarmnet.simulation.islands import Islands, parts
from swarmnet.simulation.stage import Gradient, check_sum
from swarmnet.swarm.peer import Peer

KEPT_ROUNDS = 3
"""Rounds after which nothing can be committed or averaged any more, and the books are closed."""
MIN_MEETING_STEPS = 2
ISLANDS_EVERY_S = 1.0
MAX_WATCHED = 64
"""Largest swarm that is searched for islands, through the views of all its peers."""
SPARE_JOBS = 8
"""Pieces of device work beside those of microbatches, at most."""


class InvariantBroken(AssertionError):
    """An invariant of the swarm does not hold."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Virtual seconds within which the swarm must have recovered."""

    converge_s: float = 30.0
    progress_s: float = 60.0
    island_s: float = 15.0
    spread_meetings: float = 10.0
    """In mode `gossip`: how far replicas may be apart, in own steps between two meetings."""


@dataclass
class Member:
    """A peer of the simulation, as the monitor sees it."""

    peer: Peer
    frozen_until: float = 0.0
    leaving: bool = False
    stage: int | None = None
    """The stage that it served at the last look."""


@dataclass
class Books:
    """One round's accounts."""

    began_at: float = 0.0
    committed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Path by microbatch id, as the feeders say."""
    averaged: dict[tuple[int, int], list[frozenset[int]]] = field(default_factory=dict)
    """(stage, shard): the microbatches of every aggregate that an optimizer step used."""
    late: dict[tuple[int, int], dict[int, list[frozenset[int]]]] = field(default_factory=dict)
    """The same of those that were in the steps of a later exchange, by that."""
    own: dict[int, dict[int, str]] = field(default_factory=dict)
    """By stage: microbatch id to the peer that made an own step with it."""
    losses: dict[int, list[Loss]] = field(default_factory=dict)
    """By stage, the reports of its replicas about the round's books."""
    tellers: dict[int, list[str]] = field(default_factory=dict)
    """By stage, the reporting peers."""
    retold: dict[int, None] = field(default_factory=dict)
    """Stages where another one reported again: a reporting peer died at once, or was parted from
    it."""


@dataclass
class InvariantMonitor:
    """Checks one run. `now` gives virtual time; `log(kind, **facts)` is the run's event log."""

    now: Callable[[], float]
    log: Callable[..., None]
    num_stages: int
    num_shards: int
    bounds: Bounds = field(default_factory=Bounds)
    on_commit: Callable[[StepKey], None] = lambda key: None
    tokens_per_microbatch: int = 1
    samples_per_microbatch: int = 1
    plan: SyncPlan = field(default_factory=SyncPlan)
    broken: str | None = None
    keeps_books: bool = True
    """Compares what was committed with what was averaged."""
    is_cut: Callable[[], bool] = lambda: False
    """Whether a cut separates peers at the moment."""
    is_parted: Callable[[str, str], bool] = lambda one, other: False
    """Whether no message gets from one peer to the other at the moment, nor back."""
    num_committed: int = 0
    """Microbatches."""
    num_settled: int = 0
    """Committed microbatches of rounds whose updates are made: these may be in `lost`."""
    num_checks: int = 0
    lost: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(round, stage): microbatches that were committed and not averaged, of closed books."""
    lost_part: float = 0.0
    """Microbatches that were committed and not averaged, a mean over all shards of all stages."""
    untold: int = 0
    """Microbatches, once a stage, that a feeder committed and told no peer before it died."""
    splits: int = 0
    """Shards that were stepped with different aggregates in one round."""
    last_fault_at: float = 0.0
    """Time of the last beginning or end of a crash, stall or cut."""
    closed_rounds: int = 0

    def __post_init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._books: dict[int, Books] = {}
        self._closed: dict[int, Books] = {}
        """The last closed books: an exchange may be about several rounds."""
        self._stepped: dict[tuple[str, int, int, int], int] = {}
        self._progress_at = 0.0
        self._best_round = -1
        self._stepped_round = -1
        self._finishing = False
        self._apart_since: dict[int, float] = {}
        self.islands = Islands()
        self._islands_at = float("-inf")

    # ---- work -------------------------------------------------------------------------------

    def observer(self, peer_id: str, incarnation: int, stage_index: int) -> Callable[..., None]:
        """The observer of the synthetic stage and optimizer of a peer."""
        return partial(self._observe, peer_id, incarnation, stage_index)

    def _observe(
        self, peer_id: str, incarnation: int, stage_index: int, event: str, **facts: Any
    ) -> None:
        self.num_checks += 1
        if event == "step":
            self._on_step(peer_id, incarnation, stage_index, **facts)
        elif event == "replaced":  # the state before is gone, and what it had seen
            self._stepped.pop((peer_id, incarnation, stage_index, facts["shard"]), None)
        elif event == "own_step":
            self._on_own_step(peer_id, stage_index, **facts)
        elif event in ("forward", "backward"):
            self._on_microbatch(peer_id, incarnation, event, **facts)
        elif event == "retract":
            self.log("retract", peer=peer_id, stage=stage_index, key=facts["key"])

    def _on_microbatch(
        self,
        peer_id: str,
        incarnation: int,
        event: str,
        key: StepKey,
        weights: bytes,
        forward_weights: bytes = b"",
    ) -> None:
        member = self.members.get(peer_id)
        if member is None or member.peer.identity.incarnation != incarnation:
            return  # a process that was killed while it was stopped: its device is gone too
        replica = member.peer.replica
        if replica is not None and key[0] not in (replica.round, replica.round + replica.ahead):
            self.fail(f"{event} of round {key[0]} at {peer_id}, which is in round {replica.round}")
        if forward_weights and forward_weights != weights:
            self.fail(f"backward of {key} at {peer_id} met other parameters than its forward")

    def _on_step(
        self,
        peer_id: str,
        incarnation: int,
        stage_index: int,
        shard: int,
        round: int,
        gradient: Gradient,
    ) -> None:
        where = f"round {round} stage {stage_index} shard {shard} at {peer_id}"
        if round > self._stepped_round:  # rounds may be shorter than the time between two looks
            self._stepped_round = round
            for member in self.members.values():
                self.collect(member)
        twice = sorted(key for key, times in gradient.ids.items() if times != 1)
        if twice:
            self.fail(f"{where}: counted {gradient.ids[twice[0]]} times: {twice[0]}")
        window, before = self.plan.window(shard, round), range(0)
        if self.plan.mode == LOCAL:
            earlier = self.plan.exchanges_before(shard, round, MOST_LATE)
            first = self.plan.window(shard, earlier[-1]).start if earlier else window.start
            before = range(first, window.start)
        if any(key[0] not in window and key[0] not in before for key in gradient.ids):
            self.fail(f"{where}: a gradient of another round")
        if not check_sum(stage_index, shard, gradient):
            self.fail(f"{where}: the sum is not that of its microbatches")
        state = (peer_id, incarnation, stage_index, shard)
        if self._stepped.get(state, -1) >= round:
            self.fail(f"{where}: a second step of this round")
        self._stepped[state] = round
        for r in (*before, *window):
            ids = frozenset(key[1] for key in gradient.ids if key[0] == r)
            if r in before and not ids:
                continue
            book = self._book(r)
            if r in before:
                late = book.late.setdefault((stage_index, shard), {})
                known = late.setdefault(round, [])
            else:
                known = book.averaged.setdefault((stage_index, shard), [])
            if ids not in known:
                known.append(ids)
                if len(known) > 1:
                    self.splits += 1
        n = len(gradient.ids)
        self.log("step", peer=peer_id, round=round, stage=stage_index, shard=shard, n=n)

    def _on_own_step(
        self, peer_id: str, stage_index: int, round: int, ids: Counter[StepKey], num_tokens: int
    ) -> None:
        """A replica's own step: each microbatch is in one of them, at each stage."""
        where = f"the own step of round {round} stage {stage_index} at {peer_id}"
        if num_tokens != self.tokens_per_microbatch * ids.total():
            self.fail(f"{where}: {num_tokens} tokens, {ids.total()} microbatches")
        if any(key[0] != round for key in ids):
            self.fail(f"{where}: a gradient of another round")
        own = self._book(round).own.setdefault(stage_index, {})
        for key, times in sorted(ids.items()):
            if times != 1 or own.setdefault(key[1], peer_id) != peer_id:
                self.fail(f"{where}: {key} is in one of {own[key[1]]} too")
        if self.plan.mode == GOSSIP:  # nothing else counts them
            for j in range(self.num_shards):
                self._book(round).averaged[(stage_index, j)] = [frozenset(own)]
        self.log("own_step", peer=peer_id, round=round, stage=stage_index, n=len(ids))

    def _book(self, round_index: int) -> Books:
        return self._books.setdefault(round_index, Books(self.now()))

    def reported(self, peer_id: str, loss: Loss) -> None:
        """A peer closed the books of a round for its stage."""
        self.num_checks += 1
        self.log("books", peer=peer_id, round=loss.round, stage=loss.stage, lost=loss.lost_samples)
        if loss.round >= self.closed_rounds:
            book = self._book(loss.round)
            tellers = book.tellers.setdefault(loss.stage, [])
            if any(t not in self.members or self.is_parted(t, peer_id) for t in tellers):
                book.retold[loss.stage] = None
            tellers.append(peer_id)
            book.losses.setdefault(loss.stage, []).append(loss)

    # ---- looking ----------------------------------------------------------------------------

    def look(self) -> None:
        """Checks the state of every peer. Raises `InvariantBroken`."""
        for member in self.members.values():
            self.collect(member)
            self._check_queues(member)
            self._check_move(member)
        self._check_digests()
        self._check_islands()
        self._check_progress()
        least = self._least_settled() - KEPT_ROUNDS
        for r in sorted(r for r in self._books if r < least):
            self._close(r)
        if self.broken is not None:
            raise InvariantBroken(self.broken)

    def finish(self) -> None:
        """Closes the books of the rounds that every stage has finished."""
        self.look()
        self._finishing = True
        for r in sorted(r for r in self._books if r < self._least_settled()):
            self._close(r)
        if self.broken is not None:
            raise InvariantBroken(self.broken)

    def fail(self, text: str) -> None:
        """Keeps the first broken invariant."""
        if self.broken is None:
            self.broken = f"at {self.now():.3f} s: {text}"
            self.log("broken", text=text)

    def fault(self) -> None:
        """A fault began or ended just now."""
        self.last_fault_at = self.now()

    def collect(self, member: Member) -> None:
        """Takes in the commits of a feeder. To be called before a peer is lost."""
        feeder = member.peer.feeder
        if feeder is None:
            return
        for r, committed in feeder.rounds.committed_by_id().items():
            if r < self.closed_rounds:
                continue
            book = self._book(r)
            for the_id, path in committed.items():
                if the_id in book.committed:
                    continue
                book.committed[the_id] = path
                self.num_committed += 1
                self.on_commit((r, the_id))

    def _live(self) -> Iterable[Member]:
        now = self.now()
        return (m for m in self.members.values() if m.frozen_until <= now)

    def _least_round(self) -> int:
        """The oldest round on which a peer, even one that is cut off, may still work."""
        members = self.members.values()
        return min((m.peer.replica.round for m in members if m.peer.replica is not None), default=0)

    def _least_settled(self) -> int:
        """No peer has anything to exchange any more for the rounds before this one."""
        least = self._least_round()
        if self.plan.mode == GOSSIP:
            return least
        if self.plan.mode in (DELAYED, AUTO):  # an exchange may run beside the round
            return max(0, least - 1)
        last = [self.plan.last_exchange(j, least) for j in range(self.num_shards)]
        if self.plan.mode == LOCAL and least < self.plan.rounds:  # what is late is in a later one
            before = [self.plan.exchanges_before(j, e, MOST_LATE) for j, e in enumerate(last)]
            last = [e[-1] if len(e) == MOST_LATE else -1 for e in before]
        return min(last) + 1

    def _check_queues(self, member: Member) -> None:
        replica, limits = member.peer.replica, member.peer.limits
        if replica is None:
            return
        flying, waiting = member.peer.steps.num_in_flight, replica.device.num_waiting
        if flying > limits.max_open_steps or waiting > flying + SPARE_JOBS + len(replica.ledger):
            self.fail(
                f"{member.peer.transport.peer_id}: {flying} microbatches, {waiting} jobs waiting"
            )

    def _check_move(self, member: Member) -> None:
        own = member.peer.gossip.own
        serving = own.stage if own.state == ACTIVE else None
        left, member.stage = member.stage, own.stage
        moved = left is not None and left >= 0 and own.stage != left and not member.leaving
        if moved:
            self.log("moved", peer=own.peer_id, source=left, target=own.stage)
            if not any(m.stage == left and m.peer.gossip.own.state == ACTIVE for m in self._live()):
                self.fail(f"{own.peer_id} moved from stage {left} and left nobody there")
        if serving is None and left is None:
            member.stage = None

    def _check_digests(self) -> None:
        if self.plan.mode == GOSSIP:
            self._check_spread()
            return
        groups: dict[tuple[int, int], set[bytes]] = {}
        for m in self._live():
            replica = m.peer.replica
            if replica is None or not replica.synced or replica.closed:
                continue
            held: Any = replica.local or replica.stage
            groups.setdefault((replica.index, replica.round), set()).add(held.weights)
        apart = {k[0] for k, digests in groups.items() if len(digests) > 1}
        now = self.now()
        for s in range(self.num_stages):
            if s not in apart:
                self._apart_since.pop(s, None)
                continue
            since = max(self._apart_since.setdefault(s, now), self.last_fault_at)
            if now - since > self.bounds.converge_s:
                self.fail(f"the replicas of stage {s} have differed since {since:.1f} s")

    def _check_spread(self) -> None:
        """In mode `gossip` replicas never become equal; none stays behind the others for long."""
        groups: dict[tuple[int, int], list[float]] = {}
        for m in self._live():
            replica = m.peer.replica
            if replica is None or not replica.synced or replica.closed:
                continue
            local: Any = replica.local
            groups.setdefault((replica.index, replica.round), []).append(local.progress)
        meeting = max(MIN_MEETING_STEPS, self.plan.local_steps)
        for (s, r), steps in groups.items():
            apart = max(steps) - min(steps)
            if apart > self.bounds.spread_meetings * meeting:
                self.fail(f"round {r}: replicas of stage {s} are {apart:.0f} own steps apart")

    def _check_islands(self) -> None:
        now = self.now()
        if now - self._islands_at < ISLANDS_EVERY_S or len(self.members) > MAX_WATCHED:
            return
        self._islands_at = now
        sees = {
            m.peer.gossip.own.peer_id: frozenset(
                r.peer_id for r in m.peer.view.live(now) if r.peer_id in self.members
            )
            for m in (() if self.is_cut() else self._live())
            if not m.leaving and m.peer.gossip.own.stage != OBSERVER_STAGE
        }
        if self.islands.look(sees, now) > self.bounds.island_s:
            self.fail(f"islands: {parts(sees)}")

    def _check_progress(self) -> None:
        now = self.now()
        served = set()
        best = self._best_round
        for m in self._live():
            replica = m.peer.replica
            if replica is not None and replica.synced:
                served.add(replica.index)
                best = max(best, replica.round)
        if best > self._best_round:
            self._best_round = best
            self._progress_at = now
        if len(served) < self.num_stages:
            self._progress_at = now
        since = max(self._progress_at, self.last_fault_at)
        if now - since > self.bounds.progress_s:
            self.fail(f"nothing has gone on since {since:.1f} s: {self.describe()}")

    def _close(self, r: int) -> None:
        """Compares what was committed with what was averaged."""
        book = self._books.pop(r)
        self.closed_rounds = max(self.closed_rounds, r + 1)
        committed = set(book.committed)
        self.num_settled += len(committed)
        for s in range(self.num_stages):
            for j in range(self.num_shards):
                results = book.averaged.get((s, j), [])
                averaged = _most(results)
                for sums in book.late.get((s, j), {}).values():
                    late = _most(sums)
                    if twice := averaged & late:
                        self.fail(f"round {r} stage {s} shard {j}: averaged twice: {min(twice)}")
                    averaged |= late
                extra = sorted(averaged - committed)
                if extra and self.keeps_books:
                    self.fail(
                        f"round {r} stage {s} shard {j}: {len(extra)} microbatches were averaged "
                        f"that no feeder committed: {extra[0]}"
                    )
                missing = len(committed) - len(averaged & committed)
                self.lost[(r, s)] = max(self.lost[(r, s)], missing)
                self.lost_part += missing / (self.num_stages * self.num_shards)
        self._closed[r] = book
        for old in [q for q in self._closed if q <= r - self.plan.local_steps]:
            del self._closed[old]
        window = [self._closed[q] for q in self.plan.window(0, r) if q in self._closed]
        if self.keeps_books and self.plan.mode != GOSSIP and self.plan.is_due(0, r):
            for s in range(self.num_stages):
                self._check_losses(r, s, window)
        lost = [(s, self.lost[(r, s)]) for s in range(self.num_stages) if self.lost[(r, s)]]
        self.log("closed", round=r, committed=len(committed), lost=lost)

    def _check_losses(self, r: int, s: int, books: list[Books]) -> None:
        """Committed = averaged + reported lost, as the peers say, for the rounds of an exchange.
        The only exception are commits that a feeder told no other peer before it died or was cut
        off."""
        # Where shards take turns, the peers' books are about the first one.
        shards = range(1 if self.plan.is_local else self.num_shards)
        results = [
            [
                sums
                for b in books
                for sums in (b.averaged.get((s, j), []), *b.late.get((s, j), {}).values())
            ]
            for j in shards
        ]
        if self._finishing or any(len(sums) > 1 for shard in results for sums in shard):
            return  # not told yet; or two halves of a swarm have different books
        committed = sum(len(b.committed) for b in books)
        averaged = min(sum(max(map(len, sums), default=0) for sums in shard) for shard in results)
        where = f"round {r} stage {s}: {committed} committed, {averaged} averaged"
        losses, began_at = books[-1].losses.get(s, []), books[0].began_at
        if not losses:
            if self.last_fault_at < began_at:
                self.fail(f"{where}: no replica closed the books")
            return  # all peers of the exchange are gone
        size, per = self.tokens_per_microbatch, self.samples_per_microbatch
        counted = max((x.counted_tokens // size for x in losses), default=0)
        if averaged and any(x.averaged_tokens == 0 for x in losses):
            self.splits += 1  # cut off from the rest, somebody ended the round without a sample
            return
        if any(x.averaged_tokens != averaged * size for x in losses):
            self.fail(f"{where}: its replicas say {[x.averaged_tokens for x in losses]} tokens")
        lost = max(0, counted - averaged) * per
        # An exchange of several rounds, or beside one, outlasts a stall. After that two peers may
        # report for a stage: the one that was stalled, and the one that replaced it meanwhile.
        outlasts = self.plan.is_local or self.plan.mode in (DELAYED, AUTO)
        twice = (outlasts and self.last_fault_at >= began_at) or s in books[-1].retold
        if sum(told := [x.lost_samples for x in losses]) != lost and not (
            twice and all(samples == lost for samples in told)
        ):
            self.fail(f"{where}: {counted} counted, {[x.lost_samples for x in losses]} told lost")
        untold = committed - counted
        self.untold += max(0, untold)
        if untold < 0 or (untold and self.last_fault_at < began_at):
            self.fail(f"{where}: the books say {counted} committed")

    def describe(self) -> str:
        """Every peer in a line, for a message."""
        return ", ".join(
            f"{m.peer.gossip.own.peer_id}: {m.peer.gossip.own.state} stage "
            f"{m.peer.gossip.own.stage} round {m.peer.replica.round if m.peer.replica else '-'}"
            f"{' closed' if m.peer.replica and m.peer.replica.closed else ''}"
            for m in list(self.members.values())[:16]
        )


def _most(results: Iterable[frozenset[int]]) -> frozenset[int]:
    """Of different aggregates, the one of the most microbatches."""
    return max(results, key=lambda ids: (len(ids), sorted(ids)), default=frozenset())
