"""The page in a real browser."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.observe.dashboard.app import live_app, replay_app
from peer.observe.dashboard.hub import MAX_ROUNDS_KEPT, Offers, thin
from peer.observe.dashboard.replay import make_film
from peer.observe.dashboard.server import listen, serving
from peer.observe.metrics import MetricsFile
from peer.observe.report import Reporter
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.pipeline import experts
from swarmnet.protocol.sync_modes import RunEnd
from tests.dashboard.browser import browser, overflow, page, until
from tests.dashboard.making import Played, feeder, held_out, replica, spec_of
from tests.processes.running import SPARING, Machine, machine, tiny_run

pytestmark = pytest.mark.processes
LOOPBACK = "127.0.0.1"
SCREENSHOT = "SWARMNET_SCREENSHOT"
"""Names the file that the picture of the real swarm goes to."""
WAIT_MS = 30_000


class Served:
    """An app on a loop of its own, since the browser's driver holds this thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._serving: Any = None

    def open(self, app: Any, port: int = 0) -> str:
        self._serving = serving(app, listen(LOOPBACK, port))
        return str(self._do(self._serving.__aenter__()))

    def close(self) -> None:
        if self._serving is not None:
            self._do(self._serving.__aexit__(None, None, None))
            self._serving = None

    def look(self, played: Played, *records: Record, dead: tuple[str, ...] = ()) -> None:
        async def do() -> None:
            played.look(*records, dead=dead)

        self._do(do())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def end(self) -> None:
        self.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    """The browser of all tests here; each has pages of its own."""
    with browser() as opened:
        yield opened


@pytest.fixture
def running() -> Iterator[Machine]:
    with machine() as found:
        yield found


def test_a_real_swarm_and_a_killed_peer(running: Machine, chrome: Any) -> None:
    picture = os.environ.get(SCREENSHOT)
    path = tiny_run(running.folder, rounds=4000)
    stages = [("--stage", stage) for stage in "101"]
    peers = running.start_swarm(path, stages, everywhere=() if picture else SPARING)
    watching = running.start("page", "dashboard", "--join", peers[0].address, "--port", "0")
    running.until(lambda: "http://" in watching.output())
    address = watching.output().split("dashboard: ")[1].split()[0]
    victim = peers[3]
    with page(chrome, height=1180 if picture else 900) as opened:
        opened.goto(address)
        until(opened, "document.querySelectorAll('#peers tbody tr').length === 4")
        row = opened.locator(f'tr[data-peer="{victim.peer_id}"]')
        cards = opened.locator(".stage")
        cards.nth(1).get_by_text("2 replicas").wait_for(timeout=WAIT_MS)
        opened.get_by_text("every stage survives a failure").wait_for(timeout=WAIT_MS)
        number = "Number(document.getElementById('n-round').textContent.replace(',', ''))"
        until(opened, f"{number} >= {300 if picture else 5}", 300.0)
        assert float(opened.locator("#n-loss").inner_text()) > 0
        running.kill(victim)
        row.get_by_text("lost").wait_for(timeout=WAIT_MS)
        opened.get_by_text("stage 1: one failure from loss").wait_for(timeout=WAIT_MS)
        lost = f"peer {victim.peer_id[-8:]} was lost (stage 1)"
        opened.locator("#events").get_by_text(lost).wait_for(timeout=WAIT_MS)
        before = opened.locator("#n-round").inner_text()
        until(opened, f"document.getElementById('n-round').textContent !== '{before}'")
        if picture:
            opened.wait_for_timeout(4000)
            opened.screenshot(path=picture)
        row.click()
        opened.locator("#peer").get_by_text(victim.peer_id).wait_for(timeout=WAIT_MS)
        opened.locator("#peer-events").get_by_text("was lost").wait_for(timeout=WAIT_MS)
        opened.keyboard.press("Escape")
        opened.get_by_role("button", name="joins").click()
        until(opened, "!document.getElementById('events').textContent.includes('was lost')")
        assert opened.locator("#events").get_by_text("joined").count() >= 4
    running.interrupt(watching)
    assert running.wait(watching) == 0


def test_a_lost_connection_comes_back_with_all_that_happened(served: Served, chrome: Any) -> None:
    played = Played()
    served.look(played, replica("a", 0), replica("b", 1))
    address = served.open(live_app(played.hub, LOOPBACK))
    with page(chrome) as opened:
        opened.goto(address)
        opened.locator('tr[data-peer="b"]').wait_for(timeout=WAIT_MS)
        served.close()
        opened.get_by_text("reconnecting").wait_for(timeout=WAIT_MS)
        served.look(played, replica("a", 0), replica("b", 1), replica("late", 1))
        served.open(live_app(played.hub, LOOPBACK), int(address.rstrip("/").rpartition(":")[2]))
        opened.locator('tr[data-peer="late"]').wait_for(timeout=WAIT_MS)
        opened.locator("#link").get_by_text("live").wait_for(timeout=WAIT_MS)


