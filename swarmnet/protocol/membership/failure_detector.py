"""Who is alive, to this peer: one lease for each other peer. Pure: no task, no network, no clock.

A lease says `ALIVE`, `SUSPECT` (until a time) or `DEAD`, and rests on what this peer has found out
itself. What others say only makes it look:

- **News.** A newer record of a peer renews its lease for `silence_s`, whoever brings it. So does an
  answer of the peer to this one.
- **A look** (a ping). Where a look is not answered the peer is *lost*: SUSPECT as long as a channel
  to it is open, for at most `SUSPECT_S`, for a machine that swaps is soon back; then DEAD. Where no
  channel is open it is DEAD at once, for the channels of a killed process close.
- **Lost stays lost** until the peer answers. News of it that others bring prove that it lives, and
  not that it can be reached from here: it is dead *to this peer*. It is looked at again where it
  calls and where the first news after the loss arrives, and all the time by
  `protocol.membership.reconnect`, whose pauses grow; and where a channel to it opens.
- **Suspicions of others** lead to a look. They count only against a peer that is lost already, for
  which a look of this peer says nothing new.
- **Time in which this process stood still** does not count (`AwakeTime`). A machine that swaps, or
  is suspended, or has a disk that hangs, stops for seconds without knowing. When it goes on,
  deadlines of others have passed, and what these sent meanwhile has not been read: the others were
  not silent.

A lost peer of which there is news since is *out of reach*: it takes part in the run, and this peer
cannot call it. `view.View` finds out whether it is in the same part of the swarm.

A suspicion and its refutation by a higher stamp, and the looks of others, are those of SWIM (Das,
Gupta and Motivala 2002); its indirect ping is a channel through a relay here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import NO_STAMP, Stamp
from swarmnet.protocol.moments import Since

SILENCE_S = 8.0
"""The lease of a peer of which there is no news. It protects from a peer that dies without anybody
having called it (tests/protocol/membership/test_failure_detector.py)."""
SUSPECT_S = 6.0
"""For so long a lost peer with an open channel may be back at any moment: its work is waited for.
It protects the gradient of a machine that swaps (tests/swarm/pipeline/test_stalls.py)."""
TICK_S = 0.5
"""Between two ticks of a process that runs; what passes by time alone is looked at with them, and a
callee that has not answered by then is probed. It protects from waiting for the deadline of a call
whose callee is silent (tests/swarm/update/test_live_calls.py)."""
LATE_S = 1.0
"""A tick that comes so much later shows that the process has stood still. It protects others from
this process's own stalls (tests/protocol/membership/test_awake.py)."""
PROBE_TIMEOUT_S = 2.0
"""For the answer to a ping, over a channel that is open. It protects from a peer that is silent
with its channels open (tests/swarm/membership/test_detection.py)."""
PROBE_PART = 0.2
"""Of the time that calls take or have taken: until a callee is probed, and again. It protects
peers that are slow from being probed all the time (tests/swarm/update/test_live_calls.py)."""
MAX_SUSPICIONS = 256
"""Suspicions told to others at once, the newest."""


