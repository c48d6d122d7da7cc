"""The round from which a run continues after all peers have died.

Returning peers publish in their records which checkpoints of their stage they have
(`Record.restorable`) and stay JOINING. As long as a replica is active somewhere, the run lives, and
they join it. Where none is, each peer decides alone, by the same rule on what it sees:

1. The newest round that is *whole*: for every stage a peer has the parameters, and for every shard
   of every stage a peer has the optimizer state. The peer decides once the offers have not changed
   for `SETTLE_S`, so a peer that returns within that time of the others is still counted; for
   `OLDER_S` where the newest round that is offered is not whole, since peers that make it whole
   may be on their way.
2. Where no round is whole after `RESTORE_PATIENCE_S`: the newest round of which all parameters
   exist. Optimizer state that no peer has begins again from zero.
   Before that, and before an older round is taken because the newest is not whole, each peer looks
   at its own machine (`Look`): a state folder there that no peer uses may have what is missing,
   and what it has of the peer's stage counts as that peer's (`to_take_over`).
3. Where all parameters exist of no round, the peer waits without end for the peers that have them:
   to begin from the initial parameters would throw away what was learned, and only a person can
   decide that (`begin_anew`). Where no peer offers anything, the run begins from the initial
   parameters at once.

The peers that have the chosen round load it, publish that while still JOINING (`is_loaded`), and
become active only when all that was chosen is loaded by some peer (`is_covered`): so no round
begins without optimizer state that a peer has. Where replicas make steps of their own, they wait
for all peers that have the round (`is_loading`), because no other peer has the steps of a replica.
Two peers may choose differently for a moment, when one of them has heard of more offers. That
heals: the first replica that becomes active makes the run live, and from then on its round is that
of all peers. Where two rounds become active at the same instant, each covered by other peers, the
replicas in the older one fall behind and fetch the newer one.

Only checkpoints of one *history* fit together. A run that went on from round 20 makes its own round
30, and a checkpoint of the first round 30 has nothing to do with it. The newest history wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmnet.protocol.membership.failure_detector import SILENCE_S, SUSPECT_S
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record, Restorable
from swarmnet.protocol.membership.run_bounds import MAX_CLOCK_ERROR_MS
from swarmnet.protocol.moments import Since
from swarmnet.protocol.timing import ANSWER_S, UPKEEP_S

SETTLE_S = 3.0
"""Seconds for which the offers must not have changed. It protects from an older round where peers
return one after the other (tests/protocol/test_recovery.py)."""
OLDER_S = ANSWER_S
"""Likewise before an older round is taken than the newest that is offered. It protects from that
where one peer is back first and the others, who learn of the run from it, have yet to read their
data and build their stage (tests/protocol/test_recovery.py)."""
RESTORE_PATIENCE_S = UPKEEP_S
"""Seconds to wait for peers that would make a round whole."""
OLDER_AFTER_S = SILENCE_S + SUSPECT_S
"""How long a running swarm must have had no replica of a stage before the stage goes on from an
older round: as long as a dead peer may count as live."""
LOAD_PATIENCE_S = 600.0
"""How long a peer may take to load what it offers, before the others go on without it. It protects
a run from a peer whose disk hangs (tests/protocol/test_recovery.py)."""
MAX_LISTED = 8
"""Missing parts named in one line for users at most."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A round from which the run could continue, and its missing parts."""

    history: int
    round: int
    missing_stages: tuple[int, ...] = ()
    """Stages whose parameters no peer has."""
    missing_shards: tuple[tuple[int, int], ...] = ()
    """(stage, shard) whose optimizer state no peer has, of the stages whose parameters exist."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.history, self.round)

    @property
    def is_whole(self) -> bool:
        """True where nothing is missing."""
        return not self.missing_stages and not self.missing_shards

    def describe(self) -> str:
        """The missing parts, in one line."""
        parts = [f"stage {k}" for k in self.missing_stages]
        parts += [f"optimizer state of stage {k} shard {j}" for k, j in self.missing_shards]
        more = f" and {len(parts) - MAX_LISTED} more" if len(parts) > MAX_LISTED else ""
        return f"round {self.round} lacks {', '.join(parts[:MAX_LISTED])}{more}"


@dataclass(frozen=True, slots=True)
class Wait:
    """The run cannot continue yet."""

    reason: str = ""
    """For users; empty while it is only a matter of seconds."""
    is_endless: bool = False
    """It lasts until a peer with the missing parts returns, or a person decides that the run begins
    anew."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The run continues from this round."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Begin:
    """The run begins from its initial parameters: no peer has a checkpoint, or a person has decided
    so."""


