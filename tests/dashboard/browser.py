"""A real Chromium."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOW = "no Chromium: `make browser` installs one, or name yours with SWARMNET_CHROMIUM=/path/to/it"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str:
    """Its path. Fails where there is none: a page that nobody has looked at is not tested."""
    named = os.environ.get("SWARMNET_CHROMIUM")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = named or next((path for name in names if (path := shutil.which(name))), None)
    own = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
    found = found or (str(own[-1]) if own else None)
    assert found, HOW
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """One of its own. While it is open, no event loop can run on this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def page(within: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A page of a browser that remembers nothing of others; errors on it fail the test."""
    errors: list[str] = []
    context = within.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
    )
    try:
        opened = context.new_page()
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        yield opened
    finally:
        context.close()
    lost = [e for e in errors if "ERR_CONNECTION" not in e and "ERR_INCOMPLETE" not in e]
    assert not lost, lost


def overflow(opened: Any) -> int:
    """Pixels by which the page is wider than its window."""
    return int(opened.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


def until(opened: Any, expression: str, limit_s: float = 30.0) -> None:
    """Waits for an expression of the page to be true. (The driver's own way needs `eval`, which the
    page forbids.)"""
    end = time.monotonic() + limit_s
    while not opened.evaluate(expression):
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {expression}"
        opened.wait_for_timeout(50)
