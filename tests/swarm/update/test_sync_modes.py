"""The sync modes while peers come and go."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import NotReady
from swarmnet.methods.state import FetchRequest
from swarmnet.protocol.membership.records import JOINING, Record, bitmap
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes, state_vectors
from swarmnet.simulation.swarm import simulate
from swarmnet.swarm.update.delayed_updates import SETTLE_S
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchanges import Behind
from swarmnet.swarm.update.gossip_averaging import GossipAveraging
from swarmnet.training.arrays import to_tensor
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message, convert
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

ROUNDS = 24
MODES: list[dict[str, Any]] = [
    {"mode": "delayed"},
    {"mode": "local", "local_steps": 5},
    {"mode": "local", "local_steps": 6, "fragments": 3},
]
WARMED: list[dict[str, Any]] = [
    {"mode": "delayed", "warmup_rounds": 9},
    {"mode": "local", "local_steps": 6, "fragments": 3, "warmup_rounds": 7},
]
GOSSIP: dict[str, Any] = {"mode": "gossip", "local_steps": 4, "warmup_rounds": 6}


@pytest.mark.parametrize(
    "sync", [*MODES, *WARMED], ids=lambda sync: "-".join(map(str, sync.values()))
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_replicas_end_as_one_though_peers_are_replaced(
    tmp_path: Path, sync: dict[str, Any], seed: int
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync)
    rng = random.Random(f"{sync} {seed}")

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 3)
        await replace_some(swarm, rng)
        await swarm.until_round(ROUNDS)
        parameters = swarm.parameters()  # asserts that replicas are bit-identical
        assert all(torch.isfinite(p).all() for p in parameters.values())
        assert swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec, seed=seed)


def test_gossip_goes_on_though_peers_are_replaced(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=GOSSIP)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 3)
        await replace_some(swarm, random.Random("gossip"))
        await swarm.until_round(ROUNDS)
        flats: dict[int, list[torch.Tensor]] = {}
        for name in swarm.members:
            flats.setdefault(_stage(swarm, name), []).append(swarm.flat(name))
        for replicas in flats.values():
            mean = torch.stack(replicas).mean(0)
            for flat in replicas:  # near each other, and nobody was left behind
                assert (flat - mean).norm() < 0.1 * mean.norm()
        assert swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    "sync", [*MODES[:2], {"mode": "gossip", "local_steps": 4}], ids=lambda sync: sync["mode"]
)
def test_no_gradient_is_lost_when_a_peer_leaves_on_purpose(
    tmp_path: Path, sync: dict[str, Any]
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=12, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)
        leaver = swarm.members.pop("peer-1")
        updates = leaver.peer.updates
        leaver.peer.stop()
        await swarm.until(leaver.life.done)
        leaver.life.result()
        assert not updates.is_owing
        await swarm.until_round(12)
        if sync["mode"] != "gossip":
            swarm.parameters()
        assert swarm.total("samples_lost") == swarm.total("shard_reset") == 0

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("up_bytes_per_s", "is_told"), [(1e5, True), (4e7, False)])
def test_auto_says_when_the_network_is_too_slow_for_it(
    caplog: pytest.LogCaptureFixture, up_bytes_per_s: float, is_told: bool
) -> None:
    scenario = Scenario(
        seed=1,
        peers=4,
        until_s=120.0 if is_told else 12.0,
        sizes=Sizes(num_shards=4, shard_parameters=20_000),
        link=Link(up_bytes_per_s, 1e8, 0.01),
        speed_ratio=1.0,
        sync_mode="auto",
        keep_log=False,
    )
    with caplog.at_level(logging.WARNING, logger="swarmnet.auto_sync"):
        result = simulate(scenario)
    assert result.broken is None
    lines = [r.message for r in caplog.records if r.name == "swarmnet.auto_sync"]
    assert len(lines) == is_told, "by one peer, once"
    assert all("the run waits for its network" in line for line in lines)


def test_all_that_an_exchange_sends_beside_a_round_takes_its_turn_on_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, what backups need, and results of who is no backup."""
    rounds, replicas = 8, 3
    sync = {"mode": "delayed", "replication": 2, "codec": "none"}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=rounds, sync=sync)
    turn = ExchangePace.turn
    turned: dict[int, int] = {}
    """By exchange, bytes."""

    async def watched(self: ExchangePace, num_bytes: int) -> None:
        replica = self._replica  # noqa: SLF001  whose turn it is
        current = replica.current_exchange
        if replica.plan.is_delayed(current):
            turned[current] = turned.get(current, 0) + num_bytes
        await turn(self, num_bytes)

    monkeypatch.setattr(ExchangePace, "turn", watched)
    stage_bytes = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, replicas)
        await swarm.until_round(1)
        replica = swarm.members["peer-0"].peer.replica
        assert replica is not None
        stage_bytes.append(4 * sum(replica.stage.shard_sizes))
        await swarm.until_round(rounds)

    in_virtual_time(scenario, spec)
    print(turned, stage_bytes)
    whole = stage_bytes[0] * 2 * (replicas - 1)
    assert {r: n for r, n in turned.items() if r} == dict.fromkeys(range(1, rounds - 1), whole)


