"""A whole swarm in one process and in virtual time: the production peers, real stages, the memory
transport, devices whose work takes virtual seconds."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from swarmnet.admission import OPEN, Admission
from swarmnet.ports import Data, InitialWeights
from swarmnet.protocol.codecs import CHUNK, TOPK, kept_of
from swarmnet.protocol.membership.records import Household
from swarmnet.protocol.slots import slot_of
from swarmnet.runtime.compose import run_settings
from swarmnet.runtime.net import KeySigner
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker, SyntheticDevice
from swarmnet.simulation.local_steps import SyntheticLocalSteps
from swarmnet.simulation.stage import (
    Sizes,
    SyntheticData,
    SyntheticOptimizer,
    SyntheticStage,
    check_sum,
)
from swarmnet.spec import RunSpec, parse_spec
from swarmnet.swarm.initial.data import SharedData
from swarmnet.swarm.membership.reconnecting import Remembered
from swarmnet.swarm.membership.record_checks import Signer
from swarmnet.swarm.peer import Identity, Machine, Peer
from swarmnet.swarm.pipeline.feeder import Journal
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.training.data import open_data
from swarmnet.training.optimizer.local_steps import build_local_steps, build_optimizer
from swarmnet.training.resolving import resolve
from swarmnet.training.stage import build_stage
from swarmnet.transport.memory import MemoryHub
from tests.oracles.reference import ReferenceTrainer

T = TypeVar("T")

FORWARD_S, BACKWARD_S, OTHER_S = 0.02, 0.04, 0.001
REST_S = 0.0
"""A part of what a pass leaves: that is in the time of the pass."""
LIMIT_S = 600.0


class OpenSigner:
    """Signs nothing and believes everything: keys are tested elsewhere."""

    def sign(self, data: bytes) -> bytes:
        return b""

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        return True

    async def beside(self, work: Callable[[], T]) -> T:
        return work()


class VirtualKeySigner(KeySigner):
    """With a real key, and no thread beside the loop."""

    async def beside(self, work: Callable[[], T]) -> T:
        return work()


def tiny_spec(
    folder: Path,
    *,
    num_stages: int,
    rounds: int = 20,
    sync: dict[str, Any] | None = None,
    global_batch: int = 16,
    num_layers: int = 2,
    subspace: int = 0,
    **pipeline: Any,
) -> RunSpec:
    """A small Llama on text that is made here, of at least one layer a stage. `sync`: of `[sync]`;
    no warm-up where it has none. Nothing is coded, unless it is said. `subspace`: of `[model]`, of
    which the seed is 1."""
    text = folder / "text.txt"
    rng = random.Random(0)
    text.write_bytes(bytes(rng.choice(b"abcdefgh \n") for _ in range(20_000)))
    extra, more = (
        "\n".join(f"{key} = {value!r}" for key, value in values.items()).replace("'", '"')
        for values in (
            {"codec": "none"} | pipeline,
            {"shard_parameters": 4096, "warmup_rounds": 0, "codec": "none"} | (sync or {}),
        )
    )
    return parse_spec(f"""
seed = 1
[model]
kind = "llama"
hidden_size = 32
num_hidden_layers = {max(num_layers, num_stages)}
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 64
vocab_size = 256
max_position_embeddings = 16
subspace = {subspace}
subspace_seed = {int(subspace > 0)}
[data]
paths = ["{text}"]
tokenizer = "bytes"
held_out_microbatches = 1
[optimizer]
learning_rate = 1e-3
warmup_rounds = {min(3, rounds - 1)}
rounds = {rounds}
grad_clip_norm = 0.5
[pipeline]
num_stages = {num_stages}
global_batch = {global_batch}
microbatch = 4
{extra}
[sync]
{more}
""")


MODEL_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
"""Of a small model, by transformers' names."""


