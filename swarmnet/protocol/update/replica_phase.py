"""A replica's phase in a round, as one table: events in, commands out.

`swarm.replica.transitions` is the shell: it turns what happens into events and carries the commands
out. No clock, no task and no tensor is in here.
"""

# Theory
# ======
#
# A replica is in one round. Microbatches come and go while it is open; then it is closed, and the
# update is made; then the parameters change, and the next round is open. Three things overlap with
# that: a newcomer is in a round before it has the round's parameters; the next round may be open
# ahead (mode `delayed`), with parameters and a gradient buffer of its own; and who leaves gives its
# gradient away in the middle of a round.
#
# What each state promises:
#
#   FETCHING           Nothing is here yet. The round is the one whose parameters are being fetched.
#                      Only in this state a replica chooses its round.
#   FOLLOWING          The round is over, and the newcomer takes part in its update without a
#                      gradient: the result makes it whole.
#   FOLLOWING_FLUSHED  As FLUSHED is to CLOSED.
#   DECLARING          The parameters are here, and the others of the stage are being told. Callers
#                      wait: the others might end the round without what would be done for them.
#   OPEN               Microbatches of the round come and go.
#   AHEAD              So do those of the next round, of which the parameters are here too.
#   GIVING             All that the round has learned here is on its way to another replica. Nobody
#                      knows yet who counts it, so the round neither ends nor is lost here.
#   GIVEN              Another replica counts it. The gradient buffer still has it: nothing may be
#                      added any more, nothing given again, and this replica contributes nothing of
#                      its own.
#   CLOSED             Nothing adds to the gradient any more, which is being averaged.
#   CLOSED_AHEAD       The same, while the next round is open.
#   FLUSHED            The exchange of the round before has given its parameters, and that of this
#                      round begins with them: exchanges return between the rounds. Not while the
#                      next round is open: it has begun with other parameters.
#
# From this follows what the table has to keep, whatever the order of events:
#
#   1. No microbatch takes part in two versions of the parameters. What the replica takes in is
#      of a round whose parameters are in place, and these are replaced only when nothing of that
#      round is taken in any more: `FinishRound` and `Promote` come from states that are not open.
#   2. A closed round is never opened again with what it has learned: out of a closed state leads
#      only the next round, or the loss of all that is here.
#   3. A gradient is given or contributed, never both, and once.
#   4. The next round is open only where its parameters are.
#   5. Nobody is told that a replica serves before it can; no caller gets in before all know.
#
# Beside its state a replica remembers what others' calls tell of the round that it is in (`Heard`).
# It does not change what may be done; it tells that the round ends.

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from swarmnet.protocol.sync_modes import SyncPlan


class State(Enum):
    """Where a replica is in its round."""

    __hash__ = object.__hash__  # that of `Enum` is a call, for each look into a table

    FETCHING = "fetching"
    FOLLOWING = "following"
    FOLLOWING_FLUSHED = "following, flushed"
    DECLARING = "declaring"
    OPEN = "open"
    AHEAD = "ahead"
    GIVING = "giving"
    GIVEN = "given"
    CLOSED = "closed"
    CLOSED_AHEAD = "closed, ahead"
    FLUSHED = "flushed"


class Heard(IntEnum):
    """What others' calls tell of the present round."""

    NOTHING = 0
    LAUNCHED = 1
    """All of it is launched, or about to be: another replica works on the next one."""
    OVER = 2
    """Another replica has closed it."""


# ---- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aim:
    """The parameters of this round are wanted."""

    round: int


@dataclass(frozen=True, slots=True)
class Open:
    """All parameters of this round have been put aside here: it begins."""

    round: int


@dataclass(frozen=True, slots=True)
class OpenInPart:
    """Some have, and some are still to be fetched."""

    round: int


@dataclass(frozen=True, slots=True)
class Declared:
    """The others of the stage know that this replica serves."""


@dataclass(frozen=True, slots=True)
class OpenAhead:
    """The parameters of the next round have been put aside, and all of this one is launched."""


@dataclass(frozen=True, slots=True)
class Give:
    """Another replica has all of the gradient, and is about to be told that it counts it."""


@dataclass(frozen=True, slots=True)
class Given:
    """It does, or has not said whether it does."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It does not."""


