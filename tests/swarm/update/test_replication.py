"""Shards on R owners each: any R - 1 of them die at any moment, and no moment of AdamW is lost.

Every microbatch of these runs is the same one. So the mean gradient does not depend on whose
gradients died with them, and the state at the end, moments and all, must be that of a run in which
nobody died."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.batch import Batch
from swarmnet.errors import NotReady
from swarmnet.methods.update import ReduceRequest
from swarmnet.protocol.membership.records import ACTIVE, bitmap
from swarmnet.protocol.update import ownership as rules
from swarmnet.spec import RunSpec
from swarmnet.swarm.update.exchange.auditing import UpdateAudits
from swarmnet.swarm.update.exchange.shard_work import Result, ShardWork
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.training.arrays import to_tensor
from swarmnet.training.data import open_data
from swarmnet.transport.base import Request
from swarmnet.wire import Message, convert
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, stepped_by_parts, tiny_spec
from tests.swarm.update.results import results_at

NUM_PEERS = 4
ROUNDS = 9
STRUCK = 4
"""The round in which peers die."""
MOMENTS = [("round", (k + 0.5) / 4) for k in range(4)] + [
    ("update", (k + 0.5) / 12) for k in range(12)
]
"""Parts of a round, and of the update at its end, at which peers die."""
TOLERANCE = 1e-4
AT_ONCE_S = 8.0
"""Virtual seconds from a death to the next round: a round takes half a one, and the deadline for
contributions is at 20."""

State = dict[int, tuple[Any, ...]]
"""By shard: steps, mean and square; in `local` steps and the outer momentum."""


@dataclass
class OneMicrobatch:
    """The same samples, whichever are asked for."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def microbatch(self, indices: Sequence[int]) -> Batch:
        return self.inner.microbatch(range(len(indices)))


def spec_of(folder: Path, replication: int, mode: str = "zero", kind: str = "adamw") -> RunSpec:
    spec = tiny_spec(folder, num_stages=1, rounds=ROUNDS, global_batch=32)
    values = spec.model_dump()
    values["model"]["num_hidden_layers"] = 1
    values["sync"] |= {"replication": replication, "mode": mode}
    values["sync"] |= {"local_steps": STRUCK + 1}  # there is an exchange in that round
    values["optimizer"] |= {"warmup_rounds": 0}
    if kind in ("adamw", "muon"):
        values["optimizer"] |= {"kind": kind}
        return RunSpec.model_validate(values)
    return stepped_by_parts(RunSpec.model_validate(values), kind)


async def start(swarm: Swarm) -> None:
    data = OneMicrobatch(open_data(swarm.spec))
    for i in range(NUM_PEERS):
        swarm.start(f"peer-{i}", data=data)
    await swarm.until_round(STRUCK)


def state_of(swarm: Swarm) -> State:
    """Of every shard that anybody holds; asserts that its owners hold the same bits."""
    found: State = {}
    for member in swarm.members.values():
        replica = member.peer.replica
        assert replica is not None
        for j in replica.optimizer.owned():
            if not member.peer.exchanges.states.follows(j, replica.round):
                continue
            values, arrays = replica.optimizer.export(j)
            moments = [to_tensor(a) for a in arrays]
            steps, *others = found.setdefault(j, (values["steps"], *moments))
            assert steps == values["steps"], f"shard {j}"
            assert len(moments) == len(others)
            assert all(map(torch.equal, moments, others)), f"shard {j}"
    return found


async def end_of(swarm: Swarm) -> tuple[State, dict[str, torch.Tensor]]:
    await swarm.until_round(ROUNDS)
    return state_of(swarm), swarm.parameters()


@dataclass
class Undisturbed:
    """A run in which nobody died."""

    state: State
    parameters: dict[str, torch.Tensor]
    owners: list[tuple[str, ...]]
    """Of the shards, in `STRUCK`."""
    windows: dict[str, tuple[float, float]]
    """Seconds after the beginning of `STRUCK`: of the round, and of the update at its end."""


