"""Owners of shards that lie as primaries: sums that are not those of the contributions, and results
that do not follow from them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import SwarmnetError
from swarmnet.methods.update import MIRROR, MirrorRequest, ReduceReply
from swarmnet.methods.update_proof import (
    FINDING,
    GIVEN,
    SIGNED_AS,
    Finding,
    Proof,
    Stepped,
    Summed,
)
from swarmnet.protocol.audit import UPDATE_RATE, Draw
from swarmnet.spec import RunSpec
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.pipeline.receipts import hash_of
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.optimizer import muon
from swarmnet.training.optimizer.muon import orthogonal
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message, pack
from tests.hostile.attacker import ANSWER_S, NamedSigner
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

LIAR = "liar"
NAMES = ["peer-0", "peer-1", "peer-2", LIAR]
UPDATES = 50


def turned(array: Array, by: float) -> Array:
    return from_tensor(to_tensor(array) * by)


def add_falsely(peer: Peer) -> None:
    """The sum is half as large again."""
    work = peer.exchanges.work
    total = work.total

    async def false(*arguments: Any, **options: Any) -> Any:
        found = await total(*arguments, **options)
        if found is None:
            return None
        gradient = turned(found.gradient, 1.5)
        return replace(found, gradient=gradient, hash=hash_of(gradient), decoded=None)

    work.total = false  # type: ignore[method-assign]


def weaken(peer: Peer) -> None:
    """One contribution counts a tenth, and the sum says nothing of it."""
    optimizer: Any = peer.exchanges.replica.optimizer
    add = optimizer.sum

    def false(contributions: Any) -> Array:
        first, *others = contributions
        return add([turned(first, 0.1), *others])

    optimizer.sum = false


def leave_out(peer: Peer) -> None:
    """One contribution is not in the sum, and its contributor is told that it is."""
    work = peer.exchanges.work
    total = work.total

    async def false(exchange: int, shard: int, parts: Any, **options: Any) -> Any:
        return await total(exchange, shard, [p for p in parts if p[0] != "peer-1"], **options)

    work.total = false  # type: ignore[method-assign]


def make_up(peer: Peer) -> None:
    """One contribution is another one, which nobody has signed."""
    proofs = peer.exchanges.proofs
    behind = proofs.behind

    def false(exchange: int, shard: int, parts: Any, counted: Any) -> Any:
        return tuple(
            replace(e, gradient=bytes(32)) if e.peer_id == "peer-1" else e
            for e in behind(exchange, shard, parts, counted)
        )

    proofs.behind = false  # type: ignore[method-assign]


def step_falsely(peer: Peer) -> None:
    """The step is half as long again."""
    optimizer: Any = peer.exchanges.replica.optimizer
    step = optimizer.step

    def false(j: int, present: Array, *rest: Any) -> tuple[Array, Array]:
        made = to_tensor(step(j, present, *rest)[0])
        before = to_tensor(present)
        longer = from_tensor(before + 1.5 * (made - before))
        return longer, longer

    optimizer.step = false


LIES: dict[str, Callable[[Peer], None]] = {
    "another sum": add_falsely,
    "a contribution that counts less": weaken,
    "a contribution left out": leave_out,
    "a contribution made up": make_up,
    "another result": step_falsely,
}


async def until_served(swarm: Swarm, rate: float) -> None:
    """All peers have a stage, and make so many of the sums again. The liar does not feed: what a
    feeder launches and does not commit holds up everybody, which is another lie."""
    for name in NAMES:
        swarm.start(name, feeds=name != LIAR)
    await swarm.until_round(1)
    for name in NAMES:
        audits = swarm.members[name].peer.exchanges.audits
        audits.draw = Draw(random.Random(name), rate)
        audits.looks = Draw(random.Random(name), 0.5)


def barred_by(swarm: Swarm) -> dict[str, list[str]]:
    return {
        name: [p for p in NAMES if member.peer.dispatcher.conclusions.is_barred(p)]
        for name, member in swarm.members.items()
    }


def spec_of(folder: Path, rounds: int, **sync: Any) -> Any:
    return tiny_spec(folder, num_stages=1, rounds=rounds, sync={"replication": 3} | sync)


def test_a_false_result_is_found_where_the_primary_alone_orthogonalizes(tmp_path: Path) -> None:
    """Backups make one such step in ten again, each for itself. Who has found a lie follows the
    liar no more: it leads nothing where that one votes."""

    async def scenario(swarm: Swarm) -> None:
        await until_served(swarm, 0.0)
        begun, liar = max(swarm.rounds()), swarm.members[LIAR].peer
        only_matrices(liar)

        def is_found() -> bool:
            found = barred_by(swarm)
            return any(LIAR in found[name] for name in NAMES[:-1])

        await swarm.until(lambda: is_found() or max(swarm.rounds()) > begun + UPDATES)
        assert is_found()
        assert {p for found in barred_by(swarm).values() for p in found} == {LIAR}

    in_virtual_time(scenario, with_muon(spec_of(tmp_path, 120)), signer=NamedSigner)


def only_matrices(peer: Peer) -> None:
    """Other steps are true."""
    optimizer: Any = peer.exchanges.replica.optimizer
    step = optimizer.step
    step_falsely(peer)
    false = optimizer.step

    def some(j: int, *rest: Any) -> tuple[Array, Array]:
        made: tuple[Array, Array] = (step if optimizer.is_repeatable(j) else false)(j, *rest)
        return made

    optimizer.step = some


def with_muon(spec: RunSpec) -> RunSpec:
    values = spec.model_dump()
    values["optimizer"] |= {"kind": "muon"}
    return RunSpec.model_validate(values)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_other_products_of_matrices_are_no_lie(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step differs, as between a processor and a card, and all are made again."""
    rng, compared = torch.Generator().manual_seed(0), 0

    def unlike(matrix: torch.Tensor) -> torch.Tensor:
        nonlocal compared
        compared += 1
        return orthogonal(matrix) * (1 + 1e-3 * torch.randn(matrix.shape, generator=rng))

    monkeypatch.setattr(muon, "orthogonal", unlike)

    async def scenario(swarm: Swarm) -> None:
        await until_served(swarm, 0.0)
        for member in swarm.members.values():
            member.peer.exchanges.audits.repeats = Draw(random.Random(), 1.0)
        begun, before = max(swarm.rounds()), compared
        await swarm.until_round(begun + 6)
        swarm.parameters()  # asserts that replicas are the same
        num_matrices = 7 * swarm.spec.model.num_hidden_layers
        assert compared - before > 2 * 4 * num_matrices, "backups have made steps again"
        assert not any(barred_by(swarm).values())

    spec = with_muon(spec_of(tmp_path, 12, codec=codec))
    in_virtual_time(scenario, spec, signer=NamedSigner)


