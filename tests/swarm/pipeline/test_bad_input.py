"""Whatever arrives, from whomever: one clear refusal for who sent it, and the swarm goes on to the
same numbers."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.batch import Batch
from swarmnet.errors import (
    Busy,
    ProtocolViolation,
    Refused,
    RemoteError,
    Stale,
    SwarmnetError,
    UserError,
    WrongRun,
)
from swarmnet.identity import Identity
from swarmnet.methods.contact import SpecReply
from swarmnet.methods.microbatch import (
    MAX_PATH,
    Commit,
    CommittedRequest,
    StepProgress,
    StepRequest,
)
from swarmnet.methods.records import GossipRequest, Records, SignedRecord, Suspicion, Unreached
from swarmnet.methods.update import ReduceRequest
from swarmnet.ports import LossResult, Passage
from swarmnet.protocol.backoff import LONGEST_PAUSE_S
from swarmnet.protocol.membership.records import ACTIVE, MAX_RATE, OBSERVING, Record
from swarmnet.protocol.membership.run_bounds import RunBounds
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.origins import Origins
from swarmnet.protocol.slots import ANY_SLOTS
from swarmnet.runtime.joining.find import fetch_run
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.spec import RunSpec, parse_spec
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.pipeline.flights import Flight
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub, MemoryTransport
from swarmnet.wire import Array, Message, convert, pack
from tests.swarm.handlers import handler_of
from tests.swarm.harness import (
    Swarm,
    VirtualKeySigner,
    in_virtual_time,
    relative_difference,
    replay,
    tiny_spec,
)

ROUNDS = 8
MICROBATCH, SEQ, WIDTH = 4, 16, 32
"""Of `tiny_spec`."""
NAN = float("nan")


class Said(logging.Handler):
    """What swarmnet tells people: the text of every warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[Said]:
    """Not `caplog`: the command line takes swarmnet's log away from the root logger."""
    handler = Said()
    logger = logging.getLogger("swarmnet")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def tokens(value: int = 1, *, dtype: str = "int32", batch: int = MICROBATCH) -> Array:
    """Inputs of stage 0, and targets."""
    size = {"int32": 4, "int64": 8}[dtype]
    return Array(dtype, (batch, SEQ), value.to_bytes(size, "little", signed=True) * batch * SEQ)


def floats(value: float = 0.1, *, dtype: str = "float32", shape: tuple[int, ...] = ()) -> Array:
    """An activation, or its gradient."""
    shape = shape or (MICROBATCH, SEQ, WIDTH)
    num = 1
    for n in shape:
        num *= n
    return Array(dtype, shape, struct.pack({"float32": "<f", "float64": "<d"}[dtype], value) * num)


def step_body(stage: int, **changes: Any) -> dict[str, Any]:
    body = {"round": 0, "microbatch_id": 7, "stage": stage, "feeder": "stranger", "num_samples": 4}
    return body | changes


def assert_numbers_agree(swarm: Swarm, spec: RunSpec, rounds: int = ROUNDS) -> None:
    trainer = replay(spec, swarm.counted, rounds)
    assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4