@functools.cache
def undisturbed(
    folder: Path, replication: int, mode: str = "zero", kind: str = "adamw"
) -> Undisturbed:
    results: list[Undisturbed] = []

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        loop = asyncio.get_running_loop()
        began = loop.time()
        replica = swarm.members["peer-0"].peer.replica
        assert replica is not None
        placement = swarm.members["peer-0"].peer.exchanges.ownership.placement(STRUCK)
        owners = [placement.owners(j) for j in range(replica.num_shards)]
        exchanges = swarm.members["peer-0"].peer.exchanges
        is_beside = mode == "delayed"  # the update of the round before, in this one
        while not replica.closed and not is_beside:  # noqa: ASYNC110
            await asyncio.sleep(1e-4)  # nobody tells, and time costs nothing here
        update_s = loop.time() - began
        while is_beside and not all(  # noqa: ASYNC110
            (STRUCK - 1, j) in results_at(exchanges) for j in range(replica.num_shards)
        ):
            await asyncio.sleep(1e-4)
        updated_s = loop.time() - began
        await replica.changed.until(lambda: replica.round > STRUCK, 60.0)
        round_s = loop.time() - began
        state, parameters = await end_of(swarm)
        windows = {
            "round": (0.0, round_s),
            "update": (update_s, updated_s if is_beside else round_s),
        }
        results.append(Undisturbed(state, parameters, owners, windows))

    in_virtual_time(scenario, spec_of(folder, replication, mode, kind))
    return results[0]


def assert_same_state(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for j, (steps, *moments) in expected.items():
        assert found[j][0] == steps, f"shard {j}: {found[j][0]} steps"
        for ours, theirs in zip(found[j][1:], moments, strict=True):
            assert (ours - theirs).norm() <= TOLERANCE * theirs.norm(), f"shard {j}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replication")


