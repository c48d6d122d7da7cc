"""Updates whose gradients, sums and results are coded: replicas stay the same bit for bit, whatever
dies, and the model is near that of a plain loop."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import NotReady
from swarmnet.protocol.codecs import UPDATE_CODECS, coded_form
from swarmnet.spec import RunSpec
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.codecs.blocks import Int8
from swarmnet.training.codecs.shards import TorchShardCodec
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 8
NEAR = {"bf16": 0.002, "int8": 0.004, "int4": 0.03}
"""Relative distance of the parameters from those of a plain loop; they move by about 0.04."""


LOCAL_EVERY_ROUND: dict[str, dict[str, Any]] = {"zero": {}, "local": {"local_steps": 1}}


def coded_spec(folder: Path, codec: str, num_stages: int = 2, **sync: Any) -> RunSpec:
    return tiny_spec(folder, num_stages=num_stages, rounds=ROUNDS, sync={"codec": codec} | sync)


def distance(swarm: Swarm) -> float:
    trainer = replay(swarm.spec, swarm.counted, ROUNDS)
    return relative_difference(swarm.parameters(), trainer.state_dict())


@pytest.mark.parametrize("at_once", [0, 1 << 20])
@pytest.mark.parametrize("codec", NEAR)
def test_the_update_is_near_that_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, at_once: int
) -> None:
    monkeypatch.setattr("swarmnet.swarm.update.exchanges.CODED_AT_ONCE_BYTES", at_once)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 3)
        await swarm.until_round(ROUNDS)
        found = distance(swarm)
        print(f"{codec}: {found:.5f}")
        assert 0 < found < NEAR[codec]

    in_virtual_time(scenario, coded_spec(tmp_path, codec))


@pytest.mark.parametrize(
    ("mode", "codec"),
    [
        *((mode, codec) for mode in ("delayed", "local", "auto") for codec in ("int8", "int4")),
        ("local", "topk"),
    ],
)
def test_replicas_are_the_same_in_the_other_modes(tmp_path: Path, mode: str, codec: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        before = []
        swarm.start_grid(2, 3)
        await swarm.until_round(1)
        before.append(swarm.parameters() if mode != "local" else {})
        await swarm.until_round(ROUNDS)
        after = swarm.parameters()
        if before[0]:
            assert relative_difference(before[0], after) > 1e-3

    in_virtual_time(scenario, coded_spec(tmp_path, codec, mode=mode, local_steps=2))


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 6))]
)
@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_owners_die_and_others_join(tmp_path: Path, mode: str, seed: int) -> None:
    """The state that a newcomer gets, with what coding has lost, leads to the same bits."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        await asyncio.sleep(0.13 * seed)
        swarm.kill(f"peer-{seed % 3 + 1}")
        swarm.start("newcomer", neighbours=["peer-0"])
        await swarm.until_round(ROUNDS)
        assert len(swarm.members) == 4
        if mode == "zero" and not swarm.total("samples_lost"):
            assert distance(swarm) < 2 * NEAR["int8"]
        swarm.parameters()

    in_virtual_time(scenario, coded_spec(tmp_path, "int8", num_stages=1, mode=mode), seed=seed)