BAD_STEPS: list[tuple[str, int, tuple[Array, ...], dict[str, Any], str]] = [
    ("wrong shape", 0, (tokens(batch=3), tokens()), {}, "inputs"),
    ("too long", 0, (Array("int32", (4, 64), bytes(4 * 64 * 4)), tokens()), {}, "inputs"),
    ("wrong dtype", 0, (tokens(dtype="int64"), tokens()), {}, "int64"),
    ("wrong targets", 0, (tokens(), tokens(batch=1)), {}, "targets"),
    ("token beyond the vocabulary", 0, (tokens(256), tokens()), {}, "inputs"),
    ("negative token", 0, (tokens(-5), tokens()), {}, "inputs"),
    ("activation of another dtype", 1, (floats(dtype="float64"), tokens()), {}, "float64"),
    ("activation with NaN", 1, (floats(NAN), tokens()), {}, "finite"),
    ("activation with infinity", 1, (floats(float("inf")), tokens()), {}, "finite"),
    ("target beyond the vocabulary", 1, (floats(), tokens(1000)), {}, "targets"),
    ("one array", 0, (tokens(),), {}, "two arrays"),
    ("no arrays", 0, (), {}, "two arrays"),
    ("four arrays", 0, (tokens(),) * 4, {}, "two arrays"),
    ("no samples", 0, (tokens(), tokens()), {"num_samples": 0}, "of 0 samples"),
    ("more samples", 0, (tokens(), tokens()), {"num_samples": 5}, "of 5 samples"),
    ("negative round", 0, (tokens(), tokens()), {"round": -1}, "StepRequest"),
    ("text for a number", 0, (tokens(), tokens()), {"round": "now"}, "StepRequest"),
    ("documents of a run without", 0, (tokens(), tokens()), {"documents": [[SEQ]] * 4}, "apart"),
    ("empty documents", 0, (tokens(), tokens()), {"documents": [[SEQ, 0]] * 4}, "without tokens"),
    ("documents as text", 0, (tokens(), tokens()), {"documents": "all"}, "StepRequest"),
    ("a path without end", 0, (tokens(), tokens()), {"hint": ["x"] * 5000}, "StepRequest"),
]


async def patient_step(
    swarm: Swarm,
    stranger: MemoryTransport,
    peer_id: str,
    stage: int,
    arrays: tuple[Array, ...],
    changes: dict[str, Any],
) -> Message:
    """A step in the present round, tried again while the replica is busy or between rounds."""
    end = asyncio.get_running_loop().time() + 30.0
    while True:
        body = step_body(stage, **({"round": max(swarm.rounds())} | changes))
        try:
            return await stranger.call(peer_id, "step", Message(body, arrays), timeout_s=30.0)
        except (Busy, Stale):
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.01)