def deaths() -> list[Any]:
    """Every moment in every mode; each time every second of them in mode `zero`, and every fourth
    in the others."""
    modes = [("zero", 2), ("zero", 3), ("delayed", 2), ("local", 2)]
    return [
        pytest.param(
            *mode, moment, marks=[pytest.mark.long] if (moment + n) % (4 if n else 2) else []
        )
        for n, mode in enumerate(modes)
        for moment in range(len(MOMENTS))
    ]


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        *(("zero", m) for m in (2, *range(5, len(MOMENTS), 2))),
        *(("delayed", m) for m in range(3, len(MOMENTS), 4)),
    ],
)
def test_muons_owners_may_die_at_any_moment(
    folder: Path, mode: str, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a primary dies before it gives its result out, a backup makes the rest of the step.
    Delayed, it knows how far the parameters are ahead of the step before."""
    monkeypatch.setattr(UpdateAudits, "draws", lambda *_: False)  # else it is made anyway
    all_but_one_die(folder, mode, 2, moment, "muon")


@pytest.mark.parametrize(
    ("mode", "family", "moment"),
    [
        ("zero", "phi3", 9),
        ("delayed", "phi3", 7),
        ("zero", "qwen3_moe", 6),
        ("delayed", "minimax", 8),
    ],
)
def test_owners_of_parts_of_matrices_may_die(
    folder: Path, mode: str, family: str, moment: int
) -> None:
    all_but_one_die(folder, mode, 2, moment, family)


def test_somebody_makes_the_rest_of_a_step_whose_primary_died(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above proves nothing."""
    made: list[int] = []
    complete = ShardWork.complete

    async def counted(self: ShardWork, exchange: int, shard: int, result: Result) -> None:
        if result.rest is not None:
            made.append(shard)
        await complete(self, exchange, shard, result)

    monkeypatch.setattr(ShardWork, "complete", counted)
    monkeypatch.setattr(UpdateAudits, "draws", lambda *_: False)
    for moment in range(6, len(MOMENTS)):
        all_but_one_die(folder, "zero", 2, moment, "muon")
        if made:
            return
    raise AssertionError("nobody")


@pytest.mark.parametrize(("mode", "replication", "moment"), deaths())
def test_all_owners_but_one_may_die_at_any_moment(
    folder: Path, mode: str, replication: int, moment: int
) -> None:
    all_but_one_die(folder, mode, replication, moment)


def all_but_one_die(
    folder: Path, mode: str, replication: int, moment: int, kind: str = "adamw"
) -> None:
    """Owners of one shard; the run ends as if nobody had."""
    calm = undisturbed(folder, replication, mode, kind)
    owners = calm.owners[moment % len(calm.owners)]
    survivor = owners[-1 - moment // len(calm.owners) % replication]  # the last backup, most often
    victims = [name for name in owners if name != survivor]
    window, part = MOMENTS[moment]
    start_s, end_s = calm.windows[window]

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        await asyncio.sleep(start_s + part * (end_s - start_s))
        for name in victims:
            swarm.kill(name)
        state, found = await end_of(swarm)
        assert swarm.total("shard_reset") == 0
        assert_same_state(state, calm.state)
        for name, values in calm.parameters.items():
            assert (found[name] - values).norm() <= 1e-3 * values.norm(), name

    in_virtual_time(scenario, spec_of(folder, replication, mode, kind))


@pytest.mark.parametrize("slow_s", [0.0, 3.0, 30.0])
def test_while_a_newcomer_fetches_its_shards_there_are_as_many_holders_as_ever(
    folder: Path, slow_s: float
) -> None:
    """A newcomer counts as an owner from the next round on, and may take many rounds to fetch the
    state: until then whom it has displaced follows on. Any one of the holders may die."""
    calm = undisturbed(folder, 2)
    rounds: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        data = OneMicrobatch(open_data(swarm.spec))
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}", data=data)
        await swarm.until_round(1)
        for member in swarm.members.values():
            transport = swarm.hub.transports[member.peer_id]
            honest = handler_of(transport, "fetch_optimizer")

            async def late(request: Request, honest: Any = honest) -> Message:
                reply = await honest(request)
                await asyncio.sleep(slow_s)
                return reply

            transport.handle("fetch_optimizer", late)
        newcomer = swarm.start("newcomer", data=data)
        await swarm.until(lambda: newcomer.gossip.own.state == ACTIVE)
        rounds.append(newcomer.gossip.own.round)
        ownership = swarm.members["peer-0"].peer.exchanges.ownership
        gained = newcomer.gossip.own.peer_id
        joined = newcomer.gossip.own.round

        def is_owner() -> bool:
            r = swarm.members["peer-0"].peer.replica.round  # type: ignore[union-attr]
            return r > joined and bool(ownership.placement(r).owned_by(gained))

        await swarm.until(is_owner)
        await swarm.until_round(newcomer.gossip.own.round + 1)
        shard = ownership.placement(newcomer.gossip.own.round).owned_by(gained)[0]
        holders = [
            name
            for name, member in swarm.members.items()
            if name != gained and member.peer.gossip.own.holds_shard(shard)
        ]
        swarm.kill(holders[0])
        state, _ = await end_of(swarm)
        assert swarm.total("shard_reset") == swarm.total("shard_stale") == 0
        assert_same_state(state, calm.state)

    in_virtual_time(scenario, spec_of(folder, 2))
    assert rounds[0] < ROUNDS - 2, "the newcomer came too late to show anything"


@pytest.mark.parametrize("shard", range(3))
def test_a_result_is_given_out_when_the_backups_have_made_the_step(
    folder: Path, shard: int
) -> None:
    """The way to the backup is slow, and the primary dies as soon as anybody has its result."""
    calm = undisturbed(folder, 2)
    first, second = calm.owners[shard]

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        transport = swarm.hub.transports[second]
        honest = handler_of(transport, "mirror")

        async def late(request: Request) -> Message:
            await asyncio.sleep(1.0)
            if first not in swarm.members:
                raise ConnectionError("its sender died when half of it was here")
            return await honest(request)

        transport.handle("mirror", late)
        others = [m.peer for name, m in swarm.members.items() if name not in (first, second)]

        def has_result(peer: Any) -> bool:
            return (STRUCK, shard) in results_at(peer.exchanges) or peer.replica.round > STRUCK

        while not any(map(has_result, others)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(1e-4)
        swarm.kill(first)
        transport.handle("mirror", honest)
        state, _ = await end_of(swarm)
        assert swarm.total("shard_reset") == swarm.total("shard_stale") == 0
        assert_same_state(state, calm.state)

    in_virtual_time(scenario, spec_of(folder, 2))


SLOW = 0.01
"""Speed of the machines where a round is to take half a minute."""
REPAIRED_S = 8.0
"""After a death, until what the dead owner held is on another one."""


@pytest.mark.parametrize("mode", [pytest.param("zero", marks=pytest.mark.long), "delayed"])
def test_owners_that_die_one_after_the_other_in_one_round(folder: Path, mode: str) -> None:
    """The next in order takes a dead owner's place at once, not when the next round begins."""
    owners = undisturbed(folder, 2).owners
    shard = next(j for j, (first, _) in enumerate(owners) if first != "peer-0")
    spec = spec_of(folder, 2)
    values = spec.model_dump()
    values["sync"] |= {"mode": mode}
    values["pipeline"] |= {"global_batch": 96}
    spec = RunSpec.model_validate(values)

    async def run(swarm: Swarm, victims: tuple[str, ...]) -> tuple[State, int]:
        data = OneMicrobatch(open_data(swarm.spec))
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}", data=data, speed=SLOW)
        await swarm.until_round(STRUCK)
        for name in victims:
            await asyncio.sleep(REPAIRED_S)
            swarm.kill(name)
        struck = max(m.peer.replica.round for m in swarm.members.values() if m.peer.replica)
        state, _ = await end_of(swarm)
        assert swarm.total("shard_reset") == 0
        return state, struck

    results: list[tuple[State, int]] = []
    for victims in ((), owners[shard]):

        async def scenario(swarm: Swarm, victims: tuple[str, ...] = victims) -> None:
            results.append(await run(swarm, victims))

        in_virtual_time(scenario, spec)
    (calm, _), (found, struck) = results
    assert struck == STRUCK, "the round was over before the second owner died"
    assert_same_state(found, calm)


RESULTS_S = 30.0
"""For so long the results of all shards but one are on their way."""


def test_owners_that_die_one_after_the_other_beside_one_exchange(folder: Path) -> None:
    """The step on their shard is made, and the results of other shards are still on their way.
    (They own no other together: it would be lost with them.)"""
    owners = undisturbed(folder, 2).owners
    pairs = [frozenset(pair) for pair in owners]
    shard = next(j for j, pair in enumerate(pairs) if pairs.count(pair) == 1)
    values = spec_of(folder, 2).model_dump()
    values["sync"] |= {"mode": "delayed"}
    values["pipeline"] |= {"global_batch": 192}
    results: list[State] = []

    def make_late(exchanges: Exchanges) -> None:
        take = handler_of(exchanges.transport, "reduce")

        async def late(request: Request) -> Message:
            reply = await take(request)
            asked = convert(request.message.body, ReduceRequest)
            if asked.round == STRUCK - 1 and shard not in asked.shards:
                await asyncio.sleep(RESULTS_S)
            return reply

        exchanges.transport.handle("reduce", late)

    async def run(swarm: Swarm, victims: tuple[str, ...]) -> None:
        data = OneMicrobatch(open_data(swarm.spec))
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}", data=data, speed=SLOW)
        await swarm.until_round(STRUCK - 1)
        for member in swarm.members.values():
            make_late(member.peer.exchanges)
        await swarm.until_round(STRUCK)
        loop = asyncio.get_running_loop()
        end = loop.time() + RESULTS_S
        for name in victims:
            await asyncio.sleep(REPAIRED_S)
            swarm.kill(name)
        assert loop.time() < end
        exchanges = [m.peer.exchanges for m in swarm.members.values()]
        assert {a.current for a in exchanges} == {STRUCK - 1}
        assert not any(a.needs_nothing_of(STRUCK - 1) for a in exchanges), "the exchange is over"
        await swarm.until_round(ROUNDS, 3000.0)
        results.append({shard: state_of(swarm)[shard]})

    for victims in ((), owners[shard]):

        async def scenario(swarm: Swarm, victims: tuple[str, ...] = victims) -> None:
            await run(swarm, victims)

        in_virtual_time(scenario, RunSpec.model_validate(values))
    calm, found = results
    assert_same_state(found, calm)


