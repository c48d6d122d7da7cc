"""A peer gives the run's data to another, which feeds when the first is gone."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.causes import told
from swarmnet.errors import Busy, Refused, RemoteError, WrongRun
from swarmnet.methods.state import DATA_PART, DataPartRequest
from swarmnet.ports import SharableData, SourceSize
from swarmnet.protocol.membership.data_holders import ENOUGH_HOLDERS
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.initial.data import SharedData
from swarmnet.training.data import Place, TextData
from swarmnet.training.data.coming import ComingText
from swarmnet.training.data.resolving import with_data
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.oracles.reference import ReferenceTrainer
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

ROUNDS = 20
NUM_SLOTS = 4
PART = 4000
TOLERANCE = 1e-4


class Lying:
    """Says that it has the run's data, and gives other tokens."""

    def __init__(self, data: TextData) -> None:
        self._data = data
        self.asked = 0

    def sizes(self) -> tuple[SourceSize, ...]:
        return self._data.sizes()

    def part(self, source: int, file: str, offset: int, length: int) -> bytes | None:
        self.asked += 1
        data = self._data.part(source, file, offset, length)
        return bytes(b ^ 1 for b in data) if data and file == "tokens" else data


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setenv("SWARMNET_CACHE", str(tmp_path / "cache"))
    return with_data(tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS), Place())


def giving(data: Any) -> SharedData:
    return SharedData(InlineWorker(), given=data)


def fetching(
    spec: RunSpec, *, at_once: bool = True, disk: Path | None = None, part: int = PART
) -> SharedData:
    """`disk`: one of its own."""
    coming = ComingText(spec, Place(), part)
    if disk is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SWARMNET_CACHE", str(disk))
            assert coming.open_if_whole() is None
    return SharedData(InlineWorker(), coming=coming, at_once=at_once)


def feeds(swarm: Swarm, name: str) -> bool:
    own = swarm.members[name].peer.gossip.own
    return own.has_data and own.serves_data


def loss(swarm: Swarm, r: int) -> float:
    """Of a round, by all records that one peer has, of the dead too."""
    records = swarm.members["last-0"].peer.view.records()
    counts = [record.count(r) for record in records]
    slots = [slot for c in counts for slot in c.committed]
    assert sorted(slots) == list(range(NUM_SLOTS)), f"round {r}"
    return sum(c.loss_sum for c in counts) / sum(c.tokens for c in counts)


def test_training_goes_on_when_the_only_feeder_is_gone(spec: RunSpec) -> None:
    losses: list[float] = []

    async def scenario(swarm: Swarm) -> None:
        killed_in = 0
        first = swarm.start("first", stage=0, shared=giving(swarm.data))
        swarm.start("second", stage=0, shared=fetching(spec))
        for i in range(2):
            swarm.start(f"last-{i}", stage=1, feeds=False)
        assert not feeds(swarm, "second")
        for r in range(ROUNDS):
            await swarm.until_round(r + 1)
            losses.append(loss(swarm, r))
            own = first.gossip.own
            if "first" in swarm.members and feeds(swarm, "second"):
                assert not own.count(r + 1).committed, "nothing of its gradient counts yet"
                swarm.kill("first")
                killed_in = r + 1
        assert 0 < killed_in < ROUNDS // 2
        assert len(swarm.members["second"].peer.gossip.own.count(ROUNDS - 1).committed) == NUM_SLOTS

    in_virtual_time(scenario, spec)
    trainer = ReferenceTrainer(spec)
    expected = [trainer.step(r, range(NUM_SLOTS)) for r in range(ROUNDS)]
    assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_without_it_the_run_stands_still(spec: RunSpec) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start("first", stage=0)
        swarm.start("second", stage=0, shared=fetching(spec))
        for i in range(2):
            swarm.start(f"last-{i}", stage=1, feeds=False)
        await swarm.until_round(3)
        swarm.kill("first")
        await asyncio.sleep(120.0)
        assert max(swarm.rounds()) < 6
        assert not feeds(swarm, "second")

    in_virtual_time(scenario, spec)