@dataclass(frozen=True, slots=True)
class Look:
    """Before it decides, the peer looks for what is missing in the states on its machine that no
    peer uses."""


@dataclass(frozen=True, slots=True)
class Open:
    """A stage without replicas, in a run that lives, goes on from this checkpoint."""

    saved: Restorable


Decision = Wait | Restore | Begin | Look


def is_running(records: Iterable[Record]) -> bool:
    """True where a replica among these (live) records is active: the run lives."""
    return any(r.stage >= 0 and r.state in (ACTIVE, LEAVING) for r in records)


def offers(record: Record) -> tuple[Restorable, ...]:
    """The checkpoints that a peer could load; only those of its stage, once it has chosen one."""
    return record.restorable if record.state == JOINING else ()


def candidates(records: Iterable[Record], num_stages: int) -> list[Candidate]:
    """Every offered round, the newest history and round first."""
    rounds: dict[tuple[int, int], list[Restorable]] = {}
    for record in records:
        for offer in offers(record):
            if offer.stage < num_stages:
                rounds.setdefault((offer.history, offer.round), []).append(offer)
    return [_candidate(*key, rounds[key], num_stages) for key in sorted(rounds, reverse=True)]


def is_loaded(record: Record, candidate: Candidate) -> bool:
    """True where a peer that offers this round has it in memory, and waits for the others."""
    return (
        record.round == candidate.round
        and bool(record.digests)
        and any(_is_of(offer, candidate) for offer in offers(record))
    )


def is_covered(records: Iterable[Record], candidate: Candidate, num_stages: int) -> bool:
    """True where all existing parts of this round have been loaded by some peer: it may begin."""
    loaded = [r for r in records if is_loaded(r, candidate)]
    found = [o for r in loaded for o in offers(r) if _is_of(o, candidate)]
    now = _candidate(candidate.history, candidate.round, found, num_stages)
    return set(now.missing_stages) <= set(candidate.missing_stages) and set(
        now.missing_shards
    ) <= set(candidate.missing_shards)


def is_loading(records: Iterable[Record], candidate: Candidate) -> bool:
    """True where a peer has this round on its disk, and not yet in memory."""
    return any(
        not is_loaded(record, candidate)
        for record in records
        if any(_is_of(offer, candidate) for offer in offers(record))
    )


def to_take_over(
    unused: Sequence[Restorable], found: Sequence[Candidate], stage: int, *, newer: bool
) -> list[tuple[int, list[int]]]:
    """Which of the checkpoints that no peer uses a peer of this stage takes over, by their index,
    and the shards whose optimizer state it takes: what is missing in an offered round (`found`, the
    newest first), and with `newer` every round that is newer than those. The first that has a part
    gives it."""
    offered = {c.key: c for c in found}
    newest = max(offered, default=(-1, -1))
    taken: dict[tuple[int, int], set[int]] = {}
    parts = []
    for i, one in enumerate(unused):
        key = one.history, one.round
        candidate = offered.get(key)
        if one.stage != stage or (candidate is None and not (newer and key > newest)):
            continue
        if candidate is None or stage in candidate.missing_stages:
            missing = set(range(one.num_shards))
        else:
            missing = {j for k, j in candidate.missing_shards if k == stage}
        is_first = key not in taken
        has = taken.setdefault(key, set())
        shards = [j for j in sorted(missing - has) if one.holds_shard(j)]
        needs_parameters = candidate is None or stage in candidate.missing_stages
        if shards or (is_first and needs_parameters):
            has.update(shards)
            parts.append((i, shards))
    return parts


