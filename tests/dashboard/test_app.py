"""What a browser may ask for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from peer.observe.dashboard.app import live_app, replay_app
from peer.observe.dashboard.hub import Hub, Offers
from peer.observe.dashboard.server import listen, serving
from peer.observe.report import open_page
from swarmnet.errors import UserError
from swarmnet.spec import RunSpec
from tests.dashboard.making import Played, replica, spec_of

LOOPBACK = "127.0.0.1"


def client(host: str = LOOPBACK) -> TestClient:
    played = Played()
    played.look(replica("a", 0), replica("<script>alert(1)</script>", 1, agent="<img src=x>"))
    return TestClient(live_app(played.hub, host), base_url="http://127.0.0.1:8080")


def test_the_page_and_what_it_needs_come_from_here_alone() -> None:
    visitor = client()
    page = visitor.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    static = Path("peer/observe/dashboard/static")
    needed = [f"/static/{path.name}" for path in static.iterdir()]
    assert len(needed) > 6
    for path in needed:
        answer = visitor.get(path)
        assert answer.status_code == 200, path
        if path.endswith((".js", ".css", ".html")) and "uPlot" not in path:
            assert "//cdn" not in answer.text
            assert "https://" not in answer.text
            assert ".innerHTML" not in answer.text, "text of peers is hostile"
    assert visitor.get("/healthz").json() == {"status": "ok"}
    assert visitor.get("/replay.json").status_code == 204


def test_what_may_be_taken_away(tmp_path: Path) -> None:
    """The spec always; the rest where it is there, and its owner shows it."""
    visitor = client()
    played = Played()
    spec = RunSpec.from_canonical(visitor.get("/spec.json").content)
    assert spec.run_id == played.spec.run_id
    assert visitor.get("/state.json").json()["about"]["offers"] == {"replay": False, "join": False}
    assert visitor.get("/replay.jsonl").status_code == 404
    assert visitor.get("/join.txt").status_code == 404
    path = tmp_path / "metrics.jsonl"
    hub = Hub(played.spec, Offers(path, lambda: "swarmnet peer --join /ip4/x"))
    assert hub.state()["about"]["offers"] == {"replay": True, "join": True}
    visitor = TestClient(live_app(hub, LOOPBACK), base_url="http://127.0.0.1:8080")
    assert visitor.get("/replay.jsonl").status_code == 404, "nothing is written yet"
    path.write_text('{"event": "round"}\n')
    assert visitor.get("/replay.jsonl").text == path.read_text()
    assert visitor.get("/join.txt").text == "swarmnet peer --join /ip4/x"
    assert visitor.get("/join.txt").headers["content-type"].startswith("text/plain")


LINES = 50_000
"""More than is read in one piece."""


def test_a_replay_file_that_is_written_meanwhile_is_given_as_it_was(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", b'{"event": "round"}\n'
    path.write_bytes(LINES * line)
    app = live_app(Hub(Played().spec, Offers(path, None)), LOOPBACK)
    body, declared = bytearray(), []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            declared.extend(int(v) for k, v in message["headers"] if k == b"content-length")
            with path.open("ab") as file:
                file.write(line)
        body.extend(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/replay.jsonl", "query_string": b""}
    asyncio.run(app({**scope, "headers": [(b"host", b"127.0.0.1")]}, receive, send))
    assert not declared or declared == [len(body)]
    assert bytes(body) == LINES * line


def test_only_this_machine_is_answered_under_its_own_names() -> None:
    visitor = client()
    for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
        assert visitor.get("/healthz", headers={"host": host}).status_code == 200
    assert visitor.get("/state.json", headers={"host": "evil.example"}).status_code == 400
    opened = client("0.0.0.0")
    assert opened.get("/healthz", headers={"host": "training.example"}).status_code == 200


@pytest.mark.parametrize("host", [LOOPBACK, "0.0.0.0", "192.0.2.7"])
def test_hosts_that_a_person_names_are_answered_beside_this_machine(host: str) -> None:
    visitor = TestClient(live_app(Played().hub, host, ["Training.example", "*.below.example"]))
    answered = ("training.example", "a.below.example:8443", "localhost:8080", f"{host}:8080")
    for name in answered:
        assert visitor.get("/healthz", headers={"host": name}).status_code == 200, name
    for name in ("evil.example", "below.example.evil", "other.training.example"):
        assert visitor.get("/healthz", headers={"host": name}).status_code == 400, name


def test_the_page_asks_for_nothing_by_an_absolute_path() -> None:
    """So that it works under any path of a proxy."""
    visitor = client()
    assert not re.findall(r"(?:href|src)=[\"']/", visitor.get("/").text)
    script = visitor.get("/static/app.js").text
    assert re.findall(r"(?:fetch|EventSource)\([\"'`]\w", script)
    assert not re.findall(r"(?:fetch|EventSource)\([\"'`]/", script)
    assert visitor.get("/static", follow_redirects=False).status_code == 404, "no absolute redirect"


def test_nothing_can_be_written() -> None:
    visitor = client()
    for method in ("post", "put", "delete", "patch"):
        for path in ("/", "/state.json", "/peer", "/stream", "/healthz"):
            assert getattr(visitor, method)(path).status_code == 405


def test_hostile_text_stays_text() -> None:
    visitor = client()
    answer = visitor.get("/state.json")
    assert answer.headers["content-type"] == "application/json"
    assert "<script>alert(1)</script>" in answer.json()["peers"]
    assert visitor.get("/peer", params={"id": "<script>alert(1)</script>"}).status_code == 200
    assert visitor.get("/peer").status_code == 400
    assert visitor.get("/peer", params={"id": "x" * 1000}).status_code == 400
    assert visitor.get("/static/../app.py").status_code == 404
    assert visitor.get("/static/%2e%2e/app.py").status_code == 404


def test_news_come_as_a_stream_and_a_visitor_comes_back() -> None:
    async def main() -> None:
        played = Played()
        played.look(replica("a", 0))
        async with (
            serving(live_app(played.hub, LOOPBACK), listen(LOOPBACK, 0)) as address,
            httpx.AsyncClient(base_url=address, timeout=10) as browser,
        ):
            for visit in range(2):  # as after a lost connection
                async with browser.stream("GET", "/stream") as answer:
                    assert answer.headers["content-type"].startswith("text/event-stream")
                    lines = answer.aiter_lines()
                    state = await _message(lines)
                    assert set(state["peers"]) == {"a", "b"} if visit else {"a"}
                    played.look(replica("a", 0), replica("b", 1, queue_length=visit + 1))
                    assert set((await _message(lines))["peers"]) == {"b"}
            async with browser.stream("GET", "/stream"):
                pass  # ends with the server

    asyncio.run(main())


def test_streams_end_with_the_page(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with AsyncExitStack() as page:
            _, address = await open_page(page, spec_of(2, 100), LOOPBACK, listen(LOOPBACK, 0))
            async with (
                httpx.AsyncClient(base_url=address, timeout=10) as browser,
                browser.stream("GET", "/stream") as answer,
            ):
                lines = answer.aiter_lines()
                await _message(lines)
                ending = asyncio.ensure_future(page.aclose())
                assert [line async for line in lines if line.startswith("data: ")] == []
                await ending

    asyncio.run(main())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def _message(lines: object) -> dict[str, object]:
    async for line in lines:  # type: ignore[attr-defined]
        if line.startswith("data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the stream ended")


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    async def main() -> None:
        with socket.create_server((LOOPBACK, 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(UserError, match="choose another port"):
                async with serving(replay_app(dict, LOOPBACK), listen(LOOPBACK, port)):
                    pass
        with pytest.raises(UserError, match="address of this machine"):
            async with serving(replay_app(dict, LOOPBACK), listen("203.0.113.7", 0)):
                pass

    asyncio.run(main())
