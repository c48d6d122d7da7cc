"""Texts that the model writes while it trains: production peers, virtual time, memory transport."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import math
import random
import struct
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet.errors import Busy, NotNow, NotReady, RemoteError
from swarmnet.methods.microbatch import GenerateRequest
from swarmnet.protocol.generation import (
    IDLE_S,
    LONGEST_S,
    LONGEST_TEXT,
    MAX_SESSIONS_EACH,
    MAX_UNKNOWN_SESSIONS,
    SLOW_AFTER_S,
    exact_pass_tokens,
    pass_tokens,
)
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.exporting.models import Wanted, export_checkpoints
from swarmnet.runtime.writing.sampling import read_logits
from swarmnet.runtime.writing.writer import longest_text
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.generation.remote_text import RemoteText
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.recovery.restart import Disk
from swarmnet.training.arrays import to_tensor
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.training.passes.generation import StageGeneration
from swarmnet.training.stage import build_stage
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.oracles.reference import ReferenceTrainer
from tests.swarm import harness
from tests.swarm.harness import (
    OpenSigner,
    Swarm,
    in_virtual_time,
    relative_difference,
    tiny_spec,
)
from tests.training.specs import small_spec

ROUNDS = 20
PROMPT = list(b"abc def gh\nabcde fgh")
LONG_PROMPT = PROMPT * 5
"""More than fits into one pass."""
NEW_TOKENS = 24
BUSY_ROUNDS, BUSY_BATCH = 10, 64
"""Of a run whose devices are hardly ever idle."""


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

    def text(self, name: str = "text", max_tokens: int = 200, *, exact: bool = False) -> RemoteText:
        pipeline = self.spec.pipeline
        part_of = exact_pass_tokens if exact else pass_tokens
        return RemoteText(
            self.gossip,
            pipeline.num_stages,
            name,
            pass_tokens=part_of(pipeline.microbatch * self.spec.sequence_length),
            max_tokens=max_tokens,
            check=functools.partial(read_logits, vocabulary=256),
            tell=self.lines.append,
            exact=exact,
        )

    async def call(
        self, peer_id: str, request: GenerateRequest, *arrays: Array
    ) -> tuple[Array, ...]:
        """At one replica, without a text."""
        message = Message(request, arrays)
        answer = await self.gossip.transport.call(peer_id, "generate", message, timeout_s=60.0)
        return answer.arrays

    def notify(self, peer_id: str, request: GenerateRequest) -> None:
        self.gossip.transport.notify(peer_id, "generate", Message(request))


def opening(stage: int = 0) -> GenerateRequest:
    return GenerateRequest(stage, "text", opens=True, round=0, max_tokens=200, mixes=True)


def ending(stage: int = 0) -> GenerateRequest:
    return GenerateRequest(stage, "text", ends=True)


def tokens_of(tokens: Sequence[int]) -> Array:
    return Array("int32", (1, len(tokens)), struct.pack(f"<{len(tokens)}i", *tokens))


def held_bytes(swarm: Swarm) -> list[float]:
    """For texts, by peer."""
    return [m.peer.resource_limits.text_bytes for m in swarm.members.values()]


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


def start(swarm: Swarm, folder: Path | None = None, num_peers: int = 4) -> None:
    """`folder`: where each round is saved."""
    for i in range(num_peers):
        disk = None
        if folder is not None:
            store = CheckpointStore(folder / f"peer-{i}", swarm.spec, every=1, keep=ROUNDS)
            disk = Disk(store, InlineWorker(), 1)
        swarm.start(f"peer-{i}", stage=i % 2, disk=disk)


def exported_model(folder: Path, round_index: int) -> Any:
    out = folder / f"model-{round_index}"
    if not out.exists():
        dirs = sorted(folder.glob("peer-*"))
        export_checkpoints(dirs, out, Wanted(round=round_index, dtype="fp32"))
    return AutoModelForCausalLM.from_pretrained(out)


def exported(folder: Path, round_index: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the exported model of a round writes."""
    model = exported_model(folder, round_index)
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


