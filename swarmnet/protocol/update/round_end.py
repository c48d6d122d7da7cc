"""The end of a round at one replica, and the opening of the next one before that.

Both follow from the view, from what calls of others tell (`replica_phase.Heard`), and from where
the replica is in its round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from swarmnet.protocol.membership.records import ACTIVE, JOINING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import LONG_AGO, Deadline, Since
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.protocol.update.exchange_waits import UPLOAD_SLACK
from swarmnet.protocol.update.members import MAX_DOUBLINGS, RESTS
from swarmnet.protocol.update.replica_phase import Heard, Phase


def is_over(view: View, phase: Phase, round_index: int, now: float, num_slots: int) -> bool:
    """True where the samples of a round are all completed, or others have finished it already."""
    return (
        progress.is_drained(view, round_index, now, num_slots)
        or view.is_past(round_index, now)
        or phase.knows(round_index, Heard.OVER)
    )


class Contributed:
    """Which replicas of a stage have contributed to a round: each shows by it that the round is
    over there. One word alone does not show that it is over here."""

    def __init__(self) -> None:
        self._round = -1
        self._by: set[str] = set()

    def is_over(self, peer_id: str, round_index: int, others: Collection[str]) -> bool:
        """A peer has contributed: whether more than half of the `others` have, which are the other
        known members of the stage."""
        if round_index != self._round:
            self._round = round_index
            self._by.clear()
        if peer_id in others:
            self._by.add(peer_id)
        return 2 * len(self._by.intersection(others)) > len(others)


class Newcomers:
    """Newcomers that get the parameters of their stage with the results of an exchange.

    That is the whole stage, up an uplink that carries all else too. Where it takes longer than the
    others need for two rounds, the stage is further on when it is there, and the newcomer begins
    anew, each time. So a replica that gives to a newcomer ends its round when that has begun the
    next one, or when the bytes have left and had the time that they take.

    Names are free, and whoever has one can come and be slow. So after each wait nobody is waited
    for in `RESTS` times as long, and after each in vain, one upon the other, in twice as long."""

    def __init__(self) -> None:
        self._getting: dict[str, dict[int, int]] = {}
        """Bytes of each shard, by peer."""
        self._asked = Since()
        """When the first of them did."""
        self._waiting: Since | None = None
        """None while nobody is waited for."""
        self._rest = Deadline(LONG_AGO)
        self._in_vain = 0
        """The last waits that were."""

    def gets(self, peer_id: str, shard: int, num_bytes: int, now: float) -> None:
        """A newcomer is given a shard of the present exchange."""
        if not self._rest.is_over(now):
            return
        if not self._getting:
            self._asked.begin(now)
        self._getting.setdefault(peer_id, {})[shard] = num_bytes

    def are_waited_for(
        self,
        live: Mapping[str, Record],
        round_index: int,
        queued_to: Callable[[str], int],
        rate: float,
        now: float,
    ) -> bool:
        """Whether the round is not to end here yet. `live`: the members of the stage that live.
        `queued_to`: bytes for a peer that have not left yet. `rate`: bytes/s of the own uplink; 0
        where that is unknown."""
        for peer_id in list(self._getting):
            record = live.get(peer_id)
            if record is None or record.state != JOINING or record.round > round_index:
                del self._getting[peer_id]
        num_bytes = sum(sum(shards.values()) for shards in self._getting.values())
        takes_s = UPLOAD_SLACK * num_bytes / rate if rate else 0.0
        if any(map(queued_to, self._getting)):
            takes_s = PATIENCE_S
        is_overdue = self._asked.is_older(now, min(takes_s, PATIENCE_S))
        if self._getting and not is_overdue:
            self._waiting = self._waiting or Since(now)
            return True
        if self._waiting is not None:
            self._in_vain = self._in_vain + 1 if self._getting else 0
            times = RESTS << min(self._in_vain, MAX_DOUBLINGS)
            self._rest = Deadline.after(now, times * self._waiting.s(now))
            self._waiting = None
        self._getting.clear()
        return False


def is_fed(view: View, phase: Phase, round_index: int, now: float, num_slots: int) -> bool:
    """True where all of a round has been launched, as far as records or others' calls show."""
    return phase.knows(round_index, Heard.LAUNCHED) or progress.is_launched(
        view, round_index, now, num_slots
    )


def may_open_ahead(phase: Phase, own: Record, round_index: int, num_rounds: int) -> bool:
    """True where this replica could begin the round after this one beside it: where there is one,
    and it is to be here then. Whether the round is fed, and the parameters are here, is another
    question."""
    return (
        phase.may_open_ahead(round_index)
        and round_index + 1 < num_rounds
        and own.state == ACTIVE
        and not own.is_moving
    )
