"""Whose a result is that another replica tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from swarmnet.methods.update import ShardReply
from swarmnet.methods.update_proof import SIGNED_AS, Proof, Stepped, Summed
from swarmnet.protocol.update.roster import Ballot
from swarmnet.simulation.clock import run
from swarmnet.simulation.stage import packed
from swarmnet.swarm.pipeline.receipts import hash_of
from swarmnet.swarm.update.exchange.proofs import Proofs, hash_of_proof
from swarmnet.wire import Array, pack
from tests.hostile.attacker import NamedSigner
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.swarm.one_replica import RUN, OneReplica

VALUES, OTHERS = (Array("float32", (4,), packed((x, 0.0, 0.0, 0.0))) for x in (1.0, 2.0))
SUM = Summed(RUN, "a", 0, 0, 0, 0, 3, (), bytes(32), 64, 1.0, 0)


def signed(said: Summed | Stepped) -> Proof:
    statement = pack(said)
    return Proof(statement, NamedSigner(said.peer_id).sign(SIGNED_AS + statement))


def step(peer_id: str, summed: Summed | None = None) -> Stepped:
    total = b"" if summed is None else hash_of_proof(signed(summed))
    return Stepped(RUN, peer_id, 0, 0, 0, 0, 1, total, hash_of(VALUES))


def test_a_result_is_of_whoever_has_signed_it_or_its_sum() -> None:
    """It is its teller's where no signature fits it."""
    by_a, by_b = step("a"), step("b", SUM)
    unsigned = replace(signed(by_a), signature=bytes(32))
    own = Ballot(0, "b")
    cases = [
        (ShardReply(1, True, proof=signed(by_a)), VALUES, Ballot(1, "a")),
        (ShardReply(1, True, proof=signed(by_a)), OTHERS, own),
        (ShardReply(1, True, proof=unsigned), VALUES, own),
        (ShardReply(1, True, proof=signed(replace(by_a, round=1))), VALUES, own),
        (ShardReply(1, True, proof=signed(replace(by_a, shard=1))), VALUES, own),
        (ShardReply(1, True, proof=Proof(b"", b"")), VALUES, own),
        (ShardReply(1, True), VALUES, own),
        # A copy, by one that has made the step with the sum of another.
        (ShardReply(1, True, proof=signed(by_b), summed=signed(SUM)), VALUES, Ballot(3, "a")),
        (ShardReply(1, True, proof=signed(by_b)), VALUES, Ballot(1, "b")),
        (ShardReply(1, True, proof=signed(step("b")), summed=signed(SUM)), VALUES, Ballot(1, "b")),
    ]
    elsewhere = replace(SUM, round=1)
    false = replace(signed(SUM), signature=bytes(32))
    for summed, proof in ((signed(elsewhere), step("b", elsewhere)), (false, by_b)):
        told = ShardReply(1, True, proof=signed(proof), summed=summed)
        cases.append((told, VALUES, own))

    async def scenario() -> None:
        pair = OneReplica()
        pair.gossip.signer = NamedSigner("replica")
        proofs = Proofs(pair.gossip, pair.replica)
        for told, values, made in cases:
            assert await proofs.maker(0, 0, "b", told, values) == made, told
        await pair.close()

    run(scenario())


def test_parameters_without_codes_are_shown_by_another_record_with_their_digest() -> None:
    async def scenario() -> None:
        pair = OneReplica()
        proofs = Proofs(pair.gossip, pair.replica)
        told = ShardReply(1, True)
        assert await proofs.maker(0, 0, "b", told, VALUES) == Ballot(0, "b")
        view: Any = pair.gossip.view
        known = view.known
        digest = xxhash.xxh3_64_digest(VALUES.data)
        for name, holds in (("b", False), ("c", True)):
            record = replace(pair.gossip.own, peer_id=name, round=1, digests=digest)
            view.known = lambda stage, now, r=record: [*known(stage, now), r]
            made = await proofs.maker(0, 0, "b", told, VALUES)
            assert made == Ballot(0, "c" if holds else "b")
            assert await proofs.maker(1, 0, "b", told, VALUES) == Ballot(0, "b"), "of another round"
            assert await proofs.maker(0, 0, "b", told, OTHERS) == Ballot(0, "b")
        await pair.close()

    run(scenario())


def test_of_a_sum_that_was_made_alone_no_step_is_signed() -> None:
    """Whoever comes between the two would take a step without a sum for a lie."""

    async def scenario() -> None:
        pair = OneReplica()
        proofs = Proofs(pair.gossip, pair.replica)
        proofs.sums(0, 0, is_alone=True)
        assert proofs.stepped(0, 0, 1, hash_of(VALUES)) is None
        proofs.sums(0, 0)
        assert proofs.stepped(0, 0, 1, hash_of(VALUES)) is not None
        await pair.close()

    run(scenario())


def test_who_comes_between_a_sum_and_its_step_is_told_of_no_step_without_a_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone replica hears of another one right after each of its first sums."""
    is_alone, made = [True], list[Proof | None]()
    sums, stepped, finish_round = Proofs.sums, Proofs.stepped, Proofs.finish_round

    def summed(self: Proofs, *key: int, **named: bool) -> None:
        sums(self, *key, **named)
        is_alone[0] = False

    def signs(self: Proofs, *step: Any) -> Proof | None:
        made.append(stepped(self, *step))
        return made[-1]

    def finishes(self: Proofs, exchange: int) -> None:
        finish_round(self, exchange)
        is_alone[0] = True

    monkeypatch.setattr(Proofs, "is_of_use", property(lambda self: not is_alone[0]))
    monkeypatch.setattr(Proofs, "sums", summed)
    monkeypatch.setattr(Proofs, "stepped", signs)
    monkeypatch.setattr(Proofs, "finish_round", finishes)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        await swarm.until_round(3)

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=1, rounds=3))
    assert made.count(None) >= 3
    assert all(proof.read(Stepped).total for proof in made if proof is not None)
