"""What an exchange waits for, and how long. Pure.

Waits come from the duration of the last exchanges, or, while that is unknown, from the slowest
uplink. A slow peer must not be suspected, for its work would be lost; a dead one must not hold up a
stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarmnet.protocol.backoff import next_pause_s
from swarmnet.protocol.leftovers import ROOM_S
from swarmnet.protocol.membership.failure_detector import SUSPECT_S
from swarmnet.protocol.membership.records import JOINING, Record
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.update.roster import DEAD, MemberStatus

WAIT_FACTOR = 4.0
"""The deadline for contributions, over what a round's exchange took lately."""
EXCHANGE_SMOOTHING = 0.3
UPLOAD_SLACK = 3.0
"""Times what a stage's gradient takes the slowest uplink: results and samples go up it too."""
LONGEST_UPLOAD_S = 600.0
"""A slower uplink is not waited for: by its owner's word alone, it might hold up a whole stage. And
a rate that was measured far too low delays a turn, but does not stop it."""
CLOSING_MICROBATCHES = 3
"""Of the slowest replica: so much work lies between the end of a round and its contributions."""
BESIDE_PART = 0.8
"""Of the length of a round: how long an exchange beside one may wait for contributions."""
BEHIND_PART = 0.5
"""Of the length of the rounds between two exchanges: how long one may wait, where replicas make
steps of their own."""


# ---- how long --------------------------------------------------------------------------------


def upload_s(stage_bytes: int, rates: Collection[float]) -> float:
    """What sending a gradient may take the slowest replica whose rate (bytes/s) is known, as it
    sends results too: some slack on twice the stage's bytes. 0 where no rate is known."""
    taken_s = UPLOAD_SLACK * stage_bytes / min(rates) if rates else 0.0
    return min(taken_s, LONGEST_UPLOAD_S)


class ExchangeDurations:
    """What exchanges have taken at one replica, in seconds."""

    def __init__(self) -> None:
        self.usual_s = 0.0
        """A moving average; 0 while none was measured."""
        self.last_s = 0.0
        """The last exchange in which nobody was waited for in vain."""
        self._held: tuple[float, frozenset[str]] | None = None
        """What the last exchange took, where peers were waited for in vain, and for whom."""

    def took(self, seconds: float, *, is_usual: bool = True, missed: Collection[str] = ()) -> None:
        """Notes an exchange that is over. One with no other replica, or to which this one had
        nothing to give, says nothing of others (`is_usual` is False). (A clock that leaves out its
        own stalls may have gone back a little.)

        `missed`: who was waited for in vain. That wait is no measure of what an exchange takes: one
        that hangs would make each deadline longer than the one before. It is one where such a peer
        was late, and comes after all (`straggled`)."""
        seconds = max(0.0, seconds)
        self._held = (seconds, frozenset(missed)) if missed and is_usual else None
        if missed:
            return
        self.last_s = seconds
        if is_usual:
            self._measure(seconds)

    def straggled(self, peer_id: str) -> None:
        """Notes a contribution of a peer that has come after its exchange."""
        if self._held is not None and peer_id in self._held[1]:
            self._measure(self._held[0])
            self._held = None

    def _measure(self, seconds: float) -> None:
        self.usual_s += EXCHANGE_SMOOTHING * (seconds - self.usual_s)


