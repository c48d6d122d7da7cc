"""Downloading a stage: from several donors, a few shards of each at a time, each one checked."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.causes import told
from swarmnet.errors import Busy, RemoteError, Unreachable, Unsupported
from swarmnet.methods.state import FetchRequest
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.replica.transitions import Transitions
from swarmnet.swarm.update.state_sync import StateSync
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

NUM_DONORS = 3
STAGE = 1
SLOW = 0.05
"""Speed of machines with which a round takes a minute."""


def donors_of(swarm: Swarm, speed: float = 1.0) -> list[Peer]:
    """One peer of stage 0, and several of stage 1."""
    swarm.start("first", stage=0, speed=speed)
    return [swarm.start(f"donor-{i}", stage=STAGE, speed=speed) for i in range(NUM_DONORS)]


async def joined(swarm: Swarm, name: str = "joiner", limit_s: float = 300.0) -> Peer:
    await asyncio.sleep(0.1)  # who comes at a round's end gets the results of its update instead
    peer = swarm.start(name, stage=STAGE, feeds=False)
    await swarm.until(lambda: peer.gossip.own.state == ACTIVE, limit_s)
    return peer


def watch(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Counts the shards that arrived whole, by donor and shard."""
    got: Counter[tuple[str, int]] = Counter()
    ask = StateSync.ask

    async def counting(self: StateSync, donor: Record, round_index: int, j: int) -> Array:
        values = await ask(self, donor, round_index, j)
        got[donor.peer_id, j] += 1
        return values

    monkeypatch.setattr(StateSync, "ask", counting)
    return got


def test_a_newcomer_downloads_from_several_donors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=20, sync={"shard_parameters": 512})
    got = watch(monkeypatch)

    async def scenario(swarm: Swarm) -> None:
        donors_of(swarm)
        await swarm.until_round(1)
        got.clear()
        peer = await joined(swarm)
        assert peer.replica is not None
        assert peer.replica.num_shards >= 20
        by_donor = Counter(donor for donor, _ in got.elements())
        assert len(by_donor) == NUM_DONORS
        assert max(by_donor.values()) < 0.7 * by_donor.total(), by_donor

    in_virtual_time(scenario, spec)


class CountingWorker(InlineWorker):
    """How many calls are under way at a time."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.now = self.most = 0

    async def run(self, work: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().run(work)
        finally:
            self.now -= 1


def test_a_donor_serves_a_few_at_a_time_and_says_busy_to_the_rest(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=3, global_batch=200)

    async def scenario(swarm: Swarm) -> None:
        donor = donors_of(swarm, SLOW)[0]
        await swarm.until_round(1)
        await asyncio.sleep(2.0)  # the round is long: nothing else is done on the worker now
        asking = swarm.hub.transport("asking")
        asking.set_run(spec.run_id)
        replica = donor.replica
        assert replica is not None
        replica.worker = slow = CountingWorker()
        request = FetchRequest(replica.round, STAGE, 0)
        answers = await asyncio.gather(
            *(
                asking.call("donor-0", "fetch_parameters", Message(request), timeout_s=60.0)
                for _ in range(40)
            ),
            return_exceptions=True,
        )
        most = donor.limits.max_serving
        assert slow.most == most
        assert sum(isinstance(a, Busy) for a in answers) >= 40 - 2 * most

    in_virtual_time(scenario, spec)


def test_a_shard_that_does_not_match_its_digest_is_taken_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=20, global_batch=32, sync={"shard_parameters": 512}
    )
    got = watch(monkeypatch)

    async def scenario(swarm: Swarm) -> None:
        donors = donors_of(swarm)
        await swarm.until_round(1)
        spoiled = [0]
        for i in range(NUM_DONORS - 1):
            spoil(swarm, f"donor-{i}", spoiled)
        got.clear()
        await joined(swarm)
        assert spoiled[0] > 0
        assert {donor for donor, _ in got} == {f"donor-{NUM_DONORS - 1}"}
        await swarm.until_round(20)
        assert donors[0].gossip.own.state == ACTIVE
        trainer = replay(spec, swarm.counted, 20)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-5

    in_virtual_time(scenario, spec)


def spoil(swarm: Swarm, name: str, spoiled: list[int]) -> None:
    """From now on this donor's shards are not what its record says: one number is another."""
    transport = swarm.hub.transports[name]
    honest = handler_of(transport, "fetch_parameters")

    async def on_fetch(request: Request) -> Message:
        reply = await honest(request)
        array = reply.arrays[0]
        data = bytearray(array.data)
        data[0] ^= 1
        spoiled[0] += 1
        return replace(reply, arrays=(Array(array.dtype, array.shape, bytes(data)),))

    transport.handle("fetch_parameters", on_fetch)


