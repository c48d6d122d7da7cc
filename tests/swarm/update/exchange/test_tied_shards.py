"""A matrix that is embedding and head makes the same update as on one machine, though the first and
the last stage both hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation, SpecError
from swarmnet.spec import RunSpec
from swarmnet.swarm.replica.replica import decides_tied
from swarmnet.training.codecs.shards import TorchShardCodec
from swarmnet.training.models.base import build_layer, own_parameters, tie
from swarmnet.training.models.registry import model_plan
from swarmnet.training.resolving import resolve
from swarmnet.training.stage import build_stage
from swarmnet.wire import Array
from tests.oracles.plain_transformers import PlainTrainer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec

ROUNDS = 6
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}


def tied_spec(folder: Path, num_stages: int, sync: dict[str, Any] | None = None) -> RunSpec:
    spec = tiny_spec(folder, num_stages=num_stages, rounds=ROUNDS, sync=sync, num_layers=3)
    values = spec.model_dump()
    values["model"] = {"kind": "transformers", "config": CONFIG}
    values["data"]["sequence_length"] = 16
    return resolve(RunSpec.model_validate(values))


def initial(spec: RunSpec) -> dict[str, torch.Tensor]:
    plan = model_plan(spec)
    modules = [build_layer(plan, layer, spec.seed) for layer in plan.layers]
    tie(plan.layers, modules)
    return {n: p.detach() for n, p in own_parameters(plan.layers, modules)}


def check(swarm: Swarm, rounds: int, tolerance: float = 1e-4) -> None:
    """Both copies are the same bit for bit, and the model that of a plain loop."""
    found = swarm.parameters()
    if HEAD in found:
        assert torch.equal(found.pop(HEAD), found[EMBEDDING])
    trainer = PlainTrainer(swarm.spec, initial(swarm.spec), swarm.data)
    for r in range(rounds):
        trainer.step(r, sorted(swarm.counted[r]))
    expected = trainer.parameters()
    expected.pop(HEAD, None)
    assert relative_difference(found, expected) < tolerance


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_update_is_that_of_one_machine(tmp_path: Path, num_stages: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(num_stages, 2)
        await swarm.until_round(ROUNDS)
        check(swarm, ROUNDS)
        assert swarm.total("tied_missed") == 0
        for peer in (m.peer for m in swarm.members.values()):
            assert peer.replica is not None
            held = [peer.gossip.own.holds_shard(j) for j in range(peer.replica.num_shards)]
            assert all(held), "state is fetched anew after each update"

    in_virtual_time(scenario, tied_spec(tmp_path, num_stages))


@pytest.mark.parametrize("victims", [("a0",), ("b0",), ("a0", "b1")])
@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.4])
def test_it_stays_so_when_owners_die_in_an_update(
    tmp_path: Path, victims: tuple[str, ...], after_s: float
) -> None:
    """`a`: of the first stage, `b`: of the last one. Killed around the end of a round."""
    import asyncio

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"a{i}", stage=0)
            swarm.start(f"b{i}", stage=1)
        await swarm.until_round(2)
        await asyncio.sleep(after_s)
        for name in victims:
            swarm.kill(name)
        await swarm.until_round(ROUNDS)
        found = swarm.parameters()
        assert torch.equal(found[HEAD], found[EMBEDDING])
        if not swarm.total("samples_lost"):
            check(swarm, ROUNDS, 1e-3)

    in_virtual_time(scenario, tied_spec(tmp_path, 2))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_stage_that_begins_anew_is_tied_again_after_an_update(tmp_path: Path, codec: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        for name, stage in (("a0", 0), ("a1", 0), ("b0", 1)):
            swarm.start(name, stage=stage)
        await swarm.until_round(2)
        swarm.kill("b0")
        swarm.start("b1", stage=1)
        await swarm.until_round(ROUNDS)
        found = swarm.parameters()
        assert torch.equal(found[HEAD], found[EMBEDDING])

    in_virtual_time(scenario, tied_spec(tmp_path, 2, {"codec": codec}))


def test_coded_updates_keep_it_tied(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(ROUNDS)
        assert swarm.total("tied_missed") == 0
        check(swarm, ROUNDS, 0.01)

    in_virtual_time(scenario, tied_spec(tmp_path, 2, {"codec": "int8"}))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_delayed_updates_keep_it_tied(tmp_path: Path, codec: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(ROUNDS)
        found = swarm.parameters()
        assert torch.equal(found[HEAD], found[EMBEDDING])
        assert not torch.equal(found[EMBEDDING], initial(swarm.spec)[EMBEDDING])

    in_virtual_time(scenario, tied_spec(tmp_path, 2, {"mode": "delayed", "codec": codec}))


def test_shards_of_both_stages_are_the_same_elements(tmp_path: Path) -> None:
    spec = tied_spec(tmp_path, 2, {"shard_parameters": 3000})
    first, last = build_stage(spec, 0), build_stage(spec, 1)
    assert first.tied_shards == last.tied_shards == 3
    assert first.shard_sizes[:3] == last.shard_sizes[:3] == (3000, 3000, 256 * 32 - 6000)
    for j in range(3):
        assert bytes(first.parameter_shard(j).data) == bytes(last.parameter_shard(j).data)
    with pytest.raises(SpecError, match="mode local"):
        build_stage(tied_spec(tmp_path, 2, {"mode": "local"}), 0)


def test_a_sum_that_its_codec_cannot_hold_gives_no_step_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of one faulty peer whose numbers are nearly too large, or a model that has diverged."""
    coded_sum = TorchShardCodec.coded_sum

    async def scenario(swarm: Swarm) -> None:
        def codes(self: TorchShardCodec, shard_index: int, total: Array) -> tuple[Array, Array]:
            replicas = [m.peer.replica for m in swarm.members.values() if m.peer.replica]
            is_tied = any(
                r.optimizer.codec is self and decides_tied(r, shard_index) for r in replicas
            )
            if is_tied and max(r.round for r in replicas) == 2:
                raise ProtocolViolation("a scale that is not finite")
            return coded_sum(self, shard_index, total)

        monkeypatch.setattr(TorchShardCodec, "coded_sum", codes)
        swarm.start_grid(2, 2)
        await swarm.until_round(ROUNDS, limit_s=200.0)
        found = swarm.parameters()
        assert torch.equal(found[HEAD], found[EMBEDDING])

    in_virtual_time(scenario, tied_spec(tmp_path, 2, {"codec": "int8"}))
    assert "no step: a scale that is not finite" in caplog.text