@dataclass(frozen=True, slots=True)
class Close:
    """The round is drained, or others have closed it."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The exchange of the round before has put its parameters aside, and that of this one is to
    begin with them."""


@dataclass(frozen=True, slots=True)
class Lose:
    """The parameters here do not hold, or the stage has moved on."""


Event = (
    Aim | Open | OpenInPart | Declared | OpenAhead | Give | Given | Refused | Close | Flush | Lose
)

# ---- commands -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitDevice:
    """Wait until the device has done, or refused, all of the round that it was given before: after
    that nothing adds to the gradient of the round, in whose memory parameters that are fetched may
    be put aside."""

    round: int


@dataclass(frozen=True, slots=True)
class FinishRound:
    """Put the parameters that were put aside in the place of the present ones. `round`: the one
    that they are of."""

    round: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Make the round that is open ahead, `round`, the present one. Nothing changes for the work on
    it: the device is not waited for."""

    round: int


@dataclass(frozen=True, slots=True)
class KeepBoth:
    """Let this round have parameters and a gradient buffer beside those of the present one."""

    round: int


@dataclass(frozen=True, slots=True)
class DropAhead:
    """Forget what was done of this round, which was open ahead."""

    round: int


Command = AwaitDevice | FinishRound | Promote | KeepBoth | DropAhead

# ---- the table ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What an event does: the state after it, and a command for the shell."""

    to: State
    does: type[Command] | None = None


TABLE: dict[State, dict[type[Event], Row]] = {
    State.FETCHING: {
        Aim: Row(State.FETCHING),
        OpenInPart: Row(State.FETCHING, FinishRound),
        Open: Row(State.DECLARING, FinishRound),
        Close: Row(State.FOLLOWING),
    },
    State.FOLLOWING: {
        OpenInPart: Row(State.FETCHING, FinishRound),
        Open: Row(State.DECLARING, FinishRound),
        Flush: Row(State.FOLLOWING_FLUSHED, FinishRound),
        Lose: Row(State.FETCHING),
    },
    State.FOLLOWING_FLUSHED: {
        Open: Row(State.DECLARING, FinishRound),
        Lose: Row(State.FETCHING),
    },
    State.DECLARING: {
        Declared: Row(State.OPEN),
    },
    State.OPEN: {
        OpenAhead: Row(State.AHEAD, KeepBoth),
        Give: Row(State.GIVING),
        Close: Row(State.CLOSED, AwaitDevice),
        Lose: Row(State.FETCHING, AwaitDevice),
    },
    State.AHEAD: {
        Close: Row(State.CLOSED_AHEAD, AwaitDevice),
        Lose: Row(State.FETCHING, DropAhead),
    },
    State.GIVING: {
        OpenAhead: Row(State.GIVING),  # who leaves begins nothing new: it took time to get ready
        Given: Row(State.GIVEN),
        Refused: Row(State.OPEN),
    },
    State.GIVEN: {
        OpenAhead: Row(State.GIVEN),
        Close: Row(State.CLOSED, AwaitDevice),
        Lose: Row(State.FETCHING, AwaitDevice),
    },
    State.CLOSED: {
        Open: Row(State.OPEN, FinishRound),
        Flush: Row(State.FLUSHED, FinishRound),
        Lose: Row(State.FETCHING),
    },
    State.CLOSED_AHEAD: {
        Open: Row(State.OPEN, Promote),
        Lose: Row(State.FETCHING, DropAhead),
    },
    State.FLUSHED: {
        Open: Row(State.OPEN, FinishRound),
        Lose: Row(State.FETCHING),
    },
}
"""An event that is missing in the row of a state is an error there."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What is asked of a replica, state by state."""

    is_whole: bool = False
    """It has the parameters of the round: it may be asked for shards, and what others ask of it
    tells something."""
    is_open: bool = False
    """Microbatches of the round may be worked on."""
    is_ahead: bool = False
    """So may those of the next one."""
    is_closed: bool = False
    """Microbatches of the round come too late."""
    is_flushed: bool = False
    """The parameters are those of the round's own exchange."""


