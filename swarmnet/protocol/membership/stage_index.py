"""Peer ids by stage, and answers about stages that are remembered until something changes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = -2
"""In place of a stage: the peers of every stage."""


class StageIndex:
    """Sorted peer ids, of each stage and of all."""

    def __init__(self) -> None:
        self._ids: dict[int, list[str]] = {ALL: []}

    def ids(self, stage: int) -> Sequence[str]:
        """The peers of a stage (`ALL`: of every one), sorted. The sequence changes with the
        index."""
        return self._ids.get(stage, ())

    def add(self, peer_id: str, stage: int) -> None:
        """A peer that was not in the index."""
        insort(self._ids[ALL], peer_id)
        insort(self._ids.setdefault(stage, []), peer_id)

    def remove(self, peer_id: str, stage: int) -> None:
        """A peer of this stage."""
        _discard(self._ids[ALL], peer_id)
        _discard(self._ids[stage], peer_id)

    def move(self, peer_id: str, source: int, target: int) -> None:
        """A peer of the stage `source` is in the stage `target` now."""
        _discard(self._ids[source], peer_id)
        insort(self._ids.setdefault(target, []), peer_id)


class AnswerCache:
    """Remembers answers about the peers of a stage, for each stage apart, until `drop` says that
    one of them has changed, or until they lapse with time."""

    def __init__(self, lapses_at: Callable[[int, float], float]) -> None:
        """`lapses_at(stage, now)`: the time up to which answers that are found now hold."""
        self._lapses_at = lapses_at
        self._answers: dict[int, dict[object, object]] = {}
        self._until: dict[int, float] = {}

    def get(self, stage: int, name: object, now: float, ask: Callable[[], T]) -> T:
        """`ask()`, or what it returned the last time for this stage and name."""
        if now > self._until.get(stage, -math.inf):
            self._until[stage] = self._lapses_at(stage, now)
            self._answers.pop(stage, None)
        answers = self._answers.get(stage)
        if answers is None:
            answers = self._answers[stage] = {}
        if name not in answers:
            answers[name] = ask()
        return answers[name]  # type: ignore[return-value]

    def drop(self, stage: int) -> None:
        """A peer of this stage has changed."""
        self._answers.pop(stage, None)
        self._answers.pop(ALL, None)

    def clear(self) -> None:
        """Everything may have changed, the times at which answers lapse included."""
        self._answers.clear()
        self._until.clear()


def _discard(ordered: list[str], peer_id: str) -> None:
    index = bisect_left(ordered, peer_id)
    if index < len(ordered) and ordered[index] == peer_id:
        del ordered[index]
