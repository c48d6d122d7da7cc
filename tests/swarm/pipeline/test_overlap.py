"""An update is a stream: while the last shards' gradients are still being sent, steps are made on
the first ones, and their results are on the way back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarmnet.methods.update import ReduceRequest
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes, SyntheticOptimizer
from swarmnet.simulation.swarm import Simulation
from swarmnet.transport.base import Handler, Request
from swarmnet.transport.memory import MemoryTransport
from swarmnet.wire import Message, convert

NUM_PEERS, NUM_SHARDS, SHARD_PARAMETERS = 3, 48, 250_000
LINK = Link(4e6, 4e6, 0.01)
"""A shard's gradient takes a quarter of a second."""
ROUND = 8


@dataclass
class Times:
    """Of round `ROUND`, in virtual seconds."""

    gradients: list[float] = field(default_factory=list)
    """Each gradient, when it has come."""
    steps: list[float] = field(default_factory=list)
    results: list[float] = field(default_factory=list)
    """Each result, when it is sent."""


def watch(monkeypatch: pytest.MonkeyPatch) -> Times:
    """From now on."""
    times, clocks = Times(), list[asyncio.AbstractEventLoop]()
    handle, step = MemoryTransport.handle, SyntheticOptimizer.step

    def watched(self: MemoryTransport, method: str, handler: Handler, **more: bool) -> None:
        async def reduce(request: Request) -> Message:
            asked = convert(request.message.body, ReduceRequest)
            now = clocks[0].time
            is_watched = asked.round == ROUND and any(asked.num_tokens)
            if is_watched:
                times.gradients += [now()] * len(asked.shards)
            reply = await handler(request)
            if is_watched:
                times.results += [now()] * len(asked.shards)
            return reply

        clocks.append(asyncio.get_running_loop())
        handle(self, method, reduce if method == "reduce" else handler, **more)

    def stepped(
        self: Any, shard: int, before: Any, total: Any, scale: float, r: int, *a: Any
    ) -> Any:
        if r == ROUND:
            times.steps.append(clocks[0].time())
        return step(self, shard, before, total, scale, r, *a)

    monkeypatch.setattr(MemoryTransport, "handle", watched)
    monkeypatch.setattr(SyntheticOptimizer, "step", stepped)
    return times


@pytest.mark.parametrize("seed", range(3))
def test_reduce_step_and_gather_overlap(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    times = watch(monkeypatch)
    scenario = Scenario(
        seed=seed,
        peers=NUM_PEERS,
        stages=1,
        rounds=ROUND + 2,
        until_s=2000.0,
        link=LINK,
        clip=False,
        service_s=1.0,
        sizes=Sizes(num_shards=NUM_SHARDS, shard_parameters=SHARD_PARAMETERS),
        check_s=5.0,
        keep_log=False,
    )
    result = run(Simulation(scenario).run())
    assert result.broken is None
    assert result.rounds > ROUND
    assert len(times.gradients) >= (NUM_PEERS - 1) * NUM_SHARDS
    gradients, steps, results = map(sorted, (times.gradients, times.steps, times.results))
    assert steps[len(steps) // 4] < gradients[-1], (
        "a quarter of all steps, before the last gradient"
    )
    assert results[len(results) // 4] < steps[-1], "a quarter of all results, before the last step"
