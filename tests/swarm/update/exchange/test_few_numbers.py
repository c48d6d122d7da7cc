"""`[sync] topk_density`: the primary of a shard alone makes its step, and backups take its result,
whoever dies."""

from __future__ import annotations

import asyncio
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.audit import Draw
from swarmnet.protocol.codecs import sparse_codec
from swarmnet.spec import RunSpec
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.update.exchange.auditing import UpdateAudits
from swarmnet.training.arrays import from_tensor, to_tensor
from tests.hostile.attacker import NamedSigner
from tests.swarm.harness import Swarm, coded, in_virtual_time, tiny_spec

KEPT = 208
STEPS, ROUNDS = 2, 14
STRUCK = 5
"""The exchange in which a primary dies; of every second round."""
VICTIM = "peer-1"


def spec_of(folder: Path, num_stages: int = 1, rounds: int = ROUNDS, **sync: Any) -> RunSpec:
    about = {"mode": "local", "local_steps": STEPS, "aggregation": "mean"}
    about |= coded(sparse_codec(KEPT)) | sync
    return tiny_spec(folder, num_stages=num_stages, rounds=rounds, sync=about, global_batch=32)


def common(peer: Peer) -> list[torch.Tensor]:
    replica = peer.replica
    assert replica is not None
    return [to_tensor(replica.common_shard(j)).clone() for j in range(replica.num_shards)]


def led_by(swarm: Swarm, name: str) -> list[int]:
    exchanges = swarm.members[name].peer.exchanges
    shards = range(exchanges.replica.num_shards)
    rosters = {j: exchanges.ownership.roster(exchanges.current, j) for j in shards}
    return [j for j, roster in rosters.items() if roster.ballot.primary == name]


def ahead(peer: Peer, shard: int) -> torch.Tensor | None:
    """What the results of a shard have left out, as this peer knows."""
    assert peer.replica is not None
    arrays = peer.replica.optimizer.export(shard)[1]
    return to_tensor(arrays[1]) if len(arrays) > 1 else None


def test_a_primary_alone_knows_what_its_results_have_left_out(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 3)
        await swarm.until_round(5)  # every owner has its state
        before = {name: common(m.peer) for name, m in swarm.members.items()}
        await swarm.until_round(6)
        num_few = 0
        for name, member in swarm.members.items():
            replica = member.peer.replica
            assert replica is not None
            for old, new in zip(before[name], common(member.peer), strict=True):
                if (new != old).any():
                    chunks = (new - old).split(4096)
                    assert all(chunk.count_nonzero() <= KEPT for chunk in chunks)
                    num_few += 1
            leads = led_by(swarm, name)
            for j in replica.optimizer.owned():
                assert (ahead(member.peer, j) is not None) == (j in leads), (name, j)
        assert num_few > 6
        await swarm.until_round(ROUNDS)
        swarm.parameters()
        assert swarm.total("shard_unlike") == swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec_of(tmp_path, 2))


@pytest.mark.parametrize("is_mirrored", [False, True], ids=["before", "after"])
def test_a_primary_dies_before_or_after_a_backup_has_its_result(
    tmp_path: Path, is_mirrored: bool
) -> None:
    """Before: its successor sums again, and begins with nothing left out. After: what the backup
    has holds."""
    told: dict[int, bytes] = {}

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", feeds=f"peer-{i}" != VICTIM)
        await swarm.until_round(STRUCK - 1)
        leads = led_by(swarm, VICTIM)
        assert leads
        exchanges = swarm.members[VICTIM].peer.exchanges
        step_first, copied = exchanges.work.step_first, exchanges.books.copied

        async def dying(exchange: int, shard: int, *args: Any) -> Any:
            made = await step_first(exchange, shard, *args)
            if exchange == STRUCK:
                told.setdefault(shard, bytes(made[0].values.data))
                if not is_mirrored:
                    swarm.kill(VICTIM)
                    await asyncio.Event().wait()
            return made

        def dying_then(exchange: int, *args: Any) -> None:
            copied(exchange, *args)
            if exchange == STRUCK and VICTIM in swarm.members:
                swarm.kill(VICTIM)

        exchanges.work.step_first = dying  # type: ignore[method-assign]
        if is_mirrored:
            exchanges.books.copied = dying_then  # type: ignore[method-assign]
        held = list[set[bytes]]()
        for member in list(swarm.members.values()):
            exchange = member.peer.exchanges

            async def kept(
                shard: int, result: Any, *args: Any, at: Any = exchange, put: Any, **how: Any
            ) -> None:
                if at.current == STRUCK and result.is_coded and shard in told:
                    held.append({bytes(result.values.data), told[shard]})
                await put(shard, result, *args, **how)

            exchange.work.put = functools.partial(kept, put=exchange.work.put)  # type: ignore[method-assign]
        await swarm.until(lambda: VICTIM not in swarm.members)
        swarm.start("newcomer", neighbours=["peer-0"])
        await swarm.until_round(ROUNDS)
        swarm.parameters()
        assert len(swarm.members) == 3
        assert told
        assert held
        assert any(len(both) == 1 for both in held) is is_mirrored
        assert swarm.total("shard_reset") == 0

    in_virtual_time(scenario, spec_of(tmp_path, warmup_rounds=1))


