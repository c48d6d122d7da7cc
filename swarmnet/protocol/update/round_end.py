"""The end of a round at one replica, and the opening of the next one before that.

Both follow from the view, from what calls of others tell (`replica_phase.Heard`), and from where
the replica is in its round."""

from __future__ import annotations

from collections.abc import Collection

from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
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
