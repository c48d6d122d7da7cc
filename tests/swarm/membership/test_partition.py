"""Both sides of a partition have every stage and go on alone; healed, they are one run again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import NotReady
from swarmnet.swarm.update.exchange.auditing import UpdateAudits
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.transport import memory
from swarmnet.wire import Message
from tests.swarm.handlers import Go, intercept_calls
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

HEALED_WITHIN_S = 30.0
ROUNDS_APART = 3


@pytest.mark.parametrize(
    ("mode", "codec", "seed"),
    [
        ("zero", "none", 0),
        *(pytest.param("zero", "none", seed, marks=pytest.mark.long) for seed in (1, 2, 4)),
        ("delayed", "int8", 0),
        *(pytest.param("delayed", "int8", seed, marks=pytest.mark.long) for seed in (1, 2)),
        ("delayed", "none", 0),
        ("zero", "int8", 0),
    ],
)
def test_two_sides_that_went_on_alone_agree_again(
    tmp_path: Path, mode: str, codec: str, seed: int
) -> None:
    """A coded result is a change: parameters that differ would differ for ever."""
    sync = {"mode": mode, "codec": codec}
    spec = tiny_spec(tmp_path, num_stages=2, rounds=400, global_batch=32, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            # A round takes longer than to hear of each other: so the sides meet in one.
            swarm.start(f"peer-{i}", stage=i % 2, speed=0.2)
        await swarm.until_round(5)
        pairs = [(f"peer-{a}", f"peer-{b}") for a in (0, 1) for b in (2, 3)]
        for a, b in pairs:
            swarm.hub.partition(a, b)
        start = max(swarm.rounds())
        await swarm.until(lambda: min(swarm.rounds()) >= start + ROUNDS_APART)
        await _meet(swarm)
        await swarm.until(lambda: _are_apart(swarm, start + ROUNDS_APART))
        for a, b in pairs:
            swarm.hub.heal(a, b)
        healed_at = max(swarm.rounds())
        # Every peer hears of all others again, and replicas of one round have one result.
        await swarm.until(lambda: _agree(swarm, healed_at), HEALED_WITHIN_S)
        assert swarm.total("diverged") > 0, "the two sides did not meet in one round"
        now = max(swarm.rounds())
        await swarm.until_round(now + 5)  # training goes on
        await swarm.until(lambda: _agree(swarm, now), HEALED_WITHIN_S)
        assert _moments_agree(swarm), f"seed {seed}: owners have different moments"

    in_virtual_time(scenario, spec, seed=seed)


def test_two_sides_that_decided_their_mode_alone_agree_again(tmp_path: Path) -> None:
    """In mode `auto`, each for itself: nobody else has what both would give up."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=400, sync={"mode": "auto"})

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"peer-{i}", speed=0.1)
        await swarm.until_round(2)
        swarm.hub.partition("peer-0", "peer-1")

        def decided() -> list[tuple[int, ...]]:
            peers = [m.peer for m in swarm.members.values()]
            return [tuple(s.round for s in p.gossip.own.switches) for p in peers]

        await swarm.until(lambda: all(decided()) and decided()[0] != decided()[1])
        await swarm.until_round(max(swarm.rounds()) + 10)
        swarm.hub.heal("peer-0", "peer-1")
        healed_at = max(swarm.rounds())

        def agree() -> bool:
            first, last = swarm.rounds()
            are_equal = torch.equal(swarm.flat("peer-0"), swarm.flat("peer-1"))
            return healed_at < first == last and are_equal

        await swarm.until(agree, HEALED_WITHIN_S)
        assert swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_a_backup_that_has_seen_another_gradient_fetches_the_moments(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a partition in which both sides made as many steps: one sum that reaches the backups
    is another than that which the primary used. An audit would take that for a lie."""
    monkeypatch.setattr(UpdateAudits, "is_on", False)
    spec = tiny_spec(tmp_path, num_stages=1, rounds=60, sync={"mode": mode})

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", stage=0)
        await swarm.until_round(5)
        for member in swarm.members.values():
            exchanges = member.peer.exchanges
            assert exchanges is not None
            _send_other_sums(exchanges)
        await swarm.until(lambda: swarm.total("shard_unlike") > 0)
        now = max(swarm.rounds())
        await swarm.until_round(now + 5)
        assert _moments_agree(swarm)
        assert torch.equal(swarm.flat("peer-0"), swarm.flat("peer-1"))
        assert swarm.total("shard_reset") == swarm.total("shard_stale") == 0
        unlike = swarm.total("shard_unlike")
        await swarm.until_round(now + 12)
        assert swarm.total("shard_unlike") == unlike, "what was fetched is a copy"
        assert _lineages_agree(swarm)

    in_virtual_time(scenario, spec, seed=0)


def test_whoever_does_not_know_its_lineage_is_taken_for_a_copy(tmp_path: Path) -> None:
    """As after a checkpoint, which does not have it. With the next step all owners know it."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=20)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", stage=0)
        await swarm.until_round(5)
        states = swarm.members["peer-0"].peer.exchanges.states
        lineages = states._lineages  # noqa: SLF001  only a restart from a checkpoint lacks them
        num_owned = len(lineages)
        lineages.clear()
        await swarm.until_round(10)
        assert len(lineages) == num_owned > 0
        assert swarm.total("shard_unlike") == 0
        assert _lineages_agree(swarm)

    in_virtual_time(scenario, spec, seed=0)


