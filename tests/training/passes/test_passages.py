"""Passes whose host's parts are done beside the device's work."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import BACKWARD, FORWARD, OTHER, Passage
from swarmnet.protocol.codecs import BOUNDARY_CODECS, INT8, boundary_codec, coded_form
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.device import MAX_DEPARTING, DeviceThread
from swarmnet.training.memory.device_copies import DeviceCopies, OneMemory, OnHost
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

PATIENCE_S = 20.0


@dataclass
class Log:
    """What was done where, and what holds it up."""

    done: list[tuple[str, str]] = field(default_factory=list)
    gates: dict[str, threading.Event] = field(default_factory=dict)

    def hold(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def passage(self, name: str, *, is_apart: bool = False) -> Passage[str]:
        def part(what: str) -> str:
            gate = self.gates.get(f"{what} {name}")
            assert gate is None or gate.wait(PATIENCE_S)
            self.done.append((f"{what} {name}", threading.current_thread().name))
            return name

        return Passage(
            lambda: part("arrive"), lambda _: part("compute"), lambda _: part("depart"), is_apart
        )

    def where(self, what: str) -> str:
        return dict(self.done)[what]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def play(scenario: Callable[[DeviceThread, Log], Awaitable[None]]) -> None:
    async def main() -> None:
        device, log = DeviceThread(), Log()
        try:
            await scenario(device, log)
        finally:
            for gate in log.gates.values():
                gate.set()
            await device.close()

    asyncio.run(main())


def test_the_next_one_is_decoded_while_the_device_is_at_work() -> None:
    async def scenario(device: DeviceThread, log: Log) -> None:
        gate = log.hold("compute a")
        first = asyncio.ensure_future(device.run(FORWARD, log.passage("a")))
        await until(lambda: device.at_work() is not None)
        second = asyncio.ensure_future(device.run(FORWARD, log.passage("b")))
        await until(lambda: "arrive b" in dict(log.done))
        assert not first.done()
        gate.set()
        assert await asyncio.gather(first, second) == ["a", "b"]
        assert log.where("arrive b") == "coding"
        assert {log.where(f"compute {x}") for x in "ab"} == {"device"}
        assert {log.where(f"depart {x}") for x in "ab"} == {"coding"}

    play(scenario)


def test_the_device_goes_on_while_the_last_one_is_coded_and_is_not_far_ahead() -> None:
    async def scenario(device: DeviceThread, log: Log) -> None:
        gate = log.hold("depart a")
        runs = [asyncio.ensure_future(device.run(FORWARD, log.passage(x))) for x in "abcd"]
        computed = [f"compute {x}" for x in "abcd"][: 1 + MAX_DEPARTING]
        await until(lambda: computed[-1] in dict(log.done))
        await asyncio.sleep(0.05)
        assert [what for what, _ in log.done if what.startswith("compute")] == computed
        assert not any(run.done() for run in runs)
        assert device.num_waiting == 4
        gate.set()
        assert await asyncio.gather(*runs) == list("abcd")
        assert device.num_waiting == 0

    play(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_results_come_in_the_order_of_the_work(fails: bool) -> None:
    """Who hears that a round is closed has heard of every microbatch in its gradient."""

    async def scenario(device: DeviceThread, log: Log) -> None:
        heard: list[str] = []

        def close() -> None:
            log.done.append(("close", threading.current_thread().name))
            if fails:
                raise ValueError("not closed")

        async def hear(name: str, kind: str, work: Callable[[], object]) -> None:
            with contextlib.suppress(ValueError):
                await device.run(kind, work)
            heard.append(name)

        gate = log.hold("depart a")
        first = asyncio.ensure_future(hear("a", FORWARD, log.passage("a")))
        await until(lambda: "compute a" in dict(log.done))
        second = asyncio.ensure_future(hear("close", OTHER, close))
        await until(lambda: "close" in dict(log.done))  # the device itself does not wait
        assert log.where("close") == "device"
        await asyncio.sleep(0.05)
        assert heard == []
        gate.set()
        await asyncio.gather(first, second)
        assert heard == ["a", "close"]
        assert device.num_waiting == 0

    play(scenario)


def test_the_device_does_itself_what_the_coding_thread_has_not_begun() -> None:
    async def scenario(device: DeviceThread, log: Log) -> None:
        gate = log.hold("depart a")
        first = asyncio.ensure_future(device.run(FORWARD, log.passage("a")))
        await until(lambda: "compute a" in dict(log.done))
        second = asyncio.ensure_future(device.run(FORWARD, log.passage("b")))
        await until(lambda: "compute b" in dict(log.done))
        assert log.where("arrive b") == "device"
        gate.set()
        await asyncio.gather(first, second)
        assert [what for what, _ in log.done].count("arrive b") == 1

    play(scenario)


@pytest.mark.parametrize("what", ["arrive", "compute", "depart"])
def test_an_error_of_any_part_reaches_who_asked_and_the_device_goes_on(what: str) -> None:
    def fail() -> str:
        raise ProtocolViolation("not finite")

    async def scenario(device: DeviceThread, log: Log) -> None:
        parts = {
            "arrive": Passage(fail, lambda x: x, lambda x: x),
            "compute": Passage(lambda: "", lambda _: fail(), lambda x: x),
            "depart": Passage(lambda: "", lambda x: x, lambda _: fail()),
        }
        for _ in range(3):
            with pytest.raises(ProtocolViolation):
                await device.run(BACKWARD, parts[what])
        assert await device.run(FORWARD, log.passage("a")) == "a"
        assert device.num_waiting == 0

    play(scenario)


def test_the_time_of_a_device_that_works_on_is_measured_to_its_end() -> None:
    """And each second counts for one passage alone."""
    takes_s = 0.05
    free_at = [0.0]

    def compute(_: object) -> float:
        free_at[0] = max(free_at[0], time.perf_counter()) + takes_s
        return free_at[0]

    def depart(end_s: float) -> None:
        time.sleep(max(0.0, end_s - time.perf_counter()))

    async def scenario(device: DeviceThread, log: Log) -> None:
        passage = Passage(lambda: None, compute, depart, True)
        began_s = time.perf_counter()
        timed = await asyncio.gather(*(device.timed(FORWARD, passage) for _ in range(6)))
        whole_s = time.perf_counter() - began_s
        took_s = [seconds for _, seconds in timed]
        # One that is woken late takes some of the next one's time: all together have theirs.
        assert sum(took_s) > 0.8 * len(took_s) * takes_s
        assert sum(took_s) <= 1.05 * whole_s
        assert device.busy_s == pytest.approx(sum(took_s))

    play(scenario)


# ---- with real stages ---------------------------------------------------------------------------

WIDTH, LENGTH, SAMPLES = 32, 16, 2


class Slow:
    """The event of a copy that takes a while."""

    def synchronize(self) -> None:
        time.sleep(0.005)


class Apart(OneMemory):
    """The copies of a GPU."""

    is_apart = True

    def to_device(self, tensor: torch.Tensor, after: Any = None) -> torch.Tensor:
        return tensor.clone()

    def to_host(self, tensor: torch.Tensor) -> OnHost:
        return OnHost(tensor.clone(), Slow())


def stage_of(codec: str, copies: DeviceCopies | None = None) -> TorchStage:
    spec = RunSpec.model_validate(
        {
            "model": {
                "hidden_size": WIDTH,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "vocab_size": 256,
                "max_position_embeddings": LENGTH,
            },
            "data": {"paths": ["python-stdlib"]},
            "optimizer": {"learning_rate": 1e-3, "rounds": 1},
            "pipeline": {
                "num_stages": 3,
                "global_batch": SAMPLES,
                "microbatch": SAMPLES,
                "codec": codec,
            },
        }
    )
    return build_stage(spec, 1, make=functools.partial(TorchStage, copies=copies))


def coded(codec: str, values: torch.Tensor) -> Array:
    """(samples, length, width) as it comes from another peer."""
    rows = codec_of(codec).encode(values.reshape(-1, values.shape[-1]))
    return from_tensor(rows.view(coded_form(codec, tuple(values.shape), 2)[1]))


@pytest.mark.parametrize("copies", [OneMemory(), Apart()])
@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
def test_what_is_coded_beside_the_device_has_the_same_bits(
    codec: str, copies: DeviceCopies
) -> None:
    torch.manual_seed(0)
    whole, parted = stage_of(codec), stage_of(codec, copies)
    shape = (SAMPLES, LENGTH, WIDTH)
    codecs = boundary_codec(codec)
    inputs = [coded(codecs.activations, torch.randn(shape) * (1 + i)) for i in range(6)]
    grads = [coded(codecs.gradients, torch.randn(shape) / (1 + i)) for i in range(6)]
    expected = [
        (whole.forward((0, i), inputs[i]), whole.backward((0, i), grads[i])) for i in range(6)
    ]

    async def scenario(device: DeviceThread, log: Log) -> None:
        keys = [(0, i) for i in range(6)]
        forward = [parted.forward_pass(key, x) for key, x in zip(keys, inputs, strict=True)]
        sent = await asyncio.gather(*(device.run(FORWARD, work) for work in forward))
        backward = [parted.backward_pass(key, g) for key, g in zip(keys, grads, strict=True)]
        back = await asyncio.gather(*(device.run(BACKWARD, work) for work in backward))
        for expects, *got in zip(expected, sent, back, strict=True):
            for there, here in zip(expects, got, strict=True):
                assert there is not None
                assert here is not None
                assert bytes(here.data) == bytes(there.data)

    play(scenario)
    for j in range(len(whole.shard_sizes)):
        assert bytes(parted.gradient_shard(j).data) == bytes(whole.gradient_shard(j).data)


def test_a_forward_pass_that_gives_nothing_finite_is_forgotten() -> None:
    stage = stage_of("int8")
    values = torch.full((SAMPLES, LENGTH, WIDTH), torch.nan)

    async def scenario(device: DeviceThread, log: Log) -> None:
        inputs = from_tensor(values)
        with pytest.raises(ProtocolViolation):
            await device.run(FORWARD, stage.forward_pass((0, 1), inputs))
        assert len(stage.kept) == 0
        for parameter in stage.layers.parameters():
            parameter.data.fill_(torch.nan)
        good = coded(INT8, torch.ones_like(values))
        with pytest.raises(ProtocolViolation):
            await device.run(FORWARD, stage.forward_pass((0, 2), good))
        assert len(stage.kept) == 0

    play(scenario)


def test_what_passes_have_left_comes_after_passes_and_before_other_work() -> None:
    async def scenario(device: DeviceThread, log: Log) -> None:
        left = {"a": 2, "b": 1}
        heard: list[str] = []

        def with_rest(name: str) -> Passage[str]:
            def rest() -> bool:
                left[name] -= 1
                log.done.append((f"rest {name}", threading.current_thread().name))
                time.sleep(0.02)
                return left[name] > 0

            return replace(log.passage(name), rest=rest)

        async def hear(kind: str, work: Callable[[], Any], turn: int = 0) -> float:
            found, took_s = await device.timed(kind, work, turn)
            heard.append(f"{found}")
            return took_s

        gate = log.hold("compute a")
        first = asyncio.ensure_future(hear(BACKWARD, with_rest("a")))
        await until(lambda: device.at_work() is not None)
        others = [
            asyncio.ensure_future(hear(OTHER, lambda: log.done.append(("other", "")))),
            asyncio.ensure_future(hear(FORWARD, with_rest("b"))),
            asyncio.ensure_future(hear(FORWARD, log.passage("c"))),
            asyncio.ensure_future(hear(FORWARD, log.passage("later"), 1)),
        ]
        await asyncio.sleep(0)
        assert device.num_waiting == 5
        assert device.waiting_until(0) == 3
        gate.set()
        await asyncio.gather(first, *others)
        order = [what for what, _ in log.done if what.split()[0] not in ("arrive", "depart")]
        passes = ["compute a", "compute b", "compute c"]
        rests = ["rest a", "rest a", "rest b"]
        assert sorted(order[3:6]) == rests, "each is done, and nothing else is done before"
        assert [*order[:3], *order[6:]] == [*passes, "other", "compute later"]
        assert {where for what, where in log.done if what.startswith("rest")} == {"device"}
        assert device.num_waiting == 0
        assert device.busy_s > 0.06
        later_s = await hear(BACKWARD, with_rest("d") if left.setdefault("d", 1) else str)
        assert later_s > 0.03, "the reply does not wait for it, but it is a part of the work"

    play(scenario)


def test_a_closed_device_leaves_the_rest() -> None:
    async def main() -> None:
        device, parts = DeviceThread(), 0
        is_at_it, may_go_on = threading.Event(), threading.Event()

        def rest() -> bool:
            nonlocal parts
            parts += 1
            is_at_it.set()
            return may_go_on.wait(PATIENCE_S)

        assert await device.run(FORWARD, replace(Log().passage("a"), rest=rest)) == "a"
        await asyncio.to_thread(is_at_it.wait, PATIENCE_S)
        closing = asyncio.ensure_future(device.close())
        await asyncio.sleep(0)
        may_go_on.set()
        await closing
        assert parts == 1

    asyncio.run(main())


def test_whoever_calls_a_passage_has_all_of_it_done() -> None:
    parts = iter([True, True, False])
    assert replace(Log().passage("a"), rest=lambda: next(parts))() == "a"
    assert list(parts) == []