@dataclass(frozen=True, slots=True)
class ExchangeWaits:
    """How long each wait of an exchange may be, by what is known of its stage. All in seconds."""

    exchange_s: float
    """What exchanges took lately; 0 while that is unknown."""
    upload_s: float
    """What the slowest uplink may take, see `upload_s`; 0 while no rate is known."""
    closing_s: float
    """Until the last replica has heard that a round is over, and its device has ended the work that
    was under way when it closed the round, settled it and opened the next one."""
    beside_s: float
    """An exchange that runs beside a round delays no peer as long as it ends with it; 0 for one
    that lies between two rounds."""
    behind_s: float
    """The more rounds of own steps are behind an exchange, the more is lost with a slow one; 0
    where there are none."""
    least_s: float
    """For contributions, beside what was measured."""
    unmeasured_s: float
    """For contributions, while nothing was measured."""
    norm_least_s: float
    lease_s: float
    """For the lease of a member that may be back."""

    @property
    def is_known(self) -> bool:
        """It is known how long an exchange takes, so that silence tells something."""
        return self.exchange_s > 0

    @property
    def usual_s(self) -> float:
        """What an exchange takes, by those before or by the slowest uplink; 0 while that is
        unknown."""
        return self.exchange_s or self.upload_s / UPLOAD_SLACK

    @property
    def _longest_s(self) -> float:
        return max(self.unmeasured_s, self.upload_s, self.beside_s, self.behind_s)

    @property
    def _measured_s(self) -> float:
        return max(WAIT_FACTOR * self.exchange_s, self.upload_s)

    @property
    def contributions_due_s(self) -> float:
        """After the own contribution: when those of others should be there."""
        return min(self._measured_s + self.least_s + self.closing_s, self._longest_s)

    @property
    def contributions_s(self) -> float:
        """After the own contribution: how long a primary waits for those of others. Where nothing
        is known yet, a slow peer must not be suspected."""
        return self.contributions_due_s if self._measured_s else self._longest_s

    @property
    def gather_s(self) -> float:
        """For the contributions of neighbours to be in that of one of them: as long as the slowest
        uplink takes for one, which leaves most of the time to send that. What exchanges took
        lately has this wait in it, and would make it longer each time."""
        gathered_s = self.least_s + self.closing_s + self.upload_s / UPLOAD_SLACK
        return min(gathered_s, self.contributions_due_s)

    def grace_s(self, passed_s: float) -> float:
        """Beside a quorum: how much longer a primary waits for the contributions of others, when
        that has come `passed_s` after its own. Whose link is half as fast as the quorum's is in
        time, and so is who closes the round as late as can be usual."""
        return max(passed_s, self.closing_s)

    @property
    def sum_s(self) -> float:
        """For the word that a sum is made, at a primary that lives: it waits for contributions from
        when it has closed the round itself, which may be as late as one, and after a death for
        leases and promises, as long as a norm may take. What links take says nothing of what
        machines take: a first exchange may be a slow one. A verdict that is wrong costs the moments
        of what the other owns (tests/swarm/update/test_replication.py)."""
        return 2 * (self.contributions_s if self.is_known else self._longest_s) + self.norm_s

    @property
    def result_s(self) -> float:
        """For the result of a primary that lives and has sum and norm: until each backup has made
        the step, or is dead, and all have promised."""
        return (self.contributions_s if self.is_known else self._longest_s) + self.lease_s

    @property
    def norm_s(self) -> float:
        """For the norm over all stages: until the last shard has been summed."""
        summed_s = self.contributions_s + self.lease_s
        return max(self.norm_least_s, summed_s, self.upload_s, self.beside_s)

    @property
    def call_s(self) -> float:
        """Longest call for a shard, to a peer that lives."""
        return self.norm_s + self._longest_s + self.upload_s


def turn_wait_s(queued_bytes: int, rate: float, latest: Deadline, now: float) -> float:
    """Seconds until a long message may go: until what is urgent is gone from the link, of `rate`
    bytes/s, or has had its time. 0 where that is now."""
    return max(0.0, min(queued_bytes / rate - ROOM_S, latest.left_s(now)))


class Pauses:
    """Pauses between two tries: short ones before another try, long ones before a reminder.

    Shards pause together so that what they ask for next shares calls. Each further pause of a kind
    is longer: what has not come soon may take long."""

    def __init__(self, short_s: float, long_s: float) -> None:
        """The first pause of each kind. No short one is longer than the first long one."""
        self._first_s = {True: long_s, False: short_s}
        """By whether it is long."""
        self._last_s: dict[bool, float | None] = {True: None, False: None}
        self._waiting: dict[bool, list[int]] = {True: [], False: []}

    def add(self, shard: int, *, is_long: bool) -> bool:
        """A shard pauses from now on. True where it shares the pause of another."""
        self._waiting[is_long].append(shard)
        return len(self._waiting[is_long]) > 1

    def begin_s(self, usual_s: float, *, is_long: bool) -> float:
        """How long the pause is that begins. `usual_s`: what an exchange takes; no long pause is
        longer."""
        longest_s = max(self._first_s[True], usual_s) if is_long else self._first_s[True]
        pause_s = next_pause_s(self._last_s[is_long], self._first_s[is_long], longest_s)
        self._last_s[is_long] = pause_s
        return pause_s

    def end(self, *, is_long: bool) -> list[int]:
        """The shards whose pause is over."""
        shards, self._waiting[is_long] = self._waiting[is_long], []
        return shards


# ---- for whom --------------------------------------------------------------------------------


def may_miss_members(
    exchange: int,
    began: float | None,
    now: float,
    members: Iterable[MemberStatus],
    *,
    has_own: bool,
) -> bool:
    """Somebody who has tokens to contribute may not be known here yet: in the first round, when all
    join at once, or where nobody known has any. A peer that lives is heard of within the time that
    one which has fallen silent is waited for. `began`: when this replica contributed; None where
    it has not yet. `has_own`: it has tokens itself."""
    if began is None or now > began + SUSPECT_S:
        return False
    has_some = has_own or any(m.declared for m in members if m.life != DEAD)
    return exchange == 0 or not has_some


def brings_state(record: Record, exchange: int) -> bool:
    """A replica is about to become active with optimizer state of a checkpoint, which may be nobody
    else's."""
    is_joining = record.state == JOINING and record.round == exchange
    return is_joining and bool(record.restorable) and bool(record.digests)