def test_a_liar_is_found_out_and_the_data_come_from_another(
    spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(swarm: Swarm) -> None:
        assert isinstance(swarm.data, TextData)
        lying = Lying(swarm.data)
        swarm.start("liar", stage=1, feeds=False, shared=giving(lying))
        swarm.start("fetches", stage=0, shared=fetching(spec))
        await swarm.until(lambda: "gives other data than the run's" in caplog.text)
        asked = lying.asked
        await asyncio.sleep(60.0)
        assert lying.asked == asked
        assert not feeds(swarm, "fetches")
        swarm.start("honest", stage=0, shared=giving(swarm.data))
        await swarm.until(lambda: feeds(swarm, "fetches"))
        assert lying.asked == asked

    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        in_virtual_time(scenario, spec)
    said = [r.message for r in caplog.records if "gives other data" in r.message]
    assert len(said) == 1
    assert said[0].startswith("peer liar gives")


def test_it_comes_in_parts_from_one_and_then_another(spec: RunSpec) -> None:
    """The giver is killed in the middle."""

    async def scenario(swarm: Swarm) -> None:
        class Slow:
            def __init__(self, data: SharableData) -> None:
                self.asked, self._data = 0, data

            def sizes(self) -> tuple[SourceSize, ...]:
                return self._data.sizes()

            def part(self, *wanted: Any) -> bytes | None:
                self.asked += 1
                return self._data.part(*wanted)

        assert isinstance(swarm.data, TextData)
        one, two = Slow(swarm.data), Slow(swarm.data)
        swarm.start("one", stage=1, feeds=False, shared=giving(one))
        swarm.start("fetches", stage=0, shared=fetching(spec, part=500))
        await swarm.until(lambda: one.asked > 10)
        swarm.kill("one")
        swarm.start("two", stage=1, feeds=False, shared=giving(two))
        await swarm.until(lambda: feeds(swarm, "fetches"))
        (size,) = swarm.data.sizes()
        whole = -(-size.num_tokens // 500) + 2
        assert one.asked + two.asked <= whole + 1

    in_virtual_time(scenario, spec)


def test_one_that_trickles_or_lies_about_sizes_is_left_for_another(spec: RunSpec) -> None:
    """Members that say the data are huge, and one that says what is right and gives nothing."""

    class Huge:
        def __init__(self, data: SharableData) -> None:
            self.asked, self._data = 0, data

        def sizes(self) -> tuple[SourceSize, ...]:
            return tuple(
                replace(s, num_documents=s.num_documents + 10**5, num_tokens=s.num_tokens + 10**6)
                for s in self._data.sizes()
            )

        def part(self, source: int, file: str, offset: int, length: int) -> bytes | None:
            self.asked += 1
            return bytes(length)

    async def scenario(swarm: Swarm) -> None:
        assert isinstance(swarm.data, TextData)
        huge = Huge(swarm.data)
        swarm.start("huge", stage=1, feeds=False, shared=giving(huge))
        swarm.start("trickles", stage=1, feeds=False, shared=giving(swarm.data))
        swarm.start("honest", stage=1, feeds=False, shared=giving(swarm.data))
        transport = swarm.hub.transports["trickles"]
        give = handler_of(transport, DATA_PART.name)

        async def slowly(request: Request) -> Message:
            await asyncio.sleep(50.0)
            return await give(request)

        transport.handle(DATA_PART.name, slowly)
        await asyncio.sleep(10.0)
        swarm.start("fetches", stage=0, shared=fetching(spec, part=500))
        await swarm.until(lambda: feeds(swarm, "fetches"), 240.0)
        assert huge.asked == 0, "two say something else"

    in_virtual_time(scenario, spec)


def test_unasked_only_as_many_fetch_as_are_enough(spec: RunSpec, tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start("first", stage=0, shared=giving(swarm.data))
        swarm.start("last", stage=1, feeds=False)
        await swarm.until_round(1)
        for i in range(ENOUGH_HOLDERS - 1):
            name = f"unasked-{i}"
            unasked = fetching(spec, at_once=False, disk=tmp_path / name)
            swarm.start(name, stage=1, shared=unasked)
            await swarm.until(lambda name=name: feeds(swarm, name))  # type: ignore[misc]
        unasked = fetching(spec, at_once=False, disk=tmp_path / "one-more")
        swarm.start("one-more", stage=1, shared=unasked)
        await asyncio.sleep(60.0)
        assert not feeds(swarm, "one-more")
        swarm.kill("unasked-0")
        await swarm.until(lambda: feeds(swarm, "one-more"))

    in_virtual_time(scenario, spec)


def test_only_members_are_given_data(spec: RunSpec) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start("first", shared=giving(swarm.data))
        await asyncio.sleep(1.0)
        stranger = swarm.hub.transport("stranger")
        stranger.set_run("another")
        request = Message(DataPartRequest(0, "tokens", 0, 100))
        for method, message in (("data_part", request), ("data_sizes", Message())):
            with pytest.raises(WrongRun):
                await stranger.call("first", method, message, timeout_s=10.0)

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    ("method", "error"),
    [("data_sizes", Refused("not to you")), ("data_part", Busy("serving others", backlog_s=1.0))],
)
def test_a_joiner_that_gets_no_data_says_why(
    method: str, error: RemoteError, spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whom, and what to do; not before a minute is over, for it may pass."""
    caplog.set_level(logging.INFO, "swarmnet.data")

    async def fails(_: Request[Any]) -> Message[Any]:
        raise error

    def said() -> list[str]:
        return [line for line in caplog.messages if "not here yet" in line]

    async def scenario(swarm: Swarm) -> None:
        swarm.start("a-giver-of-data", stage=0, shared=giving(swarm.data))
        swarm.start("last", stage=1, feeds=False)
        swarm.hub.transports["a-giver-of-data"].handle(method, fails)
        swarm.start("second", stage=0, shared=fetching(spec))
        await asyncio.sleep(UPKEEP_S / 2)
        assert not said()
        await swarm.until(lambda: bool(said()), 2 * UPKEEP_S)
        assert said() == [f"the run's data are not here yet: {told(error)}"]

    error.peer_id = "a-giver-of-data"
    in_virtual_time(scenario, spec)