async def replace_some(swarm: Swarm, rng: random.Random) -> None:
    """Every six rounds a peer dies, never the last of its stage, and another comes."""
    for n in range(3):
        await swarm.until(lambda n=n: max(swarm.rounds()) >= 4 + 6 * n)  # type: ignore[misc]
        covered = [s for s in (0, 1) if _num_replicas(swarm, s) > 1]
        victims = [m for m in sorted(swarm.members) if _stage(swarm, m) in covered]
        victim = rng.choice(victims)
        stage = _stage(swarm, victim)
        swarm.kill(victim)  # first: newcomers join through a peer that lives
        swarm.start(f"newcomer-{n}", stage=stage)


def _stage(swarm: Swarm, name: str) -> int:
    return swarm.members[name].peer.gossip.own.stage


def _num_replicas(swarm: Swarm, stage: int) -> int:
    return sum(
        m.peer.gossip.own.stage == stage and m.peer.gossip.own.is_replica
        for m in swarm.members.values()
    )


@pytest.mark.parametrize("kind", ["not finite", "wrong shape", "three arrays", "nothing"])
def test_an_offer_that_does_not_fit_is_as_none(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A partner in mode `gossip` that lies: the others go on without it, and stay finite."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=14, sync=GOSSIP)

    def spoiled(array: Array) -> Array:
        if kind == "wrong shape":
            return Array(array.dtype, (1,), bytes(array.data)[:4])
        data = bytearray(array.data)
        data[:4] = struct.pack("<f", float("nan"))
        return Array(array.dtype, array.shape, bytes(data))

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"good-{i}")
        swarm.start("bad")
        await swarm.until_round(1)
        transport = swarm.hub.transports["bad"]
        honest = handler_of(transport, "offer")

        async def on_offer(request: Request) -> Message:
            reply = await honest(request)
            arrays = tuple(map(spoiled, reply.arrays))
            if kind in ("three arrays", "nothing"):
                arrays = reply.arrays[:3] if kind == "three arrays" else ()
            return replace(reply, arrays=arrays)

        transport.handle("offer", on_offer)
        await swarm.until_round(14)
        for name in ("good-0", "good-1"):
            replica = swarm.members[name].peer.replica
            assert replica is not None
            for j in range(replica.num_shards):
                values = to_tensor(replica.stage.parameter_shard(j))
                assert bool(values.isfinite().all()), name

    with caplog.at_level(logging.WARNING, logger="swarmnet"):
        in_virtual_time(scenario, spec)
    assert any("offer is refused" in r.message for r in caplog.records)


