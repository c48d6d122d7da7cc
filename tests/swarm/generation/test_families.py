"""Families with linear attention write what transformers writes, from stages that may have no
attention at all; and what cannot be written is said to be so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.spec import RunSpec
from swarmnet.training.models.model_config import load_config
from swarmnet.training.models.shrunk import shrunk_configs
from swarmnet.training.passes.generation import StageGeneration
from swarmnet.training.resolving import resolve
from tests.swarm.generation.test_generating import Asker, exported, start, working, write
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.training.test_families import FAMILIES, INDEXED, SIZES, canonical

ROUNDS = 3
PROMPT = list(b"abc def gh\nabcde fgh") * 5
"""More than fits into one pass."""


def spec_of(tmp_path: Path, config: dict[str, Any]) -> RunSpec:
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, num_layers=4).model_dump()
    values["model"] = {"kind": "transformers", "config": config}
    values["data"] |= {"sequence_length": 16}
    return resolve(RunSpec.model_validate(values))


async def trained(swarm: Swarm, folder: Path, num_peers: int = 4) -> None:
    start(swarm, folder, num_peers)
    await swarm.until_round(ROUNDS)
    await swarm.until(lambda: swarm.total("checkpoints") >= 2 * ROUNDS)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "minimax"])
def test_linear_attention_writes_what_the_exported_model_writes(tmp_path: Path, kind: str) -> None:
    """Also where one of the replicas dies: another one is given all tokens again, in passes of its
    own."""
    spec = spec_of(tmp_path, canonical(kind, **{**SIZES, **FAMILIES[kind]}))

    async def scenario(swarm: Swarm) -> None:
        await trained(swarm, tmp_path)
        async with Asker(swarm) as asker:
            text = asker.text()
            written = await write(text, PROMPT, 8)
            swarm.kill(working(swarm, 1))
            written += await write(text, written[-1:], 8)
            assert not asker.lines
            assert text.round == ROUNDS
            await text.close()
        first = exported(tmp_path, ROUNDS, PROMPT, 16)
        assert written[:8] == first[:8]
        assert written[8:] == exported(tmp_path, ROUNDS, [*PROMPT, *written[:8], written[7]], 8)

    in_virtual_time(scenario, spec)


def test_a_family_that_writes_nothing_says_so_and_not_to_try_again(tmp_path: Path) -> None:
    config = canonical("deepseek_v32", num_hidden_layers=4, **INDEXED)
    small = next(s for s in shrunk_configs(config) if s["num_key_value_heads"] == 4)
    spec = spec_of(tmp_path, load_config({**small, "vocab_size": 256}).canonical_values)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, None, 2)
        await swarm.until_round(1)
        async with Asker(swarm) as asker:
            with pytest.raises(
                UserError, match=r"stage 0 does not write: .*this peer writes no tex"
            ):
                await asker.text().extend([1], 1)

    in_virtual_time(scenario, spec)


def test_a_pass_that_fails_everywhere_is_not_to_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extend(self: Any, *args: Any, **options: Any) -> Any:
        raise ValueError("the layer cannot")

    monkeypatch.setattr(StageGeneration, "extend", extend)

    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(2)
        async with Asker(swarm) as asker:
            with pytest.raises(
                UserError, match=r"stage 0 does not write: .*ValueError: the layer ca"
            ):
                await asker.text().extend([1], 1)

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=2, rounds=2))
