"""Serves an app on the event loop that is there, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from swarmnet.errors import PortTaken, UserError

log = logging.getLogger("swarmnet.dashboard")

BACKLOG = 128
CLOSE_S = 1
"""How long open streams may take to end."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's, not the page's."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[str]:
    """Serves until the block ends, and closes the socket; gives the page's address."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = _Server(config)
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    shown, bound = listener.getsockname()[:2]
    name = f"[{shown}]" if ":" in shown else shown
    try:
        yield f"http://{name}:{bound}/"
    finally:
        server.should_exit = True
        await asyncio.gather(running, return_exceptions=True)
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """For a page. Port 0: any that is free. Raises `UserError` where the port
    cannot be had, `PortTaken` where another process has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as e:
        listener.close()
        taken = isinstance(e, OSError) and e.errno == errno.EADDRINUSE
        hint = "choose another port" if taken else "give an address of this machine"
        reason = e.strerror if isinstance(e, OSError) else str(e)
        kind = PortTaken if taken else UserError
        raise kind(f"cannot show the page on {host}:{port}: {reason}; {hint}") from None
    listener.setblocking(False)
    return listener
