"""Which messages are due, and that they come where they are sent."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from swarmnet.errors import UsageError
from swarmnet.observe.notices import DONE, LASTING_S, STAGE, STILL, STILL_S, Notice, Notices
from swarmnet.observe.notify import MAX_WAITING, Notifier, check_url, form_of, post, sending
from swarmnet.observe.view_model import StageRow, ViewModel


def model(
    round_index: int = 3, committed: int = 0, replicas: tuple[int, ...] = (2, 2), done: bool = False
) -> ViewModel:
    return ViewModel(
        round=round_index,
        rounds=10,
        launched=committed,
        committed=committed,
        global_batch=64,
        done=done,
        loss=2.5,
        tokens_per_s=None,
        held_out_round=None,
        held_out_loss=None,
        held_out_bits_per_byte=None,
        stages=tuple(StageRow(k, n, 0, 1.0) for k, n in enumerate(replicas)),
        peers=(),
        totals={},
    )


def told(notices: Notices, looks: list[tuple[float, ViewModel]]) -> list[tuple[float, str, bool]]:
    return [(now, n.about, n.is_over) for now, m in looks for n in notices.look(m, now)]


def test_a_stage_about_to_be_lost_is_told_once_and_so_is_its_end() -> None:
    looks = [(float(t), model(t, replicas=(2, 2 if t < 100 or t > 400 else 1))) for t in range(600)]
    assert told(Notices("run"), looks) == [(100 + LASTING_S, STAGE, False), (401.0, STAGE, True)]
    notices = Notices("run")
    texts = [n.text for now, m in looks for n in notices.look(m, now)]
    assert texts[0] == "run, round 161: stage 1 is one failure from loss; start another peer"
    assert texts[1] == "run, round 402: stage 1 has replicas again"


def test_a_stage_that_nobody_serves_is_told_though_it_never_had_two() -> None:
    looks = [(float(t), model(t, replicas=(1, 1 if t < 50 else 0))) for t in range(200)]
    assert told(Notices("run"), looks) == [(50 + LASTING_S, STAGE, False)]


def test_a_restart_and_a_run_of_single_replicas_are_no_news() -> None:
    short = [(float(t), model(t, replicas=(2, 1 if 50 < t < 80 else 2))) for t in range(300)]
    assert told(Notices("run"), short) == []
    single = [(float(t), model(t, replicas=(1, 1))) for t in range(300)]
    assert told(Notices("run"), single) == []
    nothing_known = [(float(t), model(t, replicas=(0, 0))) for t in range(300)]
    assert told(Notices("run"), nothing_known) == []


def test_a_run_that_stands_still() -> None:
    def at(t: int) -> ViewModel:
        if t < 100:
            return model(t // 10, committed=t % 10)
        return model(10, committed=5) if t < 2000 else model(10, committed=6)

    found = told(Notices("run"), [(float(t), at(t)) for t in range(2100)])
    assert found == [(100 + STILL_S, STILL, False), (2000.0, STILL, True)]


def test_a_run_that_its_owner_ended_does_not_stand_still() -> None:
    going = replace(model(7), ends_with=8)
    over = replace(model(8, replicas=(0, 0), done=True), ends_with=8)
    looks = [(0.0, going), *((float(t), over) for t in range(1, 3000, 10))]
    notices = Notices("run")
    found = [n for now, m in looks for n in notices.look(m, now)]
    assert [n.text for n in found] == ["run: ended by its owner after 8 rounds, loss 2.500"]
    assert found[0].about == DONE


def test_a_run_of_long_rounds_has_longer() -> None:
    looks = [(float(t), model(t // 1000)) for t in range(3000)]
    looks += [(float(t), model(3)) for t in range(3000, 7000)]
    found = told(Notices("run"), looks)
    assert [(about, is_over) for _, about, is_over in found] == [
        (STILL, False),
        (STILL, True),
        (STILL, False),
    ]
    assert found[0][0] == STILL_S, "nothing is known of the rounds yet"
    assert found[2][0] == pytest.approx(3000 + 3 * 1000, abs=2)


def test_a_run_that_is_done_is_told_once() -> None:
    looks = [(1.0, model()), (2.0, model(10, done=True)), (3.0, model(10, done=True))]
    assert told(Notices("run"), looks) == [(2.0, DONE, False)]
    (notice,) = Notices("run").look(replace(model(done=True), held_out_loss=2.25), 0.0)
    assert notice.text == "run: done, 10 rounds, loss 2.500, held-out loss 2.250"


def test_a_run_of_any_name_has_messages_that_services_take() -> None:
    (notice,) = Notices("n" * 1024).look(model(done=True), 0.0)
    assert notice.text == "n" * 200 + "...: done, 10 rounds, loss 2.500"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://ntfy.sh/topic", b"a <b> & c"),
        ("https://ntfy.example.org/topic", b"a <b> & c"),
        ("https://hooks.slack.com/services/T/B/x", {"text": "a &lt;b&gt; &amp; c"}),
        (
            "https://discord.com/api/webhooks/1/x",
            {"content": "a <b> & c", "allowed_mentions": {"parse": []}},
        ),
        (
            "https://discord.com/api/v10/webhooks/1/x-_y?wait=true",
            {"content": "a <b> & c", "allowed_mentions": {"parse": []}},
        ),
        ("https://discord.com/api/webhooks/1/x/slack", {"text": "a &lt;b&gt; &amp; c"}),
        ("https://hooks.slack-gov.com/services/T/B/x", {"text": "a &lt;b&gt; &amp; c"}),
        (
            "http://127.0.0.1:9/x",
            {"run": "run", "about": "still", "text": "a <b> & c", "is_over": False},
        ),
        ("https://notslack.com/", None),
        ("https://evil-discord.com/api/webhooks/1", None),
    ],
)
def test_the_form_is_that_of_the_service(url: str, expected: object) -> None:
    body, headers = form_of(url)(Notice(STILL, "a <b> & c"), "run")
    if isinstance(expected, bytes):
        assert body == expected
        assert headers["Priority"] == "high"
    elif expected is None:
        assert "about" in json.loads(body)
    else:
        assert json.loads(body) == expected
        assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "url", ["ntfy.sh/x", "ftp://a/b", "https://", "http://a:x/", "http://a b/"]
)
def test_what_is_no_address_is_one_line_that_does_not_repeat_it(url: str) -> None:
    with pytest.raises(UsageError, match=r"--notify: an address such as") as caught:
        check_url(url)
    assert url not in str(caught.value).replace("https://ntfy.sh/TOPIC", "")
    check_url("http://127.0.0.1:8080/hook?key=1")


@dataclass
class Server:
    """A webhook on this machine."""

    answers: list[int] = field(default_factory=list)
    """Status codes, in order; 200 after that."""
    bodies: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(*answers: int) -> Iterator[Server]:
    server = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            code = server.answers.pop(0) if server.answers else 200
            if code == 200:
                server.bodies.append(json.loads(body)["text"])
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}/hook"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def sent(url: str, *notices: Notice, pauses_s: tuple[float, ...] = ()) -> None:
    """Tells them, and ends at once."""

    async def life() -> None:
        async with sending(Notifier(url, Notices("run"), pauses_s)) as notifier:
            notifier.tell(notices)

    asyncio.run(life())


def test_messages_come_in_order_also_the_last_ones() -> None:
    with serving() as server:
        sent(server.url, Notice(STILL, "one"), Notice(DONE, "two"))
    assert server.bodies == ["one", "two"]


def test_what_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with serving(500, 429, 200) as server:
        sent(server.url, Notice(STILL, "one"), pauses_s=(0.0, 0.0))
    assert server.bodies == ["one"]
    assert not caplog.records


def test_what_cannot_be_sent_is_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "swarmnet.peer"),
        serving(404, 500, 500) as server,
    ):
        words = [Notice(STILL, word) for word in ("one", "two", "three")]
        sent(server.url, *words, pauses_s=(0.0,))
    assert server.bodies == ["three"], "404 is not tried again, 500 once"
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert all(line.startswith("a notice was not sent: 127.0.0.1: it answered") for line in lines)
    assert "/hook" not in "".join(lines), "whoever knows the address can write there"


def test_nobody_there_is_a_reason_and_no_error() -> None:
    with serving() as server:
        pass
    reason, is_final = post(server.url, Notice(DONE, "x"), "run")
    assert reason
    assert not is_final


def test_of_many_the_newest_are_sent() -> None:
    with serving() as server:
        sent(server.url, *(Notice(STILL, str(n)) for n in range(50)))
    assert server.bodies == [str(n) for n in range(50 - MAX_WAITING, 50)]


def test_who_looks_at_a_run_tells_of_it() -> None:
    with serving() as server:

        async def life() -> None:
            async with sending(Notifier(server.url, Notices("run"))) as notifier:
                notifier.look(model(), 0.0)
                notifier.look(model(10, done=True), 1.0)

        asyncio.run(life())
    assert server.bodies == ["run: done, 10 rounds, loss 2.500"]
