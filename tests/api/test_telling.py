"""What tells of an open run: callbacks, charts, messages, texts that come in pieces; and a folder
that keeps it."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.api.given import Given
from swarmnet.api.opening import OnRound, Opening
from swarmnet.api.session import local_session
from swarmnet.api.telling import Wishes, telling_session
from swarmnet.errors import SwarmnetError, UsageError, UserError
from swarmnet.observe.events import RoundFinished
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.options import LocalChoices, default_spec_path
from swarmnet.runtime.writing.sampling import Sampling
from swarmnet.spec import RunSpec
from tests.peer.fakes import FakeObserver, fake_command

ROUNDS = 5
CHOICES = LocalChoices(num_peers=2, rounds=ROUNDS)
NOTHING = Wishes()


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return start_run(default_spec_path(), rounds=ROUNDS).spec


@pytest.fixture(autouse=True)
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))


Open = Callable[..., Opening]


@pytest.fixture
def opening(tmp_path: Path, spec: RunSpec) -> Open:
    def make(
        on_round: OnRound | None = None,
        wishes: Wishes = NOTHING,
        state_dir: Path | None = None,
        choices: LocalChoices = CHOICES,
        mode: str = "good",
    ) -> Opening:
        started = start_run(default_spec_path(), rounds=choices.rounds, seed=choices.seed).spec
        observer = FakeObserver(started, last_round=ROUNDS)
        session = functools.partial(
            local_session,
            None,
            Given(),
            choices,
            state_dir,
            command=fake_command(tmp_path, mode),
            join=observer.join,
        )
        return Opening(functools.partial(telling_session, session, wishes), on_round)

    return make


# ---- callbacks ------------------------------------------------------------------------------


def test_a_callback_has_every_round_when_the_block_ends(opening: Open) -> None:
    heard: list[RoundFinished] = []
    with opening(heard.append) as run:
        rounds = list(run.rounds())
    assert [done.round for done in heard] == list(range(ROUNDS))
    assert heard == rounds


def test_also_for_a_program_with_a_loop(opening: Open) -> None:
    heard: list[int] = []

    async def program() -> None:
        async with opening(lambda done: heard.append(done.round)) as run:
            async for _ in run.rounds():
                pass

    asyncio.run(program())
    assert heard == list(range(ROUNDS))


def test_a_callback_may_ask_and_stop_the_run(opening: Open) -> None:
    heard: list[int] = []
    asked: list[int] = []
    is_open, stopped = threading.Event(), threading.Event()

    def on_round(done: RoundFinished) -> None:
        is_open.wait()
        heard.append(done.round)
        if done.round == 1:
            asked.append(run.status().global_batch)
            run.stop()
            stopped.set()

    run = opening(on_round).open()
    is_open.set()
    assert stopped.wait(60), "it waits for itself"
    run.stop()
    assert heard[:2] == [0, 1]
    assert asked == [run.spec.pipeline.global_batch]


def test_what_a_callback_raises_is_told_at_the_end(
    opening: Open, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def on_round(done: RoundFinished) -> None:
        heard.append(done.round)
        raise ZeroDivisionError("mine")

    def block() -> list[RoundFinished]:
        with opening(on_round) as run:
            return list(run.rounds())

    with pytest.raises(ZeroDivisionError, match="mine"):
        block()
    assert heard == [0], "it was called again"
    assert "on_round failed" in caplog.text
    with pytest.raises(ZeroDivisionError):
        asyncio.run(_awaited(opening(on_round)))


async def _awaited(opening: Opening) -> None:
    async with opening as run:
        async for _ in run.rounds():
            pass


# ---- charts and messages --------------------------------------------------------------------


class Mailbox:
    """An address on loopback that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        messages = self.messages

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                messages.append(json.loads(self.rfile.read(length)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox()
    serving = threading.Thread(target=box.server.serve_forever)
    serving.start()
    yield box
    box.server.shutdown()
    serving.join()
    box.server.server_close()


def test_a_run_is_drawn_and_a_person_hears_of_its_end(
    opening: Open, spec: RunSpec, mailbox: Mailbox, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    charts = tmp_path / "charts"
    with opening(wishes=Wishes(f"tensorboard:{charts}", mailbox.url)) as run:
        rounds = list(run.rounds())
    (folder,) = charts.iterdir()
    assert folder.name.endswith(spec.run_id[:8])
    drawn = EventAccumulator(str(folder))
    drawn.Reload()
    losses = {point.step: point.value for point in drawn.Scalars("loss/training")}
    assert losses == {done.round: pytest.approx(done.loss) for done in rounds}
    assert [m["about"] for m in mailbox.messages] == ["done"]
    assert mailbox.messages[0]["run"] == spec.name


def test_wrong_wishes_are_known_before_anything_is_started(opening: Open, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write it as one of tensorboard:DIR"):
        opening(wishes=Wishes(log_to="paper:x")).open()
    with pytest.raises(UsageError, match=r"an address such as https://ntfy\.sh"):
        opening(wishes=Wishes(notify="nowhere")).open()
    assert list((tmp_path / "temp").iterdir()) == []


# ---- a folder that keeps the run ------------------------------------------------------------


def test_a_run_is_kept_and_goes_on(opening: Open, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for _ in range(2):
        with opening(state_dir=kept, mode="again") as run:
            assert len(list(run.rounds())) == ROUNDS
            with pytest.raises(UserError, match="in use by another swarmnet local"):
                opening(state_dir=kept, mode="again").open()
    for name in ("peer-1", "peer-2"):
        assert (kept / name / "starts").read_text() == "xx"
    (kept / "peer-1" / "checkpoints" / run.spec.run_id).mkdir(parents=True)
    with opening(state_dir=kept, mode="again"):
        pass
    with pytest.raises(UserError, match="has checkpoints of another run"):
        opening(state_dir=kept, choices=replace(CHOICES, seed=7)).open()
    assert (kept / "peer-1" / "starts").read_text() == "xxx"


# ---- texts ----------------------------------------------------------------------------------


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A writer that gives a piece, waits for a word, and gives the rest."""
    about: dict[str, Any] = {"go": threading.Event(), "is_closed": False, "error": None}

    async def open_writer(observer: object) -> SimpleNamespace:
        return SimpleNamespace(sampling=Sampling())

    async def continue_text(*_: object) -> AsyncIterator[str]:
        async def text() -> AsyncIterator[str]:
            try:
                yield "Once "
                while not about["go"].is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                if about["error"] is not None:
                    raise about["error"]
                yield "upon"
            finally:
                about["is_closed"] = True

        return text()

    monkeypatch.setattr("swarmnet.runtime.texts.open_writer", open_writer)
    monkeypatch.setattr("swarmnet.runtime.texts.continue_text", continue_text)
    return about


def test_a_text_comes_in_pieces(opening: Open, pieces: dict[str, Any]) -> None:
    with opening() as run:
        text = run.generate("A", stream=True)
        assert next(text) == "Once "
        pieces["go"].set()
        assert list(text) == ["upon"]
        assert list(run.generate("A", stream=True)) == ["Once ", "upon"]
        assert run.generate("A") == "Once upon"
        with pytest.raises(UserError, match="temperature"):
            list(run.generate("A", temperature=-1.0, stream=True))
        pieces["error"] = SwarmnetError("nobody serves stage 1")
        broken = run.generate("A", stream=True)
        assert next(broken) == "Once "
        with pytest.raises(SwarmnetError, match="nobody serves stage 1"):
            next(broken)


def test_also_where_it_is_awaited(opening: Open, pieces: dict[str, Any]) -> None:
    async def program() -> list[str]:
        async with opening() as run:
            found = []
            async for piece in await run.generate("A", stream=True):
                found.append(piece)
                pieces["go"].set()
            return found

    assert asyncio.run(program()) == ["Once ", "upon"]


def test_what_is_no_longer_read_is_no_longer_written(opening: Open, pieces: dict[str, Any]) -> None:
    with opening() as run:
        text = run.generate("A", stream=True)
        assert next(text) == "Once "
        assert not pieces["is_closed"]
        text.close()  # type: ignore[attr-defined]
        run.status()  # by then the loop has heard of it
        run.status()
        assert pieces["is_closed"]
        waiting = run.generate("A", stream=True)
        assert next(waiting) == "Once "
    with pytest.raises(UsageError, match="was stopped"):
        next(waiting)
