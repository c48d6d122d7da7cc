"""What a browser may ask for. Read-only: there is nothing here that changes a run.

Bound to loopback, only requests that name this machine are answered, or a host that a person has
named (a page elsewhere cannot have a browser fetch from here under another name); scripts and
styles come from here alone. All that the page asks for is relative to its own address, so a proxy
may show it under any path.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peer.observe.dashboard.hub import Hub

STATIC = Path(__file__).with_name("static")
LOCAL_NAMES = ["localhost", "127.0.0.1", "::1", "[::1]"]
KEEP_ALIVE_S = 15.0
"""A comment is sent after so long without news, so that nobody between us takes it for dead."""
RETRY_MS = 1000
MAX_ID_CHARS = 128
PIECE_BYTES = 1 << 18
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Headers:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        await self._app(scope, receive, with_headers)


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(host: str, allowed: Sequence[str]) -> list[str]:
    """Under which names a page is asked for that is shown at the address `host`: of this machine
    and of the `allowed` hosts; any, where all may look and no host is named."""
    if not allowed and not is_loopback(host):
        return ["*"]
    return list(dict.fromkeys([*LOCAL_NAMES, host, *allowed]))


def live_app(hub: Hub, host: str, allowed: Sequence[str] = ()) -> Starlette:
    """The page of a run that goes on. `host`, `allowed`: as of `names_of`."""

    async def stream(request: Request) -> Response:
        if hub.is_full:
            return Response("too many visitors", 503)
        return StreamingResponse(
            _events(hub), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    async def history(request: Request) -> Response:
        peer_id = request.query_params.get("id", "")
        if not 0 < len(peer_id) <= MAX_ID_CHARS:
            return JSONResponse({"error": "which peer?"}, 400)
        return JSONResponse(hub.history(peer_id))

    async def state(request: Request) -> Response:
        return JSONResponse(hub.state())

    async def no_film(request: Request) -> Response:
        return Response(status_code=204)

    async def spec(request: Request) -> Response:
        return Response(hub.spec_json, media_type="application/json")

    async def metrics(request: Request) -> Response:
        path = hub.offers.replay
        file = None if path is None else await asyncio.to_thread(_opened, path)
        if file is None:
            return Response("no replay file is written here (--metrics)", 404)
        return StreamingResponse(_until_now(file), media_type="application/x-ndjson")

    async def join(request: Request) -> Response:
        if hub.offers.join is None:
            return Response("the owner of this peer does not show it (--dashboard-join)", 404)
        return PlainTextResponse(hub.offers.join())

    routes = {"/stream": stream, "/peer": history, "/state.json": state, "/replay.json": no_film}
    routes |= {"/spec.json": spec, "/replay.jsonl": metrics, "/join.txt": join}
    return _app(names_of(host, allowed), [Route(p, answer) for p, answer in routes.items()])


def _opened(path: Path) -> BinaryIO | None:
    """None where it is not there."""
    try:
        return path.open("rb") if path.is_file() else None
    except OSError:
        return None


def _until_now(file: BinaryIO) -> Iterator[bytes]:
    """What is in a file, in pieces; not what is added meanwhile. Lines are added as a whole."""
    with file:
        left = os.fstat(file.fileno()).st_size
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            yield piece


def replay_app(
    film: Callable[[], dict[str, Any]], host: str, allowed: Sequence[str] = ()
) -> Starlette:
    """The page of a run that is over. `film`: see `replay.make_film`; called for each visitor.
    `host`, `allowed`: as of `names_of`."""

    async def replay(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(film))

    return _app(names_of(host, allowed), [Route("/replay.json", replay)])


def _app(names: list[str], routes: list[Route]) -> Starlette:
    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/healthz", healthz),
            *routes,
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False),
            Middleware(_Headers),
            Middleware(GZipMiddleware, minimum_size=2048),
        ],
    )
    app.router.redirect_slashes = False  # to an absolute URL, which lacks a proxy's path
    return app


async def _events(hub: Hub) -> AsyncIterator[bytes]:
    """Server-sent events."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    visit = hub.visit()
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(visit))
            done, _ = await asyncio.wait((pending,), timeout=KEEP_ALIVE_S)
            if not done:
                yield b": nothing new\n\n"
                continue
            try:
                message = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            text = json.dumps(message, separators=(",", ":"))
            yield f"event: {message['kind']}\ndata: {text}\n\n".encode()
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await visit.aclose()  # type: ignore[attr-defined]