def test_backups_that_nobody_knows_of_do_not_wait_for_each_other(folder: Path) -> None:
    """The only owner that said so has died, and several others follow the shard: each of them has
    what its step needs, and might wait for the gradients of the others until the deadline."""
    calm = undisturbed(folder, NUM_PEERS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        await start(swarm)
        victim = calm.owners[0][0]
        for name in set(swarm.members) - {victim}:
            peer = swarm.members[name].peer
            held = [j for j in range(len(calm.owners)) if peer.gossip.own.holds_shard(j)]
            assert 0 in held
            told = bitmap([j for j in held if j], len(calm.owners))
            peer.gossip.update(holds=told, urgent=True)
        await asyncio.sleep(0.1)
        swarm.kill(victim)
        killed_at = loop.time()
        await swarm.until_round(STRUCK + 1)
        assert loop.time() - killed_at < AT_ONCE_S
        assert_same_state((await end_of(swarm))[0], calm.state)

    in_virtual_time(scenario, spec_of(folder, NUM_PEERS))


@pytest.mark.parametrize("stop_s", [1.0, 2.5, 4.0])
def test_nobody_claims_a_shard_whose_holder_may_be_back(folder: Path, stop_s: float) -> None:
    """The only owner that said so falls silent in the exchange, with its channels open, is taken
    for dead, and goes on."""
    calm = undisturbed(folder, NUM_PEERS)

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        holder = calm.owners[0][0]
        first = swarm.members[holder].peer
        others = [m.peer for name, m in swarm.members.items() if name != holder]
        for peer in others:
            held = [j for j in range(1, len(calm.owners)) if peer.gossip.own.holds_shard(j)]
            peer.gossip.update(holds=bitmap(held, len(calm.owners)), urgent=True)
        while first.replica is None or not first.replica.closed:  # noqa: ASYNC110
            await asyncio.sleep(1e-4)  # nobody tells, and time costs nothing here
        swarm.hub.freeze(holder)
        for peer in others:
            peer.gossip.liveness.unanswered(holder, first.gossip.own.stamp)
        for _ in range(20):
            await asyncio.sleep(stop_s / 20)
            assert {p.exchanges.current for p in others} == {STRUCK}
            assert not any(p.gossip.own.holds_shard(0) for p in others)
        swarm.hub.thaw(holder)
        assert_same_state((await end_of(swarm))[0], calm.state)
        assert swarm.total("samples_lost") == swarm.total("diverged") == 0

    in_virtual_time(scenario, spec_of(folder, NUM_PEERS))


def test_who_holds_a_shard_since_the_middle_of_a_round_leads_no_update_of_it(folder: Path) -> None:
    """By the word of all, itself included; as long as another one that holds it lives."""
    calm = undisturbed(folder, NUM_PEERS)

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        first, second = calm.owners[0][:2]
        ownerships = [m.peer.exchanges.ownership for m in swarm.members.values()]

        def leaders() -> set[str]:
            return {o.roster(STRUCK, 0).ballot.primary for o in ownerships}

        assert leaders() == {first}
        bits = bitmap([0], len(calm.owners))
        swarm.members[first].peer.gossip.update(fresh=bits, urgent=True)
        await asyncio.sleep(0.1)
        assert leaders() == {second}
        await swarm.until_round(STRUCK + 1)  # in which it has held it from the beginning
        assert not swarm.members[first].peer.gossip.own.fresh
        assert_same_state((await end_of(swarm))[0], calm.state)

    in_virtual_time(scenario, spec_of(folder, NUM_PEERS))


def test_promotions_are_told(folder: Path) -> None:
    owners = undisturbed(folder, 2).owners

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        swarm.kill(owners[0][0])
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_promoted") >= 1

    in_virtual_time(scenario, spec_of(folder, 2))


def test_a_shard_that_lost_all_its_owners_begins_again_and_says_so(folder: Path) -> None:
    """Its moments start from zero, with a bias correction of their own; all else goes on."""
    calm = undisturbed(folder, 2)
    owners = calm.owners
    victims = owners[0]
    lost = {j for j, found in enumerate(owners) if set(found) <= set(victims)}

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        for name in victims:
            swarm.kill(name)
        state, found = await end_of(swarm)
        assert swarm.total("shard_reset") == len(lost)
        assert {j for j in state if state[j][0] < ROUNDS} == lost
        assert all(state[j][0] >= ROUNDS - STRUCK - 1 for j in lost)
        kept = {j: s for j, s in state.items() if j not in lost}
        for j, (steps, *_) in kept.items():
            assert steps == calm.state[j][0]
        assert all(bool(values.isfinite().all()) for values in found.values())
        states = [m.peer.gossip.own.state for m in swarm.members.values()]
        assert states == [ACTIVE] * (NUM_PEERS - len(victims))

    in_virtual_time(scenario, spec_of(folder, 2))


def test_a_backup_that_had_missed_steps_goes_on_with_what_it_has_and_says_so(
    folder: Path,
) -> None:
    """Older moments are better than none."""
    first, second = undisturbed(folder, 2).owners[0]

    async def scenario(swarm: Swarm) -> None:
        data = OneMicrobatch(open_data(swarm.spec))
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}", data=data)
        await swarm.until_round(1)

        async def refused(request: Request) -> Message:
            raise NotReady("not now")

        swarm.hub.transports[second].handle("mirror", refused)
        for member in swarm.members.values():
            swarm.hub.transports[member.peer_id].handle("fetch_optimizer", refused)
        await swarm.until_round(STRUCK)
        behind = swarm.members[second].peer
        assert not behind.gossip.own.holds_shard(0)
        for name in [n for n, m in swarm.members.items() if m.peer.gossip.own.holds_shard(0)]:
            swarm.kill(name)
        assert first not in swarm.members
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_stale") >= 1
        assert behind.gossip.own.totals.get("shard_reset", 0) == 0
        assert behind.replica is not None
        assert 0 < behind.replica.optimizer.steps(0) < ROUNDS

    in_virtual_time(scenario, spec_of(folder, 2))


