"""A swarm trains adapters as a plain loop of PEFT does."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from swarmnet.protocol.membership.records import RoundCount
from swarmnet.training.models.initial_weights import ModelWeights
from tests.oracles.plain_peft import PlainPeftTrainer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference
from tests.swarm.initial.test_weights import folder_of
from tests.swarm.lora_runs import LORA, initial_adapters, lora_run
from tests.training.test_families import folder_of as family_folder

ROUNDS, FEW_ROUNDS = 20, 8


class Losses:
    """Mean losses of a swarm's rounds, from the records of its feeders as they come."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._counts: dict[tuple[str, int], RoundCount] = {}

    def until(self, rounds: int) -> bool:
        """Whether all peers have come to a round; to be asked often."""
        for name, member in self._swarm.members.items():
            for count in member.peer.gossip.own.counts:
                self._counts[name, count.round] = count
        return all(r >= rounds for r in self._swarm.rounds())

    def of(self, round_index: int) -> float:
        counts = [c for (_, r), c in self._counts.items() if r == round_index]
        return sum(c.loss_sum for c in counts) / sum(c.tokens for c in counts)


@pytest.mark.parametrize("is_tied", [True, False])
def test_losses_and_adapters_are_those_of_peft(tmp_path: Path, is_tied: bool) -> None:
    folder = folder_of(tmp_path / "model", tie_word_embeddings=is_tied)
    spec, hashes = lora_run(folder, tmp_path, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("has", stage=0, weights=ModelWeights(spec, hashes, folder))
        swarm.start("a", stage=1, weights=ModelWeights(spec, hashes, None))
        await swarm.until_round(0)
        for name, stage in (("b", 0), ("c", 1)):
            swarm.start(name, stage=stage, weights=ModelWeights(spec, hashes, None))
        losses = Losses(swarm)
        await swarm.until(lambda: losses.until(ROUNDS))
        await swarm.until_round(ROUNDS)
        losses.until(ROUNDS)
        assert swarm.total("samples_lost") == 0
        start = LlamaForCausalLM.from_pretrained(folder).state_dict()
        trainer = PlainPeftTrainer(spec, start, initial_adapters(spec), swarm.data)
        for r in range(ROUNDS):
            expected = trainer.step(r, sorted(swarm.counted[r]))
            assert losses.of(r) == pytest.approx(expected, rel=1e-4)
        assert losses.of(ROUNDS - 1) < losses.of(0) - 0.1, "it has learnt something"
        assert relative_difference(swarm.parameters(), trainer.parameters()) < 1e-3

    in_virtual_time(scenario, spec)


def test_adapters_on_experts_are_those_of_peft(tmp_path: Path) -> None:
    """Four peers, two of each stage, make the updates of one machine."""
    folder = tmp_path / "model"
    mixture = family_folder(folder, "mixtral", num_local_experts=4, initializer_range=0.2)
    start = mixture.state_dict()
    lora = {**LORA, "target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    spec, hashes = lora_run(folder, tmp_path, rounds=FEW_ROUNDS, lora=lora)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("has", stage=0, weights=ModelWeights(spec, hashes, folder))
        swarm.start("a", stage=1, weights=ModelWeights(spec, hashes, None))
        await swarm.until_round(0)
        for name, stage in (("b", 0), ("c", 1)):
            swarm.start(name, stage=stage, weights=ModelWeights(spec, hashes, None))
        losses = Losses(swarm)
        await swarm.until(lambda: losses.until(FEW_ROUNDS))
        await swarm.until_round(FEW_ROUNDS)
        losses.until(FEW_ROUNDS)
        trainer = PlainPeftTrainer(spec, start, initial_adapters(spec), swarm.data)
        for r in range(FEW_ROUNDS):
            expected = trainer.step(r, sorted(swarm.counted[r]))
            assert losses.of(r) == pytest.approx(expected, rel=1e-4)
        assert losses.of(FEW_ROUNDS - 1) < losses.of(0), "it has learnt something"
        assert relative_difference(swarm.parameters(), trainer.parameters()) < 1e-3

    in_virtual_time(scenario, spec)