def test_an_exchange_that_fails_beside_a_round_is_noticed_in_it(tmp_path: Path) -> None:
    """Else the replica would work on for a whole round, all of which would be lost."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=6, global_batch=240, sync={"mode": "delayed"})

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", stage=0)
        await swarm.until_round(2)
        peer = swarm.members["peer-1"].peer
        exchanges, failed_in = peer.exchanges, []
        update = exchanges.make

        async def fail_once(*args: Any, **options: Any) -> None:
            if not failed_in:
                failed_in.append(peer.replica.round)
                raise Behind("the others are further on")
            await update(*args, **options)

        exchanges.make = fail_once
        await swarm.until(lambda: bool(failed_in))
        await swarm.until(lambda: peer.gossip.own.state == JOINING)
        others = [m.peer.replica for name, m in swarm.members.items() if name != "peer-1"]
        assert all(o.is_open(failed_in[0]) for o in others)
        await swarm.until_round(6, 120.0)

    in_virtual_time(scenario, spec)


def test_a_replica_that_the_stage_has_left_behind_fetches_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own steps would lead it ever further from the others, as after a long pause."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=40, sync={"mode": "gossip", "local_steps": 2})
    members, told = GossipAveraging._members, []  # noqa: SLF001  what it hears of the stage

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", stage=0)
        await swarm.until_round(6)
        peer = swarm.members["peer-1"].peer

        def far_ahead(averaging: GossipAveraging) -> Sequence[Record]:
            found = members(averaging)
            if averaging.gossip is peer.gossip and not told:
                told.append(True)
                return [replace(r, round=r.round + 50) for r in found]
            return found

        monkeypatch.setattr(GossipAveraging, "_members", far_ahead)
        await swarm.until(lambda: peer.gossip.own.state == JOINING)
        await swarm.until_round(max(swarm.rounds()) + 4)

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    ("mode", "codec"),
    [
        *((mode, "none") for mode in ("zero", "delayed", "local", "gossip")),
        *((mode, "int8") for mode in ("zero", "local", "gossip")),
    ],
)
def test_the_simulator_has_as_many_vectors_in_a_state(
    tmp_path: Path, mode: str, codec: str
) -> None:
    """They are what a new owner downloads."""
    sync = {"mode": mode, "codec": codec, "local_steps": 2}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=20, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"peer-{i}")
        await swarm.until_round(6)
        replica = swarm.members["peer-0"].peer.replica
        assert replica is not None
        exported = [replica.optimizer.export(j)[1] for j in replica.optimizer.owned()]
        assert {len(arrays) for arrays in exported} == {state_vectors(mode, codec)}

    in_virtual_time(scenario, spec)


def test_who_is_to_gain_or_lose_a_shard_is_waited_for(tmp_path: Path) -> None:
    """Its word on what it holds may change as it opens the round. Nobody else's is waited for."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=40, sync={"mode": "delayed"})
    waited: Counter[bool] = Counter()

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(8)
        peer = swarm.members["peer-0"].peer
        ownership, num_shards = peer.exchanges.ownership, peer.replica.num_shards
        for name in ("peer-1", "peer-2"):
            record = peer.gossip.view.get(name)
            held = [j for j in range(num_shards) if record.holds_shard(j)]
            assert ownership.is_settled(record)
            for others in (held[1:], range(num_shards)):
                holds = bitmap(list(others), num_shards)
                assert not ownership.is_settled(replace(record, holds=holds))
            fresh = bitmap(held[:1], num_shards)
            assert not ownership.is_settled(replace(record, fresh=fresh))
        until = peer.gossip.changed.until

        async def waits(is_known: Callable[[], bool], limit_s: float) -> bool:
            if limit_s == SETTLE_S:
                waited[is_known()] += 1
            return await until(is_known, limit_s)

        peer.gossip.changed.until = waits  # type: ignore[method-assign]
        await swarm.until_round(16)
        assert waited[True] > 5 * waited[False]
        before = waited[False]
        swarm.start("newcomer")
        await swarm.until(lambda: waited[False] > before)

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_the_state_of_new_shards_may_be_on_its_way_for_most_of_a_round(tmp_path: Path) -> None:
    """In mode `delayed`, where it is fetched beside the round: each shard is asked for once."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"mode": "delayed"})
    speed, slow_s = 0.0005, 90.0
    asked: Counter[int] = Counter()

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", speed=speed)
        await swarm.until_round(2, limit_s=3000.0)
        for name in swarm.members:
            transport = swarm.hub.transports[name]
            honest = handler_of(transport, "fetch_optimizer")

            async def late(request: Request, honest: Any = honest) -> Message:
                reply = await honest(request)
                asked[convert(request.message.body, FetchRequest).shard] += 1
                await asyncio.sleep(slow_s)
                return reply

            transport.handle("fetch_optimizer", late)
        newcomer = swarm.start("newcomer", speed=speed)
        await swarm.until(lambda: any(newcomer.gossip.own.holds), limit_s=3000.0)
        held = [j for j in range(newcomer.replica.num_shards) if newcomer.gossip.own.holds_shard(j)]
        assert [asked[j] for j in held] == [1] * len(held)

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_state_that_was_asked_for_before_all_was_dropped_does_not_count(tmp_path: Path) -> None:
    """It belongs to parameters that the replica has gone over from."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=400)
    slow_s = 30.0
    asked: list[str] = []

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        is_over = False
        for name in swarm.members:
            transport = swarm.hub.transports[name]
            honest = handler_of(transport, "fetch_optimizer")

            async def late(request: Request, honest: Any = honest) -> Message:
                if is_over:
                    raise NotReady("not now")
                reply = await honest(request)
                asked.append(request.remote)
                await asyncio.sleep(slow_s)
                return reply

            transport.handle("fetch_optimizer", late)
        newcomer = swarm.start("newcomer")
        await swarm.until(lambda: bool(asked))
        is_over = True
        await newcomer.exchanges.forget_state()
        await asyncio.sleep(1.5 * slow_s)
        assert set(asked) == {"newcomer"}
        assert newcomer.replica is not None
        assert newcomer.replica.optimizer.owned() == []

    in_virtual_time(scenario, spec, is_synthetic=True)
