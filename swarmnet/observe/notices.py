"""What of a run is worth a message to a person who does not look. Pure: time is an argument.

Three things are: a stage about to be lost, a run that stands still, and a run that is over; and
that the first two are over. Each is told once, however long it lasts."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.observe.view_model import StageRow, ViewModel
from swarmnet.plurals import counted

LASTING_S = 60.0
"""How long a stage is about to be lost before that is told: one that restarts is back by then."""
STILL_S, STILL_ROUNDS = 600.0, 3.0
"""A run stands still when no sample has been committed for so long, and for so many times what its
longest round took."""

MAX_NAME = 200
"""Characters: Discord takes messages of 2,000, and ntfy makes a file of one of 4,096 bytes."""

STAGE, STILL, DONE = "stage", "still", "done"


@dataclass(frozen=True, slots=True)
class Notice:
    """A message."""

    about: str
    """`stage`, `still` or `done`; for programs."""
    text: str
    """One line, for people."""
    is_over: bool = False
    """What was told before is over."""


@dataclass(slots=True)
class _Stage:
    had_several: bool = False
    """A stage that never had more than one replica is as its owner wants it."""
    thin_since: float | None = None
    is_told: bool = False


@dataclass(slots=True)
class Notices:
    """Which messages are due."""

    run: str
    """Its name; a message has the beginning of a long one."""
    _stages: dict[int, _Stage] = field(default_factory=dict)
    _progress: tuple[int, int] = (-1, -1)
    """Round, and samples committed in it."""
    _moved_at: float | None = None
    _round_began_at: float | None = None
    _longest_s: float = 0.0
    _is_still: bool = False
    _is_done: bool = False

    @property
    def _name(self) -> str:
        return self.run if len(self.run) <= MAX_NAME else f"{self.run[:MAX_NAME]}..."

    def look(self, model: ViewModel, now: float) -> list[Notice]:
        """What is to be told since the last look. `now`: seconds, of a clock that never goes
        back."""
        if model.done:
            news = [] if self._is_done else [self._done(model)]
            self._is_done = True
            return news
        found = [n for row in model.stages if (n := self._stage(row, model, now))]
        still = self._still(model, now)
        return [*found, *([still] if still else [])]

    def _done(self, model: ViewModel) -> Notice:
        loss = "" if model.loss is None else f", loss {model.loss:.3f}"
        held_out = model.held_out_loss
        measured = "" if held_out is None else f", held-out loss {held_out:.3f}"
        if model.ends_with is None:
            how = f"done, {counted(model.rounds, 'round')}"
        else:
            how = f"ended by its owner after {counted(model.round, 'round')}"
        return Notice(DONE, f"{self._name}: {how}{loss}{measured}")

    def _stage(self, row: StageRow, model: ViewModel, now: float) -> Notice | None:
        seen = self._stages.setdefault(row.stage, _Stage())
        seen.had_several |= row.num_replicas > 1
        where = f"{self._name}, round {model.round + 1}"
        is_thin = row.num_replicas == 0 or (seen.had_several and row.num_replicas == 1)
        if not is_thin or not any(r.num_replicas for r in model.stages):
            was_told, seen.is_told, seen.thin_since = seen.is_told, False, None
            if was_told:
                return Notice(STAGE, f"{where}: stage {row.stage} has replicas again", is_over=True)
            return None
        seen.thin_since = now if seen.thin_since is None else seen.thin_since
        if seen.is_told or now < seen.thin_since + LASTING_S:
            return None
        seen.is_told = True
        what = "has nobody: training waits" if not row.num_replicas else "is one failure from loss"
        return Notice(STAGE, f"{where}: stage {row.stage} {what}; start another peer")

    def _still(self, model: ViewModel, now: float) -> Notice | None:
        if model.round != self._progress[0]:
            if self._round_began_at is not None and self._progress[0] >= 0:
                self._longest_s = max(self._longest_s, now - self._round_began_at)
            self._round_began_at = now
        progress = (model.round, model.committed)
        if progress != self._progress or self._moved_at is None:
            self._progress, self._moved_at = progress, now
            if self._is_still:
                self._is_still = False
                return Notice(STILL, f"{self._name}: round {model.round + 1} goes on", is_over=True)
            return None
        lasts_s = now - self._moved_at
        if self._is_still or lasts_s < max(STILL_S, STILL_ROUNDS * self._longest_s):
            return None
        self._is_still = True
        return Notice(
            STILL,
            f"{self._name}: nothing has happened in round {model.round + 1} for "
            f"{counted(lasts_s / 60, 'minute', '.0f')}; `swarmnet status` says what is missing",
        )
