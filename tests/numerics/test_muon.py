"""A swarm with Muon makes the updates of a plain loop that orthogonalizes by singular values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarmnet.protocol.update.pairing import partner
from swarmnet.spec import RunSpec, Spread
from swarmnet.training.models.registry import stage_matrices
from swarmnet.training.optimizer.muon import ShardedMuon
from tests.numerics.test_sync_modes import start_together
from tests.oracles.reference_modes import DelayedReference, GossipReference, LocalReference
from tests.swarm.harness import (
    Swarm,
    coded,
    in_virtual_time,
    relative_difference,
    replay,
    stepped_by_parts,
    tiny_spec,
)

ROUNDS = 8
FAMILIES = {
    "phi3": {"self_attn.qkv_proj": (2, 1, 1), "mlp.gate_up_proj": (1, 1)},
    "qwen3_moe": {"experts.gate_up_proj": (1, 1), "experts.down_proj": (1,)},
}
"""Of models of transformers whose matrices are several in one, or stacked: what their parts are."""
SPREAD = {
    "aria_text": Spread(columns=(1, 1)),
    "deepseek_v3": Spread(rows=(6, 5), times=4),
    "gpt_oss": Spread(columns=(1, 1), times=48),
    "minimax": Spread(rows=(1, 1, 1), times=4),
    "qwen3_next": Spread(rows=(3, 3, 10, 10), times=2),
}
"""Of models with parts that are spread over a parameter: how one of these is divided."""


def muon_spec(folder: Path, num_stages: int, family: str = "", **sync: Any) -> RunSpec:
    spec = tiny_spec(folder, num_stages=num_stages, rounds=ROUNDS, num_layers=2, sync=sync)
    values = spec.model_dump()
    values["optimizer"] |= {"kind": "muon", "learning_rate": 3e-3}
    if not family:
        return RunSpec.model_validate(values)
    spec = stepped_by_parts(RunSpec.model_validate(values), family)
    matrices = [m for k in range(num_stages) for m in stage_matrices(spec, k)]
    if family in SPREAD:
        assert SPREAD[family] in spec.optimizer.parts.values()  # type: ignore[union-attr]
        assert any(m.times > 1 or m.axis == 1 for m in matrices)
        return spec
    assert spec.optimizer.parts == FAMILIES[family]
    num_second = sum(", part 1 of " in m.name for m in matrices)
    assert num_second == 2 * (2 if family == "phi3" else 4)
    return spec


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (2, 2), (1, 3)])
def test_the_update_is_that_of_one_machine(
    tmp_path: Path, num_stages: int, num_replicas: int
) -> None:
    check_updates(muon_spec(tmp_path, num_stages), num_stages, num_replicas)


@pytest.mark.parametrize("family", [*FAMILIES, *SPREAD])
def test_parts_of_matrices_make_the_update_of_one_machine(tmp_path: Path, family: str) -> None:
    check_updates(muon_spec(tmp_path, 2, family), 2, 2)


def check_updates(spec: RunSpec, num_stages: int, num_replicas: int) -> None:

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(num_stages, num_replicas)
        await swarm.until_round(ROUNDS)
        wanted = replay(spec, swarm.counted, ROUNDS).state_dict()
        assert relative_difference(swarm.parameters(), wanted) < 1e-5

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    ("mode", "codec"),
    [
        ("zero", "bf16"),
        ("zero", "int8"),
        ("zero", "int4"),
        ("delayed", "int8"),
        ("delayed", "int4"),
        ("local", "int8"),
        ("local", "topk"),
        ("local", "topk-208"),
    ],
)
def test_with_codes_the_update_is_near_it_and_replicas_are_the_same(
    tmp_path: Path, mode: str, codec: str
) -> None:
    sync = {"mode": mode, "local_steps": 2, "warmup_rounds": 3} | coded(codec)
    spec = muon_spec(tmp_path, 1, **sync)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 3)
        await swarm.until_round(ROUNDS)
        found = swarm.parameters()  # asserts that they are the same
        if mode == "zero":
            wanted = replay(spec, swarm.counted, ROUNDS).state_dict()
            most = {"bf16": 0.05, "int8": 0.05, "int4": 0.2}[codec]
            assert 1e-5 < relative_difference(found, wanted) < most

    in_virtual_time(scenario, spec)


OF_ALL = pytest.mark.parametrize("family", ["", *FAMILIES])


@pytest.mark.parametrize("family", ["", *FAMILIES, "deepseek_v3", "gpt_oss"])
def test_delayed_updates_are_those_of_a_loop_that_is_one_update_late(
    tmp_path: Path, family: str
) -> None:
    spec = muon_spec(tmp_path, 2, family, mode="delayed", warmup_rounds=2)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(ROUNDS)
        oracle = DelayedReference(spec)
        for r in range(ROUNDS):
            oracle.step(r, sorted(swarm.counted[r]))
        oracle.finish()
        assert relative_difference(swarm.parameters(), oracle.trainer.state_dict()) < 1e-5

    in_virtual_time(scenario, spec)


@OF_ALL
def test_own_steps_are_those_of_as_many_models_in_one_process(tmp_path: Path, family: str) -> None:
    spec = muon_spec(tmp_path, 2, family, mode="local", local_steps=3, warmup_rounds=1)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, 2, 2)
        await swarm.until_round(ROUNDS)
        stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
        oracle = LocalReference(spec, stages)
        for r in range(ROUNDS):
            oracle.step(r, swarm.paths[r])
        assert relative_difference(swarm.parameters(), oracle.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    ("family", "codec"), [("", "none"), ("", "int8"), *((family, "none") for family in FAMILIES)]
)
def test_pairs_average_moments(tmp_path: Path, family: str, codec: str) -> None:
    sync = {"mode": "gossip", "local_steps": 3, "warmup_rounds": 1, "codec": codec}
    spec = muon_spec(tmp_path, 1, family, **sync)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, 1, 2)
        await swarm.until_round(ROUNDS)
        stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
        oracle = GossipReference(spec, stages)
        for r in range(ROUNDS):
            partners = {n: partner(n, list(stages), 0, r) for n in stages}
            oracle.step(r, swarm.paths[r], partners)
        for name in stages:
            difference = relative_difference(swarm.named(name), oracle.state_dict(name))
            assert difference < (1e-4 if codec == "none" else 0.1)

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("is_told", [True, False])
def test_who_multiplies_slowly_makes_few_steps_of_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    """A CPU beside a GPU. Where another replica does not say how fast it is, as one of an older
    version would not, shards are shared out as ever, by all alike."""
    spec = muon_spec(tmp_path, 1, shard_parameters=1024)
    speeds = {"cpu": 5e10, "gpu": 3e13, "third": 3e13 if is_told else 0.0}
    steps = dict.fromkeys(speeds, 0)
    makers: dict[int, str] = {}
    step = ShardedMuon.step

    def counted(self: ShardedMuon, shard_index: int, *args: Any, **kwargs: Any) -> Any:
        steps[makers[id(self)]] += self.num_moments(shard_index) == 1
        return step(self, shard_index, *args, **kwargs)

    monkeypatch.setattr(ShardedMuon, "step", counted)

    async def scenario(swarm: Swarm) -> None:
        kept = []

        def build(name: str, stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            kept.append(optimizer)
            makers[id(optimizer)] = name
            return stage, optimizer

        for name, flops in speeds.items():
            swarm.start(name, build=partial(build, name), product_flops_per_s=flops)
        await swarm.until_round(ROUNDS)
        wanted = replay(spec, swarm.counted, ROUNDS).state_dict()
        assert relative_difference(swarm.parameters(), wanted) < 1e-5
        ownerships = [m.peer.exchanges.ownership for m in swarm.members.values()]
        assert len({str(o.placement(o.current).weights) for o in ownerships}) == 1
        part = steps["cpu"] / sum(steps.values())
        assert (part < 1 / 16) if is_told else (part > 1 / 5)

    in_virtual_time(scenario, spec, products=(1e6,))