def test_hostile_peers_are_shown_as_text(served: Served, chrome: Any) -> None:
    played = Played()
    evil = '<img src=x onerror="document.title=1">'
    served.look(played, replica(evil, 0, agent=evil), replica("b", 1, agent="<script>x</script>"))
    with page(chrome) as opened:
        opened.goto(served.open(live_app(played.hub, LOOPBACK)))
        row = opened.locator("#peers tbody tr").first
        row.wait_for(timeout=WAIT_MS)
        row.click()
        until(opened, "document.getElementById('peer-name').textContent !== ''")
        assert opened.locator("#peer-name").inner_text() == evil
        assert opened.locator("img").count() == 1, "the page's own"
        assert opened.locator("h1").inner_text() == "a <b>bold</b> run"


def test_spec_replay_and_join_line_are_taken_away(
    served: Served, chrome: Any, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "round"}\n')
    line = "swarmnet peer --join /ip4/x <b>"
    played = Played(offers=Offers(tmp_path / "metrics.jsonl", lambda: line))
    served.look(played, replica("a", 0, totals={"samples_computed": 1234}), replica("b", 1))
    with page(chrome) as opened:
        opened.goto(served.open(live_app(played.hub, LOOPBACK)))
        opened.locator("#join-line").get_by_text("/ip4/x").wait_for(timeout=WAIT_MS)
        assert opened.locator("#join-line").inner_text() == line
        opened.locator("#copy-join").click()
        assert opened.evaluate("getSelection().toString()") == line
        for name, file in (("its replay file", "replay.jsonl"), ("the run's spec", "spec.json")):
            with opened.expect_download() as loaded:
                opened.get_by_text(name).click()
            assert loaded.value.suggested_filename == file
        opened.locator('tr[data-peer="a"]').get_by_text("1,234").wait_for(timeout=WAIT_MS)


def test_routers_are_shown_where_there_are_any(served: Served, chrome: Any) -> None:
    played = Played()
    served.look(played, replica("a", 0), replica("b", 1))
    with page(chrome) as opened:
        opened.goto(served.open(live_app(played.hub, LOOPBACK)))
        opened.locator('tr[data-peer="b"]').wait_for(timeout=WAIT_MS)
        assert not opened.locator("#peers th").get_by_text("busiest expert").is_visible()
        told = experts.told_totals([((0.7, 0.1, 0.1, 0.1), 0.125)])
        served.look(played, replica("a", 0, totals=told), replica("b", 1))
        opened.locator('tr[data-peer="a"]').get_by_text("2.8 ×").wait_for(timeout=WAIT_MS)
        assert opened.locator('tr[data-peer="a"]').get_by_text("12.5 %").is_visible()
        assert opened.locator("#peers th").get_by_text("busiest expert").is_visible()


def test_what_is_not_offered_is_not_shown(served: Served, chrome: Any) -> None:
    played = Played()
    served.look(played, replica("a", 0), replica("b", 1))
    with page(chrome) as opened:
        opened.goto(served.open(live_app(played.hub, LOOPBACK)))
        opened.get_by_text("the run's spec").wait_for(timeout=WAIT_MS)
        assert not opened.locator("#offer-replay").is_visible()
        assert not opened.locator("#offer-join").is_visible()


def test_the_spread_is_shown_where_replicas_differ(served: Served, chrome: Any) -> None:
    played = Played()
    served.look(played, replica("a", 0), replica("b", 1))
    with page(chrome) as opened:
        opened.goto(served.open(live_app(played.hub, LOOPBACK)))
        opened.locator('tr[data-peer="b"]').wait_for(timeout=WAIT_MS)
        assert not opened.locator("#spread").is_visible()
        served.look(played, replica("a", 0, spread=0.02), replica("b", 1, spread=0.0123))
        opened.locator("#n-spread").get_by_text("2.00 %").wait_for(timeout=WAIT_MS)


def crowd(num_peers: int, num_stages: int, moment: int, changed: int) -> list[Record]:
    """So many peers, of which `changed` have other numbers at each moment."""
    first = feeder("feeder", moment, 3.0 - moment / 100, held_out=held_out(moment, 2.9))
    records = [first]
    for i in range(num_peers - 1):
        turn = moment if i < changed else 0
        records.append(
            replica(f"peer-{i:04}", i % num_stages, queue_length=turn % 4, version=turn + 1)
        )
    return [replace(r, round=moment) if r is first else r for r in records]


