"""In mode `delayed` the next round begins before the last microbatches of a round are completed;
virtual time, memory transport."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarmnet.methods.microbatch import InferRequest, StepRequest
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.swarm import Simulation
from swarmnet.swarm.pipeline.dispatcher import Dispatcher, Passed
from swarmnet.swarm.pipeline.infer import InferService
from swarmnet.swarm.replica.transitions import Transitions
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.stage import TorchStage
from swarmnet.transport.base import Request
from swarmnet.wire import Message, convert
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

ROUNDS = 16


def seconds_of(tmp_path: Path, mode: str) -> tuple[float, int]:
    """Virtual seconds of a run, and in how many rounds some replica had the next one open."""
    spec = tiny_spec(tmp_path, num_stages=3, rounds=ROUNDS, sync={"mode": mode})
    ahead: dict[int, None] = {}
    took_s = 0.0

    async def scenario(swarm: Swarm) -> None:
        nonlocal took_s
        for i in range(6):
            swarm.start(f"peer-{i}", stage=i % 3)

        def done() -> bool:
            for m in swarm.members.values():
                replica = m.peer.replica
                if replica is not None and replica.ahead:
                    ahead[replica.round] = None
            return min(swarm.rounds()) >= ROUNDS

        await swarm.until(lambda: min(swarm.rounds()) >= 1)
        began = asyncio.get_running_loop().time()
        await swarm.until(done)
        took_s = asyncio.get_running_loop().time() - began
        assert swarm.total("samples_lost") == swarm.total("retracted") == 0

    in_virtual_time(scenario, spec)
    return took_s, len(ahead)


def test_no_device_waits_for_the_last_of_a_round(tmp_path: Path) -> None:
    zero_s, none = seconds_of(tmp_path, "zero")
    delayed_s, ahead = seconds_of(tmp_path, "delayed")
    assert none == 0
    assert ahead >= ROUNDS // 2
    assert delayed_s < 0.85 * zero_s


def test_the_feeder_launches_as_soon_as_the_next_round_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The links are so slow that hardly any news wakes it."""
    opened, launched = dict[tuple[str, int], float](), dict[tuple[str, int], float]()
    open_ahead, step = Transitions.open_ahead, Dispatcher.step

    async def opens(transitions: Transitions) -> None:
        await open_ahead(transitions)
        [peer_id] = [
            m.peer.gossip.own.peer_id
            for m in simulation.monitor.members.values()
            if m.peer.replica and m.peer.replica.transitions is transitions
        ]
        opened[peer_id, transitions.phase.round + 1] = now()

    async def steps(
        dispatcher: Dispatcher, request: StepRequest, *rest: Any, **options: Any
    ) -> Passed:
        if request.stage == 0:
            launched.setdefault((dispatcher.gossip.own.peer_id, request.round), now())
        return await step(dispatcher, request, *rest, **options)

    monkeypatch.setattr(Transitions, "open_ahead", opens)
    monkeypatch.setattr(Dispatcher, "step", steps)
    scenario = Scenario(
        seed=1,
        peers=4,
        links=tuple(Link(1e9, 1e9, 0.05) for _ in range(4)),
        until_s=60.0,
        start_s=0.5,
        global_batch=32,
        sync_mode="delayed",
        service_s=0.4,
        speed_ratio=1.0,
        keep_log=False,
    )

    async def simulated() -> None:
        nonlocal simulation
        simulation = Simulation(scenario)
        result = await simulation.run()
        assert result.broken is None

    simulation: Simulation
    run(simulated())
    both = [which for which in opened.keys() & launched.keys() if which[1] > 1]  # a slow start
    assert len(both) > 20
    assert all(launched[which] == opened[which] for which in both)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", range(3))
def test_a_crash_while_two_rounds_are_open_loses_no_round(tmp_path: Path, seed: int) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync={"mode": "delayed"})

    async def scenario(swarm: Swarm) -> None:
        for i in range(6):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until(lambda: min(swarm.rounds()) >= 4)

        def ahead() -> list[str]:
            return [n for n, m in swarm.members.items() if m.peer.replica and m.peer.replica.ahead]

        await swarm.until(lambda: len(ahead()) >= 2)
        swarm.kill(ahead()[-1])
        await swarm.until_round(ROUNDS)
        swarm.parameters()  # replicas are bit-identical

    in_virtual_time(scenario, spec, seed=seed)


def test_a_held_out_loss_is_of_its_round_though_that_is_open_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that has the round open ahead has its parameters beside those of the one before,
    and need not wait until it begins. One is late to begin each."""
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=ROUNDS, sync={"mode": "delayed"}, evaluate_every=1
    )
    asked, early, found = list[int](), set[int](), list[int]()
    on_infer, evaluate = InferService.on_infer, TorchStage.evaluate
    open_round = Transitions.open_round

    async def scenario(swarm: Swarm) -> None:
        async def asks(self: InferService, request: Request) -> Message:
            r = convert(request.message.body, InferRequest).round
            reply = await on_infer(self, request)
            asked.append(r)
            return reply

        def evaluates(self: TorchStage, *arguments: Any) -> Any:
            [of] = [
                m.peer.replica
                for m in swarm.members.values()
                if m.peer.replica and m.peer.replica.stage is self
            ]
            r = arguments[-1]
            assert of.takes(r)
            found.append(r)
            if of.round < r:
                early.add(r)
            return evaluate(self, *arguments)

        async def opens(self: Transitions, round_index: int, **options: Any) -> None:
            if self is getattr(swarm.members["peer-3"].peer.replica, "transitions", None):
                await asyncio.sleep(0.5)
            await open_round(self, round_index, **options)

        monkeypatch.setattr(Transitions, "open_round", opens)
        monkeypatch.setattr(InferService, "on_infer", asks)
        monkeypatch.setattr(TorchStage, "evaluate", evaluates)
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(ROUNDS)

    in_virtual_time(scenario, spec)
    assert early
    assert len(set(asked)) > ROUNDS // 2
    assert Counter(found) == Counter(asked)


def test_without_memory_for_two_rounds_they_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=8, sync={"mode": "delayed"})

    def another(self: Vectors) -> Vectors:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Vectors, "another", another)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(8)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec)
    assert caplog.text.count("no memory for two rounds at a time") == 4
