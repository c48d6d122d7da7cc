"""Texts that the model writes while it trains: production peers, virtual time, memory transport."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peer.commands.export import Wanted, export_checkpoints
from swarmnet.protocol.generation import IDLE_S, pass_tokens
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.generation.remote_text import RemoteText
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.recovery.restart import Disk
from swarmnet.training.checkpoint import CheckpointStore
from tests.swarm.harness import OpenSigner, Swarm, in_virtual_time, tiny_spec

ROUNDS = 60
PROMPT = list(b"abc def gh\nabcde fgh")
LONG_PROMPT = PROMPT * 5
"""More than fits into one pass."""
NEW_TOKENS = 24


class Asker:
    """An observer of the run."""

    def __init__(self, swarm: Swarm, name: str = "asker") -> None:
        transport = swarm.hub.transport(name)
        transport.set_run(swarm.spec.run_id)
        own = Record(name, swarm.spec.run_id, 1, 0, state=OBSERVING)
        self.gossip = Gossip(transport, View(name), OpenSigner(), own, random.Random(0), quiet=True)
        self.spec, self.lines = swarm.spec, list[str]()

    async def __aenter__(self) -> Asker:
        await self.gossip.reconcile("peer-0")
        self._life = asyncio.ensure_future(self.gossip.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    def text(self, name: str = "text", max_tokens: int = 200) -> RemoteText:
        pipeline = self.spec.pipeline
        return RemoteText(
            self.gossip,
            pipeline.num_stages,
            name,
            pass_tokens=pass_tokens(pipeline.microbatch * self.spec.sequence_length),
            max_tokens=max_tokens,
            tell=self.lines.append,
        )


async def write(text: RemoteText, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedily."""
    written: list[int] = []
    new = list(prompt)
    for _ in range(num_tokens):
        values, tokens = await text.extend(new, num_logits=1)
        assert values.shape == tokens.shape == (1, 1)
        new = [struct.unpack("<i", bytes(memoryview(tokens.data).cast("B")))[0]]
        written += new
    return written


def start(swarm: Swarm, folder: Path, num_peers: int = 4) -> None:
    for i in range(num_peers):
        store = CheckpointStore(folder / f"peer-{i}", swarm.spec, every=1, keep=ROUNDS)
        swarm.start(f"peer-{i}", stage=i % 2, disk=Disk(store, InlineWorker(), 1))


def exported(folder: Path, round_index: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the exported model of a round writes."""
    out = folder / f"model-{round_index}"
    dirs = sorted(folder.glob("peer-*"))
    export_checkpoints(dirs, out, Wanted(round=round_index, dtype="fp32"))
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    inputs = torch.tensor([list(prompt)])
    made = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(t) for t in made[0, len(prompt) :]]


def spec_of(folder: Path, mode: str = "zero", rounds: int = ROUNDS) -> RunSpec:
    sync: dict[str, Any] = {"mode": mode}
    if mode == "local":
        sync["local_steps"] = 3
    return tiny_spec(folder, num_stages=2, rounds=rounds, sync=sync)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local"])
def test_the_text_is_that_of_the_exported_model_of_one_round(tmp_path: Path, mode: str) -> None:
    """Though rounds end while it is written, with whole numbers of passes and parts of one."""
    found: dict[int, list[int]] = {}

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path)
        await swarm.until_round(5)
        async with Asker(swarm) as asker:
            text = asker.text()
            written = await write(text, LONG_PROMPT, NEW_TOKENS)
            found[text.round] = written
            assert min(swarm.rounds()) > text.round, "no round has ended meanwhile"
            assert asker.lines == []
            await text.close()
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec_of(tmp_path, mode))
    for round_index, written in found.items():
        assert written == exported(tmp_path, round_index, LONG_PROMPT, NEW_TOKENS)