@pytest.mark.parametrize("lie", LIES)
def test_a_false_primary_is_found_and_is_primary_no_more(tmp_path: Path, lie: str) -> None:
    """A contribution that is left out is seen by its contributor alone."""
    honest = NAMES[:-1]
    most = 1 if lie == "a contribution left out" else len(honest)

    async def scenario(swarm: Swarm) -> None:
        await until_served(swarm, UPDATE_RATE)
        begun = max(swarm.rounds())
        LIES[lie](swarm.members[LIAR].peer)

        def is_found() -> bool:
            found = barred_by(swarm)
            return sum(LIAR in found[name] for name in honest) >= most

        await swarm.until(lambda: is_found() or max(swarm.rounds()) > begun + UPDATES)
        assert is_found()
        now = max(swarm.rounds())
        await swarm.until_round(now + 3)
        found = barred_by(swarm)
        assert {p for name in honest for p in found[name]} == {LIAR}
        for name in honest if most > 1 else ():
            assert LIAR not in primaries_of(swarm.members[name].peer)

    in_virtual_time(scenario, spec_of(tmp_path, 120), signer=NamedSigner)


def primaries_of(peer: Peer) -> set[str]:
    """With whom the next exchange begins."""
    exchanges = peer.exchanges
    shards = range(exchanges.replica.num_shards)
    return {exchanges.ownership.roster(exchanges.current, j).ballot.primary for j in shards}


