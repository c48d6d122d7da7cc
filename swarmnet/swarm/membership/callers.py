"""Which callers are answered: peers of the same run, admitted to it, and strangers now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnet.admission import Admission
from swarmnet.errors import Busy, ProtocolViolation, Refused, WrongRun
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.rate import RateLimiter
from swarmnet.transport.base import Request

STRANGER_CALLS_PER_S = 20.0
STRANGER_BURST = 200.0
"""Calls of one peer whose record is not known here; more are answered `Busy`."""


class CallerChecks:
    """Refuses calls of other runs, of peers that are not admitted, and too many of strangers."""

    def __init__(self, run_id: str, view: View, admission: Admission) -> None:
        self._run_id, self._view, self._admission = run_id, view, admission
        self._strangers = RateLimiter(STRANGER_CALLS_PER_S, STRANGER_BURST)
        self._on_call: list[Callable[[str], None]] = []

    def on_call(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` for every call and notification that is checked here."""
        self._on_call.append(callback)

    def check_run(self, request: Request) -> None:
        """Raises `WrongRun` for callers that belong to another run, `Refused` for those that a
        closed run has not admitted. For every method that costs or changes something."""
        self.check_same_run(request)
        if not self.is_admitted(request.remote):
            raise Refused("this run is closed, and you have shown no valid invite")

    def check_same_run(self, request: Request) -> None:
        """Raises `WrongRun` for callers that belong to another run."""
        for callback in self._on_call:
            callback(request.remote)
        if request.run_id != self._run_id:
            raise WrongRun(
                f"this peer trains run {self._run_id[:8]}, not {request.run_id[:8] or 'none'}"
            )

    def check_stranger(self, request: Request) -> None:
        """For what anyone may ask: raises `Busy` where a stranger asks too often."""
        if self._view.get(request.remote) is None:
            now = asyncio.get_running_loop().time()
            if not self._strangers.allows(request.remote, now):
                raise Busy("you ask too often", backlog_s=1.0)

    def is_admitted(self, peer_id: str) -> bool:
        """Whether a peer may take part. In a closed run its record has to show an invite."""
        if self._admission.is_open:
            return True
        machine = machine_of(peer_id)  # an invite admits all seats of a machine
        record = self._view.get(peer_id) or self._view.get(machine)
        try:
            self._admission.check(machine, record.credential if record is not None else b"")
        except ProtocolViolation:
            return False
        return True