ANSWERS: dict[State, Answers] = {
    State.FETCHING: Answers(),
    State.FOLLOWING: Answers(is_closed=True),
    State.FOLLOWING_FLUSHED: Answers(is_closed=True, is_flushed=True),
    State.DECLARING: Answers(is_whole=True, is_open=True),
    State.OPEN: Answers(is_whole=True, is_open=True),
    State.AHEAD: Answers(is_whole=True, is_open=True, is_ahead=True),
    State.GIVING: Answers(is_whole=True, is_open=True),
    State.GIVEN: Answers(is_whole=True, is_open=True),
    State.CLOSED: Answers(is_whole=True, is_closed=True),
    State.CLOSED_AHEAD: Answers(is_whole=True, is_ahead=True, is_closed=True),
    State.FLUSHED: Answers(is_whole=True, is_closed=True, is_flushed=True),
}


class NotInTable(Exception):
    """An event that cannot happen in the state that a replica is in."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A replica's round, and where it is in it."""

    state: State
    round: int
    heard: Heard = Heard.NOTHING

    # ---- questions --------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        return self._answers.is_whole

    @property
    def is_declaring(self) -> bool:
        """The others of the stage are being told that it serves."""
        return self.state is State.DECLARING

    @property
    def is_ahead(self) -> bool:
        return self._answers.is_ahead

    @property
    def newest_open(self) -> int:
        """The newest round that has begun here."""
        return self.round + self.is_ahead

    def is_open(self, round_index: int) -> bool:
        """Whether a round is the present one, and open."""
        return round_index == self.round and self._answers.is_open

    def takes(self, round_index: int) -> bool:
        """Whether microbatches of a round may be worked on here."""
        if round_index == self.round + 1:
            return self._answers.is_ahead
        return self.is_open(round_index)

    def lets_in(self, round_index: int) -> bool:
        """Whether callers may come with such microbatches."""
        return self.takes(round_index) and not self.is_declaring

    def is_closed(self, round_index: int) -> bool:
        """Whether they come too late."""
        return round_index < self.round or (round_index == self.round and self._answers.is_closed)

    def is_given(self, round_index: int) -> bool:
        """Whether the gradient of a round is, or may be, another replica's."""
        return round_index == self.round and self.state in (State.GIVING, State.GIVEN)

    def may_give(self, round_index: int) -> bool:
        """Whether the gradient of a round is this replica's to give away."""
        return round_index == self.round and self.state is State.OPEN

    def may_open_ahead(self, round_index: int) -> bool:
        """Whether the round after this one could be opened beside it."""
        return round_index == self.round and self.state is State.OPEN

    def exchange(self, plan: SyncPlan) -> int:
        """The exchange whose input the present common parameters are."""
        if self._answers.is_flushed:
            return self.round
        return plan.parameter_version(self.round)

    def knows(self, round_index: int, what: Heard) -> bool:
        """Whether it is known of a round, by others' calls, or because it is over here too."""
        return round_index < self.round or (round_index == self.round and self.heard >= what)

    @property
    def _answers(self) -> Answers:
        return ANSWERS[self.state]

    # ---- what happens -----------------------------------------------------------------------

    def hears(self, round_index: int, what: Heard) -> Phase:
        """After a call that tells something of a round: only of the present one, and only where
        this replica is whole, for a newcomer has not been in it. The same where it is no news."""
        is_news = round_index == self.round and what > self.heard and self.is_whole
        return replace(self, heard=what) if is_news else self

    def after(self, event: Event) -> tuple[Phase, Command | None]:
        """The phase after an event, and what the shell has to do. Raises `NotInTable`."""
        row = TABLE[self.state].get(type(event))
        if row is None:
            raise NotInTable(f"{event} while {self.state.value}, in round {self.round}")
        new_round = self.round
        if isinstance(event, Aim | Open | OpenInPart):
            if self.state is not State.FETCHING and event.round != self.round + 1:
                raise NotInTable(f"{event} while {self.state.value}, in round {self.round}")
            new_round = event.round
        heard = self.heard if new_round == self.round else Heard.NOTHING
        return Phase(row.to, new_round, heard), _command(row.does, self.round, new_round)


def _command(does: type[Command] | None, before: int, after: int) -> Command | None:
    if does is None:
        return None
    if does in (KeepBoth, DropAhead):
        return does(before + 1)
    return does(after)