def on_one_machine(
    spec: RunSpec, folder: Path, round_index: int, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """What the parameters of a round write in one process, coded where stages are cut."""
    trainer = ReferenceTrainer(spec)
    trainer.load_state_dict(exported_model(folder, round_index).state_dict())
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(trainer.model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def spec_of(folder: Path, mode: str = "zero", rounds: int = ROUNDS, **pipeline: Any) -> RunSpec:
    """The learning rate is such that the models of two rounds do not write the same. `pipeline`: as
    `tiny_spec` takes it."""
    sync: dict[str, Any] = {"mode": mode}
    if mode == "local":
        sync["local_steps"] = 3
    values = tiny_spec(folder, num_stages=2, rounds=rounds, sync=sync, **pipeline).model_dump()
    values["optimizer"] |= {"learning_rate": 0.05, "warmup_rounds": 0}
    return RunSpec.model_validate(values)


@pytest.mark.parametrize(
    ("mode", "codec"), [("zero", "none"), ("delayed", "none"), ("local", "none"), ("zero", "int4")]
)
def test_the_text_is_that_of_the_exported_model_of_one_round(
    tmp_path: Path, mode: str, codec: str
) -> None:
    """Though rounds end while it is written, with whole numbers of passes and parts of one, and
    whatever the codec of training is."""
    found: dict[int, list[int]] = {}

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path)
        await swarm.until_round(5)
        async with Asker(swarm) as asker:
            text = asker.text(exact=codec != "none")
            written = await write(text, LONG_PROMPT, NEW_TOKENS)
            found[text.round] = written
            assert min(swarm.rounds()) > text.round, "no round has ended meanwhile"
            assert asker.lines == []
            await text.close()
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec_of(tmp_path, mode, codec=codec))
    for round_index, written in found.items():
        assert written == exported(tmp_path, round_index, LONG_PROMPT, NEW_TOKENS)
        assert written != exported(tmp_path, ROUNDS, LONG_PROMPT, NEW_TOKENS)


def test_logits_are_those_of_one_machine_that_codes_the_same(tmp_path: Path) -> None:
    spec, found = spec_of(tmp_path, codec="int8"), dict[int, list[torch.Tensor]]()

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path)
        await swarm.until_round(5)
        async with Asker(swarm) as asker:
            text = asker.text()
            made = [await text.extend(tokens) for tokens in (LONG_PROMPT, *([t] for t in PROMPT))]
            found[text.round] = [to_tensor(logits) for (logits,) in made]
            assert min(swarm.rounds()) > text.round
        await swarm.until_round(ROUNDS)

    in_virtual_time(scenario, spec)
    ((round_index, logits),) = found.items()
    model = exported_model(tmp_path, round_index)
    trainer = ReferenceTrainer(spec)
    trainer.load_state_dict(model.state_dict())
    tokens = torch.tensor([LONG_PROMPT + PROMPT])
    with torch.no_grad():
        expected, uncoded = trainer.model(tokens)[0], model(tokens).logits[0]
    last = slice(len(LONG_PROMPT) - 1, None)
    error = (torch.cat(logits) - expected[last]).abs().max()
    coded = (uncoded[last] - expected[last]).abs().max()
    assert error < 0.01 * coded