def test_a_bad_step_is_refused_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a title to send one, and which slots there are, is the subject of `tests/hostile` and
    `test_slots_meet`. This one is of a slot that nobody feeds."""
    monkeypatch.setattr(Origins, "may_feed", lambda *of: True)
    monkeypatch.setattr(Origins, "may_bring", lambda *of: True)
    rounds = 16
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 1)
        stranger = swarm.hub.transport("stranger")
        stranger.set_run(spec.run_id)
        await swarm.until_round(1)
        serving = {m.peer.gossip.own.stage: name for name, m in swarm.members.items()}
        for member in swarm.members.values():
            member.peer.steps.slots = ANY_SLOTS
        for what, stage, arrays, changes, text in BAD_STEPS:
            with pytest.raises(Refused, match=text):
                await patient_step(swarm, stranger, serving[stage], stage, arrays, changes)
            assert max(swarm.rounds()) < rounds, f"the run was over before {what}"
        for name in serving.values():
            for body in (None, 7, "step", [1, 2]):
                for method in (
                    "step",
                    "commit",
                    "infer",
                    "generate",
                    "gossip",
                    "records",
                    "reduce",
                    "reduce_tied",
                    "ballot",
                    "mirror",
                    "run_file",
                ):
                    with pytest.raises(RemoteError):
                        await stranger.call(name, method, Message(body), timeout_s=30.0)
        await swarm.until_round(rounds)
        assert swarm.total("rerouted") == 0
        assert_numbers_agree(swarm, spec, rounds)

    in_virtual_time(scenario, spec)


def test_only_replicas_of_a_stage_take_part_in_its_update(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        stranger = swarm.hub.transport("stranger")
        stranger.set_run(spec.run_id)
        for r in range(1, 4):
            await swarm.until_round(r)
            gradient = floats(1e6, shape=(4096,))
            push = Message(ReduceRequest(swarm.rounds()[0], 0, (0,), (1000,), (1,)), (gradient,))
            with pytest.raises(RemoteError, match="not known here as a replica"):
                await stranger.call("peer-0", "reduce", push, timeout_s=30.0)
        await swarm.until_round(ROUNDS)
        assert_numbers_agree(swarm, spec)

    in_virtual_time(scenario, spec)


# ---- a replica that gives bad answers -------------------------------------------------------


class Tampered:
    """A stage whose answers, or those of its passes, are changed on their way out."""

    def __init__(self, stage: Any, **changes: Callable[[Any], Any]) -> None:
        self._stage = stage
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        change = self._changes.get(name)
        if change is None:
            return value

        def changed(*arguments: Any) -> Any:
            answer = value(*arguments)
            return answer.then(change) if isinstance(answer, Passage) else change(answer)

        return changed


def with_gradient(grad: Array | None) -> Callable[[LossResult], LossResult]:
    return lambda result: LossResult(result.loss_sum, result.num_tokens, grad)


BAD_ANSWERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "gradient-nan": {"loss_pass": with_gradient(floats(NAN))},
    "gradient-infinite": {"loss_pass": with_gradient(floats(float("-inf")))},
    "gradient-shape": {"loss_pass": with_gradient(floats(shape=(4, 16, 31)))},
    "gradient-dtype": {"loss_pass": with_gradient(floats(dtype="float64"))},
    "gradient-missing": {"loss_pass": with_gradient(None)},
    "loss-nan": {"loss_pass": lambda r: LossResult(NAN, r.num_tokens, r.grad_inputs)},
    "no-tokens": {"loss_pass": lambda r: LossResult(r.loss_sum, 0, r.grad_inputs)},
    "many-tokens": {"loss_pass": lambda r: LossResult(r.loss_sum, 1 << 30, r.grad_inputs)},
    "too-many-tokens": {"loss_pass": lambda r: LossResult(r.loss_sum, 1 << 62, r.grad_inputs)},
    "loss-huge": {"loss_pass": lambda r: LossResult(1.7e308, r.num_tokens, r.grad_inputs)},
}


@pytest.mark.parametrize("fault", sorted(BAD_ANSWERS))
def test_bad_answers_are_routed_around(tmp_path: Path, fault: str) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            return Tampered(stage, **BAD_ANSWERS[fault]), optimizer

        swarm.start("good-0", stage=0)
        swarm.start("good-1", stage=1)
        swarm.start("bad", stage=1, build=build)
        await swarm.until_round(ROUNDS)
        assert swarm.total("rerouted") > 0, "the bad replica was never asked"
        assert_numbers_agree(swarm, spec)

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"forward_pass": lambda _: floats(NAN)}, id="activation-nan"),
        pytest.param({"forward_pass": lambda _: floats(shape=(4, 16, 31))}, id="activation-shape"),
        pytest.param({"backward_pass": lambda _: floats(NAN)}, id="gradient-nan"),
    ],
)
def test_a_bad_replica_in_the_middle_is_routed_around(
    tmp_path: Path, changes: dict[str, Callable[[Any], Any]]
) -> None:
    """The next stage refuses what it sends on: whoever called it hears so, in good time."""
    spec = tiny_spec(tmp_path, num_stages=3, rounds=4)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            return Tampered(stage, **changes), optimizer

        for stage in range(3):
            swarm.start(f"good-{stage}", stage=stage)
        swarm.start("bad", stage=1, build=build)
        await swarm.until_round(4, limit_s=120.0)
        assert swarm.total("rerouted") > 0
        assert_numbers_agree(swarm, spec, 4)

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip"])
def test_a_gradient_that_is_not_finite_does_not_count(
    tmp_path: Path, said: Said, mode: str
) -> None:
    """A replica whose buffer is broken takes part in every update: the others' gradients stand.
    Where replicas make steps of their own, it makes none, and says so itself."""
    sync = {"mode": mode, "local_steps": 2, "warmup_rounds": 1}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=4, sync=sync)
    makes_steps = mode in ("local", "gossip")

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            broken = Tampered(stage, gradient_shard=lambda g: floats(NAN, shape=g.shape))
            return broken, optimizer

        swarm.start("good-0")
        swarm.start("good-1")
        swarm.start("bad", build=build)
        await swarm.until_round(4, limit_s=120.0)
        word = "no step of its own here" if makes_steps else "is not finite and does not count"
        assert any(word in line for line in said.lines)
        strikes = [m.peer.gossip.own.strikes for m in swarm.members.values()]
        assert {p for s in strikes for p in s} == {"bad"}
        assert sum(s.get("bad", 0) for s in strikes) == swarm.total("contributions_dropped")
        assert (swarm.total("samples_lost") > 0) == (mode != "gossip")  # it keeps no books
        if mode != "gossip":
            swarm.parameters()  # of equal replicas
        for name in swarm.members:
            assert all(bool(p.isfinite().all()) for p in swarm.named(name).values())
        assert swarm.total("shard_reset") == 0

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("rule", ["mean", "median_clip", "trimmed_mean", "centered_clip"])
def test_a_gradient_that_is_not_finite_does_not_count_among_many(tmp_path: Path, rule: str) -> None:
    """With four and more contributors the robust rules apply, to what is finite."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=4, global_batch=64, sync={"aggregation": rule})

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            broken = Tampered(stage, gradient_shard=lambda g: floats(NAN, shape=g.shape))
            return broken, optimizer

        for i in range(5):
            swarm.start(f"good-{i}")
        swarm.start("bad", build=build)
        await swarm.until_round(4, limit_s=120.0)
        strikes = [m.peer.gossip.own.strikes for m in swarm.members.values()]
        assert {p for s in strikes for p in s} == {"bad"}
        assert all(bool(p.isfinite().all()) for p in swarm.parameters().values())

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local"])
def test_a_primary_that_gives_what_is_not_finite_is_gone_round(tmp_path: Path, mode: str) -> None:
    """Its backups have made the same step, and give the result."""
    sync = {"mode": mode, "local_steps": 2, "warmup_rounds": 1}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=8, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("good-0")
        swarm.start("good-1")
        bad = swarm.start("bad")
        await swarm.until_round(2)
        reduce = handler_of(bad.transport, "reduce")

        async def false(request: Request) -> Message:
            reply = await reduce(request)
            return Message(reply.body, tuple(floats(NAN, shape=a.shape) for a in reply.arrays))

        bad.transport.handle("reduce", false)
        began = asyncio.get_running_loop().time()
        await swarm.until_round(8, 120.0)
        assert asyncio.get_running_loop().time() - began < 15.0
        assert swarm.total("samples_lost") == swarm.total("shard_reset") == 0
        if mode == "zero":
            trainer = replay(spec, swarm.counted, 8)
            assert relative_difference(swarm.named("good-0"), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("value", "is_refused"), [(1e30, True), (9e14, False)])
