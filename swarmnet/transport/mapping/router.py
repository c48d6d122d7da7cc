"""What a router can be asked for, in whatever language it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LEASE_S = 1200
"""For which a port is asked for, and asked for anew at half of it: what a peer leaves behind that
was killed is closed so soon, and a router that has forgotten it hears of it again."""
NAME = "swarmnet"
"""Under which the router's page shows it."""


class RouterError(Exception):
    """The router does not do it; says why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A TCP port of this machine, and where others find it."""

    port: int
    host: str
    """The router's IP address outside."""
    outside: int
    """Its port there."""
    lease_s: float
    """It is closed so long after it was asked for last."""


class Router(Protocol):
    """One that was found."""

    language: str
    """How it was asked, for people."""

    async def open(self, port: int) -> Opened:
        """Forwards a TCP port to this machine, or goes on to. Raises `RouterError`."""

    async def close(self, opened: Opened) -> None:
        """Forwards it no more. Raises `RouterError`."""