@pytest.mark.parametrize(("victim", "codec"), [(0, "none"), (1, "none"), (1, "bf16"), (1, "int8")])
def test_a_peer_that_dies_costs_no_token_and_changes_none(
    tmp_path: Path, victim: int, codec: str
) -> None:
    """The replica in reserve has the same round's parameters, though the others are further."""
    spec, found = spec_of(tmp_path, codec=codec), dict[int, list[int]]()

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path, 6)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            text = asker.text()
            written = await write(text, PROMPT, 8)
            await swarm.until(lambda: min(swarm.rounds()) > text.round)
            swarm.kill(working(swarm, victim))
            written += await write(text, written[-1:], NEW_TOKENS - 8)
            found[text.round] = written
            assert asker.lines == []
        await swarm.until_round(ROUNDS)

    in_virtual_time(scenario, spec)
    for round_index, written in found.items():
        assert written == on_one_machine(spec, tmp_path, round_index, PROMPT, NEW_TOKENS)
        assert written != on_one_machine(spec, tmp_path, ROUNDS, PROMPT, NEW_TOKENS)


def of_older_version(swarm: Swarm, name: str) -> None:
    """A peer that knows of no exact passes, and no key of them."""
    generation = swarm.members[name].peer.generation

    async def answers(request: Request) -> Message:
        body = dataclasses.replace(request.message.body, exact=False)
        message = Message(body, request.message.arrays)
        answer = await generation.on_generate(dataclasses.replace(request, message=message))
        return Message(dataclasses.replace(answer.body, exact=False), answer.arrays)

    swarm.members[name].peer.transport.handle("generate", answers)


def test_older_peers_have_the_text_coded_and_that_is_said(tmp_path: Path) -> None:
    """Only where there is no other replica, from the beginning or from then on."""
    spec, found = spec_of(tmp_path, codec="int8", rounds=4), dict[str, list[torch.Tensor]]()

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path, 6)
        await swarm.until_round(4)
        async with Asker(swarm) as asker:
            for name in ("peer-1", "peer-3"):
                of_older_version(swarm, name)
            text = asker.text("with one", exact=True)
            found["exact"] = [to_tensor((await text.extend(LONG_PROMPT))[0])]
            assert asker.lines == []
            await text.extend(PROMPT[:1])
            swarm.kill("peer-5")
            found["coded"] = [to_tensor((await text.extend(PROMPT[1:2]))[0])]
            assert any("stage 1 have an older version" in line for line in asker.lines)
            await text.close()
            asker.lines.clear()
            later = asker.text("with none", exact=True)
            await later.extend(LONG_PROMPT + PROMPT[:1])
            found["coded"].append(to_tensor((await later.extend(PROMPT[1:2]))[0]))
            assert any("stage 1 have an older version" in line for line in asker.lines)

    in_virtual_time(scenario, spec)
    model, trainer = exported_model(tmp_path, 4), ReferenceTrainer(spec)
    trainer.load_state_dict(model.state_dict())
    tokens = torch.tensor([LONG_PROMPT + PROMPT[:2]])
    with torch.no_grad():
        exact, coded = model(tokens[:, :-2]).logits[0, -1:], trainer.model(tokens)[0, -1:]
    torch.testing.assert_close(found["exact"][0], exact, rtol=1e-4, atol=1e-4)
    for logits in found["coded"]:
        assert (logits - coded).abs().max() < 0.01 * (
            model(tokens).logits[0, -1:] - coded
        ).abs().max()


