"""Replicas with one, two and four ranks make the same update together as one machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.spec import RunSpec
from swarmnet.training.models.model_config import load_config
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.ranks.context_parallel_stage import build_context_parallel_stage
from swarmnet.training.ranks.expert_stage import build_expert_stage
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.rows.row_stage import build_row_stage
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage, rank_options
from swarmnet.training.resolving import resolve
from tests.oracles.reference_modes import DelayedReference
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec
from tests.swarm.update.exchange.test_tied_shards import check as check_tied
from tests.training.ranks.threads import rank_threads

ROUNDS = 6
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "capacity_factor": 1.5,
    "router_aux_loss_coef": 0.5,
    "initializer_range": 0.1,
}
RANKS = {0: (1, 2, 4), 1: (2, 1, 2)}
"""Of each replica, by stage."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("mode", [pytest.param("zero", marks=pytest.mark.long), "delayed"])
def test_replicas_of_unlike_ranks_make_the_updates_of_one_process(
    tmp_path: Path, stack: ExitStack, mode: str
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync={"mode": mode})
    groups: dict[str, LocalGroup] = {}
    for stage, counts in RANKS.items():
        for replica, num_ranks in enumerate(counts):
            if num_ranks > 1:
                options = rank_options(spec, sequence_parallel=replica == 1)
                group = LocalGroup(num_ranks, threads=1, options=options)
                stack.callback(group.close)
                groups[f"peer-{stage}-{replica}"] = group

    _train(spec, RANKS, groups)


FEW, MANY = {0: (1, 2), 1: (2,)}, {0: (1, 2, 4), 1: (4, 2)}
"""Ranks of each replica; one of the stages is served by peers of several ranks alone."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("gemma3_text", FEW),
        ("qwen3_moe", FEW),
        *(pytest.param(kind, MANY, marks=pytest.mark.long) for kind in FAMILIES),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{max(value[0])} ranks",
)
def test_replicas_of_a_family_with_unlike_ranks(
    tmp_path: Path, stack: ExitStack, kind: str, ranks: dict[int, tuple[int, ...]]
) -> None:
    """Of threads."""
    known = load_config({"model_type": kind}).canonical_values.keys()
    wanted = SIZES | {"num_key_value_heads": 4, "num_local_experts": 4}
    sizes = {k: v for k, v in wanted.items() if k in known}
    tied = kind.startswith("gemma")  # as those that people use
    config = load_config({"model_type": kind, **sizes, "tie_word_embeddings": tied})
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values["model"] = {"kind": "transformers", "config": config.canonical_values}
    values["data"] |= {"sequence_length": 16}
    spec = resolve(RunSpec.model_validate(values))
    groups = {
        f"peer-{stage}-{replica}": stack.enter_context(rank_threads(spec, num_ranks))
        for stage, counts in ranks.items()
        for replica, num_ranks in enumerate(counts)
        if num_ranks > 1
    }
    _train(spec, ranks, groups, is_tied=tied)


def test_replicas_of_which_some_share_sequences(tmp_path: Path, stack: ExitStack) -> None:
    """Over ranks of threads, beside one of one rank. One of the stages has such a peer alone."""
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values["data"] |= {"document_mask": True}
    spec = RunSpec.model_validate(values)
    ranks = {0: (1, 2), 1: (3,)}
    groups = {
        f"peer-{stage}-{replica}": stack.enter_context(
            rank_threads(spec, num_ranks, mode="context")
        )
        for stage, counts in ranks.items()
        for replica, num_ranks in enumerate(counts)
        if num_ranks > 1
    }
    _train(spec, ranks, groups)


def test_replicas_of_which_some_divide_experts(tmp_path: Path, stack: ExitStack) -> None:
    """Over ranks of threads, beside one of one rank. One of the stages has such a peer alone."""
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values["data"] |= {"document_mask": True}
    values["model"] |= EXPERTS
    spec = RunSpec.model_validate(values)
    ranks = {0: (1, 2), 1: (3,)}
    groups = {
        f"peer-{stage}-{replica}": stack.enter_context(
            rank_threads(spec, num_ranks, mode="experts")
        )
        for stage, counts in ranks.items()
        for replica, num_ranks in enumerate(counts)
        if num_ranks > 1
    }
    _train(spec, ranks, groups)


@pytest.mark.parametrize("mode", ["context", "experts"])
def test_replicas_of_which_some_are_rows(tmp_path: Path, stack: ExitStack, mode: str) -> None:
    """Two rows of two ranks that are threads, beside a replica of one."""
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values["data"] |= {"document_mask": True}
    values["model"] |= EXPERTS if mode == "experts" else {}
    spec = RunSpec.model_validate(values)
    rows = stack.enter_context(rank_threads(spec, 4, mode=mode, row_size=2))
    _train(spec, {0: (1, 4), 1: (1,)}, {"peer-0-1": rows})


def _train(
    spec: RunSpec,
    ranks: dict[int, tuple[int, ...]],
    groups: dict[str, LocalGroup],
    is_tied: bool = False,
) -> None:
    """All rounds, and compares with one process. `groups`: of peers with several ranks; `is_tied`:
    embedding and output matrix are one."""

    async def scenario(swarm: Swarm) -> None:
        for stage, counts in ranks.items():
            for name in (f"peer-{stage}-{i}" for i in range(len(counts))):
                build = functools.partial(_build, spec, groups[name]) if name in groups else None
                swarm.start(name, stage=stage, build=build)
        await swarm.until_round(ROUNDS)
        digests: dict[int, set[bytes]] = {}
        for member in swarm.members.values():
            replica = member.peer.replica
            assert replica is not None
            found = b"".join(replica.stage.digest(j) for j in range(replica.num_shards))
            digests.setdefault(replica.index, set()).add(found)
        assert all(len(found) == 1 for found in digests.values()), "replicas differ"
        if is_tied:
            check_tied(swarm, ROUNDS)
            return
        expected = _expected(spec, swarm.counted)
        assert relative_difference(swarm.parameters(), expected) < 1e-4

    in_virtual_time(scenario, spec)


def _expected(spec: RunSpec, counted: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """The parameters of a plain loop over the same microbatches."""
    if spec.sync.mode == "zero":
        return replay(spec, counted, ROUNDS).state_dict()
    oracle = DelayedReference(spec)
    for r in range(ROUNDS):
        oracle.step(r, sorted(counted[r]))
    oracle.finish()
    return oracle.trainer.state_dict()


def _build(spec: RunSpec, group: LocalGroup, stage_index: int) -> tuple[Any, Any]:
    known = {"context": build_context_parallel_stage, "experts": build_expert_stage}
    build = known.get(group.options["mode"], build_parallel_stage)
    if group.options["row_size"] > 1:
        build = build_row_stage
    stage = build(spec, stage_index, group)
    return stage, build_optimizer(spec, stage)