def model_sizes(family: str, **changes: Any) -> dict[str, Any]:
    """`[model] config` of a small model of a family of transformers."""
    from swarmnet.training.models.model_config import load_config  # slow to import

    known = load_config({"model_type": family}).canonical_values.keys()
    sizes = MODEL_SIZES | changes
    if "kv_lora_rank" in known:  # each head has its own keys
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return {"model_type": family} | {k: v for k, v in sizes.items() if k in known}


def stepped_by_parts(spec: RunSpec, family: str) -> RunSpec:
    """The run of a model of transformers of this family in its place, with Muon by the family's
    parts."""
    sizes = model_sizes(family, num_hidden_layers=spec.model.num_hidden_layers)
    values = spec.model_dump()
    values["model"] = {"kind": "transformers", "config": sizes}
    values["data"] |= {"sequence_length": 16}
    values["optimizer"] |= {"kind": "muon", "parts": "auto"}
    values["sync"] |= {"shard_parameters": 1200}
    found = resolve(RunSpec.model_validate(values))
    assert found.optimizer.parts
    return found


def coded(codec: str) -> dict[str, Any]:
    """Of `[sync]`, for updates in a codec of `swarmnet.protocol.codecs`."""
    kept = kept_of(codec)
    return {"codec": TOPK, "topk_density": kept / CHUNK} if kept else {"codec": codec}


SIZES = Sizes(num_shards=5, activation_numbers=2048, tokens_per_microbatch=64)
"""Of a synthetic swarm."""


def ignore(event: str, **facts: Any) -> None:
    pass


def check_step(stage_index: int, event: str, **facts: Any) -> None:
    """An update has in it what it says."""
    if event == "step":
        assert check_sum(stage_index, facts["shard"], facts["gradient"])


@dataclass
class CountedBySwarm(Journal):
    """The journal of a peer, which the swarm under test reads along."""

    swarm: Swarm
    own: Journal

    def slot_counted(self, history: int, round_index: int, slot: int) -> None:
        self.own.slot_counted(history, round_index, slot)

    def round_counted(self, round_index: int, paths: Mapping[int, tuple[str, ...]]) -> None:
        self.own.round_counted(round_index, paths)
        slots = {the_id: slot_of(the_id) for the_id in paths}
        self.swarm.counted.setdefault(round_index, []).extend(sorted(slots.values()))
        by_slot = {slots[the_id]: path for the_id, path in paths.items()}
        self.swarm.paths.setdefault(round_index, {}).update(by_slot)

    def renamed(self, old: int, new: int) -> None:
        self.own.renamed(old, new)


@dataclass
class Member:
    """One peer of the swarm under test."""

    peer: Peer
    life: asyncio.Task[None]

    @property
    def peer_id(self) -> str:
        return self.peer.transport.peer_id


