"""`--notify URL`: messages to a person, by a webhook. Nothing of it is in training's way: what
cannot be sent in a few tries is dropped, with a line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.parse import urlsplit

from swarmnet.errors import UsageError
from swarmnet.observe.notices import Notice, Notices
from swarmnet.observe.view_model import ViewModel
from swarmnet.printable import printable
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

MAX_WAITING = 16
"""Notices that are to be sent; further ones take the place of the oldest."""
PAUSES_S = (2.0, 15.0, 120.0)
"""Between tries."""
SEND_TIMEOUT_S = 10.0
LAST_WORDS_S = 5.0
"""How long the end of a peer waits for what is to be sent."""
AGENT = "swarmnet"

DISCORD_HOOK = re.compile(r"/api(?:/v\d+)?/webhooks/\w+/[\w-]+(?P<form>/slack)?")
"""With the version of its interface or without, and at choice in the form of Slack."""

Form = Callable[[Notice, str], tuple[bytes, dict[str, str]]]
"""(notice, name of the run) -> the body of the request and its headers."""
JSON = {"Content-Type": "application/json"}


def _json(values: dict[str, object]) -> tuple[bytes, dict[str, str]]:
    return json.dumps(values).encode(), JSON


def _ntfy(notice: Notice, run: str) -> tuple[bytes, dict[str, str]]:
    priority = "default" if notice.is_over or notice.about == "done" else "high"
    return notice.text.encode(), {"Title": "swarmnet", "Priority": priority}


def _slack(notice: Notice, run: str) -> tuple[bytes, dict[str, str]]:
    safe = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _json({"text": safe})


def _discord(notice: Notice, run: str) -> tuple[bytes, dict[str, str]]:
    return _json({"content": notice.text, "allowed_mentions": {"parse": []}})


def _plain(notice: Notice, run: str) -> tuple[bytes, dict[str, str]]:
    return _json(
        {"run": run, "about": notice.about, "text": notice.text, "is_over": notice.is_over}
    )


def form_of(url: str) -> Form:
    """What the service behind an address takes, by its host and path."""
    parts = urlsplit(url)
    host, path = (parts.hostname or "").lower(), parts.path
    if host.split(".")[0] == "ntfy" or host.endswith(".ntfy.sh"):
        return _ntfy
    if host.endswith((".slack.com", ".slack-gov.com")):
        return _slack
    is_discord = host in ("discord.com", "discordapp.com") or host.endswith(".discord.com")
    if is_discord and (hook := DISCORD_HOOK.match(path)):
        return _slack if hook["form"] == "/slack" else _discord
    return _plain


def check_url(url: str) -> None:
    """Raises `UsageError` where nothing can be sent there. What is wrong is told without the
    address: whoever knows it can write there."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(
            "--notify: an address such as https://ntfy.sh/TOPIC, or the webhook of Slack or Discord"
        )


@dataclass
class Notifier:
    """Sends notices to one address, in order."""

    url: str
    notices: Notices
    pauses_s: tuple[float, ...] = PAUSES_S
    _waiting: list[Notice] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self, model: ViewModel, now: float) -> None:
        """Sends what is to be told of a run since the last look; returns at once. `now`: seconds of
        a clock that never goes back."""
        self.tell(self.notices.look(model, now))

    def tell(self, notices: Sequence[Notice]) -> None:
        """To be sent; returns at once."""
        if notices:
            self._waiting = [*self._waiting, *notices][-MAX_WAITING:]
            self._is_idle.clear()
            self._news.set()

    async def send(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                notice = self._waiting[0]
                await self._send(notice)
                if self._waiting and self._waiting[0] is notice:
                    del self._waiting[0]
            self._is_idle.set()

    async def last_words(self) -> None:
        """Waits until all is sent, for a few seconds."""
        if not self._waiting:
            return
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("the last notices were not sent: %s is too slow", self._host)

    @property
    def _host(self) -> str:
        return urlsplit(self.url).hostname or ""

    async def _send(self, notice: Notice) -> None:
        reason = ""
        for pause_s in (*self.pauses_s, None):
            reason, is_final = await asyncio.to_thread(post, self.url, notice, self.notices.run)
            if not reason:
                return
            if is_final or pause_s is None:
                break
            await asyncio.sleep(pause_s)
        log.warning("a notice was not sent: %s: %s", self._host, printable(reason))


@asynccontextmanager
async def sending(notifier: Notifier) -> AsyncIterator[Notifier]:
    """While the block lasts, and for a few seconds more where something is to be sent."""
    task = asyncio.get_running_loop().create_task(notifier.send())
    try:
        yield notifier
    finally:
        await notifier.last_words()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def open_notifier(stack: AsyncExitStack, url: str, spec: RunSpec) -> Notifier | None:
    """What sends messages about a run that the caller will look at; None where nobody wants any."""
    if not url:
        return None
    return await stack.enter_async_context(sending(Notifier(url, Notices(printable(spec.name)))))


def post(url: str, notice: Notice, run: str) -> tuple[str, bool]:
    """Sends one. Returns what went wrong, empty for nothing, and whether trying again is of no use.
    Blocks."""
    body, headers = form_of(url)(notice, run)
    request = urllib.request.Request(
        url, data=body, headers={**headers, "User-Agent": AGENT}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=SEND_TIMEOUT_S):
            return "", False
    except urllib.error.HTTPError as e:
        with e:
            is_final = 400 <= e.code < 500 and e.code not in (408, 425, 429)
            return f"it answered {e.code} {e.reason}", is_final
    except (OSError, HTTPException, ValueError) as e:
        reason = getattr(e, "reason", e)
        return str(reason) or type(e).__name__, False
