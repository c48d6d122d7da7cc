"""Replicas that are late in mode `local`, where an exchange goes on with a quorum.

The slow one works on nothing while it sends: rounds go by. What it sends counts in the exchange
that comes next when it has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.protocol.planning.flow import Rates
from swarmnet.protocol.planning.model import Machine
from swarmnet.protocol.sync_modes import MOST_LATE


@dataclass(frozen=True, slots=True)
class Late:
    """A replica for whose contribution nobody waits. Seconds are a round's share of an exchange."""

    machine: Machine
    rates: Rates
    behind_s: float
    """That it sends while the others are at work again."""

    def at_work(self, open_s: float) -> float:
        """The part of the rounds in which it works, where others do so for `open_s` a round; 0
        where nothing of it counts."""
        if open_s <= 0:
            return 0.0
        away = self.behind_s / open_s  # in times between two exchanges
        exchanges = int(away) + 1
        return 1 - away / exchanges if exchanges <= MOST_LATE else 0.0


def waited_s(uploads_s: Sequence[float], tokens: Sequence[float], least: int) -> float:
    """How long contributions are waited for that take `uploads_s`. `tokens`: behind each, in any
    unit; `least`: as of `least_quorum`."""
    came, all_s = 0.0, max(uploads_s)
    order = sorted(range(len(uploads_s)), key=uploads_s.__getitem__)
    for count, i in enumerate(order, 1):
        came += tokens[i]
        if count >= least and 2 * came > sum(tokens):
            quorum_s = grace_s = uploads_s[i]
            return min(all_s, quorum_s + grace_s)
    return all_s