def test_an_offer_that_is_far_away_ends_no_partner(
    tmp_path: Path, said: Said, value: float, is_refused: bool
) -> None:
    """It is finite; where no stage would take what comes of it, it is refused."""
    sync = {"mode": "gossip", "local_steps": 2, "warmup_rounds": 1}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=8, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("good")
        bad = swarm.start("bad")
        await swarm.until_round(1)
        local: Any = bad.replica and bad.replica.local
        offer = local.offer

        def huge(j: int) -> Any:
            values, arrays = offer(j)
            return values, (floats(value, shape=arrays[0].shape), *arrays[1:])

        local.offer = huge
        met = swarm.members["good"].peer.gossip
        before = met.own.spread
        if is_refused:
            await swarm.until_round(8, 120.0)
        else:  # what it learnt is gone with it, but not the peer
            await swarm.until(lambda: met.own.spread != before, 120.0)
            assert met.own.spread == MAX_RATE
            await swarm.until_round(4, 120.0)
        assert any("leads beyond" in line for line in said.lines) == is_refused
        assert all(bool(p.isfinite().all()) for p in swarm.named("good").values())

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local"])
def test_a_step_that_cannot_be_made_leaves_the_shard_as_it_is(tmp_path: Path, mode: str) -> None:
    """Its owners are of one mind about that, whatever the sum was."""
    sync = {"mode": mode, "local_steps": 1, "warmup_rounds": 1}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=8, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            step = optimizer.step

            def refusing(
                j: int, before: Array, total: Array, scale: float, r: int, *more: Any
            ) -> Any:
                if (j, r) == (0, 3):
                    raise ProtocolViolation("leads beyond")
                return step(j, before, total, scale, r, *more)

            optimizer.step = refusing
            return stage, optimizer

        for i in range(3):
            swarm.start(f"peer-{i}", build=build)
        began = asyncio.get_running_loop().time()
        await swarm.until_round(8, 120.0)
        assert asyncio.get_running_loop().time() - began < 15.0
        assert swarm.total("samples_lost") == spec.pipeline.global_batch
        assert swarm.total("shard_reset") == swarm.total("shard_unlike") == 0
        swarm.parameters()  # of equal replicas

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("value", [1e30, -1e16])
def test_a_huge_change_does_not_stop_a_stage(tmp_path: Path, value: float) -> None:
    """In mode `local`: beyond all bounds it does not count."""
    sync = {"mode": "local", "local_steps": 2, "warmup_rounds": 1}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=10, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("good-0")
        swarm.start("good-1")
        bad = swarm.start("bad")
        await swarm.until_round(3)
        local: Any = bad.replica and bad.replica.local
        change = local.change
        local.change = lambda j, weight: floats(value * weight, shape=change(j, weight).shape)
        began = asyncio.get_running_loop().time()
        await swarm.until_round(10, 120.0)
        assert asyncio.get_running_loop().time() - began < 10.0
        strikes = [m.peer.gossip.own.strikes for m in swarm.members.values()]
        assert {p for s in strikes for p in s} == {"bad"}
        assert swarm.total("shard_reset") == 0

    in_virtual_time(scenario, spec)