@dataclass
class Swarm:
    """Peers over one hub. To be used inside a running (virtual) loop."""

    spec: RunSpec
    hub: MemoryHub = field(default_factory=MemoryHub)
    limits: WaitLimits = field(default_factory=WaitLimits)
    seed: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    counted: dict[int, list[int]] = field(default_factory=dict)
    """Microbatch ids that each round counted, by the word of the feeders."""

    paths: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """By round and microbatch id: the replicas that it went through."""
    signer: Callable[[str], Signer] = lambda name: OpenSigner()
    """Of a peer by its name."""
    admission: Admission = OPEN
    credential: Callable[[str], bytes] = lambda name: b""
    """What a peer shows, by its name."""
    household: Callable[[str], Household | None] = lambda name: None
    """Of a peer by its name."""
    owner: str = ""
    """Peer id of the key that may end the run."""
    products: tuple[float, ...] = ()
    """As of `RunSettings`."""
    is_synthetic: bool = False
    """Without a neural network: for tests that compare no numbers. That each gradient has the
    microbatches which it names is checked at every step (`simulation.stage`)."""

    def __post_init__(self) -> None:
        self.data: Data
        if self.is_synthetic:
            self.hub = MemoryHub(copy=False)
            self.data = SyntheticData(self.spec.pipeline.microbatch)
        else:
            self.data = open_data(self.spec)
        self._incarnations = itertools.count(1)

    def start(
        self,
        name: str,
        *,
        stage: int | None = None,
        data: Data | None = None,
        feeds: bool = True,
        build: Callable[[int], tuple[Any, Any]] | None = None,
        neighbours: Sequence[str] | None = None,
        speed: float = 1.0,
        disk: Disk | None = None,
        beside: Peer | None = None,
        is_measured: bool = False,
        product_flops_per_s: float = 0.0,
        begin_anew: bool = False,
        weights: InitialWeights | None = None,
        shared: SharedData | None = None,
        journal: Journal | None = None,
        remembered: Remembered = dict[str, Sequence[str]],
    ) -> Peer:
        """Starts a peer; it joins through the first one that lives. `beside`: another seat of its
        machine, whose device it shares. `is_measured`: it knows its speed before it serves.
        `shared`: what it gives of its data; with `coming`, it has none yet."""

        machine = Machine(
            build or self.build,
            SyntheticDevice(lambda kind: self._work_s(kind, peer.replica, speed)),
            InlineWorker(),
            None if shared is not None and shared.coming is not None else data or self.data,
            disk,
            self.build_local,
            weights=weights,
            shared=shared,
            measure=lambda: (FORWARD_S + BACKWARD_S) / speed if is_measured else 0.0,
            measure_products=(lambda: product_flops_per_s) if product_flops_per_s else None,
        )
        if beside is not None:
            theirs = beside.machine
            machine = replace(machine, device=theirs.device.seat(), services=theirs.services)
        else:
            machine = replace(machine, device=machine.device.seat())
        peer = Peer(
            transport=self.hub.transport(name),
            signer=self.signer(name),
            identity=Identity(
                self.spec.run_id,
                self.spec.canonical(),
                next(self._incarnations),
                credential=self.credential(name),
                household=self.household(name),
            ),
            admission=self.admission,
            settings=replace(run_settings(self.spec), products=self.products),
            machine=machine,
            rng=random.Random(f"{self.seed}|{name}"),
            limits=self.limits,
            wanted_stage=stage,
            feeds=feeds,
            begin_anew=begin_anew,
            remembered=remembered,
            owner=self.owner,
            journal=CountedBySwarm(self, journal or Journal()),
        )
        known = list(self.members)[:1] if neighbours is None else list(neighbours)
        life = asyncio.get_running_loop().create_task(peer.run(known))
        self.members[name] = Member(peer, life)
        return peer

    def _work_s(self, kind: str, replica: Replica | None, speed: float) -> float:
        last_stage = self.spec.pipeline.num_stages - 1
        if kind == "forward" and replica is not None and replica.index == last_stage:
            return (FORWARD_S + BACKWARD_S) / speed  # forward and backward in one
        return {"forward": FORWARD_S, "backward": BACKWARD_S, "rest": REST_S}.get(
            kind, OTHER_S
        ) / speed

    def build_local(self, stage: Any, optimizer: Any) -> Any:
        if not self.is_synthetic:
            return build_local_steps(self.spec, stage, optimizer)
        if not run_settings(self.spec).plan.is_local:
            return None
        return SyntheticLocalSteps(stage, optimizer, SIZES.tokens_per_microbatch, ignore)

    def build(self, stage_index: int) -> tuple[Any, Any]:
        if self.is_synthetic:
            observer = functools.partial(check_step, stage_index)
            num_stages = self.spec.pipeline.num_stages
            return (
                SyntheticStage(stage_index, num_stages, SIZES, observer),
                SyntheticOptimizer(stage_index, SIZES, observer),
            )
        stage = build_stage(self.spec, stage_index)
        return stage, build_optimizer(self.spec, stage)

    def start_grid(self, num_stages: int, num_replicas: int) -> None:
        """`num_replicas` peers a stage, each free to choose its stage."""
        for i in range(num_stages * num_replicas):
            self.start(f"peer-{i}")

    def kill(self, name: str) -> None:
        """As SIGKILL: nothing more is sent, channels close."""
        self.hub.kill(name)
        self.members.pop(name).life.cancel()

    async def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Waits for a condition; a peer's failure, or the limit, fails the test. The longer it
        has waited, the more seldom it looks: within a thousandth of the wait."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + limit_s
        while not condition():
            for member in self.members.values():
                if member.life.done():
                    member.life.result()
            assert loop.time() < end, f"not within {limit_s} s: {self.describe()}"
            await asyncio.sleep(max(0.02, (loop.time() - began) / 1000))

    async def until_round(self, round_index: int, limit_s: float = LIMIT_S) -> None:
        """Every living peer serves in this round or a later one."""
        await self.until(lambda: all(r >= round_index for r in self.rounds()), limit_s)
        if round_index >= self.spec.optimizer.end:
            await asyncio.sleep(
                1.0
            )  # virtual: for every feeder to tell what its last round counted

    def rounds(self) -> list[int]:
        return [
            m.peer.replica.round if m.peer.replica and m.peer.replica.synced else -1
            for m in self.members.values()
        ]

    def stages(self) -> dict[str, int]:
        """By peer, as its record says."""
        found = {name: m.peer.gossip.own.stage for name, m in self.members.items()}
        return {name: stage for name, stage in found.items() if stage >= 0}

    def describe(self) -> str:
        return ", ".join(
            f"{name}: {m.peer.gossip.own.state} stage {m.peer.gossip.own.stage} round "
            f"{m.peer.replica.round if m.peer.replica else '-'}"
            for name, m in self.members.items()
        )

    def total(self, name: str) -> int:
        """Sum of one of the records' totals."""
        return sum(m.peer.gossip.own.totals.get(name, 0) for m in self.members.values())

    def flat(self, name: str) -> torch.Tensor:
        """The whole parameter vector of a peer's stage."""
        replica = self.members[name].peer.replica
        assert replica is not None
        parts = [
            torch.frombuffer(bytearray(replica.stage.parameter_shard(j).data), dtype=torch.float32)
            for j in range(replica.num_shards)
        ]
        return torch.cat(parts)

    def named(self, name: str) -> dict[str, torch.Tensor]:
        """The parameters of a peer's stage by name."""
        replica = self.members[name].peer.replica
        assert replica is not None
        stage: Any = replica.stage
        return {n: p.clone() for n, p in stage.state_dict().items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """The model by name; asserts that the replicas of a stage are bit-identical."""
        model: dict[str, torch.Tensor] = {}
        flats: dict[int, torch.Tensor] = {}
        for name, member in self.members.items():
            replica = member.peer.replica
            assert replica is not None
            flat = self.flat(name)
            assert torch.equal(flats.setdefault(replica.index, flat), flat), "replicas differ"
            stage: Any = replica.stage
            for r in stage.parameter_ranges:
                model[r.name] = flat[r.start : r.stop].view(r.shape)
        return model

    async def close(self) -> None:
        for member in self.members.values():
            member.life.cancel()
        await asyncio.gather(*(m.life for m in self.members.values()), return_exceptions=True)


def in_virtual_time(
    scenario: Callable[[Swarm], Awaitable[None]], spec: RunSpec, **options: Any
) -> None:
    """Runs `scenario(swarm)` on a virtual loop; the swarm is closed whatever happens."""

    async def main() -> None:
        swarm = Swarm(spec, **options)
        try:
            await scenario(swarm)
        finally:
            await swarm.close()

    run_virtual(main())


def replay(
    spec: RunSpec, counted: dict[int, list[int]], rounds: int, data: Data | None = None
) -> ReferenceTrainer:
    """A plain PyTorch loop over exactly the microbatches that each round counted."""
    trainer = ReferenceTrainer(spec, data)
    for r in range(rounds):
        trainer.step(r, sorted(counted[r]))
    return trainer


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative distance of a parameter tensor."""
    assert a.keys() == b.keys()
    return max(((a[k] - b[k]).norm() / b[k].norm().clamp_min(1e-12)).item() for k in a)