def test_a_shard_that_nobody_steps_on_is_not_claimed_by_who_lacks_its_state(
    tmp_path: Path,
) -> None:
    """Its primary would be taken for a holder, and begin it anew beside those that hold it."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=400)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", stage=0)
        await swarm.until_round(3)
        exchanges = swarm.members["peer-0"].peer.exchanges
        assert exchanges is not None
        states, owned = exchanges.states, exchanges.replica.optimizer.owned()
        lacking = next(j for j in range(exchanges.replica.num_shards) if j not in owned)
        r = exchanges.current
        for j in (lacking, owned[0]):
            await exchanges.work.leave_as_it_is(r, j, 0)
            assert states.is_before(j, r + 1) is (j != lacking)

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_who_owns_nothing_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three replicas one has a link that is far worse, so that two own all shards."""
    fit = rules.fit

    def uneven(candidates: Any, *rest: Any) -> dict[str, float]:
        weights = fit(candidates, *rest)
        return {p: w if i < 2 else 1e-9 * w for i, (p, w) in enumerate(sorted(weights.items()))}

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)

    monkeypatch.setattr(rules, "fit", uneven)
    with caplog.at_level(logging.INFO, logger="swarmnet.ownership"):
        in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=1, rounds=3))
    assert sum("what it owns: 0 shards" in r.message for r in caplog.records) == 1