def test_a_run_begins_although_a_stranger_says_that_it_has_the_last_history(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=2)

    async def scenario(swarm: Swarm) -> None:
        stranger = swarm.hub.transport("stranger")
        stranger.set_run(spec.run_id)
        record = Record("stranger", spec.run_id, 1, 1, state=OBSERVING, history=2**62 - 1)
        envelope = SignedRecord(pack(record), b"")

        async def answer(request: Request) -> Message:
            return Message(Records(records=(envelope,)))

        stranger.handle("gossip", answer)
        stranger.handle("records", answer)
        swarm.start("good", neighbours=["stranger"])
        await swarm.until_round(2, 120.0)

    in_virtual_time(scenario, spec)


class Misread:
    """Data of another tokenizer: its tokens are none of the model's."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def microbatch(self, indices: Sequence[int]) -> Batch:
        inputs, targets = self._data.microbatch(indices).arrays
        return Batch(Array("int64", inputs.shape, struct.pack("<64q", *[999] * 64)), targets)


class Unreadable(Misread):
    """Data on a disk that fails."""

    def microbatch(self, indices: Sequence[int]) -> Batch:
        raise OSError("input/output error")


@pytest.mark.parametrize("kind", [Misread, Unreadable])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_feeder_with_unusable_data_stops_feeding_and_goes_on_serving(
    tmp_path: Path, said: Said, kind: type[Misread], stage: int
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=8, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("good-0", stage=0)
        swarm.start("good-1", stage=1, feeds=False)
        swarm.start("bad", stage=stage, data=kind(swarm.data))
        await swarm.until_round(8, limit_s=200.0)
        bad = swarm.members["bad"].peer
        assert bad.gossip.own.state == ACTIVE
        assert bad.replica is not None
        if stage == 1:  # feeders at stage 0 serve themselves
            assert bad.replica.device.busy_s > 0.3, "it served nothing"
        assert sum(len(ids) for ids in swarm.counted.values()) == 8 * 8
        assert_numbers_agree(swarm, spec, 8)
        if stage == 0:
            lines = [line for line in said.lines if "feeds no more" in line]
            assert len(lines) == 1
            assert "data and tokenizer" in lines[0]
            assert not bad.gossip.own.has_data

    in_virtual_time(scenario, spec)


def test_a_commit_of_somebody_who_did_not_call_is_passed_over(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=6)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(2)
        stranger = swarm.hub.transport("stranger")
        stranger.set_run(spec.run_id)
        tried = 0
        while min(swarm.rounds()) < 5:
            for name, member in swarm.members.items():
                replica = member.peer.replica
                assert replica is not None
                r = replica.round
                entries = [e for e in replica.ledger.running(r) if not e.commit_seen]
                ids = tuple(e.key[1] for e in entries)
                if ids:
                    await stranger.call(name, "commit", Message(Commit(r, ids)), timeout_s=5.0)
                    running = set(map(id, replica.ledger.running(r)))
                    assert not any(e.commit_seen for e in entries if id(e) in running)
                    tried += len(ids)
            await asyncio.sleep(0.05)
        assert tried > 20
        await swarm.until_round(6)
        assert_numbers_agree(swarm, spec, 6)

    in_virtual_time(scenario, spec)


# ---- one member's word ----------------------------------------------------------------------


def lie_of_a_round(liar: Peer) -> None:
    """Answers every microbatch that its round is over."""

    async def over(request: Request) -> Message:
        asked = request.message.body.round
        raise Stale(f"round {asked} is over here", round=asked + 1000)

    liar.transport.handle("step", over)


def disown(liar: Peer) -> None:
    """Serves microbatches, and asks their feeder about each while it is under way, as if its round
    were closed."""

    async def serve(request: Request) -> Message:
        step = convert(request.message.body, StepRequest)
        reply = await liar.steps.on_step(request)
        question = CommittedRequest(step.round, step.stage, (step.microbatch_id,), is_over=True)
        await liar.transport.call(step.feeder, "committed", Message(question), timeout_s=5.0)
        return reply

    liar.transport.handle("step", serve)


def claim_paths(liar: Peer) -> None:
    """Serves microbatches, and says that they went through more replicas than there are stages."""

    async def serve(request: Request) -> Message:
        request.progress(Message(StepProgress(tuple(f"through-{i}" for i in range(MAX_PATH)))))
        reply = await liar.steps.on_step(request)
        path = (*reply.body.path, *(f"through-{i}" for i in range(MAX_PATH - 2)))
        return Message(replace(reply.body, path=path), reply.arrays)

    liar.transport.handle("step", serve)


@pytest.mark.parametrize("liar_of", [1, 2])
def test_a_path_that_cannot_be_is_found_before_its_gradient_counts(
    tmp_path: Path, liar_of: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody but the liar is blamed for it."""
    spec = tiny_spec(tmp_path, num_stages=3, rounds=6, global_batch=32)
    lengths: list[int] = []
    moved = Flight.moved

    def moves(self: Flight, path: tuple[str, ...]) -> None:
        lengths.append(len(path))
        moved(self, path)

    monkeypatch.setattr(Flight, "moved", moves)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"good-{i}", stage=i, feeds=i == 0)
        claim_paths(swarm.start("liar", stage=liar_of, feeds=False))
        await swarm.until_round(6, limit_s=200.0)
        assert swarm.total("rerouted") > 0
        assert_numbers_agree(swarm, spec, 6)
        assert max(lengths, default=0) <= 2

    in_virtual_time(scenario, spec)
    assert "step failed" not in caplog.text


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("lie", [lie_of_a_round, disown])
def test_one_replica_that_says_that_a_round_is_over_does_not_keep_it_from_its_end(
    tmp_path: Path, stage: int, lie: Callable[[Peer], None]
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=6, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("good-0", stage=0, feeds=stage == 1)
        swarm.start("good-1", stage=1, feeds=stage == 0)
        liar = swarm.start("liar", stage=stage, feeds=False)
        asked = 0

        async def counted(request: Request) -> Message:
            nonlocal asked
            asked += 1
            return await handler(request)

        lie(liar)
        handler = handler_of(liar.transport, "step")
        liar.transport.handle("step", counted)
        await swarm.until_round(6, limit_s=200.0)
        assert asked > 6, "it was hardly ever asked"
        assert all(len(swarm.counted[r]) >= 8 for r in range(6))
        assert_numbers_agree(swarm, spec, 6)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec)