def test_who_gives_two_results_is_found_by_both(tmp_path: Path) -> None:
    """Backups get the one that follows, and another replica something else, both signed."""

    async def scenario(swarm: Swarm) -> None:
        await until_served(swarm, 0.0)
        liar, victim = swarm.members[LIAR].peer, "peer-1"
        reduce = handler_of(liar.transport, "reduce")

        async def reply(request: Request) -> Message:
            told = await reduce(request)
            if request.remote != victim or not told.arrays:
                return told
            arrays = tuple(turned(a, 1.01) for a in told.arrays)
            shards, given = list(told.body.shards), iter(arrays)
            for i, one in enumerate(shards):
                if one.is_copy or one.proof is None:
                    continue
                said = one.proof.read(Stepped)
                statement = pack(replace(said, result=hash_of(next(given))))
                proof = Proof(statement, NamedSigner(LIAR).sign(SIGNED_AS + statement))
                shards[i] = replace(one, proof=proof)
            return replace(told, body=ReduceReply(tuple(shards)), arrays=arrays)

        liar.transport.handle("reduce", reply)
        begun, honest = max(swarm.rounds()), NAMES[:-1]
        await swarm.until(
            lambda: (
                all(LIAR in barred_by(swarm)[name] for name in honest)
                or max(swarm.rounds()) > begun + UPDATES
            )
        )
        found = barred_by(swarm)
        assert all(found[name] == [LIAR] for name in honest)

    # Two owners a shard: the victim is no backup of some shards of the liar.
    spec = spec_of(tmp_path, 120, replication=2)
    in_virtual_time(scenario, spec, signer=NamedSigner)


def in_the_last_bit(stage: Any, optimizer: Any) -> tuple[Any, Any]:
    """Sums and steps as a machine makes them whose arithmetic differs a little."""
    step, add = optimizer.step, optimizer.sum

    def changed(array: Array) -> Array:
        values = to_tensor(array).clone()
        if values.dtype == torch.float32:
            values *= 1 + 2e-7 * torch.randn(values.shape, generator=torch.Generator())
        return from_tensor(values)

    def unlike(j: int, present: Array, *rest: Any) -> tuple[Array, Array]:
        made = changed(step(j, present, *rest)[0])
        return made, optimizer.codec.applied(j, present, made)

    optimizer.step, optimizer.sum = unlike, lambda parts: changed(add(parts))
    return stage, optimizer


