"""Callbacks that hear of a peer."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("swarmnet.transport")


class Listeners:
    """Callbacks in the order in which they were added."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[str], None]] = []

    def add(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def remove(self, callback: Callable[[str], None]) -> None:
        """It hears no more, if it did."""
        self._callbacks = [own for own in self._callbacks if own != callback]

    def tell(self, peer_id: str) -> None:
        """Calls each; one that raises is logged and disturbs nobody."""
        for callback in self._callbacks:
            try:
                callback(peer_id)
            except Exception:
                log.exception("a listener failed")