# ---- another run ----------------------------------------------------------------------------


def test_a_peer_of_another_run_is_turned_away(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    (tmp_path / "other").mkdir()
    other_spec = tiny_spec(tmp_path / "other", num_stages=2, rounds=99)
    assert other_spec.run_id != spec.run_id

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 1)
        await swarm.until_round(2)
        others = Swarm(other_spec, hub=swarm.hub)
        others.start("lost", neighbours=["peer-0"])
        life = others.members["lost"].life
        await asyncio.wait((life,), timeout=60.0)
        text = f"trains run {spec.run_id[:8]}, not {other_spec.run_id[:8]}"
        with pytest.raises(UserError, match=f"in another run .*{text}"):
            life.result()
        stranger = swarm.hub.transport("stranger")
        stranger.set_run(other_spec.run_id)
        calls: dict[str, Any] = {
            "gossip": GossipRequest({}),
            "records": Records(),
            "unreached": Unreached("peer-1"),
            "step": StepRequest(2, 1, 0, "lost", 4),
            "commit": {"round": 0, "microbatch_ids": []},
            "reduce": ReduceRequest(2, 0, (0,), (0,), (1,)),
        }
        for method, body in calls.items():
            with pytest.raises(WrongRun):
                await stranger.call("peer-0", method, Message(body), timeout_s=30.0)
        await swarm.until_round(ROUNDS)
        for member in swarm.members.values():
            assert member.peer.view.get("lost") is None
        assert_numbers_agree(swarm, spec)
        await others.close()

    in_virtual_time(scenario, spec)


