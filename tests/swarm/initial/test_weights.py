"""A run begins from the weights of a model's folder, which one peer has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnet.errors import SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.byte_tokenizer import byte_tokenizer_files
from swarmnet.training.models.initial_weights import ModelWeights
from swarmnet.training.resolving import resolve_run
from swarmnet.wire import Array
from tests.oracles.plain_transformers import PlainTrainer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec

ROUNDS = 4
HEAD = "lm_head.weight"


def folder_of(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A small tied model with a tokenizer of bytes."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
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
    LlamaForCausalLM(LlamaConfig(**{**values, **changes})).save_pretrained(path)
    for name, data in byte_tokenizer_files(64).items():
        (path / name).write_bytes(data)
    return path


def begun_from(folder: Path, tmp_path: Path) -> tuple[RunSpec, bytes]:
    """A run of two stages from a folder, and the list of its shards' hashes."""
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS).model_dump()
    values["model"] = {"from": str(folder)}
    values["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    resolved = resolve_run(RunSpec.model_validate(values))
    return resolved.spec, resolved.contents["weights.sha256"]


@pytest.fixture
def origin(tmp_path: Path) -> tuple[Path, RunSpec, bytes]:
    folder = folder_of(tmp_path / "model")
    return folder, *begun_from(folder, tmp_path)


def test_the_identity_covers_what_it_began_from(tmp_path: Path) -> None:
    specs = [begun_from(folder_of(tmp_path / str(seed), seed), tmp_path)[0] for seed in (0, 0, 1)]
    assert specs[0].model.weights == specs[1].model.weights
    assert specs[0].run_id != specs[2].run_id
    assert specs[0].sequence_length == 16
    assert RunSpec.from_canonical(specs[0].canonical()) == specs[0]
    assert "from" not in specs[0].canonical().decode()


def test_one_peer_gives_them_and_the_update_is_that_of_one_machine(
    origin: tuple[Path, RunSpec, bytes],
) -> None:
    folder, spec, hashes = origin

    async def scenario(swarm: Swarm) -> None:
        swarm.start("has", stage=1, weights=ModelWeights(spec, hashes, folder), feeds=False)
        for name, stage in (("b", 0), ("c", 1)):
            swarm.start(name, stage=stage, weights=ModelWeights(spec, hashes, None), feeds=False)
        await swarm.until_round(0)  # nobody comes too late for the first round
        swarm.start("a", stage=0, weights=ModelWeights(spec, hashes, None))
        await swarm.until_round(ROUNDS)
        found = swarm.parameters()
        assert torch.equal(found.pop(HEAD), found["model.embed_tokens.weight"])
        start = LlamaForCausalLM.from_pretrained(folder).state_dict()
        trainer = PlainTrainer(spec, start, swarm.data)
        for r in range(ROUNDS):
            trainer.step(r, sorted(swarm.counted[r]))
        expected = trainer.parameters()
        expected.pop(HEAD)
        assert relative_difference(found, expected) < 1e-4

    in_virtual_time(scenario, spec)


def test_nothing_begins_without_them_and_a_line_says_what_is_missing(
    origin: tuple[Path, RunSpec, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    folder, spec, hashes = origin

    async def scenario(swarm: Swarm) -> None:
        for name, stage in (("a", 0), ("b", 1)):
            swarm.start(name, stage=stage, weights=ModelWeights(spec, hashes, None))
        await asyncio.sleep(60.0)
        assert swarm.rounds() == [-1, -1]
        assert "of its initial shards; a peer that has the model's folder gives them" in caplog.text
        swarm.start("has", stage=1, weights=ModelWeights(spec, hashes, folder))
        await swarm.until_round(ROUNDS)

    with caplog.at_level(logging.WARNING, "swarmnet"):
        in_virtual_time(scenario, spec)


def test_other_weights_are_refused(origin: tuple[Path, RunSpec, bytes], tmp_path: Path) -> None:
    _, spec, hashes = origin
    other = ModelWeights(spec, hashes, folder_of(tmp_path / "other", seed=5))
    assert other.shard(0, 0) is None
    assert not other.is_here
    false = Array("float32", (4096,), bytes(4 * 4096))
    assert not other.is_right(0, 0, false)
    assert not other.is_right(7, 0, false)
    with pytest.raises(SpecError, match="another length"):
        ModelWeights(spec, hashes[:-1], None)
    with pytest.raises(SpecError, match=r"it has no tensor for|not \("):
        ModelWeights(spec, hashes, folder_of(tmp_path / "small", num_hidden_layers=2))
