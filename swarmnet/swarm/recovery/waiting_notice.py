"""Telling the user what a peer waits for, while a run cannot go on, and what would help."""

from __future__ import annotations

import logging

from swarmnet.protocol.moments import Since
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.swarm.membership.reconnecting import Reconnecting

log = logging.getLogger("swarmnet.recovery")

SAY_EVERY_S = 10.0
"""Between two lines that say what is being waited for. It protects the log from a line for each
look (tests/swarm/recovery/test_waiting_notice.py)."""
SAY_ENDLESS_EVERY_S = UPKEEP_S
"""Likewise where only a person, or a peer that is not there, can help."""
WAY_OUT = (
    "start the peer that has it, or one peer with --begin-anew to begin from initial parameters"
)


class WaitingNotice:
    """Logs a reason now and then."""

    def __init__(self, reconnecting: Reconnecting | None) -> None:
        """`reconnecting` looks for peers that were met before, which may have what is missing."""
        self._reconnecting = reconnecting
        self._said = Since()
        self._said_endless = Since()

    def put_off(self, now: float) -> None:
        """There is nothing to say as long as the wait is short."""
        self._said.begin(now)

    def say(self, reason: str, now: float, *, is_endless: bool = False) -> None:
        """`is_endless`: only a person can end the wait. Nothing is said of that while peers are
        still looked for."""
        missing = self._reconnecting
        if is_endless and missing is not None and missing.is_looking():
            reason, is_endless = f"{reason}; looking for peers that were met before", False
        if is_endless:
            if self._said_endless.is_due(now, SAY_ENDLESS_EVERY_S):
                unreached = missing.describe() if missing is not None else ""
                log.warning("waiting: %s", "; ".join(filter(None, (reason, unreached, WAY_OUT))))
        elif reason and self._said.is_due(now, SAY_EVERY_S):
            log.warning("waiting: %s", reason)