def test_a_download_that_is_begun_again_keeps_what_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard cannot be had for a while; the others are fetched once. (The round is long: in the
    next one everything would be another.)"""
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=3, global_batch=200, sync={"shard_parameters": 512}
    )
    got = watch(monkeypatch)
    ask = StateSync.ask
    failures = [0]

    async def failing(self: StateSync, donor: Record, round_index: int, j: int) -> Array:
        if j == 4 and failures[0] < 50:
            failures[0] += 1
            raise Unreachable("the link is down")
        return await ask(self, donor, round_index, j)

    async def scenario(swarm: Swarm) -> None:
        donors_of(swarm, SLOW)
        await swarm.until_round(1)
        await asyncio.sleep(1.0)
        got.clear()
        monkeypatch.setattr(StateSync, "ask", failing)
        peer = await joined(swarm)
        assert peer.gossip.own.round == 1, "the download took longer than the round"
        assert failures[0] == 50
        by_shard = Counter(j for _, j in got.elements())
        assert set(by_shard.values()) == {1}, by_shard

    in_virtual_time(scenario, spec)


def test_a_stage_that_starts_afresh_has_nothing_of_donors_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer had all shards of theirs but one: together with an initial one they would be no
    model that anybody has trained."""
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=10, global_batch=200, sync={"shard_parameters": 512}
    )
    got = watch(monkeypatch)
    ask = StateSync.ask

    async def failing(self: StateSync, donor: Record, round_index: int, j: int) -> Array:
        if j == 4:
            raise Unreachable("the link is down")
        return await ask(self, donor, round_index, j)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("first", stage=0, speed=SLOW)
        swarm.start("donor", stage=STAGE, speed=SLOW)
        await swarm.until_round(1)
        await asyncio.sleep(1.0)
        monkeypatch.setattr(StateSync, "ask", failing)
        got.clear()
        peer = swarm.start("joiner", stage=STAGE, speed=SLOW, feeds=False)
        await swarm.until(lambda: len(got) > 10)
        swarm.kill("donor")
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE, 300.0)
        assert peer.gossip.own.round == 1
        assert swarm.total("stage_restarted") == 1
        initial, _ = swarm.build(STAGE)
        shards = range(len(initial.shard_sizes))
        assert peer.replica is not None
        now = [bytes(peer.replica.stage.parameter_shard(j).data) for j in shards]
        assert now == [bytes(initial.parameter_shard(j).data) for j in shards]

    in_virtual_time(scenario, spec)


def test_common_parameters_stay_as_they_are_while_a_newcomer_begins_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is busy, and donors have newer ones meanwhile: some of these and some of those
    would be no round's."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=30, sync={"mode": "local", "local_steps": 2})
    common: dict[str, dict[int, list[bytes]]] = {}
    open_round = Transitions.open_round

    async def scenario(swarm: Swarm) -> None:
        async def opens(self: Transitions, round_index: int, **options: Any) -> None:
            [(name, replica)] = [
                (name, member.peer.replica)
                for name, member in swarm.members.items()
                if member.peer.replica is not None and member.peer.replica.transitions is self
            ]
            mine = common.setdefault(name, {})
            if name == "joiner" and not mine:
                await swarm.until(lambda: max(swarm.rounds()) >= round_index + 5)
            await open_round(self, round_index, **options)
            shards = range(replica.num_shards)
            mine[round_index] = [bytes(replica.common_shard(j).data) for j in shards]

        monkeypatch.setattr(Transitions, "open_round", opens)
        for i in range(2):
            swarm.start(f"donor-{i}", stage=0)
        await swarm.until_round(5)
        swarm.start("joiner", stage=0, feeds=False)
        await swarm.until(lambda: bool(common.get("joiner")))
        [(r, shards)] = common["joiner"].items()
        assert shards == common["donor-0"][r]

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "local"])
@pytest.mark.parametrize("error", [Busy("serving others"), Unsupported("no such method")])
def test_a_newcomer_that_is_given_nothing_says_why(
    error: RemoteError, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whom, and what to do. The run stands still, so no update brings it the parameters."""
    caplog.set_level(logging.INFO, "swarmnet.state_sync")
    sync = {"mode": mode} | ({"local_steps": 2} if mode == "local" else {})
    spec = tiny_spec(tmp_path, num_stages=1, rounds=20, sync=sync)
    error.peer_id = "the-donor"

    async def fails(_: Request[Any]) -> Message[Any]:
        raise error

    def said() -> list[str]:
        return [line for line in caplog.messages if "not here yet" in line]

    async def scenario(swarm: Swarm) -> None:
        swarm.start("feeder")
        swarm.start("the-donor", feeds=False)
        await swarm.until_round(4)
        swarm.kill("feeder")
        for method in ("fetch_parameters", "reduce"):
            swarm.hub.transports["the-donor"].handle(method, fails)
        swarm.start("newcomer", feeds=False)
        await asyncio.sleep(UPKEEP_S / 2)
        assert not said()
        await swarm.until(lambda: bool(said()), 2 * UPKEEP_S)
        assert said() == [f"stage 0: its parameters are not here yet: {told(error)}"]

    in_virtual_time(scenario, spec)