@pytest.mark.parametrize(
    ("mode", "codec", "rule"),
    [
        ("zero", "none", "mean"),
        ("zero", "int8", "median_clip"),
        ("delayed", "int4", "median_clip"),
        ("delayed", "none", "trimmed_mean"),
        ("local", "int8", "centered_clip"),
    ],
)
def test_honest_primaries_of_other_arithmetic_are_believed(
    tmp_path: Path, mode: str, codec: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of the sums that are drawn are made again: the contributions are there as long as that
    takes."""
    caplog.set_level(logging.DEBUG, "swarmnet.audit")

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        swarm.start("peer-1", build=lambda k: in_the_last_bit(*swarm.build(k)))
        swarm.start("peer-2")
        swarm.start(LIAR, speed=0.5)  # an honest one here
        await swarm.until_round(1)
        for name in NAMES:
            audits = swarm.members[name].peer.exchanges.audits
            audits.draw, audits.looks = Draw(random.Random(name), 0.3), Draw(random.Random(), 1.0)
        await swarm.until_round(8)
        said = [record.getMessage() for record in caplog.records]
        made, failed = (sum(what in line for line in said) for what in ("was made", "was not made"))
        print(f"{mode}, {codec}, {rule}: {made} sums were made again, {failed} not")
        assert made > 4 * failed
        assert made > 5
        assert not any(barred_by(swarm).values())

    sync: dict[str, Any] = {"mode": mode, "codec": codec, "aggregation": rule}
    if mode == "local":
        sync["local_steps"] = 2
    in_virtual_time(scenario, spec_of(tmp_path, 8, **sync), signer=NamedSigner)


def test_nobody_is_made_to_look_like_a_liar(tmp_path: Path) -> None:
    """One replica says of each step that another one has made that it is false, and shows other
    arrays than were signed."""

    async def scenario(swarm: Swarm) -> None:
        await until_served(swarm, 0.0)
        slanderer = swarm.members[LIAR].peer
        proofs, told = slanderer.exchanges.proofs, 0

        async def show(request: Request) -> Message:
            return Message(None, (from_tensor(torch.ones(4096)),))

        serve(slanderer.transport, GIVEN, show)
        while max(swarm.rounds()) < 12:
            r = slanderer.exchanges.current - 1
            for j in range(slanderer.exchanges.replica.num_shards):
                summed, stepped = proofs.summed_of(r, j), proofs.stepped_of(r, j)
                if summed is None or summed.read(Summed).peer_id == LIAR:
                    continue
                other = () if stepped is None else (stepped,)
                for finding in (Finding(0, summed), Finding(0, summed, other)):
                    for name in NAMES[:-1]:
                        await asyncio.sleep(0.1)  # there is a quota
                        message = Message(finding)
                        await call(slanderer.transport, name, FINDING, message, timeout_s=ANSWER_S)
                        told += 1
            await asyncio.sleep(0.05)
        assert told > 5
        assert not any(barred_by(swarm)[name] for name in NAMES[:-1])

    in_virtual_time(scenario, spec_of(tmp_path, 20), signer=NamedSigner)


def test_who_mirrors_beside_a_primary_makes_no_liar_of_it(tmp_path: Path) -> None:
    """What it has signed of sums of its own is not kept for those of the primaries that others
    follow: these would seem to have signed for other contributions."""

    async def scenario(swarm: Swarm) -> None:
        await until_served(swarm, 0.0)
        liar = swarm.members[LIAR].peer
        proofs, stage = liar.exchanges.proofs, liar.exchanges.replica.stage
        told = 0
        for _ in range(4):
            r = max(swarm.rounds())
            for name in NAMES[:-1]:
                victim = swarm.members[name].peer
                for j, size in enumerate(stage.shard_sizes):
                    steps = victim.exchanges.replica.optimizer.steps(j)
                    leads = victim.exchanges.ownership.roster(r, j).ballot.primary == LIAR
                    if leads or steps < 0:
                        continue
                    nothing = from_tensor(torch.zeros(size))
                    sum_ = hash_of(nothing)
                    said = Summed(proofs.run_id, LIAR, 0, r, 0, j, 5, (), sum_, 64, 1.0, steps)
                    statement = pack(said)
                    summed = Proof(statement, NamedSigner(LIAR).sign(SIGNED_AS + statement))
                    body = MirrorRequest(r, 0, j, 1.0, steps, 64, 1.0, term=5, summed=summed)
                    message = Message(body, (nothing,))
                    with contextlib.suppress(SwarmnetError):
                        await call(liar.transport, name, MIRROR, message, timeout_s=ANSWER_S)
                    told += 1
                    kept = victim.exchanges.proofs.summed_of(r, j)
                    assert kept is None or kept.read(Summed).peer_id != LIAR, (name, r, j)
            await swarm.until_round(r + 1)
        assert told > 10
        assert not any(barred_by(swarm)[name] for name in NAMES[:-1])

    in_virtual_time(scenario, spec_of(tmp_path, 20), signer=NamedSigner)