class Settling:
    """One peer's decision over time. `decide` is to be called again and again."""

    def __init__(
        self,
        *,
        begin_anew: bool = False,
        looks: bool = False,
        looks_first: bool = False,
    ) -> None:
        """`begin_anew`: the run begins from its initial parameters, whatever peers have. `looks`:
        this peer can look at its own machine for what is missing; `looks_first`: also where no
        peer offers anything."""
        self.begin_anew = begin_anew
        self._looks = looks
        self._looks_first = looks_first
        self._looked_for: set[tuple[int, int]] = set()
        self._began_at: float | None = None
        self._changed_at = 0.0
        self._seen: tuple[object, ...] = ()

    def decide(self, records: Sequence[Record], num_stages: int, now: float) -> Decision:
        """The decision now. `records`: of the live peers, the own one included, none of them
        active."""
        found = candidates(records, num_stages)
        if self.begin_anew or (not found and not (self._looks_first and self._must_look((-1, -1)))):
            self._began_at = None
            return Begin()
        if not found:
            return Look()
        seen = tuple((r.peer_id, r.incarnation, offers(r)) for r in records if offers(r))
        if self._began_at is None:
            self._began_at = now
        if seen != self._seen:
            self._seen = seen
            self._changed_at = now
        is_settled = now - self._changed_at >= SETTLE_S
        if not is_settled and now - self._began_at < RESTORE_PATIENCE_S:
            return Wait()
        newest = found[0]
        if not newest.is_whole and self._must_look(newest.key):
            return Look()
        whole = next((c for c in found if c.is_whole), None)
        if whole is not None:
            waited_s = now - self._changed_at
            is_late = waited_s >= OLDER_S or now - self._began_at >= RESTORE_PATIENCE_S
            return Restore(whole) if whole == newest or is_late else Wait()
        if now - self._began_at < RESTORE_PATIENCE_S:
            return Wait(found[0].describe())
        partial = next((c for c in found if not c.missing_stages), None)
        return Restore(partial) if partial is not None else Wait(found[0].describe(), True)

    def _must_look(self, missing: tuple[int, int]) -> bool:
        """Once for each history and round of which something is missing."""
        if not self._looks or missing in self._looked_for:
            return False
        self._looked_for.add(missing)
        return True


class Loading:
    """The wait until some peer has loaded each part of the round from which the run goes on."""

    def __init__(self) -> None:
        self._chosen: Candidate | None = None
        self._since = Since()
        self._given_up: dict[str, None] = {}

    def choose(self, candidate: Candidate, now: float) -> bool:
        """The run goes on from this round. True where that was another one before."""
        if candidate == self._chosen:
            return False
        self._chosen = candidate
        self._since.begin(now)
        return True

    def waited_for(self, live: Iterable[Record]) -> list[Record]:
        """Live peers without those that took too long to load what they offer."""
        return [r for r in live if r.peer_id not in self._given_up]

    def may_open(self, live: Sequence[Record], num_stages: int, *, waits_for_all: bool) -> bool:
        """Whether the chosen round may be opened. `waits_for_all`: no other peer has the steps of a
        replica."""
        assert self._chosen is not None
        if waits_for_all and is_loading(self.waited_for(live), self._chosen):
            return False
        return is_covered(live, self._chosen, num_stages)

    def pass_time(self, live: Iterable[Record], now: float) -> None:
        """Gives up those that offer the chosen round and have not loaded it for too long."""
        chosen = self._chosen
        if chosen is None or self._since.s(now) <= LOAD_PATIENCE_S:
            return
        for record in live:
            if any(_is_of(o, chosen) for o in offers(record)) and not is_loaded(record, chosen):
                self._given_up[record.peer_id] = None