def test_two_hundred_peers_stay_readable_and_fluid(served: Served, chrome: Any) -> None:
    """What a moment costs goes by what has changed in it, and a page with ten times the peers costs
    less than fifteen times the work."""
    costs: dict[int, float] = {}
    for num_peers in (20, 200):
        played = Played(num_stages=8)
        served.look(played, *crowd(num_peers, 8, 1, 10))
        with page(chrome) as opened:
            opened.goto(served.open(live_app(played.hub, LOOPBACK)))
            rows = "document.querySelectorAll('#peers tbody tr').length"
            until(opened, f"{rows} === {num_peers}")
            opened.evaluate("""() => {
                window.touched = new Set();
                new MutationObserver((all) => all.forEach((m) => {
                    const row = m.target.parentElement?.closest('tr') ?? m.target.closest?.('tr');
                    if (row) window.touched.add(row.dataset.peer);
                })).observe(document.querySelector('#peers tbody'),
                            {subtree: true, characterData: true, childList: true});
            }""")
            opened.evaluate("performance.clearMeasures()")
            for moment in range(2, 14):
                served.look(played, *crowd(num_peers, 8, moment, 10))
                until(opened, f"document.getElementById('n-round').textContent === '{moment + 1}'")
            touched = opened.evaluate("[...window.touched].length")
            assert touched <= 12, "rows that have not changed were written anew"
            drawn = opened.evaluate("performance.getEntriesByName('draw').map((m) => m.duration)")
            assert len(drawn) >= 12
            costs[num_peers] = statistics.median(drawn)
            assert overflow(opened) <= 0
            opened.set_viewport_size({"width": 390, "height": 800})
            opened.wait_for_timeout(300)
            assert overflow(opened) <= 0, "on a phone"
            opened.locator("#peer-filter").fill("stage 3")
            until(opened, f"{rows} < {num_peers / 4}")
        served.close()
    assert costs[200] < 15 * costs[20] + 1.0, costs


def test_a_replay_is_played_and_wound_back(served: Served, chrome: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with MetricsFile(path) as metrics:
        reporter = Reporter(spec_of(2), "quiet", metrics)
        for r in range(20):
            live = [feeder("a", r, 3.0 - r / 10), replica("b", 1, r), replica("c", 1, r)]
            view: Any = _View(live[:2] if r > 10 else live)
            reporter.look(view, 12.0 * r, 1e9 + 12.0 * r)
    address = served.open(replay_app(lambda: make_film(path), LOOPBACK))
    for dark in (False, True):
        with page(chrome, dark=dark) as opened:
            opened.goto(address)
            opened.locator("#events").get_by_text("peer c was lost").wait_for(timeout=WAIT_MS)
            assert opened.locator("#link").inner_text() == "replay"
            last = opened.locator("#n-round").inner_text()
            opened.locator("#seek").fill("0")
            until(opened, "!document.body.textContent.includes('was lost')")
            assert opened.locator("#n-round").inner_text() != last
            opened.locator("#pace").select_option("600")
            opened.locator("#play").click()
            opened.locator("#events").get_by_text("peer c was lost").wait_for(timeout=WAIT_MS)
            shade = opened.evaluate("getComputedStyle(document.body).backgroundColor")
            opened.locator("#theme").click()
            now = opened.evaluate("getComputedStyle(document.body).backgroundColor")
            assert now != shade


def test_the_page_thins_curves_as_the_hub_does(served: Served, chrome: Any) -> None:
    thinned = [[r, 2.0] for r in range(3, 3 * MAX_ROUNDS_KEPT, 2)]
    given = list(thinned)
    thin(thinned)
    with page(chrome) as opened:
        opened.goto(served.open(live_app(Played().hub, LOOPBACK)))
        told = opened.evaluate(
            """async ([points, most]) => {
                (await import("/static/charts.js")).thin(points, most);
                return points;
            }""",
            [given, MAX_ROUNDS_KEPT],
        )
        served.close()
    assert told == thinned
    assert len(told) < MAX_ROUNDS_KEPT < len(given)


class _View:
    own_peer_id = ""

    def __init__(self, records: list[Record]) -> None:
        self._records = records
        self.run_end = RunEnd()

    def records(self) -> list[Record]:
        return self._records

    def live(self, now: float) -> list[Record]:
        return self._records
