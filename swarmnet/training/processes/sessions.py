"""Names of texts in other processes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable


class SessionNumbers:
    """By session, a number that no other one had."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._next = itertools.count()

    def of(self, session: Hashable) -> int:
        """A new one where it has none."""
        number = self._numbers.get(session)
        if number is None:
            number = self._numbers[session] = next(self._next)
        return number

    def drop(self, session: Hashable) -> int | None:
        """The number that it had."""
        return self._numbers.pop(session, None)