class EmptyStage:
    """How a stage without replicas goes on in a run that lives."""

    def __init__(self) -> None:
        self._has_looked = False
        self._empty_since: Since | None = None

    def decide(
        self,
        own: Sequence[Restorable],
        members: Iterable[Record],
        round_index: int,
        now: float,
    ) -> Look | Open | Wait | None:
        """The decision now. None: from no checkpoint, as far as is known. `own`: the checkpoints of
        this peer. `members`: of the stage, this peer included. `round_index`: that of the run. An
        older checkpoint than of that very round is opened only after a while: a dead replica may
        count as live for as long."""
        if not self._has_looked:
            self._has_looked = True
            return Look()
        best = for_running(own, round_index)
        if best is not None and best.round == round_index:
            return Open(best)
        others = [for_running(offers(m), round_index) for m in members]
        theirs = max(((o.round, o.history) for o in others if o), default=None)
        if theirs is None:
            self._empty_since = None
            return None
        if self._empty_since is None:
            self._empty_since = Since(now)
        is_mine = best is not None and (best.round, best.history) >= theirs
        if best is not None and is_mine and self._empty_since.is_older(now, OLDER_AFTER_S):
            return Open(best)
        return None if self._empty_since.is_older(now, RESTORE_PATIENCE_S) else Wait()


def stage_of(own: Iterable[Restorable], served: Sequence[tuple[bool, bool]]) -> int | None:
    """The stage that a peer with these checkpoints should serve again, if any: that of the newest,
    unless it is served and another is not. `served`: of each stage, whether it has replicas, and
    whether it has members at all."""
    newest = max(own, key=lambda o: (o.history, o.round), default=None)
    if newest is None or newest.stage >= len(served):
        return None
    has_replicas, _ = served[newest.stage]
    is_another_empty = not all(has_members for _, has_members in served)
    return None if is_another_empty and has_replicas else newest.stage


def history_of(live: Iterable[Record], own: int) -> int:
    """The history of the run as it goes on now, by what the active replicas say. `own`: this
    peer's."""
    return max([own, *(r.history for r in live if r.state == ACTIVE)])


def new_history(records: Sequence[Record], incarnation: int) -> int:
    """The number of a history that begins, above all that are known. `incarnation`: of this
    peer."""
    known = [r.history for r in records]
    known += [o.history for r in records for o in r.restorable]
    known = [h for h in known if h < incarnation + MAX_CLOCK_ERROR_MS]
    return max(incarnation, 1 + max(known, default=0))


def left_behind(own: Iterable[Restorable], history: int, round_index: int) -> int | None:
    """The latest round of this peer's checkpoints that is not part of the run any more, which goes
    on in this history and round."""
    lost = [o.round for o in own if o.history < history and o.round > round_index]
    return max(lost, default=None)


def for_running(own: Iterable[Restorable], round_index: int) -> Restorable | None:
    """The best checkpoint for a stage without replicas in a run that is in `round_index`: the one
    of that very round, else the newest one before it. Later rounds are of another history."""
    fitting = [c for c in own if c.round <= round_index]
    return max(fitting, key=lambda c: (c.round == round_index, c.history, c.round), default=None)


def _is_of(offer: Restorable, candidate: Candidate) -> bool:
    return (offer.history, offer.round) == candidate.key


def _candidate(
    history: int, round_index: int, found: Sequence[Restorable], num_stages: int
) -> Candidate:
    missing_stages: list[int] = []
    missing_shards: list[tuple[int, int]] = []
    for stage in range(num_stages):
        ours = [c for c in found if c.stage == stage]
        if not ours:
            missing_stages.append(stage)
            continue
        num_shards = _usual([c.num_shards for c in ours])
        ours = [c for c in ours if c.num_shards == num_shards]
        missing_shards += [
            (stage, j) for j in range(num_shards) if not any(c.holds_shard(j) for c in ours)
        ]
    return Candidate(history, round_index, tuple(missing_stages), tuple(missing_shards))


def _usual(numbers: Sequence[int]) -> int:
    """The most frequent number, the least of equally frequent ones: false claims are outvoted."""
    return min(Counter(numbers).items(), key=lambda item: (-item[1], item[0]))[0]