def test_an_address_of_another_run_beside_a_good_one_is_left_out(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    (tmp_path / "other").mkdir()
    other_spec = tiny_spec(tmp_path / "other", num_stages=2, rounds=99)

    async def scenario(swarm: Swarm) -> None:
        others = Swarm(other_spec, hub=swarm.hub)
        others.start("stranger")
        swarm.start_grid(2, 1)
        await swarm.until_round(2)
        newcomer = swarm.start("newcomer", neighbours=["stranger", "peer-0"])
        await swarm.until(lambda: newcomer.gossip.own.state == ACTIVE)
        await swarm.until_round(ROUNDS)
        assert_numbers_agree(swarm, spec)
        await others.close()

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (lambda spec: SpecReply("0" * 32, spec.canonical()), "does not match its hash"),
        (lambda spec: SpecReply(spec.run_id, spec.canonical() + b" "), "canonical"),
        (lambda spec: SpecReply(spec.run_id, b"\xff\x00 no spec"), "spec"),
        (lambda spec: SpecReply(spec.run_id, b'{"model": {"kind": "abacus"}}'), "kind"),
        (lambda spec: {"run_id": 7}, "does not tell its run"),
    ],
)
def test_a_spec_from_the_network_is_checked(
    tmp_path: Path, reply: Callable[[RunSpec], Any], text: str
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1)

    async def main() -> None:
        hub = MemoryHub()
        donor, joiner = hub.transport("donor"), hub.transport("joiner")

        async def answer(request: Request) -> Message:
            return Message(reply(spec))

        donor.handle("spec", answer)
        with pytest.raises(UserError, match=text) as caught:
            await fetch_run(joiner, "donor")
        assert "\n" not in str(caught.value)

    run_virtual(main())


# ---- records --------------------------------------------------------------------------------