def test_a_peer_that_leaves_hands_its_gradient_over_coded(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        leaver = swarm.members["peer-2"]
        replica = leaver.peer.replica
        assert replica is not None
        await swarm.until(lambda: replica.ledger.num_samples(replica.round) >= 8)
        leaver.peer.stop()
        await swarm.until(leaver.life.done)
        del swarm.members["peer-2"]
        assert max(swarm.rounds()) == 2, "it waited for the end of the round"
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0
        assert distance(swarm) < 2 * NEAR["int8"]

    spec = coded_spec(tmp_path, "int8", num_stages=1, aggregation="mean")
    values = spec.model_dump()
    values["pipeline"]["global_batch"] = 160
    in_virtual_time(scenario, RunSpec.model_validate(values))


class Spoiler(TorchShardCodec):
    """Sends codes that no codec makes."""

    def contribution(self, shard_index: int, gradient: Array, **how: Any) -> Array:
        coded = to_tensor(super().contribution(shard_index, gradient, **how))
        return from_tensor(torch.full_like(coded, 0x80))


def test_a_contribution_of_impossible_codes_does_not_count(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            optimizer.codec = Spoiler(UPDATE_CODECS["int8"], stage.shard_sizes)
            return stage, optimizer

        for i in range(3):
            swarm.start(f"peer-{i}")
        swarm.start("spoiler", build=build)
        await swarm.until_round(ROUNDS)
        assert swarm.total("contributions_dropped") > 0
        parameters = swarm.parameters()
        assert all(torch.isfinite(p).all() for p in parameters.values())

    in_virtual_time(scenario, coded_spec(tmp_path, "int8", num_stages=1))


@pytest.mark.parametrize("codec", UPDATE_CODECS)
def test_what_goes_over_the_wire_has_the_size_of_its_codec(codec: str) -> None:
    names, size = UPDATE_CODECS[codec], 5000
    shards = TorchShardCodec(names, [size])
    values = from_tensor(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    for coded, name in (
        (shards.contribution(0, values, keeps_error=True), names.contributions),
        (shards.coded_sum(0, values)[0], names.sums),
    ):
        assert (coded.dtype, coded.shape) == coded_form(name, (size,), 0)


def test_topk_leaves_nothing_out_of_a_single_step(tmp_path: Path) -> None:
    """In the warm-up its contributions are as large as sums; the results are the same."""
    sync = {"mode": "local", "local_steps": 3, "warmup_rounds": 4}

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        sent = []
        for r in range(1, ROUNDS + 1):
            await swarm.until_round(r)
            peers = [m.peer for m in swarm.members.values()]
            sent.append(sum(p.transport.traffic.sent_bytes.get("reduce", 0) for p in peers))
        pushed = [b - a for a, b in itertools.pairwise(sent)]
        assert min(pushed[:2]) > 1.5 * pushed[4] > 0

    in_virtual_time(scenario, coded_spec(tmp_path, "topk", num_stages=1, **sync))


def test_common_parameters_that_differ_are_fetched_where_replicas_step_alone(
    tmp_path: Path,
) -> None:
    """As after a partition. A coded result is a change: they would differ for ever."""
    spec = coded_spec(tmp_path, "int8", num_stages=1, mode="local", local_steps=2)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)
        local = swarm.members["peer-1"].peer.replica.local
        to_tensor(local.common_shard(0)).add_(0.5)
        await swarm.until(lambda: swarm.total("diverged") > 0)
        now = max(swarm.rounds())
        await swarm.until(lambda: min(swarm.rounds()) > now + 4)
        assert swarm.total("diverged") == 1

        def common(name: str) -> list[bytes]:
            replica = swarm.members[name].peer.replica
            return [bytes(replica.common_shard(j).data) for j in range(replica.num_shards)]

        await swarm.until(lambda: len(set(swarm.rounds())) == 1)
        assert common("peer-0") == common("peer-1") == common("peer-2")

    values = spec.model_dump()
    values["optimizer"]["rounds"] = 60
    in_virtual_time(scenario, RunSpec.model_validate(values))


@pytest.mark.parametrize("mode", ["zero", "local"])
def test_parameters_of_a_result_are_never_made_of_those_of_the_next_round(
    tmp_path: Path, mode: str
) -> None:
    """A newcomer that asks for them while the round ends comes again. With the change added to what
    it has led to already, the newcomer would have the update twice."""
    spec = coded_spec(tmp_path, "int8", num_stages=1, mode=mode, **LOCAL_EVERY_ROUND[mode])
    kept: list[tuple[int, Any]] = []

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        exchanges = swarm.members["peer-0"].peer.exchanges
        replica = exchanges.replica
        put = exchanges.work.put

        async def keeping(shard: int, result: Any, *args: Any, **how: Any) -> None:
            await put(shard, result, *args, **how)
            if shard == 0:
                whole = await exchanges.work.copy_of(exchanges.current, 0, result, is_whole=True)
                kept.append((exchanges.current, (result, bytes(whole.data))))

        exchanges.work.put = keeping
        await swarm.until(lambda: len(kept) > 1)
        number, (result, whole) = kept[0]
        assert result.is_coded
        assert replica.current_exchange > number
        try:
            late = await exchanges.work.copy_of(number, 0, result, is_whole=True)
        except NotReady:
            pass
        else:
            assert bytes(late.data) == whole

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_a_replica_that_is_alone_rounds_as_a_swarm_does_and_codes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Its parameters are those of one that makes all codes; another one can join it."""
    spec = coded_spec(tmp_path, "int8", num_stages=1, mode=mode)
    found, num_coded = list[dict[str, torch.Tensor]](), list[int]()
    encode = Int8.encode

    def counted(self: Int8, values: torch.Tensor) -> torch.Tensor:
        num_coded[-1] += 1
        return encode(self, values)

    round_trip = Int8.round_trip

    def counted_too(self: Int8, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_coded[-1] += 1
        return round_trip(self, values)

    monkeypatch.setattr(Int8, "encode", counted)
    monkeypatch.setattr(Int8, "round_trip", counted_too)

    async def scenario(swarm: Swarm) -> None:
        num_coded.append(0)
        swarm.start("peer-0")
        await swarm.until_round(4)
        num_alone = num_coded[-1]
        found.append({name: p.clone() for name, p in swarm.parameters().items()})
        swarm.start("peer-1")
        await swarm.until_round(ROUNDS)
        assert num_coded[-1] > num_alone
        num_coded[-1] = num_alone

    in_virtual_time(scenario, spec)
    with monkeypatch.context() as patch:
        patch.setattr(Proofs, "is_of_use", True)
        in_virtual_time(scenario, spec)
    assert num_coded[0] == 0 < num_coded[1]
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
