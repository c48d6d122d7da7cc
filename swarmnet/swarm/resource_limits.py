"""What the owner of a machine lets its peers take. It may change while a peer runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class ResourceLimits:
    """The owner's word, for all peers (seats) of the machine. Nothing is limited by default."""

    unfit: Callable[[int], str] = lambda stage_index: ""
    """Why a stage does not fit into the memory that may be taken; empty where it does."""
    max_open_steps: Callable[[int], int | None] = lambda stage_index: None
    """Microbatches inside a replica of a stage at a time; None = no bound."""
    room_bytes: Callable[[int], float] = lambda stage_index: math.inf
    """Memory beside what training takes where a stage is served, of that which may be taken."""
    is_memory_full: bool = False
    """The memory that may be taken is taken: one microbatch at a time, until it is not."""
    why_paused: str = ""
    """Why this peer must not work now; empty where it may."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _texts: dict[str, float] = field(default_factory=dict)
    """By seat."""

    @property
    def text_bytes(self) -> float:
        """Memory that texts which the model writes take now, at all seats."""
        return sum(self._texts.values())

    def hold_texts(self, peer_id: str, num_bytes: float) -> None:
        """Texts at a seat take so much from now on."""
        self._texts[peer_id] = num_bytes

    def bound_memory(
        self,
        unfit: Callable[[int], str],
        max_open_steps: Callable[[int], int | None],
        room_bytes: Callable[[int], float],
    ) -> None:
        """What fits into the memory that may be taken is asked so from now on."""
        self.unfit = unfit
        self.max_open_steps = max_open_steps
        self.room_bytes = room_bytes

    def fill(self, is_full: bool) -> None:
        """Whether the memory that may be taken is taken now."""
        self.is_memory_full = is_full

    def pause(self, why: str) -> None:
        """This peer must not work, for that reason; empty: it may again."""
        self.why_paused = why
        self.tell()

    def tell(self) -> None:
        """Something changed."""
        self.changed.set()

    def has_room(self, stage_index: int, num_open: int) -> bool:
        """May one more microbatch come into a stage, beside so many?"""
        if num_open == 0:  # or nothing would ever be done
            return True
        if self.is_memory_full:
            return False
        most = self.max_open_steps(stage_index)
        return most is None or num_open < most
