"""Runs that a program opens, with stand-ins for the peers and for the network."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import swarmnet
from swarmnet.api.given import NOTHING
from swarmnet.api.opening import Opening
from swarmnet.api.session import local_session, peer_session, watching_session
from swarmnet.errors import SwarmnetError, UsageError, UserError
from swarmnet.observe.events import HeldOut, RoundFinished
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.options import LocalChoices, PeerChoices, default_spec_path
from swarmnet.spec import RunSpec
from tests.peer.fakes import FakeObserver, fake_command

ROUNDS = 5
CHOICES = LocalChoices(num_peers=3, rounds=ROUNDS)


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return start_run(default_spec_path(), rounds=ROUNDS).spec


@pytest.fixture(autouse=True)
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "temp"
    root.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(root))
    return root


Open = Callable[..., Opening]


@pytest.fixture
def opening(tmp_path: Path) -> Open:
    def make(
        observer: FakeObserver, mode: str = "good", choices: LocalChoices = CHOICES
    ) -> Opening:
        command = fake_command(tmp_path, mode)
        return Opening(
            functools.partial(
                local_session, None, NOTHING, choices, command=command, join=observer.join
            )
        )

    return make


def pids(root: Path) -> list[int]:
    return [json.loads(ready.read_text())["pid"] for ready in root.glob("*/*.json")]


def assert_gone(processes: list[int]) -> None:
    assert processes
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert_no_thread()


def assert_no_thread() -> None:
    """It says that all is gone as the last thing that it does."""
    for thread in threading.enumerate():
        if thread.name == "swarmnet":
            thread.join(10)
            assert not thread.is_alive()


def test_a_run_is_told_to_its_end_and_nothing_is_left(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    observer = FakeObserver(spec, last_round=ROUNDS)
    with opening(observer) as run:
        assert run.address == "/fake/p2p/first"
        assert run.spec == spec
        started = pids(temp_root)
        rounds = list(run.rounds())
        assert [r.round for r in rounds] == list(range(ROUNDS))
        assert rounds[-1].loss == 1.0
        assert [r for r in run.events() if isinstance(r, RoundFinished)] == rounds
        assert any(isinstance(event, HeldOut) for event in run.events())
        status = run.status()
        assert status.done
        assert status.round == ROUNDS
        assert run.spec.name in repr(run)
    assert started
    assert_gone(started)
    assert observer.closed
    assert list(temp_root.iterdir()) == []
    assert list(run.rounds()) == rounds, "what was seen stays"
    assert run.status().done
    with pytest.raises(UsageError, match="was stopped"):
        run.generate("Once")
    assert "stopped" in repr(run)


def test_the_same_with_a_loop_of_the_programs_own(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    observer = FakeObserver(spec, last_round=ROUNDS)

    async def program() -> list[RoundFinished]:
        async with opening(observer) as run:
            rounds = [r async for r in run.rounds()]
            assert (await run.status()).done
        assert [r async for r in run.rounds()] == rounds
        assert (await run.status()).done
        return rounds

    assert [r.round for r in asyncio.run(program())] == list(range(ROUNDS))
    assert observer.closed
    assert list(temp_root.iterdir()) == []


def test_a_running_loop_does_not_matter(opening: Open, spec: RunSpec) -> None:
    """As in a notebook, whose cells run on one."""

    async def cell() -> int:
        with opening(FakeObserver(spec, last_round=ROUNDS)) as run:
            return len(list(run.rounds()))

    assert asyncio.run(cell()) == ROUNDS


def test_an_error_is_the_line_of_the_command(opening: Open, spec: RunSpec, temp_root: Path) -> None:
    observer = FakeObserver(spec, last_round=1)
    with pytest.raises(UserError, match=r"^port 1 is taken; choose another --port$"):
        opening(observer, "refuse").open()
    assert list(temp_root.iterdir()) == []
    with pytest.raises(swarmnet.UserError, match="cannot read nowhere"):
        swarmnet.local("nowhere.toml").open()


def test_when_every_peer_is_gone_readers_hear_of_it_and_the_logs_stay(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    def look() -> None:
        with opening(FakeObserver(spec, last_round=1), "all-die") as run:
            list(run.events())

    with pytest.raises(SwarmnetError, match="every peer has ended; their logs are in"):
        look()
    assert list(temp_root.glob("swarmnet-*/peer-1.log"))
    run = opening(FakeObserver(spec, last_round=1), "all-die").open()
    with pytest.raises(SwarmnetError, match="every peer has ended"):
        list(run.rounds())
    with pytest.raises(SwarmnetError, match="every peer has ended"):
        run.stop()


def test_stopping_ends_readers_and_what_others_wait_for(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    observer = FakeObserver(spec, last_round=2)
    run = opening(observer).open()
    read: list[int] = []
    ended: list[bool] = []

    def follow() -> None:
        read.extend(done.round for done in run.rounds())
        ended.append(True)

    reading = threading.Thread(target=follow)
    reading.start()
    first = next(run.rounds())
    assert first.round == 0
    started = pids(temp_root)
    run.stop()
    run.stop()
    reading.join()
    assert ended, "it heard of an error"
    assert read[:1] == [0]
    assert len(read) < ROUNDS
    assert_gone(started)


class Interrupting(FakeObserver):
    """Ctrl-C comes when there is nothing more to see, or when it is closed."""

    def __init__(self, spec: RunSpec, *, at_close: bool = False) -> None:
        super().__init__(spec, last_round=2)
        self._at_close = at_close

    async def wait_news(self, timeout_s: float) -> None:
        await super().wait_news(timeout_s)
        if self.version == 6 and not self._at_close:
            os.kill(os.getpid(), signal.SIGINT)

    async def close(self) -> None:
        await super().close()
        if self._at_close:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_wait_and_the_block_ends_the_peers(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    started: list[int] = []
    read: list[int] = []

    def cell() -> None:
        with opening(Interrupting(spec)) as run:
            started.extend(pids(temp_root))
            for done in run.rounds():
                read.append(done.round)

    with pytest.raises(KeyboardInterrupt):
        cell()
    assert read == [0, 1]
    assert_gone(started)
    assert list(temp_root.iterdir()) == []


def test_ctrl_c_while_it_ends_kills(opening: Open, spec: RunSpec, temp_root: Path) -> None:
    run = opening(Interrupting(spec, at_close=True), "stubborn").open()
    started = pids(temp_root)
    with pytest.raises(KeyboardInterrupt):
        run.stop()
    assert_gone(started)


def test_ctrl_c_while_it_opens_leaves_nothing(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    class Slow(FakeObserver):
        async def join(self, *args: object) -> FakeObserver:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        opening(Slow(spec, last_round=1)).open()
    assert_no_thread()
    assert list(temp_root.iterdir()) == []


def test_a_task_that_is_cancelled_ends_its_block(
    opening: Open, spec: RunSpec, temp_root: Path
) -> None:
    async def program() -> list[int]:
        started: list[int] = []

        async def work() -> None:
            async with opening(FakeObserver(spec, last_round=2)) as run:
                started.extend(pids(temp_root))
                async for _ in run.rounds():
                    pass

        task = asyncio.ensure_future(work())
        async with asyncio.timeout(60):
            while not started:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return started

    assert_gone(asyncio.run(program()))
    assert list(temp_root.iterdir()) == []


def test_one_peer_is_told_what_was_chosen(tmp_path: Path, spec: RunSpec) -> None:
    command = fake_command(tmp_path, "good")
    state = tmp_path / "state"
    choices = PeerChoices(state_dir=state, port=4001, announce=("/ip4/1.2.3.4/tcp/1",))
    for given, first in ((None, "--spec"), (("/fake/p2p/first",), "--join")):
        its = choices if given is None else replace(choices, join=given)
        observer = FakeObserver(spec, last_round=ROUNDS)
        make = functools.partial(
            peer_session, default_spec_path(), NOTHING, its, command=command, join=observer.join
        )
        with Opening(make) as run:
            (words,) = (tmp_path / "temp").glob("*/peer.args")
            said = json.loads(words.read_text())
            assert len(list(run.rounds())) == ROUNDS
        assert said[said.index(first) + 1]
        assert ("--spec" in said) != ("--join" in said)
        for name, value in (
            ("--state-dir", str(state)),
            ("--port", "4001"),
            ("--announce", "/ip4/1.2.3.4/tcp/1"),
        ):
            assert said[said.index(name) + 1] == value
        state.rmdir()


def test_a_run_elsewhere_is_looked_at(spec: RunSpec) -> None:
    observer = FakeObserver(spec, last_round=ROUNDS)
    make = functools.partial(watching_session, ("/fake/p2p/first",), "auto", "", join=observer.join)
    with Opening(make) as run:
        assert len(list(run.rounds())) == ROUNDS
    assert observer.closed


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="leave spec and join out"):
        swarmnet.join("/fake", options=PeerChoices(join=("/other",)))
    with pytest.raises(UsageError, match="leave them out of options"):
        swarmnet.start("run.toml", options=PeerChoices(rounds=3))
    with pytest.raises(UsageError, match="give an address"):
        swarmnet.watch([])


def test_an_opening_is_good_for_once(opening: Open, spec: RunSpec) -> None:
    twice = opening(FakeObserver(spec, last_round=ROUNDS))
    with twice, pytest.raises(UsageError, match="call the function again"):
        twice.open()
