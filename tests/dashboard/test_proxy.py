"""The page behind a real proxy, under a path of another host."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from peer.observe.dashboard.app import live_app
from peer.observe.dashboard.server import listen, serving
from tests.dashboard.making import Played, replica

pytestmark = pytest.mark.processes
LOOPBACK, HOST, PREFIX = "127.0.0.1", "training.example", "/runs/first/"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
STARTS_S = 20.0
SOON_S = 10.0
"""For one message of the stream: nginx holds back 4 KiB and more where it buffers, and what would
push it out never comes here."""
CONFIGURATION = """
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        {location}
    }}
}}
"""


def location(upstream: str) -> str:
    """What docs/dashboard.md tells people to write, for this place."""
    text = Path("docs/dashboard.md").read_text()
    found = re.search(r"```nginx\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1].replace("http://127.0.0.1:8080/", upstream).replace("/swarm/", PREFIX)


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[str]:
    """The address of a proxy before `upstream`."""
    if NGINX is None:
        pytest.skip("there is no nginx here; .ci/run installs Debian's nginx-light")
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    path = folder / "nginx.conf"
    text = CONFIGURATION.format(folder=folder, port=port, location=location(upstream))
    path.write_text(text)
    command = [NGINX, "-p", str(folder), "-c", str(path)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + STARTS_S
        while time.monotonic() < until and running.poll() is None:
            with socket.socket() as visitor:
                if visitor.connect_ex((LOOPBACK, port)) == 0:
                    break
            time.sleep(0.05)
        assert running.poll() is None, running.stderr.read() if running.stderr else ""
        yield f"http://{LOOPBACK}:{port}{PREFIX}"
    finally:
        running.terminate()
        running.communicate(timeout=STARTS_S)


NOT_OFFERED = ("replay.jsonl", "join.txt")
"""What the page links to where a run gives it away, which this one does not."""


async def message(lines: AsyncIterator[str]) -> str:
    """The next one's data."""
    async with asyncio.timeout(SOON_S):
        async for line in lines:
            if line.startswith("data: "):
                return line
    raise AssertionError("the stream ended")


def test_the_page_works_under_a_path_of_another_host(tmp_path: Path) -> None:
    async def main() -> None:
        played = Played()
        played.look(replica("a", 0))
        app = live_app(played.hub, LOOPBACK, [HOST])
        async with serving(app, listen(LOOPBACK, 0)) as upstream:
            with nginx(tmp_path, upstream) as address:
                async with httpx.AsyncClient(
                    base_url=address, headers={"host": HOST}, timeout=SOON_S
                ) as browser:
                    await look(browser, played)

    async def look(browser: httpx.AsyncClient, played: Played) -> None:
        page = await browser.get("")
        assert page.status_code == 200
        needed = re.findall(r"(?:href|src)=\"([^\"]+)\"", page.text)
        assert len(needed) > 5
        for path in needed:
            found = await browser.get(browser.base_url.join(path))
            is_offered = path not in NOT_OFFERED
            assert found.status_code == (200 if is_offered else 404), path
        assert (await browser.get("state.json")).json()["peers"].keys() == {"a"}
        assert (await browser.get("peer", params={"id": "a"})).status_code == 200
        async with browser.stream("GET", "stream") as answer:
            lines = answer.aiter_lines()
            assert '"a"' in await message(lines)
            played.look(replica("a", 0), replica("b", 1))
            assert '"b"' in await message(lines)
        evil = await browser.get("state.json", headers={"host": "evil.example"})
        assert evil.status_code == 400

    asyncio.run(main())