def test_who_comes_to_lead_a_shard_takes_over_what_is_known_of_its_momentum(
    tmp_path: Path,
) -> None:
    """All who were there leave, one after the other."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        for i in range(3):
            await swarm.until_round(4 + 4 * i)
            name = f"newcomer-{i}"
            swarm.start(name)
            await swarm.until(lambda name=name: bool(led_by_now(swarm, name)))  # type: ignore[misc]
            replica = swarm.members[name].peer.replica
            assert replica is not None
            for j in led_by(swarm, name):  # and has not made a step yet
                assert ahead(swarm.members[name].peer, j) is None
                assert to_tensor(replica.optimizer.export(j)[1][0]).any()
            leaver = swarm.members.pop(f"peer-{i}")
            leaver.peer.stop()
            await swarm.until(leaver.life.done)
        await swarm.until_round(24)
        swarm.parameters()
        assert swarm.total("shard_reset") == swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec_of(tmp_path, rounds=40))


def led_by_now(swarm: Swarm, name: str) -> list[int]:
    replica = swarm.members[name].peer.replica
    return led_by(swarm, name) if replica is not None and replica.synced else []


def test_honest_primaries_show_whose_changes_are_in_a_result_and_no_sum_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be barred after eight results of which it does not show what it has signed."""
    counted = list[frozenset[str]]()
    mirrored = UpdateAudits.mirrored

    def seen(self: UpdateAudits, *args: Any) -> frozenset[str]:
        counted.append(mirrored(self, *args))
        return counted[-1]

    monkeypatch.setattr(UpdateAudits, "mirrored", seen)

    async def scenario(swarm: Swarm) -> None:
        names = [f"peer-{i}" for i in range(3)]
        for name in names:
            swarm.start(name)
        await swarm.until_round(1)
        for name in names:
            audits = swarm.members[name].peer.exchanges.audits
            audits.draw = audits.looks = Draw(random.Random(name), 1.0)
        counted.clear()
        await swarm.until_round(24)
        assert len(counted) > 20
        assert set(counted) == {frozenset(names)}
        for member in swarm.members.values():
            found = member.peer.dispatcher.conclusions
            others = [p for p in names if p != member.peer.gossip.own.peer_id]
            assert all(found.of(p).agreed > 5 for p in others)
            assert not any(found.is_barred(p) for p in names)
            assert not member.peer.transport.traffic.sent_bytes.get("given")

    in_virtual_time(scenario, spec_of(tmp_path, rounds=30), signer=NamedSigner)


def test_a_backup_that_gets_a_sum_or_codes_of_none_makes_no_step(tmp_path: Path) -> None:
    """The state stays; what is false in a result is found by who applies it."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)
        replica = swarm.members["peer-0"].peer.replica
        assert replica is not None
        optimizer, size = replica.optimizer, replica.stage.shard_sizes[0]
        before = optimizer.export(0)
        codes = replica.optimizer.codec.names.form(sparse_codec(KEPT), size)[1][0]
        for bad in (torch.full((codes,), 255, dtype=torch.uint8), torch.zeros(7).byte()):
            with pytest.raises(ProtocolViolation):
                optimizer.take(0, replica.common_shard(0), from_tensor(bad), 4)
        after = optimizer.export(0)
        assert before[0] == after[0]
        assert [bytes(a.data) for a in before[1]] == [bytes(a.data) for a in after[1]]

    in_virtual_time(scenario, spec_of(tmp_path))
