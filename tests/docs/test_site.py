"""The built documentation as a person opens it: from a disk, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import browser, page, until

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r"""(?:\bsrc|<(?:image|link|use)\b[^>]*\bhref)=["']?\s*(?:https?:)?//"""
    r"""|(?:\burl|\bimport|\bfetch)\(\s*["']?(?:https?:)?//|@import\s*["'](?:https?:)?//"""
)
"""What makes a browser ask another machine, in a page, a style, a script or a picture. A link that
a person may follow is none."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a page that is in no menu, or a link or anchor that leads nowhere, fails."""
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()
    assert not list(site.rglob("*.py"))


def fetched(folder: Path) -> list[str]:
    """Where a site's files name something that would be fetched from elsewhere."""
    return [
        f"{path.relative_to(folder)}: {match[0]}"
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".html", ".css", ".js", ".svg")
        for match in FETCHED.finditer(path.read_text(encoding="utf-8"))
    ]


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    assert fetched(site) == []


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        "<img alt='' src=//example.org/x.png>",
        '<link rel="stylesheet" href="https://example.org/x.css">',
        "<style>@import 'https://example.org/x.css';</style>",
        "<style>a { background: url(http://example.org/x.png) }</style>",
        '<script>await import("https://example.org/x.mjs")</script>',
    ],
)
def test_what_is_fetched_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f'<a href="https://example.org/">a link</a>{text}')
    assert len(fetched(tmp_path)) == 1


def test_the_search_works_on_files(chromium: Any, site: Path) -> None:
    """From any page, by the box at its side; what is found leads to where it stands."""
    asked: list[str] = []
    with page(chromium) as opened:
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto((site / "reference" / "limits.html").as_uri())
        opened.fill("#rtd-search-form input", "--max-upload-per-month 300GB")
        opened.press("#rtd-search-form input", "Enter")
        until(opened, "document.querySelectorAll('#mkdocs-search-results a').length > 0")
        found = links(opened)
        assert any("volunteers.html" in link for link in found[:5]), found[:5]
        opened.fill("#mkdocs-search-query", "symmet")
        until(opened, "document.querySelector('#mkdocs-search-results p').innerText.length > 0")
        assert any("network.html" in link for link in links(opened))
        opened.fill("#mkdocs-search-query", "title:* ~9 zzyzx+")
        until(opened, "document.querySelectorAll('#mkdocs-search-results a').length === 0")
        assert "No results" in opened.inner_text("#mkdocs-search-results")
        opened.fill("#mkdocs-search-query", "who must be reachable")
        until(opened, "document.querySelectorAll('#mkdocs-search-results a').length > 0")
        opened.click("#mkdocs-search-results a")
        assert "network.html#who-must-be-reachable" in opened.url
    assert asked
    assert {url.partition(":")[0] for url in asked} == {"file"}


def links(opened: Any) -> list[str]:
    found: list[str] = opened.evaluate(
        "[...document.querySelectorAll('#mkdocs-search-results a')].map(a => a.href)"
    )
    return found