class Bus:
    """Two peers that gossip with real signatures, and a stranger who may send them anything."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.keys = [Identity.generate() for _ in range(3)]
        self.gossips = [self._gossip(key) for key in self.keys[:2]]
        self.stranger: MemoryTransport = self.hub.transport(self.keys[2].peer_id)
        self.stranger.set_run("run")

    def _gossip(self, key: Identity) -> Gossip:
        transport = self.hub.transport(key.peer_id)
        transport.set_run("run")
        own = Record(key.peer_id, "run", incarnation=5, version=1, state=ACTIVE, stage=0)
        view = View(key.peer_id)
        rng = random.Random(key.peer_id)
        bounds = RunBounds(rounds=1000)
        return Gossip(transport, view, VirtualKeySigner(key), own, rng, bounds=bounds)

    async def send(self, body: Records) -> None:
        """To the first peer, as a notification: nobody answers."""
        self.stranger.notify(self.keys[0].peer_id, "records", Message(body))
        await asyncio.sleep(0.1)

    def signed(self, signer: int, record: Record) -> SignedRecord:
        payload = pack(record)
        return SignedRecord(payload, self.keys[signer].sign(payload))

    async def still_talks(self) -> None:
        """The first peer's own changes reach the second, and the other way round."""
        for gossip, other in (self.gossips, self.gossips[::-1]):
            gossip.update(round=gossip.own.round + 1)
            assert await gossip.reconcile(other.own.peer_id)
            await asyncio.sleep(0.1)  # virtual: what the other lacks follows as a notification
            seen = other.view.get(gossip.own.peer_id)
            assert seen is not None
            assert seen.round == gossip.own.round


def forgeries(bus: Bus) -> list[tuple[SignedRecord, str]]:
    """Records that must not be taken in, and a part of the line that says why."""
    own, other, stranger = (key.peer_id for key in bus.keys)
    record = Record(other, "run", incarnation=9, version=1, state=ACTIVE, stage=0)
    good = bus.signed(1, record)
    far = replace(record, peer_id=own, incarnation=5, version=2**62 - 1)
    wrong = f"the signature on the record of {other} is wrong"
    return [
        (bus.signed(2, record), wrong),
        (SignedRecord(good.payload, b""), wrong),
        (SignedRecord(good.payload, good.signature[:-1] + b"?"), wrong),
        (SignedRecord(pack(replace(record, round=3)), good.signature), wrong),
        (bus.signed(1, replace(record, round=2**61)), f"it is in round {2**61} of 1000"),
        (bus.signed(2, far), f"the signature on the record of {own} is wrong"),
        (bus.signed(2, Record(stranger, "other", 1, 1)), "a record of run other"),
        (SignedRecord(pack({"peer_id": 1}), b"x"), "not a Record"),
        (SignedRecord(b"\xc1\xff", b"x"), "not msgpack"),
    ]


def test_forged_records_are_dropped_with_a_line_each(said: Said) -> None:
    async def main() -> None:
        bus = Bus()
        await bus.still_talks()
        before = bus.gossips[0].view.records()
        for envelope, text in forgeries(bus):
            said.lines.clear()
            await bus.send(Records(records=(envelope,)))
            assert len(said.lines) == 1, (text, said.lines)
            assert text in said.lines[0]
            await asyncio.sleep(3 * LONGEST_PAUSE_S)  # a ban is over and forgotten
        assert bus.gossips[0].view.records() == before
        assert bus.gossips[0].own.version < 100, "a forged record used the own versions up"
        await bus.still_talks()

    run_virtual(main())


def test_a_suspicion_from_the_far_future_silences_nobody() -> None:
    async def main() -> None:
        bus = Bus()
        await bus.still_talks()
        for _ in range(3):
            for key in bus.keys[:2]:
                lie = Suspicion(key.peer_id, incarnation=5, version=2**62 - 2)
                await bus.send(Records(suspicions=(lie,)))
        for _ in range(3):
            await bus.still_talks()
        now = asyncio.get_running_loop().time()
        for gossip, other in (bus.gossips, bus.gossips[::-1]):
            assert gossip.own.version < 10_000
            assert gossip.view.is_live(other.own.peer_id, now)

    run_virtual(main())


def test_too_many_records_at_once_are_refused() -> None:
    async def main() -> None:
        bus = Bus()
        flood = {"records": [], "wanted": ["p"] * 5000, "suspicions": []}
        with pytest.raises(SwarmnetError, match="Records"):
            await bus.stranger.call(bus.keys[0].peer_id, "records", Message(flood), timeout_s=10.0)
        await bus.still_talks()

    run_virtual(main())


def test_a_wrong_spec_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"hiden_size.*hidden_size") as caught:
        parse_spec('[model]\nkind = "llama"\nhiden_size = 8\n')
    assert "\n" not in str(caught.value)