def test_where_no_replica_has_the_round_the_text_goes_on_with_another(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            text = asker.text()
            written = await write(text, PROMPT, 4)
            first = text.round
            await swarm.until(lambda: min(swarm.rounds()) > first + 1)
            newcomer = swarm.start("peer-5", stage=1)
            await swarm.until(lambda: newcomer.gossip.own.state == ACTIVE)
            for name in ("peer-1", "peer-3"):  # both others of stage 1
                swarm.kill(name)
            written += await write(text, written[-1:], 4)
            assert len(written) == 8
            assert text.round > first
            assert any(f"instead of {first}" in line for line in asker.lines)

    in_virtual_time(scenario, spec_of(tmp_path))


def test_without_room_for_a_copy_rounds_are_mixed_and_that_is_said(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        for i in (1, 3):
            peer = swarm.members[f"peer-{i}"].peer
            peer.resource_limits.room_bytes = lambda stage_index: 50_000.0
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            text = asker.text()
            written = await write(text, PROMPT, NEW_TOKENS)
            assert len(written) == NEW_TOKENS
            assert len(asker.lines) == 1
            assert "stage 1 keeps no copy" in asker.lines[0]
            for i in range(4):
                peer = swarm.members[f"peer-{i}"].peer
                assert peer.resource_limits.text_bytes <= peer.resource_limits.room_bytes(i % 2)

    in_virtual_time(scenario, spec_of(tmp_path))


def test_what_nobody_goes_on_with_is_dropped(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            text = asker.text()
            await write(text, PROMPT, 4)
            held = [m.peer.resource_limits.text_bytes for m in swarm.members.values()]
            assert min(held) > 0
            parameters = 4.0 * max(map(num_parameters, (m.peer for m in swarm.members.values())))
            assert max(held) < 2 * parameters  # one copy, and little beside
            await asyncio.sleep(IDLE_S + 5.0)
            assert not any(m.peer.resource_limits.text_bytes for m in swarm.members.values())
            written = await write(text, PROMPT, 4)  # a new round, and no token is missing
            assert len(written) == 4

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def test_texts_share_a_round_and_end_their_sessions(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            first, second = asker.text("first"), asker.text("second")
            one = await write(first, PROMPT, 4)
            await swarm.until(lambda: min(swarm.rounds()) > first.round)
            assert await write(second, PROMPT, 4) == one
            assert second.round == first.round
            await first.close()
            await second.close()
            await asyncio.sleep(1.0)
            assert not any(m.peer.resource_limits.text_bytes for m in swarm.members.values())

    in_virtual_time(scenario, spec_of(tmp_path))


def test_one_machine_may_not_have_many_texts(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            texts = [asker.text(f"text {i}") for i in range(MAX_SESSIONS_EACH + 1)]
            for text in texts[:-1]:
                await write(text, PROMPT, 1)
            with pytest.raises(NotNow, match="too many texts"):
                await write(texts[-1], PROMPT, 1)
            await texts[0].close()
            assert await write(texts[-1], PROMPT, 1)

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def test_names_hold_no_places_that_others_need(tmp_path: Path) -> None:
    """However often they say that their texts go on."""

    async def scenario(swarm: Swarm) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        names = [Asker(swarm, f"name-{i}") for i in range(MAX_UNKNOWN_SESSIONS)]
        honest, member = Asker(swarm), swarm.members["peer-1"].peer.transport
        for name in names:
            await name.call("peer-0", opening())
        with pytest.raises(Busy, match="too many texts"):
            await honest.call("peer-0", opening())
        await member.call("peer-0", "generate", Message(opening()), timeout_s=60.0)
        await asyncio.sleep(SLOW_AFTER_S)
        for name in names:
            await name.call("peer-0", GenerateRequest(0, "text"))
        await honest.call("peer-0", opening(), tokens_of(PROMPT))
        with pytest.raises(NotReady, match="not known"):
            await names[0].call("peer-0", GenerateRequest(0, "text"))
        await member.call("peer-0", "generate", Message(GenerateRequest(0, "text")), timeout_s=60.0)

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def test_training_goes_first_and_its_numbers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen texts at a time for the whole run, with passes as long as those of microbatches: the
    same parameters, hardly later."""
    monkeypatch.setattr(harness, "OTHER_S", harness.FORWARD_S)
    ends: list[float] = []
    parameters: list[dict[str, torch.Tensor]] = []

    async def scenario(swarm: Swarm, num_texts: int) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            askers = [
                await stack.enter_async_context(Asker(swarm, f"asker {i}"))
                for i in range(num_texts // MAX_SESSIONS_EACH)
            ]
            writing = [
                asyncio.ensure_future(write(asker.text(f"text {i}", 4000), PROMPT, 3000))
                for asker in askers
                for i in range(MAX_SESSIONS_EACH)
            ]
            begin = loop.time()
            await swarm.until_round(BUSY_ROUNDS)
            ends.append(loop.time() - begin)
            parameters.append(swarm.parameters())
            for each in writing:
                assert not each.done()
                each.cancel()
            await asyncio.gather(*writing, return_exceptions=True)

    for num_texts in (0, 3 * MAX_SESSIONS_EACH):
        spec = spec_of(tmp_path, rounds=BUSY_ROUNDS, global_batch=BUSY_BATCH)
        in_virtual_time(lambda swarm, n=num_texts: scenario(swarm, n), spec)  # type: ignore[misc]
    assert relative_difference(parameters[1], parameters[0]) < 1e-5
    assert ends[1] < 1.3 * ends[0]


def working(swarm: Swarm, stage: int) -> str:
    """The peer of a stage that has been sent most of the text."""
    names = [n for n, m in swarm.members.items() if m.peer.gossip.own.stage == stage]

    def sent_bytes(name: str) -> int:
        return swarm.members[name].peer.transport.traffic.received_bytes.get("generate", 0)

    assert max(map(sent_bytes, names)) > min(map(sent_bytes, names))
    return max(names, key=sent_bytes)


def num_parameters(peer: Peer) -> int:
    assert peer.replica is not None
    return sum(peer.replica.stage.shard_sizes)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_stage_that_is_left_is_not_kept_for_its_texts(tmp_path: Path, is_open: bool) -> None:
    """Whether a text is being written there or has ended: a paused peer's memory is the
    machine's."""

    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            text = asker.text()
            await write(text, PROMPT, 2)
            peer = next(m.peer for m in swarm.members.values() if m.peer.resource_limits.text_bytes)
            if not is_open:
                await text.close()
                await swarm.until(lambda: not peer.resource_limits.text_bytes)
            assert peer.replica is not None
            stage = weakref.ref(peer.replica.stage)
            peer.resource_limits.why_paused = "its owner paused it"
            peer.resource_limits.tell()
            await swarm.until(lambda: peer.gossip.own.paused != "")
            gc.collect()
            assert stage() is None
            assert not peer.resource_limits.text_bytes
            written = await write(asker.text("another"), PROMPT, 4)
            assert len(written) == 4

    in_virtual_time(scenario, spec_of(tmp_path))


def test_where_all_peers_are_paused_that_is_said(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(1)
        async with Asker(swarm) as asker:
            for member in swarm.members.values():
                member.peer.resource_limits.why_paused = "its owner paused it"
                member.peer.resource_limits.tell()
            await swarm.until(lambda: all(m.peer.gossip.own.paused for m in swarm.members.values()))
            with pytest.raises(NotNow, match="stage 0 is known; 4 peers paused, and may serve"):
                await write(asker.text(), PROMPT, 1)

    in_virtual_time(scenario, spec_of(tmp_path))


def test_a_round_that_begins_while_it_is_copied_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that was open ahead begins whatever the device does, and what it copies may be of
    both: the text is begun by another one."""
    copy, num_copies = StageGeneration.copy, 0

    async def scenario(swarm: Swarm) -> None:
        def copies(self: StageGeneration, shards: Sequence[Array]) -> None:
            nonlocal num_copies
            copy(self, shards)
            num_copies += 1
            for member in swarm.members.values():
                replica = member.peer.replica
                if num_copies == 1 and replica and replica.stage.generation is self:
                    replica.transitions.changes += 2

        monkeypatch.setattr(StageGeneration, "copy", copies)
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            text = asker.text()
            assert await write(text, PROMPT, 4)
            assert num_copies > 2, "one of each stage, and the one that did not do"
            held = [m.peer.resource_limits.text_bytes > 0 for m in swarm.members.values()]
            assert held == [True, True]

    in_virtual_time(scenario, spec_of(tmp_path))


def test_a_text_that_ends_while_its_pass_waits_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_passes, extend = 0, StageGeneration.extend

    async def scenario(swarm: Swarm) -> None:
        def extends(self: StageGeneration, *args: Any, **options: Any) -> Any:
            nonlocal num_passes
            num_passes += 1
            return extend(self, *args, **options)

        monkeypatch.setattr(StageGeneration, "extend", extends)
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            await asker.call("peer-0", opening())
            monkeypatch.setattr(harness, "OTHER_S", 5.0)
            first = asyncio.ensure_future(
                asker.call("peer-0", GenerateRequest(0, "text"), tokens_of(PROMPT))
            )
            await asyncio.sleep(1.0)
            asker.notify("peer-0", ending())
            with pytest.raises(NotReady, match="has ended"):
                await first
            assert num_passes == 0
            assert not any(held_bytes(swarm))

    in_virtual_time(scenario, spec_of(tmp_path))


def test_a_text_that_ends_during_its_first_pass_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's thread makes its keys and values when the event loop has ended it."""
    passes, extend = list[tuple[StageGeneration, Any, Array]](), StageGeneration.extend

    async def scenario(swarm: Swarm) -> None:
        def extends(
            self: StageGeneration, session: Any, inputs: Array, *args: Any, **options: Any
        ) -> Any:
            passes.append((self, session, inputs))
            service = swarm.members["peer-0"].peer.generation
            message = Message(ending())
            request = Request("asker", swarm.spec.run_id, "generate", message, lambda note: None)
            with pytest.raises(StopIteration):
                service.on_generate(request).send(None)
            return extend(self, session, inputs, *args, **options)

        start(swarm, num_peers=2)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            await asker.call("peer-0", opening())
            monkeypatch.setattr(StageGeneration, "extend", extends)
            await asker.call("peer-0", GenerateRequest(0, "text"), tokens_of(PROMPT))
            ((generation, session, inputs),) = passes
            with pytest.raises(NotReady, match="not known"):
                extend(generation, session, inputs, len(PROMPT), is_copied=False, num_logits=1)

    in_virtual_time(scenario, spec_of(tmp_path))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_text_that_ends_while_it_is_opened_has_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Whether a copy of the parameters is being made for it, or for the one before it."""

    async def scenario(swarm: Swarm) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(4)  # the last one: it stays
        replica = swarm.members["peer-0"].peer.replica
        assert replica is not None
        generation = replica.stage.generation
        assert generation is not None
        wish = dataclasses.replace(opening(), round=replica.round, mixes=False)
        monkeypatch.setattr(harness, "OTHER_S", 5.0)
        async with Asker(swarm, "another") as another, Asker(swarm) as asker:
            before = [] if is_first else [asyncio.ensure_future(another.call("peer-0", wish))]
            mine = asyncio.ensure_future(asker.call("peer-0", wish))
            await asyncio.sleep(1.0)
            asker.notify("peer-0", ending())
            with pytest.raises(NotReady, match="has ended"):
                await mine
            await asyncio.gather(*before)
            another.notify("peer-0", ending())
            await asyncio.sleep(1.0)
            assert not any(held_bytes(swarm))
            with pytest.raises(NotReady):
                generation.extend("", tokens_of([1]), 0, is_copied=True, num_logits=1)

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def test_a_text_that_is_given_up_while_it_opens_ends_its_sessions(tmp_path: Path) -> None:
    """Those that are open, and the one that has not answered yet."""

    async def scenario(swarm: Swarm) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(4)
        async with Asker(swarm) as asker:
            swarm.hub.freeze("peer-1")
            text = asker.text()
            writing = asyncio.ensure_future(write(text, PROMPT, 1))
            await asyncio.sleep(1.0)
            assert [held > 0 for held in held_bytes(swarm)] == [True, False]
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await text.close()
            swarm.hub.thaw("peer-1")
            await asyncio.sleep(IDLE_S / 4)
            assert not any(held_bytes(swarm))

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def test_sessions_outlast_a_long_prompt_and_a_long_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, extend = list[str](), StageGeneration.extend

    async def scenario(swarm: Swarm) -> None:
        def extends(
            self: StageGeneration, session: Any, inputs: Array, position: int, **options: Any
        ) -> Any:
            if not position:
                begun.append(inputs.dtype)
            return extend(self, session, inputs, position, **options)

        monkeypatch.setattr(StageGeneration, "extend", extends)
        start(swarm)
        await swarm.until_round(4)  # the last one
        async with Asker(swarm) as asker:
            text = asker.text()
            written = await write(text, PROMPT, 1)
            monkeypatch.setattr(harness, "OTHER_S", 0.4 * IDLE_S)  # of three passes a stage
            written = await write(text, [*written, *LONG_PROMPT, *PROMPT, *PROMPT], 1)
            assert min(held_bytes(swarm)) > 0
            swarm.kill(working(swarm, 1))
            await write(text, written, 2)
            assert begun == ["int32", "float32", "float32"]

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def test_a_text_has_its_time_from_when_it_begins(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(4)
        async with Asker(swarm) as asker:
            text = asker.text()
            await asyncio.sleep(LONGEST_S)
            written = await write(text, PROMPT, 2)
            swarm.kill(working(swarm, 1))
            assert len(await write(text, written[-1:], 2)) == 2

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


@pytest.mark.parametrize("is_opened", [True, False])
def test_another_replica_is_asked_where_one_answers_rubbish(
    tmp_path: Path, is_opened: bool
) -> None:
    """Logits that are not finite, or no answer as it should be."""

    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(4)
        async with Asker(swarm) as asker:
            expected = await write(asker.text("before"), PROMPT, 4)
            transport = swarm.members["peer-1"].peer.transport
            handler, num_asked = swarm.members["peer-1"].peer.generation.on_generate, 0

            async def answers(request: Request) -> Message:
                nonlocal num_asked
                num_asked += 1
                answer = await handler(request)
                if is_opened:
                    return Message(answer.body, tuple(map(rubbish, answer.arrays)))
                return Message({"round": "the last one"})

            transport.handle("generate", answers)
            for i in range(4):  # some ask this replica first, and some the other one
                text = asker.text(f"{i}")
                assert await write(text, PROMPT, 4) == expected
                await text.close()
            assert num_asked

    in_virtual_time(scenario, spec_of(tmp_path, rounds=4))


def rubbish(array: Array) -> Array:
    number = struct.pack("<f", math.nan) if array.dtype == "float32" else bytes(4)
    return Array(array.dtype, array.shape, number * math.prod(array.shape))


def test_a_pass_that_fails_before_training_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it stands behind training too."""

    def fails(self: StageGeneration, *args: Any, **options: Any) -> None:
        raise RemoteError("the model is broken")

    async def scenario(swarm: Swarm) -> None:
        start(swarm, num_peers=2)
        await swarm.until_round(3)
        async with Asker(swarm) as asker:
            await asker.call("peer-0", opening())
            await asker.call("peer-0", GenerateRequest(0, "text"), tokens_of(PROMPT))
            monkeypatch.setattr(StageGeneration, "extend", fails)
            with pytest.raises(RemoteError, match="the model is broken"):
                await asker.call("peer-0", GenerateRequest(0, "text", len(PROMPT)), tokens_of([97]))

    in_virtual_time(scenario, spec_of(tmp_path, global_batch=BUSY_BATCH))


def test_a_text_may_be_as_long_as_the_sequences_that_its_model_learns_from() -> None:
    lengths = (16, 5000, 1 << 18)
    specs = [small_spec(model={"max_position_embeddings": length}) for length in lengths]
    assert [longest_text(spec) for spec in specs] == [4096, 5000, LONGEST_TEXT]
    stage = build_stage(specs[1], 0)
    assert stage.generation is not None
    assert stage.generation.max_tokens == 5000