def _send_other_sums(exchanges: Exchanges) -> None:
    """With the next sum to each backup, once."""
    told: set[str] = set()

    async def other(peer_id: str, message: Message, go: Go) -> Message:
        if message.arrays and peer_id not in told:
            told.add(peer_id)
            (total,) = message.arrays
            message = Message(message.body, (from_tensor(-to_tensor(total)),))
        return await go(message)

    async def refused(peer_id: str, message: Message, go: Go) -> Message:
        raise NotReady("the step carries its sum")

    intercept_calls(exchanges.transport, "mirror", other)
    intercept_calls(exchanges.transport, "sums", refused)


async def _meet(swarm: Swarm) -> None:
    """The side that noticed the partition first, and is ahead, waits for the other: sides that are
    a round apart and equally fast are never in one round."""

    def round_of(side: tuple[str, ...]) -> int:
        return min(swarm.members[name].peer.gossip.own.round for name in side)

    behind, ahead = sorted([("peer-0", "peer-1"), ("peer-2", "peer-3")], key=round_of)
    there = round_of(ahead)
    if round_of(behind) < there:
        for name in ahead:
            swarm.hub.freeze(name)
        await swarm.until(lambda: round_of(behind) >= there)
        for name in ahead:
            swarm.hub.thaw(name)


def _are_apart(swarm: Swarm, least: int) -> bool:
    rounds = swarm.rounds()
    if min(rounds) < least or len(set(rounds)) != 1:
        return False
    return not torch.equal(swarm.flat("peer-0"), swarm.flat("peer-2")) and not torch.equal(
        swarm.flat("peer-1"), swarm.flat("peer-3")
    )


def _agree(swarm: Swarm, after: int) -> bool:
    rounds = swarm.rounds()
    if min(rounds) <= after or len(set(rounds)) != 1:
        return False
    if any(len(m.peer.view.live(_now())) != 4 for m in swarm.members.values()):
        return False
    return torch.equal(swarm.flat("peer-0"), swarm.flat("peer-2")) and torch.equal(
        swarm.flat("peer-1"), swarm.flat("peer-3")
    )


def _moments_agree(swarm: Swarm) -> bool:
    """Owners of a shard that are equally far have the same bits."""
    seen: dict[tuple[int, int, int], Any] = {}
    compared = 0
    for member in swarm.members.values():
        replica = member.peer.replica
        assert replica is not None
        for j in replica.optimizer.owned():
            _, arrays = replica.optimizer.export(j)
            bits = [bytes(a.data) for a in arrays]
            key = (replica.index, j, replica.optimizer.steps(j))
            compared += key in seen
            if seen.setdefault(key, bits) != bits:
                return False
    assert compared, "no shard has two owners"
    return True


def _lineages_agree(swarm: Swarm) -> bool:
    """Of owners of a shard that are equally far, and they are known."""
    seen: dict[tuple[int, int], bytes] = {}
    compared = 0
    for member in swarm.members.values():
        replica, states = member.peer.replica, member.peer.exchanges.states
        assert replica is not None
        for j in replica.optimizer.owned():
            lineage = states.lineage(j)
            key = (j, replica.optimizer.steps(j))
            compared += key in seen
            if not lineage or seen.setdefault(key, lineage) != lineage:
                return False
    assert compared, "no shard has two owners"
    return True


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", [3, 4, 7, 8])
def test_two_that_took_each_other_for_dead_wrongly_wait_for_neither(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round no deadline is known. Each has summed the other's shards by itself, and
    waits with its own for the other's gradient."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4000)
    monkeypatch.setattr(memory, "UNREACHABLE_AFTER_S", 0.0)  # as a router that says so

    async def scenario(swarm: Swarm) -> None:
        swarm.hub.partition("peer-1", "peer-3")
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await asyncio.sleep(20.0)
        began_at = max(swarm.rounds())
        swarm.hub.heal("peer-1", "peer-3")
        await swarm.until(lambda: min(swarm.rounds()) > began_at + 3, HEALED_WITHIN_S)

    in_virtual_time(scenario, spec, seed=seed, is_synthetic=True)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_of_two_results_the_one_of_more_samples_holds(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two replicas of a stage do not reach each other when the first round ends, and each has
    a result of its own samples."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4000, sync={"mode": mode})
    monkeypatch.setattr(memory, "UNREACHABLE_AFTER_S", 0.0)

    async def scenario(swarm: Swarm) -> None:
        def samples() -> dict[str, int]:
            return {n: swarm.members[n].peer.gossip.own.samples for n in ("peer-1", "peer-3")}

        def is_of_few(name: str) -> bool:
            return 0 < samples()[name] < spec.pipeline.global_batch

        swarm.hub.partition("peer-1", "peer-3")
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until(lambda: is_of_few("peer-1") and is_of_few("peer-3"))
        of = samples()
        assert sum(of.values()) == spec.pipeline.global_batch
        fewer, more = sorted(of, key=of.__getitem__)
        assert of[fewer] < of[more]
        await swarm.until(lambda: max(swarm.rounds()) >= 10)
        now = dict(zip(swarm.members, swarm.rounds(), strict=True))
        assert now[fewer] < 5 < now[more]

    in_virtual_time(scenario, spec, seed={"zero": 4, "delayed": 5}[mode], is_synthetic=True)
