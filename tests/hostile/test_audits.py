"""Replicas that lie plausibly: finite numbers of the right shape, which are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.methods.audit import RECOMPUTE, RecomputeReply
from swarmnet.ports import LossResult, Passage
from swarmnet.protocol.audit import Draw
from swarmnet.swarm.calls import serve
from swarmnet.swarm.peer import Peer
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.hostile.attacker import NamedSigner
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

RATE = 0.5
"""Audits are more frequent here than they are, so that the test takes less long."""
LIAR = "liar"


def turned(array: Array) -> Array:
    """An array that is a half too large, but looks as it should."""
    return from_tensor(to_tensor(array) * 1.5)


def turned_gradient(result: LossResult) -> LossResult:
    assert result.grad_inputs is not None
    return replace(result, grad_inputs=turned(result.grad_inputs))


LIES: dict[str, tuple[int, dict[str, Callable[[Any], Any]]]] = {
    "activation of the first stage": (0, {"forward_pass": turned}),
    "activation": (1, {"forward_pass": turned}),
    "gradient": (1, {"backward_pass": turned}),
    "gradient of the last stage": (2, {"loss_pass": turned_gradient}),
    "loss": (2, {"loss_pass": lambda r: replace(r, loss_sum=r.loss_sum * 0.5)}),
}
"""By what is false: the liar's stage, and how it changes what it gives."""


class Lying:
    """A stage that changes every fourth, or another part, of what it gives of its own
    microbatches."""

    def __init__(
        self, stage: Any, lies: dict[str, Callable[[Any], Any]], part: float = 0.25
    ) -> None:
        self._stage = stage
        self._lies = lies
        self._part = part
        self._rng = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        value, lie = getattr(self._stage, name), self._lies.get(name)
        if lie is None:
            return value

        def changed(*arguments: Any) -> Any:
            passage = value(*arguments)
            assert isinstance(passage, Passage)
            return passage.then(lie) if self._rng.random() < self._part else passage

        return changed


def start(swarm: Swarm, num_stages: int, liars_stage: int, build: Any = None) -> None:
    """Three replicas a stage; one of them is the liar. A replica of the last stage feeds: one of
    the first would keep most of its microbatches to itself."""
    for stage in range(num_stages):
        for i in range(3):
            is_liar = stage == liars_stage and i == 2
            name = LIAR if is_liar else f"peer-{stage}-{i}"
            peer = swarm.start(
                name,
                stage=stage,
                feeds=(stage, i) == (num_stages - 1, 0),
                build=build if is_liar else None,
            )
            peer.steps.audits.draw = Draw(random.Random(f"{name}"), RATE)


def barred_by(swarm: Swarm) -> dict[str, list[str]]:
    """Who has barred whom."""
    names = list(swarm.members)
    return {
        name: [p for p in names if conclusions_of(member.peer).is_barred(p)]
        for name, member in swarm.members.items()
    }


def conclusions_of(peer: Peer) -> Any:
    return peer.dispatcher.conclusions


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_and_gets_nothing_more(tmp_path: Path, lie: str) -> None:
    stage, changes = LIES[lie]
    spec = tiny_spec(tmp_path, num_stages=3, rounds=200, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            honest, optimizer = swarm.build(stage_index)
            return Lying(honest, changes), optimizer

        start(swarm, 3, stage, build)
        callers = ["peer-2-0"] if stage == 0 else [f"peer-{stage - 1}-{i}" for i in range(3)]
        await swarm.until(lambda: any(barred_by(swarm)[name] for name in callers))
        found = barred_by(swarm)
        assert {p for barred in found.values() for p in barred} == {LIAR}
        finders = [name for name in callers if found[name]]
        judges = [f"peer-{stage}-{i}" for i in range(2)]
        assert any(found[name] for name in judges)
        # Who has found it sends it nothing more.
        from_round = max(swarm.rounds()) + 1
        await swarm.until_round(from_round + 3)
        for r in range(from_round, from_round + 3):
            for path in swarm.paths[r].values():
                if stage == 0 or path[stage - 1] in finders:
                    assert path[stage] != LIAR
        assert {p for barred in barred_by(swarm).values() for p in barred} == {LIAR}

    in_virtual_time(scenario, spec, signer=NamedSigner)


def test_a_newcomer_that_lies_is_found_by_its_first_microbatch(tmp_path: Path) -> None:
    """Nothing else is drawn here."""
    spec = tiny_spec(tmp_path, num_stages=3, rounds=200, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            honest, optimizer = swarm.build(stage_index)
            return Lying(honest, LIES["activation"][1], part=1.0), optimizer

        start(swarm, 3, -1)
        for member in swarm.members.values():
            member.peer.steps.audits.draw = Draw(random.Random(0), 0.0)
        await swarm.until_round(4)
        swarm.start(LIAR, stage=1, feeds=False, build=build)
        await swarm.until(lambda: any(barred_by(swarm).values()))
        gave = [path for paths in swarm.paths.values() for path in paths.values() if LIAR in path]
        assert len(gave) <= 3 * 2, "one or two of each caller"
        assert {p for barred in barred_by(swarm).values() for p in barred} == {LIAR}

    in_virtual_time(scenario, spec, signer=NamedSigner)


def test_an_honest_swarm_bars_nobody(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=3, rounds=6, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, 3, -1)
        await swarm.until_round(6)
        names = list(swarm.members)
        agreed = [
            conclusions_of(m.peer).of(p).agreed for m in swarm.members.values() for p in names
        ]
        assert sum(agreed) > 40
        assert not any(barred_by(swarm).values())
        for member in swarm.members.values():
            assert all(conclusions_of(member.peer).may_judge(p) for p in names)

    in_virtual_time(scenario, spec, signer=NamedSigner)


def test_a_judge_that_slanders_is_not_asked_again(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=12, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, 2, 1)

        async def slander(request: Request) -> Message:
            return Message(RecomputeReply(1.0))

        serve(swarm.members[LIAR].peer.transport, RECOMPUTE, slander)
        swarm.start("peer-1-3", stage=1)  # one more: of three judges two are a majority
        callers = [conclusions_of(swarm.members[f"peer-0-{i}"].peer) for i in range(3)]
        await swarm.until(lambda: not all(c.may_judge(LIAR) for c in callers))
        await swarm.until_round(max(swarm.rounds()) + 2)
        assert not any(barred_by(swarm).values())

    in_virtual_time(scenario, spec, signer=NamedSigner)


def test_nobody_is_made_to_look_like_a_liar_by_changed_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that sends judges other arrays than there are receipts for is refused."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=5, global_batch=32)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, 2, -1)
        refused = 0
        for i in range(3):
            peer = swarm.members[f"peer-0-{i}"].peer
            call = peer.dispatcher.call

            async def changed(
                to: str, method: Any, message: Message, call: Any = call, **options: Any
            ) -> Any:
                nonlocal refused
                if method is not RECOMPUTE:
                    return await call(to, method, message, **options)
                inputs, *rest = message.arrays
                forged = replace(message, arrays=(turned(inputs), *rest))
                try:
                    return await call(to, method, forged, **options)
                except Exception:
                    refused += 1
                    raise

            monkeypatch.setattr(peer.dispatcher, "call", changed)
        await swarm.until_round(5)
        assert refused > 5
        assert not any(barred_by(swarm).values())

    in_virtual_time(scenario, spec, signer=NamedSigner)