class State(Enum):
    """Of a peer, as this peer finds it."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """It does not answer, and may be back at any moment."""
    DEAD = "dead"
    """Nobody waits for it here. It may live, and be out of reach."""


ALIVE, SUSPECT, DEAD = State


@dataclass(frozen=True, slots=True)
class Look:
    """To be done: ping this peer, and tell of the answer or of its lack."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class TellUnreached:
    """To be done: let this peer know, through a third one, that it cannot be reached from here."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class TellSuspicion:
    """To be done: tell others that this peer did not answer when its stamp was this."""

    peer_id: str
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Changed:
    """To be told in this process: the state of a peer is another one."""

    peer_id: str
    state: State


Command = Look | TellUnreached | TellSuspicion | Changed


@dataclass(slots=True)
class _Loss:
    """Of a peer that did not answer a look."""

    since: float
    looked_at: float
    """When the last look ended; infinity while one is under way."""
    is_told: bool = False
    """Its death, after the time for which it was SUSPECT, has been told."""
    had_news: bool = False
    """The first news since have led to a look."""


class AwakeTime:
    """Of one process, which ticks every `TICK_S` while it runs."""

    def __init__(self) -> None:
        self._due = math.inf
        """When the next tick ought to come; infinity while it does not tick."""
        self.stalled_s = 0.0
        """How long the process has stood still, in all."""
        self._asked_s = 0.0
        """The same at the last question after sleep."""

    def tick(self, now: float) -> None:
        """The process runs, and ticks again after `TICK_S`. `stall` comes first."""
        self._due = now + TICK_S

    def stop(self) -> None:
        """No further tick comes: from now on it is an ordinary clock."""
        self._due = math.inf

    def has_stood_still(self, now: float) -> bool:
        """Whether `stall` has something to tell."""
        return now - self._due > LATE_S

    def stall(self, now: float) -> float:
        """For how long the process has just stood still, seconds; 0 as a rule. Each stall is
        returned once, to the first that asks after it."""
        late_s = now - self._due
        if late_s <= LATE_S:
            return 0.0
        self._due = now
        self.stalled_s += late_s
        return late_s

    def slept_s(self) -> float:
        """For how long the process has stood still since the last question, seconds, where that is
        so long that others count it for gone; else 0."""
        since_s, self._asked_s = self.stalled_s - self._asked_s, self.stalled_s
        return since_s if since_s > SILENCE_S + SUSPECT_S else 0.0

    def time(self, now: float) -> float:
        """`now` without the stalls; never runs backwards by more than `LATE_S`."""
        return now - self.stalled_s


class LateCallees:
    """Callees whose answer should have come: each is looked at, the less often the longer its calls
    take anyway."""

    def __init__(self) -> None:
        self._looked_at: dict[str, float] = {}

    def is_due(self, peer_id: str, began: float, usual_s: float, now: float) -> bool:
        """Whether a callee is to be looked at, which counts as done then. `began`: its oldest open
        call. `usual_s`: how long such calls take; 0 where that is unknown."""
        waited_s = now - began
        pause_s = max(TICK_S, PROBE_PART * max(waited_s, usual_s))
        looked_at = self._looked_at.get(peer_id, -math.inf)
        if waited_s < pause_s or now - looked_at < pause_s:
            return False
        self._looked_at[peer_id] = now
        return True

    def forget(self, peer_id: str) -> None:
        """No call to this one is open any more."""
        self._looked_at.pop(peer_id, None)


class FailureDetector:
    """Of all peers in one view. Times are seconds of the caller's clock. The own peer is alive. A
    caller that remembers answers has to forget them after each change here."""

    def __init__(self, own_peer_id: str, silence_s: float = SILENCE_S) -> None:
        self._own_peer_id = own_peer_id
        self.silence_s = silence_s
        """A peer of which there is no news for this long is silent."""
        self.clock = AwakeTime()
        self._heard_at: dict[str, float] = {}
        self._lost: dict[str, _Loss] = {}
        self._suspected: dict[str, Stamp] = {}
        """Lost peers, with the stamp that they had then: no news since. The oldest first."""
        self.apart: frozenset[str] = frozenset()
        """Peers out of reach in another part of the swarm, as the view has found."""
        self._channels: set[str] = set()
        """Machines to which a channel is open."""

    # -- what has happened -----------------------------------------------------------------

    def heard(self, peer_id: str, stamp: Stamp, now: float) -> list[Command]:
        """A newer record of a peer has come in, from anyone."""
        self._heard_at[peer_id] = now
        if not self._lost or peer_id not in self._lost:
            return []
        if self._suspected.get(peer_id, stamp) < stamp:
            del self._suspected[peer_id]
        loss = self._lost[peer_id]
        if loss.had_news or peer_id in self._suspected:
            return []
        loss.had_news = True
        return [Look(peer_id)]

    def answered(self, peer_id: str, now: float) -> list[Command]:
        """A peer has answered a call of this one."""
        if peer_id in self._heard_at:
            self._heard_at[peer_id] = now
        if self._lost.pop(peer_id, None) is None:
            return []
        self._suspected.pop(peer_id, None)
        return [Changed(peer_id, ALIVE)]

    def unanswered(self, peer_id: str, stamp: Stamp, now: float) -> list[Command]:
        """A look at a peer, whose stamp was `stamp` when it began, was not answered."""
        if peer_id == self._own_peer_id or peer_id not in self._heard_at:
            return []
        commands: list[Command] = [TellUnreached(peer_id)]
        loss = self._lost.get(peer_id)
        if loss is not None:
            loss.looked_at = now
            return commands
        loss = self._lost[peer_id] = _Loss(now, now)
        self._suspected.pop(peer_id, None)  # so that the newest one is the last
        self._suspected[peer_id] = stamp
        state = self.state_of(peer_id, now)
        loss.is_told = state is DEAD
        return [*commands, TellSuspicion(peer_id, stamp), Changed(peer_id, state)]

    def suspected_by_another(
        self, peer_id: str, stamp: Stamp, known: Stamp, now: float
    ) -> list[Command]:
        """Another peer had no answer from this one, when its stamp was `stamp`; the newest stamp
        that is known here is `known`."""
        if stamp < known or peer_id == self._own_peer_id or peer_id not in self._heard_at:
            return []
        if peer_id not in self._lost:
            return [Look(peer_id)]
        if self._suspected.get(peer_id, NO_STAMP) < stamp:
            self._suspected.pop(peer_id, None)
            self._suspected[peer_id] = stamp
        return []

    def called(self, peer_id: str, now: float) -> list[Command]:
        """A message of a peer has come in. It may be that messages pass in one direction only: so
        a lost one is looked at, no more often than every `FIRST_PAUSE_S`."""
        loss = self._lost.get(peer_id)
        if loss is None or now < loss.looked_at + FIRST_PAUSE_S:
            return []
        return [Look(peer_id)]

    def looks(self, peer_id: str) -> None:
        """A look at a peer has begun."""
        if peer_id in self._lost:
            self._lost[peer_id].looked_at = math.inf

    def opened(self, machine: str) -> list[Command]:
        """There is a channel to a machine: who is lost there may only have been slow to dial."""
        self._channels.add(machine)
        return [Look(peer_id) for peer_id in self._lost if machine_of(peer_id) == machine]

    def closed(self, machine: str, now: float) -> list[Command]:
        """The last channel to a machine has closed: the peers there are looked at."""
        self._channels.discard(machine)
        there = [p for p in self._heard_at if machine in (p, machine_of(p))]
        return [*(Look(p) for p in there), *self.passed(now)] if there else []

    def passed(self, now: float) -> list[Command]:
        """What has ended by now: the times for which lost peers were SUSPECT. To be asked often."""
        self.awake_s(now)
        commands: list[Command] = []
        for peer_id, loss in self._lost.items():
            if not loss.is_told and self.state_of(peer_id, now) is DEAD:
                loss.is_told = True
                commands.append(Changed(peer_id, DEAD))
        return commands

    def forget(self, peer_id: str) -> None:
        """The peer is no longer in the view."""
        self._heard_at.pop(peer_id, None)
        self._lost.pop(peer_id, None)
        self._suspected.pop(peer_id, None)
        self.apart -= {peer_id}

    def awake_s(self, now: float) -> float:
        """Time without that in which this process stood still. Leases grow by what it did."""
        stalled_s = self.clock.stall(now)
        if stalled_s:
            for peer_id, at in self._heard_at.items():
                self._heard_at[peer_id] = min(now, at + stalled_s)
            for loss in self._lost.values():
                loss.since = min(now, loss.since + stalled_s)
        return self.clock.time(now)

    # -- answers ---------------------------------------------------------------------------

    def state_of(self, peer_id: str, now: float) -> State:
        """`DEAD` for an unknown peer."""
        if peer_id == self._own_peer_id:
            return ALIVE
        until = self.suspect_until(peer_id)
        if until == math.inf:
            return ALIVE if self.is_sound(peer_id, now) else self._after_silence(peer_id, now)
        return SUSPECT if now < until else DEAD

    def _after_silence(self, peer_id: str, now: float) -> State:
        end = self.heard_at(peer_id) + self.silence_s + SUSPECT_S
        return SUSPECT if now < end and machine_of(peer_id) in self._channels else DEAD

    def suspect_until(self, peer_id: str) -> float:
        """Until when a lost peer is, or was, SUSPECT; infinity for one that is not lost."""
        loss = self._lost.get(peer_id)
        if loss is None:
            return math.inf
        if loss.is_told or machine_of(peer_id) not in self._channels:
            return loss.since
        return loss.since + SUSPECT_S

    def has_channel(self, peer_id: str) -> bool:
        """Whether a channel to the machine of a peer is open, or it is this one."""
        machine = machine_of(peer_id)
        return machine in self._channels or machine == machine_of(self._own_peer_id)

    def is_lost(self, peer_id: str) -> bool:
        """A look at the peer was not answered, and none since."""
        return peer_id in self._lost

    def out_of_reach(self) -> list[str]:
        """Lost peers of which there is news since, sorted."""
        return sorted(p for p in self._lost if p not in self._suspected)

    def suspicions(self) -> list[tuple[str, Stamp]]:
        """Lost peers of which there is no news since, with their stamps (the newest
        `MAX_SUSPICIONS`), by peer id."""
        newest = list(self._suspected.items())[-MAX_SUSPICIONS:]
        return sorted(newest)

    def is_suspected(self, peer_id: str) -> bool:
        """The peer is lost, and there is no news of it since."""
        return peer_id in self._suspected

    def is_sound(self, peer_id: str, now: float) -> bool:
        """There is news of a peer, which is in this part of the swarm: it takes part in the run,
        though it may be out of reach. False for an unknown one."""
        if peer_id == self._own_peer_id:
            return True
        if peer_id in self._suspected or peer_id in self.apart:
            return False
        return self.heard_at(peer_id) >= now - self.silence_s

    def sound(self, peer_ids: Iterable[str], now: float) -> list[str]:
        """The peers among these for which `is_sound` holds, in the same order. All are known."""
        heard_at, own = self._heard_at, self._own_peer_id
        since = now - self.silence_s
        suspected, apart = self._suspected, self.apart
        return [  # without a call for each: the hot path of a swarm
            p
            for p in peer_ids
            if (heard_at[p] >= since and p not in suspected and p not in apart) or p == own
        ]

    def heard_at(self, peer_id: str) -> float:
        """When there was news of a peer; minus infinity for an unknown peer."""
        return self._heard_at.get(peer_id, -math.inf)

    def silent_s(self, peer_id: str, now: float) -> float:
        """Seconds since there was news of a peer; infinity for an unknown peer."""
        return now - self.heard_at(peer_id)

    def gone_s(self, peer_id: str, now: float) -> float:
        """Seconds since a peer fell silent or was lost; 0 for one that is alive, infinity for an
        unknown one."""
        loss = self._lost.get(peer_id)
        if loss is None and self.is_sound(peer_id, now):
            return 0.0
        silent_from = self.heard_at(peer_id) + self.silence_s
        return now - min(silent_from, silent_from if loss is None else loss.since)

    def next_silence_at(self, peer_ids: Iterable[str], now: float) -> float:
        """No peer of these that is not silent now becomes silent before this time."""
        heard_at, since = self._heard_at, now - self.silence_s
        heard = [at for p in peer_ids if (at := heard_at[p]) >= since]
        return min(heard, default=now) + self.silence_s


class CopyDetector:
    """Whether another process lives that has this peer's identity, in a copied state folder.

    All records of an identity are by who has its key. One of a later start than this process's is
    of a process that began since, or that has died and whose clock was ahead. Only a living one
    makes new versions for longer than a peer may be silent, and is not silent for so long in
    between: the last words of a dead one come by several ways, one of them late."""

    def __init__(self) -> None:
        self._seen: Stamp = NO_STAMP
        self._since = Since()
        self._heard = Since()

    def heard(self, stamp: Stamp, own_incarnation: int, now: float, silence_s: float) -> bool:
        """A record of this peer's identity has come, with that stamp. True: it is of a process
        that lives and began later than this one. So the elder learns it, and one of them stays."""
        if stamp[0] <= own_incarnation or stamp <= self._seen:
            return False
        if stamp[0] > self._seen[0] or self._heard.is_older(now, silence_s):
            self._since.begin(now)
        self._heard.begin(now)
        self._seen = stamp
        return self._since.is_older(now, silence_s)
