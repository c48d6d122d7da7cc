"""The end of a round at one replica, and the opening of the next one before that.

Both follow from the view, from what calls of others tell (`replica_phase.Heard`), and from where
the replica is in its round."""

from __future__ import annotations

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
